"""Atomic additions of half types, as NVIDIA's GPUs have them: two elements of a word at a time."""

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


@triton.jit
def add_halves(target, offset, value, mask, reach):
    """Add to elements of a half type, each with a -0.0 for its neighbour in the word, which that leaves as it is.

    An addition of one element is a loop of compare and swap there. It is left to those whose neighbour is not one of
    the `reach` elements from `target` on. A lane of the block must belong to one thread alone.
    """
    pointers = target + offset
    address = pointers.to(tl.int64)
    odd = (address & 2) != 0
    neighbour = tl.where(odd, offset - 1, offset + 1)
    paired = mask & (neighbour >= 0) & (neighbour < reach)
    bits = value.to(tl.int16, bitcast=True).to(tl.int32)
    word = tl.where(odd, (bits << 16) | 0x8000, (bits & 0xFFFF) | -0x80000000)
    if value.dtype == tl.float16:
        tl.inline_asm_elementwise(
            _ADD_FLOAT16, "=r,l,r,r", [address & -4, word, paired.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )
    else:
        tl.inline_asm_elementwise(
            _ADD_BFLOAT16, "=r,l,r,r", [address & -4, word, paired.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )
    tl.atomic_add(pointers, value, mask=mask & ~paired, sem="relaxed")
