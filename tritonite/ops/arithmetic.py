"""Sums, differences, products and their like."""

import triton.language as tl

from tritonite.catalog import pointwise


@pointwise("add")
def add(self, other, alpha):
    if self.dtype == tl.int1:
        return self | (other & alpha)
    return self + other * alpha


@pointwise("mul")
def mul(self, other):
    if self.dtype == tl.int1:
        return self & other
    return self * other
