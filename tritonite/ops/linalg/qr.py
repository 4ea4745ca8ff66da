"""QR factorisation by Householder reflectors, and products with them."""

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.linalg import compact_wy, launch, triangles
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops.linalg.checks import (
    blocks_of,
    check_matrices,
    copy_of_blocks,
    fresh_or_given,
    is_blocked,
    is_solved_by_blocks,
    matrix_strides,
    one_batch,
)
from tritonite.registry import operator
from tritonite.runtime.contract import empty, empty_strided


@operator("geqrf", accepts=FULL_FLOATS)
def geqrf(self, outs=()):
    """Clear a column after the other by a reflector (Golub and Van Loan, section 5.2)."""
    check_matrices(self)
    divided = is_blocked(self, "geqrf", panels=True)
    shapes = [self.shape, (*self.shape[:-2], min(self.shape[-2:]))]
    outs = outputs((self,), shapes, [self.dtype] * 2, outs, (self,), matrix_strides(self.shape))
    if not divided:
        launch.qr(*outs, None, self)
        return outs
    for out, found in zip(outs, factor_by_blocks(self), strict=True):
        out.copy_(found.view(out.shape))
    return outs


def factor_by_blocks(A):
    """Return R over the reflectors of Q, and the reflectors' factors, of a batch of one dimension."""
    packed = copy_of_blocks(A)
    taus = empty((packed.shape[0], min(packed.shape[1:])), A.dtype, A.device)
    compact_wy.factor(packed, taus)
    return packed, taus


def _form_by_blocks(q, packed, taus):
    """Write the leading columns of the product of reflectors."""
    own = blocks_of(q.shape, q)
    compact_wy.form(own, packed, taus)
    q.copy_(own.view(q.shape))


@operator("linalg_qr", accepts=FULL_FLOATS)
def linalg_qr(A, mode="reduced", outs=()):
    """Factor by reflectors, and apply them to the columns of the identity."""
    check_matrices(A)
    divided = is_blocked(A, "qr", panels=True)
    *batch, rows, columns = A.shape
    if mode not in ("reduced", "complete", "r"):
        raise Decline(f"mode {mode!r}")
    inner = rows if mode == "complete" else min(rows, columns)
    shapes = [(0,) if mode == "r" else (*batch, rows, inner), (*batch, inner, columns)]
    strides = [matrix_strides(shape) for shape in shapes]
    q, r = outs = fresh_or_given((A,), shapes, [A.dtype] * 2, outs, strides)
    if divided:
        packed, taus = factor_by_blocks(A)
        triangles.upper(r, packed.view(A.shape)[..., :inner, :])
        if mode != "r":
            _form_by_blocks(q, packed, taus)
        return outs
    if mode == "r":
        launch.qr(None, None, r, A)
        return outs
    packed = empty_strided(A.shape, matrix_strides(A.shape), A.dtype, A.device)
    taus = empty((*batch, min(rows, columns)), A.dtype, A.device)
    launch.qr(packed, taus, r, A)
    launch.reflect(q, None, packed, taus, False)
    return outs


def _check_reflectors(packed, taus):
    """Decline reflectors that are no columns of matrices, or whose factors do not fit."""
    check_matrices(packed)
    fits = taus.dim() == packed.dim() - 1 and taus.shape[:-1] == packed.shape[:-2]
    if not fits or taus.dtype is not packed.dtype or taus.shape[-1] > packed.shape[-1]:
        raise Decline(f"factors of {taus.dtype} and shape {tuple(taus.shape)} for {tuple(packed.shape)} reflectors")


def _one_batch_of_vectors(x):
    return one_batch(x.unsqueeze(-1)).squeeze(-1)


@operator("linalg_householder_product", accepts=FULL_FLOATS)
def linalg_householder_product(input, tau, outs=()):
    """Apply reflectors to the columns of the identity, the last one first."""
    _check_reflectors(input, tau)
    if input.shape[-1] > input.shape[-2]:
        raise Decline(f"reflectors of shape {tuple(input.shape)}; as many rows as columns are served")
    divided = is_solved_by_blocks(input, "reflectors")
    outs = outputs((input, tau), [input.shape], [input.dtype], outs, strides=matrix_strides(input.shape))
    if divided:
        _form_by_blocks(outs[0], one_batch(input), _one_batch_of_vectors(tau))
    else:
        launch.reflect(outs[0], None, input, tau, False)
    return outs


@operator("ormqr", accepts=FULL_FLOATS)
def ormqr(self, input2, input3, left=True, transpose=False, outs=()):
    """Apply reflectors to columns; C Q is the transpose of Q^T C^T."""
    packed, taus, other = self, input2, input3
    _check_reflectors(packed, taus)
    check_matrices(packed, other)
    rows = other.shape[-2 if left else -1]
    fits = packed.shape[-2] == rows and taus.shape[-1] == min(rows, packed.shape[-1])
    if other.shape[:-2] != packed.shape[:-2] or not fits:
        raise Decline(
            f"{taus.shape[-1]} reflectors of shape {tuple(packed.shape)} for matrices of shape {tuple(other.shape)}"
        )
    divided = is_solved_by_blocks(other if left else other.mT, "reflectors")
    given = (packed, taus, other)
    outs = outputs(given, [other.shape], [other.dtype], outs, (other,), matrix_strides(other.shape))
    (product,) = outs
    if not left:
        product, other = product.mT, other.mT
    if divided:
        own = copy_of_blocks(other)
        compact_wy.reflect(own, one_batch(packed), _one_batch_of_vectors(taus), transpose == left)
        product.copy_(own.view(product.shape))
    else:
        launch.reflect(product, other, packed, taus, transpose == left)
    return outs
