"""The warp-specialised backward pass of attention.

As in `forward`, one warp copies blocks, and groups of four warps each have 64 rows whose sums they keep in registers:
those of queries in one launch (`of_queries`), those of keys and values in another (`of_keys`). Probabilities, and the
gradients of scores, go from the registers where they are computed into the products that they are for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonite import devices
from tritonite.engine.attention import table as table
from tritonite.engine.attention.hopper.backward_dkdv import add_heads, attend_to_keys_warp_specialized
from tritonite.engine.attention.hopper.backward_dq import attend_to_queries_warp_specialized
from tritonite.engine.attention.hopper.descriptors import ROWS, bias_descriptor, block_sizes, descriptor, take
from tritonite.engine.attention.hopper.tiles import GROUPS
from tritonite.engine.attention.problem import Facts, Problem
from tritonite.engine.iteration import power_of_2
from tritonite.runtime.contract import empty, settings

# How many elements a program adds up that heads of queries have left.
_ADDED = 2048


def takes(problem: Problem, grad_out: torch.Tensor, grads: tuple[torch.Tensor, ...]) -> bool:
    """Whether these are the kernels for a problem, on a device that has what they need."""
    sizes = block_sizes(problem)
    return take(problem, (problem.query, problem.key, problem.value, grad_out, *grads)) and (
        problem.bias is None or max(sizes) in table.WARP_SPECIALIZED_BACKWARD_WITH_BIAS
    )


def _of_sums(sums: torch.Tensor, queries: int, rows: int) -> TensorDescriptor:
    """Of blocks of one number for each of so many rows."""
    layout = gl.NVMMASharedLayout(0, 32, 4)
    return TensorDescriptor(sums, [*sums.shape[:3], queries], list(sums.stride()), [1, 1, 1, rows], layout)


def _group_of_keys(problem: Problem) -> int:
    """How many heads of keys are begun together: of causal attention as many as share a cache with their queries."""
    if not problem.causal:
        return 1
    size = problem.queries * (problem.query.shape[3] + problem.value.shape[3]) * problem.query.dtype.itemsize
    return max(1, table.CACHED // (size * problem.ratio))


def _splits_heads(problem: Problem, programs: int) -> bool:
    """Whether a program has one head of queries, not all that share keys: so few programs leave half a device idle."""
    few = 2 * programs <= devices.multiprocessors(problem.query.device)
    return problem.ratio > 1 and few and not settings().invariant


class _Pass(NamedTuple):
    """A backward pass: `sizes` are blocks' of heads and of values, `sums` what the first launch leaves of rows."""

    problem: Problem
    sizes: tuple[int, int]
    grad_out: torch.Tensor
    out: torch.Tensor
    logsumexp: torch.Tensor
    sums: torch.Tensor
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def facts(self, queries: int, keys: int) -> Facts:
        """What a kernel is compiled for that takes so many at a time."""
        tensors = self.grad_out, self.out, self.logsumexp, self.sums, *self.grads
        block_d, block_v = self.sizes
        return replace(self.problem.facts(table.Tile(queries, keys), *tensors), block_d=block_d, block_v=block_v)

    @property
    def numbers(self) -> dict[str, Any]:
        problem = self.problem
        names = {"queries": problem.queries, "keys": problem.keys, "diagonal": problem.diagonal}
        return names | {"scale": problem.factor, "num_warps": 4}


def attention_backward(
    problem: Problem,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """As `backward.attention_backward`, of a problem that these kernels take."""
    batch, heads, queries, _ = problem.query.shape
    # Rows of 16 bytes, as descriptors take them.
    kinds = 2 if problem.bias is None else 3
    sums = empty((batch, heads, kinds, -(-queries // 4) * 4), torch.float32, problem.query.device)
    sizes = block_sizes(problem)
    tiles = table.warp_specialized_backward(*sizes, problem.bias is not None)
    sizes = (max(sizes), max(sizes)) if tiles.key.apart else sizes
    work = _Pass(problem, sizes, grad_out, out, logsumexp, sums, grads)
    _gradient_of_queries(work, tiles.query)
    _gradients_of_keys(work, tiles.key)


def _gradient_of_queries(work: _Pass, tile: table.Ring) -> None:
    """The first launch, which leaves sums of rows for the second."""
    problem, (block_d, block_v), out, logsumexp, sums = work.problem, work.sizes, work.out, work.logsumexp, work.sums
    bias, (batch, heads, queries, _) = problem.bias, problem.query.shape
    BLOCK_M = GROUPS.value * ROWS.value
    blocks = -(-queries // BLOCK_M)
    attend_to_queries_warp_specialized[(blocks * batch * heads,)](
        descriptor(problem.query, ROWS.value, block_d),
        descriptor(problem.key, tile.block, block_d),
        descriptor(problem.value, tile.block, block_v),
        descriptor(work.grad_out, ROWS.value, block_v),
        None if bias is None else bias_descriptor(bias, ROWS.value, tile.block),
        descriptor(work.grads[0], ROWS.value, block_d),
        *(out, logsumexp, sums),
        out_strides=out.stride(),
        logarithm_strides=problem.logarithm_strides(logsumexp),
        sum_strides=sums.stride(),
        heads=heads,
        batch_heads=batch * heads,
        group=problem.group,
        blocks=blocks,
        FACTS=work.facts(BLOCK_M, tile.block),
        STAGES=tile.num_stages,
        V_STAGES=tile.value_stages or tile.num_stages,
        **work.numbers,
    )


def _gradients_of_keys(work: _Pass, tile: table.Ring) -> None:
    """The second launch, and where heads of queries are split those that add up what each of them has left."""
    problem, (block_d, block_v), grads = work.problem, work.sizes, work.grads[1:]
    query, key, value, bias, ratio = problem.query, problem.key, problem.value, problem.bias, problem.ratio
    # Those of keys, or where they are split, of queries.
    batch, heads = query.shape[0], key.shape[1]
    BLOCK_N = ROWS.value if tile.apart else GROUPS.value * ROWS.value
    blocks = -(-problem.keys // BLOCK_N)
    split = not tile.apart and _splits_heads(problem, blocks * batch * heads)
    results: Any = [descriptor(grad, ROWS.value, block) for grad, block in zip(grads, work.sizes, strict=True)]
    if split:
        heads = query.shape[1]
        shapes = [(batch, heads, problem.keys, each.shape[3]) for each in (query, value)]
        results = [empty(shape, torch.float32, query.device) for shape in shapes]
    attend_to_keys_warp_specialized[(blocks * batch * heads,)](
        descriptor(query, tile.block, block_d),
        descriptor(key, ROWS.value, block_d),
        descriptor(value, ROWS.value, block_v),
        descriptor(work.grad_out, tile.block, block_v),
        _of_sums(work.sums, problem.queries, tile.block),
        None if bias is None else bias_descriptor(bias, tile.block, ROWS.value),
        *results,
        heads=heads,
        batch_heads=batch * heads,
        group=_group_of_keys(problem) * (ratio if split else 1),
        blocks=blocks,
        FACTS=work.facts(tile.block, BLOCK_N),
        APART=tile.apart,
        SPLIT=split,
        STAGES=tile.num_stages,
        **work.numbers,
    )
    for grad, parts in zip(grads, results if split else (), strict=False):
        size = parts.shape[3]
        columns = power_of_2(size)
        rows = _ADDED // columns
        add_heads[(-(-problem.keys // rows), batch * key.shape[1])](
            *(grad, parts, grad.stride(), key.shape[1], problem.keys),
            SIZE=size,
            RATIO=ratio,
            BLOCK_N=rows,
            BLOCK_D=columns,
        )
