"""Rounding, signs, fraction and exponent; complex numbers from polar coordinates."""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import ALL, BOOL, FLOATS, FULL_FLOATS, INTS, NUMBERS, Promotion
from tritonite.engine.iteration import broadcast_shape, output_strides
from tritonite.engine.movement import words
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import pack_complex, true_divide
from tritonite.registry import operator, pointwise, scalar_kernel
from tritonite.runtime.contract import empty_strided


@pointwise("ceil", accepts=NUMBERS)
def ceil(self):
    if self.dtype.is_floating():
        return tl.ceil(self)
    return self


@pointwise("floor", accepts=NUMBERS)
def floor(self):
    if self.dtype.is_floating():
        return tl.floor(self)
    return self


@pointwise("trunc", accepts=NUMBERS)
def trunc(self):
    if self.dtype.is_floating():
        return libdevice.trunc(self)
    return self


@pointwise("round", accepts=NUMBERS)
def round(self):
    """Round to the nearest integer, ties to even."""
    if self.dtype.is_floating():
        return libdevice.nearbyint(self)
    return self


def _power_of_ten(self, decimals):
    return self, 10.0 ** min(abs(decimals), 400) if abs(decimals) < 300 else float("inf"), decimals < 0


@pointwise("round", accepts=FLOATS, prepare=_power_of_ten, static=("negative",))
def round_decimals(self, scale, negative):
    if negative:
        result = libdevice.nearbyint(true_divide(self, scale)) * scale
    else:
        result = true_divide(libdevice.nearbyint(self * scale), scale)
    return tl.where(scale == 1, libdevice.nearbyint(self), result)


@pointwise("frac", accepts=FLOATS)
def frac(self):
    return self - libdevice.trunc(self)


@triton.jit
def _sign(x):
    if x.dtype == tl.int1:
        result = x
    else:
        result = (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
    return result


@pointwise("sign", accepts=ALL)
def sign(self):
    return _sign(self)


@pointwise("sgn", accepts=ALL)
def sgn(self):
    return _sign(self)


@pointwise("angle", promote=Promotion.INT_TO_FLOAT, accepts=FULL_FLOATS + INTS + BOOL)
def angle(self):
    """Angle of a real number: 0, or pi if the number is negative."""
    result = tl.where(self < 0, tl.full(self.shape, 3.141592653589793, self.dtype), tl.zeros_like(self))
    return tl.where(self != self, self, result)


@pointwise("frexp", accepts=FLOATS, output_dtypes=(None, torch.int32))
def frexp(self):
    """Split into a mantissa in [0.5, 1) and an exponent, by bits. Subnormals are scaled up first."""
    if self.dtype == tl.float64:
        integer: tl.constexpr = tl.int64
        bits: tl.constexpr = 52
        bias: tl.constexpr = 1022
        mask: tl.constexpr = 0x7FF
        scale: tl.constexpr = 54
    else:
        integer: tl.constexpr = tl.int32
        bits: tl.constexpr = 23
        bias: tl.constexpr = 126
        mask: tl.constexpr = 0xFF
        scale: tl.constexpr = 25
    subnormal = (((self.to(integer, bitcast=True) >> bits) & mask) == 0) & (self != 0)
    scaled = tl.where(subnormal, self * (2.0**scale), self)
    pattern = scaled.to(integer, bitcast=True)
    field = (pattern >> bits) & mask
    exponent = field.to(tl.int32) - bias - tl.where(subnormal, scale, 0)
    normal = tl.full(pattern.shape, bias, integer) << bits
    keep = ~(tl.full(pattern.shape, mask, integer) << bits)
    mantissa = ((pattern & keep) | normal).to(self.dtype, bitcast=True)
    plain = (self == 0) | (field == mask)
    return tl.where(plain, self, mantissa), tl.where(plain, tl.zeros_like(exponent), exponent)


@scalar_kernel(accepts=FULL_FLOATS, output_dtypes=(None, None))
def _polar(abs, angle):
    return abs * libdevice.cos(angle), abs * libdevice.sin(angle)


_polar_formula = _polar.formula


@scalar_kernel(accepts=(torch.float32,), output_dtypes=(torch.int64,))
def _packed_polar(abs, angle):
    real, imag = _polar_formula(abs, angle)
    return pack_complex(real, imag)


_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@operator("polar", kernels=(_polar,))
def polar(abs, angle, outs=()):
    """Store complex64 as one int64 of both components, complex128 as two strided views."""
    if abs.dtype is not angle.dtype or abs.dtype not in _COMPLEX:
        raise Decline(f"dtypes {abs.dtype} and {angle.dtype}; float32 or float64 for both are served")
    if not outs:
        shape = broadcast_shape((abs.shape, angle.shape))
        strides = output_strides(shape, [(t.shape, t.stride()) for t in (abs, angle)], False)
        outs = (empty_strided(shape, strides, _COMPLEX[abs.dtype], abs.device),)
    if outs[0].dtype is not _COMPLEX[abs.dtype]:
        raise Decline(f"output of dtype {outs[0].dtype}")
    if abs.dtype is torch.float32:
        _packed_polar.run((abs, angle), (words(outs[0]),))
    else:
        components = torch.view_as_real(outs[0])
        _polar.run((abs, angle), (components[..., 0], components[..., 1]))
    return outs
