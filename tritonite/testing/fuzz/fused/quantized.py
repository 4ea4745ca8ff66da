"""Draws of linear layers of quantised operands, and of packed 4-bit weights."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices, fused
from tritonite.dtypes import FLOATS_OF_16_BITS, SINGLE_FLOATS
from tritonite.testing.compositions import quantized
from tritonite.testing.fuzz.fused.drawing import Drawer, FusedCall, draws
from tritonite.testing.tolerances import RTOL

_OF_PRODUCTS = 8.0
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
_SIZES = (1, 2, 3, 8, 16, 17, 32, 33, 64, 65, 130)
# Hopper's tensor cores add float8 products with 13 bits behind the point of the largest.
_OF_FLOAT8_SUMS = 2.0**-11
# Errors of products and gradients whose operands are rounded to float8, and of 4-bit numbers, of the largest result.
_OF_FLOAT8, _OF_INT4 = 1.0, 0.15


def _leading(drawer: Drawer) -> tuple[int, ...]:
    return drawer.choice(((), (1,), (3,), (17,), (2, 3), (0,)))


def _operand(drawer: Drawer, shape: tuple[int, ...], integers: bool) -> torch.Tensor:
    if integers:
        return drawer.laid(drawer.integers(255, shape, torch.int16).sub(127).to(torch.int8))
    return drawer.laid((4 * drawer.fractions(shape) - 2).to(drawer.choice(_FLOAT8)))


def _result(drawer: Drawer, columns: int) -> dict[str, Any]:
    """Draw the result's dtype and a bias."""
    dtype = drawer.choice(SINGLE_FLOATS)
    bias = drawer.normal((columns,), drawer.parameter_dtype(dtype)) if drawer.chance(0.5) else None
    return {"out_dtype": dtype, "bias": bias}


def _slack(name: str, bias: torch.Tensor | None) -> float:
    resolution = torch.float32 if bias is None else bias.dtype
    return _OF_PRODUCTS if name == "linear_int8" else max(_OF_PRODUCTS, _OF_FLOAT8_SUMS / RTOL[resolution])


@draws("linear_fp8", "linear_int8")
def _linear(drawer: Drawer, name: str) -> FusedCall:
    leading, columns, inner = _leading(drawer), drawer.choice(_SIZES), drawer.choice(_SIZES)
    rows = (*leading, 1) if drawer.chance(0.5) else (1,)
    integers = name == "linear_int8"
    given: dict[str, Any] = {
        "x": _operand(drawer, (*leading, inner), integers),
        "weight": _operand(drawer, (columns, inner), integers),
        "x_scale": drawer.laid(0.01 + drawer.fractions(rows)),
        "weight_scale": drawer.laid(0.01 + drawer.fractions(drawer.choice(((columns, 1), (columns,), (1,))))),
    }
    given |= _result(drawer, columns)
    return FusedCall(name, given, quantized.linear, slack=_slack(name, given["bias"]))


@draws("linear_fp8_blocks")
def _linear_blocks(drawer: Drawer, name: str) -> FusedCall:
    leading, columns, inner = _leading(drawer), drawer.choice(_SIZES), drawer.choice((*_SIZES, 260))
    block = drawer.choice(((128, 128), (32, 32), (1, 128), (128, 64)))
    blocks = -(-inner // block[1])
    given: dict[str, Any] = {
        "x": _operand(drawer, (*leading, inner), False),
        "weight": _operand(drawer, (columns, inner), False),
        "x_scale": drawer.laid(0.01 + drawer.fractions((*leading, blocks))),
        "weight_scale": drawer.laid(0.01 + drawer.fractions((-(-columns // block[0]), blocks))),
        "block": block,
    }
    given |= _result(drawer, columns)
    return FusedCall(name, given, quantized.linear_blocks, slack=_slack(name, given["bias"]))


@draws("fp8_linear")
def _training(drawer: Drawer, name: str) -> FusedCall:
    leading, columns, inner, dtype = _leading(drawer), drawer.choice(_SIZES), drawer.choice(_SIZES), drawer.dtype()
    given: dict[str, Any] = {
        # Positive numbers, so that the errors of 4 bits do not exceed a sum.
        "x": drawer.laid(drawer.fractions((*leading, inner)).to(dtype), 0.8),
        "weight": drawer.laid(drawer.fractions((columns, inner)).to(dtype), 0.8),
    }
    if drawer.chance(0.5):
        given["bias"] = drawer.normal((columns,), drawer.parameter_dtype(dtype), 0.8)
    served = devices.has_float8(torch.device(drawer.device))
    return FusedCall(name, given, torch.nn.functional.linear, slack=_OF_FLOAT8 / RTOL[dtype], served=served)


def _packed(drawer: Drawer, columns: int) -> dict[str, Any]:
    """Draw a packed weight, its scales and zeros, and their group."""
    inner, dtype = 2 * drawer.choice((1, 4, 8, 16, 33, 64)), drawer.choice(FLOATS_OF_16_BITS)
    group = drawer.choice((16, 32, 128, inner))
    group = inner if group % 16 and group < inner else group
    shape = columns, -(-inner // group)
    zeros = drawer.laid(drawer.integers(16, shape).to(dtype)) if drawer.chance(0.6) else None
    return {
        "weight": drawer.laid(drawer.integers(256, (columns, inner // 2)).to(torch.uint8)),
        "scales": drawer.laid((0.01 + drawer.fractions(shape)).to(dtype)),
        "zeros": zeros,
        "group": group,
    }


@draws("linear_int4", "dequantize_int4")
def _int4(drawer: Drawer, name: str) -> FusedCall:
    columns = drawer.choice(_SIZES)
    given = _packed(drawer, columns)
    if name == "dequantize_int4":
        return FusedCall(name, given, quantized.dequantize_int4)
    dtype = given["scales"].dtype
    given["x"] = drawer.normal((*_leading(drawer), 2 * given["weight"].shape[1]), dtype, 0.8)
    if drawer.chance(0.5):
        given["bias"] = drawer.normal((columns,), drawer.parameter_dtype(dtype), 0.8)
    return FusedCall(name, given, quantized.linear_int4, slack=_OF_PRODUCTS)


@draws("pack_int4")
def _pack(drawer: Drawer, name: str) -> FusedCall:
    """Draw a weight, which its packed numbers stand for within half a step."""
    inner, dtype = 2 * drawer.choice((1, 4, 8, 16, 33, 64)), drawer.choice(FLOATS_OF_16_BITS)
    group = drawer.choice((16, 32, 128, inner))
    group = inner if group % 16 and group < inner else group
    given = {"weight": drawer.normal((drawer.choice(_SIZES), inner), dtype), "group": group}
    given["symmetric"] = drawer.chance(0.5)
    return FusedCall(name, given, lambda weight, **_: weight, slack=_OF_INT4 / RTOL[dtype], function=_unpacked)


def _unpacked(weight: torch.Tensor, group: int, symmetric: bool) -> torch.Tensor:
    packed, scales, zeros = fused.pack_int4(weight, group, symmetric=symmetric)
    return fused.dequantize_int4(packed, scales, zeros, group=group)
