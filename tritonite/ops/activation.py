"""Activation functions and their gradients."""

import triton
import triton.language as tl

from tritonite.catalog import pointwise
from tritonite.dtypes import FLOATS, NUMBERS
from tritonite.language import libdevice


@triton.jit
def _cdf(x):
    return 0.5 * (1.0 + libdevice.erf(x * 0.7071067811865476))


@pointwise("relu", accepts=NUMBERS)
def relu(self):
    return tl.where(self <= 0, tl.zeros_like(self), self)


@pointwise("gelu", accepts=FLOATS)
def gelu(self, approximate):
    if approximate == "tanh":
        inner = 0.7978845608028654 * (self + 0.044715 * self * self * self)
        return 0.5 * self * (1.0 + libdevice.tanh(inner))
    return self * _cdf(self)
