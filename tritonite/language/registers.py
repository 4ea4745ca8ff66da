"""What a loop carries along in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_own_registers(value):
    """Elements that a loop loads one by one, a turn before it wants them; `from_registers` gives them back.

    The compiler would carry two elements of 16 bits along in one register, and packs them as soon as they are loaded,
    so that the loop waits for each pair. Extended to 32 bits by the load itself, each has a register of its own.
    """
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True)
        value = tl.inline_asm_elementwise("cvt.u32.u16 $0, $1;", "=r,h", [bits], dtype=tl.uint32, is_pure=True, pack=1)
    return value


@triton.jit
def from_registers(value, DTYPE: tl.constexpr):
    """The elements, of DTYPE again."""
    if DTYPE.primitive_bitwidth == 16 and value.dtype == tl.uint32:
        value = value.to(tl.uint16).to(DTYPE, bitcast=True)
    return value
