"""Attention's float32 backward kernels on Hopper: the algorithms of `backward`, with overlapping bf16x6 products.

A program has four warps and 64 rows, of queries in one launch and of keys in another, whose bfloat16 terms stay in
shared memory. While a block of the other operands is multiplied, the next block is loaded into registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from tritonite import devices
from tritonite.engine.attention import table
from tritonite.engine.attention.arguments import backward_arguments, tile_sizes
from tritonite.engine.attention.hopper.backward_dkdv import key_tile, query_block_start
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
    zero_hidden,
)
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.prologue import (
    Head,
    Tensors,
    TileSizes,
    head_logsumexp,
    head_row_values,
    head_scores,
    key_rows,
    program_tile,
    query_rows,
    sequence_extent,
)
from tritonite.engine.attention.scores import (
    is_rounded,
    load_logsumexp,
    logsumexp_excess,
    probabilities_in_nats,
    store_scores,
)
from tritonite.engine.gemm.kernels.hopper_fp32 import (
    SMALL_PRODUCTS,
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


class QueryRows(NamedTuple):
    """A program's queries: their indices, logsumexp, delta, and excess or None without an additive bias."""

    rows: Any
    logsumexp: Any
    delta: Any
    excess: Any


@gluon.jit
def _probabilities(scores, logsumexp, excess):
    """Return the probabilities of scores in nats; `excess` is None without an additive bias."""
    if excess is None:
        result = gl.exp(scores - logsumexp)
    else:
        result = probabilities_in_nats(scores, logsumexp, excess, True)
    return result


@gluon.jit
def _excess(rows, logsumexp, pointers, buffers, strides, count, factor, extent, META: gl.constexpr):
    """Return rows' `logsumexp_excess`, from another pass over the `count` blocks of keys if any row needs one."""
    row_layout: gl.constexpr = logsumexp.type.layout
    score_layout: gl.constexpr = row_layout.parent
    excess = gl.zeros((ROWS,), gl.float32, row_layout)
    if gl.max(is_rounded(logsumexp).to(gl.int32), 0) > 0:
        sums = gl.zeros((ROWS,), gl.float32, row_layout)
        for i in range(0, count):
            first = i * META.block_n
            k = load_rows(pointers.key, first, strides.key.row, extent.keys, META.block_n, False, META)
            store_parts(buffers.k, k)
            fence_async_shared()
            scores = start_small_products(buffers.q, transposed(buffers.k), score_layout)
            columns = first + gl.arange(0, META.block_n, gl.SliceLayout(0, score_layout))
            rows_i, columns_j = rows[:, None], columns[None, :]
            bias_tile = load_bias_tile(rows_i, columns_j, pointers.bias, strides.bias, extent, META)
            scores = start_main_product(buffers.q, transposed(buffers.k), warpgroup_mma_wait(0, deps=(scores,)))
            scores = to_scores(warpgroup_mma_wait(0, deps=(scores,)), bias_tile, factor)
            p = probabilities_in_nats(scores, logsumexp[:, None], excess[:, None], True)
            sums += gl.sum(zero_hidden(p, rows_i, columns_j, extent, True, META), 1)
        excess = logsumexp_excess(sums, logsumexp, True)
    return excess


@gluon.jit
def _add_key_block(
    state, own, pointers, buffers, strides, block, factor, extent, MASKED: gl.constexpr, META: gl.constexpr
):
    """Return (dq, keys and values of the block before) after a block of keys; `state` has dq and its keys and values.

    The gradient of its scores is stored where the bias's is asked for. `own` are the program's `QueryRows`.
    """
    dq, loaded = state
    first, following = block * META.block_n, gl.maximum(block - 1, 0) * META.block_n
    excess = own.excess
    if excess is not None:
        excess = excess[:, None]
    score_layout: gl.constexpr = own.logsumexp.type.layout.parent
    dq_layout: gl.constexpr = dq.type.layout
    store_parts(buffers.k, loaded[0])
    store_parts(buffers.v, loaded[1])
    fence_async_shared()
    scores = start_small_products(buffers.q, transposed(buffers.k), score_layout)
    dp = start_small_products(buffers.grad, transposed(buffers.v), score_layout)
    columns = first + gl.arange(0, META.block_n, gl.SliceLayout(0, score_layout))
    i, j = own.rows[:, None], columns[None, :]
    bias_tile = load_bias_tile(i, j, pointers.bias, strides.bias, extent, META)
    loaded = load_keys(pointers, strides, following, extent.keys, META)
    scores = start_main_product(buffers.q, transposed(buffers.k), warpgroup_mma_wait(SMALL_PRODUCTS, deps=(scores,)))
    dp = start_main_product(buffers.grad, transposed(buffers.v), warpgroup_mma_wait(1, deps=(dp,)))
    scores = to_scores(warpgroup_mma_wait(1, deps=(scores,)), bias_tile, factor)
    p = _probabilities(scores, own.logsumexp[:, None], excess)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = zero_hidden(p * (dp - own.delta[:, None]), i, j, extent, MASKED, META)
    if pointers.grad_bias is not None:
        store_scores(pointers.grad_bias, ds, strides.grad_bias, own.rows, columns, extent)
    operand = in_registers(ds, dq_layout)
    product = start_small_products(operand, buffers.k, dq_layout)
    product = start_main_product(operand, buffers.k, warpgroup_mma_wait(0, deps=(product,)))
    return dq + wait(operand, product, 0), loaded


