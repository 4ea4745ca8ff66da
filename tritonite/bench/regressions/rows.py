"""Regression cases of reductions and row operators: block shapes (`engine.rows.table`) and their choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tritonite import devices
from tritonite.bench.regressions.cases import drawn, regression
from tritonite.engine.iteration import power_of_2
from tritonite.engine.rows import blocks, declare
from tritonite.engine.rows.blocks import RowBlocks
from tritonite.engine.rows.space import RowSpace
from tritonite.engine.rows.table import ROWS, Cooperative, Regime
from tritonite.ops.reduction import extrema

_FP16 = torch.float16
_TABLE = "engine.rows.table.ROWS[nvidia]"
_BLOCKS = "engine.rows.blocks"
# A rule that serves nothing, and a condition that never holds.
_NONE, _FALSE = (lambda *_: None), (lambda *_: False)
# Originals of functions that alternatives replace and call.
_cut, _row_per_warp, _transform_rows = blocks.cut, blocks._row_per_warp, declare.transform_rows


def _parameters(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and a bias of a norm."""
    return drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype)


# ---- Reductions ------------------------------------------------------------------------------------------------------

regression(
    "mse_loss_warps",
    "mse_loss",
    lambda: (drawn(8192, 4096), drawn(8192, 4096), 1),
    {f"{_TABLE}.reduced_warps": 4},
    1.6,
)
regression(
    "sum_rows_warps",
    "sum.dim_IntList",
    lambda: (drawn(8192, 8192), [1]),
    {f"{_TABLE}.reduced_warps": 4},
    1.05,
)
regression(
    "min_short_rows",
    "min.dim",
    lambda: (drawn(14025, 607, dtype=_FP16), 1),
    {f"{_TABLE}.indexed": Regime(1, 4)},
    23 / 19,
)
regression(
    "argmax_short_rows",
    "argmax",
    lambda: (drawn(8000, 1221, dtype=_FP16), 1),
    {f"{_TABLE}.indexed": Regime(1, 4)},
    20 / 14,
)
regression(
    "var_mean_rows_beyond_tile",
    "var_mean.correction",
    lambda: (drawn(20001, 4500), [1]),
    {f"{_TABLE}.reduced_long": Regime(1, 4)},
    191 / 95,
)
regression(
    "argmin_rows_beyond_tile",
    "argmin",
    lambda: (drawn(20001, 4500), 1),
    {f"{_TABLE}.reduced_long": Regime(1, 4)},
    183 / 90,
)
regression(
    "mean_columns_without_split",
    "mean.dim",
    lambda: (drawn(490, 11819, dtype=_FP16), [0]),
    {f"{_BLOCKS}._is_in_cache": _FALSE},
    6.7 / 4.9,
)


def _split_as_single_states(
    space: RowSpace, rows: int, columns: int, warps: int, scarcity: int = 2, least: int = 8, states: int = 1
) -> RowBlocks:
    """Return blocks as for states of one value, whatever `states` is."""
    return _cut(space, rows, columns, warps, scarcity, least)


def _channels_last(*shape: int) -> torch.Tensor:
    return drawn(*shape, dtype=_FP16).contiguous(memory_format=torch.channels_last)


regression(
    "batch_norm_channels_last_splits",
    "native_batch_norm",
    lambda: (_channels_last(8, 256, 28, 28), *_parameters(256), None, None, True, 0.1, 1e-5),
    {f"{_BLOCKS}.cut": _split_as_single_states},
    26 / 20,
)


# ---- Short rows and held rows ----------------------------------------------------------------------------------------


