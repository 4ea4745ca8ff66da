"""NVIDIA's fast float32 approximations, which ATen's random number kernels use on CUDA.

Other devices and the interpreter compute the exact function instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import libdevice as nvidia
from triton.language.extra.hip import libdevice as amd

from tritonite import devices
from tritonite.language import interpreted

_INTERPRETED = knobs.runtime.interpret


def _approximate(fast: str, exact: str, turns: bool = False) -> Callable[..., Any]:
    """Return a device function that calls libdevice's `fast` on NVIDIA and `exact` elsewhere.

    With `turns` the NVIDIA function itself multiplies its argument by pi; elsewhere the product is passed.
    """

    def in_interpreter(x):
        return getattr(interpreted, exact)(x * math.pi if turns else x)

    @tl.core.builtin
    def in_compiler(x, _semantic=None):
        if devices.takes_ptx(_semantic.builder.options.backend_name):
            return getattr(nvidia, fast)(x, _semantic=_semantic)
        if turns:
            x = x.__mul__(math.pi, _semantic=_semantic)
        return getattr(amd, exact)(x, _semantic=_semantic)

    return in_interpreter if _INTERPRETED else in_compiler


exp = _approximate("fast_expf", "exp")
log = _approximate("fast_logf", "log")
sin = _approximate("fast_sinf", "sin")
cos = _approximate("fast_cosf", "cos")
tan = _approximate("fast_tanf", "tan")
# sin(pi x) and cos(pi x) of float64, exact on NVIDIA too.
sinpi = _approximate("sinpi", "sin", turns=True)
cospi = _approximate("cospi", "cos", turns=True)


def _instruction(name: str, exact: str) -> Callable[..., Any]:
    """Return a device function of NVIDIA's instruction `name`, which flushes subnormals; `exact` elsewhere."""

    def in_interpreter(x):
        return 1.0 / x if exact == "reciprocal" else getattr(interpreted, exact)(x)

    @tl.core.builtin
    def in_compiler(x, _semantic=None):
        if devices.takes_ptx(_semantic.builder.options.backend_name):
            return tl.inline_asm_elementwise(
                f"{name}.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1, _semantic=_semantic
            )
        if exact == "reciprocal":
            return x.__rtruediv__(1.0, _semantic=_semantic)
        return getattr(amd, exact)(x, _semantic=_semantic)

    return in_interpreter if _INTERPRETED else in_compiler


inverse_root = _instruction("rsqrt", "rsqrt")
exp2 = _instruction("ex2", "exp2")
log2 = _instruction("lg2", "log2")
reciprocal = _instruction("rcp", "reciprocal")
