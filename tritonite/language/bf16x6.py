"""float32 products on bfloat16 tensor cores: three bfloat16 terms an operand, six products of terms ("bf16x6")."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _truncate(x):
    """Split float32 x into its upper 16 bits, as bfloat16, and the float32 remainder."""
    bits = x.to(tl.int32, bitcast=True)
    rest = x - (bits & -65536).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), rest


@triton.jit
def split_terms(x, PRECISION: tl.constexpr):
    """Return the terms of an operand of `dot_terms`: (x,), or for "bf16x6" three bfloat16 terms whose sum is x.

    Truncated terms hold all 24 bits of x, as rounded ones would. Truncation needs no conversion instructions, whose
    throughput is a quarter of other operations'.
    """
    if PRECISION == "bf16x6":
        # A NaN with only its low bits set would truncate to infinity. The addition makes it a canonical NaN.
        first, rest = _truncate(x + 0.0)
        second, rest = _truncate(rest)
        third, _ = _truncate(rest)
        result = first, second, third
    else:
        result = (x,)
    return result


@triton.jit
def dot_terms(x, y, acc, PRECISION: tl.constexpr):
    """Return x @ y for operands from `split_terms`, plus the accumulator `acc` unless it is None.

    "bf16x6" adds the six largest of nine products, smallest first.
    """
    if PRECISION == "bf16x6":
        result = tl.dot(x[1], y[1])
        result = tl.dot(x[2], y[0], result)
        result = tl.dot(x[0], y[2], result)
        result = tl.dot(x[1], y[0], result)
        result = tl.dot(x[0], y[1], result)
        # The lower terms of an infinity are NaN; the product of the first terms has the right value.
        result = tl.dot(x[0], y[0], tl.where(result == result, result, 0.0))
        if acc is not None:
            result += acc
    else:
        result = tl.dot(x[0], y[0], acc, input_precision=PRECISION)
    return result