@libentry()
@gluon.jit(do_not_specialize=TileSizes._fields)
def attend_backward_dq_fp32(
    tensors, strides, heads, batch_heads, group, blocks, queries, keys, diagonal, scale: tl.float64, META: gl.constexpr
):
    """Compute dq as `backward.attend_backward_dq` does, without dropout."""
    wait_for_previous_launch()
    BLOCK_D: gl.constexpr = META.block_d
    BLOCK_V: gl.constexpr = META.block_v
    BLOCK_N: gl.constexpr = META.block_n
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    qs, grads = shared_parts(ROWS, BLOCK_D), shared_parts(ROWS, BLOCK_V)
    buffers = Buffers(qs, shared_parts(BLOCK_N, BLOCK_D), shared_parts(BLOCK_N, BLOCK_V), grads)
    sizes = TileSizes(heads, batch_heads, group, blocks, queries, keys, diagonal)
    here, extent, first, count, masked = locate_rows(sizes, tensors, META)
    pointers = Tensors(
        query=query_rows(tensors.query, strides.query, here),
        key=key_rows(tensors.key, strides.key, here),
        value=key_rows(tensors.value, strides.value, here),
        bias=head_scores(tensors.bias, strides.bias, here),
        grad_out=query_rows(tensors.grad_out, strides.grad_out, here),
        out=query_rows(tensors.out, strides.out, here),
        logsumexp=head_logsumexp(tensors.logsumexp, strides.logsumexp, here),
        grad_query=query_rows(tensors.grad_query, strides.grad_query, here),
        grad_bias=head_scores(tensors.grad_bias, strides.grad_bias, here),
        delta=head_row_values(tensors.delta, strides.delta, here),
        excesses=head_row_values(tensors.excesses, strides.delta, here),
    )
    loaded = load_keys(pointers, strides, gl.maximum(count - 1, 0) * BLOCK_N, extent.keys, META)
    q = load_rows(pointers.query, first, strides.query.row, extent.queries, ROWS, False, META)
    store_parts(buffers.q, q)
    grad = load_rows(pointers.grad_out, first, strides.grad_out.row, extent.queries, ROWS, True, META)
    result = load_rows(pointers.out, first, strides.out.row, extent.queries, ROWS, True, META)
    store_parts(buffers.grad, grad)
    row_delta = gl.convert_layout(gl.sum(grad * result, 1), row_layout)
    rows = (first + gl.arange(0, ROWS, row_layout)).to(META.index)
    gl.store(pointers.delta + rows, row_delta, mask=rows < extent.queries)
    row_logsumexp = load_logsumexp(pointers.logsumexp, rows, strides.logsumexp.row, extent.queries, True)
    factor = scale.to(gl.float32)
    excess = None
    if pointers.excesses is not None:
        excess = _excess(rows, row_logsumexp, pointers, buffers, strides, count, factor, extent, META)
        gl.store(pointers.excesses + rows, excess, mask=rows < extent.queries)
    own = QueryRows(rows, row_logsumexp, row_delta, excess)
    dq = gl.zeros((ROWS, BLOCK_D), gl.float32, dq_layout)
    state = dq, loaded
    for i in range(0, masked):
        state = _add_key_block(state, own, pointers, buffers, strides, count - 1 - i, factor, extent, True, META)
    for i in range(masked, count):
        state = _add_key_block(state, own, pointers, buffers, strides, count - 1 - i, factor, extent, False, META)
    dq, _loaded = state
    if pointers.grad_bias is not None:
        zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, score_layout)
        for start in range(count * BLOCK_N, extent.keys, BLOCK_N):
            columns = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_layout))
            store_scores(pointers.grad_bias, zeros, strides.grad_bias, rows, columns, extent)
    store_rows(
        pointers.grad_query, first, strides.grad_query.row, extent.queries, dq * factor, META.head_size, META.index
    )


