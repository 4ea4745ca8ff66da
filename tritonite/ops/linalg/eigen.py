"""Eigenvalues and singular values of matrices, with vectors."""

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.linalg import launch
from tritonite.engine.movement import move
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops.linalg.checks import check_matrices, check_rotated, fresh_or_given, matrix_strides
from tritonite.registry import operator
from tritonite.runtime.contract import refuse_if_negative, zeros

_FAILED = "a matrix that is not finite, or for which Jacobi's method does not converge"


def _finished(found, flag, outs):
    """Return results once the host knows that no matrix failed, in `outs` if a call gives them.

    ATen waits for its kernels, too, to raise an error.
    """
    refuse_if_negative(flag, _FAILED)
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
    if not A.numel():
        return outs or found
    flag = zeros((1,), torch.int64, A.device)
    launch.eigh(values, vectors if compute_v else None, flag, A.mT if UPLO.upper() == "U" else A)
    return _finished(found, flag, outs)
