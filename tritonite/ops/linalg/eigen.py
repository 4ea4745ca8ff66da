"""Eigenvalues and singular values of matrices, with vectors."""

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.linalg import block_jacobi, compact_wy, launch, triangles
from tritonite.engine.linalg.table import check_panels, rotates_whole
from tritonite.engine.movement import move
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.linalg.checks import (
    blocks_of,
    check_matrices,
    copy_of_blocks,
    fresh_or_given,
    is_rotated_by_blocks,
    matrix_strides,
    one_batch,
)
from tritonite.registry import operator
from tritonite.runtime.contract import empty, empty_strided, refuse_if_negative, unrepeatable, zeros

_FAILED = "a matrix that is not finite, or for which Jacobi's method does not converge"


def _given(found, outs):
    """Return results in `outs` if a call gives them, which are written only after no matrix has failed."""
    for result, out in zip(found, outs, strict=False):
        if result.numel():
            move(result, out)
    return outs or found


def _normalized(source, flag, further_rows=0, symmetric=False):
    """Return finite matrices divided by powers of two, with further rows, and these powers. Other matrices decline."""
    unrepeatable("the elements decide the number of sweeps")
    count, rows, columns = source.shape
    divided = empty((count, rows + further_rows, columns), source.dtype, source.device)
    scale = block_jacobi.normalize(divided, source, flag, symmetric)
    # ATen waits for its kernels, too, to raise an error.
    refuse_if_negative(flag, _FAILED)
    return divided, scale


def _eigh_by_blocks(values, vectors, flag, source):
    """Write eigenvalues and eigenvectors of a batch of one dimension, of which the lower triangle is read."""
    divided, scale = _normalized(source, flag, symmetric=True)
    if not block_jacobi.eigh(values, vectors, divided, scale):
        raise Decline(_FAILED, lasting=False)


@operator("_linalg_eigh", accepts=FULL_FLOATS)
def linalg_eigh(A, UPLO="L", compute_v=True, outs=()):
    """Rotate pairs of rows and columns, or of blocks, until all is diagonal (Golub and Van Loan, section 8.5)."""
    check_matrices(A, square=True)
    if UPLO.upper() not in ("L", "U"):
        raise Decline(f"UPLO {UPLO!r}")
    divided = is_rotated_by_blocks(A, "eigh")
    shapes = [A.shape[:-1], A.shape if compute_v else (0,)]
    strides = [None, matrix_strides(shapes[1])]
    if outs:
        outputs((A,), shapes, [A.dtype] * 2, outs)
    values, vectors = found = fresh_or_given((A,), shapes, [A.dtype] * 2, (), strides)
    if A.numel():
        flag = zeros((1,), torch.int64, A.device)
        given, kept = A.mT if UPLO.upper() == "U" else A, vectors if compute_v else None
        if divided:
            own = None if kept is None else one_batch(kept)
            _eigh_by_blocks(values.view(-1, A.shape[-1]), own, flag, one_batch(given))
        else:
            launch.eigh(values, kept, flag, given)
            # ATen waits for its kernels, too, to raise an error.
            refuse_if_negative(flag, _FAILED)
    return _given(found, outs)


def _left_vectors(left, product, taus):
    """Write orthonormal columns that A V consists of multiples of, which a QR factorisation also completes."""
    launch.qr(product, taus, None, product)
    launch.reflect(left, None, product, taus, False, signed=True)


def _rotate_all(values, product, right, flag, source):
    """Write S, a multiple of A V, and V of a batch of one dimension whose matrices are tall or square."""
    rows, columns = source.shape[1:]
    if rotates_whole(rows, columns, source.dtype):
        launch.svd(values, product, right, flag, source)
        refuse_if_negative(flag, _FAILED)
        return
    divided, scale = _normalized(source, flag, columns if right is not None else 0)
    if not block_jacobi.svd(values, product, right, divided, rows, scale):
        raise Decline(_FAILED, lasting=False)


def _svd_by_blocks(values, left, right, flag, source):
    """Write S, U and V of a batch of one dimension whose matrices are tall or square.

    S and V of a tall matrix are those of its R, and its U is Q times the U of R. The columns of A V may be 0, or
    roundoff: a QR factorisation makes them orthonormal.
    """
    count, rows, columns = source.shape
    triangle, packed, taus = source, None, None
    if rows > columns:
        packed, taus = copy_of_blocks(source), empty((count, columns), source.dtype, source.device)
        compact_wy.factor(packed, taus)
        triangle = blocks_of((count, columns, columns), source)
        triangles.upper(triangle, packed[:, :columns])
    if left is None:
        _rotate_all(values, None, None, flag, triangle)
        return
    product, factors = blocks_of(triangle.shape, source), empty((count, columns), source.dtype, source.device)
    _rotate_all(values, product, right, flag, triangle)
    compact_wy.factor(product, factors)
    own = blocks_of(left.shape, source)
    triangles.identity(own)
    corner = own[:, :columns, :columns]
    compact_wy.form(corner, product, factors)
    triangles.sign_columns(corner, product)
    if packed is not None:
        compact_wy.reflect(own, packed, taus, False)
    left.copy_(own)


@operator("_linalg_svd", accepts=FULL_FLOATS)
def linalg_svd(A, full_matrices=False, compute_uv=True, driver=None, outs=()):
    """Rotate pairs of columns, or of blocks, until all are orthogonal (Golub and Van Loan, section 8.6)."""
    check_matrices(A)
    if driver is not None:
        raise Decline(f"driver {driver!r}; calls without one are served")
    *batch, rows, columns = A.shape
    inner = min(rows, columns)
    tall = A if rows >= columns else A.mT
    divided = is_rotated_by_blocks(tall, "svd")
    if divided:
        check_panels(*tall.shape[-2:], A.dtype)
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
    if divided:
        flag = zeros((1,), torch.int64, A.device)
        own = [None if x is None else one_batch(x) for x in (left, right)]
        _svd_by_blocks(values.view(-1, inner), *own, flag, one_batch(tall))
        return _given(found, outs)
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
