"""Products of matrices and vectors, what is added to them, and sums of such products."""

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.catalog import operator, pointwise
from tritonite.dtypes import FLOATS, NUMBERS, opmath
from tritonite.engine.matmul import product
from tritonite.engine.pointwise import broadcast_shape
from tritonite.engine.reduction import Reduction, outputs, reduced
from tritonite.errors import Decline
from tritonite.language.math import multiply_add
from tritonite.ops.activation import gelu
from tritonite.ops.reduction import add_states, only

_gelu_formula = gelu.formula


@triton.jit
def _relu(x):
    return tl.where(x < 0, tl.zeros_like(x), x)


@triton.jit
def _gelu(x):
    return _gelu_formula(x, "none")


@triton.jit
def _gelu_tanh(x):
    return _gelu_formula(x, "tanh")


# On a GPU ATen takes the form that its BLAS has.
_GELU = _gelu if devices.current.type == "cpu" else _gelu_tanh


def _precision(dtype):
    """How float32 operands are multiplied: as torch's switches allow it."""
    return "tf32" if dtype is torch.float32 and torch._C._get_cublas_allow_tf32() else "ieee"


def _number(value):
    if isinstance(value, complex):
        raise Decline("complex factor")
    return float(value)


def _result_dtype(dtype, out_dtype):
    """That of the operands unless another is asked for, which only half types have."""
    if out_dtype is not None and out_dtype is not dtype and (dtype.itemsize != 2 or out_dtype is not torch.float32):
        raise Decline(f"{out_dtype} results of {dtype}")
    return out_dtype or dtype


def _multiply(a, b, outs, *, lift, out_dtype=None, self=None, beta=0, alpha=1, activation=None, summed=False):
    """alpha * (a @ b) + beta * self for operands of 3 dimensions, which `lift` makes of results."""
    dtype, shape = a.dtype, (1 if summed else a.shape[0], a.shape[1], b.shape[2])
    if dtype not in FLOATS or b.dtype is not dtype:
        raise Decline(f"dtypes {dtype} and {b.dtype}")
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise Decline("operands whose shapes do not fit")
    result = _result_dtype(dtype, out_dtype)
    shape = _LOWERED[lift](shape)
    beta, alpha = _number(beta), _number(alpha)
    inputs, added = (a, b), None
    if self is not None:
        if self.dtype is not dtype and self.dtype is not result:
            raise Decline(f"{self.dtype} added to {dtype}")
        added = _expanded(self, shape)
        inputs = (a, b, added)
    outs = outputs(inputs, [shape], [result], outs, in_place=inputs[2:])
    if alpha == 0:
        # BLAS does not read the operands then.
        a, b = a[:, :, :0], b[:, :0]
    product(
        *(a, b, lift(outs[0])),
        alpha=alpha,
        addend=None if added is None or beta == 0 else lift(added),
        beta=beta,
        activation=activation,
        precision=_precision(dtype),
        summed=summed,
    )
    return outs


def _expanded(tensor, shape):
    if len(broadcast_shape((tensor.shape, shape))) > len(shape) or broadcast_shape((tensor.shape, shape)) != shape:
        raise Decline("an addend that does not fit")
    return tensor.expand(shape)


def _batches(tensor):
    return _of_rank(tensor, 3)


def _matrix(tensor):
    return _of_rank(tensor, 2).unsqueeze(0)


def _column(tensor):
    return _of_rank(tensor, 1)[None, :, None]


_LOWERED = {
    _batches: lambda shape: shape,
    _matrix: lambda shape: shape[1:],
    _column: lambda shape: shape[1:2],
}


def _of_rank(tensor, rank):
    if tensor.dim() != rank:
        raise Decline(f"a tensor of {tensor.dim()} dimensions")
    return tensor


@operator("mm", accepts=FLOATS)
def mm(self, mat2, out_dtype=None, outs=()):
    return _multiply(_matrix(self), _matrix(mat2), outs, lift=_matrix, out_dtype=out_dtype)


