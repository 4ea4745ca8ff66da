"""Attention of few queries over many keys: a program for each split of the keys, and a launch that combines splits.

The query heads that share a key head are rows of one tile, so that keys and values are read once. Keys and values lie
in rows, or in pages that a block table lists (`paged`). A split leaves its accumulator, row max and row sum, from which
those of all keys follow (Milakov and Gimelshein 2018; Dao et al. 2023, "Flash-Decoding for long-context inference").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.attention import table
from tritonite.engine.attention.decode_keys import (
    DecodeMeta,
    DecodeTensors,
    Lengths,
    checked_pages,
    first_block,
    key_offsets,
    keys_of_split,
    load_cached_rows,
    load_pages,
    seen_by_any,
    sequence_of,
    sequence_rows,
    to_query_dtype,
)
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.prologue import ForwardStrides, HeadStrides
from tritonite.engine.attention.scores import (
    LOG2E,
    ScoreRule,
    add_bias,
    capped_factor,
    exponentials,
    finite_max,
    head_sink,
    load_bias,
    scaled_products,
    score_factor,
)
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty, settings
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

# Integers that differ from call to call of a kernel.
_SIZES = ["sequences", "tokens", "queries", "keys", "diagonal", "window", "kv_heads", "splits", "least_keys"]
# Splits that a step of combine_splits loads.
_SPLITS = tl.constexpr(16)


class Visible(NamedTuple):
    """Keys that a tile's rows see: the first and the end of those that any row sees, and the diagonal."""

    low: Any
    stop: Any
    diagonal: Any


@triton.jit
def _attend_block(state, inputs, strides, rows, start, page, visible, rule, MASKED: tl.constexpr, META: tl.constexpr):
    """Return (accumulator, row max, row sum) after a block of keys from `start`.

    `inputs` are `DecodeTensors` whose query is a tile, `strides` the (page, row) of keys, those of values, and the
    `HeadStrides` of the bias.
    """
    PRECISION: tl.constexpr = META.precision
    acc, m_i, l_i = state
    q, key, value, bias = inputs.query, inputs.key, inputs.value, inputs.bias
    key_strides, value_strides, bias_strides = strides
    columns = start + tl.arange(0, META.block_n)
    exists = seen_by_any(columns, visible.low, visible.stop, META)
    mask = exists[None, :]
    if META.causal:
        mask = mask & (columns[None, :] <= (rows + visible.diagonal)[:, None])
    if META.windowed:
        mask = mask & (columns[None, :] > (rows + visible.diagonal - rule.window)[:, None])
    there = mask & (rows >= 0)[:, None]
    bias_tile = load_bias(bias, bias_strides, rows[:, None], columns[None, :], None, there, False)
    key_at = key_offsets(page, start, key_strides, META)
    if META.shared:
        v = load_cached_rows(value, key_at, exists, META.value_size, META.block_v, MASKED)
        scores = tl.dot(q, tl.trans(v), input_precision=PRECISION)
        if META.head_size > META.value_size:
            REST: tl.constexpr = META.head_size - META.value_size
            k = load_cached_rows(key, key_at + META.value_size, exists, REST, META.block_d, MASKED)
            scores = tl.dot(inputs.query_rest, tl.trans(k), scores, input_precision=PRECISION)
    else:
        k = load_cached_rows(key, key_at, exists, META.head_size, META.block_d, MASKED)
        scores = tl.dot(q, tl.trans(to_query_dtype(k, q.dtype)), input_precision=PRECISION)
    scores = scaled_products(scores, rule, META)
    if META.capped:
        scores *= rule.cap
    if MASKED or bias is not None:
        if bias is not None:
            scores = add_bias(scores, bias_tile)
        scores = tl.where(mask, scores, float("-inf"))
    new_max = tl.maximum(m_i, tl.max(scores, 1))
    base = finite_max(new_max)
    p = exponentials(scores, base[:, None], False, META.nats)
    rescale = exponentials(m_i, base, False, META.nats)
    l_i = l_i * rescale + tl.sum(p, 1)
    if not META.shared:
        value_at = key_offsets(page, start, value_strides, META)
        v = load_cached_rows(value, value_at, exists, META.value_size, META.block_v, MASKED)
        v = to_query_dtype(v, q.dtype)
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
def _attend_range(state, inputs, n_pages, strides, rows, begin, visible, rule, MASKED, META: tl.constexpr):
    """Return (accumulator, row max, row sum, wrong pages) after the keys from `begin`, a multiple of a block."""
    BLOCK_N: tl.constexpr = META.block_n
    acc, m_i, l_i, wrong = state
    # Outside the loop: in it Triton 3.6 forgets which strides of a tuple are 1.
    key_strides = (strides.key.batch, strides.key.row)
    value_strides = (strides.value.batch, strides.value.row)
    bias_strides = HeadStrides(0, 0, strides.bias.row, strides.bias.element)
    # Pages are loaded two blocks ahead, because the compiler waits at once for a load that is checked in the loop.
    first = load_pages(inputs.pages, begin, visible.low, visible.stop, META)
    following = load_pages(inputs.pages, begin + BLOCK_N, visible.low, visible.stop, META)
    page, wrong = checked_pages(first, n_pages, wrong, META)
    for start in range(begin, visible.stop, BLOCK_N):
        acc, m_i, l_i = _attend_block(
            *((acc, m_i, l_i), inputs, (key_strides, value_strides, bias_strides)),
            *(rows, start, page, visible, rule, MASKED, META),
        )
        page, wrong = checked_pages(following, n_pages, wrong, META)
        following = load_pages(inputs.pages, start + 2 * BLOCK_N, visible.low, visible.stop, META)
    return acc, m_i, l_i, wrong


