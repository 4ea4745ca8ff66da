"""The tiles that products of matrices are cut into, by the kind of device and the bytes of an element."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Config(NamedTuple):
    """Triton's meta-parameters for a product; `splits` is in how many parts K is taken.

    `rate` is how fast tiles of this size are done beside others, `programs` how many a multiprocessor takes. `bf16x6`
    multiplies float32 as three of bfloat16 each, where tensor cores are fast, and `in_parts` does so by Hopper's kernel
    (`engine.gemm.hopper_parts`), whose tiles have 64 rows for every four warps. With `split_store` a tile is written in
    two, by way of half the shared memory. With `warp_specialize` one warp copies and `num_warps` others multiply.
    With `pingpong` besides, each group of four warps has whole tiles of its own, one group's after the other's, so that
    one multiplies while the other writes (CUTLASS calls it so); K is in one part then.
    With `transposed` what is computed is the transpose, of b's columns by a's rows, which may be fewer than tensor
    cores take of rows. A tile has MORE_N columns besides.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int = 4
    num_stages: int = 3
    rate: float = 1.0
    programs: int = 1
    splits: int = 1
    descriptors: bool = False
    split_store: bool = False
    GROUP_M: int = 8
    bf16x6: bool = False
    warp_specialize: bool = False
    transposed: bool = False
    MORE_N: int = 0
    in_parts: bool = False
    pingpong: bool = False

    @property
    def options(self) -> dict[str, Any]:
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages")
        return {name: getattr(self, name) for name in names}

    def shared(self, size: int, result_size: int) -> int:
        """The bytes of shared memory for operands of `size` and results of `result_size` bytes an element."""
        columns = self.BLOCK_N // (2 if self.split_store else 1) + self.MORE_N
        operands = self.num_stages * (self.BLOCK_M + self.BLOCK_N + self.MORE_N) * self.BLOCK_K * size
        return operands + (2 if self.pingpong else 1) * self.BLOCK_M * columns * result_size


_DESCRIBED = (
    Config(128, 256, 64, 8, 4, 1.02, descriptors=True, split_store=True, GROUP_M=16, warp_specialize=True),
    Config(128, 256, 64, 8, 4, 1.0, descriptors=True, split_store=True, GROUP_M=16),
    Config(128, 128, 128, 8, 3, 0.9, descriptors=True),
    Config(64, 128, 128, 4, 4, 0.7, descriptors=True),
    Config(64, 64, 128, 4, 4, 0.5, descriptors=True),
)
_BYTES = tuple([config._replace(BLOCK_K=128) for config in _DESCRIBED if not config.warp_specialize])
_HALVES = (
    Config(128, 128, 64, 8, 3, 1.0),
    Config(64, 128, 64, 4, 4, 0.8),
    Config(64, 64, 64, 4, 4, 0.6, programs=2),
    Config(32, 64, 64, 4, 4, 0.35, programs=2),
)
_FLOATS = (
    Config(128, 64, 32, 8, 3, 0.9, programs=2, bf16x6=True),
    Config(64, 64, 32, 4, 3, 0.7, programs=2, bf16x6=True),
    Config(32, 32, 32, 4, 3, 0.3),
)
# For products of groups of rows besides. A rule for devices without a model has none as large (`_Work.constants`).
LARGE_FLOATS = Config(128, 128, 32, 8, 3, 1.0, bf16x6=True)
_DOUBLES = (Config(64, 64, 16, 4, 3, 1.0), Config(32, 32, 16, 4, 3, 0.6))
_AMD = tuple([config._replace(num_stages=2, programs=1) for config in _HALVES])
_AMD_FLOATS = tuple([config._replace(bf16x6=False) for config in _FLOATS])
_INTERPRETED = (Config(64, 64, 64),)

