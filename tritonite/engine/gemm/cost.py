"""What a product takes on a device by a model of few parameters, which a sweep on that device has fitted.

A device takes tiles in rounds of as many as it holds. A tile takes `block` microseconds for each block of K and `tile`
besides, beside as many others as a multiprocessor holds, and less where the last round leaves it fewer. Meanwhile what
is read goes through memory and the L2 cache: of the three the longest counts most. Partial products of split-K are
written and read once more.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tritonite.engine.gemm.table import Config
from tritonite.runtime import cache

FOLDER = Path(__file__).parent / "models"
# The bytes of a line of the L2 cache, and of the sectors that it reads.
LINE, SECTOR = 128, 32
# What tensor cores take of rows at least.
LEAST_ROWS = 16
# The tables that belong to another.
BESIDE = ("aten", "cached", "short", "pointers")
# In how many parts K may be taken.
SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


class Costs(NamedTuple):
    """Of a device: microseconds, bytes a microsecond, and how sharply the longest of three counts (`sharpness`).

    `launch` is paid by every product, `split` by every product in parts and `part` for each of them. Blocks take so
    much longer, as a share, where rows of the first operand (`a_transposed`) or columns of the second are not along K.
    `shared` is how much longer a block takes beside all programs that a multiprocessor holds than it would by itself:
    waiting overlaps, and tensor cores and what is copied to shared memory do not. Bytes that come in two lines of the
    L2 cache count so much more there, as a share (`lines`). Of halves in memory the whole of both counts: on 216 such
    problems the tiles that the model chooses take 1.017 of the best one's time so, and 1.024 otherwise. `specialized`
    is what it takes besides to start specialised warps: with it those on 300 problems of 17 to 128 rows take 1.026 of
    the best one's time, and 1.031 otherwise.
    """

    launch: float
    memory: float
    l2: float
    sharpness: float
    split: float
    part: float
    partials: float
    a_transposed: float
    b_transposed: float
    shared: float = 0.0
    lines: float = 0.0
    specialized: float = 0.0


class Work(NamedTuple):
    """What a product costs with each of many tiles, in numbers that know no speed of the device.

    `last` is what part of the programs that a multiprocessor holds there are in the last of the rounds.
    """

    rounds: Any
    last: Any
    steps: Any
    splits: Any
    bytes: Any
    l2_bytes: Any
    split_bytes: Any
    partial_bytes: Any
    a_transposed: Any
    b_transposed: Any
    specialized: Any


@dataclass(frozen=True, eq=False)
class Table:
    """The tiles of a device for one size of elements, and what each costs: `block` and `tile` are arrays.

    `b_inner` says whether elements of b along K have to be next to each other, 1, must not be, 0, or may, -1. `aten` is
    what ATen's products cost there, as if they were cut into its tiles, where that has been fitted, and `cached` what
    all cost where operands are in the L2 cache, as those are that were written or read right before. `short` is of
    products with a short K there, of which programs that load through pointers are many at a time. `pointers` is of
    tiles for more than a few rows of operands that cannot have tensor descriptors.
    """

    configs: tuple[Config, ...]
    block: Any
    tile: Any
    b_inner: tuple[int, ...]
    costs: Costs
    aten: Table | None = None
    cached: Table | None = None
    short: Table | None = None
    pointers: Table | None = None

    @functools.cached_property
    def candidates(self) -> Any:
        """Each of the tiles with K in each number of parts, as `records`."""
        every = [(i, splits) for i in range(len(self.configs)) for splits in SPLITS]
        found = records([self.configs[i]._replace(splits=splits) for i, splits in every])
        found["number"] = [i for i, _ in every]
        found["b_inner"] = np.array(self.b_inner)[found["number"]]
        return found


_FIELDS = (
    *("BLOCK_M", "BLOCK_N", "BLOCK_K", "MORE_N", "num_warps", "num_stages", "splits", "programs"),
    *("transposed", "descriptors", "warp_specialize", "pingpong", "bf16x6", "in_parts"),
)
_RECORD = np.dtype([(name, np.int64) for name in (*_FIELDS, "number", "b_inner")])


def records(configs: Sequence[Config]) -> Any:
    """Tiles as a record array; `number` and `b_inner` are for who knows them."""
    rows = [(*[int(getattr(config, name)) for name in _FIELDS], i, -1) for i, config in enumerate(configs)]
    return np.array(rows, dtype=_RECORD)


def count(problem: Any, tiles: Any) -> Any:
    """How many tiles the results of a problem are cut into, with each of `tiles`, which are `records`."""
    swapped = tiles["transposed"] == 1
    rows, columns = np.where(swapped, problem.N, problem.M), np.where(swapped, problem.M, problem.N)
    apart = np.where(swapped | (tiles["descriptors"] == 1), 1, max(1, problem.columns_apart))
    columns = -(-columns // apart)
    return problem.batches * -(-rows // tiles["BLOCK_M"]) * apart * -(-columns // (tiles["BLOCK_N"] + tiles["MORE_N"]))


def _split(problem: Any, tiles: Any) -> Any:
    """How many elements that a tile reads for each of K come in two lines of the L2 cache for 128 bytes.

    So do those of a descriptor's operand whose rows, or columns, begin in the middle of lines. Those that begin within
    sectors count twice: of 35 problems with K, N or the rows of columns an odd multiple of 8, chosen tiles take 1.03
    of the best one's time so, and 1.05 otherwise. 1,280 rows by 8,960, K = 3,592, take 155 us, and 133 were estimated.
    """
    a_pitch = problem.a_pitch or (problem.K if problem.a_inner else problem.M)
    b_pitch = problem.b_pitch or (problem.K if problem.b_inner else problem.N)
    a, b = [
        sum([pitch * problem.dtype.itemsize % each != 0 for each in (LINE, SECTOR)]) for pitch in (a_pitch, b_pitch)
    ]
    swapped, rows, columns = tiles["transposed"] == 1, tiles["BLOCK_M"], tiles["BLOCK_N"] + tiles["MORE_N"]
    return tiles["descriptors"] * (a * np.where(swapped, columns, rows) + b * np.where(swapped, rows, columns))


def work(problem: Any, tiles: Any, multiprocessors: int) -> Work:
    """The work of a problem (`engine.gemm.problem.Problem`) with each of `tiles`, which are `records`."""
    batches, M, N, K = problem.batches, problem.M, problem.N, problem.K
    size, a, b = problem.dtype.itemsize, not problem.a_inner, not problem.b_inner
    swapped = tiles["transposed"] == 1
    found = count(problem, tiles)
    blocks = -(-K // tiles["BLOCK_K"])
    steps = np.maximum(1, -(-blocks // tiles["splits"]))
    splits = -(-blocks // steps)
    rounds = -(-found * splits // (multiprocessors * tiles["programs"]))
    beside = -(-found * splits // multiprocessors) - (rounds - 1) * tiles["programs"]
    # All programs read the same few rows, which a multiprocessor's own cache has.
    read = np.where(tiles["BLOCK_M"] < LEAST_ROWS, 0, tiles["BLOCK_M"]) + tiles["BLOCK_N"] + tiles["MORE_N"]
    return Work(
        rounds=rounds,
        last=beside / tiles["programs"],
        steps=steps,
        splits=splits,
        bytes=problem.bytes,
        l2_bytes=size * found * blocks * tiles["BLOCK_K"] * read,
        split_bytes=size * found * blocks * tiles["BLOCK_K"] * _split(problem, tiles),
        partial_bytes=np.where(splits > 1, 8 * splits * batches * M * N, 0),
        a_transposed=np.where(swapped, b, a),
        b_transposed=np.where(swapped, a, b),
        specialized=tiles["warp_specialize"],
    )


def microseconds(work: Work, block: Any, tile: Any, costs: Costs, waited: Any = 0.0) -> Any:
    """What each tile takes, besides launches no less than is `waited`; of arrays, or tensors that record gradients."""
    slower = 1 + costs.a_transposed * work.a_transposed + costs.b_transposed * work.b_transposed
    rounds = work.rounds - 1 + (1 + costs.shared * work.last) / (1 + costs.shared)
    busy = rounds * work.steps * block * slower + work.rounds * tile
    power, l2_bytes = costs.sharpness, work.l2_bytes + costs.lines * work.split_bytes
    longest = (busy**power + (work.bytes / costs.memory) ** power + (l2_bytes / costs.l2) ** power) ** (1 / power)
    parts = (work.splits > 1) * (costs.split + costs.part * work.splits) + work.partial_bytes / costs.partials
    launch = costs.launch + costs.specialized * work.specialized
    times, least = launch + longest + parts, launch + (work.splits > 1) * costs.split + waited
    return times + (least - times).clip(min=0)


def without_wgmma(table: Table) -> Table:
    """The same tiles by kernels for all devices; what they cost is Hopper's, until it is fitted."""
    configs = tuple([config._replace(in_parts=False) for config in table.configs])
    return replace(table, configs=configs, cached=None if table.cached is None else without_wgmma(table.cached))


