"""Bitwise logic and shifts of integers and bools."""

import triton
import triton.language as tl

from tritonite.dtypes import BOOL, INTS
from tritonite.registry import pointwise


@pointwise("bitwise_and", accepts=INTS + BOOL, cpu_numbers=True)
def bitwise_and(self, other):
    return self & other


@pointwise("bitwise_or", accepts=INTS + BOOL, cpu_numbers=True)
def bitwise_or(self, other):
    return self | other


@pointwise("bitwise_xor", accepts=INTS + BOOL, cpu_numbers=True)
def bitwise_xor(self, other):
    return self ^ other


@pointwise("bitwise_not", accepts=INTS + BOOL)
def bitwise_not(self):
    if self.dtype == tl.int1:
        return self == 0
    if self.dtype == tl.uint8:
        # ~ is xor with -1, which the interpreter cannot represent in uint8.
        return tl.full(self.shape, 255, self.dtype) - self
    return ~self


@triton.jit
def _is_in_range(amount, bits: tl.constexpr):
    return (amount >= 0) & (amount < bits)


@pointwise("bitwise_left_shift", "__lshift__", "__ilshift__", accepts=INTS)
def bitwise_left_shift(self, other):
    """Shift left; 0 if the amount is negative or at least the width in bits."""
    in_range = _is_in_range(other, self.dtype.primitive_bitwidth)
    return tl.where(in_range, self << tl.where(in_range, other, tl.zeros_like(other)), tl.zeros_like(self))


@pointwise("bitwise_right_shift", "__rshift__", "__irshift__", accepts=INTS)
def bitwise_right_shift(self, other):
    """Shift right with the sign; 0 or -1 if the amount is negative or at least the width in bits."""
    in_range = _is_in_range(other, self.dtype.primitive_bitwidth)
    most = tl.full(other.shape, self.dtype.primitive_bitwidth - 1, other.dtype)
    shifted = self >> tl.where(in_range, other, most)
    return tl.where(in_range | (self < 0), shifted, tl.zeros_like(shifted))
