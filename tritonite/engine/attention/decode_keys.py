"""Indices of a decoding program's tokens and keys: sequences, splits of their keys, pages of a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritonite.engine.attention.problem import AttentionMeta

# Starts of sequences that a step of `sequence_of` compares.
_SEQUENCES = tl.constexpr(512)


@dataclass(frozen=True)
class DecodeMeta(AttentionMeta):
    """Compile-time facts of the decoding kernels. A tile's `block_m` rows are queries times `ratio` heads.

    page: rows of a page, 0 where keys and values are in one tensor.
    split: keys have several splits, whose partial results are stored for combine_splits.
    dependent: combine_splits is a dependent launch, whose programs start before those that they wait for have ended.
    unmasked: blocks of keys that all queries see have a loop without masks.
    shared: a value is the first elements of its key, so that one tile serves both. `block_d` holds the others.
    """

    page: int = 0
    split: bool = False
    dependent: bool = False
    unmasked: bool = False
    shared: bool = False

    @property
    def run(self) -> int:
        """Keys of a run: successive keys of a block that lie in one page."""
        return math.gcd(self.page, self.block_n)


class Lengths(NamedTuple):
    """Sequences and tokens of a call, and the queries, keys and diagonal of a sequence where all have the same."""

    sequences: int
    tokens: int
    queries: int
    keys: int
    diagonal: int


class DecodeTensors(NamedTuple):
    """Tensors of a decoding kernel; None for those that a call does not have.

    query_rest: the tile of a query's elements behind those of a value, where keys and values are shared.
    key, value: tensors, or caches whose pages the block table `pages` lists.
    lengths: keys of each sequence.
    starts, key_starts: first tokens and first keys of packed sequences, and the end of the last.
    scales: factors of keys and of values.
    sinks: (heads,): a score of each head's rows that has no value.
    """

    query: Any = None
    key: Any = None
    value: Any = None
    bias: Any = None
    pages: Any = None
    lengths: Any = None
    starts: Any = None
    key_starts: Any = None
    scales: Any = None
    out: Any = None
    logsumexp: Any = None
    query_rest: Any = None
    sinks: Any = None


class Sequence(NamedTuple):
    """A sequence's first token, number of tokens, first key, number of keys, and diagonal."""

    first: Any
    tokens: Any
    first_key: Any
    keys: Any
    diagonal: Any


@triton.jit
def first_block(starts, i, META: tl.constexpr):
    """Return the first block of rows of sequence i, in a grid where each sequence may leave its last block partial."""
    return starts * META.ratio // META.block_m + i


@triton.jit
def sequence_of(starts, sequences, number, BLOCKS: tl.constexpr, META: tl.constexpr):
    """Return the sequence of a token, or with BLOCKS of a block of rows: the last that begins at or before it."""
    count = 0
    for first in range(0, sequences + 1, _SEQUENCES):
        i = first + tl.arange(0, _SEQUENCES)
        start = tl.load(starts + i, mask=i <= sequences, other=0)
        begin = first_block(start, i, META) if BLOCKS else start
        count += tl.sum(((begin <= number) & (i <= sequences)).to(tl.int32), 0)
    return tl.maximum(count - 1, 0)


@triton.jit
def sequence_rows(sequence, tensors, all_lengths):
    """Return the `Sequence` of a number. Tokens behind the last sequence count as one more, without keys."""
    first, first_key = sequence * all_lengths.queries, 0
    count, length, diagonal = all_lengths.queries, all_lengths.keys, all_lengths.diagonal
    sequences, tokens = all_lengths.sequences, all_lengths.tokens
    if tensors.starts is not None:
        first = tl.load(tensors.starts + sequence).to(tl.int32)
        last = tl.load(tensors.starts + sequence + 1, mask=sequence < sequences, other=tokens).to(tl.int32)
        ascends = (first >= 0) & (first <= last) & (last <= tokens)
        tl.device_assert(
            ascends & ((sequence > 0) | (first == 0)), "cu_seqlens does not begin with 0, or does not ascend"
        )
        count = last - first
    if tensors.lengths is not None:
        most = length
        length = tl.load(tensors.lengths + sequence, mask=sequence < sequences, other=0).to(tl.int32)
        tl.device_assert((length >= 0) & (length <= most), "a length is negative, or exceeds the room for keys")
        diagonal = length - count
    if tensors.key_starts is not None:
        starts = tensors.key_starts + sequence
        first_key = tl.load(starts).to(tl.int32)
        length = tl.load(starts + 1, mask=sequence < sequences, other=first_key).to(tl.int32) - first_key
        diagonal = length - count
    return Sequence(first, count, first_key, length, diagonal)


@triton.jit
def keys_of_split(block, own, window, splits, least_keys, META: tl.constexpr):
    """Return (first key that a block's rows see, first key of the splits, keys of a split, end of the keys seen).

    `own` is the block's `Sequence`.
    """
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    low, end = own.keys * 0, own.keys
    if META.causal:
        last = tl.minimum(own.tokens, (block * BLOCK_M + BLOCK_M - 1) // META.ratio + 1)
        end = tl.minimum(own.keys, tl.maximum(last + own.diagonal, 0))
    if META.windowed:
        low = tl.maximum(block * BLOCK_M // META.ratio + own.diagonal - window + 1, 0)
    base = low // BLOCK_N * BLOCK_N
    split_keys = tl.cdiv(tl.cdiv(end - base, splits), BLOCK_N) * BLOCK_N
    return low, base, tl.maximum(split_keys, least_keys), end


@triton.jit
def seen_by_any(columns, low, stop, META: tl.constexpr):
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
def load_pages(pages, start, low, stop, META: tl.constexpr):
    """Return the pages of a block's runs; pages that no row sees are not read."""
    RUN: tl.constexpr = META.run
    if META.page == 0:
        found = start
    else:
        runs = _runs(start, META)
        # A run is seen if its last key is in the window and its first key exists.
        seen = seen_by_any(runs * RUN, low - (RUN - 1), stop, META)
        found = tl.load(pages + runs // (META.page // RUN), mask=seen, other=0)
    return found


@triton.jit
def load_cached_rows(pointer, offset, exists, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
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
def to_query_dtype(tile, DTYPE: tl.constexpr):
    """Convert a tile of a cache to the query's dtype."""
    if tile.dtype == tl.float8e4nv and tl.bfloat16 == DTYPE:
        # By float16 it would be converted by the unit for exponentials, at an eighth of the usual throughput.
        tile = tile.to(tl.float32)
    return tile.to(DTYPE)


@triton.jit
def checked_pages(page, n_pages, wrong, META: tl.constexpr):
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
def key_offsets(page, start, strides, META: tl.constexpr):
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