_NVIDIA_POINTERS = {1: _HALVES, 2: _HALVES, 4: _FLOATS, 8: _DOUBLES}
THROUGH_POINTERS: dict[str, dict[int, tuple[Config, ...]]] = {
    "nvidia": _NVIDIA_POINTERS,
    "none": _NVIDIA_POINTERS,
    "amd": {1: _AMD, 2: _AMD, 4: _AMD_FLOATS, 8: _DOUBLES},
    "interpreter": dict.fromkeys((1, 2, 4, 8), _INTERPRETED),
}
_NVIDIA_DESCRIPTORS = {1: _BYTES, 2: _DESCRIBED}
THROUGH_DESCRIPTORS: dict[str, dict[int, tuple[Config, ...]]] = {
    "nvidia": _NVIDIA_DESCRIPTORS,
    "none": _NVIDIA_DESCRIPTORS,
    "amd": {},
    "interpreter": {2: (Config(64, 64, 64, descriptors=True),)},
}
# Of float8 operands whose sums over blocks are added in float32, for which there are the fewer registers.
BLOCKWISE: dict[str, tuple[Config, ...]] = {
    "nvidia": (
        Config(192, 128, 128, 12, 4, 1.3, descriptors=True, GROUP_M=16, warp_specialize=True),
        Config(128, 128, 128, 8, 6, 1.25, descriptors=True, split_store=True, GROUP_M=32, warp_specialize=True),
        Config(256, 128, 128, 8, 4, 1.0, descriptors=True, split_store=True),
        Config(64, 128, 128, 4, 4, 0.8, descriptors=True),
        Config(64, 64, 128, 4, 4, 0.5, descriptors=True),
    )
}
BLOCKWISE["none"] = BLOCKWISE["nvidia"]

# For one row, and for few: where elements along K are next to each other in b, and where those of its rows are. Of
# tiles with all rows, or else the most, the first that fill the device once, or else the last.
ONE_ROW: dict[str, dict[bool, tuple[Config, ...]]] = {
    "nvidia": {
        True: (Config(1, 8, 512, programs=4), Config(1, 16, 256, 8)),
        False: (Config(1, 64, 128, programs=4),),
    },
    "interpreter": dict.fromkeys((True, False), (Config(1, 64, 128),)),
}
_FEW_PARTS = Config(16, 64, 32, 4, 3, programs=8, bf16x6=True)
_FEW_NVIDIA: dict[bool, dict[int, tuple[Config, ...]]] = {
    True: {size: (Config(16, 32, 1024 // size, 4, 4), Config(16, 64, 256 // size, 4, 4)) for size in (1, 2)}
    | {
        4: (Config(2, 8, 512, 2), Config(4, 4, 512), _FEW_PARTS),
        8: (Config(2, 8, 256), Config(4, 4, 256), Config(8, 4, 256)),
    },
    False: {size: (Config(16, 64, 128 // size, 4, 4, programs=2),) for size in (1, 2)}
    | {
        4: (Config(2, 64, 64, 2, programs=4), Config(4, 64, 32, programs=4), _FEW_PARTS),
        8: tuple([Config(rows, 64, 128 // rows, programs=4) for rows in (2, 4, 8)]),
    },
}
FEW_ROWS: dict[str, dict[bool, dict[int, tuple[Config, ...]]]] = {
    "nvidia": _FEW_NVIDIA,
    "interpreter": dict.fromkeys((True, False), dict.fromkeys((1, 2, 4, 8), (Config(16, 64, 64),))),
}
for _kind in ("none", "amd"):
    ONE_ROW[_kind], FEW_ROWS[_kind] = ONE_ROW["nvidia"], FEW_ROWS["nvidia"]


def every(kind: str) -> Iterator[tuple[int, Config]]:
    """All tiles of a kind of device, with the bytes of an element that they are for."""
    for table in (THROUGH_DESCRIPTORS, THROUGH_POINTERS):
        yield from [(size, config) for size, configs in table[kind].items() for config in configs]
    yield from [(2, config) for configs in ONE_ROW[kind].values() for config in configs]
    yield from [
        (size, config) for table in FEW_ROWS[kind].values() for size, configs in table.items() for config in configs
    ]
    yield from [(1, config) for config in BLOCKWISE.get(kind, ())]