def load(path: Path) -> dict[int, Table]:
    """The tables of a file, by the bytes of an element."""
    return {int(size): _table(kept) for size, kept in json.loads(path.read_text()).items()}


def _table(kept: Mapping[str, Any]) -> Table:
    tiles = kept["tiles"]
    configs = tuple([Config(**each["config"]) for each in tiles])
    block, tile = (np.array([each[name] for each in tiles]) for name in ("block", "tile"))
    b_inner = tuple([each.get("b_inner", -1) for each in tiles])
    beside = {name: _table(kept[name]) for name in BESIDE if name in kept}
    return Table(configs, block, tile, b_inner, Costs(**kept["costs"]), **beside)


def own(name: str) -> Path:
    """The file of what this machine has fitted to a device of this name, which need not exist."""
    return cache.folder() / f"{name.replace(' ', '_')}.json"


@functools.lru_cache(maxsize=8)
def tables(name: str, architecture: str) -> dict[int, Table]:
    """By the bytes of an element, the tables for a device of this name, or else for its architecture, such as sm_90.

    Those fitted on this machine go before those that come with Tritonite.
    """
    return _fitted_here(name) or _shipped(name, architecture)


def _fitted_here(name: str) -> dict[int, Table]:
    where = ""
    try:
        where = f" in {own(name)}"
        return load(own(name)) if own(name).exists() else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cache.warn_once(f"the model of this device{where} cannot be read, and is left out: {error!r}")
        return {}


