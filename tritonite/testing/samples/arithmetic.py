"""Arithmetic."""

from __future__ import annotations

import torch

from tritonite.dtypes import INTS
from tritonite.testing.samples import facts

facts.CHOICES["rounding_mode"] = (None, "trunc", "floor")
facts.ZERO_SIGN_UNDEFINED |= {"_add_relu", "fmax", "fmin", "lerp", "maximum", "minimum"}
facts.may_decline(
    ("div.Scalar_mode*", "div.Tensor_mode", "div.out_mode"),
    ("* None",),
    "rounding_mode None for integers",
    "the result is of floating point only where the mode is None, and a kernel's dtype depends on no such value",
    dtypes=INTS,
)
facts.may_decline(
    ("polar",),
    ("gradient",),
    "*: dtype torch.complex*",
    "its gradient is complex arithmetic, for which there are no kernels",
    dtypes=(torch.float32, torch.float64),
)
