"""Values that are not contracted with an operation before or after them, such as a product and a sum to one FMA."""

from __future__ import annotations

from typing import Any

from triton import knobs
from triton.language import core

from tritonite import devices

# A sum with a rounding mode of its own is not contracted, and -0.0 leaves every number what it is. The assembler sees
# through a copy.
_PTX = {32: ("add.rn.f32 $0, $1, 0f80000000;", "=r,r"), 64: ("add.rn.f64 $0, $1, 0d8000000000000000;", "=l,l")}


def _uncontracted(x: Any, _semantic: Any = None) -> Any:
    """Return a float32 or float64 value. The compiler contracts no operation on the result with one that made it.

    A kernel that computes several formulas then rounds between them as one kernel for each formula would.
    """
    if devices.takes_ptx(_semantic.builder.options.backend_name):
        assembly, constraints = _PTX[x.dtype.primitive_bitwidth]
    else:
        # LLVM does not look into assembly, and the comment is no instruction.
        assembly, constraints = "; $0 $1", "=v,0"
    return core.inline_asm_elementwise(
        assembly, constraints, [x], dtype=x.dtype, is_pure=True, pack=1, _semantic=_semantic
    )


def _same(x: Any) -> Any:
    """Return the value: the interpreter contracts nothing."""
    return x


uncontracted = _same if knobs.runtime.interpret else core.builtin(_uncontracted)
