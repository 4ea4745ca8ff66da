"""Scores of a row's tokens: penalised logits divided by the temperature, their order and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritonite.engine.sorting.keys import Keys, signed_key
from tritonite.language.math import true_divide

# A key below that of every score, and the largest int32.
NO_KEY = tl.constexpr(-(2**31))
LAST = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class SampleMeta:
    """Compile-time facts of `sample_tokens`. A field named after a filter says whether the call has that filter.

    block: tokens of a step.
    keys: the order of float32 scores.
    index: the integer type of offsets in a row.
    penalised: scores of all tokens are in scratch memory.
    seeded: every row has a seed of its own.
    """

    block: int
    keys: Keys
    index: Any
    penalised: bool
    seeded: bool
    tempered: bool
    top_k: bool
    top_p: bool
    min_p: bool
    typical: bool


class Row(NamedTuple):
    """A row's scores or logits, their stride, the number of tokens, the divisor of logits, and the largest score."""

    scores: Any
    step: Any
    size: Any
    divisor: Any
    peak: Any


class Bounds(NamedTuple):
    """Bounds of the tokens that filters keep, where the excess of a score is its difference from the largest one.

    lowest: the least key of a score.
    share: the least weight, exp(excess).
    center, distance: the excess at the entropy, and the largest distance from it.
    """

    lowest: Any
    share: Any
    center: Any
    distance: Any


class Penalties(NamedTuple):
    """A row's repetition, presence and frequency penalty."""

    repetition: Any
    presence: Any
    frequency: Any


@triton.jit
def _load_logits(row, first, META: tl.constexpr):
    """Return (float32 logits, columns) of a block from column `first`."""
    columns = first + tl.arange(0, META.block)
    offsets = columns.to(META.index) * row.step
    return tl.load(row.scores + offsets, mask=columns < row.size, other=0.0).to(tl.float32), columns


@triton.jit
def load_scores(row, first, META: tl.constexpr):
    """Return (scores, columns) of a block from column `first`; -inf for nan, and past the end of the row."""
    columns = first + tl.arange(0, META.block)
    offsets = columns.to(META.index) * row.step
    score = tl.load(row.scores + offsets, mask=columns < row.size, other=float("-inf")).to(tl.float32)
    if META.tempered and not META.penalised:
        score = true_divide(score, row.divisor)
    return tl.where(score == score, score, float("-inf")), columns


@triton.jit
def key_of(score, META: tl.constexpr):
    """Return int32 keys in the order of float32 scores."""
    KEYS: tl.constexpr = META.keys
    return signed_key(score.to(tl.int32, bitcast=True), KEYS)


@triton.jit
def load_weights(row, bounds, first, META: tl.constexpr):
    """Return (kept, key, excess, weight) of a block's tokens.

    Tokens that the filters remove have NO_KEY, excess 0 and weight 0.
    """
    score, _ = load_scores(row, first, META)
    key = key_of(score, META)
    # Equal scores are compared first, because inf - inf is nan.
    excess = tl.where(score == row.peak, 0.0, score - row.peak)
    weight = tl.exp(excess)
    kept = (key >= bounds.lowest) & (score > float("-inf"))
    if META.min_p:
        kept = kept & (weight >= bounds.share)
    if META.typical:
        kept = kept & (tl.abs(excess - bounds.center) <= bounds.distance)
    return kept, tl.where(kept, key, NO_KEY), tl.where(kept, excess, 0.0), tl.where(kept, weight, 0.0)


@triton.jit
def _load_history(tokens, step, begin, end, vocabulary, META: tl.constexpr):
    """Return (positions, tokens, mask of tokens in the vocabulary) of a block of the history, from `begin`."""
    position = begin + tl.arange(0, META.block)
    token = tl.load(tokens + position * step, mask=position < end, other=-1).to(tl.int64)
    return position, token, (token >= 0) & (token < vocabulary)


@triton.jit
def write_scores(row, scratch, counts, tokens, step, prompt, history, penalties, META: tl.constexpr):
    """Write a row's scores to `scratch`, with penalties on the tokens of its history.

    `counts` is scratch memory of a number for each token, which only tokens of the history use. Tokens before position
    `prompt` count as present for the repetition penalty alone.
    """
    for first in range(0, row.size, META.block):
        score, columns = _load_logits(row, first, META)
        tl.store(scratch + columns, true_divide(score, row.divisor), columns < row.size)
    for begin in range(0, history, META.block):
        _, token, known = _load_history(tokens, step, begin, history, row.size, META)
        tl.store(counts + token, tl.zeros(token.shape, tl.int32), mask=known)
    tl.debug_barrier()
    for begin in range(0, history, META.block):
        position, token, known = _load_history(tokens, step, begin, history, row.size, META)
        tl.atomic_add(counts + token, tl.full(token.shape, 1, tl.int32), mask=known & (position >= prompt))
    tl.debug_barrier()
    for begin in range(0, history, META.block):
        _, token, known = _load_history(tokens, step, begin, history, row.size, META)
        score = tl.load(row.scores + token * row.step, mask=known, other=0.0).to(tl.float32)
        count = tl.load(counts + token, mask=known, other=0).to(tl.float32)
        factor = penalties.repetition
        score = tl.where(score < 0, score * factor, true_divide(score, factor))
        score = score - penalties.frequency * count
        score = score - tl.where(count > 0, penalties.presence, 0.0)
        tl.store(scratch + token, true_divide(score, row.divisor), mask=known)
    tl.debug_barrier()
