"""Operators over lists of tensors that compute each tensor by a pointwise formula."""

from tritonite.ops import arithmetic
from tritonite.registry import over_lists

over_lists(arithmetic.add, arithmetic.sub, arithmetic.mul, arithmetic.div, arithmetic.reciprocal, arithmetic.neg)
over_lists(arithmetic.pow, arithmetic.addcmul, arithmetic.addcdiv, arithmetic.lerp, arithmetic.abs)
