"""Quantisation to float8_e4m3fn or int8, alone, after a gated activation, and after a root mean square norm.

A value x becomes x / scale, clamped to the range of the dtype and rounded to nearest even. A computed scale is the
largest absolute value over the largest value of the dtype, in float32. A product of quantised tensors is multiplied by
both scales.
"""

from __future__ import annotations

import torch
import triton

from tritonite import devices
from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.norm.launch import forward_quantized
from tritonite.engine.quantize import (
    Quantization,
    larger,
    magnitude,
    only,
    quantize_tensor,
    quantized_outputs,
    scales_shape,
)
from tritonite.engine.rows.declare import Reduction
from tritonite.errors import Decline
from tritonite.fused.check import check_alike, check_device, check_parameters
from tritonite.fused.gated import gated_shape, halves
from tritonite.fused.norm import epsilon
from tritonite.fused.norm_formulas import check_casting, rms_kind
from tritonite.ops.activation import silu
from tritonite.registry import library_operator

_DTYPES = (torch.float8_e4m3fn, torch.int8)
_GRANULARITIES = ("block", "tensor", "token")


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "token",
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x, and return the quantised values and their scales.

    A value becomes round(x / scale), with x multiplied by 1 / scale in float32, clamped to the dtype's range and
    rounded to nearest even. A computed scale is absmax / 448 for float8_e4m3fn and absmax / 127 for int8. Where absmax
    is 0, the scale and the values are 0. x is read once, unless a row with one scale is too long for a program, or one
    scale of the tensor is computed.

    Args:
        x: (..., K) of float16, bfloat16 or float32, of any strides.
        dtype: torch.float8_e4m3fn or torch.int8.
        granularity: "token" computes a scale for each row, "block" one for 128 elements of a row, and "tensor" takes
            the one scale that is given, or computes one of all elements.
        scale: for "tensor" float32 of one element, or None to compute it; else None.

    Returns the values, contiguous and of x's shape, and float32 scales: (..., 1) for "token", (..., ceil(K / 128)) for
    "block", and the one scale as (1,) for "tensor". There is no gradient.

    Raises errors.Unsupported for other shapes, dtypes or granularities, for a scale that is not used, for float8 on
    devices without float8_e4m3fn, for tensors on several devices, and if a gradient is required.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
    """
    values, scales = torch.ops.tritonite.quantize(x, dtype, granularity, scale)
    return values, _returned(scales, scale)


def swiglu_quantize(
    x: torch.Tensor,
    y: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "token",
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise silu(x) * y, or without y, silu of the first half of x's last dimension times the second half.

    The result is that of `quantize(swiglu(x, y), dtype, granularity, scale)`, without the activation in memory.

    Args:
        x: (..., K) of float16, bfloat16 or float32, of any strides; without y, (..., 2 K).
        y: None, or a tensor of x's shape and dtype.
        dtype, granularity, scale: as in `quantize`.

    Returns the values and scales as `quantize` does, for an activation of (..., K).

    Raises errors.Unsupported as `quantize` and `swiglu` do.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", its SwiGLU.
    """
    values, scales = torch.ops.tritonite.swiglu_quantize(x, y, dtype, granularity, scale)
    return values, _returned(scales, scale)


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    casting: str = "llama",
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "token",
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Quantise the root mean square norm of x, or with a residual, of x + residual.

    The result is that of `quantize(rms_norm(x, weight, eps, ...), dtype, granularity, scale)`, without the norm in
    memory, unless rows with one scale are too long for a program's registers, or one scale of the tensor is computed.

    Args:
        x: (..., K) of float16, bfloat16 or float32, of any strides.
        weight, eps, residual, offset, casting: as in `rms_norm`.
        dtype, granularity, scale: as in `quantize`.

    Returns the values and scales as `quantize` does; with a residual also the sum, which is the next residual.

    Raises errors.Unsupported as `quantize` and `rms_norm` do.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    values, scales, total = torch.ops.tritonite.rms_norm_quantize(
        x, residual, weight, eps, offset, casting, dtype, granularity, scale
    )
    scales = _returned(scales, scale)
    return (values, scales) if residual is None else (values, scales, total)


def _returned(scales: torch.Tensor | None, given: torch.Tensor | None) -> torch.Tensor:
    """Return the computed scales, or the given one as (1,)."""
    if scales is not None:
        return scales
    assert given is not None
    return given.reshape(1)


