"""A program's prologue: from its number to a block, a head and a sequence, and to pointers at that head's rows."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    """Strides of the tensors of forward and decoding kernels.

    In decoding, rows of query and out are tokens, and the batches of a cache are pages. `pages` is the stride of the
    block table's rows, `scales` are those of key and value scales.
    """

    query: HeadStrides
    key: HeadStrides
    value: HeadStrides
    out: HeadStrides
    bias: HeadStrides
    logsumexp: HeadStrides
    pages: int | None = None
    scales: tuple[int, int] | None = None


class BackwardStrides(NamedTuple):
    """Strides of the tensors of a backward kernel, None for the tensors that it does not have.

    `delta` are those of excesses, too. In row_stats a row has one value for all queries.
    """

    query: HeadStrides | None = None
    key: HeadStrides | None = None
    value: HeadStrides | None = None
    bias: HeadStrides | None = None
    grad_out: HeadStrides | None = None
    out: HeadStrides | None = None
    logsumexp: HeadStrides | None = None
    grad_query: HeadStrides | None = None
    grad_bias: HeadStrides | None = None
    grad_key: HeadStrides | None = None
    grad_value: HeadStrides | None = None
    delta: HeadStrides | None = None
    row_stats: HeadStrides | None = None


class Tensors(NamedTuple):
    """Tensors of a kernel, their descriptors, or pointers to a head's rows; None for those that it does not have.

    bias, grad_bias: (batch, heads, queries, keys), or None.
    delta: (batch, heads, queries): each row's sum of out * grad_out.
    excesses: of delta's shape: rows' `logsumexp_excess`, or None without an additive bias.
    row_stats: what `hopper.backward_dq` leaves for `hopper.backward_dkdv`, in place of delta and excesses.
    query_starts, key_starts: first rows of packed sequences, and the end of the last; None for sequences of a batch.
    sinks: (heads,): a score of each head's rows that has no value, or None.
    grad_sinks: float32, (batch, heads, blocks of queries): sums of the sinks' gradients over a block's rows, or None.
    """

    query: Any = None
    key: Any = None
    value: Any = None
    bias: Any = None
    grad_out: Any = None
    out: Any = None
    logsumexp: Any = None
    grad_query: Any = None
    grad_bias: Any = None
    delta: Any = None
    excesses: Any = None
    row_stats: Any = None
    grad_key: Any = None
    grad_value: Any = None
    query_starts: Any = None
    key_starts: Any = None
    sinks: Any = None
    grad_sinks: Any = None


class TileSizes(NamedTuple):
    """Run-time sizes that decide a program's tile: those of `longest_first`, and the sequence's extent.

    They are parameters of their own, because Triton would specialise elements of a tuple.
    """

    heads: int
    batch_heads: int
    group: int
    blocks: int
    queries: int
    keys: int
    diagonal: int


class Extent(NamedTuple):
    """Queries and keys of a sequence. Causal query i sees the keys up to i + diagonal."""

    queries: Any
    keys: Any
    diagonal: Any


class Head(NamedTuple):
    """A program's block, batch, query head and key head, and the first query and key of its sequence."""

    block: Any
    batch: Any
    head: Any
    kv_head: Any
    first_query: Any
    first_key: Any


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
def sequence_extent(tensors, batch, queries, keys, diagonal, META: tl.constexpr):
    """Return (`Extent`, first query, first key) of a sequence.

    Sequences of a batch have the given extent and begin at row 0. Packed ones are read from their starts.
    """
    first_query, first_key = batch * 0, batch * 0
    if tensors.query_starts is not None:
        first_query, first_key = (
            tl.load(tensors.query_starts + batch).to(tl.int64),
            tl.load(tensors.key_starts + batch).to(tl.int64),
        )
        queries = (tl.load(tensors.query_starts + batch + 1) - first_query).to(tl.int32)
        keys = (tl.load(tensors.key_starts + batch + 1) - first_key).to(tl.int32)
        diagonal = queries * 0
        if META.last:
            diagonal = keys - queries
    return Extent(queries, keys, diagonal), first_query, first_key


@triton.jit
def locate_queries(sizes, tensors, META: tl.constexpr):
    """Return (`Head`, `Extent` of its sequence) of a program that has a block of queries."""
    block, batch, head = program_tile(tl.program_id(0), sizes.blocks, sizes.heads, sizes.batch_heads, sizes.group)
    kv_head = head // META.ratio
    extent, first_query, first_key = sequence_extent(tensors, batch, sizes.queries, sizes.keys, sizes.diagonal, META)
    return Head(block, batch, head, kv_head, first_query, first_key), extent


@triton.jit
def query_rows(pointer, strides, here):
    """Advance a pointer to the first of a head's queries, or to another tensor's rows for them."""
    return pointer + (here.batch * strides.batch + here.head * strides.head + here.first_query * strides.row)


@triton.jit
def key_rows(pointer, strides, here):
    """Advance a pointer to the first of a head's keys, or to another tensor's rows for them."""
    return pointer + (here.batch * strides.batch + here.kv_head * strides.head + here.first_key * strides.row)


@triton.jit
def head_logsumexp(pointer, strides, here):
    """Advance a pointer to the logsumexp of a head's first query."""
    return pointer + (here.batch * strides.batch + here.head * strides.head + here.first_query * strides.element)


@triton.jit
def head_scores(pointer, strides, here):
    """Advance a pointer into (batch, heads, queries, keys) to a head; None stays None."""
    # A local variable, because Triton 3.6 returns no None that is an argument. It returns no record with None either,
    # so kernels fill their `Tensors` themselves.
    found = None
    if pointer is not None:
        found = pointer + (here.batch * strides.batch + here.head * strides.head)
    return found


@triton.jit
def head_row_values(pointer, strides, here):
    """Advance a pointer into contiguous (batch, heads, queries) to a head's first query; None stays None."""
    found = None
    if pointer is not None:
        found = pointer + (here.batch * strides.batch + here.head * strides.head + here.first_query)
    return found
