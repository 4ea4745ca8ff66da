"""16-bit values that a loop carries in registers, one value a register."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_own_registers(value):
    """Return prefetched elements, 16-bit ones extended to uint32 bits; `from_registers` reverses it.

    The compiler packs two 16-bit loop values into one register as soon as they are loaded, so the loop would wait for
    each load. The load itself extends a value to 32 bits, without waiting.
    """
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True)
        value = tl.inline_asm_elementwise("cvt.u32.u16 $0, $1;", "=r,h", [bits], dtype=tl.uint32, is_pure=True, pack=1)
    return value


@triton.jit
def from_registers(value, DTYPE: tl.constexpr):
    """Return the elements of `in_own_registers`, as DTYPE again."""
    if DTYPE.primitive_bitwidth == 16 and value.dtype == tl.uint32:
        value = value.to(tl.uint16).to(DTYPE, bitcast=True)
    return value
