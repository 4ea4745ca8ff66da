"""Device functions of the gated delta rule's kernels: loads of rows and gates, decays, products."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritonite.engine.delta_rule.problem import DeltaSizes, InputStrides, RowStrides
from tritonite.language.bf16x6 import dot_terms, split_terms

# The addend of squared lengths.
_EPS = tl.constexpr(1e-6)


class Here(NamedTuple):
    """A program's batch, head of the values and head of the keys, as 64-bit integers."""

    batch: Any
    head: Any
    key_head: Any


@triton.jit
def _row_numbers(strides, INDEX: tl.constexpr):
    return RowStrides(
        tl.full((), strides.batch, INDEX), tl.full((), strides.token, INDEX), tl.full((), strides.head, INDEX)
    )


@triton.jit
def numbers(strides, sizes, INDEX: tl.constexpr):
    """Return strides and sizes as numbers of the dtype INDEX: in loops Triton 3.6 forgets which of a tuple are 1."""
    plain = InputStrides(
        _row_numbers(strides.query, INDEX),
        _row_numbers(strides.key, INDEX),
        _row_numbers(strides.value, INDEX),
        _row_numbers(strides.g, INDEX),
        _row_numbers(strides.beta, INDEX),
        _row_numbers(strides.out, INDEX),
    )
    plain_sizes = DeltaSizes(
        tl.full((), sizes.heads, tl.int32),
        tl.full((), sizes.ratio, tl.int32),
        tl.full((), sizes.key, tl.int32),
        tl.full((), sizes.value, tl.int32),
    )
    return plain, plain_sizes


@triton.jit
def locate(flat_head, sizes):
    """Return the place of a head, counted over all batches."""
    batch, head = flat_head // sizes.heads, flat_head % sizes.heads
    return Here(batch.to(tl.int64), head.to(tl.int64), (head // sizes.ratio).to(tl.int64))


@triton.jit
def head_rows(tensor, strides, batch, head):
    """Return the address of a head's first row."""
    return tensor + batch * strides.batch + head * strides.head


@triton.jit
def load_rows(rows, stride, token, tokens, column, columns):
    """Load a block of rows, 0 outside the tensor."""
    mask = (token < tokens)[:, None] & (column < columns)[None, :]
    return tl.load(rows + token[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(rows, stride, token, tokens, column, columns, values):
    """Store a block of rows, rounded to the tensor's dtype."""
    mask = (token < tokens)[:, None] & (column < columns)[None, :]
    pointers = rows + token[:, None] * stride + column[None, :]
    tl.store(pointers, values.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def inverse_length(x, AXIS: tl.constexpr):
    """Return 1 / sqrt(sum of squares + eps) along an axis, of float32 values."""
    return tl.rsqrt(tl.sum(x * x, AXIS) + _EPS)


@triton.jit
def load_vectors(rows, stride, token, tokens, column, columns, NORMALIZE: tl.constexpr):
    """Load queries or keys, divided by their lengths if NORMALIZE, in the tensor's dtype."""
    x = load_rows(rows, stride, token, tokens, column, columns)
    if NORMALIZE:
        wide = x.to(tl.float32)
        x = (wide * inverse_length(wide, 1)[:, None]).to(x.dtype)
    return x


@triton.jit
def load_gates(g, beta, strides, here, token, tokens):
    """Load a chunk's decays and rates.

    Returns the running sums of the decays' logarithms, their sum over the chunk, and the rates, in float32.
    """
    mask = token < tokens
    g = head_rows(g, strides.g, here.batch, here.head) + token * strides.g.token
    beta = head_rows(beta, strides.beta, here.batch, here.head) + token * strides.beta.token
    decay = tl.load(g, mask=mask, other=0.0).to(tl.float32)
    rate = tl.load(beta, mask=mask, other=0.0).to(tl.float32)
    return tl.cumsum(decay, 0), tl.sum(decay, 0), rate


@triton.jit
def decays_between(total):
    """Return exp(total[t] - total[s]) for tokens s <= t, 0 for s > t."""
    token = tl.arange(0, total.shape[0])
    past = token[:, None] >= token[None, :]
    return tl.exp(tl.where(past, total[:, None] - total[None, :], float("-inf")))


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """Return x @ y in float32."""
    return dot_terms(split_terms(x, PRECISION), split_terms(y, PRECISION), None, PRECISION)


@triton.jit
def square_block(blocks, number, SIZE: tl.constexpr):
    """Return the addresses of a contiguous SIZE x SIZE matrix among `blocks`."""
    row = tl.arange(0, SIZE)
    return blocks + number.to(tl.int64) * SIZE * SIZE + (row[:, None] * SIZE + row[None, :])


@triton.jit
def load_state(states, number, row, column, sizes):
    """Load a block of state `number`, of contiguous states (key size, value size), 0 outside of it."""
    mask = (row < sizes.key)[:, None] & (column < sizes.value)[None, :]
    pointers = states + number.to(tl.int64) * sizes.key * sizes.value + row[:, None] * sizes.value + column[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_state(states, number, row, column, sizes, values):
    """Store a block of state `number`, of contiguous states (key size, value size)."""
    mask = (row < sizes.key)[:, None] & (column < sizes.value)[None, :]
    pointers = states + number.to(tl.int64) * sizes.key * sizes.value + row[:, None] * sizes.value + column[None, :]
    tl.store(pointers, values.to(states.dtype.element_ty), mask=mask)
