"""Attention's forward pass: softmax over keys that are read once (Dao et al. 2022; Milakov and Gimelshein 2018).

A program has a block of queries. It keeps each row's max (m_i), its sum of exponentials (l_i), and its sum of values
times exponentials (acc), over the keys so far. A new max rescales both sums, and at the end l_i divides acc.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.engine.attention.arguments import forward_arguments
from tritonite.engine.attention.dropout import gain, head_draws, keep_mask
from tritonite.engine.attention.hopper import forward as hopper
from tritonite.engine.attention.hopper import fp32_forward
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.prologue import (
    Extent,
    Tensors,
    TileSizes,
    head_logsumexp,
    head_scores,
    key_rows,
    locate_queries,
    query_rows,
)
from tritonite.engine.attention.scores import (
    ScoreRule,
    add_bias,
    capped_factor,
    exponentials,
    finite_max,
    head_sink,
    load_bias,
    row_logsumexp,
    scaled_products,
    score_factor,
    visible_scores,
)
from tritonite.language.bf16x6 import dot_terms, split_terms
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import random_state
from tritonite.runtime.libentry import libentry


class QueryBlock(NamedTuple):
    """A program's queries: the first one, the indices of all, and the `Extent` of their sequence."""

    first: Any
    rows: Any
    extent: Any


@triton.jit
def load_rows(pointer, rows, stride, count, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Load rows of SIZE contiguous elements as a tile of BLOCK columns; with MASKED rows from `count` on are 0."""
    columns = tl.arange(0, BLOCK)
    pointers = pointer + (rows * stride)[:, None] + columns[None, :]
    if MASKED and SIZE < BLOCK:
        tile = tl.load(pointers, mask=(rows < count)[:, None] & (columns < SIZE)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=(rows < count)[:, None], other=0.0)
    elif SIZE < BLOCK:
        tile = tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(pointer, rows, stride, count, tile, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the rows of a tile below `count`."""
    columns = tl.arange(0, BLOCK)
    pointers = pointer + (rows * stride)[:, None] + columns[None, :]
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=(rows < count)[:, None] & (columns < SIZE)[None, :])


@triton.jit
def locate_block(sizes, tensors, META: tl.constexpr):
    """Return (`Head`, `QueryBlock`) of a program. A packed sequence without such a block counts as one without keys."""
    here, extent = locate_queries(sizes, tensors, META)
    first = here.block * META.block_m
    if tensors.query_starts is not None:
        extent = Extent(extent.queries, tl.where(first < extent.queries, extent.keys, 0), extent.diagonal)
    return here, QueryBlock(first, first + tl.arange(0, META.block_m).to(META.index), extent)


