"""Attention's backward pass, which recomputes probabilities from logsumexp (Dao 2023), without atomic operations.

One launch has a program for each block of queries (dq), another for each block of keys (dk and dv). Each program sums
in one order, so results are the same bits every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.engine.attention.dropout import gain, head_draws, keep_mask
from tritonite.engine.attention.forward import key_range, load_rows, store_rows
from tritonite.engine.attention.hopper import backward as hopper
from tritonite.engine.attention.hopper import fp32_backward
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.prologue import (
    DkdvStrides,
    DqStrides,
    Extent,
    HeadStrides,
    head_logsumexp,
    head_row_values,
    head_rows,
    head_scores,
    program_tile,
    sequence_extent,
)
from tritonite.engine.attention.scores import (
    add_bias,
    exponentials,
    is_rounded,
    load_bias,
    load_logsumexp,
    logsumexp_excess,
    probabilities_in_nats,
    score_factor,
    store_scores,
    visible_scores,
)
from tritonite.language.bf16x6 import dot_terms, split_terms
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry


class QueryTile(NamedTuple):
    """A program's queries: q and grad_out as terms of `parts`, logsumexp in the base of scores, delta."""

    q: Any
    grad: Any
    logsumexp: Any
    delta: Any


class KeyPointers(NamedTuple):
    """Pointers to a head's keys, values, bias and gradient of the bias."""

    key: Any
    value: Any
    bias: Any
    grad_bias: Any


class QueryPointers(NamedTuple):
    """Pointers to a query head's rows; excesses is None without an additive bias."""

    query: Any
    grad_out: Any
    logsumexp: Any
    delta: Any
    excesses: Any
    bias: Any
    bias_offset: Any


@triton.jit
def _probabilities(scores, logsumexp, excess, visible, bias_tile, factor, MASKED: tl.constexpr, META: tl.constexpr):
    """Return the probabilities of products of queries and keys; `excess` is None without an additive bias."""
    scores *= factor
    if bias_tile is not None:
        scores = add_bias(scores, bias_tile)
    if excess is not None:
        p = probabilities_in_nats(scores, logsumexp, excess, META.natural)
    else:
        p = exponentials(scores, logsumexp, META.natural, False)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    return p


@triton.jit
def _excess(q, key, bias, strides, rows, extent, factor, logsumexp, end, META: tl.constexpr):
    """Return rows' `logsumexp_excess`, from another pass over the keys up to `end` if any row needs one."""
    PRECISION: tl.constexpr = META.precision
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    HEAD: tl.constexpr = META.head_size
    BLOCK_D: tl.constexpr = META.block_d
    excess = tl.zeros((BLOCK_M,), tl.float32)
    if tl.max(is_rounded(logsumexp).to(tl.int32), 0) > 0:
        sums = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(0, end, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N).to(META.index)
            i, j = rows[:, None], columns[None, :]
            visible = visible_scores(i, j, extent, META.causal)
            bias_tile = load_bias(bias, strides.bias, i, j, extent.keys, visible, META.bias_of_keys)
            k = load_rows(key, columns, strides.key.row, extent.keys, HEAD, BLOCK_D, True)
            scores = dot_terms(q, split_terms(tl.trans(k), PRECISION), None, PRECISION)
            p = _probabilities(scores, logsumexp[:, None], excess[:, None], visible, bias_tile, factor, True, META)
            sums += tl.sum(p, 1)
        excess = logsumexp_excess(sums, logsumexp, META.natural)
    return excess