def _wanted(x: torch.Tensor, dtype: torch.dtype, granularity: str, scale: torch.Tensor | None) -> Quantization:
    """Return what is wanted; decline what is not served."""
    if x.dtype not in SINGLE_FLOATS:
        raise Decline(f"x is {x.dtype}: it may be float16, bfloat16 or float32")
    if dtype not in _DTYPES:
        raise Decline(f"dtype is {dtype}: it may be torch.float8_e4m3fn or torch.int8")
    if dtype.is_floating_point and not devices.has_float8(x.device):
        raise Decline("this device has no float8_e4m3fn: quantise to torch.int8")
    if granularity not in _GRANULARITIES:
        raise Decline(f'granularity is {granularity!r}: it may be "tensor", "token" or "block"')
    if scale is not None:
        if granularity != "tensor":
            raise Decline(f'granularity is "{granularity}": scales are computed, give none')
        if scale.numel() != 1 or scale.dtype is not torch.float32:
            raise Decline(f"scale is {scale.dtype} of {tuple(scale.shape)}: it must be one element of float32")
        check_device("scale", scale, "x", x)
    return Quantization(dtype, granularity, scale)


def _fake_outputs(
    x: torch.Tensor, shape: tuple[int, ...], wanted: Quantization
) -> tuple[torch.Tensor, torch.Tensor | None]:
    scales = scales_shape(shape, wanted)
    values = x.new_empty(shape, dtype=wanted.dtype)
    return values, None if scales is None else x.new_empty(scales, dtype=torch.float32)


def _reduces(granularity, scale=None, **_):
    """Return whether a scale is computed of the whole x."""
    return granularity == "tensor" and scale is None


def _fake_quantize(x, dtype, granularity, scale=None):
    check_alike(x=x)
    return _fake_outputs(x, tuple(x.shape), _wanted(x, dtype, granularity, scale))


@library_operator(
    "quantize(Tensor x, ScalarType dtype, str granularity, Tensor? scale=None) -> (Tensor, Tensor)",
    fake=_fake_quantize,
    accepts=SINGLE_FLOATS,
    leading=("x",),
    undivided=_reduces,
)
def quantize_host(x, dtype, granularity, scale=None):
    """Return x quantised and its scales; None for a scale that is given: Micikevicius et al. 2022."""
    check_alike(x=x)
    wanted = _wanted(x, dtype, granularity, scale)
    values, scales = quantized_outputs(x.shape, x, wanted)
    quantize_tensor((x,), values, scales, wanted)
    return values, scales


_silu = silu.formula


@triton.jit
def _swiglu(x, y):
    return _silu(x) * y


@triton.jit
def _swiglu_magnitude(x, y):
    return magnitude(_silu(x) * y)


_LARGEST_SWIGLU = Reduction((0.0,), _swiglu_magnitude, larger, only)


def _fake_swiglu(x, y, dtype, granularity, scale=None):
    return _fake_outputs(x, gated_shape(x, y), _wanted(x, dtype, granularity, scale))


@library_operator(
    "swiglu_quantize(Tensor x, Tensor? y, ScalarType dtype, str granularity, Tensor? scale=None) -> (Tensor, Tensor)",
    fake=_fake_swiglu,
    accepts=SINGLE_FLOATS,
    leading=("x", "y"),
    undivided=_reduces,
)
def swiglu_quantize_host(x, y, dtype, granularity, scale=None):
    """Return silu(x) * y quantised, and its scales; None for a scale that is given: Shazeer 2020."""
    shape = gated_shape(x, y)
    wanted = _wanted(x, dtype, granularity, scale)
    values, scales = quantized_outputs(shape, x, wanted)
    quantize_tensor(halves(x) if y is None else (x, y), values, scales, wanted, _swiglu, maximum=_LARGEST_SWIGLU)
    return values, scales


def _fake_rms_norm(x, residual, weight, eps, offset, casting, dtype, granularity, scale=None):
    check_alike(x=x, residual=residual)
    check_parameters(x, x.shape[-1], weight=weight)
    check_casting(casting)
    wanted = _wanted(x, dtype, granularity, scale)
    return *_fake_outputs(x, tuple(x.shape), wanted), None if residual is None else x.new_empty(x.shape)


@library_operator(
    "rms_norm_quantize(Tensor x, Tensor? residual, Tensor? weight, float? eps, float offset, str casting,"
    " ScalarType dtype, str granularity, Tensor? scale=None) -> (Tensor, Tensor, Tensor)",
    fake=_fake_rms_norm,
    accepts=SINGLE_FLOATS,
    leading=("x", "residual"),
    undivided=_reduces,
    pin=("offset",),
)
def rms_norm_quantize_host(x, residual, weight, eps, offset, casting, dtype, granularity, scale=None):
    """Return the root mean square norm of x + residual quantised, its scales, and the sum: Zhang and Sennrich 2019."""
    check_alike(x=x, residual=residual)
    check_parameters(x, x.shape[-1], weight=weight)
    kind = rms_kind(x, residual, offset, casting)
    wanted = _wanted(x, dtype, granularity, scale)
    operands = (x,) if residual is None else (x, residual)
    return forward_quantized(operands, weight, epsilon(eps, x), kind, wanted)
