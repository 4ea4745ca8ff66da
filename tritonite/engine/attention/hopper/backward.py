"""The warp-specialised backward pass of attention: one launch for dq, another for dk and dv.

As in `forward`, a producer warp copies blocks, and consumer groups of four warps have 64 rows each, whose gradients
they accumulate in registers: rows of queries in `backward_dq`, of keys and values in `backward_dkdv`. Probabilities and
score gradients go from the registers where they are computed into the next product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonite import devices
from tritonite.engine.attention import table
from tritonite.engine.attention.arguments import tile_sizes
from tritonite.engine.attention.hopper.backward_dkdv import (
    DkdvMeta,
    add_heads,
    attend_backward_dkdv_warp_specialized,
)
from tritonite.engine.attention.hopper.backward_dq import (
    DqMeta,
    RowStrides,
    RowTensors,
    attend_backward_dq_warp_specialized,
)
from tritonite.engine.attention.hopper.descriptors import (
    ROWS,
    bias_descriptor,
    block_sizes,
    descriptor,
    serves_operands,
)
from tritonite.engine.attention.hopper.tiles import GROUPS
from tritonite.engine.attention.problem import Problem
from tritonite.engine.attention.prologue import HeadStrides
from tritonite.engine.iteration import power_of_2
from tritonite.runtime.contract import empty, settings

# Elements of a program of add_heads.
_ADDED = 2048


def serves(problem: Problem, grad_out: torch.Tensor, grads: tuple[torch.Tensor, ...]) -> bool:
    """Return whether the warp-specialised backward kernels serve a problem on its device."""
    sizes = block_sizes(problem)
    return serves_operands(problem, (problem.query, problem.key, problem.value, grad_out, *grads)) and (
        problem.bias is None or max(sizes) in table.WARP_SPECIALIZED_BACKWARD_WITH_BIAS
    )


def _row_stats_descriptor(row_stats: torch.Tensor, queries: int, rows: int) -> TensorDescriptor:
    """Return a descriptor of blocks of one value for each of `rows` queries."""
    layout = gl.NVMMASharedLayout(0, 32, 4)
    return TensorDescriptor(
        row_stats, [*row_stats.shape[:3], queries], list(row_stats.stride()), [1, 1, 1, rows], layout
    )


def _group_of_keys(problem: Problem) -> int:
    """Return the key heads that programs take together: for causal attention those whose queries fit in L2."""
    if not problem.causal:
        return 1
    size = problem.queries * (problem.query.shape[3] + problem.value.shape[3]) * problem.query.dtype.itemsize
    return max(1, table.CACHED // (size * problem.ratio))


def _splits_heads(problem: Problem, programs: int) -> bool:
    """Return whether each query head has programs of its own, because `programs` would leave half the device idle."""
    few = 2 * programs <= devices.multiprocessors(problem.query.device)
    return problem.ratio > 1 and few and not settings().invariant


class _Pass(NamedTuple):
    """A backward pass: `sizes` are (block_d, block_v), `row_stats` what the dq launch leaves for the other."""

    problem: Problem
    sizes: tuple[int, int]
    grad_out: torch.Tensor
    out: torch.Tensor
    logsumexp: torch.Tensor
    row_stats: torch.Tensor
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def meta(self, queries: int, keys: int) -> dict[str, Any]:
        """Return the fields of `AttentionMeta` for tiles of `queries` and `keys`."""
        tensors = self.grad_out, self.out, self.logsumexp, self.row_stats, *self.grads
        block_d, block_v = self.sizes
        fields = vars(self.problem.meta(table.Tile(queries, keys), *tensors))
        return fields | {"block_d": block_d, "block_v": block_v}


def attention_backward(
    problem: Problem,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Do what `backward.attention_backward` does, for a problem that these kernels serve."""
    batch, heads, queries, _ = problem.query.shape
    # Rows of a multiple of 16 bytes, which TMA needs.
    kinds = 2 if problem.bias is None else 3
    row_stats = empty((batch, heads, kinds, -(-queries // 4) * 4), torch.float32, problem.query.device)
    sizes = block_sizes(problem)
    tiles = table.warp_specialized_backward(*sizes, problem.bias is not None)
    sizes = (max(sizes), max(sizes)) if tiles.key.separate else sizes
    work = _Pass(problem, sizes, grad_out, out, logsumexp, row_stats, grads)
    _launch_dq(work, tiles.query)
    _launch_dkdv(work, tiles.key)


def _launch_dq(work: _Pass, tile: table.Ring) -> None:
    problem, (block_d, block_v) = work.problem, work.sizes
    strides = work.out.stride(), problem.logsumexp_strides(work.logsumexp), work.row_stats.stride()
    bias, (batch, heads, queries, _) = problem.bias, problem.query.shape
    BLOCK_M = GROUPS.value * ROWS.value
    blocks = -(-queries // BLOCK_M)
    attend_backward_dq_warp_specialized[(blocks * batch * heads,)](
        descriptor(problem.query, ROWS.value, block_d),
        descriptor(problem.key, tile.block, block_d),
        descriptor(problem.value, tile.block, block_v),
        descriptor(work.grad_out, ROWS.value, block_v),
        None if bias is None else bias_descriptor(bias, ROWS.value, tile.block),
        descriptor(work.grads[0], ROWS.value, block_d),
        tensors=RowTensors(work.out, work.logsumexp, work.row_stats),
        strides=RowStrides(*[HeadStrides(*each) for each in strides]),
        **tile_sizes(problem, heads, blocks, problem.group),
        META=DqMeta(
            **work.meta(BLOCK_M, tile.block),
            stages=tile.num_stages,
            value_stages=tile.value_stages or tile.num_stages,
        ),
        num_warps=4,
    )


def _launch_dkdv(work: _Pass, tile: table.Ring) -> None:
    problem, (block_d, block_v), grads = work.problem, work.sizes, work.grads[1:]
    query, key, value, bias, ratio = problem.query, problem.key, problem.value, problem.bias, problem.ratio
    batch, heads = query.shape[0], key.shape[1]
    BLOCK_N = ROWS.value if tile.separate else GROUPS.value * ROWS.value
    blocks = -(-problem.keys // BLOCK_N)
    split = not tile.separate and _splits_heads(problem, blocks * batch * heads)
    results: Any = [descriptor(grad, ROWS.value, block) for grad, block in zip(grads, work.sizes, strict=True)]
    if split:
        heads = query.shape[1]
        shapes = [(batch, heads, problem.keys, each.shape[3]) for each in (query, value)]
        results = [empty(shape, torch.float32, query.device) for shape in shapes]
    attend_backward_dkdv_warp_specialized[(blocks * batch * heads,)](
        descriptor(query, tile.block, block_d),
        descriptor(key, ROWS.value, block_d),
        descriptor(value, ROWS.value, block_v),
        descriptor(work.grad_out, tile.block, block_v),
        _row_stats_descriptor(work.row_stats, problem.queries, tile.block),
        None if bias is None else bias_descriptor(bias, tile.block, ROWS.value),
        *results,
        **tile_sizes(problem, heads, blocks, _group_of_keys(problem) * (ratio if split else 1)),
        META=DkdvMeta(
            **work.meta(tile.block, BLOCK_N),
            separate=tile.separate,
            split=split,
            stages=tile.num_stages,
        ),
        num_warps=4,
    )
    for grad, partial in zip(grads, results if split else (), strict=False):
        size = partial.shape[3]
        columns = power_of_2(size)
        rows = _ADDED // columns
        add_heads[(-(-problem.keys // rows), batch * key.shape[1])](
            *(grad, partial, grad.stride(), key.shape[1], problem.keys),
            SIZE=size,
            RATIO=ratio,
            BLOCK_N=rows,
            BLOCK_D=columns,
        )
