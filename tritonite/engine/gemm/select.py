"""Which tiles a product of matrices is cut into: as tuning found, by a model of the device, or by a rule."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tritonite import devices
from tritonite.engine.gemm import cost, cost_pointers, store
from tritonite.engine.gemm.problem import FEW, SHORT, Problem
from tritonite.engine.gemm.table import (
    BLOCKWISE,
    FEW_ROWS,
    LARGE_FLOATS,
    ONE_ROW,
    THROUGH_DESCRIPTORS,
    THROUGH_POINTERS,
    Config,
)
from tritonite.engine.iteration import power_of_2

# Products of a shorter inner dimension write as much as they read.
LEAST_READ = 512
# Products with K up to OUTER are sums of outer products, in tiles of at most OUTER_ELEMENTS results and OUTER_COLUMNS.
OUTER, OUTER_ELEMENTS, OUTER_COLUMNS = 8, 4096, 64
# A part of K has so many elements at least, and two blocks.
PART = 128
# K is taken in parts where these are for so many rounds of tiles at most.
ROUNDS_OF_PARTS = 2
# The columns that a program takes where split-K's partial products are added, and the elements of all of them.
SPLIT_K_COLUMNS, SPLIT_K_ELEMENTS = 128, 2048
# Where K or N is shorter than a tile of few rows, a warp has so many elements of what is left of its block: vectors
# times 1,280 matrices of 96 by 7 took 4.5 us with the eight warps of the whole, and take 2.5 (H100).
_ELEMENTS_OF_A_WARP = 1024
# By tensor cores a K of up to so many has few warps: 704 matrices of 30 by 25 by 96 took 12.7 us in tiles of 32 by 32
# by four warps each, and take 8.5 by one (float32, H200). Halves, and few rows of float32, have them up to SHORT, where
# few rows take K in blocks of half of that at most: 512 matrices of 16 by 128 by 336 took 49 us by four warps, and take
# 40 by two.
_SHORT_BLOCK = 32
# What they take of K at a time, and how many columns a tile of few rows has where K is no longer, if there are so many.
_LEAST_OF_K, _MOST_COLUMNS = 16, 128
# Tiles of less than 64 rows or columns, and of less than 128 of the others, are for no more rows than this, or for few
# results: of more, larger ones fill a device.
NARROW = 192
# Tiles of 64 rows and more than 128 columns are not for products of so many rows and columns: they read the L2 cache
# most of all, and wait where programs do not read together. 4,608 rows by 1,536, K = 13,824, took 316 us in them, and
# take 280 in tiles of 128 by 256; with a matrix added 470 and 291 (H200).
MANY = 1024
# ATen is taken to be faster where it is estimated to need less than this share of a kernel's time: 2.6 in a hundred of
# 2,400 products drawn at random. Of 330 in memory that have been timed these are 15, for which it takes 0.92 of the
# kernels' time in the mean; with 0.91 they would be 52, and 0.97.
LEFT_TO_ATEN = 0.87
# What a thread takes for each element of what is added to a tile, which it loads when the products are there: where all
# warps multiply, and where they are specialised. Tensor cores wait for a part of that where another group of warps has
# a tile meanwhile, and for less of it where K is so short that both groups load. Of 29 products with a matrix added,
# tiles of eight warps had 16 to 128 elements a thread and took 1 to 8 us longer for each round (H200).
ADDED, ADDED_SPECIALIZED, MEANWHILE, BOTH_LOADING = 0.03, 0.06, 0.3, 0.2
# And where the addend's tile is in shared memory by then, which has room for those of less than so many elements.
ADDED_BY_TMA, MOST_BY_TMA = 0.011, 256 * 160
# Programs next to each other go along a product's shorter side for so many tiles at most.
MOST_GROUPED = 8


def has_tiles_alike(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are tiles for all problems that give a sum the same bits (`_alike`)."""
    if not devices.has_wgmma(device) or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    # A table that was fitted here before there were tiles in parts has none.
    table = _tables(device).get(4)
    return dtype.itemsize == 2 or (table is not None and any([tile.in_parts for tile in table.configs]))