@triton.jit
def _add_key_block(
    dq,
    own,
    excess,
    pointers,
    draws,
    strides,
    rows,
    columns,
    tile_start,
    extent,
    factor,
    MASKED: tl.constexpr,
    META: tl.constexpr,
):
    """Return dq after a block of keys, and store the gradient of its scores where the bias's is asked for.

    `own` is the program's `QueryTile`, `tile_start` the tile's first row and column.
    """
    HEAD: tl.constexpr = META.head_size
    VALUE: tl.constexpr = META.value_size
    BLOCK_D: tl.constexpr = META.block_d
    BLOCK_V: tl.constexpr = META.block_v
    PRECISION: tl.constexpr = META.precision
    if excess is not None:
        excess = excess[:, None]
    i, j = rows[:, None], columns[None, :]
    visible = visible_scores(i, j, extent, META.causal)
    bias_tile = load_bias(pointers.bias, strides.bias, i, j, extent.keys, visible, META.bias_of_keys)
    k = load_rows(pointers.key, columns, strides.key.row, extent.keys, HEAD, BLOCK_D, MASKED)
    v = load_rows(pointers.value, columns, strides.value.row, extent.keys, VALUE, BLOCK_V, MASKED)
    scores = dot_terms(own.q, split_terms(tl.trans(k), PRECISION), None, PRECISION)
    p = _probabilities(scores, own.logsumexp[:, None], excess, visible, bias_tile, factor, MASKED, META)
    dp = dot_terms(own.grad, split_terms(tl.trans(v), PRECISION), None, PRECISION)
    if draws is not None:
        dp = tl.where(keep_mask(draws, tile_start[0], tile_start[1], extent.keys, META), dp * draws.gain, 0.0)
    ds = p * (dp - own.delta[:, None])
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    if pointers.grad_bias is not None:
        store_scores(pointers.grad_bias, ds, strides.grad_bias, rows, columns, extent)
    return dot_terms(split_terms(ds.to(k.dtype), PRECISION), split_terms(k, PRECISION), dq, PRECISION)