def _elements_without_limit(space: RowSpace, most: int) -> int:
    """Return the elements of a program, without the limit of four scalar loads a thread."""
    each = power_of_2(space.n_kept * space.n_reduced // devices.current.programs)
    return min(most, max(128 * max(2, space.vector_width), each))


regression(
    "log_softmax_scalar_loads",
    "_log_softmax",
    lambda: (drawn(400001, 17), 1, False),
    {f"{_BLOCKS}._elements_per_program": _elements_without_limit},
    62 / 41,
)


def _twice_the_rows_per_warp(space: RowSpace) -> RowBlocks | None:
    found = _row_per_warp(space)
    return found and blocks.cut(space, 2 * found.rows, found.columns, found.warps)


def _one_warp_per_program(space: RowSpace) -> RowBlocks | None:
    found = _row_per_warp(space)
    return found and found._replace(warps=1)


regression(
    "log_softmax_four_rows_per_warp",
    "_log_softmax",
    lambda: (drawn(400001, 65), 1, False),
    {f"{_BLOCKS}._row_per_warp": _twice_the_rows_per_warp},
    83 / 72,
)
regression(
    "log_softmax_eight_rows_per_warp",
    "_log_softmax",
    lambda: (drawn(61001, 33), 1, False),
    {f"{_BLOCKS}._row_per_warp": _twice_the_rows_per_warp},
    11.4 / 9.0,
)
regression(
    "log_softmax_several_warps",
    "_log_softmax",
    lambda: (drawn(4001, 33), 1, False),
    {f"{_BLOCKS}._row_per_warp": _one_warp_per_program},
    2.5 / 1.9,
)
regression(
    "layer_norm_one_warp",
    "native_layer_norm",
    lambda: (drawn(65536, 1024, dtype=_FP16), [1024], *_parameters(1024, dtype=_FP16), 1e-5),
    {f"{_TABLE}.short": Regime(0, 1)},
    92 / 83,
)
regression(
    "layer_norm_looped",
    "native_layer_norm",
    lambda: (drawn(6166, 5120, dtype=_FP16), [5120], *_parameters(5120, dtype=_FP16), 1e-5),
    {f"{_BLOCKS}._weighted_in_small_blocks": _NONE},
    64 / 38,
)
regression(
    "layer_norm_scalar_loads",
    "native_layer_norm",
    lambda: (drawn(57761, 2501, dtype=_FP16), [2501], *_parameters(2501, dtype=_FP16), 1e-5),
    {f"{_BLOCKS}._weighted_in_small_blocks": _NONE},
    365 / 206,
)
regression(
    "softmax_scalar_loads",
    "_softmax",
    lambda: (drawn(57761, 1069), 1, False),
    {f"{_BLOCKS}._staged_scalar_loads": _NONE},
    174 / 131,
)
regression(
    "softmax_scalar_loads_16bit",
    "_softmax",
    lambda: (drawn(57761, 1069, dtype=_FP16), 1, False),
    {f"{_BLOCKS}._staged_scalar_loads": _NONE},
    151 / 87,
)
regression(
    "masked_softmax_warps",
    "_masked_softmax",
    lambda: (drawn(1048576, 64, dtype=_FP16), drawn(1048576, 64) > 0, 1, 2),
    {f"{_BLOCKS}._with_more_warps": lambda found, *_: found},
    140 / 119,
)
regression(
    "log_softmax_backward_transposed",
    "_log_softmax_backward_data",
    lambda: (drawn(305, 429, dtype=_FP16).T, drawn(429, 305, dtype=_FP16), 1, _FP16),
    {f"{_BLOCKS}._transposed_operand": _NONE},
    6.8 / 2.0,
)
regression(
    "group_norm_segments",
    "native_group_norm",
    lambda: (drawn(51, 960, 12, 12, dtype=_FP16), *_parameters(960, dtype=_FP16), 51, 960, 144, 32, 1e-5),
    {f"{_BLOCKS}.are_segmented": _FALSE},
    49 / 24,
)
regression(
    "batch_norm_odd_segments",
    "native_batch_norm",
    lambda: (drawn(256, 512, 7, 7, dtype=_FP16), *_parameters(512), None, None, True, 0.1, 1e-5),
    {f"{_BLOCKS}._has_odd_segments": _FALSE},
    22 / 18,
)


# ---- Misaligned rows -------------------------------------------------------------------------------------------------

regression(
    "softmax_misaligned",
    "_softmax",
    lambda: (drawn(3096, 9818), 1, False),
    {f"{_BLOCKS}._enough_misaligned_rows": _FALSE},
    144 / 89,
)
regression(
    "softmax_misaligned_short_16bit",
    "_softmax",
    lambda: (drawn(57761, 2501, dtype=_FP16), 1, False),
    {f"{_BLOCKS}._enough_misaligned_rows": _FALSE},
    208 / 152,
)


# ---- Long rows -------------------------------------------------------------------------------------------------------


def _a_program_per_row(space: RowSpace, traits: blocks.RowTraits) -> RowBlocks:
    """Return the blocks of few long rows, which are not split."""
    few = ROWS[devices.current.kind].few
    return blocks.cut(space, 1, int(few.tiles * devices.current.row_elements), few.warps, scarcity=0)


regression(
    "softmax_split_row",
    "_softmax",
    lambda: (drawn(2 * 47816)[::2], 0, False),
    {f"{_BLOCKS}._long_rows": _a_program_per_row},
    22 / 4,
)
regression(
    "log_softmax_few_rows",
    "_log_softmax",
    lambda: (drawn(300, 18000), 1, False),
    {f"{_TABLE}.few": Regime(4, 32)},
    14 / 12,
)
regression(
    "softmax_two_programs_16bit",
    "_softmax",
    lambda: (drawn(2048, 65536, dtype=_FP16), 1, False),
    {f"{_TABLE}.twice_16bit_tiles": 0},
    88 / 70,
)
regression(
    "softmax_large_staged_blocks",
    "_softmax",
    lambda: (drawn(2048, 40960), 1, False),
    {f"{_TABLE}.twice_staged": Regime(4, 32)},
    89 / 84,
)
regression(
    "layer_norm_backward_narrow_blocks",
    "native_layer_norm_backward",
    lambda: (
        *(drawn(4096, 32768), drawn(4096, 32768), [32768], drawn(4096, 1), drawn(4096, 1).abs()),
        *(*_parameters(32768), [True, False, False]),
    ),
    {f"{_TABLE}.twice_narrow": Regime(4, 32)},
    512 / 288,
)
regression(
    "softmax_cooperative",
    "_softmax",
    lambda: (drawn(2048, 128256), 1, False),
    {f"{_BLOCKS}._gains_by_cooperation": _FALSE},
    674 / 567,
)
regression(
    "log_softmax_cooperative_blocks_16bit",
    "_log_softmax",
    lambda: (drawn(4096, 128256, dtype=_FP16), 1, False),
    {f"{_TABLE}.cooperative_16bit": Cooperative(16 * 1024, 4, 8)},
    557 / 542,
)
regression(
    "rms_norm_weight_bypasses_l1",
    "_fused_rms_norm",
    lambda: (drawn(1024, 65536), [65536], drawn(65536), 1e-6),
    {f"{_TABLE}.weight_bytes": 2**40},
    87 / 83,
)


# ---- Along a strided dimension ---------------------------------------------------------------------------------------


def _held_columns(space: RowSpace, elements: int, states: int) -> RowBlocks:
    """Return blocks of whole rows, which a program holds in registers."""
    device, length = devices.current, power_of_2(space.n_reduced)
    rows = min(
        power_of_2(space.n_kept),
        device.row_columns // 4,
        int(ROWS[device.kind].held_tiles) * device.row_elements // length,
    )
    return blocks.cut(space, rows, length, max(1, rows * length // 512))


regression(
    "softmax_two_columns",
    "_softmax",
    lambda: (drawn(275, 43320, 2, dtype=_FP16), 1, False),
    {f"{_BLOCKS}._contiguous_rows": lambda space: space.n_kept},
    296 / 72,
)
regression(
    "softmax_eight_columns",
    "_softmax",
    lambda: (drawn(4000, 1024, 8, dtype=_FP16), 1, False),
    {f"{_BLOCKS}._narrow_columns": _held_columns},
    113 / 64,
)
regression(
    "log_softmax_copied_along_the_grain",
    "_log_softmax",
    lambda: (drawn(1470, 38, 1031).transpose(1, 2), 1, False),
    {f"{_TABLE}.copied_elements": 2**62},
    1611 / 360,
)


class _WithoutLoadsAhead:
    """The kernel of row operators, with columns reduced as in a reduction that does not prefetch."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        launch = _transform_rows[grid]

        def run(*args: Any, META: Any, **options: Any) -> Any:
            meta = dataclasses.replace(META, column_reduction=True, prefetch=False)
            return launch(*args, META=meta, **options)

        return run


regression(
    "softmax_backward_columns_load_ahead",
    "_softmax_backward_data",
    lambda: (drawn(1024, 65536), drawn(1024, 65536), 0, torch.float32),
    {"engine.rows.declare.transform_rows": _WithoutLoadsAhead()},
    245 / 205,
)
regression(
    "aminmax_without_prefetch",
    "_aminmax.dim",
    lambda: (drawn(8192, 8192), 0),
    {"ops.reduction.extrema._aminmax": dataclasses.replace(extrema._aminmax, prefetch=True)},
    85 / 74,
)
