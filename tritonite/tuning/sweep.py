"""Fit the GEMM cost model to the current GPU: time drawn problems with sampled tiles, then fit the table's costs."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tritonite import devices
from tritonite.bench import timing
from tritonite.engine.gemm import cost, cost_pointers, select
from tritonite.engine.gemm.problem import FEW, Problem
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.table import Config
from tritonite.tuning import tuner

# N and K of linear layers in published models (embeddings, feed-forward layers), and head dimensions of attention.
WIDTHS: tuple[int, ...] = (320, 384, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1600, 1792, 2048, 2304)
WIDTHS += (2560, 2816, 3072, 3584, 4096, 4304, 4864, 5120, 5632, 6912, 7168, 8192, 8960, 9728, 11_008, 12_288, 13_824)
WIDTHS += (14_336,)
HEADS = (64, 80, 96, 128)
# Tile shapes that stand in for cuBLAS's, and the exponent of the soft minimum over them.
_ATEN = tuple([Config(rows, columns, 64) for rows in (64, 128, 192, 256) for columns in (64, 128, 192, 256)])
_SHARPNESS = 100
# Tiles timed for a problem, and timed calls of each.
CANDIDATES, _CALLS = 30, 4
# Steps and learning rate of the fit.
STEPS, _RATE = 2500, 0.03
# Least number of problems that costs are fitted to.
LEAST_PROBLEMS = 3
# Most rows of a drawn problem without TMA descriptors; operands with more rows are copied instead.
MOST_ROWS = 600


class Kind(enum.Enum):
    """Regimes of problems, each with a table of costs of its own (`cost.Table`)."""

    MEMORY = "in memory"
    CACHE = "in the cache"
    SHORT = "in the cache with a short K"
    POINTERS = "through pointers"


class Sample(NamedTuple):
    """A problem, and the tiles to time it with."""

    problem: Problem
    configs: list[Config]


class Timed(NamedTuple):
    """Measured times of a problem in microseconds: ATen's, and (config, time) for each sampled tile."""

    problem: Problem
    aten: float
    times: tuple[tuple[Config, float], ...]


