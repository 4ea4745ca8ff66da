"""Estimated time of a product by a model of few parameters, which a sweep on the device has fitted.

A device works on tiles in rounds, each of all programs that it holds at a time. A tile takes `block` microseconds for
each block of K and `tile` microseconds for all else. In the last round a multiprocessor may have fewer programs, which
are faster. Meanwhile operands are read from memory and from the L2 cache. The longest of these three times counts most.
split-K adds the time to write and read partial products.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tritonite.engine.gemm.table import LEAST_DOT, Config, FixedCosts

FOLDER = Path(__file__).parent / "models"
# Bytes of a line of the L2 cache, and of the sectors that it reads.
LINE, SECTOR = 128, 32
# Tables within a table.
NESTED = ("aten", "cached", "short", "pointers")
# Numbers of split-K slices.
SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


class Costs(NamedTuple):
    """Costs of a device that a sweep fits, in microseconds and bytes a microsecond."""

    # Every product.
    launch: float
    # Bandwidths of memory and of the L2 cache.
    memory: float
    l2: float
    # How sharply the longest of computing, memory and L2 cache counts: the exponent of a norm.
    sharpness: float
    # Every split-K product, each of its slices, and the bandwidth for partial products.
    split: float
    part: float
    partials: float
    # Share by which a block takes longer where a's, or b's, elements along K are not contiguous.
    a_transposed: float
    b_transposed: float
    # Share by which a block takes longer next to all programs that a multiprocessor holds than alone. Waiting overlaps;
    # tensor cores and copies to shared memory do not.
    shared: float = 0.0
    # Share of the L2 bytes that count twice because they come in two lines for 128 bytes.
    lines: float = 0.0
    # Starting specialised warps.
    specialized: float = 0.0


class Work(NamedTuple):
    """A product's work with each of many tiles, independent of the device's speed: arrays over tiles."""

    rounds: Any
    # Programs of a multiprocessor in the last round, as a share of those that it holds.
    last: Any
    # Blocks of K in a slice, and slices.
    steps: Any
    splits: Any
    bytes: Any
    l2_bytes: Any
    # L2 bytes that come in two lines for 128 bytes.
    split_bytes: Any
    partial_bytes: Any
    a_transposed: Any
    b_transposed: Any
    specialized: Any


@dataclass(frozen=True, eq=False)
class Table:
    """The tiles of a device for one element size, with the fitted costs of each: `block` and `tile` are arrays.

    Products of operands in memory are estimated by the table itself, others by the tables in it.
    """

    configs: tuple[Config, ...]
    block: Any
    tile: Any
    # For each tile, whether elements of b along K must be contiguous: 1, must not be: 0, or may be: -1.
    b_inner: tuple[int, ...]
    costs: Costs
    # ATen's products, as if computed with these tiles.
    aten: Table | None = None
    # Products of operands in the L2 cache, where the kernel before left them.
    cached: Table | None = None
    # Those among them with a short K (`Problem.is_short`).
    short: Table | None = None
    # Products of more than few rows whose operands TMA cannot address.
    pointers: Table | None = None
    fixed: FixedCosts = field(default_factory=FixedCosts)

    @functools.cached_property
    def candidates(self) -> Any:
        """Each of the tiles with each number of split-K slices, as `records`."""
        every = [(i, splits) for i in range(len(self.configs)) for splits in SPLITS]
        found = records([self.configs[i]._replace(splits=splits) for i, splits in every])
        found["number"] = [i for i, _ in every]
        found["b_inner"] = np.array(self.b_inner)[found["number"]]
        return found


_FIELDS = (
    *("BLOCK_M", "BLOCK_N", "BLOCK_K", "MORE_N", "num_warps", "num_stages", "splits", "programs"),
    *("transposed", "descriptors", "warp_specialize", "pingpong", "bf16x6", "hopper_fp32"),
)
_RECORD = np.dtype([(name, np.int64) for name in (*_FIELDS, "number", "b_inner")])


def records(configs: Sequence[Config]) -> Any:
    """Return tiles as a record array, with their index as `number` and -1 as `b_inner`."""
    rows = [(*[int(getattr(config, name)) for name in _FIELDS], i, -1) for i, config in enumerate(configs)]
    return np.array(rows, dtype=_RECORD)


def count(problem: Any, tiles: Any) -> Any:
    """Return the number of tiles of all results of a problem, for each of `tiles` (`records`)."""
    swapped = tiles["transposed"] == 1
    rows, columns = np.where(swapped, problem.N, problem.M), np.where(swapped, problem.M, problem.N)
    stride = np.where(swapped | (tiles["descriptors"] == 1), 1, max(1, problem.column_stride))
    columns = -(-columns // stride)
    return problem.batches * -(-rows // tiles["BLOCK_M"]) * stride * -(-columns // (tiles["BLOCK_N"] + tiles["MORE_N"]))


def _misaligned(problem: Any, tiles: Any) -> Any:
    """Return the elements that a tile reads, for each index along K, from two lines of the L2 cache for 128 bytes.

    That is so for an operand loaded by TMA whose rows, or columns, start in the middle of lines. Those that start in
    the middle of sectors count twice.
    """
    a_pitch = problem.a_pitch or (problem.K if problem.a_inner else problem.M)
    b_pitch = problem.b_pitch or (problem.K if problem.b_inner else problem.N)
    a, b = [
        sum([pitch * problem.dtype.itemsize % each != 0 for each in (LINE, SECTOR)]) for pitch in (a_pitch, b_pitch)
    ]
    swapped, rows, columns = tiles["transposed"] == 1, tiles["BLOCK_M"], tiles["BLOCK_N"] + tiles["MORE_N"]
    return tiles["descriptors"] * (a * np.where(swapped, columns, rows) + b * np.where(swapped, rows, columns))


def work(problem: Any, tiles: Any, multiprocessors: int) -> Work:
    """Return the work of a problem (`engine.gemm.problem.Problem`) with each of `tiles` (`records`)."""
    batches, M, N, K = problem.batches, problem.M, problem.N, problem.K
    size, a, b = problem.dtype.itemsize, not problem.a_inner, not problem.b_inner
    swapped = tiles["transposed"] == 1
    found = count(problem, tiles)
    blocks = -(-K // tiles["BLOCK_K"])
    steps = np.maximum(1, -(-blocks // tiles["splits"]))
    splits = -(-blocks // steps)
    rounds = -(-found * splits // (multiprocessors * tiles["programs"]))
    last = -(-found * splits // multiprocessors) - (rounds - 1) * tiles["programs"]
    # All programs read the same few rows, which stay in a multiprocessor's L1 cache.
    read = np.where(tiles["BLOCK_M"] < LEAST_DOT, 0, tiles["BLOCK_M"]) + tiles["BLOCK_N"] + tiles["MORE_N"]
    return Work(
        rounds=rounds,
        last=last / tiles["programs"],
        steps=steps,
        splits=splits,
        bytes=problem.bytes,
        l2_bytes=size * found * blocks * tiles["BLOCK_K"] * read,
        split_bytes=size * found * blocks * tiles["BLOCK_K"] * _misaligned(problem, tiles),
        partial_bytes=np.where(splits > 1, 8 * splits * batches * M * N, 0),
        a_transposed=np.where(swapped, b, a),
        b_transposed=np.where(swapped, a, b),
        specialized=tiles["warp_specialize"],
    )


def microseconds(work: Work, block: Any, tile: Any, costs: Costs, waited: Any = 0.0) -> Any:
    """Return the time with each tile in microseconds, at least `waited` in addition to launches.

    Work and costs are arrays, or tensors that record gradients.
    """
    slower = 1 + costs.a_transposed * work.a_transposed + costs.b_transposed * work.b_transposed
    rounds = work.rounds - 1 + (1 + costs.shared * work.last) / (1 + costs.shared)
    busy = rounds * work.steps * block * slower + work.rounds * tile
    power, l2_bytes = costs.sharpness, work.l2_bytes + costs.lines * work.split_bytes
    longest = (busy**power + (work.bytes / costs.memory) ** power + (l2_bytes / costs.l2) ** power) ** (1 / power)
    split = (work.splits > 1) * (costs.split + costs.part * work.splits) + work.partial_bytes / costs.partials
    launch = costs.launch + costs.specialized * work.specialized
    times, least = launch + longest + split, launch + (work.splits > 1) * costs.split + waited
    return times + (least - times).clip(min=0)


def without_wgmma(table: Table) -> Table:
    """Return the table with kernels for all devices, at the costs of Hopper's until they are fitted."""
    configs = tuple([config._replace(hopper_fp32=False) for config in table.configs])
    return replace(table, configs=configs, cached=None if table.cached is None else without_wgmma(table.cached))


