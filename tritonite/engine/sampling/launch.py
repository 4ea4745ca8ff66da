"""Sampling of a token for each row: penalties, temperature, filters, then the inverse of the cumulative sum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.devices.tables import Tables
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.engine.sampling.filters import extent, keep_top_k, keep_top_p, keep_typical, unbounded
from tritonite.engine.sampling.scores import LAST, Bounds, Penalties, Row, SampleMeta, load_weights, write_scores
from tritonite.engine.sorting.keys import Keys
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.random import wide_uniform
from tritonite.runtime.contract import Number, empty, random_state
from tritonite.runtime.libentry import libentry

# The offset by which a call advances the generator: one draw of each row's subsequence.
_ADVANCE = 4


class SamplingTable(NamedTuple):
    """Blocks of a kind of device: tokens of a step, and warps of a program."""

    block: int = 8192
    num_warps: int = 16


SAMPLING: Tables[SamplingTable] = Tables("sampling", dict.fromkeys(devices.KINDS, SamplingTable()))


class Parameters(NamedTuple):
    """Parameters of sampling: tensors of a number for each row, or their strides, or numbers for all; None for none."""

    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    typical_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    prompt_length: Any = None
    seed: Any = None
    position: Any = None


class SampleTensors(NamedTuple):
    """Tensors of `sample_tokens`, or their strides along a row; None for tensors that a call does not have.

    rows: (rows, vocabulary) logits.
    tokens: (rows, length): each row's history.
    scores, counts: scratch memory of penalised rows.
    token, log_prob: results, a number for each row.
    """

    rows: Any
    tokens: Any = None
    scores: Any = None
    counts: Any = None
    token: Any = None
    log_prob: Any = None


@triton.jit
def _float_of(given, step, number, row):
    """Return a row's number as float32: from a tensor, or without one the number of all rows."""
    if given is None:
        found = tl.full((), number, tl.float64)
    else:
        found = tl.load(given + row * step).to(tl.float64)
    return found.to(tl.float32)


@triton.jit
def _int_of(given, step, number, row):
    """Return a row's integer as int64: from a tensor, or without one the number of all rows."""
    if given is None:
        found = tl.full((), number, tl.int64)
    else:
        found = tl.load(given + row * step).to(tl.int64)
    return found


@triton.jit
def _search_cumulative_sum(row, bounds, drawn, META: tl.constexpr):
    """Return (the first column at which the sum of weights reaches the share `drawn` of its total, log probability).

    The sums of blocks are added in float64, in the same order twice, so that the search ends at a kept token.
    """
    BLOCK: tl.constexpr = META.block
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, row.size, BLOCK):
        _, _, _, weight = load_weights(row, bounds, first, META)
        total += tl.sum(weight, 0).to(tl.float64)
    target = drawn * total
    before, through = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    begin = tl.full((), -BLOCK, tl.int32)
    while (through < target) & (begin + BLOCK < row.size):
        begin += BLOCK
        _, _, _, weight = load_weights(row, bounds, begin, META)
        before = through
        through += tl.sum(weight, 0).to(tl.float64)
    begin = tl.maximum(begin, 0)
    _, _, excess, weight = load_weights(row, bounds, begin, META)
    columns = begin + tl.arange(0, BLOCK)
    sums = tl.cumsum(weight.to(tl.float64), 0) + before
    # The sums of a block in another order may stay below the target by rounding: then its last token is sampled.
    reached = tl.min(tl.where((sums >= target) & (weight > 0), columns, LAST), 0)
    last = tl.max(tl.where(weight > 0, columns, -1), 0)
    column = tl.where(reached == LAST, last, reached)
    own = tl.sum(tl.where(columns == column, excess, 0.0), 0)
    return column, own - tl.log(total.to(tl.float32))


_NUMBERS = [
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "prompt_length", "position"),
]