def choose(problem: Problem, device: torch.device, descriptors: bool, warp_specialized: bool = False) -> Config:
    """The tiles for a problem: stored, or the fastest by the device's model, or by rule where it has none.

    `descriptors` where all operands can have tensor descriptors, `warp_specialized` where a kernel with specialised
    warps may take them.
    """
    stored = None if problem.invariant else store.known(devices.name_of(device)).get(problem.key)
    if stored and (descriptors or not stored.descriptors) and (warp_specialized or not stored.warp_specialize):
        return stored
    return unstored(problem, device, descriptors, warp_specialized)


def unstored(problem: Problem, device: torch.device, descriptors: bool, warp_specialized: bool = False) -> Config:
    """The tiles for a problem of which nothing is stored: by the model, or by rule."""
    if problem.K <= OUTER and not problem.blockwise:
        return _of_outer_products(problem, device)
    table = table_for(problem, device, descriptors)
    if table is None:
        found = rule(problem, device, descriptors, warp_specialized)
    else:
        found = fastest(problem, device, table, warp_specialized, descriptors)
    return found if problem.blockwise else grouped(found, problem)


def grouped(config: Config, problem: Problem) -> Config:
    """A config by which programs next to each other go along a problem's shorter side, for up to MOST_GROUPED tiles.

    They share what they read of the longer side. 1,875 rows by 1,600 by 13,824 took 148 us in groups of 16 rows of
    tiles, and takes 128 of 8; 488 rows by 8,960 by 3,584, transposed, 63 us, and 52 (H100).
    """
    if not config.descriptors:
        return config
    rows, columns = problem.grid(config)
    if rows <= columns:
        return config._replace(GROUP_M=MOST_GROUPED)
    return config._replace(GROUP_M=1 if columns <= MOST_GROUPED else 2)


