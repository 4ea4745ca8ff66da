"""A program's prologue: from its number to a block, a head and a sequence, and to pointers at that head's rows."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class HeadStrides(NamedTuple):
    """Strides of a (batch, heads, rows, elements) tensor, in elements.

    For logsumexp, which has no elements, `element` is what a packed sequence's first row is multiplied by: its row
    stride where logsumexp is packed too, otherwise 0.
    """

    batch: int
    head: int
    row: int
    element: int = 1


class ForwardStrides(NamedTuple):
    """Strides of the forward kernels' tensors."""

    query: HeadStrides
    key: HeadStrides
    value: HeadStrides
    out: HeadStrides
    bias: HeadStrides
    logsumexp: HeadStrides


class DqStrides(NamedTuple):
    """Strides of the backward_dq kernels' tensors; `delta` are those of excesses, too."""

    query: HeadStrides
    key: HeadStrides
    value: HeadStrides
    bias: HeadStrides
    grad_out: HeadStrides
    out: HeadStrides
    logsumexp: HeadStrides
    grad_query: HeadStrides
    grad_bias: HeadStrides
    delta: HeadStrides


class DkdvStrides(NamedTuple):
    """Strides of the backward_dkdv kernels' tensors; `delta` are those of excesses, too."""

    query: HeadStrides
    key: HeadStrides
    value: HeadStrides
    bias: HeadStrides
    grad_out: HeadStrides
    logsumexp: HeadStrides
    grad_key: HeadStrides
    grad_value: HeadStrides
    delta: HeadStrides


class TileSizes(NamedTuple):
    """Run-time sizes that decide a program's tile: those of `longest_first`, and the sequence's extent."""

    heads: int
    batch_heads: int
    group: int
    blocks: int
    queries: int
    keys: int
    diagonal: int


class Extent(NamedTuple):
    """Queries and keys of a sequence. Causal query i sees the keys up to i + diagonal."""

    queries: int
    keys: int
    diagonal: int


@triton.jit
def longest_first(number, blocks, batch_heads, group):
    """Return (block, flattened batch and head) of a program.

    Programs take `group` heads at a time, and of these the last block of each head first: causal blocks grow longer
    towards the end, and the short ones left over even out the last wave.
    """
    first = number // (group * blocks) * group
    rest = number - first * blocks
    count = tl.minimum(group, batch_heads - first)
    return blocks - 1 - rest // count, first + rest % count


@triton.jit
def program_tile(number, blocks, heads, batch_heads, group):
    """Return (block, batch, head) of a program, in the order of `longest_first`."""
    block, batch_head = longest_first(number, blocks, batch_heads, group)
    return block, (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64)


@triton.jit
def sequence_extent(query_starts, key_starts, batch, queries, keys, diagonal, META: tl.constexpr):
    """Return (queries, keys, diagonal, first query, first key) of a sequence.

    Unpacked sequences have the given extent and begin at row 0. Packed ones are read from their starts.
    """
    first_query, first_key = batch * 0, batch * 0
    if query_starts is not None:
        first_query, first_key = tl.load(query_starts + batch).to(tl.int64), tl.load(key_starts + batch).to(tl.int64)
        queries = (tl.load(query_starts + batch + 1) - first_query).to(tl.int32)
        keys = (tl.load(key_starts + batch + 1) - first_key).to(tl.int32)
        diagonal = queries * 0
        if META.last:
            diagonal = keys - queries
    return queries, keys, diagonal, first_query, first_key


@triton.jit
def head_rows(pointer, strides, batch, head, first_row):
    """Advance a pointer to row `first_row` of a head."""
    return pointer + (batch * strides.batch + head * strides.head + first_row * strides.row)


@triton.jit
def head_logsumexp(pointer, strides, batch, head, first_query):
    """Advance a pointer to the logsumexp of a sequence's first query."""
    return pointer + (batch * strides.batch + head * strides.head + first_query * strides.element)


@triton.jit
def head_scores(pointer, strides, batch, head):
    """Advance a pointer into (batch, heads, queries, keys) to a head."""
    return pointer + (batch * strides.batch + head * strides.head)


@triton.jit
def head_row_values(pointer, strides, batch, head, first_query):
    """Advance a pointer into contiguous (batch, heads, queries) to a sequence's first query."""
    return pointer + (batch * strides.batch + head * strides.head + first_query)