@libentry()
@triton.jit(do_not_specialize=["vocabulary", "history", "seed", "offset", *_NUMBERS])
def sample_tokens(
    tensors,
    strides,
    given,
    steps,
    vocabulary,
    history,
    seed: tl.int64,
    offset: tl.int64,
    temperature: tl.float64,
    top_k: tl.int64,
    top_p: tl.float64,
    min_p: tl.float64,
    typical_p: tl.float64,
    repetition_penalty: tl.float64,
    presence_penalty: tl.float64,
    frequency_penalty: tl.float64,
    prompt_length: tl.int64,
    position: tl.int64,
    META: tl.constexpr,
):
    """Sample a row's token.

    `given` are `Parameters` whose tensors take the place of the numbers, and `steps` their strides. A row's random
    number is the first of its own seed at its position, or that of subsequence `row` of the generator.
    """
    wait_for_previous_launch()
    number = tl.program_id(0)
    own = number.to(tl.int64)
    divisor = tl.full((), 1.0, tl.float32)
    greedy = divisor < 0
    if META.tempered:
        divisor = _float_of(given.temperature, steps.temperature, temperature, own)
        greedy = divisor == 0
        divisor = tl.where(greedy, 1.0, divisor)
    logits, step = tensors.rows + own * strides.rows[0], strides.rows[1]
    if META.penalised:
        scores, tokens = tensors.scores + own * vocabulary, tensors.tokens + own * strides.tokens[0]
        repetition = _float_of(given.repetition_penalty, steps.repetition_penalty, repetition_penalty, own)
        presence = _float_of(given.presence_penalty, steps.presence_penalty, presence_penalty, own)
        frequency = _float_of(given.frequency_penalty, steps.frequency_penalty, frequency_penalty, own)
        prompt = _int_of(given.prompt_length, steps.prompt_length, prompt_length, own)
        write_scores(
            *(Row(logits, step, vocabulary, divisor, 0.0), scores, tensors.counts + own * vocabulary),
            *(tokens, strides.tokens[1], prompt, history, Penalties(repetition, presence, frequency), META),
        )
        row = Row(scores, 1, vocabulary, divisor, 0.0)
    else:
        row = Row(logits, step, vocabulary, divisor, 0.0)
    peak, first, least, best = extent(row, META)
    exists = peak > float("-inf")
    # The loops of a row that needs no random number have no steps.
    row = Row(row.scores, row.step, tl.where(greedy | (exists == 0), 0, vocabulary), divisor, peak)
    bounds = unbounded()
    lowest, share, center, distance = bounds.lowest, bounds.share, bounds.center, bounds.distance
    if META.top_k:
        lowest = keep_top_k(row, bounds, best, least, _int_of(given.top_k, steps.top_k, top_k, own), META)
        bounds = Bounds(lowest, share, center, distance)
        least = lowest
    if META.top_p:
        lowest = keep_top_p(row, bounds, best, least, _float_of(given.top_p, steps.top_p, top_p, own), META)
        bounds = Bounds(lowest, share, center, distance)
    if META.min_p:
        share = tl.minimum(_float_of(given.min_p, steps.min_p, min_p, own), 1.0)
        bounds = Bounds(lowest, share, center, distance)
    if META.typical:
        typical = _float_of(given.typical_p, steps.typical_p, typical_p, own)
        center, distance = keep_typical(row, bounds, typical, META)
        bounds = Bounds(lowest, share, center, distance)
    counter, thread = offset.to(tl.int64) >> 2, own
    seed = seed.to(tl.int64)
    if META.seeded:
        seed = tl.load(given.seed + own * steps.seed)
        counter, thread = _int_of(given.position, steps.position, position, own), own * 0
    drawn, _ = wide_uniform(seed, counter, tl.broadcast_to(thread, (1,)))
    column, log_prob = _search_cumulative_sum(row, bounds, tl.sum(drawn, 0), META)
    column = tl.where(greedy, first, column)
    log_prob = tl.where(greedy, 0.0, log_prob)
    tl.store(tensors.token + own, tl.where(exists, column, -1).to(tl.int64))
    tl.store(tensors.log_prob + own, tl.where(exists, log_prob, float("nan")))


class Sampling(NamedTuple):
    """A call: (rows, vocabulary) logits, (rows, length) history or None, tensors and numbers of its parameters."""

    logits: torch.Tensor
    tokens: torch.Tensor | None
    given: Parameters
    numbers: dict[str, float | int | Number | None]
    generator: torch.Generator | None

    def has(self, *names: str) -> bool:
        """Return whether the call has one of these parameters, as a tensor or as a number."""
        return any(getattr(self.given, name) is not None or self.numbers[name] is not None for name in names)


# Numbers without effect, for penalties that a call does not have.
_NEUTRAL = {"repetition_penalty": 1.0}


def sample(work: Sampling, token: torch.Tensor, log_prob: torch.Tensor) -> None:
    """Write each row's token, int64, and its log probability, float32, to contiguous tensors."""
    logits, tokens = work.logits, work.tokens
    rows, vocabulary = logits.shape
    if not rows:
        return
    table = SAMPLING[devices.current.kind]
    penalised = tokens is not None and work.has("repetition_penalty", "presence_penalty", "frequency_penalty")
    scores = empty((rows, vocabulary), torch.float32, logits.device) if penalised else None
    counts = empty((rows, vocabulary), torch.int32, logits.device) if penalised else None
    seeded = work.given.seed is not None
    block = min(table.block, max(16, power_of_2(vocabulary)))
    meta = SampleMeta(
        block=block,
        keys=Keys.of(torch.float32),
        index=tl.int64 if span((1, vocabulary), logits.stride()) >= INT32_LIMIT else tl.int32,
        penalised=penalised,
        seeded=seeded,
        tempered=work.has("temperature"),
        top_k=work.has("top_k"),
        top_p=work.has("top_p"),
        min_p=work.has("min_p"),
        typical=work.has("typical_p"),
    )
    history = tokens if penalised else None
    sample_tokens[(rows,)](
        SampleTensors(logits, history, scores, counts, token, log_prob),
        SampleTensors(logits.stride(), None if history is None else history.stride()),
        work.given,
        Parameters(*[None if each is None else each.stride(0) for each in work.given]),
        vocabulary,
        0 if history is None else history.shape[1],
        *((0, 0) if seeded else random_state(logits.device, _ADVANCE, work.generator)),
        **{name: _NEUTRAL.get(name, 0) if number is None else number for name, number in work.numbers.items()},
        META=meta,
        num_warps=min(table.num_warps, devices.warps(block // 8)),
    )
