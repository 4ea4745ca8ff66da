"""Choice of tiles for a product: stored by tuning, by the device's fitted costs, or by rule.

By fitted costs a choice has four steps: candidates (`Table.candidates`), `possible`, cost (`estimates`), and the best
of them (`fastest`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tritonite import devices
from tritonite.engine.gemm import cost, cost_pointers, fitted, store
from tritonite.engine.gemm.problem import FEW, Problem
from tritonite.engine.gemm.table import (
    BLOCKWISE,
    FEW_ROWS,
    LARGE_FLOATS,
    LEAST_DOT,
    ONE_ROW,
    THROUGH_DESCRIPTORS,
    THROUGH_POINTERS,
    Config,
    FixedCosts,
    limits,
)
from tritonite.engine.iteration import power_of_2

# The choice


def choose(problem: Problem, device: torch.device, descriptors: bool, warp_specialized: bool = False) -> Config:
    """Return the tile for a problem: the stored one, or `unstored`.

    `descriptors` says whether TMA can address all operands, `warp_specialized` whether the warp-specialised kernel can
    serve the product.
    """
    stored = None if problem.invariant else store.known(devices.name_of(device)).get(problem.key)
    if stored and (descriptors or not stored.descriptors) and (warp_specialized or not stored.warp_specialize):
        return stored
    return unstored(problem, device, descriptors, warp_specialized)


def unstored(problem: Problem, device: torch.device, descriptors: bool, warp_specialized: bool = False) -> Config:
    """Return the tile for a problem by the device's fitted costs, or by rule if it has none."""
    if limits().outer_k >= problem.K and not problem.blockwise:
        return _of_outer_products(problem, device)
    descriptors &= devices.has_tma(device)
    table = table_for(problem, device, descriptors)
    if table is None:
        found = rule(problem, device, descriptors, warp_specialized)
    else:
        found = fastest(problem, device, table, warp_specialized, descriptors)
    return found if problem.blockwise else grouped(found, problem)


