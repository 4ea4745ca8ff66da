"""The warp-specialised backward pass of attention: one launch for dq, another for dk and dv.

As in `forward`, a producer warp copies blocks, and consumer groups of four warps have 64 rows each, whose gradients
they accumulate in registers: rows of queries in `backward_dq`, of keys and values in `backward_dkdv`. Probabilities and
score gradients go from the registers where they are computed into the next product.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonite import devices
from tritonite.engine.attention import table
from tritonite.engine.attention.arguments import tile_sizes
from tritonite.engine.attention.hopper.backward_dkdv import DkdvMeta, add_heads, attend_backward_dkdv_warp_specialized
from tritonite.engine.attention.hopper.backward_dq import DqMeta, attend_backward_dq_warp_specialized
from tritonite.engine.attention.hopper.descriptors import (
    ROWS,
    bias_descriptor,
    block_sizes,
    descriptor,
    serves_operands,
)
from tritonite.engine.attention.hopper.tiles import GROUPS
from tritonite.engine.attention.problem import Problem
from tritonite.engine.attention.prologue import BackwardStrides, Tensors
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
    block_d, block_v = block_sizes(problem)
    tiles = table.warp_specialized_backward(block_d, block_v, problem.bias is not None)
    least = max(block_d, block_v) if tiles.key.separate else min(table.WARP_SPECIALIZED)
    tensors = Tensors(None, None, None, None, grad_out, out, logsumexp, grads[0], row_stats=row_stats)
    tensors = tensors._replace(grad_key=grads[1], grad_value=grads[2])
    _launch_dq(problem, tensors, tiles.query, least)
    _launch_dkdv(problem, tensors, tiles.key, least)


def _launch_dq(problem: Problem, tensors: Tensors, tile: table.Ring, least: int) -> None:
    bias, (batch, heads, queries, _) = problem.bias, problem.query.shape
    BLOCK_M = GROUPS.value * ROWS.value
    blocks = -(-queries // BLOCK_M)
    meta = problem.meta(table.Tile(BLOCK_M, tile.block), *tensors, least=least)
    attend_backward_dq_warp_specialized[(blocks * batch * heads,)](
        descriptor(problem.query, ROWS.value, meta.block_d),
        descriptor(problem.key, tile.block, meta.block_d),
        descriptor(problem.value, tile.block, meta.block_v),
        descriptor(tensors.grad_out, ROWS.value, meta.block_v),
        None if bias is None else bias_descriptor(bias, ROWS.value, tile.block),
        descriptor(tensors.grad_query, ROWS.value, meta.block_d),
        tensors=Tensors(out=tensors.out, logsumexp=tensors.logsumexp, row_stats=tensors.row_stats),
        strides=BackwardStrides(
            out=problem.strides(tensors.out),
            logsumexp=problem.logsumexp_strides(tensors.logsumexp),
            row_stats=problem.strides(tensors.row_stats),
        ),
        **tile_sizes(problem, heads, blocks, problem.group),
        META=DqMeta(**vars(meta), stages=tile.num_stages, value_stages=tile.value_stages or tile.num_stages),
        num_warps=4,
    )


def _launch_dkdv(problem: Problem, tensors: Tensors, tile: table.Ring, least: int) -> None:
    query, key, value, bias, ratio = problem.query, problem.key, problem.value, problem.bias, problem.ratio
    batch, heads = query.shape[0], key.shape[1]
    BLOCK_N = ROWS.value if tile.separate else GROUPS.value * ROWS.value
    blocks = -(-problem.keys // BLOCK_N)
    split = not tile.separate and _splits_heads(problem, blocks * batch * heads)
    meta = problem.meta(table.Tile(tile.block, BLOCK_N), *tensors, least=least)
    grads = tensors.grad_key, tensors.grad_value
    results: Any = [descriptor(grads[0], ROWS.value, meta.block_d), descriptor(grads[1], ROWS.value, meta.block_v)]
    if split:
        heads = query.shape[1]
        shapes = [(batch, heads, problem.keys, each.shape[3]) for each in (query, value)]
        results = [empty(shape, torch.float32, query.device) for shape in shapes]
    attend_backward_dkdv_warp_specialized[(blocks * batch * heads,)](
        descriptor(query, tile.block, meta.block_d),
        descriptor(key, ROWS.value, meta.block_d),
        descriptor(value, ROWS.value, meta.block_v),
        descriptor(tensors.grad_out, tile.block, meta.block_v),
        _row_stats_descriptor(tensors.row_stats, problem.queries, tile.block),
        None if bias is None else bias_descriptor(bias, tile.block, ROWS.value),
        *results,
        **tile_sizes(problem, heads, blocks, _group_of_keys(problem) * (ratio if split else 1)),
        META=DkdvMeta(**vars(meta), separate=tile.separate, split=split, stages=tile.num_stages),
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
