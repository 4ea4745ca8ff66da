"""Nearest interpolation: `nearest` takes the corner of an output element, `nearest_exact` its centre."""

from __future__ import annotations

import functools

import torch

from tritonite.dtypes import FLOATS
from tritonite.engine.iteration import contiguous_strides
from tritonite.engine.movement import move, words
from tritonite.engine.outputs import check_layout
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.resampling.formulas import nearest, nearest_backward
from tritonite.ops.resampling.scales import (
    Resampling,
    check_gradient,
    check_sizes,
    output_like,
    sampled_scale,
    scaled_size,
)
from tritonite.registry import operator as any_operator
from tritonite.runtime.contract import decline_if_slower

operator = functools.partial(any_operator, tensors_only=True)
_ACCEPTED = (*FLOATS, torch.uint8)
# Terms of an element of the gradient from which on ATen is faster, as it is where most elements have none.
_MANY_TERMS = 16
_ONE, _TWO, _THREE = ("scales",), ("scales_h", "scales_w"), ("scales_d", "scales_h", "scales_w")


def _resampling(input_size, output_size, scales, exact, backward=False):
    """Return the sizes and scales. A given scale is ignored where a size stays or doubles, in some CPU kernels of ATen.

    ATen's CPU kernels of the gradient of `nearest` ignore the scale. Which of the others do depends on the layout.
    """
    sizes, outputs = tuple(input_size[2:]), tuple(output_size)
    found = []
    for size, output, given in zip(sizes, outputs, scales, strict=True):
        scale = sampled_scale(size, output, False, given)
        if aten.on_cpu() and not exact and output in (size, 2 * size) and scale != size / output:
            if not backward:
                raise Decline(f"scale {given} from size {size} to {output}, which some of ATen's CPU kernels ignore")
            scale = size / output
        found.append(scale)
    return Resampling(sizes, outputs, tuple(found))


def _copies(resampling):
    """Return whether ATen copies: its GPU kernels of images do where sizes stay, whatever the scales."""
    return aten.on_gpu() and resampling.copies() and len(resampling.sizes) == 2


def _forward(self, output_size, scales, exact, outs):
    dimensions = len(scales)
    check_sizes(self.shape, output_size, dimensions)
    if self.dtype not in _ACCEPTED:
        raise Decline(f"dtype {self.dtype}; floats and uint8 are served")
    resampling = _resampling(self.shape, output_size, scales, exact)
    out = output_like(self, (*self.shape[:2], *output_size), outs, dimensions > 1)
    if _copies(resampling) or (resampling.copies() and set(resampling.scales) == {1.0}):
        move(self, out)
    else:
        source, dims = Gathered(words(self), resampling.dims), resampling.dims
        nearest.run((source, resampling.sizes, dims, *resampling.padded_scales, exact), (words(out),))
    return (out,)


def _backward(grad_output, output_size, input_size, scales, exact, outs):
    dimensions = len(scales)
    check_sizes(input_size, output_size, dimensions)
    check_gradient(grad_output, output_size, input_size)
    resampling = _resampling(input_size, output_size, scales, exact, backward=True)
    if aten.on_gpu() and dimensions != 2:
        # ATen's kernels write the gradient as if it were row-major.
        check_layout(outs, contiguous_strides(tuple(input_size)))
    out = output_like(grad_output, input_size, outs, dimensions == 2)
    if _copies(resampling):
        move(grad_output, out)
        return (out,)
    terms = grad_output.numel() / max(1, out.numel())
    decline_if_slower(terms < 1 or terms >= _MANY_TERMS)
    shift = 0.5 if exact else 0.0
    # ATen's GPU kernels find the outputs from the inverse scale, its CPU kernels from the forward scale.
    adjoint = aten.on_cpu()
    # The index of at least one more output on either side, because coordinates are rounded.
    margin = max(resampling.scales)
    if adjoint:
        counts = resampling.counts(-margin, 1.0 + 2 * margin, shift)
    else:
        # A scale given by the user may exceed every size.
        limited = [min(n, count) for n, count in zip(resampling.inverses, resampling.outputs, strict=True)]
        counts = tuple([int(n) if n == int(n) else int(n) + 2 for n in limited])
    dims = resampling.dims
    operands = (Gathered(grad_output, dims), resampling.sizes, resampling.outputs, counts, dims)
    numbers = (*resampling.padded_scales, -margin, shift)
    nearest_backward.run((*operands, *numbers, exact, adjoint), (out,))
    return (out,)


