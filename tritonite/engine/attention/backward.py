"""Attention's backward pass, which computes probabilities again (Dao 2023), without atomic operations.

One launch is of queries, another of keys, each of which adds up its own sums in one order: the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tritonite.engine.attention.dropout import drawn_for, gain, kept_tile
from tritonite.engine.attention.forward import key_range, load_rows, store_rows
from tritonite.engine.attention.hopper import backward as hopper
from tritonite.engine.attention.hopper import float32_backward
from tritonite.engine.attention.place import place, sequence
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.scores import (
    are_rounded,
    biased,
    excess_of,
    exponentials,
    load_bias,
    load_logarithms,
    probabilities_of,
    score_factor,
    seen,
    store_scores,
)
from tritonite.language.bf16x6 import dot_terms, split_terms
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry


@triton.jit
def _probabilities(scores, logarithms, excess, exists, added, factor, MASKED: tl.constexpr, FACTS: tl.constexpr):
    """The probabilities that products of queries and keys stand for; without a bias of numbers `excess` is None."""
    scores *= factor
    if added is not None:
        scores = biased(scores, added)
    if excess is not None:
        probability = probabilities_of(scores, logarithms, excess, FACTS.natural)
    else:
        probability = exponentials(scores, logarithms, FACTS.natural, False)
    if MASKED:
        probability = tl.where(exists, probability, 0.0)
    return probability


@triton.jit
def _excess(q, key, bias, strides, rows, span, factor, logarithms, end, FACTS: tl.constexpr):
    """The logarithms of the sums of probabilities of rows whose logarithms are rounded, 0 of other rows.

    Only a block that has such a row goes through its keys for that, up to `end`.
    """
    PRECISION: tl.constexpr = FACTS.precision
    BLOCK_M: tl.constexpr = FACTS.block_m
    BLOCK_N: tl.constexpr = FACTS.block_n
    HEAD: tl.constexpr = FACTS.head_size
    BLOCK_D: tl.constexpr = FACTS.block_d
    excess = tl.zeros((BLOCK_M,), tl.float32)
    if tl.max(are_rounded(logarithms).to(tl.int32), 0) > 0:
        sums = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(0, end, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N).to(FACTS.index)
            exists = seen(rows[:, None], columns[None, :], span, FACTS.causal)
            added = load_bias(bias, strides[3], rows[:, None], columns[None, :], span, exists, FACTS.bias_of_keys)
            k = load_rows(key, columns, strides[1][2], span[1], HEAD, BLOCK_D, True)
            scores = dot_terms(q, split_terms(tl.trans(k), PRECISION), None, PRECISION)
            probability = _probabilities(
                scores, logarithms[:, None], excess[:, None], exists, added, factor, True, FACTS
            )
            sums += tl.sum(probability, 1)
        excess = excess_of(sums, logarithms, FACTS.natural)
    return excess


@triton.jit
def _take_keys(
    total,
    q,
    grad,
    key,
    value,
    bias,
    grad_bias,
    drawn,
    of_rows,
    excess,
    strides,
    rows,
    columns,
    corner,
    span,
    factor,
    MASKED: tl.constexpr,
    FACTS: tl.constexpr,
):
    """The gradient of queries and what a block of keys adds to it, and its scores' own where a bias' is asked for.

    `of_rows` are the logarithms and `delta`, beside a bias of numbers `excess` is theirs, `corner` is the tile's first
    row and column.
    """
    HEAD: tl.constexpr = FACTS.head_size
    VALUE: tl.constexpr = FACTS.value_size
    BLOCK_D: tl.constexpr = FACTS.block_d
    BLOCK_V: tl.constexpr = FACTS.block_v
    PRECISION: tl.constexpr = FACTS.precision
    logarithms, delta = of_rows
    if excess is not None:
        excess = excess[:, None]
    exists = seen(rows[:, None], columns[None, :], span, FACTS.causal)
    added = load_bias(bias, strides[3], rows[:, None], columns[None, :], span, exists, FACTS.bias_of_keys)
    k = load_rows(key, columns, strides[1][2], span[1], HEAD, BLOCK_D, MASKED)
    v = load_rows(value, columns, strides[2][2], span[1], VALUE, BLOCK_V, MASKED)
    scores = dot_terms(q, split_terms(tl.trans(k), PRECISION), None, PRECISION)
    probability = _probabilities(scores, logarithms[:, None], excess, exists, added, factor, MASKED, FACTS)
    of_shares = dot_terms(grad, split_terms(tl.trans(v), PRECISION), None, PRECISION)
    if drawn is not None:
        of_shares = tl.where(kept_tile(drawn, corner[0], corner[1], span[1], FACTS), of_shares * drawn[3], 0.0)
    grad_scores = probability * (of_shares - delta[:, None])
    if MASKED:
        grad_scores = tl.where(exists, grad_scores, 0.0)
    if grad_bias is not None:
        store_scores(grad_bias, grad_scores, strides[8], rows, columns, span)
    return dot_terms(split_terms(grad_scores.to(k.dtype), PRECISION), split_terms(k, PRECISION), total, PRECISION)


@libentry()
@triton.jit(
    do_not_specialize=["heads", "batch_heads", "group", "blocks", "queries", "keys", "diagonal", "seed", "offset"]
)
def attend_to_queries(
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
    p: tl.float64,
    FACTS: tl.constexpr,
):
    """A program computes the gradient of a block of a head's queries, and leaves the products of rows in `delta`.

    `strides` are those of query, key, value, bias, the result's gradient, the result, the logarithms and the gradients
    of query and bias. `delta`, of all heads' queries, gets the sums over a value's elements of the result and its
    gradient: its strides come last, of the batch and of heads. `excesses`, of the same strides, gets those of rows for
    the launch for keys, and is None without a bias of numbers.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = FACTS.block_m
    BLOCK_N: tl.constexpr = FACTS.block_n
    BLOCK_D: tl.constexpr = FACTS.block_d
    BLOCK_V: tl.constexpr = FACTS.block_v
    HEAD: tl.constexpr = FACTS.head_size
    VALUE: tl.constexpr = FACTS.value_size
    PRECISION: tl.constexpr = FACTS.precision
    block, batch, head = place(tl.program_id(0), blocks, heads, batch_heads, group)
    shared = head // FACTS.ratio
    queries, keys, diagonal, first, first_key = sequence(
        query_starts, key_starts, batch, queries, keys, diagonal, FACTS
    )
    drawn = None
    if FACTS.dropout != "":
        drawn = drawn_for(seed, offset, memory, p, batch * heads + head, queries, keys, FACTS)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(FACTS.index)
    query += batch * strides[0][0] + head * strides[0][1] + first * strides[0][2]
    key += batch * strides[1][0] + shared * strides[1][1] + first_key * strides[1][2]
    value += batch * strides[2][0] + shared * strides[2][1] + first_key * strides[2][2]
    if bias is not None:
        bias += batch * strides[3][0] + head * strides[3][1]
    grad_out += batch * strides[4][0] + head * strides[4][1] + first * strides[4][2]
    out += batch * strides[5][0] + head * strides[5][1] + first * strides[5][2]
    logsumexp += batch * strides[6][0] + head * strides[6][1] + first * strides[6][3]
    grad_query += batch * strides[7][0] + head * strides[7][1] + first * strides[7][2]
    if grad_bias is not None:
        grad_bias += batch * strides[8][0] + head * strides[8][1]
    delta += batch * strides[9][0] + head * strides[9][1] + first
    if excesses is not None:
        excesses += batch * strides[9][0] + head * strides[9][1] + first
    if query_starts is not None:
        # A block beyond a sequence that is shorter than the longest.
        keys = tl.where(block * BLOCK_M < queries, keys, 0)
    q = load_rows(query, rows, strides[0][2], queries, HEAD, BLOCK_D, True)
    grad = load_rows(grad_out, rows, strides[4][2], queries, VALUE, BLOCK_V, True)
    result = load_rows(out, rows, strides[5][2], queries, VALUE, BLOCK_V, True)
    products = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + rows, products, mask=rows < queries)
    q, grad = split_terms(q, PRECISION), split_terms(grad, PRECISION)
    logarithms = load_logarithms(logsumexp, rows, strides[6][2], queries, FACTS.nats)
    number = tl.full((), scale, tl.float64)
    factor = score_factor(number, FACTS.nats)
    whole, end = key_range(block, keys, diagonal, FACTS)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    span = (queries, keys, diagonal)
    lanes = tl.arange(0, BLOCK_N).to(FACTS.index)
    excess = None
    if excesses is not None:
        excess = _excess(q, key, bias, strides, rows, span, factor, logarithms, end, FACTS)
        tl.store(excesses + rows, excess, mask=rows < queries)
    of_rows = (logarithms, products)
    for start in range(0, whole, BLOCK_N):
        total = _take_keys(
            total,
            q,
            grad,
            key,
            value,
            bias,
            grad_bias,
            drawn,
            of_rows,
            excess,
            strides,
            rows,
            start + lanes,
            (block * BLOCK_M, start),
            span,
            factor,
            False,
            FACTS,
        )
    for start in range(whole, end, BLOCK_N):
        total = _take_keys(
            total,
            q,
            grad,
            key,
            value,
            bias,
            grad_bias,
            drawn,
            of_rows,
            excess,
            strides,
            rows,
            start + lanes,
            (block * BLOCK_M, start),
            span,
            factor,
            True,
            FACTS,
        )
    if grad_bias is not None:
        nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(whole + tl.cdiv(tl.maximum(end - whole, 0), BLOCK_N) * BLOCK_N, keys, BLOCK_N):
            store_scores(grad_bias, nothing, strides[8], rows, start + lanes, span)
    store_rows(grad_query, rows, strides[7][2], queries, total * number.to(tl.float32), HEAD, BLOCK_D)


