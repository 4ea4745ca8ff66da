"""The warp-specialised backward pass of attention.

As in `forward`, one warp copies blocks, and groups of four warps each have 64 rows whose sums they keep in registers:
those of queries in one launch (`of_queries`), those of keys and values in another (`of_keys`). Probabilities, and the
gradients of scores, go from the registers where they are computed into the products that they are for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonite import devices
from tritonite.dispatch.call import empty, settings
from tritonite.engine.attention.hopper.descriptors import ROWS, bias_descriptor, block_sizes, descriptor, take
from tritonite.engine.attention.hopper.of_keys import add_heads, attend_to_keys_warp_specialized
from tritonite.engine.attention.hopper.of_queries import attend_to_queries_warp_specialized
from tritonite.engine.attention.hopper.tiles import GROUPS
from tritonite.engine.attention.problem import Problem
from tritonite.engine.iteration import power_of_2
from tritonite.tune import attention as table


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


def attention_backward(
    problem: Problem,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """As `backward.attention_backward`, of a problem that these kernels take."""
    block_d, block_v = block_sizes(problem)
    bias = problem.bias
    tiles = table.warp_specialized_backward(block_d, block_v, bias is not None)
    if tiles.key.apart:
        block_d = block_v = max(block_d, block_v)
    query, key, value = problem.query, problem.key, problem.value
    grad_query, grad_key, grad_value = grads
    batch, heads, queries, _ = query.shape
    # Rows of 16 bytes, as descriptors take them.
    sums = empty((batch, heads, 2, -(-queries // 4) * 4), torch.float32, query.device)
    numbers = {"queries": queries, "keys": problem.keys, "diagonal": problem.diagonal, "scale": problem.factor}
    tile = tiles.query
    BLOCK_M = GROUPS.value * ROWS.value
    blocks = -(-queries // BLOCK_M)
    facts = problem.facts(table.Tile(BLOCK_M, tile.block), grad_out, out, logsumexp, sums, *grads)
    attend_to_queries_warp_specialized[(blocks * batch * heads,)](
        descriptor(query, ROWS.value, block_d),
        descriptor(key, tile.block, block_d),
        descriptor(value, tile.block, block_v),
        descriptor(grad_out, ROWS.value, block_v),
        None if bias is None else bias_descriptor(bias, ROWS.value, tile.block),
        descriptor(grad_query, ROWS.value, block_d),
        *(out, logsumexp, sums),
        out_strides=out.stride(),
        logarithm_strides=problem.logarithm_strides(logsumexp),
        sum_strides=sums.stride(),
        heads=heads,
        batch_heads=batch * heads,
        group=problem.group,
        blocks=blocks,
        **numbers,
        FACTS=replace(facts, block_d=block_d, block_v=block_v),
        STAGES=tile.num_stages,
        V_STAGES=tile.value_stages or tile.num_stages,
        num_warps=4,
    )
    tile, shared, ratio = tiles.key, key.shape[1], problem.ratio
    BLOCK_N = ROWS.value if tile.apart else GROUPS.value * ROWS.value
    blocks = -(-problem.keys // BLOCK_N)
    facts = problem.facts(table.Tile(tile.block, BLOCK_N), grad_out, out, logsumexp, sums, *grads)
    split = not tile.apart and _splits_heads(problem, blocks * batch * shared)
    sizes = query.shape[3], value.shape[3]
    if split:
        results: Any = [empty((batch, heads, problem.keys, size), torch.float32, query.device) for size in sizes]
        shared = heads
    else:
        results = descriptor(grad_key, ROWS.value, block_d), descriptor(grad_value, ROWS.value, block_v)
    attend_to_keys_warp_specialized[(blocks * batch * shared,)](
        descriptor(query, tile.block, block_d),
        descriptor(key, ROWS.value, block_d),
        descriptor(value, ROWS.value, block_v),
        descriptor(grad_out, tile.block, block_v),
        _of_sums(sums, queries, tile.block),
        None if bias is None else bias_descriptor(bias, tile.block, ROWS.value),
        *results,
        heads=shared,
        batch_heads=batch * shared,
        group=_group_of_keys(problem) * (ratio if split else 1),
        blocks=blocks,
        **numbers,
        FACTS=replace(facts, block_d=block_d, block_v=block_v),
        APART=tile.apart,
        SPLIT=split,
        STAGES=tile.num_stages,
        num_warps=4,
    )
    if split:
        for grad, parts, size in zip((grad_key, grad_value), results, sizes, strict=True):
            columns = power_of_2(size)
            rows = 2048 // columns
            add_heads[(-(-problem.keys // rows), batch * key.shape[1])](
                *(grad, parts, grad.stride(), key.shape[1], problem.keys),
                SIZE=size,
                RATIO=ratio,
                BLOCK_N=rows,
                BLOCK_D=columns,
            )
