"""Attention of few queries over many keys: a program for each split of the keys, and a launch that combines splits.

The query heads that share a key head are rows of one tile, so that keys and values are read once. Keys and values lie
in rows, or in pages that a block table lists (`paged`). A split leaves its accumulator, row max and row sum, from which
those of all keys follow (Milakov and Gimelshein 2018; Dao et al. 2023, "Flash-Decoding for long-context inference").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.attention import table
from tritonite.engine.attention.problem import AttentionMeta, Problem, compiler_options
from tritonite.engine.attention.prologue import HeadStrides
from tritonite.engine.attention.scores import LOG2E, add_bias, exponentials, finite_max, load_bias, score_factor
from tritonite.engine.iteration import power_of_2
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty, settings
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

# Integers that differ from call to call of a kernel.
_SIZES = ["sequences", "tokens", "queries", "keys", "diagonal", "window", "kv_heads", "splits", "least_keys"]
# Splits that a step of combine_splits loads, and starts of sequences that a step of `_sequence_of` compares.
_SPLITS, _SEQUENCES = tl.constexpr(16), tl.constexpr(512)


@dataclass(frozen=True)
class DecodeMeta(AttentionMeta):
    """Compile-time facts of the decoding kernels. A tile's `block_m` rows are queries times `ratio` heads.

    page: rows of a page, 0 where keys and values are in one tensor.
    windowed: a query sees the last `window` keys only.
    capped: scores have a soft cap.
    split: keys have several splits, whose partial results are stored for combine_splits.
    dependent: combine_splits is a dependent launch, whose programs start before those that they wait for have ended.
    unmasked: blocks of keys that all queries see have a loop without masks.
    """

    page: int = 0
    windowed: bool = False
    capped: bool = False
    split: bool = False
    dependent: bool = False
    unmasked: bool = False

    @property
    def run(self) -> int:
        """Keys of a run: successive keys of a block that lie in one page."""
        return math.gcd(self.page, self.block_n)


class DecodeStrides(NamedTuple):
    """Strides: of query and out (batch, head, token), of key and value (batch or page, head, row), of bias (4).

    `logsumexp` are (batch, head, row), `pages` the block table's row stride, `scales` those of key and value scales.
    """

    query: Any
    key: Any
    value: Any
    out: Any
    bias: Any
    logsumexp: Any
    pages: int
    scales: Any


class Lengths(NamedTuple):
    """Sequences and tokens of a call, and the queries, keys and diagonal of a sequence where all have the same."""

    sequences: int
    tokens: int
    queries: int
    keys: int
    diagonal: int


class Visible(NamedTuple):
    """Keys that a tile's rows see: the first and the end of those that any row sees, the diagonal, the window."""

    low: Any
    stop: Any
    diagonal: Any
    window: Any


@triton.jit
def _first_block(starts, i, META: tl.constexpr):
    """Return the first block of rows of sequence i, in a grid where each sequence may leave its last block partial."""
    return starts * META.ratio // META.block_m + i


@triton.jit
def _sequence_of(starts, sequences, number, BLOCKS: tl.constexpr, META: tl.constexpr):
    """Return the sequence of a token, or with BLOCKS of a block of rows: the last that begins at or before it."""
    count = 0
    for first in range(0, sequences + 1, _SEQUENCES):
        i = first + tl.arange(0, _SEQUENCES)
        start = tl.load(starts + i, mask=i <= sequences, other=0)
        begin = _first_block(start, i, META) if BLOCKS else start
        count += tl.sum(((begin <= number) & (i <= sequences)).to(tl.int32), 0)
    return tl.maximum(count - 1, 0)