def load(path: Path) -> dict[int, Table]:
    """Read the tables of the package's own files, or of `tritonite tune`'s, by the bytes of an element."""
    kept = json.loads(path.read_text())
    return tables_of(kept.get("products", kept))


def tables_of(kept: Mapping[str, Any]) -> dict[int, Table]:
    """Return tables by the bytes of an element from what `text` wrote as JSON."""
    return {int(size): _table(each) for size, each in kept.items()}


def _table(kept: Mapping[str, Any]) -> Table:
    tiles = kept["tiles"]
    configs = tuple([_config(each["config"]) for each in tiles])
    block, tile = (np.array([each[name] for each in tiles]) for name in ("block", "tile"))
    b_inner = tuple([each.get("b_inner", -1) for each in tiles])
    nested = {name: _table(kept[name]) for name in NESTED if name in kept}
    fixed = FixedCosts(**kept.get("fixed", {}))
    return Table(configs, block, tile, b_inner, Costs(**kept["costs"]), fixed=fixed, **nested)


def _config(kept: Mapping[str, Any]) -> Config:
    """Return the tile of a file, which may be older than the name of `hopper_fp32`."""
    return Config(**{"hopper_fp32" if name == "in_parts" else name: value for name, value in kept.items()})


def save(path: Path, found: Mapping[int, Table]) -> None:
    """Write tables to a file that `load` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text(found)}\n")


def text(found: Mapping[int, Table]) -> str:
    """Return tables as JSON, one line a tile."""
    each = ",\n".join([f'"{size}": {_text(table)}' for size, table in found.items()])
    return f"{{\n{each}\n}}"


def _text(table: Table) -> str:
    costs = {name: float(f"{value:.5g}") for name, value in table.costs._asdict().items()}
    lines = []
    for config, block, tile, b_inner in zip(table.configs, table.block, table.tile, table.b_inner, strict=True):
        given = {name: value for name, value in config._asdict().items() if value != Config._field_defaults.get(name)}
        line = {"config": given, "block": float(f"{block:.4g}"), "tile": float(f"{tile:.4g}")}
        lines.append(json.dumps(line | ({"b_inner": b_inner} if b_inner >= 0 else {})))
    more = "".join([f',\n"{name}": {_text(each)}' for name in NESTED if (each := getattr(table, name))])
    fixed = "" if table.fixed == FixedCosts() else f'"fixed": {json.dumps(table.fixed._asdict())},\n'
    return f'{{"costs": {json.dumps(costs)},\n{fixed}"tiles": [\n' + ",\n".join(lines) + f"\n]{more}}}"
