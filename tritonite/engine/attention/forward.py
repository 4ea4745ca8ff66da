"""Attention's forward pass: softmax over keys that are read once (Dao et al. 2022; Milakov and Gimelshein 2018)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.engine.attention.dropout import gain, head_draws, keep_mask
from tritonite.engine.attention.hopper import forward as hopper
from tritonite.engine.attention.hopper import fp32_forward
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.prologue import (
    Extent,
    ForwardStrides,
    HeadStrides,
    head_logsumexp,
    head_rows,
    head_scores,
    program_tile,
    sequence_extent,
)
from tritonite.engine.attention.scores import (
    add_bias,
    exponentials,
    finite_max,
    load_bias,
    score_factor,
    visible_scores,
)
from tritonite.language.bf16x6 import dot_terms, split_terms
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import random_state
from tritonite.runtime.libentry import libentry

_LN2 = tl.constexpr(0.6931471805599453)


class Inputs(NamedTuple):
    """A program's query tile, as terms of `parts`, and pointers to its head's keys, values and bias."""

    q: Any
    key: Any
    value: Any
    bias: Any


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
def key_range(block, keys, diagonal, META: tl.constexpr):
    """Return (end of the whole blocks of keys that all queries of a block see, end of the keys that any query sees)."""
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    end, whole = keys, keys // BLOCK_N * BLOCK_N
    if META.causal:
        first = block * BLOCK_M + diagonal + 1
        end = tl.minimum(keys, tl.maximum(first + BLOCK_M - 1, 0))
        whole = tl.minimum(whole, tl.maximum(first, 0) // BLOCK_N * BLOCK_N)
    return whole, end


@triton.jit
def _attend_block(
    state, inputs, draws, strides, rows, columns, tile_start, extent, factor, MASKED: tl.constexpr, META: tl.constexpr
):
    """Return (accumulator, row max, row sum) after a block of keys.

    `tile_start` is the first row and column of the tile; `draws` is None without dropout. Without a mask or a bias,
    one instruction scales scores and subtracts the row max.
    """
    HEAD: tl.constexpr = META.head_size
    VALUE: tl.constexpr = META.value_size
    BLOCK_D: tl.constexpr = META.block_d
    BLOCK_V: tl.constexpr = META.block_v
    PRECISION: tl.constexpr = META.precision
    NATURAL: tl.constexpr = META.natural
    acc, m_i, l_i = state
    i, j = rows[:, None], columns[None, :]
    visible = visible_scores(i, j, extent, META.causal)
    bias_tile = load_bias(inputs.bias, strides.bias, i, j, extent.keys, visible, META.bias_of_keys)
    k = load_rows(inputs.key, columns, strides.key.row, extent.keys, HEAD, BLOCK_D, MASKED)
    scores = dot_terms(inputs.q, split_terms(tl.trans(k), PRECISION), None, PRECISION)
    if MASKED or inputs.bias is not None:
        scores *= factor
        if inputs.bias is not None:
            scores = add_bias(scores, bias_tile)
        if MASKED:
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(m_i, tl.max(scores, 1))
    else:
        new_max = tl.maximum(m_i, tl.max(scores, 1) * factor)
    base = finite_max(new_max)
    if not MASKED and inputs.bias is None:
        scores *= factor
    p = exponentials(scores, base[:, None], NATURAL, META.nats)
    rescale = exponentials(m_i, base, NATURAL, META.nats)
    l_i = l_i * rescale + tl.sum(p, 1)
    v = load_rows(inputs.value, columns, strides.value.row, extent.keys, VALUE, BLOCK_V, MASKED)
    if draws is not None:
        p = tl.where(keep_mask(draws, tile_start[0], tile_start[1], extent.keys, META), p, 0.0)
    weights = split_terms(p.to(v.dtype), PRECISION)
    acc = dot_terms(weights, split_terms(v, PRECISION), acc * rescale[:, None], PRECISION)
    return acc, new_max, l_i


@libentry()
@triton.jit(
    do_not_specialize=[
        *("heads", "batch_heads", "group", "blocks", "queries", "keys", "diagonal", "padded", "seed", "offset")
    ]
)
def attend(
    query,
    key,
    value,
    bias,
    out,
    logsumexp,
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
    padded,
    scale: tl.float64,
    seed: tl.int64,
    offset: tl.int64,
    dropout_p: tl.float64,
    META: tl.constexpr,
):
    """Attend a block of a head's queries to all keys that they see.

    `strides` are `ForwardStrides`. Queries that see no key get 0. logsumexp is inf behind the last query, up to row
    `padded`. `memory`, unless None, gets the seed and the offset of dropout.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_D: tl.constexpr = META.block_d
    BLOCK_V: tl.constexpr = META.block_v
    PRECISION: tl.constexpr = META.precision
    strides = ForwardStrides(*[HeadStrides(*each) for each in strides])
    block, batch, head = program_tile(tl.program_id(0), blocks, heads, batch_heads, group)
    kv_head = head // META.ratio
    queries, keys, diagonal, first_query, first_key = sequence_extent(
        query_starts, key_starts, batch, queries, keys, diagonal, META
    )
    draws = None
    if META.dropout != "":
        draws = head_draws(seed, offset, None, dropout_p, batch * heads + head, queries, keys, META)
        if memory is not None:
            tl.store(memory, seed, mask=tl.program_id(0) == 0)
            tl.store(memory + 1, offset, mask=tl.program_id(0) == 0)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(META.index)
    query = head_rows(query, strides.query, batch, head, first_query)
    key = head_rows(key, strides.key, batch, kv_head, first_key)
    value = head_rows(value, strides.value, batch, kv_head, first_key)
    out = head_rows(out, strides.out, batch, head, first_query)
    if bias is not None:
        bias = head_scores(bias, strides.bias, batch, head)
    if query_starts is not None:
        # This sequence may be shorter than the longest and have no such block.
        keys = tl.where(block * BLOCK_M < queries, keys, 0)
    q = load_rows(query, rows, strides.query.row, queries, META.head_size, BLOCK_D, True)
    # The row max is taken before scaling, which a positive factor permits.
    number = tl.full((), scale, tl.float64)
    q = split_terms(tl.where(number < 0, -q, q), PRECISION)
    factor = score_factor(tl.abs(number), META.nats)
    whole, end = key_range(block, keys, diagonal, META)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    inputs, extent = Inputs(q, key, value, bias), Extent(queries, keys, diagonal)
    lanes = tl.arange(0, BLOCK_N).to(META.index)
    for start in range(0, whole, BLOCK_N):
        state, tile_start = (acc, m_i, l_i), (block * BLOCK_M, start)
        acc, m_i, l_i = _attend_block(
            state, inputs, draws, strides, rows, start + lanes, tile_start, extent, factor, False, META
        )
    for start in range(whole, end, BLOCK_N):
        state, tile_start = (acc, m_i, l_i), (block * BLOCK_M, start)
        acc, m_i, l_i = _attend_block(
            state, inputs, draws, strides, rows, start + lanes, tile_start, extent, factor, True, META
        )
    no_keys = l_i == 0
    l_i = tl.where(no_keys, 1.0, l_i)
    acc /= l_i[:, None]
    if META.dropout != "":
        acc *= gain(dropout_p)
    store_rows(out, rows, strides.out.row, queries, acc, META.value_size, BLOCK_V)
    if logsumexp is not None:
        if META.natural:
            found = m_i + tl.log(l_i)
        elif META.nats:
            found = m_i + tl.log2(l_i) * _LN2
        else:
            found = (m_i + tl.log2(l_i)) * _LN2
        found = tl.where(no_keys, float(META.empty), found)
        found = tl.where(rows < queries, found, float("inf"))
        logsumexp = head_logsumexp(logsumexp, strides.logsumexp, batch, head, first_query)
        tl.store(logsumexp + rows * strides.logsumexp.row, found, mask=rows < tl.maximum(queries, padded))


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
    heads, queries = problem.query.shape[1], problem.queries
    if not problem.batch * heads * queries:
        return None
    if hopper.serves(problem, out):
        hopper.attention(problem, out, logsumexp, empty)
        return None
    if fp32_forward.serves(problem, out):
        fp32_forward.attention(problem, out, logsumexp, empty)
        return None
    tile = problem.tiles.forward
    blocks = -(-queries // tile.BLOCK_M)
    operands = problem.query, problem.key, problem.value
    meta, dropout = problem.meta(tile, out, empty=empty), problem.dropout
    drawn = None if dropout is None else random_state(out.device, dropout.advanced)
    seed, offset = drawn or (0, 0)
    attend[(blocks * problem.batch * heads,)](
        *(*operands, problem.bias, out, logsumexp, *problem.starts, dropout and dropout.memory),
        strides=(
            *[problem.strides(tensor) for tensor in (*operands, out)],
            *(problem.bias_strides, problem.logsumexp_strides(logsumexp)),
        ),
        heads=heads,
        batch_heads=problem.batch * heads,
        group=problem.group,
        blocks=blocks,
        queries=queries,
        keys=problem.keys,
        diagonal=problem.diagonal,
        padded=problem.padded_rows(logsumexp),
        scale=problem.factor,
        seed=seed,
        offset=offset,
        dropout_p=0.0 if dropout is None else dropout.p,
        META=meta,
        **tile.options,
        **compiler_options(problem.query.dtype is torch.float32),
    )
    return drawn