@triton.jit
def _sequence_rows(sequence, starts, lengths, key_starts, all_lengths):
    """Return (first token, tokens, first key, keys, diagonal) of a sequence.

    Tokens behind the last sequence count as one more sequence, without keys.
    """
    first, first_key = sequence * all_lengths.queries, 0
    count, length, diagonal = all_lengths.queries, all_lengths.keys, all_lengths.diagonal
    sequences, tokens = all_lengths.sequences, all_lengths.tokens
    if starts is not None:
        first = tl.load(starts + sequence).to(tl.int32)
        last = tl.load(starts + sequence + 1, mask=sequence < sequences, other=tokens).to(tl.int32)
        ascends = (first >= 0) & (first <= last) & (last <= tokens)
        tl.device_assert(
            ascends & ((sequence > 0) | (first == 0)), "cu_seqlens does not begin with 0, or does not ascend"
        )
        count = last - first
    if lengths is not None:
        most = length
        length = tl.load(lengths + sequence, mask=sequence < sequences, other=0).to(tl.int32)
        tl.device_assert((length >= 0) & (length <= most), "a length is negative, or exceeds the room for keys")
        diagonal = length - count
    if key_starts is not None:
        first_key = tl.load(key_starts + sequence).to(tl.int32)
        length = tl.load(key_starts + sequence + 1, mask=sequence < sequences, other=first_key).to(tl.int32) - first_key
        diagonal = length - count
    return first, count, first_key, length, diagonal


