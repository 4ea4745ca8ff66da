"""Attention's backward pass, which recomputes probabilities from logsumexp (Dao 2023), without atomic operations.

One launch has a program for each block of queries (dq), another for each block of keys (dk and dv). Each program sums
in one order, so results are the same bits every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.engine.attention.arguments import backward_arguments, tile_sizes
from tritonite.engine.attention.dropout import gain, head_draws, keep_mask
from tritonite.engine.attention.forward import key_range, load_rows, locate_block, store_rows, window_range
from tritonite.engine.attention.hopper import backward as hopper
from tritonite.engine.attention.hopper import fp32_backward
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.prologue import (
    Extent,
    Head,
    Tensors,
    TileSizes,
    head_logsumexp,
    head_row_values,
    head_scores,
    key_rows,
    query_rows,
    sequence_extent,
)
from tritonite.engine.attention.scores import (
    ScoreRule,
    add_bias,
    capped_factor,
    exponentials,
    head_sink,
    is_rounded,
    load_bias,
    load_logsumexp,
    logsumexp_excess,
    probabilities_in_nats,
    scaled_products,
    score_factor,
    store_scores,
    visible_scores,
)
from tritonite.language.bf16x6 import dot_terms, split_terms
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


class QueryTile(NamedTuple):
    """A program's queries: q and grad_out as terms of `split_terms`, logsumexp in the base of scores, delta, excess.

    excess is None without an additive bias.
    """

    q: Any
    grad: Any
    logsumexp: Any
    delta: Any
    excess: Any


class KeyTile(NamedTuple):
    """A program's keys and values as terms of `split_terms`, the first key, and the indices of all."""

    k: Any
    v: Any
    first: Any
    columns: Any


@triton.jit
def _probabilities(scores, logsumexp, excess, visible, bias_tile, rule, MASKED: tl.constexpr, META: tl.constexpr):
    """Return the probabilities of results of `scaled_products`; `excess` is None without an additive bias."""
    if META.capped:
        scores *= rule.cap
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
def _sink_probabilities(sinks, head, logsumexp, excess, META: tl.constexpr):
    """Return the probabilities that a head's sink has in rows; `excess` is None without an additive bias."""
    sink = head_sink(sinks, head, META.nats)
    if excess is not None:
        p = probabilities_in_nats(sink, logsumexp, excess, META.natural)
    else:
        p = exponentials(sink, logsumexp, META.natural, META.nats)
    return p


@triton.jit
def _excess(q, pointers, strides, block, head, rule, logsumexp, begin, end, META: tl.constexpr):
    """Return rows' `logsumexp_excess`, from another pass over the keys from `begin` to `end` if any row needs one."""
    PRECISION: tl.constexpr = META.precision
    BLOCK_M: tl.constexpr = META.block_m
    excess = tl.zeros((BLOCK_M,), tl.float32)
    if tl.max(is_rounded(logsumexp).to(tl.int32), 0) > 0:
        sums = tl.zeros((BLOCK_M,), tl.float32)
        if pointers.sinks is not None:
            sums += _sink_probabilities(pointers.sinks, head, logsumexp, excess, META)
        for start in range(begin, end, META.block_n):
            columns = start + tl.arange(0, META.block_n).to(META.index)
            i, j = block.rows[:, None], columns[None, :]
            visible = visible_scores(i, j, block.extent, META.causal, rule.window)
            bias_tile = load_bias(pointers.bias, strides.bias, i, j, block.extent.keys, visible, META.bias_of_keys)
            k = load_rows(pointers.key, columns, strides.key.row, block.extent.keys, META.head_size, META.block_d, True)
            scores = dot_terms(q, split_terms(tl.trans(k), PRECISION), None, PRECISION)
            scores = scaled_products(scores, rule, META)
            p = _probabilities(scores, logsumexp[:, None], excess[:, None], visible, bias_tile, rule, True, META)
            sums += tl.sum(p, 1)
        excess = logsumexp_excess(sums, logsumexp, META.natural)
    return excess


