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
from tritonite.engine.attention.hopper.backward_dkdv import key_tile, query_block_start
from tritonite.engine.attention.hopper.descriptors import ROWS
from tritonite.engine.attention.hopper.fp32_tiles import (
    kernel_meta,
    load_bias_tile,
    load_keys,
    load_rows,
    query_tile_of_sequence,
    serves_operands,
    store_rows,
    to_scores,
    zero_hidden,
)
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.prologue import (
    DkdvStrides,
    DqStrides,
    Extent,
    HeadStrides,
    TileSizes,
    head_logsumexp,
    head_row_values,
    head_rows,
    head_scores,
    program_tile,
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
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry


class QueryRows(NamedTuple):
    """A program's queries: their indices, logsumexp, delta, and excess or None without an additive bias."""

    rows: Any
    logsumexp: Any
    delta: Any
    excess: Any


class DqPointers(NamedTuple):
    """Pointers to a head's keys, values, bias and gradient of the bias."""

    key: Any
    value: Any
    bias: Any
    grad_bias: Any


class DkdvPointers(NamedTuple):
    """Pointers to a query head's rows; excesses is None without an additive bias."""

    query: Any
    grad_out: Any
    logsumexp: Any
    delta: Any
    excesses: Any
    bias: Any
    bias_offset: Any


class BackwardBuffers(NamedTuple):
    """bfloat16 terms in shared memory of queries, gradients of out, keys and values."""

    q: Any
    grad: Any
    k: Any
    v: Any


@gluon.jit
def _probabilities(scores, logsumexp, excess):
    """Return the probabilities of scores in nats; `excess` is None without an additive bias."""
    if excess is None:
        result = gl.exp(scores - logsumexp)
    else:
        result = probabilities_in_nats(scores, logsumexp, excess, True)
    return result


@gluon.jit
def _excess(rows, logsumexp, key, bias, buffers, strides, count, factor, extent, META: gl.constexpr):
    """Return rows' `logsumexp_excess`, from another pass over the `count` blocks of keys if any row needs one."""
    row_layout: gl.constexpr = logsumexp.type.layout
    score_layout: gl.constexpr = row_layout.parent
    excess = gl.zeros((ROWS,), gl.float32, row_layout)
    if gl.max(is_rounded(logsumexp).to(gl.int32), 0) > 0:
        sums = gl.zeros((ROWS,), gl.float32, row_layout)
        for i in range(0, count):
            first = i * META.block_n
            k = load_rows(
                key, first, strides.key.row, extent.keys, META.head_size, META.block_n, META.block_d, META.index
            )
            store_parts(buffers.k, k)
            fence_async_shared()
            scores = start_small_products(buffers.q, transposed(buffers.k), score_layout)
            columns = first + gl.arange(0, META.block_n, gl.SliceLayout(0, score_layout))
            rows_i, columns_j = rows[:, None], columns[None, :]
            bias_tile = load_bias_tile(rows_i, columns_j, bias, strides.bias, extent, META)
            scores = start_main_product(buffers.q, transposed(buffers.k), warpgroup_mma_wait(0, deps=(scores,)))
            scores = to_scores(warpgroup_mma_wait(0, deps=(scores,)), bias_tile, factor)
            p = probabilities_in_nats(scores, logsumexp[:, None], excess[:, None], True)
            sums += gl.sum(zero_hidden(p, rows_i, columns_j, extent, True, META), 1)
        excess = logsumexp_excess(sums, logsumexp, True)
    return excess


@gluon.jit
def _add_key_block(
    dq,
    loaded,
    own,
    pointers,
    buffers,
    strides,
    first,
    following,
    factor,
    extent,
    MASKED: gl.constexpr,
    META: gl.constexpr,
):
    """Return (dq, next block of keys and values) after a block of keys.

    The gradient of its scores is stored where the bias's is asked for. `own` are the program's `QueryRows`, `loaded`
    the block's keys and values; `first` and `following` are the first keys of it and of the next block.
    """
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
    loaded = load_keys(pointers.key, pointers.value, strides, following, extent.keys, META)
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
@gluon.jit(do_not_specialize=["heads", "batch_heads", "group", "blocks", "queries", "keys", "diagonal"])
def attend_backward_dq_fp32(
    query,
    key,
    value,
    bias,
    grad_out,
    out,
    logsumexp,
    grad_query,
    grad_bias,
    delta,
    excesses,
    query_starts,
    key_starts,
    strides,
    heads,
    batch_heads,
    group,
    blocks,
    queries,
    keys,
    diagonal,
    scale: tl.float64,
    META: gl.constexpr,
):
    """Compute dq as `backward.attend_backward_dq` does, without dropout."""
    wait_for_previous_launch()
    BLOCK_D: gl.constexpr = META.block_d
    BLOCK_V: gl.constexpr = META.block_v
    BLOCK_N: gl.constexpr = META.block_n
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    strides = DqStrides(*[HeadStrides(*each) for each in strides])
    qs, grads = shared_parts(ROWS, BLOCK_D), shared_parts(ROWS, BLOCK_V)
    buffers = BackwardBuffers(qs, grads, shared_parts(BLOCK_N, BLOCK_D), shared_parts(BLOCK_N, BLOCK_V))
    _block, batch, head = program_tile(gl.program_id(0), blocks, heads, batch_heads, group)
    queries, keys, diagonal, first_query, first_key = sequence_extent(
        query_starts, key_starts, batch, queries, keys, diagonal, META
    )
    sizes = TileSizes(heads, batch_heads, group, blocks, queries, keys, diagonal)
    first, count, masked = query_tile_of_sequence(sizes, META)
    kv_head = head // META.ratio
    query = head_rows(query, strides.query, batch, head, first_query)
    key = head_rows(key, strides.key, batch, kv_head, first_key)
    value = head_rows(value, strides.value, batch, kv_head, first_key)
    if bias is not None:
        bias = head_scores(bias, strides.bias, batch, head)
    grad_out = head_rows(grad_out, strides.grad_out, batch, head, first_query)
    out = head_rows(out, strides.out, batch, head, first_query)
    logsumexp = head_logsumexp(logsumexp, strides.logsumexp, batch, head, first_query)
    grad_query = head_rows(grad_query, strides.grad_query, batch, head, first_query)
    if grad_bias is not None:
        grad_bias = head_scores(grad_bias, strides.grad_bias, batch, head)
    delta = head_row_values(delta, strides.delta, batch, head, first_query)
    if excesses is not None:
        excesses = head_row_values(excesses, strides.delta, batch, head, first_query)
    extent = Extent(queries, keys, diagonal)
    loaded = load_keys(key, value, strides, gl.maximum(count - 1, 0) * BLOCK_N, keys, META)
    q = load_rows(query, first, strides.query.row, queries, META.head_size, ROWS, BLOCK_D, META.index)
    store_parts(buffers.q, q)
    grad = load_rows(grad_out, first, strides.grad_out.row, queries, META.value_size, ROWS, BLOCK_V, META.index)
    result = load_rows(out, first, strides.out.row, queries, META.value_size, ROWS, BLOCK_V, META.index)
    store_parts(buffers.grad, grad)
    row_delta = gl.convert_layout(gl.sum(grad * result, 1), row_layout)
    rows = (first + gl.arange(0, ROWS, row_layout)).to(META.index)
    gl.store(delta + rows, row_delta, mask=rows < queries)
    row_logsumexp = load_logsumexp(logsumexp, rows, strides.logsumexp.row, queries, True)
    factor = scale.to(gl.float32)
    excess = None
    if excesses is not None:
        excess = _excess(rows, row_logsumexp, key, bias, buffers, strides, count, factor, extent, META)
        gl.store(excesses + rows, excess, mask=rows < queries)
    own, pointers = QueryRows(rows, row_logsumexp, row_delta, excess), DqPointers(key, value, bias, grad_bias)
    dq = gl.zeros((ROWS, BLOCK_D), gl.float32, dq_layout)
    for i in range(0, masked):
        start, following = (count - 1 - i) * BLOCK_N, gl.maximum(count - 2 - i, 0) * BLOCK_N
        dq, loaded = _add_key_block(
            dq, loaded, own, pointers, buffers, strides, start, following, factor, extent, True, META
        )
    for i in range(masked, count):
        start, following = (count - 1 - i) * BLOCK_N, gl.maximum(count - 2 - i, 0) * BLOCK_N
        dq, loaded = _add_key_block(
            dq, loaded, own, pointers, buffers, strides, start, following, factor, extent, False, META
        )
    if grad_bias is not None:
        zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, score_layout)
        for start in range(count * BLOCK_N, keys, BLOCK_N):
            columns = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_layout))
            store_scores(grad_bias, zeros, strides.grad_bias, rows, columns, extent)
    store_rows(grad_query, first, strides.grad_query.row, queries, dq * factor, META.head_size, META.index)