@triton.jit
def _split_keys(block, count, length, diagonal, window, splits, least_keys, META: tl.constexpr):
    """Return (first key that a block's rows see, first key of the splits, keys of a split, end of the keys seen)."""
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    low, end = length * 0, length
    if META.causal:
        last = tl.minimum(count, (block * BLOCK_M + BLOCK_M - 1) // META.ratio + 1)
        end = tl.minimum(length, tl.maximum(last + diagonal, 0))
    if META.windowed:
        low = tl.maximum(block * BLOCK_M // META.ratio + diagonal - window + 1, 0)
    base = low // BLOCK_N * BLOCK_N
    split_keys = tl.cdiv(tl.cdiv(end - base, splits), BLOCK_N) * BLOCK_N
    return low, base, tl.maximum(split_keys, least_keys), end


@triton.jit
def _seen_by_any(columns, low, stop, META: tl.constexpr):
    """Return the mask of keys that any row sees."""
    if META.windowed:
        seen = (columns >= low) & (columns < stop)
    else:
        seen = columns < stop
    return seen


@triton.jit
def _runs(start, META: tl.constexpr):
    """Return the runs of a block of keys from `start`, a multiple of the block."""
    return start // META.run + tl.arange(0, META.block_n // META.run)


@triton.jit
def _pages(pages, start, low, stop, META: tl.constexpr):
    """Return the pages of a block's runs; pages that no row sees are not read."""
    RUN: tl.constexpr = META.run
    if META.page == 0:
        found = start
    else:
        runs = _runs(start, META)
        # A run is seen if its last key is in the window and its first key exists.
        seen = _seen_by_any(runs * RUN, low - (RUN - 1), stop, META)
        found = tl.load(pages + runs // (META.page // RUN), mask=seen, other=0)
    return found


@triton.jit
def _load_rows(pointer, offset, exists, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Load rows of SIZE elements at `offset` as a tile of BLOCK columns; with MASKED 0 where `exists` is false."""
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
def _to_query_dtype(tile, DTYPE: tl.constexpr):
    """Convert a tile of a cache to the query's dtype."""
    if tile.dtype == tl.float8e4nv and tl.bfloat16 == DTYPE:
        # By float16 it would be converted by the unit for exponentials, at an eighth of the usual throughput.
        tile = tile.to(tl.float32)
    return tile.to(DTYPE)


@triton.jit
def _checked(page, n_pages, wrong, META: tl.constexpr):
    """Return (pages with those out of range set to 0, `wrong` or'd with the mask of those).

    The program asserts on `wrong` at its end, because an assertion in the loop would wait for the loads.
    """
    if META.page > 0:
        outside = page.to(tl.uint32) >= n_pages.to(tl.uint32)
        wrong = wrong | outside.to(tl.int32)
        page = tl.where(outside, 0, page)
    return page, wrong


@triton.jit
def _repeat_runs(each, META: tl.constexpr):
    """Repeat a value per run of a block for each of the run's keys."""
    RUN: tl.constexpr = META.run
    return tl.reshape(tl.broadcast_to(each[:, None], (META.block_n // RUN, RUN)), (META.block_n,))


@triton.jit
def _offset(page, start, strides, META: tl.constexpr):
    """Return the offsets of a block's keys or values; `strides` are (page, row)."""
    RUN: tl.constexpr = META.run
    INDEX: tl.constexpr = META.index
    if META.page == 0:
        offset = (start + tl.arange(0, META.block_n)).to(INDEX) * strides[1]
    else:
        first = _repeat_runs(_runs(start, META) % (META.page // RUN) * RUN, META)
        row = first + tl.arange(0, META.block_n) % RUN
        offset = _repeat_runs(page, META).to(INDEX) * strides[0] + row.to(INDEX) * strides[1]
    return offset


@triton.jit
def _attend_block(
    state,
    inputs,
    strides,
    rows,
    start,
    page,
    visible,
    factor,
    cap,
    MASKED: tl.constexpr,
    META: tl.constexpr,
):
    """Return (accumulator, row max, row sum) after a block of keys from `start`.

    `inputs` are (query tile, key, value and bias pointers), `strides` the (page, row) of keys, those of values, and the
    `HeadStrides` of the bias. `factor` scales scores to nats or to base 2; `cap` is the soft cap in base 2.
    """
    PRECISION: tl.constexpr = META.precision
    acc, m_i, l_i = state
    q, key, value, bias = inputs
    key_strides, value_strides, bias_strides = strides
    columns = start + tl.arange(0, META.block_n)
    exists = _seen_by_any(columns, visible.low, visible.stop, META)
    mask = exists[None, :]
    if META.causal:
        mask = mask & (columns[None, :] <= (rows + visible.diagonal)[:, None])
    if META.windowed:
        mask = mask & (columns[None, :] > (rows + visible.diagonal - visible.window)[:, None])
    there = mask & (rows >= 0)[:, None]
    bias_tile = load_bias(bias, bias_strides, rows[:, None], columns[None, :], None, there, False)
    k = _load_rows(key, _offset(page, start, key_strides, META), exists, META.head_size, META.block_d, MASKED)
    scores = tl.dot(q, tl.trans(_to_query_dtype(k, q.dtype)), input_precision=PRECISION) * factor
    if META.capped:
        scores = cap * (1 - 2 / (tl.exp2(scores) + 1))
    if MASKED or bias is not None:
        if bias is not None:
            scores = add_bias(scores, bias_tile)
        scores = tl.where(mask, scores, float("-inf"))
    new_max = tl.maximum(m_i, tl.max(scores, 1))
    base = finite_max(new_max)
    p = exponentials(scores, base[:, None], False, META.nats)
    rescale = exponentials(m_i, base, False, META.nats)
    l_i = l_i * rescale + tl.sum(p, 1)
    v = _load_rows(value, _offset(page, start, value_strides, META), exists, META.value_size, META.block_v, MASKED)
    v = _to_query_dtype(v, q.dtype)
    acc = tl.dot(p.to(q.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_max, l_i


@triton.jit
def _logsumexp(m_i, l_i, META: tl.constexpr):
    """Return rows' logsumexp in nats from their row max and row sum."""
    if META.nats:
        result = m_i + tl.log2(l_i) / LOG2E
    else:
        result = (m_i + tl.log2(l_i)) / LOG2E
    return result


@triton.jit
def _attend_range(
    state, inputs, pages, n_pages, strides, rows, begin, visible, factor, cap, MASKED, META: tl.constexpr
):
    """Return (accumulator, row max, row sum, wrong pages) after the keys from `begin`, a multiple of a block."""
    BLOCK_N: tl.constexpr = META.block_n
    acc, m_i, l_i, wrong = state
    # Outside the loop: in it Triton 3.6 forgets which strides of a tuple are 1.
    key_page, key_row, value_page, value_row = strides.key[0], strides.key[2], strides.value[0], strides.value[2]
    bias_row, bias_key = strides.bias[2], strides.bias[3]
    # Pages are loaded two blocks ahead, because the compiler waits at once for a load that is checked in the loop.
    first = _pages(pages, begin, visible.low, visible.stop, META)
    following = _pages(pages, begin + BLOCK_N, visible.low, visible.stop, META)
    page, wrong = _checked(first, n_pages, wrong, META)
    for start in range(begin, visible.stop, BLOCK_N):
        acc, m_i, l_i = _attend_block(
            *(
                (acc, m_i, l_i),
                inputs,
                ((key_page, key_row), (value_page, value_row), HeadStrides(0, 0, bias_row, bias_key)),
            ),
            *(rows, start, page, visible, factor, cap, MASKED, META),
        )
        page, wrong = _checked(following, n_pages, wrong, META)
        following = _pages(pages, start + 2 * BLOCK_N, visible.low, visible.stop, META)
    return acc, m_i, l_i, wrong


@triton.jit
def _pad_logsumexp(logsumexp, batch, head, strides, count, padded, chosen, META: tl.constexpr):
    """Set the logsumexp of rows from `count` to `padded`, at most 31 per head, to inf where `chosen`."""
    rows = count + tl.arange(0, 32)
    for i in range(META.ratio):
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
    kv_heads,
    blocks,
    splits,
    least_keys,
    n_pages,
    padded,
    scale: tl.float64,
    softcap: tl.float64,
    META: tl.constexpr,
):
    """Attend a block of rows to one split of the keys that they see.

    Tokens of a sequence are a row of the batch, or begin at `starts`. Keys are a row of the batch, begin at
    `key_starts`, or lie in the sequence's `pages`, where `lengths` counts them. `scales` are factors of keys and
    values. `strides` are `DecodeStrides`. logsumexp is inf behind the last query, up to row `padded`.
    """
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_V: tl.constexpr = META.block_v
    RATIO: tl.constexpr = META.ratio
    ELEMENT: tl.constexpr = out.dtype.element_ty
    wait_for_previous_launch()
    if META.dependent:
        tl.extra.cuda.gdc_launch_dependents()
    strides = DecodeStrides(*strides)
    head = tl.program_id(0) % kv_heads
    split = tl.program_id(0) // kv_heads % splits
    block = tl.program_id(0) // kv_heads // splits
    if starts is None:
        sequence = block // blocks
        block = block % blocks
    else:
        sequence = _sequence_of(starts, sequences, block, True, META)
        block -= _first_block(tl.load(starts + sequence).to(tl.int32), sequence, META)
    all_lengths = Lengths(sequences, tokens, queries, keys, diagonal)
    first, count, first_key, length, diagonal = _sequence_rows(sequence, starts, lengths, key_starts, all_lengths)
    low, base, split_keys, end = _split_keys(block, count, length, diagonal, window, splits, least_keys, META)
    begin = base + split * split_keys
    stop = tl.minimum(end, begin + split_keys)
    batch, head = sequence.to(tl.int64), head.to(tl.int64)
    if logsumexp is not None:
        _pad_logsumexp(
            logsumexp, batch, head * RATIO, strides.logsumexp, count, padded, (split == 0) & (block == 0), META
        )
    # Programs without keys go on with none: with an early return Triton 3.6 forgets which strides are 1.
    if META.split:
        count = tl.where(begin < stop, count, 0)
    stop = tl.where(block * BLOCK_M < count * RATIO, stop, begin)
    flat = block * BLOCK_M + tl.arange(0, BLOCK_M)
    there = flat < count * RATIO
    rows = flat // RATIO
    heads = head * RATIO + flat % RATIO
    # Counted from the first token of all, or of a row of the batch.
    token = rows.to(tl.int64)
    if starts is not None:
        token += first
    columns = tl.arange(0, META.block_d)
    pointers = query + (batch * strides.query[0] + heads * strides.query[1] + token * strides.query[2])[:, None]
    q = tl.load(pointers + columns[None, :], mask=there[:, None] & (columns < META.head_size)[None, :], other=0.0)
    key += head * strides.key[1]
    value += head * strides.value[1]
    if key_starts is not None:
        key += tl.full((), first_key, tl.int64) * strides.key[2]
        value += tl.full((), first_key, tl.int64) * strides.value[2]
    elif META.page == 0:
        key += batch * strides.key[0]
        value += batch * strides.value[0]
    else:
        pages += batch * strides.pages
    if bias is not None:
        bias = bias + (batch * strides.bias[0] + heads * strides.bias[1])[:, None]
    # Before the loops: behind them, too, Triton 3.6 forgets which strides are 1.
    out = out + (batch * strides.out[0] + heads * strides.out[1] + token * strides.out[2])[:, None]
    if logsumexp is not None:
        of_logsumexp = strides.logsumexp
        logsumexp = logsumexp + batch * of_logsumexp[0] + heads * of_logsumexp[1] + token * of_logsumexp[2]
    factor, value_scale = score_factor(tl.full((), scale, tl.float64), META.nats), 1.0
    if scales is not None:
        factor *= tl.load(scales[0] + head * strides.scales[0])
        value_scale = tl.load(scales[1] + head * strides.scales[1])
    cap = tl.full((), softcap, tl.float64).to(tl.float32)
    if META.capped:
        factor = factor * 2 / cap
    cap = cap * LOG2E
    wrong = tl.zeros((BLOCK_N // META.run,), tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    rows = tl.where(there, rows, -1)
    inputs = (q, key, value, bias)
    if META.unmasked:
        # All rows see the keys between these, which the window and the diagonal leave.
        from_, to = begin, stop
        if META.windowed:
            last = tl.minimum(count, (block * BLOCK_M + BLOCK_M - 1) // RATIO + 1) - 1
            from_ = tl.maximum(tl.cdiv(tl.maximum(last + diagonal - window + 1, 0), BLOCK_N) * BLOCK_N, begin)
        if META.causal:
            to = tl.minimum(stop, tl.maximum(block * BLOCK_M // RATIO + diagonal + 1, 0))
        to = to // BLOCK_N * BLOCK_N
        from_ = tl.minimum(from_, stop)
        to = tl.maximum(to, from_)
        if META.windowed:
            acc, m_i, l_i, wrong = _attend_range(
                *((acc, m_i, l_i, wrong), inputs, pages, n_pages, strides, rows, begin),
                *(Visible(low, from_, diagonal, window), factor, cap, True, META),
            )
        acc, m_i, l_i, wrong = _attend_range(
            *((acc, m_i, l_i, wrong), inputs, pages, n_pages, strides, rows, from_),
            *(Visible(low, to, diagonal, window), factor, cap, False, META),
        )
        begin = to
    acc, m_i, l_i, wrong = _attend_range(
        *((acc, m_i, l_i, wrong), inputs, pages, n_pages, strides, rows, begin),
        *(Visible(low, stop, diagonal, window), factor, cap, True, META),
    )
    if META.page > 0:
        tl.device_assert(wrong == 0, "block_table names a page that the caches do not have")
    columns = tl.arange(0, BLOCK_V)
    mask = there[:, None] & (columns < META.value_size)[None, :]
    if META.split:
        if starts is None:
            token += batch * queries
        index = (token * (kv_heads * RATIO) + heads) * splits + split
        tl.store(partial[0] + index[:, None] * META.value_size + columns[None, :], acc, mask=mask)
        tl.store(partial[1] + index * 2, m_i, mask=there)
        tl.store(partial[1] + index * 2 + 1, l_i, mask=there)
    else:
        no_keys = l_i == 0
        l_i = tl.where(no_keys, 1.0, l_i)
        acc /= l_i[:, None]
        tl.store(out + columns[None, :], (acc * value_scale).to(ELEMENT), mask=mask)
        if logsumexp is not None:
            tl.store(logsumexp, tl.where(no_keys, float(META.empty), _logsumexp(m_i, l_i, META)), mask=there)


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
    kv_heads,
    splits,
    least_keys,
    META: tl.constexpr,
):
    """Combine the splits of a row in their order; the arguments are attend_to_splits's."""
    BLOCK_V: tl.constexpr = META.block_v
    RATIO: tl.constexpr = META.ratio
    strides = DecodeStrides(*strides)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % (kv_heads * RATIO)
    token = tl.program_id(0) // (kv_heads * RATIO)
    if starts is None:
        sequence = token // queries
    else:
        sequence = _sequence_of(starts, sequences, token, False, META)
    all_lengths = Lengths(sequences, tokens, queries, keys, diagonal)
    first, count, _, length, diagonal = _sequence_rows(sequence, starts, lengths, key_starts, all_lengths)
    block = ((token - first) * RATIO + head % RATIO) // META.block_m
    _, first_key, split_keys, end = _split_keys(block, count, length, diagonal, window, splits, least_keys, META)
    n_splits = tl.cdiv(tl.maximum(end - first_key, 0), split_keys)
    # Before the loop, as in attend_to_splits.
    batch, own_token = sequence.to(tl.int64), token.to(tl.int64)
    if starts is None:
        own_token -= batch * queries
    out += batch * strides.out[0] + head.to(tl.int64) * strides.out[1] + own_token * strides.out[2]
    if logsumexp is not None:
        of_logsumexp = strides.logsumexp
        logsumexp += batch * of_logsumexp[0] + head.to(tl.int64) * of_logsumexp[1] + own_token * of_logsumexp[2]
    value_scale = 1.0
    if scales is not None:
        value_scale = tl.load(scales[1] + head // RATIO * strides.scales[1])
    columns = tl.arange(0, BLOCK_V)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    m_i = tl.full((), float("-inf"), tl.float32)
    l_i = tl.full((), 0.0, tl.float32)
    # What comes before reads nothing that attend_to_splits writes, so a dependent launch overlaps with its end.
    wait_for_previous_launch()
    for begin in range(0, n_splits, _SPLITS):
        i = begin + tl.arange(0, _SPLITS)
        index = row * splits + i
        split_max = tl.load(partial[1] + index * 2, mask=i < n_splits, other=float("-inf"))
        split_sum = tl.load(partial[1] + index * 2 + 1, mask=i < n_splits, other=0.0)
        mask = (i < n_splits)[:, None] & (columns < META.value_size)[None, :]
        split_acc = tl.load(partial[0] + index[:, None] * META.value_size + columns[None, :], mask=mask, other=0.0)
        new_max = tl.maximum(m_i, tl.max(split_max, 0))
        base = finite_max(new_max)
        weights = exponentials(split_max, base, False, META.nats)
        rescale = exponentials(m_i, base, False, META.nats)
        l_i = l_i * rescale + tl.sum(split_sum * weights, 0)
        acc = acc * rescale + tl.sum(split_acc * weights[:, None], 0)
        m_i = new_max
    no_keys = l_i == 0
    l_i = tl.where(no_keys, 1.0, l_i)
    acc /= l_i
    acc *= value_scale
    tl.store(out + columns, acc.to(out.dtype.element_ty), mask=columns < META.value_size)
    if logsumexp is not None:
        tl.store(logsumexp, tl.where(no_keys, float(META.empty), _logsumexp(m_i, l_i, META)))


class Cut(NamedTuple):
    """A division of work: tile, blocks of rows, splits of each block's keys, fewest keys of a split."""

    tile: table.Tile
    blocks: int
    splits: int
    least_keys: int

    @staticmethod
    def choose(tile: table.Tile, blocks: int, kv_heads: int, keys: int, device: torch.device) -> Cut:
        """Choose the splits of a call whose sequences have up to `keys` keys."""
        if settings().invariant:
            return Cut(tile, blocks, 1, 0)
        split_keys = table.keys_of_split(blocks * kv_heads, keys, tile.BLOCK_N, devices.multiprocessors(device))
        return Cut(tile, blocks, max(1, -(-keys // split_keys)), table.LEAST_SPLIT_KEYS)


def launch_splits(
    operands: dict[str, Any],
    out: torch.Tensor,
    logsumexp: torch.Tensor | None,
    strides: tuple[Any, ...],
    sizes: dict[str, int],
    cut: Cut,
    meta: DecodeMeta,
    **others: Any,
) -> None:
    """Launch attend_to_splits, and combine_splits if there are several."""
    rows, kv_heads, device = sizes["tokens"] * sizes["kv_heads"] * meta.ratio, sizes["kv_heads"], out.device
    partial, several = None, cut.splits > 1
    meta = replace(meta, split=several, dependent=several and devices.has_dependent_launch(device))
    if several:
        values = empty((rows, cut.splits, meta.value_size), torch.float32, device)
        partial = (values, empty((rows, cut.splits, 2), torch.float32, device))
    attend_to_splits[(cut.blocks * cut.splits * kv_heads,)](
        **operands,
        **others,
        **sizes,
        out=out,
        logsumexp=logsumexp,
        partial=partial,
        strides=strides,
        splits=cut.splits,
        least_keys=cut.least_keys,
        # Packed logsumexp is not padded.
        padded=0 if logsumexp is None or operands["key_starts"] is not None else logsumexp.shape[2],
        META=meta,
        **cut.tile.options,
        **compiler_options(meta.natural),
        **(ASSERTING if meta.page else {}),
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
            least_keys=cut.least_keys,
            META=meta,
            num_warps=table.COMBINING_WARPS,
            **devices.current.options,
            **(ASSERTING if meta.page else {}),
        )


def most_blocks(rows: int, sequences: int, tile: table.Tile) -> int:
    """Return an upper bound of the blocks of packed sequences, each of which begins a block of its own."""
    return rows // tile.BLOCK_M + sequences + 1


def _keys_of_last_query(problem: Problem) -> int:
    """Return the keys that the last query sees, or that of the longest packed sequence."""
    if problem.packed is not None and problem.packed.last:
        return problem.keys
    return max(0, min(problem.keys, problem.queries + problem.diagonal)) if problem.causal else problem.keys


def decodes(problem: Problem, logsumexp: torch.Tensor | None = None) -> bool:
    """Return whether a problem has few queries, and enough keys for reading them to dominate."""
    if logsumexp is not None and problem.packed is not None and not problem.packed.logarithms:
        # These kernels store packed sequences' logsumexp packed.
        return False
    few = problem.queries <= table.FEW_QUERIES and problem.queries * problem.ratio <= table.FEW_ROWS
    # Splits depend on the number of other rows, so not in invariant mode.
    plain = problem.dropout is None and not settings().invariant
    return plain and few and _keys_of_last_query(problem) >= table.MANY_KEYS


def decode(problem: Problem, out: torch.Tensor, logsumexp: torch.Tensor | None, no_keys: str = "inf") -> None:
    """Do what `forward.attention` does, for a problem that `decodes`, without dropout."""
    query, key, value = problem.query, problem.key, problem.value
    (_, _, rows, head), kv_heads, packed = query.shape, key.shape[1], problem.packed
    batch, queries = problem.batch, problem.queries
    if not batch * rows * kv_heads:
        return
    tile = table.decoding(
        *(devices.current.kind, query.dtype.itemsize, power_of_2(max(head, value.shape[3]))),
        *(queries * problem.ratio, devices.shared_memory(query.device)),
    )
    blocks = -(-queries * problem.ratio // tile.BLOCK_M)
    all_blocks = blocks * batch if packed is None else most_blocks(rows * problem.ratio, batch, tile)
    cut = Cut.choose(tile, all_blocks, kv_heads, _keys_of_last_query(problem), query.device)
    meta = DecodeMeta(**vars(problem.meta(tile, out, empty=no_keys)))
    strides = (
        *(*map(problem.strides, (query, key, value, out)), problem.bias_strides),
        *(problem.logsumexp_strides(logsumexp)[:3], 0, (0, 0)),
    )
    operands = {"query": query, "key": key, "value": value, "bias": problem.bias}
    operands |= dict.fromkeys(("pages", "lengths", "scales"))
    operands["starts"], operands["key_starts"] = problem.starts
    tokens = batch * rows if packed is None else rows
    sizes = {"sequences": batch, "tokens": tokens, "queries": queries, "keys": problem.keys}
    sizes |= {"diagonal": problem.diagonal, "window": 0, "kv_heads": kv_heads}
    launch_splits(
        *(operands, out, logsumexp, strides, sizes, cut, meta),
        blocks=blocks,
        n_pages=0,
        scale=problem.factor,
        softcap=0.0,
    )
