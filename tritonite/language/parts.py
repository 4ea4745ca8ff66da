"""Products of float32 by the tensor cores of bfloat16."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _cut(x):
    """(a float32 whose last 16 bits are 0, in bfloat16; the rest)."""
    bits = x.to(tl.int32, bitcast=True)
    rest = x - (bits & -65536).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), rest


@triton.jit
def parts(x, PRECISION: tl.constexpr):
    """What `multiply` takes of an operand: it as it is, or for "bf16x6" three that add up to it.

    Cut off, not rounded, they add up to all 24 bits as well, and to cut takes no conversions: of those a device does a
    quarter as many as of other operations, and they took longer than the products.
    """
    if PRECISION == "bf16x6":
        # Of NaN whose last bits alone are set the first part would be infinite: a sum's NaN is another.
        first, rest = _cut(x + 0.0)
        second, rest = _cut(rest)
        third, _ = _cut(rest)
        result = first, second, third
    else:
        result = (x,)
    return result


@triton.jit
def multiply(x, y, total, PRECISION: tl.constexpr):
    """The product of two matrices' `parts`, added to a total if there is one; of three parts each the six largest.

    Parts of infinity are NaN but for the first.
    """
    if PRECISION == "bf16x6":
        result = tl.dot(x[1], y[1])
        result = tl.dot(x[2], y[0], result)
        result = tl.dot(x[0], y[2], result)
        result = tl.dot(x[1], y[0], result)
        result = tl.dot(x[0], y[1], result)
        result = tl.dot(x[0], y[0], tl.where(result == result, result, 0.0))
        if total is not None:
            result += total
    else:
        result = tl.dot(x[0], y[0], total, input_precision=PRECISION)
    return result
