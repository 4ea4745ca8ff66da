"""Tiles of the linear algebra kernels, and the batches that are worth a launch, for each kind of device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritonite import devices
from tritonite.devices.tables import Tables
from tritonite.engine.iteration import power_of_2
from tritonite.errors import Decline
from tritonite.runtime.contract import settings

# The smallest side of a tile. Fewer sizes of tiles mean fewer kernels to compile.
_LEAST_SIDE = 4


class Faster(NamedTuple):
    """Batches that a method solves faster than ATen: sides of matrices, and the fewest matrices.

    double: also in float64, which has not been measured. ATen solves one matrix after another there, too.
    """

    least_side: int
    most_side: int
    batch: int
    double: bool = False


class LinalgTable(NamedTuple):
    """Parameters of a kind of device.

    largest: the most rows and columns of a matrix.
    tile_bytes: bytes of the largest tile that is factored. A larger one would not stay in registers.
    warp_bytes: bytes of a tile that one warp holds.
    most_warps: warps of the largest program.
    right_hand_sides: most columns of a block of right-hand sides.
    most_rotated: the most columns that a program rotates by Jacobi's methods, which hold two tiles in registers.
    rotated_bytes: `warp_bytes` of Jacobi's methods.
    rotated_block: columns of the blocks that Jacobi's methods divide larger matrices into, whose tiles have two.
    block: rows and columns of the blocks that larger matrices are divided into.
    faster: by method, the batches that were measured faster than ATen's. ATen serves all others, and matrices that
        are divided into blocks, unless `faster_only` is off.
    """

    largest: int = 128
    tile_bytes: int = 2**16
    warp_bytes: int = 4096
    most_warps: int = 16
    right_hand_sides: int = 32
    most_rotated: int = 64
    rotated_bytes: int = 2048
    rotated_block: int = 32
    block: int = 64
    faster: tuple[tuple[str, Faster], ...] = ()


LINALG: Tables[LinalgTable] = Tables("linalg", dict.fromkeys(devices.KINDS, LinalgTable()))
# Where ATen solves one matrix after another, batches are bounded by its time a matrix and the kernels' for a thousand.
LINALG["nvidia"] = LinalgTable(
    faster=(
        ("cholesky_solve", Faster(1, 12, 1000)),
        ("eigh", Faster(33, 64, 8, double=True)),
        ("inverse", Faster(1, 32, 1000)),
        ("ldl", Faster(1, 32, 1, double=True)),
        ("qr", Faster(1, 64, 16, double=True)),
        ("slogdet", Faster(1, 64, 1000)),
        ("solve", Faster(1, 8, 1000)),
        ("svd", Faster(33, 64, 8, double=True)),
        ("triangular", Faster(1, 32, 1000)),
    )
)


class Tile(NamedTuple):
    """The matrices, rows and columns that a program holds, and its warps."""

    matrices: int
    rows: int
    columns: int
    num_warps: int


def linalg_table() -> LinalgTable:
    """Return the table of the current device."""
    return LINALG[devices.current.kind]


def fits_tile(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Return whether a program holds a whole matrix."""
    table = linalg_table()
    size = power_of_2(rows) * power_of_2(columns) * dtype.itemsize
    return max(rows, columns) <= table.largest and size <= table.tile_bytes


def panel_columns(rows: int, dtype: torch.dtype) -> int:
    """Return the columns of a panel of all rows that a program factors, or 0 for fewer than `_LEAST_SIDE`."""
    table = linalg_table()
    columns = min(table.block, table.tile_bytes // (power_of_2(rows) * dtype.itemsize))
    return columns if columns >= _LEAST_SIDE else 0


def check_panels(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Decline matrices with more rows than a panel of `_LEAST_SIDE` columns may have."""
    if not panel_columns(rows, dtype):
        most = linalg_table().tile_bytes // (_LEAST_SIDE * dtype.itemsize)
        raise Decline(f"{dtype} matrices of {rows} by {columns}; up to {most} rows are factored by panels")


def rotates_whole(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Return whether a program holds a whole matrix, and rotates its columns."""
    return columns <= linalg_table().most_rotated and fits_tile(rows, columns, dtype)


def aten_is_faster(method: str, side: int, n_matrices: int, dtype: torch.dtype) -> bool:
    """Return whether a method was not measured faster than ATen's for a batch; never for one without matrices."""
    faster = dict(linalg_table().faster).get(method)
    if faster is None:
        return n_matrices > 0
    serves = faster.least_side <= side <= faster.most_side and n_matrices >= faster.batch
    return n_matrices > 0 and not (serves and (faster.double or dtype is torch.float32))


def whole_matrices(rows: int, columns: int, n_matrices: int, dtype: torch.dtype, warp_bytes: int = 0) -> Tile:
    """Return the tile that holds whole matrices: as many small ones as fill a warp, or as many warps as one needs.

    `warp_bytes` are those of a warp's tile, by default the table's. In invariant mode the tile depends on a matrix
    alone, because the order of a sum depends on the layout of the tile.
    """
    table = linalg_table()
    rows, columns = max(_LEAST_SIDE, power_of_2(rows)), max(_LEAST_SIDE, power_of_2(columns))
    size = rows * columns * dtype.itemsize
    warp_bytes = warp_bytes or table.warp_bytes
    matrices = max(1, warp_bytes // size)
    if not settings().invariant:
        matrices = min(matrices, power_of_2(n_matrices))
    return Tile(matrices, rows, columns, min(table.most_warps, max(1, matrices * size // warp_bytes)))


def right_hand_sides(rows: int, columns: int, n_matrices: int, dtype: torch.dtype) -> Tile:
    """Return the tile that holds all rows and a block of columns of right-hand sides."""
    most = linalg_table().right_hand_sides
    return whole_matrices(rows, most if settings().invariant else min(columns, most), n_matrices, dtype)


def rotated_matrices(rows: int, columns: int, n_matrices: int, dtype: torch.dtype) -> Tile:
    """Return the tile that holds whole matrices and as many numbers of vectors."""
    return whole_matrices(rows, columns, n_matrices, dtype, linalg_table().rotated_bytes)
