"""Distances between all rows of two matrices (`cdist`) or of one matrix (`pdist`), and their gradients."""

import ctypes
import math

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, FULL_FLOATS
from tritonite.engine.distances import Norm, augment, distances, gradients
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.work import Epilogue, Sums
from tritonite.engine.iteration import broadcast_shape, contiguous_strides, output_strides
from tritonite.engine.movement import fill_zero
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import square_root, true_divide
from tritonite.ops.aten import ON_CPU, on_cpu
from tritonite.ops.matmul import precision_of
from tritonite.registry import operator
from tritonite.runtime.contract import empty

# Rows of either matrix above which ATen computes Euclidean distances as a product of matrices.
_ROWS_FOR_PRODUCT = 25


@triton.jit
def _sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def _to_power(x, exponent):
    """Return x to a power that is a number in float64."""
    return libdevice.pow(x, tl.broadcast_to(exponent.to(x.dtype), x.shape))


@triton.jit
def _raise(x, exponent):
    """Return |x| to a power that is a number in float64."""
    return _to_power(tl.abs(x), exponent)


@triton.jit
def _one_if_different(difference, p):
    term = (difference != 0.0).to(difference.dtype)
    # The distance to nan is nan in ATen's CPU kernel, 1 in its GPU kernel.
    if ON_CPU:
        term = tl.where(difference == difference, term, float("nan"))
    return term


@triton.jit
def _size(difference, p):
    return tl.abs(difference)


@triton.jit
def _square(difference, p):
    return difference * difference


@triton.jit
def _power(difference, p):
    return _raise(difference, p)


@triton.jit
def _sum(total, term):
    return total + term


@triton.jit
def _largest(total, term):
    # ATen's GPU kernel skips nan.
    return tl.where(term > total, term, total)


@triton.jit
def _total(total, p):
    return total


@triton.jit
def _root(total, p):
    return square_root(total)


@triton.jit
def _inverse_power(total, p):
    return _raise(total, 1.0 / p)


@triton.jit
def _slope_of_size(difference, grad, distance, p):
    return grad * _sign(difference)


@triton.jit
def _slope_of_root(difference, grad, distance, p):
    return tl.where(distance == 0.0, 0.0, true_divide(grad * difference, distance))


@triton.jit
def _slope_of_low_power(difference, grad, distance, p):
    slope = _sign(difference) * _raise(difference, p - 1.0) * grad
    slope = true_divide(slope, _to_power(distance, p - 1.0))
    return tl.where((distance == 0.0) | ((difference == 0.0) & (p < 1.0)), 0.0, slope)


@triton.jit
def _slope_of_power(difference, grad, distance, p):
    slope = true_divide(difference * _raise(difference, p - 2.0) * grad, _to_power(distance, p - 1.0))
    return tl.where(distance == 0.0, 0.0, slope)


@triton.jit
def _slope_of_largest(difference, grad, distance, p):
    return grad * _sign(difference) * (tl.abs(difference) == distance).to(difference.dtype)


_NORMS = {
    0.0: Norm(_one_if_different, _sum, _total, None),
    1.0: Norm(_size, _sum, _total, _slope_of_size),
    2.0: Norm(_square, _sum, _root, _slope_of_root),
    math.inf: Norm(_size, _largest, _total, _slope_of_largest),
}
_POWER_BELOW_2 = Norm(_power, _sum, _inverse_power, _slope_of_low_power)
_POWER_ABOVE_2 = Norm(_power, _sum, _inverse_power, _slope_of_power)


def _check_norm(p):
    if not p >= 0:
        raise Decline(f"p is {p}; it has to be at least 0")


def _norm(p):
    _check_norm(p)
    return _NORMS.get(float(p), _POWER_BELOW_2 if p < 2 else _POWER_ABOVE_2)


def _rounded(p, dtype):
    """Return p in the operands' dtype on a CPU, where ATen chooses the norm of distances by it; unchanged on a GPU."""
    return ctypes.c_float(p).value if on_cpu() and dtype is torch.float32 else p


