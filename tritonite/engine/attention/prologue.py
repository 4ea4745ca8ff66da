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


class Operands(NamedTuple):
    """Tensors that every pass reads. `bias` is None, or (batch, heads, queries, keys)."""

    query: Any
    key: Any
    value: Any
    bias: Any


class Starts(NamedTuple):
    """First rows of packed sequences in query and in key, and the end of the last; None for sequences of a batch."""

    query: Any = None
    key: Any = None


class Results(NamedTuple):
    """Tensors that a forward kernel writes; logsumexp may be None."""

    out: Any
    logsumexp: Any


class DqInputs(NamedTuple):
    """Tensors that a backward_dq kernel reads besides `Operands`."""

    grad_out: Any
    out: Any
    logsumexp: Any


class DqResults(NamedTuple):
    """Tensors that a backward_dq kernel writes.

    grad_bias: (batch, heads, queries, keys), or None.
    delta: (batch, heads, queries): each row's sum of out * grad_out.
    excesses: of delta's shape: rows' `logsumexp_excess`, or None without an additive bias.
    """

    grad_query: Any
    grad_bias: Any
    delta: Any
    excesses: Any


class DkdvInputs(NamedTuple):
    """Tensors that a backward_dkdv kernel reads besides `Operands`: delta and excesses are those of `DqResults`."""

    grad_out: Any
    logsumexp: Any
    delta: Any
    excesses: Any


class DkdvResults(NamedTuple):
    """Tensors that a backward_dkdv kernel writes."""

    grad_key: Any
    grad_value: Any


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


class KeyPointers(NamedTuple):
    """Pointers to a head's keys, values, bias and gradient of the bias; the last two may be None."""

    key: Any
    value: Any
    bias: Any
    grad_bias: Any


class QueryPointers(NamedTuple):
    """Pointers to a query head's rows and bias; excesses and bias may be None."""

    query: Any
    grad_out: Any
    logsumexp: Any
    delta: Any
    excesses: Any
    bias: Any


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
def sequence_extent(starts, batch, queries, keys, diagonal, META: tl.constexpr):
    """Return (`Extent`, first query, first key) of a sequence.

    Sequences of a batch have the given extent and begin at row 0. Packed ones are read from their starts.
    """
    first_query, first_key = batch * 0, batch * 0
    if starts.query is not None:
        first_query, first_key = tl.load(starts.query + batch).to(tl.int64), tl.load(starts.key + batch).to(tl.int64)
        queries = (tl.load(starts.query + batch + 1) - first_query).to(tl.int32)
        keys = (tl.load(starts.key + batch + 1) - first_key).to(tl.int32)
        diagonal = queries * 0
        if META.last:
            diagonal = keys - queries
    return Extent(queries, keys, diagonal), first_query, first_key


@triton.jit
def locate_queries(sizes, starts, META: tl.constexpr):
    """Return (`Head`, `Extent` of its sequence) of a program that has a block of queries."""
    block, batch, head = program_tile(tl.program_id(0), sizes.blocks, sizes.heads, sizes.batch_heads, sizes.group)
    kv_head = head // META.ratio
    extent, first_query, first_key = sequence_extent(starts, batch, sizes.queries, sizes.keys, sizes.diagonal, META)
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
    # A local variable, because Triton 3.6 returns no None that is an argument.
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