def _shipped(name: str, architecture: str) -> dict[int, Table]:
    for path in (FOLDER / f"{name.replace(' ', '_')}.json", FOLDER / f"{architecture}.json"):
        if path.exists():
            return load(path)
    return {}


def save(path: Path, found: Mapping[int, Table]) -> None:
    """Write tables to a file that `load` reads, a line for each of their tiles."""
    text = ",\n".join([f'"{size}": {_text(table)}' for size, table in found.items()])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{{\n{text}\n}}\n")
    tables.cache_clear()


def _text(table: Table) -> str:
    costs = {name: float(f"{value:.5g}") for name, value in table.costs._asdict().items()}
    lines = []
    for config, block, tile, b_inner in zip(table.configs, table.block, table.tile, table.b_inner, strict=True):
        given = {name: value for name, value in config._asdict().items() if value != Config._field_defaults.get(name)}
        line = {"config": given, "block": float(f"{block:.4g}"), "tile": float(f"{tile:.4g}")}
        lines.append(json.dumps(line | ({"b_inner": b_inner} if b_inner >= 0 else {})))
    more = "".join([f',\n"{name}": {_text(each)}' for name in BESIDE if (each := getattr(table, name))])
    return f'{{"costs": {json.dumps(costs)},\n"tiles": [\n' + ",\n".join(lines) + f"\n]{more}}}"
