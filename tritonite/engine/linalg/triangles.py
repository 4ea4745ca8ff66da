"""Copies of triangles of matrices, identity matrices, and signs of columns, of any size and strides."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.engine.pointwise.declare import Pointwise

_INDICES = {"row": "index", "column": "index"}


@triton.jit
def _unit_lower(source, row, column):
    return tl.where(row > column, source, tl.where(row == column, 1, 0).to(source.dtype))


@triton.jit
def _upper(source, row, column):
    return tl.where(row <= column, source, 0)


@triton.jit
def _mirrored(lower, transposed, row, column):
    return tl.where(row >= column, lower, transposed)


@triton.jit
def _one(row, column):
    return row == column


@triton.jit
def _with_sign(x, number):
    return tl.where(number < 0, -x, x)


_copy_unit_lower = Pointwise("unit_lower", _unit_lower, {"source": "own", **_INDICES})
_copy_upper = Pointwise("upper", _upper, {"source": "own", **_INDICES})
_mirror = Pointwise("mirrored", _mirrored, {"lower": "own", "transposed": "own", **_INDICES})
_identity = Pointwise("identity", _one, _INDICES)
_sign_columns = Pointwise("signed_columns", _with_sign, {"x": "own", "number": "own"})


def _dims(out: torch.Tensor) -> tuple[int, int]:
    return out.dim() - 2, out.dim() - 1


def unit_lower(out: torch.Tensor, source: torch.Tensor) -> None:
    """Write the elements below the diagonal, 1 on it and 0 above it."""
    _copy_unit_lower.run((source, *_dims(out)), (out,))


def upper(out: torch.Tensor, source: torch.Tensor) -> None:
    """Write the elements on the diagonal and above it, and 0 below it."""
    _copy_upper.run((source, *_dims(out)), (out,))


def mirror(out: torch.Tensor, source: torch.Tensor) -> None:
    """Write symmetric matrices whose lower triangle is that of `source`."""
    _mirror.run((source, source.mT, *_dims(out)), (out,))


def identity(out: torch.Tensor) -> None:
    """Write 1 on the diagonal and 0 elsewhere."""
    _identity.run(_dims(out), (out,))


def sign_columns(x: torch.Tensor, triangle: torch.Tensor) -> None:
    """Negate the columns of matrices for which the diagonal element of `triangle` is negative, in place."""
    _sign_columns.run((x, triangle.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)), (x,))
