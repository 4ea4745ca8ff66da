"""Tables of devices: tiles by rule, for devices without fitted costs, and limits of sizes that decide among tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables

# The least rows, and the least elements along K, of a tensor core product.
LEAST_DOT = 16


class Config(NamedTuple):
    """Triton's meta-parameters for a product, called a tile."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    # Warps that multiply. A specialised kernel has one more, which copies.
    num_warps: int = 4
    num_stages: int = 3
    # Relative speed of one element of this tile, for `select.rule`.
    rate: float = 1.0
    # Programs resident on a multiprocessor.
    programs: int = 1
    # Slices of K (split-K).
    splits: int = 1
    # Whether TMA loads the operands.
    descriptors: bool = False
    # Whether a tile is stored in two halves, through half the shared memory.
    split_store: bool = False
    GROUP_M: int = 8
    # Whether float32 is multiplied by six products of bfloat16 terms, where tensor cores are fast.
    # regressions: gemm_bf16x6
    bf16x6: bool = False
    warp_specialize: bool = False
    # Whether the transpose of the result is computed: M may be smaller than a tensor core's rows.
    transposed: bool = False
    # Columns of a tile in addition to BLOCK_N.
    MORE_N: int = 0
    # Whether Hopper's kernel computes these six products (`kernels.hopper_fp32`); a tile has 64 rows for every four
    # warps.
    hopper_fp32: bool = False
    # Whether each four specialised warps have tiles of their own, so that one multiplies while another stores. Without
    # split-K. regressions: gemm_pingpong, gemm_pingpong_many_tiles, gemm_pingpong_one_round
    pingpong: bool = False

    def shared(self, size: int, result_size: int) -> int:
        """Return the bytes of shared memory for operands of `size` and results of `result_size` bytes an element."""
        columns = self.BLOCK_N // (2 if self.split_store else 1) + self.MORE_N
        operands = self.num_stages * (self.BLOCK_M + self.BLOCK_N + self.MORE_N) * self.BLOCK_K * size
        return operands + (2 if self.pingpong else 1) * self.BLOCK_M * columns * result_size


class FixedCosts(NamedTuple):
    """Costs of a device that a sweep does not refit, in microseconds unless a comment says otherwise.

    The defaults are those of sm_90.
    """

    # A warp's load of one element a thread through pointers, and the factor for loads of twice the width.
    load: float = 0.0018
    wider_load: float = 1.3
    # Additional time of such a load of float32 for tensor cores' second operand: Triton (3.6) lays it out across the
    # order of arrival, and all 32 elements of a warp are in one shared memory bank.
    bank_conflicts: float = 0.032
    # Additional time of such a load along K where bfloat16 terms leave few registers for the second operand.
    # regressions: gemm_few_registers
    few_registers: float = 0.0083
    # Latency of a block of K from memory, for tensor cores' tiles and for few rows.
    block_latency: float = 0.8
    few_rows_latency: float = 0.6
    # Latency of a block of few rows from the L2 cache, for 16-bit floats and for float32.
    few_rows_l2_latency_16: float = 0.15
    few_rows_l2_latency_32: float = 0.3
    # Bytes a microsecond that a multiprocessor loads from the L2 cache through pointers, whatever its programs.
    l2_bandwidth: float = 6e4
    # Share of a thread's registers for a prefetched block of elements of less than 4 bytes. With more, the assembler
    # waits for each load by itself. regressions: gemm_prefetch_registers
    prefetch_registers: float = 1 / 8
    # A padded copy in addition to its traffic, and bytes a microsecond of that traffic.
    copy: float = 1.3
    copy_bandwidth: float = 4e6
    # An epilogue element of a thread: loaded by a warp that multiplies, by a specialised warp, or copied by TMA, which
    # is possible for tiles of fewer elements than `added_by_tma_below`.
    added: float = 0.03
    added_specialized: float = 0.06
    added_by_tma: float = 0.011
    added_by_tma_below: int = 256 * 160
    # Shares of these times for which tensor cores wait with ping-pong: while the other consumer multiplies, and with a
    # K so short that both consumers load at the same time.
    pingpong_wait: float = 0.3
    pingpong_wait_short: float = 0.2
    # Share of a kernel's time below which ATen is taken to be faster.
    aten_share: float = 0.87

    def few_rows_l2_latency(self, size: int) -> float:
        """Return the latency of a block of few rows from the L2 cache, for elements of `size` bytes."""
        return self.few_rows_l2_latency_16 if size == 2 else self.few_rows_l2_latency_32