@libentry()
@triton.jit(
    do_not_specialize=["heads", "batch_heads", "group", "blocks", "queries", "keys", "diagonal", "seed", "offset"]
)
def attend_backward_dq(
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
    memory,
    strides,
    heads,
    batch_heads,
    group,
    blocks,
    queries,
    keys,
    diagonal,
    scale: tl.float64,
    seed: tl.int64,
    offset: tl.int64,
    dropout_p: tl.float64,
    META: tl.constexpr,
):
    """Compute the gradient of a block of a head's queries, and of a bias of all scores unless grad_bias is None.

    `strides` are `DqStrides`. `delta`, (batch, heads, queries), gets each row's sum of out * grad_out. `excesses`, of
    delta's shape, gets rows' `logsumexp_excess` for attend_backward_dkdv; it is None without an additive bias.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_D: tl.constexpr = META.block_d
    BLOCK_V: tl.constexpr = META.block_v
    HEAD: tl.constexpr = META.head_size
    VALUE: tl.constexpr = META.value_size
    PRECISION: tl.constexpr = META.precision
    strides = DqStrides(*[HeadStrides(*each) for each in strides])
    block, batch, head = program_tile(tl.program_id(0), blocks, heads, batch_heads, group)
    kv_head = head // META.ratio
    queries, keys, diagonal, first_query, first_key = sequence_extent(
        query_starts, key_starts, batch, queries, keys, diagonal, META
    )
    draws = None
    if META.dropout != "":
        draws = head_draws(seed, offset, memory, dropout_p, batch * heads + head, queries, keys, META)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(META.index)
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
    if query_starts is not None:
        # This sequence may be shorter than the longest and have no such block.
        keys = tl.where(block * BLOCK_M < queries, keys, 0)
    q = load_rows(query, rows, strides.query.row, queries, HEAD, BLOCK_D, True)
    grad = load_rows(grad_out, rows, strides.grad_out.row, queries, VALUE, BLOCK_V, True)
    result = load_rows(out, rows, strides.out.row, queries, VALUE, BLOCK_V, True)
    row_delta = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + rows, row_delta, mask=rows < queries)
    q, grad = split_terms(q, PRECISION), split_terms(grad, PRECISION)
    row_logsumexp = load_logsumexp(logsumexp, rows, strides.logsumexp.row, queries, META.nats)
    number = tl.full((), scale, tl.float64)
    factor = score_factor(number, META.nats)
    whole, end = key_range(block, keys, diagonal, META)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    extent = Extent(queries, keys, diagonal)
    lanes = tl.arange(0, BLOCK_N).to(META.index)
    excess = None
    if excesses is not None:
        excess = _excess(q, key, bias, strides, rows, extent, factor, row_logsumexp, end, META)
        tl.store(excesses + rows, excess, mask=rows < queries)
    own, pointers = QueryTile(q, grad, row_logsumexp, row_delta), KeyPointers(key, value, bias, grad_bias)
    for start in range(0, whole, BLOCK_N):
        tile_start = (block * BLOCK_M, start)
        dq = _add_key_block(
            dq, own, excess, pointers, draws, strides, rows, start + lanes, tile_start, extent, factor, False, META
        )
    for start in range(whole, end, BLOCK_N):
        tile_start = (block * BLOCK_M, start)
        dq = _add_key_block(
            dq, own, excess, pointers, draws, strides, rows, start + lanes, tile_start, extent, factor, True, META
        )
    if grad_bias is not None:
        zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(whole + tl.cdiv(tl.maximum(end - whole, 0), BLOCK_N) * BLOCK_N, keys, BLOCK_N):
            store_scores(grad_bias, zeros, strides.grad_bias, rows, start + lanes, extent)
    store_rows(grad_query, rows, strides.grad_query.row, queries, dq * number.to(tl.float32), HEAD, BLOCK_D)


@triton.jit
def _add_query_block(
    gradients,
    k,
    v,
    pointers,
    draws,
    strides,
    rows,
    columns,
    tile_start,
    extent,
    factor,
    MASKED: tl.constexpr,
    META: tl.constexpr,
):
    """Return (dk, dv) after a block of queries; tiles of scores have a row for each key.

    `pointers` are `QueryPointers`, `tile_start` the tile's first query and key.
    """
    HEAD: tl.constexpr = META.head_size
    VALUE: tl.constexpr = META.value_size
    BLOCK_D: tl.constexpr = META.block_d
    BLOCK_V: tl.constexpr = META.block_v
    PRECISION: tl.constexpr = META.precision
    dk, dv = gradients
    bias = pointers.bias
    if bias is not None:
        bias += pointers.bias_offset
    i, j = rows[None, :], columns[:, None]
    visible = visible_scores(i, j, extent, META.causal)
    bias_tile = load_bias(bias, strides.bias, i, j, extent.keys, visible, META.bias_of_keys)
    q = load_rows(pointers.query, rows, strides.query.row, extent.queries, HEAD, BLOCK_D, MASKED)
    grad = load_rows(pointers.grad_out, rows, strides.grad_out.row, extent.queries, VALUE, BLOCK_V, MASKED)
    logsumexp = load_logsumexp(pointers.logsumexp, rows, strides.logsumexp.row, extent.queries, META.nats)
    delta = tl.load(pointers.delta + rows, mask=rows < extent.queries, other=0.0)
    excess = None
    if pointers.excesses is not None:
        excess = tl.load(pointers.excesses + rows, mask=rows < extent.queries, other=0.0)[None, :]
    scores = dot_terms(k, split_terms(tl.trans(q), PRECISION), None, PRECISION)
    p = _probabilities(scores, logsumexp[None, :], excess, visible, bias_tile, factor, MASKED, META)
    weights = p
    if draws is not None:
        kept = tl.trans(keep_mask(draws, tile_start[0], tile_start[1], extent.keys, META))
        weights = tl.where(kept, weights, 0.0)
    weights = split_terms(weights.to(grad.dtype), PRECISION)
    dv = dot_terms(weights, split_terms(grad, PRECISION), dv, PRECISION)
    dp = dot_terms(v, split_terms(tl.trans(grad), PRECISION), None, PRECISION)
    if draws is not None:
        dp = tl.where(kept, dp * draws.gain, 0.0)
    ds = p * (dp - delta[None, :])
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    return dot_terms(split_terms(ds.to(q.dtype), PRECISION), split_terms(q, PRECISION), dk, PRECISION), dv


@libentry()
@triton.jit(do_not_specialize=["heads", "blocks", "queries", "keys", "diagonal", "seed", "offset"])
def attend_backward_dkdv(
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
    memory,
    strides,
    heads,
    blocks,
    queries,
    keys,
    diagonal,
    scale: tl.float64,
    seed: tl.int64,
    offset: tl.int64,
    dropout_p: tl.float64,
    META: tl.constexpr,
):
    """Compute the gradients of a block of a head's keys and values, from all queries that see them.

    `strides` are `DkdvStrides`; `heads` counts key heads. Programs of the first keys, which most queries see, start
    first.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_D: tl.constexpr = META.block_d
    BLOCK_V: tl.constexpr = META.block_v
    HEAD: tl.constexpr = META.head_size
    VALUE: tl.constexpr = META.value_size
    RATIO: tl.constexpr = META.ratio
    PRECISION: tl.constexpr = META.precision
    strides = DkdvStrides(*[HeadStrides(*each) for each in strides])
    block = tl.program_id(0) % blocks
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    kv_head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    queries, keys, diagonal, first_query, first_key = sequence_extent(
        query_starts, key_starts, batch, queries, keys, diagonal, META
    )
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N).to(META.index)
    key = head_rows(key, strides.key, batch, kv_head, first_key)
    value = head_rows(value, strides.value, batch, kv_head, first_key)
    grad_key = head_rows(grad_key, strides.grad_key, batch, kv_head, first_key)
    grad_value = head_rows(grad_value, strides.grad_value, batch, kv_head, first_key)
    if query_starts is not None:
        # This sequence may be shorter than the longest and have no such block.
        queries = tl.where(block * BLOCK_N < keys, queries, 0)
    k = split_terms(load_rows(key, columns, strides.key.row, keys, HEAD, BLOCK_D, True), PRECISION)
    v = split_terms(load_rows(value, columns, strides.value.row, keys, VALUE, BLOCK_V, True), PRECISION)
    number = tl.full((), scale, tl.float64)
    factor = score_factor(number, META.nats)
    # Queries from `whole` to `last` see all keys in whole blocks. The blocks before `whole`, and a partial last block,
    # are masked.
    first, whole, last = 0, 0, queries // BLOCK_M * BLOCK_M
    if META.causal:
        first = tl.minimum(tl.maximum(block * BLOCK_N - diagonal, 0) // BLOCK_M * BLOCK_M, queries)
        whole = tl.cdiv(tl.maximum(block * BLOCK_N + BLOCK_N - 1 - diagonal, 0), BLOCK_M) * BLOCK_M
        whole = tl.minimum(whole, queries)
    last = tl.maximum(last, whole)
    edges = tl.cdiv(whole - first, BLOCK_M)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    extent = Extent(queries, keys, diagonal)
    lanes = tl.arange(0, BLOCK_M).to(META.index)
    for member in range(RATIO):
        head = kv_head * RATIO + member
        of_query, of_grad, of_logsumexp, of_delta = strides.query, strides.grad_out, strides.logsumexp, strides.delta
        own_query = query + batch * of_query.batch + head * of_query.head + first_query * of_query.row
        bias_offset = batch * strides.bias.batch + head * strides.bias.head
        own_grad = grad_out + batch * of_grad.batch + head * of_grad.head + first_query * of_grad.row
        own_logsumexp = logsumexp + batch * of_logsumexp.batch + head * of_logsumexp.head
        own_logsumexp += first_query * of_logsumexp.element
        own_delta = delta + batch * of_delta.batch + head * of_delta.head + first_query
        own_excesses = None
        if excesses is not None:
            own_excesses = excesses + batch * of_delta.batch + head * of_delta.head + first_query
        pointers = QueryPointers(own_query, own_grad, own_logsumexp, own_delta, own_excesses, bias, bias_offset)
        draws = None
        if META.dropout != "":
            head_number = (batch * heads) * RATIO + head
            draws = head_draws(seed, offset, memory, dropout_p, head_number, queries, keys, META)
        for i in range(0, edges + tl.cdiv(queries - last, BLOCK_M)):
            start = tl.where(i < edges, first + i * BLOCK_M, last)
            state, rows, tile_start = (dk, dv), start + lanes, (start, block * BLOCK_N)
            dk, dv = _add_query_block(
                state, k, v, pointers, draws, strides, rows, columns, tile_start, extent, factor, True, META
            )
        for start in range(whole, last, BLOCK_M):
            state, rows, tile_start = (dk, dv), start + lanes, (start, block * BLOCK_N)
            dk, dv = _add_query_block(
                state, k, v, pointers, draws, strides, rows, columns, tile_start, extent, factor, False, META
            )
    store_rows(grad_key, columns, strides.grad_key.row, keys, dk * number.to(tl.float32), HEAD, BLOCK_D)
    if META.dropout != "":
        dv *= gain(dropout_p)
    store_rows(grad_value, columns, strides.grad_value.row, keys, dv, VALUE, BLOCK_V)


def attention_backward(
    problem: Problem,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_bias: torch.Tensor | None = None,
) -> None:
    """Write the gradients of query, key and value to `grads`, and of the bias to `grad_bias` unless it is None.

    `grad_out`, `out` and `grads` are (batch, heads, rows, elements) with contiguous elements. `logsumexp` is float32,
    (batch, heads, rows), with at least as many rows as queries. `grad_bias` is (batch, heads, queries, keys), also for
    a broadcast bias.
    """
    if grad_bias is None and hopper.serves(problem, grad_out, grads):
        hopper.attention_backward(problem, grad_out, out, logsumexp, grads)
        return
    if fp32_backward.serves(problem, grad_out, grads):
        fp32_backward.attention_backward(problem, grad_out, out, logsumexp, grads, grad_bias)
        return
    heads = problem.query.shape[1]
    grad_query, grad_key, grad_value = grads
    query, key, value, bias = problem.query, problem.key, problem.value, problem.bias
    delta = empty(query.shape[:3], torch.float32, query.device)
    excesses = empty(query.shape[:3], torch.float32, query.device) if problem.adds else None
    tensors = (grad_out, out, logsumexp, *grads, *(() if grad_bias is None else (grad_bias,)))
    operands = *[problem.strides(tensor) for tensor in (query, key, value)], problem.bias_strides
    read = (*operands, problem.strides(grad_out))
    of_logsumexp, of_delta = problem.logsumexp_strides(logsumexp), problem.strides(delta)
    dropout = problem.dropout
    seed, offset = (0, 0) if dropout is None else dropout.state
    memory = None if dropout is None else dropout.memory
    numbers: dict[str, Any] = {
        "queries": problem.queries,
        "keys": problem.keys,
        "diagonal": problem.diagonal,
        "scale": problem.factor,
    }
    numbers |= {"seed": seed, "offset": offset, "dropout_p": 0.0 if dropout is None else dropout.p}
    tile = problem.tiles.query
    blocks = -(-problem.queries // tile.BLOCK_M)
    if blocks * problem.batch * heads:
        attend_backward_dq[(blocks * problem.batch * heads,)](
            *(query, key, value, bias, grad_out, out, logsumexp, grad_query, grad_bias, delta, excesses),
            *(*problem.starts, memory),
            strides=(
                *(*read, problem.strides(out), of_logsumexp, problem.strides(grad_query)),
                *((0, 0, 0, 0) if grad_bias is None else grad_bias.stride(), of_delta),
            ),
            heads=heads,
            batch_heads=problem.batch * heads,
            group=problem.group,
            blocks=blocks,
            **numbers,
            META=problem.meta(tile, *tensors),
            **tile.options,
            **compiler_options(query.dtype is torch.float32),
        )
    tile = problem.tiles.key
    blocks, kv_heads = -(-problem.keys // tile.BLOCK_N), key.shape[1]
    if blocks * problem.batch * kv_heads:
        attend_backward_dkdv[(blocks * problem.batch * kv_heads,)](
            *(query, key, value, bias, grad_out, logsumexp, delta, excesses, grad_key, grad_value),
            *(*problem.starts, memory),
            strides=(*read, of_logsumexp, problem.strides(grad_key), problem.strides(grad_value), of_delta),
            heads=kv_heads,
            blocks=blocks,
            **numbers,
            META=problem.meta(tile, *tensors),
            **tile.options,
            **compiler_options(query.dtype is torch.float32),
        )
