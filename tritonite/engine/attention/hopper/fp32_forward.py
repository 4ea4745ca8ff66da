"""Attention's float32 forward kernel on Hopper: the algorithm of `forward`, with bf16x6 products.

A program has four warps and 64 queries, whose bfloat16 terms stay in shared memory. While a block of keys and values is
multiplied, the next block is loaded into registers.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from tritonite.engine.attention import table
from tritonite.engine.attention.arguments import forward_arguments
from tritonite.engine.attention.hopper.descriptors import ROWS, Buffers
from tritonite.engine.attention.hopper.fp32_tiles import (
    LEAST,
    load_bias_tile,
    load_keys,
    load_rows,
    locate_rows,
    serves_operands,
    store_rows,
    to_scores,
)
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.prologue import Tensors, TileSizes, head_logsumexp, head_scores, key_rows, query_rows
from tritonite.engine.attention.scores import visible_scores
from tritonite.engine.gemm.kernels.hopper_fp32 import (
    in_registers,
    shared_parts,
    start_main_product,
    start_small_products,
    store_parts,
    transposed,
    wait,
)
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@gluon.jit
def _attend_block(
    state,
    loaded,
    rows,
    inputs,
    buffers,
    strides,
    first,
    following,
    factor,
    extent,
    MASKED: gl.constexpr,
    META: gl.constexpr,
):
    """Return (accumulator, row max, row sum, next block of keys and values) after a block of keys.

    `loaded` are the block's keys and values; `first` and `following` are the first keys of it and of the next block.
    """
    acc, m_i, l_i = state
    score_layout: gl.constexpr = m_i.type.layout.parent
    acc_layout: gl.constexpr = acc.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    store_parts(buffers.k, loaded[0])
    store_parts(buffers.v, loaded[1])
    fence_async_shared()
    scores = start_small_products(buffers.q, transposed(buffers.k), score_layout)
    columns = first + gl.arange(0, META.block_n, gl.SliceLayout(0, score_layout))
    i, j = rows[:, None], columns[None, :]
    bias_tile = load_bias_tile(i, j, inputs.bias, strides.bias, extent, META)
    loaded = load_keys(inputs, strides, following, extent.keys, META)
    scores = start_main_product(buffers.q, transposed(buffers.k), warpgroup_mma_wait(0, deps=(scores,)))
    scores = to_scores(warpgroup_mma_wait(0, deps=(scores,)), bias_tile, factor)
    if MASKED:
        scores = gl.where(visible_scores(i, j, extent, META.causal), scores, float("-inf"))
    new_max = gl.maximum(m_i, gl.max(scores, 1))
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp(scores - base[:, None])
    rescale = gl.exp(m_i - base)
    weights = in_registers(p, acc_layout)
    product = start_small_products(weights, buffers.v, acc_layout)
    l_i = l_i * rescale + gl.sum(p, 1)
    acc = acc * gl.convert_layout(rescale, row_layout)[:, None]
    product = start_main_product(weights, buffers.v, warpgroup_mma_wait(0, deps=(product,)))
    return acc + wait(weights, product, 0), new_max, l_i, loaded


@libentry()
@gluon.jit(do_not_specialize=[*TileSizes._fields, "padded"])
def attend_fp32(
    tensors,
    strides,
    heads,
    batch_heads,
    group,
    blocks,
    queries,
    keys,
    diagonal,
    padded,
    scale: tl.float64,
    META: gl.constexpr,
):
    """Attend as `forward.attend` does, without dropout."""
    wait_for_previous_launch()
    BLOCK_N: gl.constexpr = META.block_n
    BLOCK_D: gl.constexpr = META.block_d
    BLOCK_V: gl.constexpr = META.block_v
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    buffers = Buffers(shared_parts(ROWS, BLOCK_D), shared_parts(BLOCK_N, BLOCK_D), shared_parts(BLOCK_N, BLOCK_V))
    sizes = TileSizes(heads, batch_heads, group, blocks, queries, keys, diagonal)
    here, extent, first, count, masked = locate_rows(sizes, tensors, META)
    query = query_rows(tensors.query, strides.query, here)
    key, value = key_rows(tensors.key, strides.key, here), key_rows(tensors.value, strides.value, here)
    bias = head_scores(tensors.bias, strides.bias, here)
    inputs = Tensors(key=key, value=value, bias=bias)
    loaded = load_keys(inputs, strides, gl.maximum(count - 1, 0) * BLOCK_N, extent.keys, META)
    q = load_rows(query, first, strides.query.row, extent.queries, ROWS, False, META)
    store_parts(buffers.q, q)
    rows = (first + gl.arange(0, ROWS, row_layout)).to(META.index)
    factor = scale.to(gl.float32)
    acc = gl.zeros((ROWS, BLOCK_V), gl.float32, acc_layout)
    m_i = gl.full((ROWS,), float("-inf"), gl.float32, row_layout)
    l_i = gl.zeros((ROWS,), gl.float32, row_layout)
    for i in range(0, masked):
        start, following = (count - 1 - i) * BLOCK_N, gl.maximum(count - 2 - i, 0) * BLOCK_N
        acc, m_i, l_i, loaded = _attend_block(
            (acc, m_i, l_i), loaded, rows, inputs, buffers, strides, start, following, factor, extent, True, META
        )
    for i in range(masked, count):
        start, following = (count - 1 - i) * BLOCK_N, gl.maximum(count - 2 - i, 0) * BLOCK_N
        acc, m_i, l_i, loaded = _attend_block(
            (acc, m_i, l_i), loaded, rows, inputs, buffers, strides, start, following, factor, extent, False, META
        )
    no_keys = l_i == 0
    l_i = gl.where(no_keys, 1.0, l_i)
    acc = acc / gl.convert_layout(l_i, gl.SliceLayout(1, acc_layout))[:, None]
    out = query_rows(tensors.out, strides.out, here)
    store_rows(out, first, strides.out.row, extent.queries, acc, META.value_size, META.index)
    if tensors.logsumexp is not None:
        found = gl.where(no_keys, float(META.empty), m_i + gl.log(l_i))
        found = gl.where(rows < extent.queries, found, float("inf"))
        logsumexp = head_logsumexp(tensors.logsumexp, strides.logsumexp, here)
        gl.store(logsumexp + rows * strides.logsumexp.row, found, mask=rows < gl.maximum(extent.queries, padded))


def serves(problem: Problem, out: torch.Tensor) -> bool:
    """Return whether the float32 forward kernel serves a problem on its device."""
    return serves_operands(problem, (out,))


def attention(problem: Problem, out: torch.Tensor, logsumexp: torch.Tensor | None, empty: str = "inf") -> None:
    """Do what `forward.attention` does, for a problem that this kernel serves."""
    programs, arguments = forward_arguments(problem, out, logsumexp, ROWS.value)
    meta = problem.meta(table.Tile(ROWS.value, table.FP32.BLOCK_N), out, empty=empty, least=LEAST)
    attend_fp32[(programs,)](**arguments, META=meta, num_warps=4, **compiler_options(True))