@triton.jit
def _add_keys(dq, own, pointers, draws, strides, block, begin, end, rule, MASKED: tl.constexpr, META: tl.constexpr):
    """Return dq after the blocks of keys from `begin` to `end`, with MASKED those that hide some scores.

    The gradient of their scores is stored where the bias's is asked for. `own` is the program's `QueryTile`.
    """
    PRECISION: tl.constexpr = META.precision
    rows, extent, excess = block.rows, block.extent, own.excess
    if excess is not None:
        excess = excess[:, None]
    lanes = tl.arange(0, META.block_n).to(META.index)
    for start in range(begin, end, META.block_n):
        columns = start + lanes
        i, j = rows[:, None], columns[None, :]
        visible = visible_scores(i, j, extent, META.causal, rule.window)
        bias_tile = load_bias(pointers.bias, strides.bias, i, j, extent.keys, visible, META.bias_of_keys)
        k = load_rows(pointers.key, columns, strides.key.row, extent.keys, META.head_size, META.block_d, MASKED)
        v = load_rows(pointers.value, columns, strides.value.row, extent.keys, META.value_size, META.block_v, MASKED)
        scores = dot_terms(own.q, split_terms(tl.trans(k), PRECISION), None, PRECISION)
        scores = scaled_products(scores, rule, META)
        p = _probabilities(scores, own.logsumexp[:, None], excess, visible, bias_tile, rule, MASKED, META)
        dp = dot_terms(own.grad, split_terms(tl.trans(v), PRECISION), None, PRECISION)
        if draws is not None:
            dp = tl.where(keep_mask(draws, block.first, start, extent.keys, META), dp * draws.gain, 0.0)
        ds = p * (dp - own.delta[:, None])
        if MASKED:
            ds = tl.where(visible, ds, 0.0)
        if pointers.grad_bias is not None:
            store_scores(pointers.grad_bias, ds, strides.grad_bias, rows, columns, extent)
        if META.capped:
            ds *= 1 - scores * scores
        dq = dot_terms(split_terms(ds.to(k.dtype), PRECISION), split_terms(k, PRECISION), dq, PRECISION)
    return dq