@operator("bmm", accepts=FLOATS)
def bmm(self, mat2, out_dtype=None, outs=()):
    return _multiply(_batches(self), _batches(mat2), outs, lift=_batches, out_dtype=out_dtype)


@operator("addmm", accepts=FLOATS)
def addmm(self, mat1, mat2, beta, alpha, out_dtype=None, outs=()):
    mat1, mat2 = _matrix(mat1), _matrix(mat2)
    return _multiply(mat1, mat2, outs, lift=_matrix, out_dtype=out_dtype, self=self, beta=beta, alpha=alpha)


@operator("_addmm_activation", accepts=FLOATS)
def _addmm_activation(self, mat1, mat2, beta, alpha, use_gelu, outs=()):
    activation, mat1, mat2 = _GELU if use_gelu else _relu, _matrix(mat1), _matrix(mat2)
    return _multiply(mat1, mat2, outs, lift=_matrix, self=self, beta=beta, alpha=alpha, activation=activation)


@operator("baddbmm", accepts=FLOATS)
def baddbmm(self, batch1, batch2, beta, alpha, out_dtype=None, outs=()):
    batch1, batch2 = _batches(batch1), _batches(batch2)
    return _multiply(batch1, batch2, outs, lift=_batches, out_dtype=out_dtype, self=self, beta=beta, alpha=alpha)


@operator("addbmm", accepts=FLOATS)
def addbmm(self, batch1, batch2, beta, alpha, outs=()):
    batch1, batch2 = _batches(batch1), _batches(batch2)
    return _multiply(batch1, batch2, outs, lift=_matrix, self=self, beta=beta, alpha=alpha, summed=True)


@operator("mv", accepts=FLOATS)
def mv(self, vec, outs=()):
    return _multiply(_matrix(self), _column(vec), outs, lift=_column)


@operator("addmv", accepts=FLOATS)
def addmv(self, mat, vec, beta, alpha, outs=()):
    return _multiply(_matrix(mat), _column(vec), outs, lift=_column, self=self, beta=beta, alpha=alpha)


@operator("_int_mm", accepts=(torch.int8,))
def _int_mm(self, mat2, outs=()):
    a, b = _matrix(self), _matrix(mat2)
    if a.dtype is not torch.int8 or b.dtype is not torch.int8 or a.shape[2] != b.shape[1]:
        raise Decline("operands that are not of int8, or do not fit")
    if devices.current.type == "cuda" and (a.shape[1] <= 16 or a.shape[2] % 8 or b.shape[2] % 8):
        raise Decline("sizes that ATen refuses")
    outs = outputs((a, b), [(a.shape[1], b.shape[2])], [torch.int32], outs)
    product(a, b, _matrix(outs[0]))
    return outs


@triton.jit
def _product_of(x, y):
    return x * y


_DOT = Reduction((0.0,), _product_of, add_states, only)


@operator("dot", accepts=FLOATS)
def dot(self, tensor, outs=()):
    _of_rank(self, 1), _of_rank(tensor, 1)
    dtype = self.dtype
    if dtype not in FLOATS or tensor.dtype is not dtype or self.shape != tensor.shape:
        raise Decline("operands of other dtypes or sizes")
    return reduced(_DOT, (self, tensor), None, False, (dtype,), outs, opmath(dtype))


@operator("vdot", accepts=FLOATS)
def vdot(self, other, outs=()):
    return dot(self, other, outs=outs)


def _outer(self, vec1, vec2, beta, alpha):
    _of_rank(vec1, 1), _of_rank(vec2, 1)
    whole = all(isinstance(number, int) for number in (beta, alpha))
    if not whole and not any(value.is_floating_point() for value in (self, vec1, vec2)):
        raise Decline("fractions of integers")
    return _expanded(self, (vec1.shape[0], vec2.shape[0])), vec1.unsqueeze(1), vec2, beta, alpha


@pointwise("addr", accepts=NUMBERS, prepare=_outer)
def addr(self, vec1, vec2, beta, alpha):
    return tl.where(beta == 0, alpha * vec1 * vec2, multiply_add(beta, self, alpha * vec1 * vec2))
