"""The tiles that attention is cut into, by the kind of device, the bytes of an element and the size of a head."""

from __future__ import annotations

from typing import Any, NamedTuple

# The bytes of keys and values that a second-level cache keeps for programs that read the same.
CACHED = 32 * 2**20


class Tile(NamedTuple):
    """Queries and keys that a program takes at a time."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int = 4
    num_stages: int = 2

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Tiles(NamedTuple):
    """Those of the forward pass, of the gradient of queries, and of those of keys and values."""

    forward: Tile
    query: Tile
    key: Tile


# By the bytes of an element, and by the largest head that they are for. Registers hold those of half types on sm_90.
_NVIDIA = {
    2: {
        64: Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
        128: Tiles(Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
        256: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    },
    4: {
        64: Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
        128: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1)),
        256: Tiles(Tile(32, 32, 8, 1), Tile(64, 16, 4, 1), Tile(16, 32, 8, 1)),
    },
}
# For 64 KiB of shared memory, as AMD's multiprocessors have.
_SMALL = {
    2: {
        128: Tiles(Tile(128, 64, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
        256: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    },
    4: {
        128: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        256: Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    },
}
# In the interpreter every block costs milliseconds.
_INTERPRETER = {size: {256: Tiles(*[Tile(128, 128)] * 3)} for size in (2, 4)}
_TABLES = {"nvidia": _NVIDIA, "none": _NVIDIA, "amd": _SMALL, "interpreter": _INTERPRETER}


# What the tiles of _NVIDIA need of shared memory: as much as sm_90 and sm_100 have.
_LARGE = 220 * 1024


def tiles(kind: str, size: int, head: int, shared: int, biased: bool) -> Tiles:
    """Those for elements of `size` bytes and heads of at most `head` elements, a power of two to 256.

    `shared` are the bytes of shared memory that a program may have. A bias has registers of its own, which the forward
    pass of half types takes from half of the keys.
    """
    table = _SMALL if _TABLES[kind] is _NVIDIA and shared < _LARGE else _TABLES[kind]
    found = table[size][min(most for most in table[size] if head <= most)]
    if biased and table is _NVIDIA and size == 2:
        return found._replace(forward=found.forward._replace(BLOCK_N=found.forward.BLOCK_N // 2))
    return found