@gluon.jit
def _load_queries(pointers, strides, first, queries, META: gl.constexpr):
    """Load a block of queries and of gradients of out."""
    q = load_rows(pointers.query, first, strides.query.row, queries, META.block_m, False, META)
    return q, load_rows(pointers.grad_out, first, strides.grad_out.row, queries, META.block_m, True, META)


@gluon.jit
def _add_query_block(
    state, columns, pointers, buffers, strides, i, order, factor, extent, MASKED: gl.constexpr, META: gl.constexpr
):
    """Return (dk, dv, next block of queries and gradients of out) after the i-th block of queries.

    Tiles of scores have a row for each key. `state` has the values before it, and its own
    queries. `columns` are the program's key indices, `order` is (first block of queries, number of blocks).
    """
    dk, dv, loaded = state
    first = query_block_start(i, order[0], order[1], extent.queries, META.block_m)
    following = query_block_start(i + 1, order[0], order[1], extent.queries, META.block_m)
    score_layout: gl.constexpr = columns.type.layout.parent
    dk_layout: gl.constexpr = dk.type.layout
    dv_layout: gl.constexpr = dv.type.layout
    store_parts(buffers.q, loaded[0])
    store_parts(buffers.grad, loaded[1])
    fence_async_shared()
    scores = start_small_products(buffers.k, transposed(buffers.q), score_layout)
    dp = start_small_products(buffers.v, transposed(buffers.grad), score_layout)
    rows = (first + gl.arange(0, META.block_m, gl.SliceLayout(0, score_layout))).to(META.index)
    rows_i, columns_j = rows[None, :], columns[:, None]
    bias_tile = load_bias_tile(rows_i, columns_j, pointers.bias, strides.bias, extent, META)
    logsumexp = load_logsumexp(pointers.logsumexp, rows, strides.logsumexp.row, extent.queries, True)
    delta = gl.load(pointers.delta + rows, mask=rows < extent.queries, other=0.0)
    excess = None
    if pointers.excesses is not None:
        excess = gl.load(pointers.excesses + rows, mask=rows < extent.queries, other=0.0)[None, :]
    loaded = _load_queries(pointers, strides, following, extent.queries, META)
    scores = start_main_product(buffers.k, transposed(buffers.q), warpgroup_mma_wait(SMALL_PRODUCTS, deps=(scores,)))
    dp = start_main_product(buffers.v, transposed(buffers.grad), warpgroup_mma_wait(1, deps=(dp,)))
    scores = to_scores(warpgroup_mma_wait(1, deps=(scores,)), bias_tile, factor)
    p = zero_hidden(_probabilities(scores, logsumexp[None, :], excess), rows_i, columns_j, extent, MASKED, META)
    weights = in_registers(p, dv_layout)
    product = start_small_products(weights, buffers.grad, dv_layout)
    dp = warpgroup_mma_wait(SMALL_PRODUCTS, deps=(dp,))
    ds = zero_hidden(p * (dp - delta[None, :]), rows_i, columns_j, extent, MASKED, META)
    product = start_main_product(weights, buffers.grad, warpgroup_mma_wait(0, deps=(product,)))
    operand = in_registers(ds, dk_layout)
    dv += wait(weights, product, 0)
    product = start_small_products(operand, buffers.q, dk_layout)
    product = start_main_product(operand, buffers.q, warpgroup_mma_wait(0, deps=(product,)))
    dk += wait(operand, product, 0)
    return dk, dv, loaded


