"""Factorisations of matrices, and solves, inverses and determinants by them: a module a factorisation."""

from tritonite.ops.linalg import cholesky, eigen, ldl, least_squares, lu, qr, triangular

__all__ = ["cholesky", "eigen", "ldl", "least_squares", "lu", "qr", "triangular"]