@triton.jit
def _take_queries(
    totals,
    k,
    v,
    query,
    bias,
    shift,
    grad_out,
    logsumexp,
    delta,
    excesses,
    drawn,
    strides,
    rows,
    columns,
    corner,
    span,
    factor,
    MASKED: tl.constexpr,
    FACTS: tl.constexpr,
):
    """The gradients of keys and of values and what a block of queries adds to them; tiles have a row for each key.

    The head's bias is `shift` from the first one's. Beside a bias of numbers `excesses` are those of rows'
    logarithms. `corner` is the tile's first query and key.
    """
    HEAD: tl.constexpr = FACTS.head_size
    VALUE: tl.constexpr = FACTS.value_size
    BLOCK_D: tl.constexpr = FACTS.block_d
    BLOCK_V: tl.constexpr = FACTS.block_v
    PRECISION: tl.constexpr = FACTS.precision
    of_key, of_value = totals
    if bias is not None:
        bias += shift
    exists = seen(rows[None, :], columns[:, None], span, FACTS.causal)
    added = load_bias(bias, strides[3], rows[None, :], columns[:, None], span, exists, FACTS.bias_of_keys)
    q = load_rows(query, rows, strides[0][2], span[0], HEAD, BLOCK_D, MASKED)
    grad = load_rows(grad_out, rows, strides[4][2], span[0], VALUE, BLOCK_V, MASKED)
    logarithms = load_logarithms(logsumexp, rows, strides[5][2], span[0], FACTS.nats)
    products = tl.load(delta + rows, mask=rows < span[0], other=0.0)
    excess = None
    if excesses is not None:
        excess = tl.load(excesses + rows, mask=rows < span[0], other=0.0)[None, :]
    scores = dot_terms(k, split_terms(tl.trans(q), PRECISION), None, PRECISION)
    probability = _probabilities(scores, logarithms[None, :], excess, exists, added, factor, MASKED, FACTS)
    weights = probability
    if drawn is not None:
        keeps = tl.trans(kept_tile(drawn, corner[0], corner[1], span[1], FACTS))
        weights = tl.where(keeps, weights, 0.0)
    weights = split_terms(weights.to(grad.dtype), PRECISION)
    of_value = dot_terms(weights, split_terms(grad, PRECISION), of_value, PRECISION)
    of_shares = dot_terms(v, split_terms(tl.trans(grad), PRECISION), None, PRECISION)
    if drawn is not None:
        of_shares = tl.where(keeps, of_shares * drawn[3], 0.0)
    grad_scores = probability * (of_shares - products[None, :])
    if MASKED:
        grad_scores = tl.where(exists, grad_scores, 0.0)
    return dot_terms(
        split_terms(grad_scores.to(q.dtype), PRECISION), split_terms(q, PRECISION), of_key, PRECISION
    ), of_value