def drawn(dtype: torch.dtype, seed: int) -> Iterator[Problem]:
    """Yield problems endlessly: four in five are linear layers of 1 to 8,192 rows, the others products of attention."""
    draw = random.Random(seed)
    while True:
        inner = draw.random() < 0.65, draw.random() < 0.65
        if draw.random() < 0.8:
            rows = round(math.exp(draw.uniform(0, math.log(8192))))
            rows = rows if inner[0] and draw.random() < 0.5 else max(16, rows // 16 * 16)
            sizes = 1, rows, draw.choice(WIDTHS), draw.choice(WIDTHS)
        else:
            tokens, head = round(math.exp(draw.uniform(math.log(16), math.log(2048)))) // 8 * 8, draw.choice(HEADS)
            batches = draw.choice((4, 8, 12, 16, 24, 32, 64, 128))
            sizes = (batches, tokens, tokens, head) if draw.random() < 0.5 else (batches, tokens, head, tokens)
        yield Problem(*sizes, dtype, dtype, *inner)


def drawn_through_pointers(dtype: torch.dtype, seed: int) -> Iterator[Problem]:
    """Yield problems of `drawn` that TMA cannot address: FEW < M <= MOST_ROWS, and K or N reduced by 1 to 7."""
    draw = random.Random(seed)
    for problem in drawn(dtype, seed):
        cut = draw.randrange(1, 8)
        if FEW < problem.M <= MOST_ROWS:
            along_K = draw.random() < 0.6
            N, K = problem.N - cut * (not along_K), problem.K - cut * along_K
            misaligned = Problem.of(*tuner.operands(problem._replace(N=N, K=K), "meta", empty=True))
            if min(misaligned.a_vector, misaligned.b_vector, misaligned.out_vector) < 16:
                yield misaligned


def problems_of(kind: Kind, dtype: torch.dtype, seed: int) -> Iterator[Problem]:
    """Yield problems of a kind endlessly."""
    if kind is Kind.POINTERS:
        return drawn_through_pointers(dtype, seed)
    if kind is Kind.SHORT:
        return (problem for problem in drawn(dtype, seed) if problem.is_short)
    return (problem for problem in drawn(dtype, seed) if kind is Kind.MEMORY or problem.is_cached)


def sampled(kind: Kind, dtype: torch.dtype, table: cost.Table, count: int, seed: int) -> list[Sample]:
    """Return `count` drawn problems of a kind, each with a sample of the table's possible tiles."""
    device, draw, found = devices.current_device(), random.Random(seed), []
    descriptors = has_descriptors(kind)
    specialized = descriptors and devices.has_wgmma(device)
    for problem in itertools.islice(problems_of(kind, dtype, seed), count):
        tiles = table.candidates[select.possible(problem, device, table, specialized, descriptors)]
        possible = [table.configs[tile["number"]]._replace(splits=int(tile["splits"])) for tile in tiles]
        found.append(Sample(problem, draw.sample(possible, min(CANDIDATES, len(possible)))))
    return found


def has_descriptors(kind: Kind) -> bool:
    """Return whether TMA loads the operands of problems of a kind on this device."""
    return kind is not Kind.POINTERS and devices.has_tma(devices.current_device())


def time_sample(sample: Sample, kind: Kind) -> Timed:
    """Time a problem with each of its tiles, and ATen.

    Operands start in device memory for Kind.MEMORY, and in the L2 cache for CACHE and SHORT. For POINTERS they start in
    the cache if they fit.
    """
    problem, device = sample.problem, devices.current_device()
    a, b, out = tuner.operands(problem, devices.current.type)
    cached = problem.is_cached if kind is Kind.POINTERS else kind is not Kind.MEMORY
    times = []
    for config in sample.configs:
        call = functools.partial(product, a, b, out, config=run_as(config, problem, device))
        times.append((config, _time(call, cached)))
    return Timed(problem, _time(functools.partial(torch.matmul, a, b, out=out), cached), tuple(times))


def run_as(config: Config, problem: Problem, device: torch.device) -> Config:
    """Return the tile as a call of the problem has it: without idle warps, and with stages that fit."""
    return select.fitting(select.grouped(select.without_idle(config, config, problem), problem), problem, device)


def kernel_of(problem: Problem, config: Config) -> tuple[object, ...]:
    """Return a key that is equal for problems served by the same compiled kernel."""
    common = config._replace(splits=min(2, config.splits)), problem.a_inner, problem.b_inner
    divisors = math.gcd(16, problem.N), math.gcd(16, problem.K)
    sizes = (*divisors, problem.K % config.BLOCK_K == 0, problem.M == 1, problem.batches == 1)
    return common if config.warp_specialize else (*common, *sizes)


def _time(call: timing.Call, cached: bool) -> float:
    # A library's first call creates handles, which is not allowed during graph capture.
    call()
    if not devices.current.captures:
        return timing.device_samples(call)[0]
    samples = timing.graph_samples(call, _CALLS) if cached else timing.device_samples(timing.captured(call, 1), _CALLS)
    return statistics.median(samples)


def fit(timed: Sequence[Timed], table: cost.Table, multiprocessors: int, seconds: float | None = None) -> cost.Table:
    """Return the table with costs fitted to the measured times, by least error of their logarithms.

    With `seconds` the descent ends by then, however many steps it has made.

    The model has to rank a problem's best tiles. A time is weighted by (best time / time)**3.
    """
    numbers = {config: i for i, config in enumerate(table.configs)}
    works, tiles, times, ratios, loads, waits = [], [], [], [], [], []
    for problem, _, measured in timed:
        configs = cost.records([config for config, _ in measured])
        works.append(cost.work(problem, configs, multiprocessors))
        loads.append(cost_pointers.loads(problem, configs, table.fixed))
        waits.append(cost_pointers.waiting(problem, configs, works[-1], multiprocessors, table.fixed))
        tiles += [numbers[config._replace(splits=1)] for config, _ in measured]
        times += [each for _, each in measured]
        best = min([each for _, each in measured])
        ratios += [best / each for _, each in measured]
    lengths = [len(each.rounds) for each in works]
    work = cost.Work(
        *[
            torch.tensor(
                np.concatenate([np.broadcast_to(each[i], (n,)) for each, n in zip(works, lengths, strict=True)])
            )
            for i in range(len(cost.Work._fields))
        ]
    )
    tile_of, logarithms = torch.tensor(tiles), torch.tensor(times, dtype=torch.float64).log()
    added, waited = torch.tensor(np.concatenate(loads)), torch.tensor(np.concatenate(waits))

    def estimate(block: torch.Tensor, tile: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
        return cost.microseconds(work, block[tile_of] + added, tile[tile_of], cost.Costs(*costs), waited).log()

    start = table.block, table.tile, table.costs
    block, tile, costs = _descend(estimate, start, logarithms, STEPS, torch.tensor(ratios) ** 3, seconds)
    return dataclasses.replace(table, block=block.numpy(), tile=tile.numpy(), costs=cost.Costs(*costs.tolist()))


def fit_aten(
    timed: Sequence[Timed], table: cost.Table, multiprocessors: int, seconds: float | None = None
) -> cost.Table:
    """Return the table with a cost model of ATen's products in its field `aten`.

    cuBLAS is modelled as choosing the fastest of the tiles `_ATEN`. A block's cost is the larger of a term in its area
    and a term in its sides. A tile's cost is a constant plus a term in its area.
    """
    configs = cost.Table(_ATEN, np.zeros(len(_ATEN)), np.zeros(len(_ATEN)), (-1,) * len(_ATEN), table.costs)
    tiles = configs.candidates
    works = [cost.work(problem, tiles, multiprocessors) for problem, _, _ in timed]
    work = cost.Work(
        *[
            torch.tensor(np.stack([np.broadcast_to(each[i], len(tiles)) for each in works]))
            for i in range(len(works[0]))
        ]
    )
    possible = torch.tensor(np.stack([select.long_enough(problem, tiles) for problem, _, _ in timed]))
    rows, columns = torch.tensor([(config.BLOCK_M, config.BLOCK_N) for config in _ATEN], dtype=torch.float64).T
    area, sides = rows * columns / 2**14, (rows + columns) / 2**8
    tile_of = torch.tensor(tiles["number"])

    def tile_costs(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        by_area, by_sides, written, constant = weights
        return ((by_area * area) ** 4 + (by_sides * sides) ** 4) ** 0.25, written * area + constant

    def estimate(weights: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
        block, tile = tile_costs(weights)
        times = cost.microseconds(work, block[tile_of], tile[tile_of], cost.Costs(*costs)).log()
        return -torch.logsumexp(torch.where(possible, -_SHARPNESS * times, -torch.inf), 1) / _SHARPNESS

    start = [0.3, 0.2, 0.8, 0.5], table.costs
    logarithms = torch.tensor([aten for _, aten, _ in timed], dtype=torch.float64).log()
    weights, costs = _descend(estimate, start, logarithms, STEPS // 5, seconds=seconds)
    block, tile = tile_costs(weights)
    aten = dataclasses.replace(configs, block=block.numpy(), tile=tile.numpy(), costs=cost.Costs(*costs.tolist()))
    return dataclasses.replace(table, aten=aten)


def _descend(
    estimate: Callable[..., torch.Tensor],
    start: Sequence[Any],
    logarithms: torch.Tensor,
    steps: int,
    weights: torch.Tensor | float = 1.0,
    seconds: float | None = None,
) -> list[torch.Tensor]:
    """Fit positive parameters by Adam, from the arrays `start`, so that estimates approach measured logarithms.

    The learning rate falls along a cosine over the steps, or over `seconds` where these end first.
    """
    parameters = [torch.tensor(np.log(np.maximum(each, 1e-4))).requires_grad_() for each in start]
    optimizer, begin = torch.optim.Adam(parameters, _RATE), time.monotonic()
    for step in range(steps):
        done = step / steps
        if seconds is not None:
            done = max(done, (time.monotonic() - begin) / max(seconds, 1e-3))
        if done >= 1:
            break
        optimizer.param_groups[0]["lr"] = _RATE / 2 * (1 + math.cos(math.pi * done))
        optimizer.zero_grad()
        estimated = estimate(*[parameter.exp() for parameter in parameters])
        losses = torch.nn.functional.smooth_l1_loss(estimated, logarithms, beta=0.08, reduction="none")
        (weights * losses).mean().backward()
        optimizer.step()
    return [parameter.detach().exp() for parameter in parameters]


def regret(timed: Sequence[Timed], table: cost.Table, multiprocessors: int) -> float:
    """Return the geometric mean of (time with the model's tiles) / (best measured time); 1 is perfect."""
    numbers, ratios = {config: i for i, config in enumerate(table.configs)}, []
    for problem, _, measured in timed:
        tiles = cost.records([config for config, _ in measured])
        tiles["number"] = [numbers[config._replace(splits=1)] for config, _ in measured]
        chosen = int(np.argmin(select.estimates(problem, tiles, table, multiprocessors)))
        ratios.append(math.log(measured[chosen][1] / min([each for _, each in measured])))
    return math.exp(sum(ratios) / len(ratios))
