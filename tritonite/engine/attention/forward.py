"""Attention's forward pass: softmax over keys that are read once (Dao et al. 2022; Milakov and Gimelshein 2018)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tritonite.engine.attention.dropout import drawn_for, gain, kept_tile
from tritonite.engine.attention.hopper import float32_forward
from tritonite.engine.attention.hopper import forward as hopper
from tritonite.engine.attention.place import place, sequence
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.scores import base_of, biased, exponentials, load_bias, score_factor, seen
from tritonite.language.bf16x6 import dot_terms, split_terms
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import random_state
from tritonite.runtime.libentry import libentry

# The natural logarithm of two.
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(pointer, rows, stride, count, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """A tile of rows of SIZE elements next to each other, in blocks of BLOCK; with MASKED 0 from row `count` on."""
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
    """Write a tile of rows, but for those from `count` on."""
    columns = tl.arange(0, BLOCK)
    pointers = pointer + (rows * stride)[:, None] + columns[None, :]
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=(rows < count)[:, None] & (columns < SIZE)[None, :])


@triton.jit
def key_range(block, keys, diagonal, FACTS: tl.constexpr):
    """(where keys end that all of a block's queries see, in whole blocks; where those end that some see)."""
    BLOCK_M: tl.constexpr = FACTS.block_m
    BLOCK_N: tl.constexpr = FACTS.block_n
    end, whole = keys, keys // BLOCK_N * BLOCK_N
    if FACTS.causal:
        first = block * BLOCK_M + diagonal + 1
        end = tl.minimum(keys, tl.maximum(first + BLOCK_M - 1, 0))
        whole = tl.minimum(whole, tl.maximum(first, 0) // BLOCK_N * BLOCK_N)
    return whole, end


@triton.jit
def _take(
    state,
    q,
    key,
    value,
    bias,
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
    """The state of rows after a block of keys: sums of values, the largest score, and the sum of exponentials.

    `drawn` is None without dropout, and `corner` the tile's first row and column. Where nothing is masked or added,
    scores are scaled and the largest subtracted by one instruction.
    """
    HEAD: tl.constexpr = FACTS.head_size
    VALUE: tl.constexpr = FACTS.value_size
    BLOCK_D: tl.constexpr = FACTS.block_d
    BLOCK_V: tl.constexpr = FACTS.block_v
    PRECISION: tl.constexpr = FACTS.precision
    NATURAL: tl.constexpr = FACTS.natural
    total, largest, denominator = state
    exists = seen(rows[:, None], columns[None, :], span, FACTS.causal)
    added = load_bias(bias, strides[4], rows[:, None], columns[None, :], span, exists, FACTS.bias_of_keys)
    k = load_rows(key, columns, strides[1][2], span[1], HEAD, BLOCK_D, MASKED)
    scores = dot_terms(q, split_terms(tl.trans(k), PRECISION), None, PRECISION)
    if MASKED or bias is not None:
        scores *= factor
        if bias is not None:
            scores = biased(scores, added)
        if MASKED:
            scores = tl.where(exists, scores, float("-inf"))
        most = tl.maximum(largest, tl.max(scores, 1))
    else:
        most = tl.maximum(largest, tl.max(scores, 1) * factor)
    base = base_of(most)
    if not MASKED and bias is None:
        scores *= factor
    shares = exponentials(scores, base[:, None], NATURAL, FACTS.nats)
    kept = exponentials(largest, base, NATURAL, FACTS.nats)
    denominator = denominator * kept + tl.sum(shares, 1)
    v = load_rows(value, columns, strides[2][2], span[1], VALUE, BLOCK_V, MASKED)
    if drawn is not None:
        shares = tl.where(kept_tile(drawn, corner[0], corner[1], span[1], FACTS), shares, 0.0)
    weights = split_terms(shares.to(v.dtype), PRECISION)
    total = dot_terms(weights, split_terms(v, PRECISION), total * kept[:, None], PRECISION)
    return total, most, denominator


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
    p: tl.float64,
    FACTS: tl.constexpr,
):
    """A program takes a block of a head's queries over all keys that they see.

    `strides` are those of query, key, value, the result, the bias and the logarithms of the sums, whose last one is
    that of a packed sequence's first row. Rows that see nothing are 0; rows of the logarithms from the last query on,
    to `padded`, are infinite. The state of dropout is left in `memory`, where that is asked for.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = FACTS.block_m
    BLOCK_N: tl.constexpr = FACTS.block_n
    BLOCK_D: tl.constexpr = FACTS.block_d
    BLOCK_V: tl.constexpr = FACTS.block_v
    HEAD: tl.constexpr = FACTS.head_size
    VALUE: tl.constexpr = FACTS.value_size
    EMPTY: tl.constexpr = FACTS.empty
    NATURAL: tl.constexpr = FACTS.natural
    PRECISION: tl.constexpr = FACTS.precision
    block, batch, head = place(tl.program_id(0), blocks, heads, batch_heads, group)
    shared = head // FACTS.ratio
    queries, keys, diagonal, first, first_key = sequence(
        query_starts, key_starts, batch, queries, keys, diagonal, FACTS
    )
    drawn = None
    if FACTS.dropout != "":
        drawn = drawn_for(seed, offset, None, p, batch * heads + head, queries, keys, FACTS)
        if memory is not None:
            tl.store(memory, seed, mask=tl.program_id(0) == 0)
            tl.store(memory + 1, offset, mask=tl.program_id(0) == 0)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(FACTS.index)
    query += batch * strides[0][0] + head * strides[0][1] + first * strides[0][2]
    key += batch * strides[1][0] + shared * strides[1][1] + first_key * strides[1][2]
    value += batch * strides[2][0] + shared * strides[2][1] + first_key * strides[2][2]
    out += batch * strides[3][0] + head * strides[3][1] + first * strides[3][2]
    if bias is not None:
        bias += batch * strides[4][0] + head * strides[4][1]
    if query_starts is not None:
        # A block beyond a sequence that is shorter than the longest.
        keys = tl.where(block * BLOCK_M < queries, keys, 0)
    q = load_rows(query, rows, strides[0][2], queries, HEAD, BLOCK_D, True)
    # What is largest is so after scaling by a positive number.
    number = tl.full((), scale, tl.float64)
    q = split_terms(tl.where(number < 0, -q, q), PRECISION)
    factor = score_factor(tl.abs(number), FACTS.nats)
    whole, end = key_range(block, keys, diagonal, FACTS)
    total = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    denominator = tl.zeros((BLOCK_M,), tl.float32)
    span = (queries, keys, diagonal)
    lanes = tl.arange(0, BLOCK_N).to(FACTS.index)
    for start in range(0, whole, BLOCK_N):
        state = (total, largest, denominator)
        total, largest, denominator = _take(
            state,
            q,
            key,
            value,
            bias,
            drawn,
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
        state = (total, largest, denominator)
        total, largest, denominator = _take(
            state,
            q,
            key,
            value,
            bias,
            drawn,
            strides,
            rows,
            start + lanes,
            (block * BLOCK_M, start),
            span,
            factor,
            True,
            FACTS,
        )
    nothing = denominator == 0
    denominator = tl.where(nothing, 1.0, denominator)
    total /= denominator[:, None]
    if FACTS.dropout != "":
        total *= gain(p)
    store_rows(out, rows, strides[3][2], queries, total, VALUE, BLOCK_V)
    if logsumexp is not None:
        if NATURAL:
            logarithm = largest + tl.log(denominator)
        elif FACTS.nats:
            logarithm = largest + tl.log2(denominator) * _LN2
        else:
            logarithm = (largest + tl.log2(denominator)) * _LN2
        logarithm = tl.where(nothing, float(EMPTY), logarithm)
        logarithm = tl.where(rows < queries, logarithm, float("inf"))
        logsumexp += batch * strides[5][0] + head * strides[5][1] + first * strides[5][3]
        tl.store(logsumexp + rows * strides[5][2], logarithm, mask=rows < tl.maximum(queries, padded))


def attention(problem: Problem, out: torch.Tensor, logsumexp: torch.Tensor | None, empty: str = "inf") -> Any:
    """Write softmax(scale * query @ key.mT + bias) @ value, and the logarithms of the sums of exponentials.

    Returns the seed and the offset that dropout drew.

    Args:
        problem: the operands.
        out: (batch, heads, queries, elements of a value).
        logsumexp: (batch, heads, rows) of float32, of as many rows as there are queries, or up to 31 more. Of packed
            sequences it is (1, heads, all rows) where these are packed, too.
        empty: of rows that see no key, "0" or "inf".
    """
    heads, queries = problem.query.shape[1], problem.queries
    if not problem.batch * heads * queries:
        return None
    if hopper.takes(problem, out):
        hopper.attention(problem, out, logsumexp, empty)
        return None
    if float32_forward.takes(problem, out):
        float32_forward.attention(problem, out, logsumexp, empty)
        return None
    tile = problem.tiles.forward
    blocks = -(-queries // tile.BLOCK_M)
    operands = problem.query, problem.key, problem.value
    facts, dropout = problem.facts(tile, out, empty=empty), problem.dropout
    drawn = None if dropout is None else random_state(out.device, dropout.advanced)
    seed, offset = drawn or (0, 0)
    attend[(blocks * problem.batch * heads,)](
        *(*operands, problem.bias, out, logsumexp, *problem.starts, dropout and dropout.memory),
        strides=(
            *[problem.strides(tensor) for tensor in (*operands, out)],
            *(problem.bias_strides, problem.logarithm_strides(logsumexp)),
        ),
        heads=heads,
        batch_heads=problem.batch * heads,
        group=problem.group,
        blocks=blocks,
        queries=queries,
        keys=problem.keys,
        diagonal=problem.diagonal,
        padded=0 if logsumexp is None or (problem.packed and problem.packed.logarithms) else logsumexp.shape[2],
        scale=problem.factor,
        seed=seed,
        offset=offset,
        p=0.0 if dropout is None else dropout.p,
        FACTS=facts,
        **tile.options,
        **compiler_options(problem.query.dtype is torch.float32),
    )
    return drawn
