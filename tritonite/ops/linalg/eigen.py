"""Eigenvalues and singular values of matrices, with vectors."""

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.linalg import launch
from tritonite.engine.movement import move
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.linalg.checks import check_matrices, check_rotated, fresh_or_given, matrix_strides
from tritonite.registry import operator
from tritonite.runtime.contract import empty, empty_strided, refuse_if_negative, zeros

_FAILED = "a matrix that is not finite, or for which Jacobi's method does not converge"


def _given(found, outs):
    """Return results in `outs` if a call gives them, which are written only after no matrix has failed."""
    for result, out in zip(found, outs, strict=False):
        if result.numel():
            move(result, out)
    return outs or found


@operator("_linalg_eigh", accepts=FULL_FLOATS)
def linalg_eigh(A, UPLO="L", compute_v=True, outs=()):
    """Rotate pairs of rows and columns until the matrix is diagonal (Golub and Van Loan, section 8.5)."""
    check_matrices(A, square=True)
    if UPLO.upper() not in ("L", "U"):
        raise Decline(f"UPLO {UPLO!r}")
    check_rotated(A)
    shapes = [A.shape[:-1], A.shape if compute_v else (0,)]
    strides = [None, matrix_strides(shapes[1])]
    if outs:
        outputs((A,), shapes, [A.dtype] * 2, outs)
    values, vectors = found = fresh_or_given((A,), shapes, [A.dtype] * 2, (), strides)
    if A.numel():
        flag = zeros((1,), torch.int64, A.device)
        launch.eigh(values, vectors if compute_v else None, flag, A.mT if UPLO.upper() == "U" else A)
        # ATen waits for its kernels, too, to raise an error.
        refuse_if_negative(flag, _FAILED)
    return _given(found, outs)


def _left_vectors(left, product, taus):
    """Write orthonormal columns that A V consists of multiples of, which a QR factorisation also completes."""
    launch.qr(product, taus, None, product)
    launch.reflect(left, None, product, taus, False, signed=True)


@operator("_linalg_svd", accepts=FULL_FLOATS)
def linalg_svd(A, full_matrices=False, compute_uv=True, driver=None, outs=()):
    """Rotate pairs of columns until all are orthogonal (Golub and Van Loan, section 8.6), rows of a wide matrix."""
    check_matrices(A)
    if driver is not None:
        raise Decline(f"driver {driver!r}; calls without one are served")
    *batch, rows, columns = A.shape
    inner = min(rows, columns)
    tall = A if rows >= columns else A.mT
    check_rotated(tall)
    sides = (rows, columns) if full_matrices else (inner, inner)
    shapes = [(0,), (*batch, inner), (0,)]
    if compute_uv:
        shapes = [(*batch, rows, sides[0]), shapes[1], (*batch, sides[1], columns)]
    # ATen's Vh is that of cuSOLVER on a GPU, and that of LAPACK on a CPU.
    strides = [matrix_strides(shapes[0]), None, matrix_strides(shapes[2], aten.on_cpu())]
    if outs:
        outputs((A,), shapes, [A.dtype] * 3, outs)
    u, values, vh = found = fresh_or_given((A,), shapes, [A.dtype] * 3, (), strides)
    left, right = (u, vh.mT) if compute_uv and rows >= columns else (vh.mT, u) if compute_uv else (None, None)
    product, taus = None, None
    if compute_uv:
        product = empty_strided(tall.shape, matrix_strides(tall.shape), A.dtype, A.device)
        taus = empty((*batch, inner), A.dtype, A.device)
    if A.numel():
        flag = zeros((1,), torch.int64, A.device)
        launch.svd(values, product, right, flag, tall)
        refuse_if_negative(flag, _FAILED)
    if compute_uv:
        _left_vectors(left, product, taus)
    return _given(found, outs)
