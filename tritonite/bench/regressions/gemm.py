"""Cases of products of matrices. Expected gains are of an H200 unless a comment names another GPU."""

from __future__ import annotations

from typing import Any

import torch

import tritonite
import tritonite.optim.muon
from tritonite.bench.regressions.cases import drawn, regression
from tritonite.engine.gemm import cost_pointers, select
from tritonite.engine.gemm.table import BLOCKWISE, FixedCosts

_FP16, _FP8 = torch.float16, torch.float8_e4m3fn
# Replacements see the functions as they are outside a case.
_choose, _possible, _loads = select.choose, select.possible, cost_pointers.loads


def _operands(M: int, N: int, K: int, dtype: torch.dtype = _FP16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row-major (M, K) and a (K, N) operand whose columns are contiguous, like a linear layer's weight."""
    return drawn(M, K, dtype=dtype), drawn(N, K, dtype=dtype).t()


def _batches(
    batches: int, M: int, K: int, N: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row-major (batches, M, K) and (batches, K, N) operands."""
    return drawn(batches, M, K, dtype=dtype), drawn(batches, K, N, dtype=dtype)


# Warps and stages of small products. The first case has another GPU: H100.

_ALL_WARPS = {"engine.gemm.table.LIMITS[nvidia].warp_elements": 1}
regression("gemm_warps_one_row", "bmm", lambda: _batches(1280, 1, 96, 7), _ALL_WARPS, 4.5 / 2.5)
regression("gemm_warps_short_k", "bmm", lambda: _batches(704, 30, 25, 96), _ALL_WARPS, 12.7 / 8.5)
regression("gemm_warps_few_rows", "bmm", lambda: _batches(512, 16, 128, 336), _ALL_WARPS, 49 / 40)
regression(
    "gemm_stages_short_k",
    "bmm",
    lambda: _batches(300, 4, 96, 1816, _FP16),
    {"engine.gemm.select.without_idle": lambda config, whole, problem: config},
    58 / 34,
)
regression(
    "gemm_shortened_few_rows",
    "bmm",
    lambda: _batches(896, 13, 13, 80),
    {
        "engine.gemm.select._shortened": lambda tiles, problem: tiles,
        "engine.gemm.select.without_idle": lambda config, whole, problem: config,
    },
    10.9 / 5.9,
)
# Without tiles for a short K, TMA loads the operands.
regression(
    "gemm_short_k_pointers",
    "bmm",
    lambda: _batches(264, 40, 128, 24, _FP16),
    {"engine.gemm.table.LIMITS[nvidia].short_k": 0},
    4.9 / 2.8,
)


# Tiles of large products

# With a result of fp16 this product is left to ATen.
regression(
    "gemm_wide_tiles_many_rows",
    "mm.dtype",
    lambda: (*_operands(4608, 1536, 13824), torch.float32),
    {"engine.gemm.table.LIMITS[nvidia].many": 2**31},
    316 / 280,
)
# H100.
regression(
    "gemm_grouped_programs",
    "mm",
    lambda: _operands(1875, 1600, 13824),
    {"engine.gemm.select.grouped": lambda config, problem: config._replace(GROUP_M=16)},
    148 / 128,
)


def _without_pingpong(problem: Any, device: torch.device, table: Any, *kernels: bool) -> Any:
    return _possible(problem, device, table, *kernels) & (table.candidates["pingpong"] == 0)


_NO_PINGPONG = {"engine.gemm.select.possible": _without_pingpong}
regression("gemm_pingpong", "mm", lambda: _operands(1976, 5504, 576), _NO_PINGPONG, 27.6 / 25.1)
regression("gemm_pingpong_many_tiles", "mm", lambda: _operands(2880, 14336, 768), _NO_PINGPONG, 102 / 92)
regression("gemm_pingpong_one_round", "mm", lambda: _operands(418, 7168, 2048), _NO_PINGPONG, 28 / 24)

# The alternative keeps the tile, whose threads then load the addend.
regression(
    "gemm_addend_by_tma",
    "baddbmm",
    lambda: (drawn(6, 1296, 1296, dtype=_FP16), *_batches(6, 1296, 64, 1296, _FP16)),
    {
        "engine.gemm.work.Epilogue.addend_for_tma": lambda epilogue, out: None,
        "engine.gemm.select.choose": lambda problem, *rest: _choose(problem._replace(added_by_tma=True), *rest),
    },
    44 / 20,
)


# float8 whose sums over blocks are added in float32


def _scaled() -> tuple[Any, ...]:
    a, b = _operands(8192, 8192, 8192, _FP8)
    return a, b, drawn(1, 1), drawn(1, 1), None, None, torch.bfloat16, False


regression(
    "gemm_blockwise_three_consumers",
    "_scaled_mm",
    _scaled,
    {"engine.gemm.select.BLOCKWISE": BLOCKWISE | {"nvidia": BLOCKWISE["nvidia"][1:]}},
    955 / 771,
)
regression(
    "gemm_blockwise_warp_specialized",
    "_scaled_mm",
    _scaled,
    {"engine.gemm.select.BLOCKWISE": BLOCKWISE | {"nvidia": BLOCKWISE["nvidia"][2:]}},
    956 / 771,
)


# float32

# The alternative is plain FMA.
regression(
    "gemm_bf16x6",
    "mm",
    lambda: (drawn(4096, 4096), drawn(4096, 4096)),
    {"engine.gemm.select.choose": lambda *call: _choose(*call)._replace(bf16x6=False, hopper_fp32=False)},
    1.25 / 0.85,
)


def _grouped() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ends = torch.arange(256, 16384 + 1, 256, dtype=torch.int32, device=tritonite.device)
    return drawn(16384, 2048), drawn(64, 2048, 1408), ends


regression(
    "gemm_groups_large_fp32",
    "_grouped_mm",
    _grouped,
    {"engine.gemm.select.for_groups": select.choose_with_descriptors},
    2.42 / 1.92,
)


# Loads through pointers


def _loads_with_registers(problem: Any, tiles: Any, fixed: FixedCosts) -> Any:
    return _loads(problem, tiles, fixed._replace(few_registers=0.0))


regression(
    "gemm_few_registers",
    "bmm",
    lambda: (drawn(11, 2405, 2405), drawn(11, 64, 2405).mT),
    {"engine.gemm.cost_pointers.loads": _loads_with_registers},
    356 / 196,
)
regression(
    "gemm_prefetch_registers",
    "mm",
    lambda: (drawn(62, 3072, dtype=_FP16), drawn(3072, 4297, dtype=_FP16)),
    {"engine.gemm.cost_pointers.can_prefetch": lambda problem, tiles, fixed: tiles["BLOCK_M"] > 0},
    48 / 29,
)
regression(
    "gemm_column_stride",
    "mm",
    lambda: _operands(2, 13824, 3067),
    {"engine.gemm.operands.with_column_stride": lambda problem: problem},
    79 / 32,
)
regression(
    "gemm_row_major_copy",
    "mm",
    lambda: (drawn(1536, 20, dtype=_FP16).t(), drawn(1536, 4096, dtype=_FP16)),
    {"engine.gemm.table.LIMITS[nvidia].copied_rows": 0},
    9.8 / 6.9,
)
# A gain of 1 asks no more than that half of the operations, through pointers, take no longer than all of them.
regression(
    "gemm_symmetric",
    "tritonite::symmetric_product",
    lambda: (drawn(16, 2048, 2048, dtype=torch.bfloat16),),
    {"engine.gemm.table.LIMITS[nvidia].symmetric": ()},
    1.0,
)