def _batch_of(x1, x2):
    """Return the broadcast batch dimensions of two tensors of matrices with rows of one length."""
    if x1.dim() < 2 or x2.dim() < 2 or x1.shape[-1] != x2.shape[-1]:
        raise Decline(f"shapes {tuple(x1.shape)} and {tuple(x2.shape)}, not matrices with rows of one length")
    if x1.dtype not in FLOATS or x1.dtype is not x2.dtype:
        raise Decline(f"operands of {x1.dtype} and {x2.dtype}; two of one floating-point dtype are served")
    return broadcast_shape((x1.shape[:-2], x2.shape[:-2]))


def _batches(x, batch):
    """Return matrices broadcast to `batch` as one batch dimension, as a copy if no view has this shape."""
    x = x.expand(*batch, *x.shape[-2:])
    shape = (math.prod(batch), *x.shape[-2:])
    if x.dim() == 3:
        return x
    try:
        return x.view(shape)
    except RuntimeError:
        return x.contiguous().view(shape)


@triton.jit
def _root_of_positive(x):
    return square_root(tl.where(x < 0, tl.zeros_like(x), x))


def _augmented(x, factor, norm_first):
    """Return rows of `factor` * x with their squared norm and a one at the end, in this order if `norm_first`."""
    own = x[:1] if x.stride(0) == 0 else x
    n_features = own.shape[2]
    result = empty((*own.shape[:2], n_features + 2), own.dtype, own.device)
    augment(result, own, factor, n_features + (not norm_first), n_features + norm_first)
    return result.expand(len(x), -1, -1)


def _by_product(x1, x2, out):
    """Write |a - b| = sqrt(|a|^2 - 2 a.b + |b|^2), one product of rows (-2 a, |a|^2, 1) and (b, 1, |b|^2), as ATen."""
    if out.numel():
        a, b = _augmented(x1, -2.0, True), _augmented(x2, 1.0, False)
        product(a, b.mT, out, Epilogue(activation=_root_of_positive), Sums(precision_of(out.dtype)))


@operator("_euclidean_dist", accepts=FLOATS)
def euclidean_dist(x1, x2, outs=()):
    batch = _batch_of(x1, x2)
    shape = (*batch, x1.shape[-2], x2.shape[-2])
    (out,) = outs = outputs((x1, x2), [shape], [x1.dtype], outs)
    if not out.is_contiguous():
        raise Decline("an output that is not contiguous")
    if out.numel():
        _by_product(_batches(x1, batch), _batches(x2, batch), out.view(math.prod(batch), *shape[-2:]))
    return outs


@operator("_cdist_forward", accepts=FLOATS, pin=("p",))
def cdist_forward(x1, x2, p, compute_mode, outs=()):
    batch = _batch_of(x1, x2)
    _check_norm(p)
    mode = compute_mode or 0
    if mode not in (0, 1, 2):
        raise Decline(f"compute_mode {mode}; 0, 1 and 2 are served")
    rows = x1.shape[-2], x2.shape[-2]
    by_product = p == 2 and (mode == 1 or (mode == 0 and max(rows) > _ROWS_FOR_PRODUCT))
    computed = not by_product and bool(math.prod((*batch, *rows, x1.shape[-1])))
    if computed and x1.dtype not in FULL_FLOATS:
        raise Decline(f"operands of {x1.dtype}; float32 and float64 are served, or a product of matrices")
    (out,) = outs = outputs((x1, x2), [(*batch, *rows)], [x1.dtype], outs)
    if not out.is_contiguous():
        raise Decline("an output that is not contiguous")
    if not out.numel():
        return outs
    if not x1.shape[-1]:
        fill_zero(out)
        return outs
    x1, x2, result = _batches(x1, batch), _batches(x2, batch), out.view(math.prod(batch), *rows)
    if by_product:
        _by_product(x1, x2, result)
    else:
        p = _rounded(p, x1.dtype)
        distances(result, x1, x2, _norm(p), float(p), False)
    return outs


@operator("_cdist_backward", accepts=FULL_FLOATS, pin=("p",))
def cdist_backward_before_2_14(grad, x1, x2, p, cdist, outs=()):
    return _cdist_backward(grad, x1, x2, p, cdist, outs)


