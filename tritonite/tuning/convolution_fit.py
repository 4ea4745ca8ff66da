"""Fit the times of tiles in `engine.convolution.table` to measured ones (`tuning.convolution`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from tritonite.engine.convolution import select
from tritonite.engine.convolution import table as tables
from tritonite.engine.convolution.table import Tile
from tritonite.tuning.convolution import Timed, load

# Most tiles of a table, and the least gain in the geometric mean of the best times that a tile has to bring.
_MOST_TILES, _LEAST_GAIN = 8, 0.004
# Steps and learning rate of the fit.
_STEPS, _RATE = 1500, 0.03
# Costs that tiles share, with their initial values: launches, the fixed share of a block of K, adding slices of K,
# microseconds a megabyte of these and of operands, and the block-diagonal filters.
_SHARED = {"launch": 3.0, "fixed_share": 0.3, "adding": 2.5, "added_mb": 0.33, "read_mb": 0.25, "merging": 2.0}
# Shared costs that a table has once; the first fit decides on them.
_ONCE = ("fixed_share", "adding", "added_mb")


class Fit(NamedTuple):
    """Fitted tiles and shared costs, and the geometric mean of (time of the chosen tile) / (best time)."""

    tiles: tuple[Tile, ...]
    shared: dict[str, float]
    regret: float
    # The geometric mean of (ATen's time) / (time of the chosen tile), and of the best tile.
    speed: float
    best_speed: float


class _Rows(NamedTuple):
    """Loads of measured runs, one element for each measurement."""

    tile: torch.Tensor
    programs: torch.Tensor
    steps: torch.Tensor
    # A block of K over a whole one.
    length: torch.Tensor
    # Whole rounds of resident programs, and programs of the last one.
    rounds: torch.Tensor
    rest: torch.Tensor
    splits: torch.Tensor
    megabytes_added: torch.Tensor
    megabytes: torch.Tensor
    merged: torch.Tensor
    logarithm: torch.Tensor
    weight: torch.Tensor


def _whole(tile: Tile) -> Tile:
    return tile._replace(splits=1)


def _rows(timed: Sequence[Timed], tiles: Sequence[Tile], multiprocessors: int) -> _Rows:
    """Return a row for each measured time of one of the tiles."""
    numbers, rows = {tile: i for i, tile in enumerate(tiles)}, []
    for each in timed:
        problem, best = each.problem, min([us for _, us in each.times])
        for tile, us in each.times:
            if _whole(tile) not in numbers:
                continue
            load_ = select.filter_load if each.filters else select.forward_load
            steps, length, programs = load_(problem, tile)
            on_one = tile.splits * programs / multiprocessors
            if each.filters or on_one >= 4 * tile.programs:
                rounds, rest = on_one / tile.programs, 0
            else:
                rounds, rest = divmod(math.ceil(on_one), tile.programs)
            added = 8e-6 * tile.splits * problem.rows * problem.columns * problem.units if tile.splits > 1 else 0
            rows.append(
                (numbers[_whole(tile)], tile.programs, steps, length, rounds, rest, tile.splits > 1, added)
                + (each.bytes * 1e-6, problem.merged > 1, math.log(us), (best / us) ** 3)
            )
    return _Rows(*torch.tensor(rows, dtype=torch.float64).T)


def _estimate(rows: _Rows, tiles: torch.Tensor, shared: torch.Tensor, filters: bool) -> torch.Tensor:
    """Return the logarithms of estimated times. `tiles` are (tiles, 3): busy, alone, ends, as in `select.estimate`."""
    busy, alone, ends = tiles[rows.tile.long()].T
    launch, fixed, adding, added, read, merging = shared
    fixed = fixed.clamp(max=1)
    steps = rows.steps * (fixed + (1 - fixed) * rows.length)

    def resident(count: torch.Tensor) -> torch.Tensor:
        return steps * torch.maximum(alone, count * busy) + ends * (count > 0)

    if filters:
        time = rows.rounds * rows.programs * steps * busy + ends
    else:
        time = rows.rounds * resident(rows.programs) + torch.where(rows.rest > 0, resident(rows.rest), 0)
    # Operands have to be read, however fast the products are.
    time = (time**4 + (read * rows.megabytes) ** 4) ** 0.25
    time = time + launch + rows.splits * adding + added * rows.megabytes_added + merging * rows.merged
    return time.log()


def _descend(
    rows: _Rows, tiles: Sequence[Tile], filters: bool, given: dict[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tiles' costs and the shared ones with the least weighted error, with those `given`."""
    area = torch.tensor([tile.block_m * tile.block_n * tile.block_k / 2**20 for tile in tiles], dtype=torch.float64)
    area = area * (4 if tiles[0].bf16x6 else 0.5)
    start = torch.stack([area + 0.05, 1.3 * area + 0.1, torch.full_like(area, 1.5)], 1).log()
    known = torch.tensor([name in given for name in _SHARED])
    first = torch.tensor([*(_SHARED | given).values()]).double().log()
    costs, shared = start.requires_grad_(), first.clone().requires_grad_()
    optimizer = torch.optim.Adam([costs, shared], _RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        found = _estimate(rows, costs.exp(), torch.where(known, first, shared).exp(), filters)
        errors = torch.nn.functional.smooth_l1_loss(found, rows.logarithm, beta=0.08, reduction="none")
        (rows.weight * errors).mean().backward()
        optimizer.step()
        schedule.step()
    return costs.detach().exp(), torch.where(known, first, shared).detach().exp()


def _useful(timed: Sequence[Timed]) -> list[Tile]:
    """Return tiles one after the other by how much they add to the best times of those before."""
    times: list[dict[Tile, float]] = [{} for _ in timed]
    for each, own in zip(timed, times, strict=True):
        for tile, us in each.times:
            own[_whole(tile)] = min(us, own.get(_whole(tile), math.inf))
    every = dict.fromkeys(tile for own in times for tile in own)
    chosen: list[Tile] = []
    # A tile that a run does not have counts as twice the slowest.
    worst = [2 * max(own.values()) for own in times]

    def cost(tiles: Sequence[Tile]) -> float:
        best = [min([own.get(tile, bad) for tile in tiles]) for own, bad in zip(times, worst, strict=True)]
        return sum(map(math.log, best)) / len(best)

    while len(chosen) < min(_MOST_TILES, len(every)):
        tile = min((tile for tile in every if tile not in chosen), key=lambda tile: cost([*chosen, tile]))
        if chosen and cost(chosen) - cost([*chosen, tile]) < _LEAST_GAIN:
            break
        chosen.append(tile)
    return chosen


def fit(timed: Sequence[Timed], multiprocessors: int = 132, given: dict[str, float] | None = None) -> Fit:
    """Return the tiles of a table, fitted to times of one dtype, of convolutions or of filters' gradients.

    `given` are shared costs that are known.
    """
    filters, tiles = timed[0].filters, _useful(timed)
    rows = _rows(timed, tiles, multiprocessors)
    costs, shared = _descend(rows, tiles, filters, given or {})
    found = []
    for tile, (busy, alone, ends) in zip(tiles, costs.tolist(), strict=True):
        alone = tile.programs * busy if filters else alone
        found.append(tile._replace(busy=round(busy, 4), alone=round(alone, 4), ends=round(ends, 2)))
    shared[list(_SHARED).index("fixed_share")].clamp_(max=1)
    named = {name: round(value, 4) for name, value in zip(_SHARED, shared.tolist(), strict=True)}
    return Fit(tuple(found), named, *_quality(timed, found, named, multiprocessors))


def _quality(
    timed: Sequence[Timed], tiles: Sequence[Tile], shared: dict[str, float], multiprocessors: int
) -> tuple[float, float, float]:
    """Return the regret of `select` with these tiles, its speed over ATen's, and that of the best tiles."""
    limits = tables.table()._replace(
        fixed_share=shared["fixed_share"], adding=shared["adding"], bytes_per_us=1e6 / shared["added_mb"]
    )
    own, regret, speed = {_whole(tile)[:6]: tile for tile in tiles}, 0.0, 0.0
    with (
        mock.patch.object(tables, "TABLE", dict.fromkeys(tables.TABLE, limits)),
        mock.patch.object(select.devices, "multiprocessors", lambda _: multiprocessors),
    ):
        for each in timed:
            estimate = select.estimate_filters if each.filters else select.estimate
            known = [(own[tile[:6]]._replace(splits=tile.splits), us) for tile, us in each.times if tile[:6] in own]
            best = min([us for _, us in each.times])
            chosen = _chosen(each, known, estimate) if known else best
            regret += math.log(chosen / best)
            speed += math.log(each.aten / chosen)
    count = len(timed)
    return math.exp(regret / count), math.exp(speed / count), math.exp((speed + regret) / count)


def _chosen(each: Timed, known: Sequence[tuple[Tile, float]], estimate: Callable[..., float]) -> float:
    """Return the measured time of the tile with the lowest estimate."""
    device = torch.device("cpu")
    return min(known, key=lambda item: estimate(each.problem, item[0], device))[1]


def fits(timed: Sequence[Timed], multiprocessors: int = 132) -> dict[tuple[bool, int], Fit]:
    """Return fits by (filters, bytes of an element)."""
    found: dict[tuple[bool, int], Fit] = {}
    for key in itertools.product((False, True), (2, 4)):
        own = [each for each in timed if (each.filters, each.problem.dtype.itemsize) == key]
        if own:
            before = next(iter(found.values()), None)
            given = {name: before.shared[name] for name in _ONCE} if before else {}
            found[key] = fit(own, multiprocessors, given)
    return found


def report(path: Path, multiprocessors: int = 132) -> Iterator[str]:
    """Yield lines with the constants that fit times in a JSON file, as `engine.convolution.table` has them."""
    timed = load(path)
    for (filters, size), fitted in fits(timed, multiprocessors).items():
        own = [each for each in timed if (each.filters, each.problem.dtype.itemsize) == (filters, size)]
        yield f"# {'filters' if filters else 'forward'}, {size} bytes: {len(own)} runs"
        yield f"# time over the best time {fitted.regret:.3f}"
        yield f"# ATen's time over that of the chosen tile {fitted.speed:.3f}, of the best one {fitted.best_speed:.3f}"
        for tile in fitted.tiles:
            yield f"    Tile({', '.join(map(repr, tile[:9]))}{', bf16x6=True' if tile.bf16x6 else ''}),"
        yield f"# {fitted.shared}; bytes_per_us={1e6 / fitted.shared['added_mb']:.3g}"
        for each in own:
            for tile in each.wrong:
                yield f"# wrong: {each.problem} by {tile[:5]}, {tile.splits} slices"
