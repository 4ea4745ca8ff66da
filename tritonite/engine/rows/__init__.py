"""Reductions over any dimensions of any layout, and row operators: their declaration, their kernels, their blocks."""