class GemmLimits(NamedTuple):
    """Limits of sizes that decide among tiles and layouts, and tiles of symmetric products.

    The defaults are those of sm_90.
    """

    # Bytes of operands and result, and operations, up to which a product is costed with operands in the L2 cache, where
    # the kernel before left them. With more operations tensor cores limit it, and not the cache.
    cached_bytes: float = 19 * 2**20
    cached_operations: float = 4e9
    # K up to which such products of fp16 and bf16 have tiles of their own (`Problem.is_short`), and up to which tiles
    # of 16-bit floats, and of few rows, have few warps.
    short_k: int = 128
    # K up to which tiles of float32 for tensor cores have few warps. regressions: gemm_warps_short_k
    short_k_fp32: int = 32
    # K below which a product writes as much as it reads.
    read_k: int = 512
    # K up to which a product is a sum of outer products, and the most elements and columns of its tiles.
    outer_k: int = 8
    outer_elements: int = 4096
    outer_columns: int = 64
    # The least elements along K of a split-K slice, which also has two blocks at least, and rounds of programs up to
    # which K may be split.
    slice_k: int = 128
    slice_rounds: int = 2
    # Columns of a program that adds split-K's partial products, and the elements of all slices that it loads.
    reduced_columns: int = 128
    reduced_elements: int = 2048
    # Elements of a block for each warp, where K or N is shorter than a tile's block and fewer warps suffice.
    # regressions: gemm_warps_one_row, gemm_warps_few_rows
    warp_elements: int = 1024
    # The most columns of a tile of few rows for a K of one tensor core product.
    few_rows_columns: int = 128
    # M up to which narrow tiles are considered: less than 64 rows or columns, and less than 128 of the other. With more
    # rows they are for results too small to fill a device.
    narrow_rows: int = 192
    # Rows and columns from which on tiles of 64 rows and more than 128 columns are excluded: they read most from the L2
    # cache, and wait where programs do not read together. regressions: gemm_wide_tiles_many_rows
    many: int = 1024
    # Tiles along a product's shorter side among which consecutive programs stay (`select.grouped`).
    grouped_tiles: int = 8
    # Columns with the same alignment from which on a tile may have strided columns, and K from which on it has: where
    # elements would be loaded one by one otherwise, and where two or four at a time (`Problem.with_column_stride`).
    alike_columns: int = 64
    strided_k: int = 768
    strided_k_vectors: int = 3000
    # M assumed in invariant mode, where tiles must not depend on M. It is larger than a decoding step's, to keep tensor
    # cores busy. It is smaller than a prompt's, so that a step's few rows use many multiprocessors.
    any_rows: int = 256
    # Elements of a program that copies an operand.
    copied_elements: int = 4096
    # Rows, of all batches, up to which a column-major first operand is copied to row-major.
    # regressions: gemm_row_major_copy
    copied_rows: int = 64
    # Square tiles of symmetric products of fp16 and bf16, the largest first (`symmetric.choose`). Without tiles they
    # are computed as ordinary products. regressions: gemm_symmetric
    # `symmetric_cost` is the time of a tile of theirs over that of an ordinary product's.
    symmetric_cost: float = 1.4
    symmetric: tuple[Config, ...] = (Config(128, 128, 64, 8, 3), Config(64, 64, 64, 4, 4), Config(32, 32, 64, 4, 4))


LIMITS = Tables("gemm", dict.fromkeys(devices.KINDS, GemmLimits()))
LIMITS["amd"] = GemmLimits(symmetric=tuple([config._replace(num_stages=2) for config in GemmLimits().symmetric]))


def limits() -> GemmLimits:
    """Return the limits of the current kind of device."""
    return LIMITS[devices.current.kind]


