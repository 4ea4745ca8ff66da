"""Fitting the model of what products take to the device that is here: a sweep over drawn problems, and the fit."""

from __future__ import annotations

import dataclasses
import enum
import functools
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

# Of models: embeddings, inner sizes of feed-forward layers, and what attention's heads have.
WIDTHS: tuple[int, ...] = (320, 384, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1600, 1792, 2048, 2304)
WIDTHS += (2560, 2816, 3072, 3584, 4096, 4304, 4864, 5120, 5632, 6912, 7168, 8192, 8960, 9728, 11_008, 12_288, 13_824)
WIDTHS += (14_336,)
HEADS = (64, 80, 96, 128)
# As which tiles ATen's are seen, and how sharply the fastest of them counts.
_ATEN = tuple([Config(rows, columns, 64) for rows in (64, 128, 192, 256) for columns in (64, 128, 192, 256)])
_SHARPNESS = 100
# Candidates that a problem is timed with, and calls of each.
CANDIDATES, _CALLS = 30, 4
STEPS, _RATE = 2500, 0.03
# As many are timed at least, of which a fit sees two thirds.
LEAST_PROBLEMS = 3
# Through pointers products of so many rows are timed.
MOST_ROWS = 600


class Kind(enum.Enum):
    """The problems that a table of a device is for (`model.Table`)."""

    MEMORY = "in memory"
    CACHE = "in the cache"
    SHORT = "in the cache with a short K"
    POINTERS = "through pointers"


class Timed(NamedTuple):
    """What the device takes for a problem with each of some tiles, and with ATen, in microseconds."""

    problem: Problem
    aten: float
    times: tuple[tuple[Config, float], ...]


def drawn(dtype: torch.dtype, seed: int) -> Iterator[Problem]:
    """Problems without end: linear layers of 1 to 8,192 rows, and one in five the products of attention's heads."""
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
    """Of those, the ones of more than a few rows, with K or N a little shorter, so that no descriptor can tell of them.

    Operands of more than MOST_ROWS rows are rather copied.
    """
    draw = random.Random(seed)
    for problem in drawn(dtype, seed):
        less = draw.randrange(1, 8)
        if FEW < problem.M <= MOST_ROWS:
            along_K = draw.random() < 0.6
            N, K = problem.N - less * (not along_K), problem.K - less * along_K
            found = Problem.of(*tuner.operands(problem._replace(N=N, K=K), "meta", empty=True))
            if min(found.a_vector, found.b_vector, found.out_vector) < 16:
                yield found


def problems_of(kind: Kind, dtype: torch.dtype, seed: int) -> Iterator[Problem]:
    """Problems without end that a table of a kind is for."""
    if kind is Kind.POINTERS:
        return drawn_through_pointers(dtype, seed)
    if kind is Kind.SHORT:
        return (problem for problem in drawn(dtype, seed) if problem.is_short)
    return (problem for problem in drawn(dtype, seed) if kind is Kind.MEMORY or problem.is_cached)


def sweep(dtype: torch.dtype, seconds: float, seed: int, jobs: int, table: cost.Table, kind: Kind) -> Iterator[Timed]:
    """Times of drawn problems with some of the table's tiles each, for so many seconds after compiling in `jobs`.

    LEAST_PROBLEMS are timed however long that takes. Of those in memory no operand is in the L2 cache, and of those in
    the cache all are; through pointers a problem is taken to be where it fits.
    """
    device, draw, work = torch.device("cuda", torch.cuda.current_device()), random.Random(seed), []
    descriptors = kind is not Kind.POINTERS
    specialized = descriptors and devices.has_wgmma(device)
    for problem, _ in zip(problems_of(kind, dtype, seed), range(max(LEAST_PROBLEMS, int(4 * seconds))), strict=False):
        tiles = table.candidates[select.possible(problem, device, table, specialized, descriptors)]
        every = [table.configs[tile["number"]]._replace(splits=int(tile["splits"])) for tile in tiles]
        work.append((problem, draw.sample(every, min(CANDIDATES, len(every)))))
    fitted = [(problem, _run_as(config, problem, device)) for problem, configs in work for config in configs]
    kernels = {_kernel(problem, config): (problem, config) for problem, config in fitted}
    tuner.compile_all(list(kernels.values()), jobs)
    end = time.monotonic() + seconds
    for number, (problem, configs) in enumerate(work):
        if number >= LEAST_PROBLEMS and time.monotonic() > end:
            return
        a, b, out = tuner.operands(problem, "cuda")
        cached = problem.is_cached if kind is Kind.POINTERS else kind is not Kind.MEMORY
        found = []
        for config in configs:
            call = functools.partial(product, a, b, out, config=_run_as(config, problem, device))
            found.append((config, _time(call, cached)))
        yield Timed(problem, _time(functools.partial(torch.matmul, a, b, out=out), cached), tuple(found))


def _run_as(config: Config, problem: Problem, device: torch.device) -> Config:
    return select.fitting(select.grouped(select.without_idle(config, config, problem), problem), problem, device)


def _kernel(problem: Problem, config: Config) -> tuple[object, ...]:
    """What problems have in common that the same kernel computes."""
    alike = config._replace(splits=min(2, config.splits)), problem.a_inner, problem.b_inner
    divisors = math.gcd(16, problem.N), math.gcd(16, problem.K)
    sizes = (*divisors, problem.K % config.BLOCK_K == 0, problem.M == 1, problem.batches == 1)
    return alike if config.warp_specialize else (*alike, *sizes)


def _time(call: timing.Call, cached: bool) -> float:
    # What a library makes when it is first called, such as a handle, cannot be made while a graph is captured.
    call()
    samples = timing.graph_samples(call, _CALLS) if cached else timing.device_samples(timing.captured(call, 1), _CALLS)
    return statistics.median(samples)


