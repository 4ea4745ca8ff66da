"""Comparisons, predicates of one value, and logic."""

import triton
import triton.language as tl

from tritonite.dtypes import Promotion
from tritonite.registry import exclude, pointwise

ALWAYS_BOOL = Promotion.ALWAYS_BOOL
exclude("allclose", "ATen computes it by isclose and all, and the host waits for the answer")


@pointwise("eq", promote=ALWAYS_BOOL, cpu_numbers=True, casts=True)
def eq(self, other):
    return self == other


@pointwise("ne", promote=ALWAYS_BOOL, cpu_numbers=True, casts=True)
def ne(self, other):
    return self != other


@pointwise("lt", promote=ALWAYS_BOOL, cpu_numbers=True, casts=True)
def lt(self, other):
    return self < other


@pointwise("le", promote=ALWAYS_BOOL, cpu_numbers=True, casts=True)
def le(self, other):
    return self <= other


@pointwise("gt", promote=ALWAYS_BOOL, cpu_numbers=True, casts=True)
def gt(self, other):
    return self > other


@pointwise("ge", promote=ALWAYS_BOOL, cpu_numbers=True, casts=True)
def ge(self, other):
    return self >= other


@pointwise("isnan", promote=ALWAYS_BOOL)
def isnan(self):
    return self != self


@triton.jit
def _equals_float(x, value: tl.constexpr):
    if x.dtype.is_floating():
        result = x == value
    else:
        result = x != x
    return result


@pointwise("isinf", promote=ALWAYS_BOOL)
def isinf(self):
    return _equals_float(self, float("inf")) | _equals_float(self, float("-inf"))


@pointwise("isposinf", promote=ALWAYS_BOOL)
def isposinf(self):
    return _equals_float(self, float("inf"))


@pointwise("isneginf", promote=ALWAYS_BOOL)
def isneginf(self):
    return _equals_float(self, float("-inf"))


@pointwise("signbit", promote=ALWAYS_BOOL)
def signbit(self):
    if self.dtype == tl.float64:
        return self.to(tl.int64, bitcast=True) < 0
    if self.dtype == tl.float32:
        return self.to(tl.int32, bitcast=True) < 0
    if self.dtype == tl.int1:
        return self != self
    return self < 0


@pointwise("logical_not", promote=ALWAYS_BOOL, casts=True)
def logical_not(self):
    return self == 0


@pointwise("logical_and", promote=ALWAYS_BOOL, casts=True)
def logical_and(self, other):
    return (self != 0) & (other != 0)


@pointwise("logical_or", promote=ALWAYS_BOOL, casts=True)
def logical_or(self, other):
    return (self != 0) | (other != 0)


@pointwise("logical_xor", promote=ALWAYS_BOOL, casts=True)
def logical_xor(self, other):
    return (self != 0) ^ (other != 0)