@gluon.jit
def _load_queries(query, grad_out, strides, first, queries, META: gl.constexpr):
    """Load a block of queries and of gradients of out."""
    q = load_rows(query, first, strides.query.row, queries, META.head_size, META.block_m, META.block_d, META.index)
    grad = load_rows(
        grad_out, first, strides.grad_out.row, queries, META.value_size, META.block_m, META.block_v, META.index
    )
    return q, grad


@gluon.jit
def _add_query_block(
    gradients,
    loaded,
    columns,
    pointers,
    buffers,
    strides,
    first,
    following,
    factor,
    extent,
    MASKED: gl.constexpr,
    META: gl.constexpr,
):
    """Return (dk, dv, next block of queries and gradients of out) after a block of queries.

    Tiles of scores have a row for each key. `columns` are the program's key indices, `loaded` the block's queries and
    gradients of out; `first` and `following` are the first queries of it and of the next block.
    """
    dk, dv = gradients
    score_layout: gl.constexpr = columns.type.layout.parent
    dk_layout: gl.constexpr = dk.type.layout
    dv_layout: gl.constexpr = dv.type.layout
    store_parts(buffers.q, loaded[0])
    store_parts(buffers.grad, loaded[1])
    fence_async_shared()
    scores = start_small_products(buffers.k, transposed(buffers.q), score_layout)
    dp = start_small_products(buffers.v, transposed(buffers.grad), score_layout)
    rows = (first + gl.arange(0, META.block_m, gl.SliceLayout(0, score_layout))).to(META.index)
    i, j = rows[None, :], columns[:, None]
    bias = pointers.bias
    if bias is not None:
        bias += pointers.bias_offset
    bias_tile = load_bias_tile(i, j, bias, strides.bias, extent, META)
    logsumexp = load_logsumexp(pointers.logsumexp, rows, strides.logsumexp.row, extent.queries, True)
    delta = gl.load(pointers.delta + rows, mask=rows < extent.queries, other=0.0)
    excess = None
    if pointers.excesses is not None:
        excess = gl.load(pointers.excesses + rows, mask=rows < extent.queries, other=0.0)[None, :]
    loaded = _load_queries(pointers.query, pointers.grad_out, strides, following, extent.queries, META)
    scores = start_main_product(buffers.k, transposed(buffers.q), warpgroup_mma_wait(SMALL_PRODUCTS, deps=(scores,)))
    dp = start_main_product(buffers.v, transposed(buffers.grad), warpgroup_mma_wait(1, deps=(dp,)))
    scores = to_scores(warpgroup_mma_wait(1, deps=(scores,)), bias_tile, factor)
    p = zero_hidden(_probabilities(scores, logsumexp[None, :], excess), i, j, extent, MASKED, META)
    weights = in_registers(p, dv_layout)
    product = start_small_products(weights, buffers.grad, dv_layout)
    dp = warpgroup_mma_wait(SMALL_PRODUCTS, deps=(dp,))
    ds = zero_hidden(p * (dp - delta[None, :]), i, j, extent, MASKED, META)
    product = start_main_product(weights, buffers.grad, warpgroup_mma_wait(0, deps=(product,)))
    operand = in_registers(ds, dk_layout)
    dv += wait(weights, product, 0)
    product = start_small_products(operand, buffers.q, dk_layout)
    product = start_main_product(operand, buffers.q, warpgroup_mma_wait(0, deps=(product,)))
    dk += wait(operand, product, 0)
    return dk, dv, loaded


