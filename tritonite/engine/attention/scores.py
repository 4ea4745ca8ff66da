"""Scores of attention: masks, biases, exponentials and logsumexp, for the Triton and the Gluon kernels.

A score is scale * (query . key) + bias in float32, in ATen's order of additions. Scores are kept in base 2, with
log2(e) as part of their factor, because GPUs have an instruction for powers of two. With an additive bias they are kept
in nats: log2(e) times the lowest or highest finite number would overflow, so the row max is subtracted before that
product.

A soft cap (Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size") makes a score
cap * tanh(score / cap), before a bias is added. A sink (Xiao et al. 2023, "Efficient Streaming Language Models with
Attention Sinks") is a score of each row that has no value: it adds to the row sum alone.

No function here names a layout, so that Gluon kernels can call them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritonite.language import libdevice

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class ScoreRule(NamedTuple):
    """Numbers that make scores of products of queries and keys, and hide some of the scores.

    factor: factor of products, the first result of `capped_factor` or that of `score_factor`.
    cap: the soft cap in the unit of scores, None without one.
    window: keys that a query sees, the last of them on its diagonal; None for all.
    """

    factor: Any
    cap: Any
    window: Any


@triton.jit
def exponentials(scores, base, NATURAL: tl.constexpr, NATS: tl.constexpr):
    """Return the exponentials of scores less a finite `base`, which is subtracted before a product can overflow."""
    if NATURAL:
        result = tl.exp(scores - base)
    elif NATS:
        result = tl.exp2((scores - base) * LOG2E)
    else:
        result = tl.exp2(scores - base)
    return result


@triton.jit
def score_factor(scale, NATS: tl.constexpr):
    """Return the float32 factor of products of queries and keys, for scores in nats or in base 2."""
    if not NATS:
        scale = scale * LOG2E
    return scale.to(tl.float32)


@triton.jit
def capped_factor(scale, softcap, META: tl.constexpr):
    """Return (factor of products in `scaled_products`, soft cap in the unit of scores), both float32."""
    cap = tl.full((), softcap, tl.float64)
    factor = scale / cap
    if not META.natural:
        factor = factor * (2 * LOG2E)
    if not META.nats:
        cap = cap * LOG2E
    return factor.to(tl.float32), cap.to(tl.float32)


@triton.jit
def scaled_products(products, rule, META: tl.constexpr):
    """Return products times their factor: scores, or with a soft cap the tanh that the cap multiplies."""
    result = products * rule.factor
    if META.capped:
        if META.natural:
            result = libdevice.tanh(result)
        else:
            result = 1 - 2 / (tl.exp2(result) + 1)
    return result


@triton.jit
def head_sink(sinks, head, NATS: tl.constexpr):
    """Load the sinks of a head or of a tensor of heads in the unit of scores."""
    sink = tl.load(sinks + head).to(tl.float32)
    if not NATS:
        sink *= LOG2E
    return sink


@triton.jit
def finite_max(m_i):
    """Return row maxima, 0 for rows that see no key."""
    return tl.where(m_i == float("-inf"), 0.0, m_i)


@triton.jit
def visible_scores(rows, columns, extent, CAUSAL: tl.constexpr, window=None):
    """Return the mask of scores that count, for row and column indices that broadcast; `window` as in `ScoreRule`."""
    visible = (rows < extent.queries) & (columns < extent.keys)
    if CAUSAL:
        visible = visible & (columns <= rows + extent.diagonal)
    if window is not None:
        visible = visible & (columns > rows + extent.diagonal - window)
    return visible


@triton.jit
def load_bias(bias, strides, rows, columns, keys, visible, OF_KEYS: tl.constexpr):
    """Load a tile of a bias or mask where scores are visible, or return None for None; `strides` are `HeadStrides`.

    With OF_KEYS the bias is one row for all queries. Callers load before the products that precede its use, which hide
    its latency.
    """
    tile = None
    if bias is not None:
        pointers = bias + columns * strides.element
        if OF_KEYS:
            tile = tl.load(pointers, mask=columns < keys, other=0)
        else:
            tile = tl.load(pointers + rows * strides.row, mask=visible, other=0)
    return tile


@triton.jit
def add_bias(scores, bias_tile):
    """Add a tile of a bias to scores, or set them to -inf where a tile of a bool mask is false."""
    if bias_tile.dtype == tl.int1:
        scores = tl.where(bias_tile != 0, scores, float("-inf"))
    else:
        scores += bias_tile.to(tl.float32)
    return scores


@triton.jit
def load_logsumexp(pointer, rows, stride, queries, NATS: tl.constexpr):
    """Load rows' logsumexp in the base of scores: inf beyond the last query and for rows that see no key."""
    found = tl.load(pointer + rows * stride, mask=rows < queries, other=float("inf"))
    found = tl.where(found == float("-inf"), float("inf"), found)
    if not NATS:
        found *= LOG2E
    return found


@triton.jit
def row_logsumexp(m_i, l_i, META: tl.constexpr):
    """Return rows' logsumexp in nats from their row max and row sum."""
    if META.natural:
        result = m_i + tl.log(l_i)
    elif META.nats:
        result = m_i + tl.log2(l_i) * LN2
    else:
        result = (m_i + tl.log2(l_i)) * LN2
    return result


@triton.jit
def is_rounded(logsumexp):
    """Return the mask of rows whose logsumexp is so large that its rounding changes probabilities by over 2**-14.

    A row that consists of the lowest finite bias has that bias as its logsumexp, whatever its number of keys.
    """
    size = tl.abs(logsumexp)
    return (size > 1024.0) & (size < float("inf"))


@triton.jit
def logsumexp_excess(sums, logsumexp, NATURAL: tl.constexpr):
    """Return the logarithms of rows' sums of probabilities where logsumexp is rounded, 0 elsewhere.

    Subtracting it from the exponents makes the probabilities of such a row add up to 1.
    """
    if NATURAL:
        excess = tl.log(sums)
    else:
        excess = tl.log2(sums)
    return tl.where(is_rounded(logsumexp) & (sums > 0), excess, 0.0)


@triton.jit
def probabilities_in_nats(scores, logsumexp, excess, NATURAL: tl.constexpr):
    """Return the probabilities of scores in nats; logsumexp is subtracted before a product can overflow."""
    if NATURAL:
        result = tl.exp(scores - logsumexp - excess)
    else:
        result = tl.exp2((scores - logsumexp) * LOG2E - excess)
    return result


@triton.jit
def store_scores(pointer, tile, strides, rows, columns, extent):
    """Store a (queries, keys) tile of score gradients."""
    pointers = pointer + (rows * strides.row)[:, None] + (columns * strides.element)[None, :]
    mask = (rows < extent.queries)[:, None] & (columns < extent.keys)[None, :]
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=mask)
