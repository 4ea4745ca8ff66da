"""Tables of devices that nobody measured, estimated from a measured device's by the numbers of data sheets.

What depends on one unit of a device is scaled by the ratio of that unit's rates: blocks of K by the tensor cores of a
multiprocessor, traffic by the bandwidth of memory, L2 traffic by the number of multiprocessors. Launches and the ends
of a tile keep their times. Where ATen is faster is not estimated, so no product is left to it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tritonite.devices.models import Model
from tritonite.engine.gemm.cost import Table
from tritonite.engine.gemm.table import LEAST_DOT, Config, GemmLimits

# Six products of bfloat16 terms make one of float32.
_TERMS = 6
# The first architectures with TMA, without which float32 is multiplied as float32.
_WITH_TMA = ("sm_90", "sm_100", "sm_120")
# Rows and columns of the largest float32 tile by bfloat16 terms that Triton compiles for sm_100 (`Work.facts`).
_LARGEST_ROWS, _LARGEST_COLUMNS = 128, 64
# Shared memory of a program that Triton keeps for itself.
_RESERVED = 1024


def estimated(tables: dict[int, Table], measured: Model, model: Model) -> dict[int, Table]:
    """Return a model's tables by the bytes of an element, from those of a measured model."""
    return {size: _table(table, size, measured, model) for size, table in tables.items()}


def _table(table: Table, size: int, measured: Model, model: Model) -> Table:
    rows: dict[Config, tuple[float, float, int]] = {}
    for config, block, tile, b_inner in zip(table.configs, table.block, table.tile, table.b_inner, strict=True):
        if not _possible(config, model):
            continue
        own = _portable(config, size, model)
        # Programs that share a multiprocessor share its time.
        slower = _seconds(own, size, model) / _seconds(config, size, measured) * own.programs / config.programs
        rows.setdefault(own, (block * slower, tile, b_inner))
    memory = model.bandwidth / measured.bandwidth
    costs = table.costs._replace(
        memory=table.costs.memory * memory,
        l2=table.costs.l2 * model.multiprocessors / measured.multiprocessors,
        partials=table.costs.partials * memory,
    )
    has_room = model.l2 * 2**20 > 2 * GemmLimits().cached_bytes

    def nested(each: Table | None, wanted: bool = has_room) -> Table | None:
        return None if each is None or not wanted else _table(each, size, measured, model)

    return replace(
        table,
        configs=tuple(rows),
        block=np.array([each[0] for each in rows.values()]),
        tile=np.array([each[1] for each in rows.values()]),
        b_inner=tuple([each[2] for each in rows.values()]),
        costs=costs,
        aten=None,
        cached=nested(table.cached),
        short=nested(table.short),
        pointers=nested(table.pointers, True),
    )


def _possible(config: Config, model: Model) -> bool:
    """Return whether a tile's kernel runs on a model: WGMMA is Hopper's alone, TMA newer devices'."""
    if config.warp_specialize or (config.descriptors and model.architecture not in _WITH_TMA):
        return False
    elements = config.BLOCK_M * config.BLOCK_N
    return not config.bf16x6 or elements <= _LARGEST_ROWS * _LARGEST_COLUMNS


def _portable(config: Config, size: int, model: Model) -> Config:
    """Return a tile with a kernel for all devices, and with the programs that shared memory has room for."""
    columns = config.BLOCK_N
    if config.bf16x6 and columns > _LARGEST_COLUMNS:
        config = config._replace(BLOCK_M=_LARGEST_ROWS, BLOCK_N=_LARGEST_COLUMNS, num_warps=8)
    config = config._replace(hopper_fp32=False, bf16x6=config.bf16x6 and model.architecture in _WITH_TMA)
    needed = config.shared(size, size if config.descriptors else 0) + _RESERVED
    return config._replace(programs=max(1, min(config.programs, model.shared_memory * 1024 // needed)))


def _seconds(config: Config, size: int, model: Model) -> float:
    """Return the time of a multiprocessor for a number of operations, up to a factor that all models share."""
    if config.BLOCK_M < LEAST_DOT or (size == 4 and not config.bf16x6):
        rate = model.float32
    else:
        rate = model.float16 / (_TERMS if config.bf16x6 else 1)
    return model.multiprocessors / rate
