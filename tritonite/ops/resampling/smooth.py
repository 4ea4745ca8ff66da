"""Linear, bilinear, trilinear and bicubic interpolation, and its gradients by gathering."""

from __future__ import annotations

import functools

from tritonite.dtypes import FLOATS
from tritonite.engine.iteration import contiguous_strides
from tritonite.engine.movement import move
from tritonite.engine.outputs import check_layout
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.errors import Decline
from tritonite.language.interpolation import cubic_taps, linear_taps
from tritonite.ops import aten
from tritonite.ops.resampling.formulas import interpolated, interpolated_backward
from tritonite.ops.resampling.scales import (
    Resampling,
    check_gradient,
    check_sizes,
    output_like,
    sampled_scale,
    scaled_size,
)
from tritonite.registry import operator as any_operator

operator = functools.partial(any_operator, tensors_only=True)
_ONE, _TWO, _THREE = ("scales",), ("scales_h", "scales_w"), ("scales_d", "scales_h", "scales_w")


def _resampling(taps, input_size, output_size, corners, scales):
    """Return the sizes and scales. ATen's CPU kernels of linear interpolation ignore a scale where a size stays."""
    found = []
    for size, output, given in zip(input_size[2:], output_size, scales, strict=True):
        ignored = aten.on_cpu() and taps is linear_taps and size == output
        found.append(sampled_scale(size, output, corners, None if ignored else given))
    return Resampling(tuple(input_size[2:]), tuple(output_size), tuple(found))


def _forward(taps, self, output_size, corners, scales, outs):
    dimensions = len(scales)
    check_sizes(self.shape, output_size, dimensions)
    if self.dtype not in FLOATS:
        raise Decline(f"dtype {self.dtype}; floats are served")
    resampling = _resampling(taps, self.shape, output_size, corners, scales)
    out = output_like(self, (*self.shape[:2], *output_size), outs, dimensions > 1)
    if resampling.copies():
        move(self, out)
    else:
        dims = resampling.dims
        numbers = resampling.padded_scales
        interpolated.run((Gathered(self, dims), resampling.sizes, dims, *numbers, taps, corners), (out,))
    return (out,)


def _staying(taps, resampling):
    """Return bits of the dimensions along which gradients are copied, as in ATen's CPU kernels of linear interpolation.

    A neighbour with a weight of 0 would make nan of a gradient that is nan.
    """
    if aten.on_gpu() or taps is not linear_taps:
        return 0
    every = zip(resampling.sizes, resampling.outputs, strict=True)
    return sum(1 << d for d, (size, output) in enumerate(every) if size == output)


def _backward(taps, grad_output, output_size, input_size, corners, scales, outs):
    dimensions = len(scales)
    check_sizes(input_size, output_size, dimensions)
    check_gradient(grad_output, output_size, input_size)
    resampling = _resampling(taps, input_size, output_size, corners, scales)
    if aten.on_cpu() and taps is cubic_taps:
        # ATen's kernel for CPUs writes the gradient as if it were row-major.
        check_layout(outs, contiguous_strides(tuple(input_size)))
    out = output_like(grad_output, input_size, outs, dimensions > 1 and taps is linear_taps)
    # ATen's CPU kernels of linear interpolation add to 0, which makes -0.0 positive.
    if resampling.copies() and (aten.on_gpu() or taps is cubic_taps):
        move(grad_output, out)
        return (out,)
    # An element is among the taps of outputs with coordinates from `radius` before its index to `radius` behind it.
    radius, shift = 1.0 if taps is linear_taps else 2.0, 0.0 if corners else 0.5
    reach = shift - radius
    dims = resampling.dims
    counts = resampling.counts(reach, 2 * radius, shift)
    numbers = (*resampling.padded_scales, reach)
    operands = (Gathered(grad_output, dims), resampling.sizes, resampling.outputs, counts, dims)
    interpolated_backward.run((*operands, *numbers, taps, corners, _staying(taps, resampling)), (out,))
    return (out,)


@operator("upsample_linear1d", accepts=FLOATS, pin=_ONE)
def upsample_linear1d(self, output_size, align_corners, scales=None, outs=()):
    return _forward(linear_taps, self, output_size, align_corners, (scales,), outs)


@operator("upsample_bilinear2d", accepts=FLOATS, pin=_TWO)
def upsample_bilinear2d(self, output_size, align_corners, scales_h=None, scales_w=None, outs=()):
    return _forward(linear_taps, self, output_size, align_corners, (scales_h, scales_w), outs)


@operator("upsample_bilinear2d", accepts=FLOATS, pin=("scale_factors",))
def upsample_bilinear2d_by_factors(input, output_size, align_corners, scale_factors, outs=()):
    size = scaled_size(input.shape, output_size, scale_factors)
    return _forward(linear_taps, input, size, align_corners, scale_factors or (None, None), outs)


@operator("upsample_trilinear3d", accepts=FLOATS, pin=_THREE)
def upsample_trilinear3d(self, output_size, align_corners, scales_d=None, scales_h=None, scales_w=None, outs=()):
    return _forward(linear_taps, self, output_size, align_corners, (scales_d, scales_h, scales_w), outs)


@operator("upsample_bicubic2d", accepts=FLOATS, pin=_TWO)
def upsample_bicubic2d(self, output_size, align_corners, scales_h=None, scales_w=None, outs=()):
    return _forward(cubic_taps, self, output_size, align_corners, (scales_h, scales_w), outs)


@operator("upsample_linear1d_backward", accepts=FLOATS, pin=_ONE)
def upsample_linear1d_backward(grad_output, output_size, input_size, align_corners, scales=None, outs=()):
    return _backward(linear_taps, grad_output, output_size, input_size, align_corners, (scales,), outs)


@operator("upsample_bilinear2d_backward", accepts=FLOATS, pin=_TWO)
def upsample_bilinear2d_backward(
    grad_output, output_size, input_size, align_corners, scales_h=None, scales_w=None, outs=()
):
    return _backward(linear_taps, grad_output, output_size, input_size, align_corners, (scales_h, scales_w), outs)


@operator("upsample_trilinear3d_backward", accepts=FLOATS, pin=_THREE)
def upsample_trilinear3d_backward(
    grad_output, output_size, input_size, align_corners, scales_d=None, scales_h=None, scales_w=None, outs=()
):
    scales = (scales_d, scales_h, scales_w)
    return _backward(linear_taps, grad_output, output_size, input_size, align_corners, scales, outs)


@operator("upsample_bicubic2d_backward", accepts=FLOATS, pin=_TWO)
def upsample_bicubic2d_backward(
    grad_output, output_size, input_size, align_corners, scales_h=None, scales_w=None, outs=()
):
    return _backward(cubic_taps, grad_output, output_size, input_size, align_corners, (scales_h, scales_w), outs)