@libentry()
@triton.jit(do_not_specialize=["heads", "blocks", "queries", "keys", "diagonal", "seed", "offset"])
def attend_to_keys(
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
    p: tl.float64,
    FACTS: tl.constexpr,
):
    """A program computes the gradients of a block of a head's keys and values, over all queries that see them.

    `strides` are those of query, key, value, bias, the result's gradient, the logarithms, the gradients of key and
    value, and `delta`. `heads` are those of the key. The first keys, which most queries see, are begun first.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = FACTS.block_m
    BLOCK_N: tl.constexpr = FACTS.block_n
    BLOCK_D: tl.constexpr = FACTS.block_d
    BLOCK_V: tl.constexpr = FACTS.block_v
    HEAD: tl.constexpr = FACTS.head_size
    VALUE: tl.constexpr = FACTS.value_size
    RATIO: tl.constexpr = FACTS.ratio
    PRECISION: tl.constexpr = FACTS.precision
    block = tl.program_id(0) % blocks
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    shared = (tl.program_id(0) // blocks % heads).to(tl.int64)
    queries, keys, diagonal, first_query, first_key = sequence(
        query_starts, key_starts, batch, queries, keys, diagonal, FACTS
    )
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N).to(FACTS.index)
    key += batch * strides[1][0] + shared * strides[1][1] + first_key * strides[1][2]
    value += batch * strides[2][0] + shared * strides[2][1] + first_key * strides[2][2]
    grad_key += batch * strides[6][0] + shared * strides[6][1] + first_key * strides[6][2]
    grad_value += batch * strides[7][0] + shared * strides[7][1] + first_key * strides[7][2]
    if query_starts is not None:
        # A block beyond a sequence that is shorter than the longest.
        queries = tl.where(block * BLOCK_N < keys, queries, 0)
    k = split_terms(load_rows(key, columns, strides[1][2], keys, HEAD, BLOCK_D, True), PRECISION)
    v = split_terms(load_rows(value, columns, strides[2][2], keys, VALUE, BLOCK_V, True), PRECISION)
    number = tl.full((), scale, tl.float64)
    factor = score_factor(number, FACTS.nats)
    # Queries from `whole` on see all keys. Masked are blocks before that, and the last where it is not full.
    first, whole, last = 0, 0, queries // BLOCK_M * BLOCK_M
    if FACTS.causal:
        first = tl.minimum(tl.maximum(block * BLOCK_N - diagonal, 0) // BLOCK_M * BLOCK_M, queries)
        whole = tl.cdiv(tl.maximum(block * BLOCK_N + BLOCK_N - 1 - diagonal, 0), BLOCK_M) * BLOCK_M
        whole = tl.minimum(whole, queries)
    last = tl.maximum(last, whole)
    edges = tl.cdiv(whole - first, BLOCK_M)
    of_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    of_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    span = (queries, keys, diagonal)
    lanes = tl.arange(0, BLOCK_M).to(FACTS.index)
    for member in range(RATIO):
        head = shared * RATIO + member
        own_query = query + batch * strides[0][0] + head * strides[0][1] + first_query * strides[0][2]
        shift = batch * strides[3][0] + head * strides[3][1]
        own_grad = grad_out + batch * strides[4][0] + head * strides[4][1] + first_query * strides[4][2]
        own = logsumexp + batch * strides[5][0] + head * strides[5][1] + first_query * strides[5][3]
        sums = delta + batch * strides[8][0] + head * strides[8][1] + first_query
        own_excesses = None
        if excesses is not None:
            own_excesses = excesses + batch * strides[8][0] + head * strides[8][1] + first_query
        drawn = None
        if FACTS.dropout != "":
            drawn = drawn_for(seed, offset, memory, p, (batch * heads) * RATIO + head, queries, keys, FACTS)
        for i in range(0, edges + tl.cdiv(queries - last, BLOCK_M)):
            start = tl.where(i < edges, first + i * BLOCK_M, last)
            totals = (of_key, of_value)
            of_key, of_value = _take_queries(
                totals,
                k,
                v,
                own_query,
                bias,
                shift,
                own_grad,
                own,
                sums,
                own_excesses,
                drawn,
                strides,
                start + lanes,
                columns,
                (start, block * BLOCK_N),
                span,
                factor,
                True,
                FACTS,
            )
        for start in range(whole, last, BLOCK_M):
            totals = (of_key, of_value)
            of_key, of_value = _take_queries(
                totals,
                k,
                v,
                own_query,
                bias,
                shift,
                own_grad,
                own,
                sums,
                own_excesses,
                drawn,
                strides,
                start + lanes,
                columns,
                (start, block * BLOCK_N),
                span,
                factor,
                False,
                FACTS,
            )
    store_rows(grad_key, columns, strides[6][2], keys, of_key * number.to(tl.float32), HEAD, BLOCK_D)
    if FACTS.dropout != "":
        of_value *= gain(p)
    store_rows(grad_value, columns, strides[7][2], keys, of_value, VALUE, BLOCK_V)


def attention_backward(
    problem: Problem,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_bias: torch.Tensor | None = None,
) -> None:
    """Write the gradients of query, key and value, from the result's and what the forward pass has left.

    `logsumexp` is (batch, heads, rows) of float32, of as many rows as queries or more; the others are (batch, heads,
    rows, elements), with elements next to each other. The gradient of a bias is one of all scores.
    """
    if grad_bias is None and hopper.takes(problem, grad_out, grads):
        hopper.attention_backward(problem, grad_out, out, logsumexp, grads)
        return
    if float32_backward.takes(problem, grad_out, grads):
        float32_backward.attention_backward(problem, grad_out, out, logsumexp, grads, grad_bias)
        return
    heads = problem.query.shape[1]
    grad_query, grad_key, grad_value = grads
    query, key, value, bias = problem.query, problem.key, problem.value, problem.bias
    delta = empty(query.shape[:3], torch.float32, query.device)
    excesses = empty(query.shape[:3], torch.float32, query.device) if problem.adds else None
    tensors = (grad_out, out, logsumexp, *grads, *(() if grad_bias is None else (grad_bias,)))
    operands = *[problem.strides(tensor) for tensor in (query, key, value)], problem.bias_strides
    read = (*operands, problem.strides(grad_out))
    logarithms, sums = problem.logarithm_strides(logsumexp), problem.strides(delta)
    dropout = problem.dropout
    seed, offset = (0, 0) if dropout is None else dropout.state
    memory = None if dropout is None else dropout.memory
    numbers: dict[str, Any] = {
        "queries": problem.queries,
        "keys": problem.keys,
        "diagonal": problem.diagonal,
        "scale": problem.factor,
    }
    numbers |= {"seed": seed, "offset": offset, "p": 0.0 if dropout is None else dropout.p}
    tile = problem.tiles.query
    blocks = -(-problem.queries // tile.BLOCK_M)
    if blocks * problem.batch * heads:
        attend_to_queries[(blocks * problem.batch * heads,)](
            *(query, key, value, bias, grad_out, out, logsumexp, grad_query, grad_bias, delta, excesses),
            *(*problem.starts, memory),
            strides=(
                *(*read, problem.strides(out), logarithms, problem.strides(grad_query)),
                *((0, 0, 0, 0) if grad_bias is None else grad_bias.stride(), sums),
            ),
            heads=heads,
            batch_heads=problem.batch * heads,
            group=problem.group,
            blocks=blocks,
            **numbers,
            FACTS=problem.facts(tile, *tensors),
            **tile.options,
            **compiler_options(query.dtype is torch.float32),
        )
    tile = problem.tiles.key
    blocks, shared = -(-problem.keys // tile.BLOCK_N), key.shape[1]
    if blocks * problem.batch * shared:
        attend_to_keys[(blocks * problem.batch * shared,)](
            *(query, key, value, bias, grad_out, logsumexp, delta, excesses, grad_key, grad_value),
            *(*problem.starts, memory),
            strides=(*read, logarithms, problem.strides(grad_key), problem.strides(grad_value), sums),
            heads=shared,
            blocks=blocks,
            **numbers,
            FACTS=problem.facts(tile, *tensors),
            **tile.options,
            **compiler_options(query.dtype is torch.float32),
        )
