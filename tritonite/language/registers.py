"""What a loop carries along in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_own_registers(value):
    """What is loaded element by element a turn of a loop before it is wanted, for `from_registers` to read then.

    The compiler has two elements of 16 bits in a register that a loop carries along, and so waits for each pair as soon
    as it is on its way. In 32 bits, to which the load extends it, each has one of its own.
    """
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True)
        value = tl.inline_asm_elementwise("cvt.u32.u16 $0, $1;", "=r,h", [bits], dtype=tl.uint32, is_pure=True, pack=1)
    return value


@triton.jit
def from_registers(value, DTYPE: tl.constexpr):
    """The same elements, of DTYPE."""
    if DTYPE.primitive_bitwidth == 16 and value.dtype == tl.uint32:
        value = value.to(tl.uint16).to(DTYPE, bitcast=True)
    return value