@operator("_cdist_backward", accepts=FULL_FLOATS, pin=("p",))
def cdist_backward(grad_output, x1, x2, p, cdist, outs=()):
    return _cdist_backward(grad_output, x1, x2, p, cdist, outs)


def _cdist_backward(grad, x1, x2, p, cdist, outs):
    batch, norm = _batch_of(x1, x2), _norm(p)
    shape = (*batch, x1.shape[-2], x2.shape[-2])
    if x1.dtype not in FULL_FLOATS or any(x.dtype is not x1.dtype for x in (grad, cdist)):
        raise Decline(f"operands of {x1.dtype}, {grad.dtype} and {cdist.dtype}, not all float32 or all float64")
    if tuple(grad.shape) != shape or tuple(cdist.shape) != shape:
        raise Decline(f"gradient of shape {tuple(grad.shape)} and distances of {tuple(cdist.shape)}, not {shape}")
    whole = (*batch, *x1.shape[-2:])
    strides = contiguous_strides(whole)
    if not math.prod(shape) * x1.shape[-1]:
        # ATen's gradient has the shape and the layout of x1, without the batch dimensions of x2.
        whole = tuple(x1.shape)
        strides = output_strides(whole, [(whole, x1.stride())], False)
    (out,) = outs = outputs((grad, x1, x2, cdist), [whole], [x1.dtype], outs, strides=strides)
    if not out.numel():
        return outs
    if norm.slope is None or not math.prod(shape):
        fill_zero(out)
        return outs
    if not out.is_contiguous():
        raise Decline("a gradient that is not contiguous")
    grad, x1, x2, cdist = (_batches(x, batch) for x in (grad, x1, x2, cdist))
    gradients(out.view(x1.shape), grad, x1, x2, cdist, norm, float(p), False)
    return outs


def _check_rows(self):
    if self.dim() != 2 or self.dtype not in FULL_FLOATS or not self.is_contiguous():
        raise Decline(
            f"a tensor of {self.dtype}, shape {tuple(self.shape)} and strides {self.stride()}; "
            "contiguous matrices of float32 and float64 are served"
        )


@operator("_pdist_forward", accepts=FULL_FLOATS, pin=("p",))
def pdist_forward(self, p=2.0, outs=()):
    _check_rows(self)
    _check_norm(p)
    n, p = len(self), _rounded(p, self.dtype)
    (out,) = outs = outputs((self,), [(n * max(n - 1, 0) // 2,)], [self.dtype], outs)
    if out.numel() and out.stride(0) != 1:
        raise Decline("an output that is not contiguous")
    if out.numel() and not self.shape[1]:
        fill_zero(out)
    elif out.numel():
        distances(out, self[None], self[None], _norm(p), float(p), True)
    return outs


@operator("_pdist_backward", accepts=FULL_FLOATS, pin=("p",))
def pdist_backward_before_2_14(grad, self, p, pdist, outs=()):
    return _pdist_backward(grad, self, p, pdist, outs)


@operator("_pdist_backward", accepts=FULL_FLOATS, pin=("p",))
def pdist_backward(grad_output, self, p, pdist, outs=()):
    return _pdist_backward(grad_output, self, p, pdist, outs)


def _pdist_backward(grad, self, p, pdist, outs):
    _check_rows(self)
    norm, n = _norm(p), len(self)
    pairs = (n * max(n - 1, 0) // 2,)
    if any(tuple(x.shape) != pairs or x.dtype is not self.dtype for x in (grad, pdist)) or not pdist.is_contiguous():
        raise Decline(
            f"gradient of {grad.dtype} and shape {tuple(grad.shape)}, distances of {pdist.dtype} and "
            f"shape {tuple(pdist.shape)} for rows of {self.dtype}; contiguous vectors of {pairs} are served"
        )
    (out,) = outs = outputs((grad, self, pdist), [self.shape], [self.dtype], outs)
    if not out.numel():
        return outs
    if norm.slope is None or not pairs[0]:
        fill_zero(out)
        return outs
    if not out.is_contiguous():
        raise Decline("a gradient that is not contiguous")
    gradients(out[None], grad, self[None], self[None], pdist, norm, float(p), True)
    return outs
