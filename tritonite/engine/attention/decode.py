"""Attention of few queries over many keys: keys in splits, each by a program, which a second launch combines.

The heads of the query that share one of key and value are rows of one tile, so that keys and values are read once.
Keys and values lie in rows, or in pages that a table tells of. What a split leaves is its sum of values, its largest
score and its sum of exponentials, from which those of all keys follow (Milakov and Gimelshein 2018; Dao et al. 2023,
"Flash-Decoding for long-context inference").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.attention import table as table
from tritonite.engine.attention.problem import Facts, Problem, compiler_options, products
from tritonite.engine.attention.scores import LOG2E, base_of, biased, exponentials, load_bias, score_factor
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty, settings
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry
from tritonite.runtime.symbols import Number

# What differs from call to call of one kernel.
_SIZES = ["sequences", "tokens", "queries", "keys", "diagonal", "window", "shared", "splits", "least"]
# Splits that are combined at a time, and sequences whose places are compared at a time.
_SPLITS, _SEQUENCES = tl.constexpr(16), tl.constexpr(512)


@dataclass(frozen=True)
class DecodeFacts(Facts):
    """Everything that a kernel is compiled for: `block_m` rows are the queries of `ratio` heads each.

    Keys and values lie in pages of `page` rows, or in one tensor if that is 0. With `windowed` a query sees the last
    keys alone, with `capped` scores have a soft cap. With `split` partial results are written, for a launch that may
    be `dependent`: its programs begin beside those that it waits for. With `apart` those blocks of keys that all
    queries see are taken without comparing.
    """

    page: int = 0
    windowed: bool = False
    capped: bool = False
    split: bool = False
    dependent: bool = False
    apart: bool = False

    @property
    def run(self) -> int:
        """How many keys of a block, from a multiple of as many on, follow each other in one page."""
        return math.gcd(self.page, self.block_n)


@triton.jit
def _first_block(starts, i, FACTS: tl.constexpr):
    """Where the blocks of a sequence begin, of those of all: each may begin one that the one before has not filled."""
    return starts * FACTS.ratio // FACTS.block_m + i


@triton.jit
def _sequence_at(starts, sequences, place, BLOCKS: tl.constexpr, FACTS: tl.constexpr):
    """The sequence that has a token, or with BLOCKS a block of rows: the last that begins at it or before."""
    count = 0
    for first in range(0, sequences + 1, _SEQUENCES):
        i = first + tl.arange(0, _SEQUENCES)
        start = tl.load(starts + i, mask=i <= sequences, other=0)
        begin = _first_block(start, i, FACTS) if BLOCKS else start
        count += tl.sum(((begin <= place) & (i <= sequences)).to(tl.int32), 0)
    return tl.maximum(count - 1, 0)


@triton.jit
def _sequence(sequence, starts, lengths, key_starts, sizes):
    """(where its tokens begin, how many there are, where its keys begin, how many, its causal attention's diagonal).

    `sizes` are the sequences, all tokens, the queries and keys of each where they are alike, and the diagonal. Tokens
    behind the last sequence are one without keys.
    """
    sequences, tokens, count, length, diagonal = sizes
    first, first_key = sequence * count, 0
    if starts is not None:
        first = tl.load(starts + sequence).to(tl.int32)
        last = tl.load(starts + sequence + 1, mask=sequence < sequences, other=tokens).to(tl.int32)
        ascends = (first >= 0) & (first <= last) & (last <= tokens)
        tl.device_assert(
            ascends & ((sequence > 0) | (first == 0)), "cu_seqlens that do not begin with 0, or do not ascend"
        )
        count = last - first
    if lengths is not None:
        most = length
        length = tl.load(lengths + sequence, mask=sequence < sequences, other=0).to(tl.int32)
        tl.device_assert((length >= 0) & (length <= most), "a length that the block table has no room for")
        diagonal = length - count
    if key_starts is not None:
        first_key = tl.load(key_starts + sequence).to(tl.int32)
        length = tl.load(key_starts + sequence + 1, mask=sequence < sequences, other=first_key).to(tl.int32) - first_key
        diagonal = length - count
    return first, count, first_key, length, diagonal


@triton.jit
def _cut(block, count, length, diagonal, window, splits, least, FACTS: tl.constexpr):
    """How the keys that a block's queries see are cut: (the first, where splits begin, keys of a split, the end)."""
    BLOCK_M: tl.constexpr = FACTS.block_m
    BLOCK_N: tl.constexpr = FACTS.block_n
    low, end = length * 0, length
    if FACTS.causal:
        last = tl.minimum(count, (block * BLOCK_M + BLOCK_M - 1) // FACTS.ratio + 1)
        end = tl.minimum(length, tl.maximum(last + diagonal, 0))
    if FACTS.windowed:
        low = tl.maximum(block * BLOCK_M // FACTS.ratio + diagonal - window + 1, 0)
    base = low // BLOCK_N * BLOCK_N
    split_keys = tl.cdiv(tl.cdiv(end - base, splits), BLOCK_N) * BLOCK_N
    return low, base, tl.maximum(split_keys, least), end


@triton.jit
def _visible(columns, low, stop, FACTS: tl.constexpr):
    """Which keys some row sees."""
    if FACTS.windowed:
        seen = (columns >= low) & (columns < stop)
    else:
        seen = columns < stop
    return seen


@triton.jit
def _runs(start, FACTS: tl.constexpr):
    """The numbers of the runs of a block of keys from `start` on, which is a multiple of it."""
    return start // FACTS.run + tl.arange(0, FACTS.block_n // FACTS.run)


@triton.jit
def _pages(pages, start, low, stop, FACTS: tl.constexpr):
    """The pages of a block's runs; nothing is read for those that nobody sees."""
    RUN: tl.constexpr = FACTS.run
    if FACTS.page == 0:
        found = start
    else:
        runs = _runs(start, FACTS)
        # A run is seen if its last key is in the window, and its first is there.
        seen = _visible(runs * RUN, low - (RUN - 1), stop, FACTS)
        found = tl.load(pages + runs // (FACTS.page // RUN), mask=seen, other=0)
    return found


@triton.jit
def _load(pointer, offset, exists, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """A tile of rows at these offsets, of SIZE elements in BLOCK; with MASKED 0 where a row does not exist."""
    columns = tl.arange(0, BLOCK)
    pointers = pointer + (offset[:, None] + columns[None, :])
    if MASKED and SIZE < BLOCK:
        tile = tl.load(pointers, mask=exists[:, None] & (columns < SIZE)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=exists[:, None], other=0.0)
    elif SIZE < BLOCK:
        tile = tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _converted(tile, DTYPE: tl.constexpr):
    """A tile of a cache as of the query's dtype."""
    if tile.dtype == tl.float8e4nv and tl.bfloat16 == DTYPE:
        # On NVIDIA's GPUs the unit that has exponentials converts float16 to bfloat16, at an eighth of the usual speed.
        tile = tile.to(tl.float32)
    return tile.to(DTYPE)


@triton.jit
def _checked(page, n_pages, wrong, FACTS: tl.constexpr):
    """Pages that may be read, and whether some may not: that stops the program in the end, since a loop would wait."""
    if FACTS.page > 0:
        outside = page.to(tl.uint32) >= n_pages.to(tl.uint32)
        wrong = wrong | outside.to(tl.int32)
        page = tl.where(outside, 0, page)
    return page, wrong


@triton.jit
def _of_keys(each, FACTS: tl.constexpr):
    """What a block's runs have, for each of their keys."""
    RUN: tl.constexpr = FACTS.run
    return tl.reshape(tl.broadcast_to(each[:, None], (FACTS.block_n // RUN, RUN)), (FACTS.block_n,))


@triton.jit
def _offset(page, start, strides, FACTS: tl.constexpr):
    """Where the keys or values of a block are; `strides` are those of pages and of rows."""
    RUN: tl.constexpr = FACTS.run
    INDEX: tl.constexpr = FACTS.index
    if FACTS.page == 0:
        offset = (start + tl.arange(0, FACTS.block_n)).to(INDEX) * strides[1]
    else:
        first = _of_keys(_runs(start, FACTS) % (FACTS.page // RUN) * RUN, FACTS)
        row = first + tl.arange(0, FACTS.block_n) % RUN
        offset = _of_keys(page, FACTS).to(INDEX) * strides[0] + row.to(INDEX) * strides[1]
    return offset


@triton.jit
def _take(
    state,
    q,
    key,
    value,
    bias,
    of_key,
    of_value,
    of_bias,
    rows,
    start,
    page,
    seen,
    numbers,
    MASKED: tl.constexpr,
    FACTS: tl.constexpr,
):
    """The state of rows after a block of keys: sums of values, the largest score, and the sum of exponentials.

    `of_key` and `of_value` are the strides of pages and of rows, `of_bias` those of rows and of keys. `seen` is (the
    first key that any row sees, where those end, the diagonal, the window), `numbers` the factor of scores, in nats or
    to base 2, and the soft cap to base 2.
    """
    PRECISION: tl.constexpr = FACTS.precision
    total, largest, denominator = state
    low, stop, diagonal, window = seen
    columns = start + tl.arange(0, FACTS.block_n)
    exists = _visible(columns, low, stop, FACTS)
    visible = exists[None, :]
    if FACTS.causal:
        visible = visible & (columns[None, :] <= (rows + diagonal)[:, None])
    if FACTS.windowed:
        visible = visible & (columns[None, :] > (rows + diagonal - window)[:, None])
    there = visible & (rows >= 0)[:, None]
    added = load_bias(bias, (0, 0, of_bias[0], of_bias[1]), rows[:, None], columns[None, :], (), there, False)
    k = _load(key, _offset(page, start, of_key, FACTS), exists, FACTS.head_size, FACTS.block_d, MASKED)
    scores = tl.dot(q, tl.trans(_converted(k, q.dtype)), input_precision=PRECISION) * numbers[0]
    if FACTS.capped:
        scores = numbers[1] * (1 - 2 / (tl.exp2(scores) + 1))
    if MASKED or bias is not None:
        if bias is not None:
            scores = biased(scores, added)
        scores = tl.where(visible, scores, float("-inf"))
    most = tl.maximum(largest, tl.max(scores, 1))
    base = base_of(most)
    shares = exponentials(scores, base[:, None], False, FACTS.nats)
    kept = exponentials(largest, base, False, FACTS.nats)
    denominator = denominator * kept + tl.sum(shares, 1)
    v = _load(value, _offset(page, start, of_value, FACTS), exists, FACTS.value_size, FACTS.block_v, MASKED)
    v = _converted(v, q.dtype)
    total = tl.dot(shares.to(q.dtype), v, total * kept[:, None], input_precision=PRECISION)
    return total, most, denominator


@triton.jit
def _logarithm(largest, denominator, FACTS: tl.constexpr):
    """The natural logarithms of the sums of rows, from their largest scores and the sums of exponentials."""
    if FACTS.nats:
        result = largest + tl.log2(denominator) / LOG2E
    else:
        result = (largest + tl.log2(denominator)) / LOG2E
    return result


@triton.jit
def _take_all(
    state, q, key, value, bias, table, strides, rows, begin, stop, seen, numbers, MASKED, FACTS: tl.constexpr
):
    """The state of rows after the keys from `begin`, a multiple of a block, to `stop`; pages are read a block ahead."""
    BLOCK_N: tl.constexpr = FACTS.block_n
    total, largest, denominator, wrong = state
    pages, n_pages = table
    low, diagonal, window = seen
    # Within the loop Triton 3.6 does not know of strides that are 1 any more, where they are in a tuple.
    key_page, key_row, value_page, value_row = strides[1][0], strides[1][2], strides[2][0], strides[2][2]
    bias_row, bias_key = strides[4][2], strides[4][3]
    # Two blocks ahead, of which the first is checked: the compiler has a loop wait at once for what comes from memory.
    first = _pages(pages, begin, low, stop, FACTS)
    following = _pages(pages, begin + BLOCK_N, low, stop, FACTS)
    page, wrong = _checked(first, n_pages, wrong, FACTS)
    for start in range(begin, stop, BLOCK_N):
        rest = (low, stop, diagonal, window)
        total, largest, denominator = _take(
            *((total, largest, denominator), q, key, value, bias),
            *((key_page, key_row), (value_page, value_row), (bias_row, bias_key)),
            *(rows, start, page, rest, numbers, MASKED, FACTS),
        )
        page, wrong = _checked(following, n_pages, wrong, FACTS)
        following = _pages(pages, start + 2 * BLOCK_N, low, stop, FACTS)
    return total, largest, denominator, wrong


@triton.jit
def _fill(logsumexp, batch, head, strides, count, padded, chosen, FACTS: tl.constexpr):
    """Where `chosen`, have the logarithms of rows that there are not, at most 31 of each head, infinite."""
    rows = count + tl.arange(0, 32)
    for i in range(FACTS.ratio):
        pointers = logsumexp + batch * strides[0] + (head + i) * strides[1] + rows * strides[2]
        tl.store(pointers, tl.full((32,), float("inf"), tl.float32), mask=(rows < padded) & chosen)


@libentry()
@triton.jit(do_not_specialize=[*_SIZES, "blocks", "n_pages", "padded"])
def attend_to_splits(
    query,
    key,
    value,
    bias,
    pages,
    lengths,
    starts,
    key_starts,
    scales,
    out,
    logsumexp,
    partial,
    strides,
    sequences,
    tokens,
    queries,
    keys,
    diagonal,
    window,
    shared,
    blocks,
    splits,
    least,
    n_pages,
    padded,
    scale: tl.float64,
    softcap: tl.float64,
    FACTS: tl.constexpr,
):
    """A program takes a split of the keys that a block of rows sees.

    A sequence's tokens lie in a row of the batch, or where `starts` tells, and so do its keys, or where `key_starts`
    tells, or in its `pages`, of which `lengths` are those that there are. `scales` are what keys and values are
    multiplied by. `strides` are those of query (batch, head, token), of key and value (batch or page, head, row), of
    the result, the bias and the logarithms of sums, of the table and of the scales.
    Rows of the logarithms from the last query on, to `padded`, are infinite.
    """
    BLOCK_M: tl.constexpr = FACTS.block_m
    BLOCK_N: tl.constexpr = FACTS.block_n
    BLOCK_V: tl.constexpr = FACTS.block_v
    RATIO: tl.constexpr = FACTS.ratio
    EMPTY: tl.constexpr = FACTS.empty
    ELEMENT: tl.constexpr = out.dtype.element_ty
    wait_for_previous_launch()
    if FACTS.dependent:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) % shared
    split = tl.program_id(0) // shared % splits
    block = tl.program_id(0) // shared // splits
    if starts is None:
        sequence = block // blocks
        block = block % blocks
    else:
        sequence = _sequence_at(starts, sequences, block, True, FACTS)
        block -= _first_block(tl.load(starts + sequence).to(tl.int32), sequence, FACTS)
    sizes = (sequences, tokens, queries, keys, diagonal)
    first, count, first_key, length, diagonal = _sequence(sequence, starts, lengths, key_starts, sizes)
    low, base, split_keys, end = _cut(block, count, length, diagonal, window, splits, least, FACTS)
    begin = base + split * split_keys
    stop = tl.minimum(end, begin + split_keys)
    batch, head = sequence.to(tl.int64), head.to(tl.int64)
    if logsumexp is not None:
        _fill(logsumexp, batch, head * RATIO, strides[5], count, padded, (split == 0) & (block == 0), FACTS)
    # To end here would have Triton 3.6 forget which strides are 1.
    if FACTS.split:
        count = tl.where(begin < stop, count, 0)
    stop = tl.where(block * BLOCK_M < count * RATIO, stop, begin)
    flat = block * BLOCK_M + tl.arange(0, BLOCK_M)
    there = flat < count * RATIO
    rows = flat // RATIO
    heads = head * RATIO + flat % RATIO
    # Counted from the first of all, or from the first of a row of the batch.
    token = rows.to(tl.int64)
    if starts is not None:
        token += first
    columns = tl.arange(0, FACTS.block_d)
    pointers = query + (batch * strides[0][0] + heads * strides[0][1] + token * strides[0][2])[:, None]
    q = tl.load(pointers + columns[None, :], mask=there[:, None] & (columns < FACTS.head_size)[None, :], other=0.0)
    key += head * strides[1][1]
    value += head * strides[2][1]
    if key_starts is not None:
        key += tl.full((), first_key, tl.int64) * strides[1][2]
        value += tl.full((), first_key, tl.int64) * strides[2][2]
    elif FACTS.page == 0:
        key += batch * strides[1][0]
        value += batch * strides[2][0]
    else:
        pages += batch * strides[6]
    if bias is not None:
        bias = bias + (batch * strides[4][0] + heads * strides[4][1])[:, None]
    # Strides are asked for before the loops: behind them, too, those that are 1 are lost.
    out = out + (batch * strides[3][0] + heads * strides[3][1] + token * strides[3][2])[:, None]
    if logsumexp is not None:
        logsumexp = logsumexp + batch * strides[5][0] + heads * strides[5][1] + token * strides[5][2]
    factor, of_value = score_factor(tl.full((), scale, tl.float64), FACTS.nats), 1.0
    if scales is not None:
        factor *= tl.load(scales[0] + head * strides[7][0])
        of_value = tl.load(scales[1] + head * strides[7][1])
    cap = tl.full((), softcap, tl.float64).to(tl.float32)
    if FACTS.capped:
        factor = factor * 2 / cap
    numbers = (factor, cap * LOG2E)
    wrong = tl.zeros((BLOCK_N // FACTS.run,), tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    denominator = tl.zeros((BLOCK_M,), tl.float32)
    rows = tl.where(there, rows, -1)
    seen = (low, diagonal, window)
    table = (pages, n_pages)
    if FACTS.apart:
        # Between what some rows do not see, for a window or the diagonal.
        from_, to = begin, stop
        if FACTS.windowed:
            last = tl.minimum(count, (block * BLOCK_M + BLOCK_M - 1) // RATIO + 1) - 1
            from_ = tl.maximum(tl.cdiv(tl.maximum(last + diagonal - window + 1, 0), BLOCK_N) * BLOCK_N, begin)
        if FACTS.causal:
            to = tl.minimum(stop, tl.maximum(block * BLOCK_M // RATIO + diagonal + 1, 0))
        to = to // BLOCK_N * BLOCK_N
        from_ = tl.minimum(from_, stop)
        to = tl.maximum(to, from_)
        if FACTS.windowed:
            state = (total, largest, denominator, wrong)
            total, largest, denominator, wrong = _take_all(
                state, q, key, value, bias, table, strides, rows, begin, from_, seen, numbers, True, FACTS
            )
        state = (total, largest, denominator, wrong)
        total, largest, denominator, wrong = _take_all(
            state, q, key, value, bias, table, strides, rows, from_, to, seen, numbers, False, FACTS
        )
        begin = to
    state = (total, largest, denominator, wrong)
    total, largest, denominator, wrong = _take_all(
        state, q, key, value, bias, table, strides, rows, begin, stop, seen, numbers, True, FACTS
    )
    if FACTS.page > 0:
        tl.device_assert(wrong == 0, "a page of the block table that the caches do not have")
    columns = tl.arange(0, BLOCK_V)
    mask = there[:, None] & (columns < FACTS.value_size)[None, :]
    if FACTS.split:
        if starts is None:
            token += batch * queries
        place = (token * (shared * RATIO) + heads) * splits + split
        tl.store(partial[0] + place[:, None] * FACTS.value_size + columns[None, :], total, mask=mask)
        tl.store(partial[1] + place * 2, largest, mask=there)
        tl.store(partial[1] + place * 2 + 1, denominator, mask=there)
    else:
        nothing = denominator == 0
        denominator = tl.where(nothing, 1.0, denominator)
        total /= denominator[:, None]
        tl.store(out + columns[None, :], (total * of_value).to(ELEMENT), mask=mask)
        if logsumexp is not None:
            logarithm = tl.where(nothing, float(EMPTY), _logarithm(largest, denominator, FACTS))
            tl.store(logsumexp, logarithm, mask=there)


@libentry()
@triton.jit(do_not_specialize=_SIZES)
def combine_splits(
    partial,
    lengths,
    starts,
    key_starts,
    scales,
    out,
    logsumexp,
    strides,
    sequences,
    tokens,
    queries,
    keys,
    diagonal,
    window,
    shared,
    splits,
    least,
    FACTS: tl.constexpr,
):
    """A program combines the splits of a row in their order; `strides` are as of `attend_to_splits`."""
    BLOCK_V: tl.constexpr = FACTS.block_v
    RATIO: tl.constexpr = FACTS.ratio
    EMPTY: tl.constexpr = FACTS.empty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % (shared * RATIO)
    token = tl.program_id(0) // (shared * RATIO)
    if starts is None:
        sequence = token // queries
    else:
        sequence = _sequence_at(starts, sequences, token, False, FACTS)
    sizes = (sequences, tokens, queries, keys, diagonal)
    first, count, _, length, diagonal = _sequence(sequence, starts, lengths, key_starts, sizes)
    block = ((token - first) * RATIO + head % RATIO) // FACTS.block_m
    _, base, split_keys, end = _cut(block, count, length, diagonal, window, splits, least, FACTS)
    there = tl.cdiv(tl.maximum(end - base, 0), split_keys)
    # Before the loop, as above.
    batch, own = sequence.to(tl.int64), token.to(tl.int64)
    if starts is None:
        own -= batch * queries
    out += batch * strides[3][0] + head.to(tl.int64) * strides[3][1] + own * strides[3][2]
    if logsumexp is not None:
        logsumexp += batch * strides[5][0] + head.to(tl.int64) * strides[5][1] + own * strides[5][2]
    of_value = 1.0
    if scales is not None:
        of_value = tl.load(scales[1] + head // RATIO * strides[7][1])
    columns = tl.arange(0, BLOCK_V)
    total = tl.zeros((BLOCK_V,), tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    denominator = tl.full((), 0.0, tl.float32)
    wait_for_previous_launch()
    for begin in range(0, there, _SPLITS):
        i = begin + tl.arange(0, _SPLITS)
        place = row * splits + i
        each = tl.load(partial[1] + place * 2, mask=i < there, other=float("-inf"))
        sums = tl.load(partial[1] + place * 2 + 1, mask=i < there, other=0.0)
        mask = (i < there)[:, None] & (columns < FACTS.value_size)[None, :]
        values = tl.load(partial[0] + place[:, None] * FACTS.value_size + columns[None, :], mask=mask, other=0.0)
        most = tl.maximum(largest, tl.max(each, 0))
        shift = base_of(most)
        weights = exponentials(each, shift, False, FACTS.nats)
        kept = exponentials(largest, shift, False, FACTS.nats)
        denominator = denominator * kept + tl.sum(sums * weights, 0)
        total = total * kept + tl.sum(values * weights[:, None], 0)
        largest = most
    nothing = denominator == 0
    denominator = tl.where(nothing, 1.0, denominator)
    total /= denominator
    total *= of_value
    tl.store(out + columns, total.to(out.dtype.element_ty), mask=columns < FACTS.value_size)
    if logsumexp is not None:
        tl.store(logsumexp, tl.where(nothing, float(EMPTY), _logarithm(largest, denominator, FACTS)))


class Paged(NamedTuple):
    """Attention of sequences whose keys and values lie in pages, all causal: the last token sees all keys.

    `query` is (tokens, heads, elements); `starts` tells where the tokens of each sequence begin, and where the last
    ones end, or is None where each has one. Caches are (pages, rows of a page, heads, elements), `pages` (sequences,
    pages of one), `lengths` the keys of each. `scales` are what keys and values of each head, or of all, are multiplied
    by. A query sees the last `window` keys, scores have a soft cap; None is for all keys and for no cap.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor | None
    scales: tuple[torch.Tensor, torch.Tensor] | None
    scale: float | Number
    softcap: float | None
    window: int | None
    precision: str


class _Cut(NamedTuple):
    """How a call is cut: its tile, the blocks of rows, the splits of each, and how many keys one has at least."""

    tile: table.Tile
    blocks: int
    splits: int
    least: int

    @staticmethod
    def of(tile: table.Tile, blocks: int, shared: int, keys: int, device: torch.device) -> _Cut:
        """For as many keys, or fewer."""
        if settings().invariant:
            return _Cut(tile, blocks, 1, 0)
        split_keys = table.keys_of_split(blocks * shared, keys, tile.BLOCK_N, devices.multiprocessors(device))
        return _Cut(tile, blocks, max(1, -(-keys // split_keys)), table.LEAST)


def _run(
    operands: dict[str, Any],
    out: torch.Tensor,
    logsumexp: torch.Tensor | None,
    strides: tuple[Any, ...],
    sizes: dict[str, int],
    cut: _Cut,
    facts: DecodeFacts,
    **others: Any,
) -> None:
    """Launch a call, and where there are several splits what combines them."""
    rows, shared, device = sizes["tokens"] * sizes["shared"] * facts.ratio, sizes["shared"], out.device
    partial, several = None, cut.splits > 1
    facts = replace(facts, split=several, dependent=several and devices.has_dependent_launch(device))
    if several:
        values = empty((rows, cut.splits, facts.value_size), torch.float32, device)
        partial = (values, empty((rows, cut.splits, 2), torch.float32, device))
    attend_to_splits[(cut.blocks * cut.splits * shared,)](
        **operands,
        **others,
        **sizes,
        out=out,
        logsumexp=logsumexp,
        partial=partial,
        strides=strides,
        splits=cut.splits,
        least=cut.least,
        # Logarithms of packed sequences, which lie one after the other, are not padded.
        padded=0 if logsumexp is None or operands["key_starts"] is not None else logsumexp.shape[2],
        FACTS=facts,
        **cut.tile.options,
        **compiler_options(facts.natural),
        **(ASSERTING if facts.page else {}),
    )
    if partial is not None:
        combine_splits[(rows,)](
            **{name: operands[name] for name in ("lengths", "starts", "key_starts", "scales")},
            **sizes,
            partial=partial,
            out=out,
            logsumexp=logsumexp,
            strides=strides,
            splits=cut.splits,
            least=cut.least,
            FACTS=facts,
            num_warps=table.COMBINING_WARPS,
            **devices.current.options,
            **(ASSERTING if facts.page else {}),
        )


def _most_blocks(rows: int, sequences: int, tile: table.Tile) -> int:
    """The most blocks that so many rows, of sequences of several lengths, are cut into: each begins one of its own."""
    return rows // tile.BLOCK_M + sequences + 1


def _seen(problem: Problem) -> int:
    """The keys that the last query sees, of the longest of packed sequences."""
    if problem.packed is not None and problem.packed.last:
        return problem.keys
    return max(0, min(problem.keys, problem.queries + problem.diagonal)) if problem.causal else problem.keys


def decodes(problem: Problem, logsumexp: torch.Tensor | None = None) -> bool:
    """Whether there are few queries, and keys enough that reading them is what takes time."""
    if logsumexp is not None and problem.packed is not None and not problem.packed.logarithms:
        # Those of a sequence would be in a row of its own.
        return False
    few = problem.queries <= table.FEW_QUERIES and problem.queries * problem.ratio <= table.FEW_ROWS
    # How keys are cut depends on how many other rows there are.
    plain = problem.dropout is None and not settings().invariant
    return plain and few and _seen(problem) >= table.MANY_KEYS


def decode(problem: Problem, out: torch.Tensor, logsumexp: torch.Tensor | None, no_keys: str = "inf") -> None:
    """Write what `forward.attention` does, of the same arguments, by programs that share the keys of a head."""
    query, key, value = problem.query, problem.key, problem.value
    (_, _, rows, head), shared, packed = query.shape, key.shape[1], problem.packed
    batch, queries = problem.batch, problem.queries
    if not batch * rows * shared:
        return
    tile = table.decoding(
        *(devices.current.kind, query.dtype.itemsize, power_of_2(max(head, value.shape[3]))),
        *(queries * problem.ratio, devices.shared_memory(query.device)),
    )
    blocks = -(-queries * problem.ratio // tile.BLOCK_M)
    all_blocks = blocks * batch if packed is None else _most_blocks(rows * problem.ratio, batch, tile)
    cut = _Cut.of(tile, all_blocks, shared, _seen(problem), query.device)
    facts = DecodeFacts(**vars(problem.facts(tile, out, empty=no_keys)))
    strides = (
        *(*map(problem.strides, (query, key, value, out)), problem.bias_strides),
        *(problem.logarithm_strides(logsumexp)[:3], 0, (0, 0)),
    )
    operands = {"query": query, "key": key, "value": value, "bias": problem.bias}
    operands |= dict.fromkeys(("pages", "lengths", "scales"))
    operands["starts"], operands["key_starts"] = problem.starts
    tokens = batch * rows if packed is None else rows
    sizes = {"sequences": batch, "tokens": tokens, "queries": queries, "keys": problem.keys}
    sizes |= {"diagonal": problem.diagonal, "window": 0, "shared": shared}
    _run(
        *(operands, out, logsumexp, strides, sizes, cut, facts),
        blocks=blocks,
        n_pages=0,
        scale=problem.factor,
        softcap=0.0,
    )


def attend_to_pages(work: Paged, out: torch.Tensor) -> None:
    """Write the result, (tokens, heads, elements of a value); tokens behind those of the last sequence are 0."""
    query, key, value = work.query, work.key, work.value
    (tokens, heads, head), (n_pages, page, shared, size) = query.shape, value.shape
    sequences, most = work.pages.shape
    if not tokens * heads:
        return
    ratio, ragged = heads // shared, work.starts is not None
    # Of sequences of several lengths no more is known here than how many tokens there are in all.
    rows = -(-tokens // max(1, sequences)) * ratio if ragged else ratio
    tile = table.decoding(
        *(devices.current.kind, key.dtype.itemsize, power_of_2(max(head, size))),
        *(table.FEW if settings().invariant else rows, devices.shared_memory(query.device)),
    )
    blocks = _most_blocks(tokens * ratio, sequences, tile) if ragged else -(-ratio // tile.BLOCK_M)
    cut = _Cut.of(tile, blocks if ragged else blocks * sequences, shared, page * most, query.device)
    wide = any(span(each.shape, each.stride()) >= INT32_LIMIT for each in (key, value))
    facts = DecodeFacts(
        causal=ragged or work.window is not None,
        last=True,
        natural=False,
        nats=False,
        empty="inf",
        bias_of_keys=False,
        dropout="",
        aligned=False,
        precision=products(work.precision, query),
        index=tl.int64 if wide else tl.int32,
        ratio=ratio,
        head_size=head,
        value_size=size,
        block_d=max(16, power_of_2(head)),
        block_v=max(16, power_of_2(size)),
        block_m=tile.BLOCK_M,
        block_n=tile.BLOCK_N,
        page=page,
        windowed=work.window is not None,
        capped=work.softcap is not None,
        apart=tile.BLOCK_M >= table.APART,
    )
    ordered = [(own.stride(0), own.stride(2), own.stride(1)) for own in (key, value)]
    # The token is the row where it is counted from the first of all, and the batch where each sequence has one.
    rows_of = [
        (0, own.stride(1), own.stride(0)) if ragged else (own.stride(0), own.stride(1), 0) for own in (query, out)
    ]
    scales = (0, 0) if work.scales is None else tuple([own.stride(0) if own.numel() > 1 else 0 for own in work.scales])
    strides = (rows_of[0], *ordered, rows_of[1], (0, 0, 0, 0), (0, 0, 0), work.pages.stride(0), scales)
    operands = {"query": query, "key": key, "value": value, "bias": None, "pages": work.pages}
    operands |= {"lengths": work.lengths, "starts": work.starts, "key_starts": None, "scales": work.scales}
    # Without pages there is no room for a key.
    room = page * most if n_pages else 0
    sizes = {"sequences": sequences, "tokens": tokens, "queries": 1, "keys": room, "diagonal": 0}
    sizes |= {"window": work.window or 0, "shared": shared}
    _run(
        *(operands, out, None, strides, sizes, cut, facts),
        blocks=blocks,
        n_pages=max(1, n_pages),
        scale=work.scale,
        softcap=work.softcap or 0.0,
    )