def _by_factors(input, output_size, scale_factors, outs):
    size = scaled_size(input.shape, output_size, scale_factors)
    return _forward(input, size, scale_factors or (None, None), False, outs)


@operator("upsample_nearest1d", accepts=_ACCEPTED, pin=_ONE)
def upsample_nearest1d(self, output_size, scales=None, outs=()):
    return _forward(self, output_size, (scales,), False, outs)


@operator("_upsample_nearest_exact1d", accepts=_ACCEPTED, pin=_ONE)
def upsample_nearest_exact1d(self, output_size, scales=None, outs=()):
    return _forward(self, output_size, (scales,), True, outs)


@operator("upsample_nearest2d", accepts=_ACCEPTED, pin=_TWO)
def upsample_nearest2d(self, output_size, scales_h=None, scales_w=None, outs=()):
    return _forward(self, output_size, (scales_h, scales_w), False, outs)


@operator("upsample_nearest2d", accepts=_ACCEPTED, pin=("scale_factors",))
def upsample_nearest2d_by_factors(input, output_size, scale_factors, outs=()):
    return _by_factors(input, output_size, scale_factors, outs)


@operator("_upsample_nearest_exact2d", accepts=_ACCEPTED, pin=_TWO)
def upsample_nearest_exact2d(self, output_size, scales_h=None, scales_w=None, outs=()):
    return _forward(self, output_size, (scales_h, scales_w), True, outs)


@operator("upsample_nearest3d", accepts=_ACCEPTED, pin=_THREE)
def upsample_nearest3d(self, output_size, scales_d=None, scales_h=None, scales_w=None, outs=()):
    return _forward(self, output_size, (scales_d, scales_h, scales_w), False, outs)


@operator("_upsample_nearest_exact3d", accepts=_ACCEPTED, pin=_THREE)
def upsample_nearest_exact3d(self, output_size, scales_d=None, scales_h=None, scales_w=None, outs=()):
    return _forward(self, output_size, (scales_d, scales_h, scales_w), True, outs)


@operator("upsample_nearest1d_backward", accepts=FLOATS, pin=_ONE)
def upsample_nearest1d_backward(grad_output, output_size, input_size, scales=None, outs=()):
    return _backward(grad_output, output_size, input_size, (scales,), False, outs)


@operator("_upsample_nearest_exact1d_backward", accepts=FLOATS, pin=_ONE)
def upsample_nearest_exact1d_backward(grad_output, output_size, input_size, scales=None, outs=()):
    return _backward(grad_output, output_size, input_size, (scales,), True, outs)


@operator("upsample_nearest2d_backward", accepts=FLOATS, pin=_TWO)
def upsample_nearest2d_backward(grad_output, output_size, input_size, scales_h=None, scales_w=None, outs=()):
    return _backward(grad_output, output_size, input_size, (scales_h, scales_w), False, outs)


@operator("_upsample_nearest_exact2d_backward", accepts=FLOATS, pin=_TWO)
def upsample_nearest_exact2d_backward(grad_output, output_size, input_size, scales_h=None, scales_w=None, outs=()):
    return _backward(grad_output, output_size, input_size, (scales_h, scales_w), True, outs)


@operator("upsample_nearest3d_backward", accepts=FLOATS, pin=_THREE)
def upsample_nearest3d_backward(
    grad_output, output_size, input_size, scales_d=None, scales_h=None, scales_w=None, outs=()
):
    return _backward(grad_output, output_size, input_size, (scales_d, scales_h, scales_w), False, outs)


@operator("_upsample_nearest_exact3d_backward", accepts=FLOATS, pin=_THREE)
def upsample_nearest_exact3d_backward(
    grad_output, output_size, input_size, scales_d=None, scales_h=None, scales_w=None, outs=()
):
    return _backward(grad_output, output_size, input_size, (scales_d, scales_h, scales_w), True, outs)
