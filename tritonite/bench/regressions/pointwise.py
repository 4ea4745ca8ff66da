"""Regression cases of pointwise operators: tiles (`engine.pointwise.blocks`) and formulas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

import tritonite.fused  # noqa: F401 - registers its operators
from tritonite import devices
from tritonite.bench.regressions.cases import drawn, regression
from tritonite.engine.pointwise import blocks
from tritonite.language.math import true_divide

_BLOCKS = "engine.pointwise.blocks"
_block_size = blocks.block_size


def _transposed(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a contiguous tensor, and one of the same shape whose last two dimensions are transposed."""
    batch, rows, columns = shape
    return drawn(*shape, dtype=dtype), drawn(batch, columns, rows, dtype=dtype).transpose(1, 2)


def _widest_transpose_tile(sizes: Sequence[int], itemsize: int) -> tuple[int, int]:
    return devices.current.transpose_tile


regression(
    "silu_and_mul_tile_bytes",
    "tritonite::silu_and_mul",
    lambda: (drawn(8192, 8192, dtype=torch.bfloat16),),
    {f"{_BLOCKS}.block_size": lambda n, most: _block_size(n, most // 2)},
    54 / 49,
)
regression(
    "add_transposed_narrow_tiles",
    "add.Tensor",
    lambda: _transposed(3000, 100, 70),
    {f"{_BLOCKS}._transpose_tile": _widest_transpose_tile},
    131 / 69,
)
regression(
    "add_transposed_narrow_tiles_16bit",
    "add.Tensor",
    lambda: _transposed(700, 130, 130, dtype=torch.float16),
    {f"{_BLOCKS}._transpose_tile": _widest_transpose_tile},
    44 / 29,
)
regression(
    "add_transposed_flat",
    "add.Tensor",
    lambda: _transposed(10000, 17, 33, dtype=torch.float16),
    {f"{_BLOCKS}._tiles_pay": lambda *_: True},
    27 / 13,
)
regression(
    "add_transposed_flat_16",
    "add.Tensor",
    lambda: _transposed(200000, 16, 16, dtype=torch.float16),
    {f"{_BLOCKS}._tiles_pay": lambda *_: True},
    125 / 81,
)
regression(
    "add_transposed_tiled",
    "add.Tensor",
    lambda: _transposed(3000, 64, 64, dtype=torch.float16),
    {f"{_BLOCKS}._tiles_pay": lambda *_: False},
    59 / 19,
)
regression(
    "neg_least_elements",
    "neg",
    lambda: (drawn(10**6, dtype=torch.float16),),
    {"engine.pointwise.table.POINTWISE[nvidia].least_elements": 1},
    2.2 / 1.6,
)


@triton.jit
def _logit_gradient_correctly_rounded(grad_output, self, eps):
    gradient = true_divide(grad_output, self * (1.0 - self))
    outside = (self < 0) | (self > 1)
    return tl.where(outside, tl.full(gradient.shape, float("nan"), gradient.dtype), gradient)


regression(
    "logit_backward_division",
    "logit_backward",
    lambda: (drawn(5 * 10**6, dtype=torch.float16), drawn(5 * 10**6, dtype=torch.float16).sigmoid(), None),
    {"ops.elementary.logit_backward.formula": _logit_gradient_correctly_rounded},
    6.5 / 5.0,
)