@triton.jit
def key_range(block, META: tl.constexpr):
    """Return (end of the whole blocks of keys that all queries of a block see, end of the keys that any query sees)."""
    BLOCK_N: tl.constexpr = META.block_n
    keys = block.extent.keys
    end, whole = keys, keys // BLOCK_N * BLOCK_N
    if META.causal:
        first = block.first + block.extent.diagonal + 1
        end = tl.minimum(keys, tl.maximum(first + META.block_m - 1, 0))
        whole = tl.minimum(whole, tl.maximum(first, 0) // BLOCK_N * BLOCK_N)
    return whole, end


@triton.jit
def window_range(block, end, window, META: tl.constexpr):
    """Return (start of the keys in any query's window, end of the blocks that begin before some query's window).

    The second is at most `end`, and a multiple of a block unless it is `end`.
    """
    BLOCK_N: tl.constexpr = META.block_n
    first = block.first + block.extent.diagonal - window + 1
    begin = tl.maximum(first, 0) // BLOCK_N * BLOCK_N
    inner = tl.cdiv(tl.maximum(first + META.block_m - 1, 0), BLOCK_N) * BLOCK_N
    return begin, tl.minimum(inner, end)


@triton.jit
def _attend_keys(state, inputs, draws, strides, block, begin, end, rule, MASKED: tl.constexpr, META: tl.constexpr):
    """Return (acc, m_i, l_i) after the blocks of keys from `begin` to `end`, with MASKED those that hide some scores.

    `inputs` are the query tile, as terms of `split_terms`, and pointers to keys, values and bias. `draws` is None
    without dropout. Without a mask, a bias or a cap, one instruction scales scores and subtracts the row max.
    """
    BLOCK_N: tl.constexpr = META.block_n
    PRECISION: tl.constexpr = META.precision
    NATURAL: tl.constexpr = META.natural
    acc, m_i, l_i = state
    extent = block.extent
    lanes = tl.arange(0, BLOCK_N).to(META.index)
    for start in range(begin, end, BLOCK_N):
        columns = start + lanes
        i, j = block.rows[:, None], columns[None, :]
        visible = visible_scores(i, j, extent, META.causal, rule.window)
        bias_tile = load_bias(inputs.bias, strides.bias, i, j, extent.keys, visible, META.bias_of_keys)
        k = load_rows(inputs.key, columns, strides.key.row, extent.keys, META.head_size, META.block_d, MASKED)
        scores = dot_terms(inputs.query, split_terms(tl.trans(k), PRECISION), None, PRECISION)
        if (MASKED or META.capped) or inputs.bias is not None:
            scores = scaled_products(scores, rule, META)
            if META.capped:
                scores *= rule.cap
            if inputs.bias is not None:
                scores = add_bias(scores, bias_tile)
            if MASKED:
                scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(m_i, tl.max(scores, 1))
        else:
            new_max = tl.maximum(m_i, tl.max(scores, 1) * rule.factor)
        base = finite_max(new_max)
        if not (MASKED or META.capped) and inputs.bias is None:
            scores *= rule.factor
        p = exponentials(scores, base[:, None], NATURAL, META.nats)
        rescale = exponentials(m_i, base, NATURAL, META.nats)
        l_i = l_i * rescale + tl.sum(p, 1)
        v = load_rows(inputs.value, columns, strides.value.row, extent.keys, META.value_size, META.block_v, MASKED)
        if draws is not None:
            p = tl.where(keep_mask(draws, block.first, start, extent.keys, META), p, 0.0)
        weights = split_terms(p.to(v.dtype), PRECISION)
        acc = dot_terms(weights, split_terms(v, PRECISION), acc * rescale[:, None], PRECISION)
        m_i = new_max
    return acc, m_i, l_i


@libentry()
@triton.jit(do_not_specialize=[*TileSizes._fields, "padded", "seed", "offset", "window"])
def attend(
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
    padded,
    scale: tl.float64,
    seed: tl.int64,
    offset: tl.int64,
    dropout_p: tl.float64,
    window,
    softcap,
    META: tl.constexpr,
):
    """Attend a block of a head's queries to all keys that they see.

    Queries that see no key get 0. logsumexp is inf behind the last query, up to row `padded`. `memory`, unless None,
    gets the seed and the offset of dropout. Without a window or a soft cap the parameter is None.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_V: tl.constexpr = META.block_v
    PRECISION: tl.constexpr = META.precision
    sizes = TileSizes(heads, batch_heads, group, blocks, queries, keys, diagonal)
    here, block = locate_block(sizes, tensors, META)
    rows, extent = block.rows, block.extent
    draws = None
    if META.dropout != "":
        flat_head = here.batch * heads + here.head
        draws = head_draws(seed, offset, None, dropout_p, flat_head, extent.queries, extent.keys, META)
        if memory is not None:
            tl.store(memory, seed, mask=tl.program_id(0) == 0)
            tl.store(memory + 1, offset, mask=tl.program_id(0) == 0)
    query = query_rows(tensors.query, strides.query, here)
    key, value = key_rows(tensors.key, strides.key, here), key_rows(tensors.value, strides.value, here)
    bias = head_scores(tensors.bias, strides.bias, here)
    q = load_rows(query, rows, strides.query.row, extent.queries, META.head_size, META.block_d, True)
    # The row max is taken before scaling, which a positive factor permits.
    number = tl.full((), scale, tl.float64)
    q = split_terms(tl.where(number < 0, -q, q), PRECISION)
    factor, cap = score_factor(tl.abs(number), META.nats), None
    if META.capped:
        factor, cap = capped_factor(tl.abs(number), softcap, META)
    rule = ScoreRule(factor, cap, window)
    inputs = Tensors(q, key, value, bias)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    if tensors.sinks is not None:
        m_i = tl.broadcast_to(head_sink(tensors.sinks, here.head, META.nats), (BLOCK_M,))
        l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    whole, end = key_range(block, META)
    inner = 0
    if META.windowed:
        begin, inner = window_range(block, end, window, META)
        acc, m_i, l_i = _attend_keys((acc, m_i, l_i), inputs, draws, strides, block, begin, inner, rule, True, META)
    state = _attend_keys((acc, m_i, l_i), inputs, draws, strides, block, inner, whole, rule, False, META)
    if META.windowed:
        whole = tl.maximum(whole, inner)
    acc, m_i, l_i = _attend_keys(state, inputs, draws, strides, block, whole, end, rule, True, META)
    no_keys = l_i == 0
    l_i = tl.where(no_keys, 1.0, l_i)
    acc /= l_i[:, None]
    if META.dropout != "":
        acc *= gain(dropout_p)
    out = query_rows(tensors.out, strides.out, here)
    store_rows(out, rows, strides.out.row, extent.queries, acc, META.value_size, BLOCK_V)
    if tensors.logsumexp is not None:
        found = tl.where(no_keys, float(META.empty), row_logsumexp(m_i, l_i, META))
        found = tl.where(rows < extent.queries, found, float("inf"))
        logsumexp = head_logsumexp(tensors.logsumexp, strides.logsumexp, here)
        tl.store(logsumexp + rows * strides.logsumexp.row, found, mask=rows < tl.maximum(extent.queries, padded))


def attention(problem: Problem, out: torch.Tensor, logsumexp: torch.Tensor | None, empty: str = "inf") -> Any:
    """Write softmax(scale * query @ key.mT + bias) @ value to `out`, and rows' logsumexp unless it is None.

    Returns the seed and the offset that dropout drew, or None without dropout.

    Args:
        problem: the operands.
        out: (batch, heads, queries, value size).
        logsumexp: float32, (batch, heads, rows), with up to 31 more rows than queries. For packed sequences whose
            logsumexp is packed too, (1, heads, all rows).
        empty: logsumexp of queries that see no key, "0" or "inf".
    """
    if not problem.batch * problem.query.shape[1] * problem.queries:
        return None
    for special in (hopper, fp32_forward):
        if special.serves(problem, out):
            special.attention(problem, out, logsumexp, empty)
            return None
    tile, dropout = problem.tiles.forward, problem.dropout
    meta = problem.meta(tile, out, empty=empty)
    drawn = None if dropout is None else random_state(out.device, dropout.advanced)
    seed, offset = drawn or (0, 0)
    programs, arguments = forward_arguments(problem, out, logsumexp, tile.BLOCK_M)
    attend[(programs,)](
        **arguments,
        memory=dropout and dropout.memory,
        seed=seed,
        offset=offset,
        dropout_p=0.0 if dropout is None else dropout.p,
        window=problem.window,
        softcap=problem.softcap,
        META=meta,
        **tile.options,
        **compiler_options(problem.query.dtype is torch.float32),
    )
    return drawn
