"""Scores of attention: which there are, what is added to them, their exponentials, and the logarithms of sums of those.

A score is scale * (query . key) + bias in float32, as ATen adds it up. Where a bias of numbers is added, scores are in
nats: log2(e) times the least or the largest finite number overflows, so that the largest of a row is subtracted before
that product. Otherwise log2(e) is part of the factor of scores, which are powers of two.

Nothing here lays a tile out, so that kernels in Gluon call the same functions.
"""

import triton
import triton.language as tl

# Exponentials are powers of two, which devices have an instruction for.
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exponentials(scores, base, NATURAL: tl.constexpr, NATS: tl.constexpr):
    """Exponentials of scores less a finite `base`, which is subtracted before the product that might overflow."""
    if NATURAL:
        result = tl.exp(scores - base)
    elif NATS:
        result = tl.exp2((scores - base) * LOG2E)
    else:
        result = tl.exp2(scores - base)
    return result


@triton.jit
def score_factor(number, NATS: tl.constexpr):
    """Return what products are multiplied by for scores in nats, or in powers of two."""
    if not NATS:
        number = number * LOG2E
    return number.to(tl.float32)


@triton.jit
def base_of(largest):
    """Return what is subtracted from scores: the largest of each row, or 0 for rows that see nothing."""
    return tl.where(largest == float("-inf"), 0.0, largest)


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
def biased(scores, added):
    """Scores with a tile of a bias added to them; of a mask those are -inf for which it is false."""
    if added.dtype == tl.int1:
        scores = tl.where(added != 0, scores, float("-inf"))
    else:
        scores += added.to(tl.float32)
    return scores


@triton.jit
def load_logarithms(pointer, rows, stride, queries, NATS: tl.constexpr):
    """The logarithms of the sums of rows, to the base of scores; infinite where there is no row or it sees nothing."""
    found = tl.load(pointer + rows * stride, mask=rows < queries, other=float("inf"))
    found = tl.where(found == float("-inf"), float("inf"), found)
    if not NATS:
        found *= LOG2E
    return found


@triton.jit
def are_rounded(logarithms):
    """Mask of rows whose logarithm is so large that rounding it changes probabilities by more than 2**-14.

    A row of the least finite biases alone has the logarithm of one of them, however many keys there are.
    """
    size = tl.abs(logarithms)
    return (size > 1024.0) & (size < float("inf"))


@triton.jit
def excess_of(sums, logarithms, NATURAL: tl.constexpr):
    """Logarithms of the `sums` of rows' probabilities, where those of rows are rounded; 0 elsewhere."""
    if NATURAL:
        excess = tl.log(sums)
    else:
        excess = tl.log2(sums)
    return tl.where(are_rounded(logarithms) & (sums > 0), excess, 0.0)


@triton.jit
def probabilities_of(scores, logarithms, excess, NATURAL: tl.constexpr):
    """Probabilities of scores in nats; as in `exponentials`, the logarithm of a row is subtracted first."""
    if NATURAL:
        result = tl.exp(scores - logarithms - excess)
    else:
        result = tl.exp2((scores - logarithms) * LOG2E - excess)
    return result


@triton.jit
def store_scores(pointer, tile, strides, rows, columns, span):
    """Write a tile of what there is for each score."""
    pointers = pointer + (rows * strides[2])[:, None] + (columns * strides[3])[None, :]
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=(rows < span[0])[:, None] & (columns < span[1])[None, :])
