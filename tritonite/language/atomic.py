"""Atomic operations of NVIDIA GPUs that Triton lacks, in PTX: masked compare-and-swap, and packed 16-bit addition."""

from __future__ import annotations

import triton
import triton.language as tl

_ADD_PAIR = tl.constexpr("""{
    .reg .pred p;
    setp.ne.b32 p, $3, 0;
    @p red.relaxed.gpu.global.add.noftz.%sx2 [$1], $2;
    mov.b32 $0, 0;
}""")
_ADD_FLOAT16 = tl.constexpr(_ADD_PAIR.value % "f16")
_ADD_BFLOAT16 = tl.constexpr(_ADD_PAIR.value % "bf16")

_SWAP = tl.constexpr("""{
    .reg .pred p;
    setp.ne.b32 p, $4, 0;
    mov.b%s $0, $2;
    @p atom.relaxed.gpu.global.cas.b%s $0, [$1], $2, $3;
}""")
_SWAP_32 = tl.constexpr(_SWAP.value % ("32", "32"))
_SWAP_64 = tl.constexpr(_SWAP.value % ("64", "64"))
# Inline assembly with one element a call takes no 16-bit registers, so operands are widened to 32 bits.
_SWAP_16 = tl.constexpr("""{
    .reg .pred p;
    .reg .b16 old, wanted;
    setp.ne.b32 p, $4, 0;
    cvt.u16.u32 old, $2;
    cvt.u16.u32 wanted, $3;
    @p atom.relaxed.gpu.global.cas.b16 old, [$1], old, wanted;
    cvt.u32.u16 $0, old;
}""")


@triton.jit
def compare_and_swap(pointers, old, wanted, mask):
    """Compare and swap integers of 16, 32 or 64 bits where `mask` is set, and return the values found in memory.

    Masked-off elements access no memory and return `old`; `tl.atomic_cas` has no mask. Each element of the block has to
    be in one thread only.
    """
    address = pointers.to(tl.int64)
    lanes = mask.to(tl.int32)
    if old.dtype.primitive_bitwidth == 16:
        wide = tl.inline_asm_elementwise(
            _SWAP_16, "=&r,l,r,r,r", [address, old.to(tl.int32), wanted.to(tl.int32), lanes], tl.int32, False, 1
        )
        found = wide.to(tl.int16)
    elif old.dtype.primitive_bitwidth == 32:
        found = tl.inline_asm_elementwise(_SWAP_32, "=&r,l,r,r,r", [address, old, wanted, lanes], tl.int32, False, 1)
    else:
        found = tl.inline_asm_elementwise(_SWAP_64, "=&l,l,l,l,r", [address, old, wanted, lanes], tl.int64, False, 1)
    return found


@triton.jit
def atomic_add_16bit(target, offset, value, mask, reach):
    """Add fp16 or bf16 values atomically at `target + offset`, as packed pairs.

    The other element of a 32-bit pair gets -0.0 added, which leaves it unchanged. Without a pair, an addition is a slow
    compare-and-swap loop. Only elements whose pair reaches outside target[:reach] go through that loop. Each element
    of the block has to be in one thread only.
    """
    pointers = target + offset
    address = pointers.to(tl.int64)
    odd = (address & 2) != 0
    neighbour = tl.where(odd, offset - 1, offset + 1)
    paired = mask & (neighbour >= 0) & (neighbour < reach)
    bits = value.to(tl.int16, bitcast=True).to(tl.int32)
    pair = tl.where(odd, (bits << 16) | 0x8000, (bits & 0xFFFF) | -0x80000000)
    if value.dtype == tl.float16:
        tl.inline_asm_elementwise(
            _ADD_FLOAT16, "=r,l,r,r", [address & -4, pair, paired.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )
    else:
        tl.inline_asm_elementwise(
            _ADD_BFLOAT16, "=r,l,r,r", [address & -4, pair, paired.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )
    tl.atomic_add(pointers, value, mask=mask & ~paired, sem="relaxed")