@triton.jit
def row_offsets(strides, batch, heads, tokens):
    """Return the offsets of rows of tokens and heads."""
    return batch * strides.batch + heads * strides.head + tokens * strides.row


@triton.jit
def _pad_logsumexp(logsumexp, batch, head, strides, count, padded, chosen, META: tl.constexpr):
    """Set the logsumexp of rows from `count` to `padded`, at most 31 per head, to inf where `chosen`."""
    rows = count + tl.arange(0, 32)
    for i in range(META.ratio):
        pointers = logsumexp + batch * strides.batch + (head + i) * strides.head + rows * strides.row
        tl.store(pointers, tl.full((32,), float("inf"), tl.float32), mask=(rows < padded) & chosen)


@triton.jit
def _load_query(rows, there, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load SIZE elements of queries, whose rows `there` marks, as a tile of BLOCK columns."""
    columns = tl.arange(0, BLOCK)
    return tl.load(rows + columns[None, :], mask=there[:, None] & (columns < SIZE)[None, :], other=0.0)


@libentry()
@triton.jit(do_not_specialize=[*_SIZES, "blocks", "n_pages", "padded"])
def attend_to_splits(
    tensors,
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

    Tokens of a sequence are a row of the batch, or begin at its start. Keys are a row of the batch, begin at their
    start, or lie in the sequence's pages, where `lengths` counts them. logsumexp is inf behind the last query, up to
    row `padded`. With META.split the block's accumulator, row max and row sum go to `partial`, without sinks, which
    combine_splits adds once.
    """
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_V: tl.constexpr = META.block_v
    RATIO: tl.constexpr = META.ratio
    ELEMENT: tl.constexpr = tensors.out.dtype.element_ty
    wait_for_previous_launch()
    if META.dependent:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) % kv_heads
    split = tl.program_id(0) // kv_heads % splits
    block = tl.program_id(0) // kv_heads // splits
    if tensors.starts is None:
        sequence = block // blocks
        block = block % blocks
    else:
        sequence = sequence_of(tensors.starts, sequences, block, True, META)
        block -= first_block(tl.load(tensors.starts + sequence).to(tl.int32), sequence, META)
    own = sequence_rows(sequence, tensors, Lengths(sequences, tokens, queries, keys, diagonal))
    count, diagonal = own.tokens, own.diagonal
    low, base, split_keys, end = keys_of_split(block, own, window, splits, least_keys, META)
    begin = base + split * split_keys
    stop = tl.minimum(end, begin + split_keys)
    batch, head = sequence.to(tl.int64), head.to(tl.int64)
    if tensors.logsumexp is not None:
        chosen = (split == 0) & (block == 0)
        _pad_logsumexp(tensors.logsumexp, batch, head * RATIO, strides.logsumexp, count, padded, chosen, META)
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
    if tensors.starts is not None:
        token += own.first
    query = tensors.query + row_offsets(strides.query, batch, heads, token)[:, None]
    query_rest = None
    if META.shared:
        q = _load_query(query, there, META.value_size, META.block_v)
        if META.head_size > META.value_size:
            query_rest = _load_query(query + META.value_size, there, META.head_size - META.value_size, META.block_d)
    else:
        q = _load_query(query, there, META.head_size, META.block_d)
    key = tensors.key + head * strides.key.head
    value = tensors.value + head * strides.value.head
    pages = tensors.pages
    if tensors.key_starts is not None:
        key += tl.full((), own.first_key, tl.int64) * strides.key.row
        value += tl.full((), own.first_key, tl.int64) * strides.value.row
    elif META.page == 0:
        key += batch * strides.key.batch
        value += batch * strides.value.batch
    else:
        pages += batch * strides.pages
    bias = None
    if tensors.bias is not None:
        bias = tensors.bias + (batch * strides.bias.batch + heads * strides.bias.head)[:, None]
    # Before the loops: behind them, too, Triton 3.6 forgets which strides are 1.
    out = tensors.out + row_offsets(strides.out, batch, heads, token)[:, None]
    logsumexp = None
    if tensors.logsumexp is not None:
        logsumexp = tensors.logsumexp + row_offsets(strides.logsumexp, batch, heads, token)
    number = tl.full((), scale, tl.float64)
    factor, cap, value_scale = score_factor(number, META.nats), None, 1.0
    if META.capped:
        factor, cap = capped_factor(number, softcap, META)
    if tensors.scales is not None:
        factor *= tl.load(tensors.scales[0] + head * strides.scales[0])
        value_scale = tl.load(tensors.scales[1] + head * strides.scales[1])
    rule = ScoreRule(factor, cap, window)
    wrong = tl.zeros((BLOCK_N // META.run,), tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    if tensors.sinks is not None and not META.split:
        m_i = head_sink(tensors.sinks, heads, META.nats)
        l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    rows = tl.where(there, rows, -1)
    inputs = DecodeTensors(q, key, value, bias, pages, query_rest=query_rest)
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
                *((acc, m_i, l_i, wrong), inputs, n_pages, strides, rows, begin),
                *(Visible(low, from_, diagonal), rule, True, META),
            )
        acc, m_i, l_i, wrong = _attend_range(
            *((acc, m_i, l_i, wrong), inputs, n_pages, strides, rows, from_),
            *(Visible(low, to, diagonal), rule, False, META),
        )
        begin = to
    acc, m_i, l_i, wrong = _attend_range(
        *((acc, m_i, l_i, wrong), inputs, n_pages, strides, rows, begin),
        *(Visible(low, stop, diagonal), rule, True, META),
    )
    if META.page > 0:
        tl.device_assert(wrong == 0, "block_table names a page that the caches do not have")
    columns = tl.arange(0, BLOCK_V)
    mask = there[:, None] & (columns < META.value_size)[None, :]
    if META.split:
        if tensors.starts is None:
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
    tensors,
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
    """Combine the splits of a row in their order, after its sink; the arguments are attend_to_splits's."""
    BLOCK_V: tl.constexpr = META.block_v
    RATIO: tl.constexpr = META.ratio
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % (kv_heads * RATIO)
    token = tl.program_id(0) // (kv_heads * RATIO)
    if tensors.starts is None:
        sequence = token // queries
    else:
        sequence = sequence_of(tensors.starts, sequences, token, False, META)
    own = sequence_rows(sequence, tensors, Lengths(sequences, tokens, queries, keys, diagonal))
    block = ((token - own.first) * RATIO + head % RATIO) // META.block_m
    _, first_key, split_keys, end = keys_of_split(block, own, window, splits, least_keys, META)
    n_splits = tl.cdiv(tl.maximum(end - first_key, 0), split_keys)
    # Before the loop, as in attend_to_splits.
    batch, own_token = sequence.to(tl.int64), token.to(tl.int64)
    if tensors.starts is None:
        own_token -= batch * queries
    out = tensors.out + row_offsets(strides.out, batch, head.to(tl.int64), own_token)
    logsumexp = None
    if tensors.logsumexp is not None:
        logsumexp = tensors.logsumexp + row_offsets(strides.logsumexp, batch, head.to(tl.int64), own_token)
    value_scale = 1.0
    if tensors.scales is not None:
        value_scale = tl.load(tensors.scales[1] + head // RATIO * strides.scales[1])
    columns = tl.arange(0, BLOCK_V)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    m_i = tl.full((), float("-inf"), tl.float32)
    l_i = tl.full((), 0.0, tl.float32)
    if tensors.sinks is not None:
        m_i = head_sink(tensors.sinks, head, META.nats)
        l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
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
    tensors: DecodeTensors, strides: ForwardStrides, sizes: dict[str, int], cut: Cut, meta: DecodeMeta, **others: Any
) -> None:
    """Launch attend_to_splits, and combine_splits if there are several."""
    rows, kv_heads, device = sizes["tokens"] * sizes["kv_heads"] * meta.ratio, sizes["kv_heads"], tensors.out.device
    partial, several = None, cut.splits > 1
    meta = replace(meta, split=several, dependent=several and devices.has_dependent_launch(device))
    if several:
        values = empty((rows, cut.splits, meta.value_size), torch.float32, device)
        partial = (values, empty((rows, cut.splits, 2), torch.float32, device))
    shared: dict[str, Any] = {"partial": partial, "strides": strides, "META": meta}
    shared |= (
        sizes
        | {"splits": cut.splits, "least_keys": cut.least_keys}
        | (ASSERTING if meta.page or tensors.lengths is not None else {})
    )
    # logsumexp of packed sequences and of caches with lengths is not padded.
    batched = tensors.key_starts is None and tensors.lengths is None
    padded = tensors.logsumexp.shape[2] if tensors.logsumexp is not None and batched else 0
    attend_to_splits[(cut.blocks * cut.splits * kv_heads,)](
        tensors, padded=padded, **shared, **others, **cut.tile.options, **compiler_options(meta.natural)
    )
    if several:
        tensors = tensors._replace(query=None, key=None, value=None, bias=None, pages=None)
        options = {"num_warps": table.COMBINING_WARPS} | devices.current.options
        combine_splits[(rows,)](tensors=tensors, **shared, **options)


def most_blocks(rows: int, sequences: int, tile: table.Tile) -> int:
    """Return an upper bound of the blocks of packed sequences, each of which begins a block of its own."""
    return rows // tile.BLOCK_M + sequences + 1


def _keys_of_last_query(problem: Problem) -> int:
    """Return the keys that the last query sees, or that of the longest packed sequence."""
    if problem.packed is not None and problem.packed.last:
        return problem.keys
    return max(0, min(problem.keys, problem.queries + problem.diagonal)) if problem.causal else problem.keys


def _keys_of_last_block(problem: Problem) -> int:
    """Return an upper bound of the keys that any query of a sequence sees."""
    keys = _keys_of_last_query(problem)
    return keys if problem.window is None else min(keys, problem.queries + problem.window - 1)


def decodes(problem: Problem, logsumexp: torch.Tensor | None = None) -> bool:
    """Return whether a problem has few queries, and enough keys for reading them to dominate."""
    if logsumexp is not None and problem.packed is not None and not problem.packed.logarithms:
        # These kernels store packed sequences' logsumexp packed.
        return False
    few = problem.queries <= table.FEW_QUERIES and problem.queries * problem.ratio <= table.FEW_ROWS
    # Splits depend on the number of other rows, so not in invariant mode.
    served = problem.dropout is None and not settings().invariant
    return served and few and _keys_of_last_query(problem) >= table.MANY_KEYS


def decode(problem: Problem, out: torch.Tensor, logsumexp: torch.Tensor | None, no_keys: str = "inf") -> None:
    """Do what `forward.attention` does, for a problem that `decodes`, without dropout."""
    query, rows, kv_heads, packed = problem.query, problem.query.shape[2], problem.key.shape[1], problem.packed
    batch, queries = problem.batch, problem.queries
    if not batch * rows * kv_heads:
        return
    tile = table.decoding(query.dtype.itemsize, problem.size, queries * problem.ratio, query.device)
    blocks = -(-queries * problem.ratio // tile.BLOCK_M)
    all_blocks = blocks * batch if packed is None else most_blocks(rows * problem.ratio, batch, tile)
    cut = Cut.choose(tile, all_blocks, kv_heads, _keys_of_last_block(problem), query.device)
    meta = DecodeMeta(**vars(problem.meta(tile, out, empty=no_keys)))
    strides = problem.forward_strides(out, logsumexp)
    strides = strides._replace(logsumexp=HeadStrides(*strides.logsumexp[:3]), pages=0, scales=(0, 0))
    tokens = batch * rows if packed is None else rows
    sizes = {"sequences": batch, "tokens": tokens, "queries": queries, "keys": problem.keys}
    sizes |= {"diagonal": problem.diagonal, "window": problem.window or 0, "kv_heads": kv_heads}
    launch_splits(
        DecodeTensors(*problem[:4], None, None, *problem.starts, out=out, logsumexp=logsumexp, sinks=problem.sinks),
        *(strides, sizes, cut, meta),
        blocks=blocks,
        n_pages=0,
        scale=problem.factor,
        softcap=problem.softcap or 0.0,
    )
