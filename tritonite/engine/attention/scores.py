"""Scores of attention: which there are, what is added to them, their exponentials, and the logarithms of sums of those.

Nothing here lays a tile out, so that kernels in Gluon call the same functions.
"""

import triton
import triton.language as tl

# Exponentials are powers of two, which devices have an instruction for.
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exponential(x, NATURAL: tl.constexpr):
    """e or 2 to the power of x."""
    if NATURAL:
        result = tl.exp(x)
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def score_factor(number, NATURAL: tl.constexpr):
    """What products are multiplied by, so that `exponential` is of their base."""
    if not NATURAL:
        number *= LOG2E
    return number.to(tl.float32)


@triton.jit
def seen(rows, columns, span, CAUSAL: tl.constexpr):
    """Which keys which queries see, of indices that broadcast: all there are, with CAUSAL up to a diagonal.

    `span` is (queries, keys, diagonal).
    """
    queries, keys, diagonal = span
    exists = (rows < queries) & (columns < keys)
    if CAUSAL:
        exists = exists & (columns <= rows + diagonal)
    return exists


@triton.jit
def load_bias(bias, strides, rows, columns, span, exists, OF_KEYS: tl.constexpr):
    """A tile of a bias where a score `exists`, or None; one of keys alone is loaded once for all queries.

    Before the products that it is added to, so that it is on its way under them.
    """
    added = None
    if bias is not None:
        pointers = bias + columns * strides[3]
        if OF_KEYS:
            added = tl.load(pointers, mask=columns < span[1], other=0)
        else:
            added = tl.load(pointers + rows * strides[2], mask=exists, other=0)
    return added


@triton.jit
def biased(scores, added, NATURAL: tl.constexpr):
    """Scores with a tile of a bias added to them; of a mask those are -inf for which it is false."""
    if added.dtype == tl.int1:
        scores = tl.where(added != 0, scores, float("-inf"))
    elif NATURAL:
        scores += added.to(tl.float32)
    else:
        scores += added.to(tl.float32) * LOG2E
    return scores


@triton.jit
def load_logarithms(pointer, rows, stride, queries, NATURAL: tl.constexpr):
    """The logarithms of the sums of rows, to the base of scores; infinite where there is no row or it sees nothing."""
    found = tl.load(pointer + rows * stride, mask=rows < queries, other=float("inf"))
    found = tl.where(found == float("-inf"), float("inf"), found)
    if not NATURAL:
        found *= LOG2E
    return found


@triton.jit
def store_scores(pointer, tile, strides, rows, columns, span):
    """Write a tile of what there is for each score."""
    pointers = pointer + (rows * strides[2])[:, None] + (columns * strides[3])[None, :]
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=(rows < span[0])[:, None] & (columns < span[1])[None, :])