@libentry()
@gluon.jit(do_not_specialize=TileSizes._fields)
def attend_backward_dkdv_fp32(
    tensors, strides, heads, batch_heads, group, blocks, queries, keys, diagonal, scale: tl.float64, META: gl.constexpr
):
    """Compute dk and dv as `backward.attend_backward_dkdv` does, without dropout; `heads` counts key heads."""
    wait_for_previous_launch()
    BLOCK_D: gl.constexpr = META.block_d
    BLOCK_V: gl.constexpr = META.block_v
    BLOCK_M: gl.constexpr = META.block_m
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    ks, vs = shared_parts(ROWS, BLOCK_D), shared_parts(ROWS, BLOCK_V)
    buffers = Buffers(shared_parts(BLOCK_M, BLOCK_D), ks, vs, shared_parts(BLOCK_M, BLOCK_V))
    block, batch, kv_head = program_tile(gl.program_id(0), blocks, heads, batch_heads, group)
    extent, first_query, first_key = sequence_extent(tensors, batch, queries, keys, diagonal, META)
    row, first, count, masked = key_tile(block, blocks, extent, ROWS, META)
    # This sequence may be shorter than the longest and have no such keys.
    count = gl.where(row < extent.keys, count, 0)
    masked = gl.minimum(masked, count)
    here = Head(block, batch, kv_head, kv_head, first_query, first_key)
    key, value = key_rows(tensors.key, strides.key, here), key_rows(tensors.value, strides.value, here)
    grad_key = key_rows(tensors.grad_key, strides.grad_key, here)
    grad_value = key_rows(tensors.grad_value, strides.grad_value, here)
    k = load_rows(key, row, strides.key.row, extent.keys, ROWS, False, META)
    store_parts(buffers.k, k)
    v = load_rows(value, row, strides.value.row, extent.keys, ROWS, True, META)
    store_parts(buffers.v, v)
    factor = scale.to(gl.float32)
    dk = gl.zeros((ROWS, BLOCK_D), gl.float32, dk_layout)
    dv = gl.zeros((ROWS, BLOCK_V), gl.float32, dv_layout)
    columns = (row + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))).to(META.index)
    order = first, count
    for member in range(META.ratio):
        here = Head(block, batch, kv_head * META.ratio + member, kv_head, first_query, first_key)
        pointers = Tensors(
            query=query_rows(tensors.query, strides.query, here),
            bias=head_scores(tensors.bias, strides.bias, here),
            grad_out=query_rows(tensors.grad_out, strides.grad_out, here),
            logsumexp=head_logsumexp(tensors.logsumexp, strides.logsumexp, here),
            delta=head_row_values(tensors.delta, strides.delta, here),
            excesses=head_row_values(tensors.excesses, strides.delta, here),
        )
        # Programs without blocks have no first one, whose index would be negative.
        start = gl.maximum(query_block_start(0, first, count, extent.queries, BLOCK_M), 0)
        loaded = _load_queries(pointers, strides, start, extent.queries, META)
        state = dk, dv, loaded
        for i in range(0, masked):
            state = _add_query_block(state, columns, pointers, buffers, strides, i, order, factor, extent, True, META)
        for i in range(masked, count):
            state = _add_query_block(state, columns, pointers, buffers, strides, i, order, factor, extent, False, META)
        dk, dv, _loaded = state
    store_rows(grad_key, row, strides.grad_key.row, extent.keys, dk * factor, META.head_size, META.index)
    store_rows(grad_value, row, strides.grad_value.row, extent.keys, dv, META.value_size, META.index)


def serves(problem: Problem, grad_out: torch.Tensor, grads: tuple[torch.Tensor, ...]) -> bool:
    """Return whether the float32 backward kernels serve a problem on its device."""
    return serves_operands(problem, (grad_out, *grads))


def attention_backward(
    problem: Problem,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_bias: torch.Tensor | None = None,
) -> None:
    """Do what `backward.attention_backward` does, for a problem that these kernels serve."""
    tensors = grad_out, out, logsumexp, *grads, grad_bias
    dq, dkdv = backward_arguments(problem, grad_out, out, logsumexp, grads, grad_bias)
    options: dict[str, Any] = {"num_warps": 4} | compiler_options(True)
    heads, blocks = problem.query.shape[1], -(-problem.queries // ROWS.value)
    attend_backward_dq_fp32[(blocks * problem.batch * heads,)](
        **(dq | tile_sizes(problem, heads, blocks, problem.group) | options),
        META=problem.meta(table.Tile(ROWS.value, table.FP32.BLOCK_N), *tensors, least=LEAST),
        # The branch in `_excess` would cost the registers of a third program.
        maxnreg=table.CAPPED_REGISTERS if problem.adds and grad_bias is None else None,
    )
    heads, blocks = problem.key.shape[1], -(-problem.keys // ROWS.value)
    programs = blocks * problem.batch * heads
    if not problem.causal:
        capped = table.registers_for_keys(programs, devices.multiprocessors(problem.query.device))
        options |= {} if capped is None else {"maxnreg": capped}
    attend_backward_dkdv_fp32[(programs,)](
        **(dkdv | tile_sizes(problem, heads, blocks, 1) | options),
        META=problem.meta(table.Tile(table.FP32.BLOCK_M, ROWS.value), *tensors, least=LEAST),
    )
