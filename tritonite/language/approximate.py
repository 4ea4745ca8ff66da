"""NVIDIA's approximate functions of float32, by which ATen makes random numbers there.

Where they are not, on other devices and in the interpreter, the functions that they approximate stand in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import libdevice as nvidia
from triton.language.extra.hip import libdevice as amd

from tritonite.language import interpreted

_INTERPRETED = knobs.runtime.interpret


def _approximate(fast: str, exact: str, turns: bool = False) -> Callable[..., Any]:
    """A function that NVIDIA calls `fast` and others `exact`, with `turns` of pi times its argument."""

    def in_interpreter(x):
        return getattr(interpreted, exact)(x * math.pi if turns else x)

    @tl.core.builtin
    def in_compiler(x, _semantic=None):
        if _semantic.builder.options.backend_name == "cuda":
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
# Of pi times a float64, exact on NVIDIA too.
sinpi = _approximate("sinpi", "sin", turns=True)
cospi = _approximate("cospi", "cos", turns=True)