def _of_outer_products(problem: Problem, device: torch.device) -> Config:
    """Tiles whose threads have 32 results each, or fewer where there are too few of them for a device."""
    columns = min(power_of_2(problem.N), OUTER_COLUMNS)
    config = Config(min(power_of_2(problem.M), OUTER_ELEMENTS // columns), columns, power_of_2(problem.K))
    while config.BLOCK_M > 1 and problem.tiles(config) < 4 * devices.multiprocessors(device):
        config = config._replace(BLOCK_M=config.BLOCK_M // 2)
    return config


def table_for(problem: Problem, device: torch.device, descriptors: bool) -> cost.Table | None:
    """What a sweep found of the device for such problems, which are of halves or float32."""
    if problem.blockwise or problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    table = _tables(device).get(problem.dtype.itemsize)
    if table is None:
        return None
    if table.short and problem.is_short and (descriptors or min(problem.a_vector, problem.b_vector) == 16):
        return table.short
    if problem.dtype.itemsize == 2 and not descriptors and problem.M > FEW:
        return table.pointers
    return table.cached if table.cached and problem.is_cached else table


def _tables(device: torch.device) -> dict[int, cost.Table]:
    return cost.tables(devices.name_of(device), devices.architecture(device))


@functools.lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: torch.device, descriptors: bool) -> float:
    """What a problem takes with the tiles for it once it is launched, or 0 where nothing is known of the device."""
    table = table_for(problem, device, descriptors)
    if table is None:
        return 0.0
    return _fastest(problem, device, table, descriptors, descriptors)[1] - table.costs.launch


def aten_is_faster(
    problem: Problem, device: torch.device, warp_specialized: bool = True, copied: Sequence[int] = ()
) -> bool:
    """Whether ATen takes so much less time for a problem that has tensor descriptors, by the device's model of both.

    `copied` are the bytes of tensors that ATen copies first. Tiles that tuning stored are taken whatever the model
    says.
    """
    tuned = problem.key in store.known(devices.name_of(device))
    known = not tuned and problem.K > OUTER and problem.result is problem.dtype
    return known and _aten_is_faster(problem, device, warp_specialized, cost_pointers.copying(copied))


@functools.lru_cache(maxsize=4096)
def _aten_is_faster(problem: Problem, device: torch.device, warp_specialized: bool, copying: float) -> bool:
    table = table_for(problem, device, True)
    if table is None or table.aten is None:
        return False
    aten = least_microseconds(problem, table.aten, devices.multiprocessors(device)) + copying
    return aten < LEFT_TO_ATEN * _fastest(problem, device, table, warp_specialized, True)[1]


def least_microseconds(problem: Problem, table: cost.Table, multiprocessors: int) -> float:
    """What the fastest of a table's tiles takes, whatever kernels would need of operands."""
    tiles = table.candidates[long_enough(problem, table.candidates)]
    work, number = cost.work(problem, tiles, multiprocessors), tiles["number"]
    return float(cost.microseconds(work, table.block[number], table.tile[number], table.costs).min())


def long_enough(problem: Problem, tiles: Any) -> Any:
    """For which of `tiles` the parts of K are long enough, if there are several."""
    splits = tiles["splits"]
    return (splits == 1) | (splits * np.maximum(PART, 2 * tiles["BLOCK_K"]) <= problem.K)


def estimates(problem: Problem, tiles: Any, table: cost.Table, multiprocessors: int) -> Any:
    """The microseconds that a problem takes with each of a table's `tiles`, which are `model.records`."""
    work, number = cost.work(problem, tiles, multiprocessors), tiles["number"]
    block = table.block[number] + cost_pointers.loads(problem, tiles)
    waited = cost_pointers.waiting(problem, tiles, work, multiprocessors)
    tile = table.tile[number] + (_added(problem, tiles, work) if problem.added else 0.0)
    return cost.microseconds(work, block, tile, table.costs, waited)


def _added(problem: Problem, tiles: Any, work: cost.Work) -> Any:
    """The microseconds that a tile takes longer where something is added to each of its elements."""
    pingpong = tiles["pingpong"] == 1
    elements = tiles["BLOCK_M"] * (tiles["BLOCK_N"] + tiles["MORE_N"]) * (1 + pingpong) / (32 * tiles["num_warps"])
    has_room = tiles["BLOCK_M"] * (tiles["BLOCK_N"] + tiles["MORE_N"]) < MOST_BY_TMA
    specialized = np.where(problem.added_by_tma & has_room, ADDED_BY_TMA, ADDED_SPECIALIZED)
    each = np.where(tiles["warp_specialize"] == 1, specialized, ADDED)
    each = each * np.where(pingpong & (work.rounds > 1), BOTH_LOADING if problem.K < LEAST_READ else MEANWHILE, 1.0)
    # With split-K another launch adds.
    return np.where(tiles["splits"] == 1, each * elements, 0.0)


def fastest(
    problem: Problem, device: torch.device, table: cost.Table, warp_specialized: bool, descriptors: bool = True
) -> Config:
    """The tiles, and the parts of K, that take the least time by a model."""
    return _fastest(problem, device, table, warp_specialized, descriptors)[0]


@functools.lru_cache(maxsize=4096)
def _fastest(
    problem: Problem, device: torch.device, table: cost.Table, warp_specialized: bool, descriptors: bool
) -> tuple[Config, float]:
    tiles = _shortened(table.candidates[possible(problem, device, table, warp_specialized, descriptors)], problem)
    times = estimates(problem, tiles, table, devices.multiprocessors(device))
    best = int(np.argmin(times))
    own = {name: int(tiles[best][name]) for name in ("BLOCK_N", "BLOCK_K", "splits")}
    whole = table.configs[tiles[best]["number"]]
    return without_idle(whole._replace(**own), whole, problem), float(times[best])


def without_idle(config: Config, whole: Config, problem: Problem) -> Config:
    """The tiles by as many warps and stages as have something to do, where a block is not `whole` or K is short.

    By tensor cores that is so through pointers, and four warps multiply 64 rows together. There are no more stages than
    it takes to load all blocks, so that more programs have room: 300 matrices of 4 by 96 by 1,816 took 58 us in blocks
    of 128 with four stages, and take 34 in two of 64 (H200).
    """
    if config.BLOCK_M < FEW:
        elements = config.BLOCK_N * config.BLOCK_K
        if elements >= whole.BLOCK_N * whole.BLOCK_K:
            return config
    else:
        # Tensor cores take halves two at a time.
        elements = config.BLOCK_N * max(config.BLOCK_M, config.BLOCK_K) * problem.dtype.itemsize // 4
        blocks, few = -(-problem.K // config.BLOCK_K), config.BLOCK_M == FEW
        longest = SHORT if few or problem.dtype.itemsize == 2 else min(_SHORT_BLOCK, config.BLOCK_K)
        if longest < problem.K or config.descriptors or not (config.BLOCK_M < 64 or problem.is_short):
            return config
        # All blocks are to be on their way before the first is multiplied. Few rows in the cache gain more by the room.
        stages = 1 if blocks == 1 else blocks + (not (few and problem.is_cached))
        config = config._replace(num_stages=min(config.num_stages, stages))
        if config.BLOCK_M >= 64:
            return config
    return config._replace(num_warps=min(whole.num_warps, max(1, elements // _ELEMENTS_OF_A_WARP)))


def _shortened(tiles: Any, problem: Problem) -> Any:
    """Tiles of few rows whose blocks are no longer than K, and as wide as there are columns without tensor cores.

    Of K up to 16 those of tensor cores have up to 128 columns: 896 matrices of 13 by 13 by 80 took 10.9 us in blocks of
    64 columns by 32, by four warps each, and take 5.9 by two (float32, H200). Of shorter blocks a multiprocessor takes
    more programs.
    """
    inner, columns, few = power_of_2(problem.K), power_of_2(problem.N), tiles["BLOCK_M"] < FEW
    block = min(inner, SHORT // 2) if inner <= SHORT else inner
    times = np.maximum(1, tiles["BLOCK_K"] // np.where(few, inner, max(_LEAST_OF_K, block)))
    times = np.where((tiles["BLOCK_M"] <= FEW) & (tiles["descriptors"] == 0), times, 1)
    tiles["BLOCK_K"] //= times
    wider = np.maximum(tiles["BLOCK_N"], min(_MOST_COLUMNS, columns) if inner <= _LEAST_OF_K else 0)
    before = tiles["BLOCK_N"].copy()
    tiles["BLOCK_N"] = np.minimum(tiles["BLOCK_N"] * times, np.where(few, columns, wider))
    tiles["programs"] *= np.where(few, 1, np.maximum(1, times * before // tiles["BLOCK_N"]))
    return tiles


def possible(
    problem: Problem, device: torch.device, table: cost.Table, warp_specialized: bool, descriptors: bool = True
) -> Any:
    """Which of a table's candidates are worth a thought.

    Where halves have descriptors, tiles through pointers are for one round of programs only. Each program waits for its
    first blocks, and persistent ones copy the next tile's while they multiply. With a short K in the cache many
    programs wait at the same time: 264 matrices of 40 by 24, K = 128, took 4.9 us, and take 2.8 (H200).
    """
    tiles = table.candidates
    splits, units = tiles["splits"], cost.count(problem, tiles) * tiles["splits"]
    places = devices.multiprocessors(device) * tiles["programs"]
    few = units <= ROUNDS_OF_PARTS * places
    allowed = warp_specialized | (tiles["warp_specialize"] == 0)
    allowed &= descriptors | (tiles["descriptors"] == 0)
    allowed &= (splits == 1) | (tiles["pingpong"] == 0)
    if problem.dtype.itemsize == 2 and descriptors:
        allowed &= (units <= places) | (tiles["BLOCK_M"] <= FEW) | (tiles["descriptors"] == 1) | problem.is_short
    if problem.invariant:
        allowed &= _alike(problem, tiles, device)
    can = (
        allowed
        & long_enough(problem, tiles)
        & ((splits == 1) | few | problem.invariant)
        & _fits(problem, table, device)
    )
    suited = can & _suits(problem, tiles, _leaves_idle(problem, device)) & cost_pointers.can_be_held(problem, tiles)
    # Of few columns no tile is filled by half.
    return suited if suited.any() else can & (tiles["BLOCK_M"] > FEW)


def _alike(problem: Problem, tiles: Any, device: torch.device) -> Any:
    """Which tiles give a sum the same bits as each other: by tensor cores, with K in as many parts for any rows.

    Hopper's add up 16 products of halves at a time, in order, whatever the shape of a tile (all 84 of the table were
    compared). Float32's three parts are summed for a block of K before they are added to what there is, in an order
    that is another one for the transpose.
    """
    if problem.dtype.itemsize == 2:
        return (tiles["BLOCK_M"] >= FEW) & (tiles["splits"] == 1)
    alike = (tiles["in_parts"] == 1) & (tiles["transposed"] == 1) & (tiles["BLOCK_K"] == 32)
    return alike & (tiles["splits"] == _parts_for_any_rows(problem, device))


def _parts_for_any_rows(problem: Problem, device: torch.device) -> int:
    """In how many parts K is taken of float32, so that the tiles of few rows are on many multiprocessors.

    Parts cost many rows time, the less of it the longer K is, and memory: partial products are at most twelve times as
    large as the first operand. Of 40 drawn products timed in each number of parts (H200) those of up to 128 rows have
    0.92 of the default's speed with these, and those of more 0.93; where no part is shorter than 256, 0.87 and 0.94.
    Halves have one part, because two would be a third of a large product's time.
    """
    tiles, K = -(-problem.N // 64), problem.K
    most = min(4 * devices.multiprocessors(device) // tiles, K // 192, 12 * K // problem.N, 16)
    return max([splits for splits in cost.SPLITS if splits <= max(1, most)])


def _leaves_idle(problem: Problem, device: torch.device) -> bool:
    """Whether tiles of 64 by 64 are fewer than a device's multiprocessors."""
    return problem.tiles(Config(64, 64, 64)) < devices.multiprocessors(device)


def _suits(problem: Problem, tiles: Any, small: bool) -> Any:
    """Which tiles are filled by half at least; those of few rows are for few rows, one alone or several.

    Narrow ones are for some rows, or for `small` problems. Transposed ones of 64 rows are not for few columns that one
    of them holds, as all programs read the same ones at the same time then: 70 rows by 6,912, K = 3,072, took 26 us,
    and take 17 not transposed; of 235 times of such tiles three were the best of a problem's (H200).
    """
    swapped = tiles["transposed"] == 1
    rows, columns = np.where(swapped, problem.N, problem.M), np.where(swapped, problem.M, problem.N)
    width = tiles["BLOCK_N"] + tiles["MORE_N"]
    filled = (width <= 16) | (width < 2 * np.maximum(columns, 16))
    filled &= (tiles["BLOCK_M"] <= 64) | (tiles["BLOCK_M"] < 2 * np.maximum(rows, 64))
    narrow = (tiles["BLOCK_M"] < 64) | ((tiles["BLOCK_N"] < 64) & (tiles["BLOCK_M"] < 128) & (width < columns))
    filled &= small | (problem.M <= NARROW) | ~narrow
    filled &= ~(swapped & (tiles["BLOCK_M"] == 64) & (width >= columns) & (width >= 128))
    long = (tiles["BLOCK_M"] == 64) & (width > 128) & (tiles["warp_specialize"] == 1) & (tiles["pingpong"] == 0)
    filled &= ~(long & (min(problem.M, problem.N) >= MANY))
    few = (problem.M <= FEW) & ((problem.M == 1) == (tiles["BLOCK_M"] == 1))
    lies = (tiles["b_inner"] < 0) | (tiles["b_inner"] == problem.b_inner)
    return np.where(tiles["BLOCK_M"] <= FEW, few, filled) & lies


def _fits(problem: Problem, table: cost.Table, device: torch.device) -> Any:
    """Of which candidates shared memory has room for three stages, where warps divide the work."""
    tiles, size = table.candidates, problem.dtype.itemsize
    whole, parts = (_least_shared(table, size, result)[tiles["number"]] for result in (problem.result.itemsize, 4))
    needed = np.where(tiles["splits"] == 1, whole, parts)
    return (tiles["warp_specialize"] == 0) | (needed <= _room(tiles["programs"], device))


@functools.lru_cache(maxsize=16)
def _least_shared(table: cost.Table, size: int, result: int) -> Any:
    """The bytes of shared memory that each of the tiles needs with three stages, for results of so many bytes each."""
    return np.array([each._replace(num_stages=3, split_store=True).shared(size, result) for each in table.configs])


def _room(programs: Any, device: torch.device) -> Any:
    """The bytes of shared memory for one of several programs whose warps divide the work, next to their barriers."""
    return (devices.shared_memory(device) + 1024) // programs - 1280


def rule(problem: Problem, device: torch.device, descriptors: bool, warp_specialized: bool = False) -> Config:
    """The tiles for a problem on a device that has no model."""
    kind, size = devices.current.kind, problem.dtype.itemsize
    if problem.M == 1 and not problem.invariant:
        config = _filling(problem, device, ONE_ROW[kind][problem.b_inner])
    elif problem.M <= FEW:
        config = _filling(problem, device, FEW_ROWS[kind][problem.b_inner][size])
    elif descriptors and devices.has_tma(device) and size in THROUGH_DESCRIPTORS[kind]:
        config = choose_with_descriptors(problem, device, warp_specialized)
    else:
        config = _cheapest(problem, device, THROUGH_POINTERS[kind][size])
    if problem.invariant:
        return config
    splits = _parts_that_fill(config, problem, device)
    if splits > 1 and config.warp_specialize:
        return rule(problem, device, descriptors)
    if config.warp_specialize and problem.K < LEAST_READ:
        # A whole tile is on its way out while the next is multiplied.
        config = config._replace(split_store=False, num_stages=3, GROUP_M=4)
    return config._replace(splits=splits)


def _parts_that_fill(config: Config, problem: Problem, device: torch.device) -> int:
    """The parts that K is cut into, of 4 blocks at least, so that a device works on all of them at once."""
    places = config.programs * devices.multiprocessors(device)
    return max(1, min(places // problem.tiles(config), problem.K // (4 * config.BLOCK_K)))


def choose_with_descriptors(problem: Problem, device: torch.device, warp_specialized: bool = False) -> Config:
    """The tiles for a problem whose operands all have tensor descriptors, whether the device copies tiles or not."""
    kind, size = devices.current.kind, problem.dtype.itemsize
    configs = THROUGH_DESCRIPTORS[kind].get(size) or THROUGH_POINTERS[kind][size]
    if problem.blockwise:
        configs = BLOCKWISE.get(kind, configs)
    warp_specialized &= devices.has_wgmma(device) and problem.dtype.is_floating_point
    # Of one byte, tensor cores take only what lies along K.
    warp_specialized &= size == 2 or (problem.a_inner and problem.b_inner)
    return _cheapest(
        problem, device, tuple([config for config in configs if warp_specialized or not config.warp_specialize])
    )


def for_groups(problem: Problem, device: torch.device) -> Config:
    """The tiles for products of groups of rows whose operands all have tensor descriptors; `problem` is the mean one.

    Of float32 Hopper's have a large one, too: 64 groups of 16,384 rows by 1,408 by 2,048 take 1.92 ms with it, and 2.42
    without.
    """
    if problem.dtype is torch.float32 and devices.has_wgmma(device):
        return _cheapest(problem, device, (LARGE_FLOATS, *THROUGH_POINTERS[devices.current.kind][4]))
    return choose_with_descriptors(problem, device)


def fitting(config: Config, problem: Problem, device: torch.device, beside: int = 0) -> Config:
    """With as many stages as shared memory has room for, next to `beside` bytes for each element of a result.

    Four of half the size are rather taken than two.
    """
    size = problem.dtype.itemsize
    most = _room(config.programs, device) if config.warp_specialize else devices.shared_memory(device)
    # Parts of results are of 4 bytes.
    result = (problem.result.itemsize if config.splits == 1 else max(4, size)) + beside
    if config.warp_specialize:
        # An addend comes to where its whole tile is written through.
        whole = not config.split_store or (problem.added_by_tma and config.splits == 1)
        least = config._replace(num_stages=min(3, config.num_stages), split_store=False).shared(size, result)
        config = config._replace(split_store=not whole or least > most)
    while config.num_stages > 1 and config.shared(size, result if config.descriptors else 0) > most:
        if config.num_stages == 3 and config.BLOCK_K * size > 128:
            config = config._replace(num_stages=5, BLOCK_K=config.BLOCK_K // 2)
        config = config._replace(num_stages=config.num_stages - 1)
    return config


def _filling(problem: Problem, device: torch.device, configs: tuple[Config, ...]) -> Config:
    """The first whose tiles are taken all at once, or else the last, of those with enough rows if there are any."""
    enough = [config for config in configs if config.BLOCK_M >= problem.M] or [configs[-1]]
    rows, most = min([config.BLOCK_M for config in enough]), devices.multiprocessors(device)
    fewest = [config for config in enough if rows >= config.BLOCK_M]
    return next((config for config in fewest if problem.tiles(config) <= config.programs * most), fewest[-1])


def _cheapest(problem: Problem, device: torch.device, configs: tuple[Config, ...]) -> Config:
    """By the time of as many rounds of tiles as the device takes; larger tiles are done faster than their size."""
    most = devices.multiprocessors(device)

    def time(config: Config) -> float:
        rounds = -(-problem.tiles(config) // most)
        return rounds * config.BLOCK_M * config.BLOCK_N / config.rate

    return min(configs, key=time)