def fit(timed: Sequence[Timed], table: cost.Table, multiprocessors: int) -> cost.Table:
    """The table with numbers for which the model is closest to the times, by their ratios.

    What the model is to tell apart are a problem's best tiles: a time counts by the cube of its share of the best.
    """
    numbers = {config: i for i, config in enumerate(table.configs)}
    parts, tiles, times, shares, loads, waits = [], [], [], [], [], []
    for problem, _, found in timed:
        configs = cost.records([config for config, _ in found])
        parts.append(cost.work(problem, configs, multiprocessors))
        loads.append(cost_pointers.loads(problem, configs, table.fixed))
        waits.append(cost_pointers.waiting(problem, configs, parts[-1], multiprocessors, table.fixed))
        tiles += [numbers[config._replace(splits=1)] for config, _ in found]
        times += [each for _, each in found]
        best = min([each for _, each in found])
        shares += [best / each for _, each in found]
    lengths = [len(part.rounds) for part in parts]
    work = cost.Work(
        *[
            torch.tensor(
                np.concatenate([np.broadcast_to(part[i], (n,)) for part, n in zip(parts, lengths, strict=True)])
            )
            for i in range(len(cost.Work._fields))
        ]
    )
    tile_of, logarithms = torch.tensor(tiles), torch.tensor(times, dtype=torch.float64).log()
    added, waited = torch.tensor(np.concatenate(loads)), torch.tensor(np.concatenate(waits))

    def estimate(block: torch.Tensor, tile: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
        return cost.microseconds(work, block[tile_of] + added, tile[tile_of], cost.Costs(*costs), waited).log()

    start = table.block, table.tile, table.costs
    block, tile, costs = _descend(estimate, start, logarithms, STEPS, torch.tensor(shares) ** 3)
    return dataclasses.replace(table, block=block.numpy(), tile=tile.numpy(), costs=cost.Costs(*costs.tolist()))


def fit_aten(timed: Sequence[Timed], table: cost.Table, multiprocessors: int) -> cost.Table:
    """The same table with what ATen's products cost, which come from a library that knows its own tiles.

    It is taken to choose the fastest of `_ATEN`, whose blocks cost by their elements or by what they read, if that is
    more, and whose tiles by their elements and each.
    """
    configs = cost.Table(_ATEN, np.zeros(len(_ATEN)), np.zeros(len(_ATEN)), (-1,) * len(_ATEN), table.costs)
    tiles = configs.candidates
    found = [cost.work(problem, tiles, multiprocessors) for problem, _, _ in timed]
    work = cost.Work(
        *[
            torch.tensor(np.stack([np.broadcast_to(each[i], len(tiles)) for each in found]))
            for i in range(len(found[0]))
        ]
    )
    possible = torch.tensor(np.stack([select.long_enough(problem, tiles) for problem, _, _ in timed]))
    rows, columns = torch.tensor([(config.BLOCK_M, config.BLOCK_N) for config in _ATEN], dtype=torch.float64).T
    area, sides = rows * columns / 2**14, (rows + columns) / 2**8
    tile_of = torch.tensor(tiles["number"])

    def tile_costs(shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        by_area, by_sides, written, each = shares
        return ((by_area * area) ** 4 + (by_sides * sides) ** 4) ** 0.25, written * area + each

    def estimate(shares: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
        block, tile = tile_costs(shares)
        times = cost.microseconds(work, block[tile_of], tile[tile_of], cost.Costs(*costs)).log()
        return -torch.logsumexp(torch.where(possible, -_SHARPNESS * times, -torch.inf), 1) / _SHARPNESS

    start = [0.3, 0.2, 0.8, 0.5], table.costs
    logarithms = torch.tensor([aten for _, aten, _ in timed], dtype=torch.float64).log()
    shares, costs = _descend(estimate, start, logarithms, STEPS // 5)
    block, tile = tile_costs(shares)
    aten = dataclasses.replace(configs, block=block.numpy(), tile=tile.numpy(), costs=cost.Costs(*costs.tolist()))
    return dataclasses.replace(table, aten=aten)


def _descend(
    estimate: Callable[..., torch.Tensor],
    start: Sequence[Any],
    logarithms: torch.Tensor,
    steps: int,
    weights: torch.Tensor | float = 1.0,
) -> list[torch.Tensor]:
    """For which parameters, from arrays of them at the `start`, estimates are closest to the logarithms measured."""
    parameters = [torch.tensor(np.log(np.maximum(each, 1e-4))).requires_grad_() for each in start]
    optimizer = torch.optim.Adam(parameters, _RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        found = estimate(*[parameter.exp() for parameter in parameters])
        losses = torch.nn.functional.smooth_l1_loss(found, logarithms, beta=0.08, reduction="none")
        (weights * losses).mean().backward()
        optimizer.step()
        schedule.step()
    return [parameter.detach().exp() for parameter in parameters]


def regret(timed: Sequence[Timed], table: cost.Table, multiprocessors: int) -> float:
    """The geometric mean of the time with the tiles that the model chooses over that with the best of those timed."""
    numbers, ratios = {config: i for i, config in enumerate(table.configs)}, []
    for problem, _, found in timed:
        tiles = cost.records([config for config, _ in found])
        tiles["number"] = [numbers[config._replace(splits=1)] for config, _ in found]
        chosen = int(np.argmin(select.estimates(problem, tiles, table, multiprocessors)))
        ratios.append(math.log(found[chosen][1] / min([each for _, each in found])))
    return math.exp(sum(ratios) / len(ratios))
