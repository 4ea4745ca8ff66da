"""Bounds of the tokens that top-k, top-p, min-p and typical sampling keep, found by bisection of ordered keys.

A search looks for the largest key whose tokens, with all tokens of larger keys, reach a count or a mass. Both ends of
the interval are keys of tokens, so that it shrinks over gaps at once. The largest scores of the lanes of a block, which
stay in registers, give a lower bound that is close where few tokens are kept: most of these lie in lanes of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.sampling.scores import LAST, NO_KEY, Bounds, key_of, load_scores, load_weights


@triton.jit
def extent(row, META: tl.constexpr):
    """Return (largest score, its first column, least key above that of -inf, largest score of each lane of a block)."""
    best = tl.full((META.block,), float("-inf"), tl.float32)
    where = tl.full((META.block,), LAST, tl.int32)
    least = tl.full((META.block,), LAST, tl.int32)
    for first in range(0, row.size, META.block):
        score, columns = load_scores(row, first, META)
        where = tl.where(score > best, columns, where)
        best = tl.maximum(best, score)
        least = tl.minimum(least, tl.where(score > float("-inf"), key_of(score, META), LAST))
    peak = tl.max(best, 0)
    column = tl.min(tl.where(best == peak, where, LAST), 0)
    return peak, column, tl.min(least, 0), best


@triton.jit
def _rank(key, excess, center, NEAREST: tl.constexpr):
    """Return the keys by which tokens are searched: those of scores, or of nearness to `center`."""
    if NEAREST:
        nearness = -tl.abs(excess - center).to(tl.int32, bitcast=True)
        key = tl.where(key == NO_KEY, NO_KEY, nearness)
    return key


@triton.jit
def search(row, bounds, center, low, high, target, COUNTED: tl.constexpr, NEAREST: tl.constexpr, META: tl.constexpr):
    """Return the largest key from which on tokens reach `target`, a count or a mass; `low` if no key does.

    `low` and `high` are the least and the largest key of a token, as int64.
    """
    BLOCK: tl.constexpr = META.block
    SUM: tl.constexpr = tl.int32 if COUNTED else tl.float32
    while low < high:
        middle = (low + ((high - low) >> 1) + 1).to(tl.int32)
        reached = tl.zeros((BLOCK,), SUM)
        above = tl.full((BLOCK,), LAST, tl.int32)
        below = tl.full((BLOCK,), NO_KEY, tl.int32)
        for first in range(0, row.size, BLOCK):
            _, key, excess, weight = load_weights(row, bounds, first, META)
            key = _rank(key, excess, center, NEAREST)
            upper = key >= middle
            reached += upper.to(SUM) if COUNTED else tl.where(upper, weight, 0.0)
            above = tl.minimum(above, tl.where(upper, key, LAST))
            below = tl.maximum(below, tl.where(upper, NO_KEY, key))
        enough = tl.sum(reached, 0) >= target
        low = tl.where(enough, tl.min(above, 0).to(tl.int64), low)
        high = tl.where(enough, high, tl.max(below, 0).to(tl.int64))
    return low


@triton.jit
def _lower_bound(row, bounds, best, low, high, target, COUNTED: tl.constexpr, META: tl.constexpr):
    """Return the largest key from which on the largest scores of lanes reach `target`; `low` if no key does."""
    keys = key_of(best, META)
    kept = (keys >= bounds.lowest) & (best > float("-inf"))
    keys = tl.where(kept, keys, NO_KEY)
    if COUNTED:
        weights = kept.to(tl.int32)
    else:
        weights = tl.where(kept, tl.exp(tl.where(best == row.peak, 0.0, best - row.peak)), 0.0)
    while low < high:
        middle = (low + ((high - low) >> 1) + 1).to(tl.int32)
        upper = keys >= middle
        enough = tl.sum(tl.where(upper, weights, 0), 0) >= target
        above = tl.min(tl.where(upper, keys, LAST), 0).to(tl.int64)
        below = tl.max(tl.where(upper, NO_KEY, keys), 0).to(tl.int64)
        low, high = tl.where(enough, above, low), tl.where(enough, high, tl.maximum(below, low))
    return low


@triton.jit
def _keep_largest(row, bounds, best, least, target, narrows, COUNTED: tl.constexpr, META: tl.constexpr):
    """Return the key from which on scores reach `target`, or `least` if not `narrows`; `best` are those of `extent`."""
    low, high = least.to(tl.int64), tl.max(key_of(best, META), 0).to(tl.int64)
    high = tl.where(narrows, high, low)
    low = _lower_bound(row, bounds, best, low, high, target, COUNTED, META)
    return search(row, bounds, 0.0, low, high, target, COUNTED, False, META).to(tl.int32)


@triton.jit
def mass(row, bounds, META: tl.constexpr):
    """Return the sum of weights, and the sum of weights times excesses."""
    total = tl.full((META.block,), 0.0, tl.float32)
    moment = tl.full((META.block,), 0.0, tl.float32)
    for first in range(0, row.size, META.block):
        _, _, excess, weight = load_weights(row, bounds, first, META)
        total += weight
        # An excess of -inf has weight 0.
        moment += tl.where(weight > 0, weight * excess, 0.0)
    return tl.sum(total, 0), tl.sum(moment, 0)


@triton.jit
def keep_top_k(row, bounds, best, least, k, META: tl.constexpr):
    """Return the key of the k-th largest score. A k of at most 0, or not below the number of tokens, keeps all."""
    narrows = (k > 0) & (k < row.size)
    return _keep_largest(row, bounds, best, least, tl.minimum(k, LAST).to(tl.int32), narrows, True, META)


@triton.jit
def keep_top_p(row, bounds, best, least, p, META: tl.constexpr):
    """Return the largest key from which on probabilities sum to at least `p`; 1 and more keeps all."""
    total, _ = mass(row, bounds, META)
    # A row without steps has no mass, and nothing to search.
    narrows = (p < 1) & (row.size > 0)
    return _keep_largest(row, bounds, best, least, p * total, narrows, False, META)


@triton.jit
def keep_typical(row, bounds, p, META: tl.constexpr):
    """Return (excess at the entropy, largest distance from it) of the nearest tokens whose mass reaches `p`.

    A token's distance is |-log(probability) - entropy|, which is that of its excess from the mean excess.
    """
    total, moment = mass(row, bounds, META)
    center = moment / total
    nearest = tl.full((META.block,), NO_KEY, tl.int32)
    farthest = tl.full((META.block,), LAST, tl.int32)
    for first in range(0, row.size, META.block):
        kept, key, excess, _ = load_weights(row, bounds, first, META)
        key = _rank(key, excess, center, True)
        nearest = tl.maximum(nearest, key)
        farthest = tl.minimum(farthest, tl.where(kept, key, LAST))
    low, high = tl.min(farthest, 0).to(tl.int64), tl.max(nearest, 0).to(tl.int64)
    high = tl.where((p < 1) & (row.size > 0), high, low)
    key = search(row, bounds, center, low, high, p * total, False, True, META).to(tl.int32)
    distance = (-key).to(tl.float32, bitcast=True)
    return center, tl.where(p < 1, distance, float("inf"))


@triton.jit
def unbounded():
    """Return `Bounds` that keep every token."""
    infinity = tl.full((), float("inf"), tl.float32)
    return Bounds(tl.full((), NO_KEY, tl.int32), tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32), infinity)