_TMA_16 = (
    Config(128, 256, 64, 8, 4, 1.02, descriptors=True, split_store=True, GROUP_M=16, warp_specialize=True),
    Config(128, 256, 64, 8, 4, 1.0, descriptors=True, split_store=True, GROUP_M=16),
    Config(128, 128, 128, 8, 3, 0.9, descriptors=True),
    Config(64, 128, 128, 4, 4, 0.7, descriptors=True),
    Config(64, 64, 128, 4, 4, 0.5, descriptors=True),
)
_BYTES = tuple([config._replace(BLOCK_K=128) for config in _TMA_16 if not config.warp_specialize])
_FLOATS_16 = (
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
# For grouped products on Hopper. The rule has no float32 tile as large, because of sm_100 (`launch.Work.constants`).
LARGE_FLOATS = Config(128, 128, 32, 8, 3, 1.0, bf16x6=True)
_DOUBLES = (Config(64, 64, 16, 4, 3, 1.0), Config(32, 32, 16, 4, 3, 0.6))
_AMD = tuple([config._replace(num_stages=2, programs=1) for config in _FLOATS_16])
_AMD_FLOATS = tuple([config._replace(bf16x6=False) for config in _FLOATS])
_INTERPRETED = (Config(64, 64, 64),)

_NVIDIA_POINTERS = {1: _FLOATS_16, 2: _FLOATS_16, 4: _FLOATS, 8: _DOUBLES}
THROUGH_POINTERS: Tables[dict[int, tuple[Config, ...]]] = Tables(
    "gemm_pointers",
    {
        "nvidia": _NVIDIA_POINTERS,
        "none": _NVIDIA_POINTERS,
        "amd": {1: _AMD, 2: _AMD, 4: _AMD_FLOATS, 8: _DOUBLES},
        "interpreter": dict.fromkeys((1, 2, 4, 8), _INTERPRETED),
    },
)
_NVIDIA_DESCRIPTORS = {1: _BYTES, 2: _TMA_16}
THROUGH_DESCRIPTORS: Tables[dict[int, tuple[Config, ...]]] = Tables(
    "gemm_descriptors",
    {
        "nvidia": _NVIDIA_DESCRIPTORS,
        "none": _NVIDIA_DESCRIPTORS,
        "amd": {},
        "interpreter": {2: (Config(64, 64, 64, descriptors=True),)},
    },
)
# For float8 operands whose sums over blocks are added in float32, which takes registers.
# regressions: gemm_blockwise_three_consumers, gemm_blockwise_warp_specialized
BLOCKWISE: Tables[tuple[Config, ...]] = Tables(
    "gemm_blockwise",
    {
        "nvidia": (
            Config(192, 128, 128, 12, 4, 1.3, descriptors=True, GROUP_M=16, warp_specialize=True),
            Config(128, 128, 128, 8, 6, 1.25, descriptors=True, split_store=True, GROUP_M=32, warp_specialize=True),
            Config(256, 128, 128, 8, 4, 1.0, descriptors=True, split_store=True),
            Config(64, 128, 128, 4, 4, 0.8, descriptors=True),
            Config(64, 64, 128, 4, 4, 0.5, descriptors=True),
        )
    },
)
BLOCKWISE["none"] = BLOCKWISE["nvidia"]
BLOCKWISE["amd"] = BLOCKWISE["interpreter"] = ()

# For one row and for few, by whether elements along K are contiguous in b. Among the tiles with enough rows, or the
# most, `select.rule` takes the first that gives the device one round of programs, or else the last.
ONE_ROW: Tables[dict[bool, tuple[Config, ...]]] = Tables(
    "gemm_one_row",
    {
        "nvidia": {
            True: (Config(1, 8, 512, programs=4), Config(1, 16, 256, 8)),
            False: (Config(1, 64, 128, programs=4),),
        },
        "interpreter": dict.fromkeys((True, False), (Config(1, 64, 128),)),
    },
)
_FEW_BF16X6 = Config(16, 64, 32, 4, 3, programs=8, bf16x6=True)
_FEW_NVIDIA: dict[bool, dict[int, tuple[Config, ...]]] = {
    True: {size: (Config(16, 32, 1024 // size, 4, 4), Config(16, 64, 256 // size, 4, 4)) for size in (1, 2)}
    | {
        4: (Config(2, 8, 512, 2), Config(4, 4, 512), _FEW_BF16X6),
        8: (Config(2, 8, 256), Config(4, 4, 256), Config(8, 4, 256)),
    },
    False: {size: (Config(16, 64, 128 // size, 4, 4, programs=2),) for size in (1, 2)}
    | {
        4: (Config(2, 64, 64, 2, programs=4), Config(4, 64, 32, programs=4), _FEW_BF16X6),
        8: tuple([Config(rows, 64, 128 // rows, programs=4) for rows in (2, 4, 8)]),
    },
}
FEW_ROWS: Tables[dict[bool, dict[int, tuple[Config, ...]]]] = Tables(
    "gemm_few_rows",
    {
        "nvidia": _FEW_NVIDIA,
        "interpreter": dict.fromkeys((True, False), dict.fromkeys((1, 2, 4, 8), (Config(16, 64, 64),))),
    },
)
for _kind in ("none", "amd"):
    ONE_ROW[_kind], FEW_ROWS[_kind] = ONE_ROW["nvidia"], FEW_ROWS["nvidia"]


def every(kind: str) -> Iterator[tuple[int, Config]]:
    """Yield every tile of a kind of device with the bytes of an element that it is for."""
    for table in (THROUGH_DESCRIPTORS, THROUGH_POINTERS):
        yield from [(size, config) for size, configs in table[kind].items() for config in configs]
    yield from [(2, config) for configs in ONE_ROW[kind].values() for config in configs]
    yield from [
        (size, config) for table in FEW_ROWS[kind].values() for size, configs in table.items() for config in configs
    ]
    yield from [(1, config) for config in BLOCKWISE[kind]]