def _of_outer_products(problem: Problem, device: torch.device) -> Config:
    """Return a tile whose threads have 32 results each, or fewer if tiles are too few for the device."""
    columns = min(power_of_2(problem.N), limits().outer_columns)
    config = Config(min(power_of_2(problem.M), limits().outer_elements // columns), columns, power_of_2(problem.K))
    while config.BLOCK_M > 1 and problem.tiles(config) < 4 * devices.multiprocessors(device):
        config = config._replace(BLOCK_M=config.BLOCK_M // 2)
    return config


def grouped(config: Config, problem: Problem) -> Config:
    """Set GROUP_M so that consecutive programs go along the problem's shorter side, `grouped_tiles` at most.

    These programs share what they read of the longer side. regressions: gemm_grouped_programs
    """
    if not config.descriptors:
        return config
    rows, columns = problem.grid(config)
    if rows <= columns:
        return config._replace(GROUP_M=limits().grouped_tiles)
    return config._replace(GROUP_M=1 if columns <= limits().grouped_tiles else 2)


def fitting(config: Config, problem: Problem, device: torch.device, epilogue_bytes: int = 0) -> Config:
    """Reduce a tile's stages to what shared memory has room for, next to `epilogue_bytes` per result element.

    Four stages of half the size are preferred to two.
    """
    size = problem.dtype.itemsize
    most = _shared_memory(config.programs, device) if config.warp_specialize else devices.shared_memory(device)
    # Partial products are of 4 bytes.
    result = (problem.result.itemsize if config.splits == 1 else max(4, size)) + epilogue_bytes
    if config.warp_specialize:
        # TMA copies an addend to staging buffers for the whole tile.
        whole = not config.split_store or (problem.added_by_tma and config.splits == 1)
        least = config._replace(num_stages=min(3, config.num_stages), split_store=False).shared(size, result)
        config = config._replace(split_store=not whole or least > most)
    while config.num_stages > 1 and config.shared(size, result if config.descriptors else 0) > most:
        if config.num_stages == 3 and config.BLOCK_K * size > 128:
            config = config._replace(num_stages=5, BLOCK_K=config.BLOCK_K // 2)
        config = config._replace(num_stages=config.num_stages - 1)
    return config


def _shared_memory(programs: Any, device: torch.device) -> Any:
    """Return the bytes of shared memory for one of several warp-specialised programs, without its barriers."""
    return (devices.shared_memory(device) + 1024) // programs - 1280


# By fitted costs: tables


def _tables(device: torch.device) -> dict[int, cost.Table]:
    return fitted.tables(devices.name_of(device), devices.architecture(device))


def table_for(problem: Problem, device: torch.device, descriptors: bool) -> cost.Table | None:
    """Return the fitted table for a problem, or None. Tables are for 16-bit floats and float32."""
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


def fixed_costs(dtype: torch.dtype, device: torch.device) -> FixedCosts:
    """Return the device's costs that are not fitted, for operands of a dtype."""
    table = _tables(device).get(dtype.itemsize)
    return FixedCosts() if table is None else table.fixed


# By fitted costs: candidates that are possible


def possible(
    problem: Problem, device: torch.device, table: cost.Table, warp_specialized: bool, descriptors: bool = True
) -> Any:
    """Return a mask of the table's candidates that can serve the problem and may be its best.

    Where TMA can load 16-bit floats, tiles through pointers are for one round of programs only. Each of their programs
    waits for its first blocks, while persistent ones copy the next tile's as they multiply. With a short K in the cache
    many programs wait at the same time, and any number of rounds is possible. regressions: gemm_short_k_pointers
    """
    tiles = table.candidates
    splits, units = tiles["splits"], cost.count(problem, tiles) * tiles["splits"]
    resident = devices.multiprocessors(device) * tiles["programs"]
    few = units <= limits().slice_rounds * resident
    allowed = warp_specialized | (tiles["warp_specialize"] == 0)
    allowed &= descriptors | (tiles["descriptors"] == 0)
    allowed &= (splits == 1) | (tiles["pingpong"] == 0)
    if problem.dtype.itemsize == 2 and descriptors:
        allowed &= (units <= resident) | (tiles["BLOCK_M"] <= FEW) | (tiles["descriptors"] == 1) | problem.is_short
    if problem.invariant:
        allowed &= _invariant(problem, tiles, device)
    can = (
        allowed
        & long_enough(problem, tiles)
        & ((splits == 1) | few | problem.invariant)
        & _fits(problem, table, device)
    )
    suited = can & _suits(problem, tiles, _leaves_idle(problem, device))
    suited &= cost_pointers.can_prefetch(problem, tiles, table.fixed)
    # With few columns every tile may be less than half filled.
    return suited if suited.any() else can & (tiles["BLOCK_M"] > FEW)


def long_enough(problem: Problem, tiles: Any) -> Any:
    """Return a mask of the tiles without split-K, or with slices that are long enough."""
    splits = tiles["splits"]
    return (splits == 1) | (splits * np.maximum(limits().slice_k, 2 * tiles["BLOCK_K"]) <= problem.K)


def _leaves_idle(problem: Problem, device: torch.device) -> bool:
    """Return whether tiles of 64 by 64 are fewer than the device's multiprocessors."""
    return problem.tiles(Config(64, 64, 64)) < devices.multiprocessors(device)


def _suits(problem: Problem, tiles: Any, small: bool) -> Any:
    """Return a mask of the tiles that suit M, N and b's layout.

    Tiles are more than half filled. One row, and few, have tiles of their own. Narrow tiles are for up to `narrow_rows`
    or `small` problems. Transposed tiles of 64 rows and at least 128 columns are excluded if one holds all columns: all
    programs would read these at the same time.
    """
    swapped = tiles["transposed"] == 1
    rows, columns = np.where(swapped, problem.N, problem.M), np.where(swapped, problem.M, problem.N)
    width = tiles["BLOCK_N"] + tiles["MORE_N"]
    filled = (width <= 16) | (width < 2 * np.maximum(columns, 16))
    filled &= (tiles["BLOCK_M"] <= 64) | (tiles["BLOCK_M"] < 2 * np.maximum(rows, 64))
    narrow = (tiles["BLOCK_M"] < 64) | ((tiles["BLOCK_N"] < 64) & (tiles["BLOCK_M"] < 128) & (width < columns))
    filled &= small | (limits().narrow_rows >= problem.M) | ~narrow
    filled &= ~(swapped & (tiles["BLOCK_M"] == 64) & (width >= columns) & (width >= 128))
    wide = (tiles["BLOCK_M"] == 64) & (width > 128) & (tiles["warp_specialize"] == 1) & (tiles["pingpong"] == 0)
    filled &= ~(wide & (min(problem.M, problem.N) >= limits().many))
    few = (problem.M <= FEW) & ((problem.M == 1) == (tiles["BLOCK_M"] == 1))
    layout = (tiles["b_inner"] < 0) | (tiles["b_inner"] == problem.b_inner)
    return np.where(tiles["BLOCK_M"] <= FEW, few, filled) & layout


def _fits(problem: Problem, table: cost.Table, device: torch.device) -> Any:
    """Return a mask of the candidates that are not warp-specialised or whose three stages fit in shared memory."""
    tiles, size = table.candidates, problem.dtype.itemsize
    whole, partial = (_least_shared(table, size, result)[tiles["number"]] for result in (problem.result.itemsize, 4))
    needed = np.where(tiles["splits"] == 1, whole, partial)
    return (tiles["warp_specialize"] == 0) | (needed <= _shared_memory(tiles["programs"], device))


@functools.lru_cache(maxsize=16)
def _least_shared(table: cost.Table, size: int, result: int) -> Any:
    """Return the shared memory that each tile needs with three stages, for operands and results of these bytes."""
    return np.array([each._replace(num_stages=3, split_store=True).shared(size, result) for each in table.configs])


# By fitted costs: the best


def fastest(
    problem: Problem, device: torch.device, table: cost.Table, warp_specialized: bool, descriptors: bool = True
) -> Config:
    """Return the possible candidate with the lowest estimated time."""
    return _fastest(problem, device, table, warp_specialized, descriptors)[0]


@functools.lru_cache(maxsize=4096)
def _fastest(
    problem: Problem, device: torch.device, table: cost.Table, warp_specialized: bool, descriptors: bool
) -> tuple[Config, float]:
    """Return the possible candidate with the lowest estimated time, and that time in microseconds."""
    tiles = _shortened(table.candidates[possible(problem, device, table, warp_specialized, descriptors)], problem)
    times = estimates(problem, tiles, table, devices.multiprocessors(device))
    best = int(np.argmin(times))
    own = {name: int(tiles[best][name]) for name in ("BLOCK_N", "BLOCK_K", "splits")}
    whole = table.configs[tiles[best]["number"]]
    return without_idle(whole._replace(**own), whole, problem), float(times[best])


def _shortened(tiles: Any, problem: Problem) -> Any:
    """Shorten tiles of few rows to the problem's K, and widen them to keep their warps busy.

    Tiles without tensor cores become up to as wide as the problem. Those with tensor cores keep their width, but for
    the shortest K become up to `few_rows_columns` wide. Smaller blocks let a multiprocessor hold more programs.
    regressions: gemm_shortened_few_rows
    """
    inner, columns, few = power_of_2(problem.K), power_of_2(problem.N), tiles["BLOCK_M"] < FEW
    short = limits().short_k
    block = min(inner, short // 2) if inner <= short else inner
    times = np.maximum(1, tiles["BLOCK_K"] // np.where(few, inner, max(LEAST_DOT, block)))
    times = np.where((tiles["BLOCK_M"] <= FEW) & (tiles["descriptors"] == 0), times, 1)
    tiles["BLOCK_K"] //= times
    wider = np.maximum(tiles["BLOCK_N"], min(limits().few_rows_columns, columns) if inner <= LEAST_DOT else 0)
    before = tiles["BLOCK_N"].copy()
    tiles["BLOCK_N"] = np.minimum(tiles["BLOCK_N"] * times, np.where(few, columns, wider))
    tiles["programs"] *= np.where(few, 1, np.maximum(1, times * before // tiles["BLOCK_N"]))
    return tiles


def without_idle(config: Config, whole: Config, problem: Problem) -> Config:
    """Return the tile without warps and stages that have nothing to do, for blocks smaller than `whole` or a short K.

    With tensor cores that is possible through pointers and below 64 rows, which four warps multiply together. Stages
    are no more than all blocks need to be in flight, so that more programs are resident.
    regressions: gemm_stages_short_k
    """
    if config.BLOCK_M < FEW:
        elements = config.BLOCK_N * config.BLOCK_K
        if elements >= whole.BLOCK_N * whole.BLOCK_K:
            return config
    else:
        # Tensor cores multiply 16-bit floats in pairs.
        elements = config.BLOCK_N * max(config.BLOCK_M, config.BLOCK_K) * problem.dtype.itemsize // 4
        blocks, few = -(-problem.K // config.BLOCK_K), config.BLOCK_M == FEW
        longest = limits().short_k
        if not few and problem.dtype.itemsize != 2:
            longest = min(limits().short_k_fp32, config.BLOCK_K)
        if longest < problem.K or config.descriptors or not (config.BLOCK_M < 64 or problem.is_short):
            return config
        # All blocks are in flight before the first is multiplied. Few rows in the cache gain more by resident programs.
        stages = 1 if blocks == 1 else blocks + (not (few and problem.is_cached))
        config = config._replace(num_stages=min(config.num_stages, stages))
        if config.BLOCK_M >= 64:
            return config
    return config._replace(num_warps=min(whole.num_warps, max(1, elements // limits().warp_elements)))


# By fitted costs: cost


def estimates(problem: Problem, tiles: Any, table: cost.Table, multiprocessors: int) -> Any:
    """Return the estimated time of a problem in microseconds, for each of a table's `tiles` (`cost.records`)."""
    work, number = cost.work(problem, tiles, multiprocessors), tiles["number"]
    block = table.block[number] + cost_pointers.loads(problem, tiles, table.fixed)
    waited = cost_pointers.waiting(problem, tiles, work, multiprocessors, table.fixed)
    tile = table.tile[number] + (_added(problem, tiles, work, table.fixed) if problem.added else 0.0)
    return cost.microseconds(work, block, tile, table.costs, waited)


def _added(problem: Problem, tiles: Any, work: cost.Work, fixed: FixedCosts) -> Any:
    """Return the additional time of a tile in microseconds where each result element has epilogue elements of its own.

    With split-K another launch applies the epilogue.
    """
    pingpong = tiles["pingpong"] == 1
    threads = devices.warp_size() * tiles["num_warps"]
    elements = tiles["BLOCK_M"] * (tiles["BLOCK_N"] + tiles["MORE_N"]) * (1 + pingpong) / threads
    has_room = tiles["BLOCK_M"] * (tiles["BLOCK_N"] + tiles["MORE_N"]) < fixed.added_by_tma_below
    specialized = np.where(problem.added_by_tma & has_room, fixed.added_by_tma, fixed.added_specialized)
    each = np.where(tiles["warp_specialize"] == 1, specialized, fixed.added)
    share = fixed.pingpong_wait_short if limits().read_k > problem.K else fixed.pingpong_wait
    each = each * np.where(pingpong & (work.rounds > 1), share, 1.0)
    return np.where(tiles["splits"] == 1, each * elements, 0.0)


@functools.lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: torch.device, descriptors: bool) -> float:
    """Return a problem's estimated time with its best tile, without the launch, or 0 for a device without a table."""
    table = table_for(problem, device, descriptors)
    if table is None:
        return 0.0
    return _fastest(problem, device, table, descriptors, descriptors)[1] - table.costs.launch


def least_microseconds(problem: Problem, table: cost.Table, multiprocessors: int) -> float:
    """Return the estimated time with the fastest of a table's tiles, whatever the layout of operands."""
    tiles = table.candidates[long_enough(problem, table.candidates)]
    work, number = cost.work(problem, tiles, multiprocessors), tiles["number"]
    return float(cost.microseconds(work, table.block[number], table.tile[number], table.costs).min())


def aten_is_faster(
    problem: Problem, device: torch.device, warp_specialized: bool = True, copied: Sequence[int] = ()
) -> bool:
    """Return whether ATen is estimated to be faster, by more than a margin, for operands that TMA can address.

    `copied` are the bytes of tensors that ATen copies first. Problems with stored tiles are never left to ATen.
    """
    tuned = problem.key in store.known(devices.name_of(device))
    known = not tuned and limits().outer_k < problem.K and problem.result is problem.dtype
    if not known:
        return False
    copying = cost_pointers.copying(copied, fixed_costs(problem.dtype, device))
    return _aten_is_faster(problem, device, warp_specialized, copying)


@functools.lru_cache(maxsize=4096)
def _aten_is_faster(problem: Problem, device: torch.device, warp_specialized: bool, copying: float) -> bool:
    table = table_for(problem, device, True)
    if table is None or table.aten is None:
        return False
    aten = least_microseconds(problem, table.aten, devices.multiprocessors(device)) + copying
    return aten < table.fixed.aten_share * _fastest(problem, device, table, warp_specialized, True)[1]


# Invariant mode


def has_invariant_tiles(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether every problem of a dtype has tiles that give a sum the same bits (`_invariant`)."""
    if not devices.has_wgmma(device) or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    # A table fitted on this machine by an older version has no tiles of Hopper's float32 kernel.
    table = _tables(device).get(4)
    return dtype.itemsize == 2 or (table is not None and any([tile.hopper_fp32 for tile in table.configs]))


def _invariant(problem: Problem, tiles: Any, device: torch.device) -> Any:
    """Return a mask of tiles that all give a sum the same bits, with the same slices of K for any M.

    Hopper's tensor cores add 16 products of 16-bit floats at a time, in order, whatever the shape of a tile. Float32
    adds the six products of a block of K before it adds them to the sum, in another order for the transpose.
    """
    if problem.dtype.itemsize == 2:
        return (tiles["BLOCK_M"] >= FEW) & (tiles["splits"] == 1)
    same = (tiles["hopper_fp32"] == 1) & (tiles["transposed"] == 1) & (tiles["BLOCK_K"] == 32)
    return same & (tiles["splits"] == _invariant_splits(problem, device))


def _invariant_splits(problem: Problem, device: torch.device) -> int:
    """Return the split-K slices of float32 for any M, so that the tiles of few rows use many multiprocessors.

    Slices cost many rows time, less of it the longer K is, and memory: partial products are at most twelve times as
    large as the first operand. 16-bit floats have one slice, because two would slow a large product down too much.
    """
    tiles, K = -(-problem.N // 64), problem.K
    most = min(4 * devices.multiprocessors(device) // tiles, K // 192, 12 * K // problem.N, 16)
    return max([splits for splits in cost.SPLITS if splits <= max(1, most)])


# By rule


def rule(problem: Problem, device: torch.device, descriptors: bool, warp_specialized: bool = False) -> Config:
    """Return the tile for a problem on a device without fitted costs."""
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
    splits = _splits_that_fill(config, problem, device)
    if splits > 1 and config.warp_specialize:
        return rule(problem, device, descriptors)
    if config.warp_specialize and limits().read_k > problem.K:
        # Storing counts as much as loading: a whole tile is stored while the next is multiplied.
        config = config._replace(split_store=False, num_stages=3, GROUP_M=4)
    return config._replace(splits=splits)


def of_tables(problem: Problem, device: torch.device, few: tuple[Config, ...], many: tuple[Config, ...]) -> Config:
    """Return the tile by rule from an engine's own tables: of `few` rows, or of `many`, with slices that fill."""
    config = _filling(problem, device, few) if problem.M <= FEW else _cheapest(problem, device, many)
    return config._replace(splits=_splits_that_fill(config, problem, device))


def _splits_that_fill(config: Config, problem: Problem, device: torch.device) -> int:
    """Return the split-K slices, of at least 4 blocks, that the device can work on all at once."""
    resident = config.programs * devices.multiprocessors(device)
    return max(1, min(resident // problem.tiles(config), problem.K // (4 * config.BLOCK_K)))


def choose_with_descriptors(problem: Problem, device: torch.device, warp_specialized: bool = False) -> Config:
    """Return the tile by rule for operands that have tensor descriptors, whether or not the device has TMA."""
    kind, size = devices.current.kind, problem.dtype.itemsize
    configs = THROUGH_DESCRIPTORS[kind].get(size) or THROUGH_POINTERS[kind][size]
    if problem.blockwise:
        configs = BLOCKWISE[kind] or configs
    warp_specialized &= devices.has_wgmma(device) and problem.dtype.is_floating_point
    # Tensor cores read 8-bit operands from shared memory only if elements along K are contiguous.
    warp_specialized &= size == 2 or (problem.a_inner and problem.b_inner)
    return _cheapest(
        problem, device, tuple([config for config in configs if warp_specialized or not config.warp_specialize])
    )


def for_groups(problem: Problem, device: torch.device) -> Config:
    """Return the tile for products of groups of rows; `problem` is their mean. TMA can address all operands.

    regressions: gemm_groups_large_fp32
    """
    if problem.dtype is torch.float32 and devices.has_wgmma(device):
        return _cheapest(problem, device, (LARGE_FLOATS, *THROUGH_POINTERS[devices.current.kind][4]))
    return choose_with_descriptors(problem, device)


def _filling(problem: Problem, device: torch.device, configs: tuple[Config, ...]) -> Config:
    """Return the first tile that needs one round of programs, or else the last, among those with the fewest rows >= M.

    If none has as many rows as the problem, the last tile serves.
    """
    enough = [config for config in configs if config.BLOCK_M >= problem.M] or [configs[-1]]
    rows, most = min([config.BLOCK_M for config in enough]), devices.multiprocessors(device)
    fewest = [config for config in enough if rows >= config.BLOCK_M]
    return next((config for config in fewest if problem.tiles(config) <= config.programs * most), fewest[-1])


def _cheapest(problem: Problem, device: torch.device, configs: tuple[Config, ...]) -> Config:
    """Return the tile with the least rounds times elements a tile, divided by the tile's `rate`."""
    multiprocessors = devices.multiprocessors(device)

    def time(config: Config) -> float:
        rounds = -(-problem.tiles(config) // multiprocessors)
        return rounds * config.BLOCK_M * config.BLOCK_N / config.rate

    return min(configs, key=time)