@libentry()
@triton.jit(do_not_specialize=[*TileSizes._fields, "seed", "offset", "window"])
def attend_backward_dq(
    tensors,
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
    window,
    softcap,
    META: tl.constexpr,
):
    """Compute the gradient of a block of a head's queries, and of a bias of all scores unless grad_bias is None.

    delta and excesses are stored for attend_backward_dkdv. A sink's gradient is its probability times -delta, summed
    over rows. Without a window or a soft cap the parameter is None.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_D: tl.constexpr = META.block_d
    PRECISION: tl.constexpr = META.precision
    sizes = TileSizes(heads, batch_heads, group, blocks, queries, keys, diagonal)
    here, block = locate_block(sizes, tensors, META)
    rows, extent = block.rows, block.extent
    draws = None
    if META.dropout != "":
        flat_head = here.batch * heads + here.head
        draws = head_draws(seed, offset, memory, dropout_p, flat_head, extent.queries, extent.keys, META)
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
        sinks=tensors.sinks,
    )
    q = load_rows(pointers.query, rows, strides.query.row, extent.queries, META.head_size, BLOCK_D, True)
    grad = load_rows(pointers.grad_out, rows, strides.grad_out.row, extent.queries, META.value_size, META.block_v, True)
    result = load_rows(pointers.out, rows, strides.out.row, extent.queries, META.value_size, META.block_v, True)
    row_delta = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(pointers.delta + rows, row_delta, mask=rows < extent.queries)
    q, grad = split_terms(q, PRECISION), split_terms(grad, PRECISION)
    row_logsumexp = load_logsumexp(pointers.logsumexp, rows, strides.logsumexp.row, extent.queries, META.nats)
    number = tl.full((), scale, tl.float64)
    factor, cap = score_factor(number, META.nats), None
    if META.capped:
        factor, cap = capped_factor(number, softcap, META)
    rule = ScoreRule(factor, cap, window)
    whole, end = key_range(block, META)
    begin, inner = 0, 0
    if META.windowed:
        begin, inner = window_range(block, end, window, META)
    excess = None
    if pointers.excesses is not None:
        excess = _excess(q, pointers, strides, block, here.head, rule, row_logsumexp, begin, end, META)
        tl.store(pointers.excesses + rows, excess, mask=rows < extent.queries)
    if tensors.grad_sinks is not None:
        by_rows = _sink_probabilities(tensors.sinks, here.head, row_logsumexp, excess, META) * row_delta
        total = tl.sum(tl.where(rows < extent.queries, by_rows, 0.0), 0)
        tl.store(tensors.grad_sinks + ((here.batch * heads + here.head) * blocks + here.block), -total)
    own = QueryTile(q, grad, row_logsumexp, row_delta, excess)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if META.windowed:
        dq = _add_keys(dq, own, pointers, draws, strides, block, begin, inner, rule, True, META)
    dq = _add_keys(dq, own, pointers, draws, strides, block, inner, whole, rule, False, META)
    if META.windowed:
        whole = tl.maximum(whole, inner)
    dq = _add_keys(dq, own, pointers, draws, strides, block, whole, end, rule, True, META)
    if pointers.grad_bias is not None:
        zeros, lanes = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.arange(0, BLOCK_N).to(META.index)
        if META.windowed:
            for start in range(0, tl.minimum(begin, end), BLOCK_N):
                store_scores(pointers.grad_bias, zeros, strides.grad_bias, rows, start + lanes, extent)
        for start in range(whole + tl.cdiv(tl.maximum(end - whole, 0), BLOCK_N) * BLOCK_N, extent.keys, BLOCK_N):
            store_scores(pointers.grad_bias, zeros, strides.grad_bias, rows, start + lanes, extent)
    dq *= number.to(tl.float32)
    store_rows(pointers.grad_query, rows, strides.grad_query.row, extent.queries, dq, META.head_size, BLOCK_D)


@triton.jit
def _add_query_block(
    gradients, own, pointers, draws, strides, first, extent, rule, MASKED: tl.constexpr, META: tl.constexpr
):
    """Return (dk, dv) after the block of queries from `first`, which hides some scores with MASKED.

    Tiles of scores have a row for each key. `own` is the program's `KeyTile`.
    """
    PRECISION: tl.constexpr = META.precision
    dk, dv = gradients
    rows = first + tl.arange(0, META.block_m).to(META.index)
    i, j = rows[None, :], own.columns[:, None]
    visible = visible_scores(i, j, extent, META.causal, rule.window)
    bias_tile = load_bias(pointers.bias, strides.bias, i, j, extent.keys, visible, META.bias_of_keys)
    q = load_rows(pointers.query, rows, strides.query.row, extent.queries, META.head_size, META.block_d, MASKED)
    grad = load_rows(
        pointers.grad_out, rows, strides.grad_out.row, extent.queries, META.value_size, META.block_v, MASKED
    )
    logsumexp = load_logsumexp(pointers.logsumexp, rows, strides.logsumexp.row, extent.queries, META.nats)
    delta = tl.load(pointers.delta + rows, mask=rows < extent.queries, other=0.0)
    excess = None
    if pointers.excesses is not None:
        excess = tl.load(pointers.excesses + rows, mask=rows < extent.queries, other=0.0)[None, :]
    scores = dot_terms(own.k, split_terms(tl.trans(q), PRECISION), None, PRECISION)
    scores = scaled_products(scores, rule, META)
    p = _probabilities(scores, logsumexp[None, :], excess, visible, bias_tile, rule, MASKED, META)
    weights = p
    if draws is not None:
        kept = tl.trans(keep_mask(draws, first, own.first, extent.keys, META))
        weights = tl.where(kept, weights, 0.0)
    weights = split_terms(weights.to(grad.dtype), PRECISION)
    dv = dot_terms(weights, split_terms(grad, PRECISION), dv, PRECISION)
    dp = dot_terms(own.v, split_terms(tl.trans(grad), PRECISION), None, PRECISION)
    if draws is not None:
        dp = tl.where(kept, dp * draws.gain, 0.0)
    ds = p * (dp - delta[None, :])
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    if META.capped:
        ds *= 1 - scores * scores
    return dot_terms(split_terms(ds.to(q.dtype), PRECISION), split_terms(q, PRECISION), dk, PRECISION), dv


@libentry()
@triton.jit(do_not_specialize=["heads", "blocks", "queries", "keys", "diagonal", "seed", "offset", "window"])
def attend_backward_dkdv(
    tensors,
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
    window,
    softcap,
    META: tl.constexpr,
):
    """Compute the gradients of a block of a head's keys and values, from all queries that see them.

    `heads` counts key heads. Programs of the first keys, which most queries see, start first.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_D: tl.constexpr = META.block_d
    BLOCK_V: tl.constexpr = META.block_v
    PRECISION: tl.constexpr = META.precision
    block = tl.program_id(0) % blocks
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    kv_head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    extent, first_query, first_key = sequence_extent(tensors, batch, queries, keys, diagonal, META)
    queries, keys, diagonal = extent
    here = Head(block, batch, kv_head, kv_head, first_query, first_key)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N).to(META.index)
    key, value = key_rows(tensors.key, strides.key, here), key_rows(tensors.value, strides.value, here)
    grad_key = key_rows(tensors.grad_key, strides.grad_key, here)
    grad_value = key_rows(tensors.grad_value, strides.grad_value, here)
    if tensors.query_starts is not None:
        # This sequence may be shorter than the longest and have no such block.
        queries = tl.where(block * BLOCK_N < keys, queries, 0)
    k = load_rows(key, columns, strides.key.row, keys, META.head_size, BLOCK_D, True)
    v = load_rows(value, columns, strides.value.row, keys, META.value_size, BLOCK_V, True)
    own = KeyTile(split_terms(k, PRECISION), split_terms(v, PRECISION), block * BLOCK_N, columns)
    number = tl.full((), scale, tl.float64)
    factor, cap = score_factor(number, META.nats), None
    if META.capped:
        factor, cap = capped_factor(number, softcap, META)
    rule = ScoreRule(factor, cap, window)
    # Queries from `whole` to `last` see all keys in whole blocks. The blocks before `whole`, and a partial last block,
    # are masked.
    first, whole, last = 0, 0, queries // BLOCK_M * BLOCK_M
    stop = queries
    if META.causal:
        first = tl.minimum(tl.maximum(block * BLOCK_N - diagonal, 0) // BLOCK_M * BLOCK_M, queries)
        whole = tl.cdiv(tl.maximum(block * BLOCK_N + BLOCK_N - 1 - diagonal, 0), BLOCK_M) * BLOCK_M
        whole = tl.minimum(whole, queries)
    if META.windowed:
        # The first key leaves the windows of queries from `leaving` on, the last key those from `stop` on.
        leaving = block * BLOCK_N - diagonal + window
        stop = tl.minimum(queries, tl.maximum(leaving + BLOCK_N - 1, 0))
        first, whole = tl.minimum(first, stop), tl.minimum(whole, stop)
        last = tl.minimum(last, tl.maximum(leaving, 0) // BLOCK_M * BLOCK_M)
    last = tl.maximum(last, whole)
    edges = tl.cdiv(whole - first, BLOCK_M)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    extent = Extent(queries, keys, diagonal)
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
        draws = None
        if META.dropout != "":
            flat_head = (batch * heads) * META.ratio + here.head
            draws = head_draws(seed, offset, memory, dropout_p, flat_head, queries, keys, META)
        for i in range(0, edges + tl.cdiv(stop - last, BLOCK_M)):
            start = tl.where(i < edges, first + i * BLOCK_M, last)
            if META.windowed:
                start = tl.where(i < edges, first, last - edges * BLOCK_M) + i * BLOCK_M
            dk, dv = _add_query_block((dk, dv), own, pointers, draws, strides, start, extent, rule, True, META)
        for start in range(whole, last, BLOCK_M):
            dk, dv = _add_query_block((dk, dv), own, pointers, draws, strides, start, extent, rule, False, META)
    store_rows(grad_key, columns, strides.grad_key.row, keys, dk * number.to(tl.float32), META.head_size, BLOCK_D)
    if META.dropout != "":
        dv *= gain(dropout_p)
    store_rows(grad_value, columns, strides.grad_value.row, keys, dv, META.value_size, BLOCK_V)


def attention_backward(
    problem: Problem,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_bias: torch.Tensor | None = None,
    grad_sinks: torch.Tensor | None = None,
) -> None:
    """Write the gradients of query, key and value to `grads`, and of the bias to `grad_bias` unless it is None.

    `grad_out`, `out` and `grads` are (batch, heads, rows, elements) with contiguous elements. `logsumexp` is float32,
    (batch, heads, rows), with at least as many rows as queries. `grad_bias` is (batch, heads, queries, keys), also for
    a broadcast bias. `grad_sinks`, unless None, is float32, (batch, heads, `problem.query_blocks`), and gets the sinks'
    gradients summed over each block of queries.
    """
    if grad_bias is None and hopper.serves(problem, grad_out, grads):
        hopper.attention_backward(problem, grad_out, out, logsumexp, grads)
        return
    if fp32_backward.serves(problem, grad_out, grads):
        fp32_backward.attention_backward(problem, grad_out, out, logsumexp, grads, grad_bias)
        return
    heads, kv_heads, dropout = problem.query.shape[1], problem.key.shape[1], problem.dropout
    tensors = grad_out, out, logsumexp, *grads, grad_bias
    dq, dkdv = backward_arguments(problem, grad_out, out, logsumexp, grads, grad_bias)
    seed, offset = (0, 0) if dropout is None else dropout.state
    drawn = {"memory": dropout and dropout.memory, "seed": seed, "offset": offset}
    others = drawn | {"dropout_p": 0.0 if dropout is None else dropout.p}
    others |= {"window": problem.window, "softcap": problem.softcap}
    dq["tensors"] = dq["tensors"]._replace(grad_sinks=grad_sinks)
    others |= compiler_options(problem.query.dtype is torch.float32)
    tile = problem.tiles.query
    blocks = problem.query_blocks
    if blocks * problem.batch * heads:
        sizes = tile_sizes(problem, heads, blocks, problem.group)
        attend_backward_dq[(blocks * problem.batch * heads,)](
            **(dq | sizes | others), META=problem.meta(tile, *tensors), **tile.options
        )
    tile = problem.tiles.key
    blocks = -(-problem.keys // tile.BLOCK_N)
    if blocks * problem.batch * kv_heads:
        sizes = tile_sizes(problem, kv_heads, blocks, 1)
        del sizes["batch_heads"], sizes["group"]
        attend_backward_dkdv[(blocks * problem.batch * kv_heads,)](
            **(dkdv | sizes | others), META=problem.meta(tile, *tensors), **tile.options
        )