@libentry()
@gluon.jit(do_not_specialize=["heads", "batch_heads", "group", "blocks", "queries", "keys", "diagonal"])
def attend_backward_dkdv_fp32(
    query,
    key,
    value,
    bias,
    grad_out,
    logsumexp,
    delta,
    excesses,
    grad_key,
    grad_value,
    query_starts,
    key_starts,
    strides,
    heads,
    batch_heads,
    group,
    blocks,
    queries,
    keys,
    diagonal,
    scale: tl.float64,
    META: gl.constexpr,
):
    """Compute dk and dv as `backward.attend_backward_dkdv` does, without dropout; `heads` counts key heads."""
    wait_for_previous_launch()
    BLOCK_D: gl.constexpr = META.block_d
    BLOCK_V: gl.constexpr = META.block_v
    BLOCK_M: gl.constexpr = META.block_m
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    strides = DkdvStrides(*[HeadStrides(*each) for each in strides])
    ks, vs = shared_parts(ROWS, BLOCK_D), shared_parts(ROWS, BLOCK_V)
    buffers = BackwardBuffers(shared_parts(BLOCK_M, BLOCK_D), shared_parts(BLOCK_M, BLOCK_V), ks, vs)
    _block, batch, kv_head = program_tile(gl.program_id(0), blocks, heads, batch_heads, group)
    queries, keys, diagonal, first_query, first_key = sequence_extent(
        query_starts, key_starts, batch, queries, keys, diagonal, META
    )
    sizes = TileSizes(heads, batch_heads, group, blocks, queries, keys, diagonal)
    row, _batch, _head, first, count, masked = key_tile(sizes, ROWS, META)
    # This sequence may be shorter than the longest and have no such keys.
    count = gl.where(row < keys, count, 0)
    masked = gl.minimum(masked, count)
    key = head_rows(key, strides.key, batch, kv_head, first_key)
    value = head_rows(value, strides.value, batch, kv_head, first_key)
    grad_key = head_rows(grad_key, strides.grad_key, batch, kv_head, first_key)
    grad_value = head_rows(grad_value, strides.grad_value, batch, kv_head, first_key)
    k = load_rows(key, row, strides.key.row, keys, META.head_size, ROWS, BLOCK_D, META.index)
    store_parts(buffers.k, k)
    v = load_rows(value, row, strides.value.row, keys, META.value_size, ROWS, BLOCK_V, META.index)
    store_parts(buffers.v, v)
    factor = scale.to(gl.float32)
    dk = gl.zeros((ROWS, BLOCK_D), gl.float32, dk_layout)
    dv = gl.zeros((ROWS, BLOCK_V), gl.float32, dv_layout)
    extent = Extent(queries, keys, diagonal)
    columns = (row + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))).to(META.index)
    for member in range(META.ratio):
        head = kv_head * META.ratio + member
        of_query, of_grad, of_logsumexp = strides.query, strides.grad_out, strides.logsumexp
        own_query = query + batch * of_query.batch + head * of_query.head + first_query * of_query.row
        own_grad = grad_out + batch * of_grad.batch + head * of_grad.head + first_query * of_grad.row
        own_logsumexp = logsumexp + batch * of_logsumexp.batch + head * of_logsumexp.head
        own_logsumexp += first_query * of_logsumexp.element
        delta_offset = batch * strides.delta.batch + head * strides.delta.head + first_query
        own_excesses = None
        if excesses is not None:
            own_excesses = excesses + delta_offset
        own_delta, bias_offset = delta + delta_offset, batch * strides.bias.batch + head * strides.bias.head
        pointers = DkdvPointers(own_query, own_grad, own_logsumexp, own_delta, own_excesses, bias, bias_offset)
        # Programs without blocks have no first one, whose index would be negative.
        start = gl.maximum(query_block_start(0, first, count, queries, BLOCK_M), 0)
        loaded = _load_queries(pointers.query, pointers.grad_out, strides, start, queries, META)
        for i in range(0, masked):
            start = query_block_start(i, first, count, queries, BLOCK_M)
            following = query_block_start(i + 1, first, count, queries, BLOCK_M)
            dk, dv, loaded = _add_query_block(
                (dk, dv), loaded, columns, pointers, buffers, strides, start, following, factor, extent, True, META
            )
        for i in range(masked, count):
            start = query_block_start(i, first, count, queries, BLOCK_M)
            following = query_block_start(i + 1, first, count, queries, BLOCK_M)
            dk, dv, loaded = _add_query_block(
                (dk, dv), loaded, columns, pointers, buffers, strides, start, following, factor, extent, False, META
            )
    store_rows(grad_key, row, strides.grad_key.row, keys, dk * factor, META.head_size, META.index)
    store_rows(grad_value, row, strides.grad_value.row, keys, dv, META.value_size, META.index)


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
    query, key, value, bias = problem.query, problem.key, problem.value, problem.bias
    delta = empty(query.shape[:3], torch.float32, query.device)
    excesses = empty(query.shape[:3], torch.float32, query.device) if problem.adds else None
    tensors = (grad_out, out, logsumexp, delta, *grads, *(() if grad_bias is None else (grad_bias,)))
    operands = [problem.strides(tensor) for tensor in (query, key, value)]
    read, of_delta = (*operands, problem.bias_strides, problem.strides(grad_out)), problem.strides(delta)
    of_logsumexp = problem.logsumexp_strides(logsumexp)
    numbers: dict[str, Any] = {"queries": problem.queries, "keys": problem.keys, "diagonal": problem.diagonal}
    numbers |= {"scale": problem.factor, "num_warps": 4} | compiler_options(True)
    blocks, batch_heads = -(-problem.queries // ROWS.value), problem.batch * query.shape[1]
    attend_backward_dq_fp32[(blocks * batch_heads,)](
        *(query, key, value, bias, grad_out, out, logsumexp, grads[0], grad_bias, delta, excesses, *problem.starts),
        strides=(
            *(*read, problem.strides(out), of_logsumexp, problem.strides(grads[0])),
            *((0, 0, 0, 0) if grad_bias is None else grad_bias.stride(), of_delta),
        ),
        heads=query.shape[1],
        batch_heads=batch_heads,
        group=problem.group,
        blocks=blocks,
        META=kernel_meta(problem, ROWS.value, table.FP32.BLOCK_N, tensors),
        # The branch in `_excess` would cost the registers of a third program.
        maxnreg=table.CAPPED_REGISTERS if problem.adds and grad_bias is None else None,
        **numbers,
    )
    blocks, batch_heads = -(-problem.keys // ROWS.value), problem.batch * key.shape[1]
    if not problem.causal:
        capped = table.registers_for_keys(blocks * batch_heads, devices.multiprocessors(query.device))
        numbers |= {} if capped is None else {"maxnreg": capped}
    attend_backward_dkdv_fp32[(blocks * batch_heads,)](
        *(query, key, value, bias, grad_out, logsumexp, delta, excesses, *grads[1:], *problem.starts),
        strides=(*read, of_logsumexp, problem.strides(grads[1]), problem.strides(grads[2]), of_delta),
        heads=key.shape[1],
        batch_heads=batch_heads,
        group=1,
        blocks=blocks,
        META=kernel_meta(problem, table.FP32.BLOCK_M, ROWS.value, tensors),
        **numbers,
    )
