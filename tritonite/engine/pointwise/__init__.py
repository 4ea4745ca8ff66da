"""Pointwise operators over any shapes and strides: their declaration, their promotion, their kernels, their tiles."""
