"""Bilinear and bicubic resampling with antialiasing, by Pillow's method: the kernel widens with the scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tritonite.dtypes import FLOATS, TRITON_DTYPES, opmath
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.errors import Decline
from tritonite.language.interpolation import smooth_cubic, triangle
from tritonite.ops import aten
from tritonite.ops.resampling.formulas import antialiased, antialiased_backward, total_weights
from tritonite.ops.resampling.scales import Resampling, check_gradient, check_sizes, output_like, sampled_scale
from tritonite.registry import operator as any_operator
from tritonite.runtime.contract import empty

operator = functools.partial(any_operator, tensors_only=True)
_SCALES = ("scales_h", "scales_w")
# Half the width of each filter, where the output is not smaller than the input.
_RADIUS = {triangle: 1.0, smooth_cubic: 2.0}


def _resampling(input_size, output_size, corners, scales):
    every = zip(input_size[2:], output_size, scales, strict=True)
    found = [sampled_scale(size, output, corners, given) for size, output, given in every]
    return Resampling(tuple(input_size[2:]), tuple(output_size), tuple(found))


def _supports(filter, resampling: Resampling) -> tuple[float, ...]:
    """Return half the width of the filter in each dimension."""
    return tuple([_RADIUS[filter] * max(scale, 1.0) for scale in resampling.scales])


def _unchanged_as_copies(resampling: Resampling, supports: Sequence[float]) -> tuple[Resampling, tuple[float, ...]]:
    """Return scales and supports with which a dimension whose size stays has one element under the filter.

    ATen's CPU kernels copy along such a dimension, whatever its scale. Neighbours with a weight of 0 may be nan.
    """
    every = zip(resampling.scales, supports, resampling.sizes, resampling.outputs, strict=True)
    found = [(1.0, 0.5) if size == output else (scale, support) for scale, support, size, output in every]
    return resampling._replace(scales=tuple([each[0] for each in found])), tuple([each[1] for each in found])


def _counts(supports: Sequence[float], resampling: Resampling) -> tuple[int, ...]:
    """Return the most elements under a filter in each dimension."""
    every = zip(supports, resampling.sizes, strict=True)
    return tuple([min(2 * math.ceil(support) + 1, size) for support, size in every])


def _forward(filter, self, output_size, corners, scales, outs):
    check_sizes(self.shape, output_size, 2)
    if self.dtype not in FLOATS:
        raise Decline(f"dtype {self.dtype}; floats are served")
    resampling = _resampling(self.shape, output_size, corners, scales)
    supports = _supports(filter, resampling)
    if aten.on_cpu():
        resampling, supports = _unchanged_as_copies(resampling, supports)
    out = output_like(self, (*self.shape[:2], *output_size), outs, True)
    dims = resampling.dims
    operands = (Gathered(self, dims), resampling.sizes, _counts(supports, resampling), dims)
    antialiased.run((*operands, *resampling.scales, *supports, filter), (out,))
    return (out,)


def _backward(filter, grad_output, output_size, input_size, corners, scales, outs):
    check_sizes(input_size, output_size, 2)
    check_gradient(grad_output, output_size, input_size)
    resampling = _resampling(input_size, output_size, corners, scales)
    supports = _supports(filter, resampling)
    out = output_like(grad_output, input_size, outs, filter is triangle)
    if 0 in out.shape:
        return (out,)
    compute = opmath(grad_output.dtype)
    totals = []
    for d, under in enumerate(_counts(supports, resampling)):
        shape = [1, 1, 1, 1]
        shape[2 + d] = resampling.outputs[d]
        total = empty(shape, compute, grad_output.device)
        numbers = (resampling.scales[d], supports[d], filter, TRITON_DTYPES[compute])
        total_weights.run((resampling.sizes[d], under, 2 + d, *numbers), (total,))
        totals.append(Gathered(total, (2 + d,)))
    counts = []
    for d, support in enumerate(supports):
        counts += resampling.along(d).counts(0.5 - support, 2 * support, 0.5)
    dims = resampling.dims
    operands = (Gathered(grad_output, dims), *totals, resampling.sizes, resampling.outputs, tuple(counts), dims)
    antialiased_backward.run((*operands, *resampling.scales, *supports, filter), (out,))
    return (out,)


@operator("_upsample_bilinear2d_aa", accepts=FLOATS, pin=_SCALES)
def upsample_bilinear2d_aa(self, output_size, align_corners, scales_h=None, scales_w=None, outs=()):
    return _forward(triangle, self, output_size, align_corners, (scales_h, scales_w), outs)


@operator("_upsample_bicubic2d_aa", accepts=FLOATS, pin=_SCALES)
def upsample_bicubic2d_aa(self, output_size, align_corners, scales_h=None, scales_w=None, outs=()):
    return _forward(smooth_cubic, self, output_size, align_corners, (scales_h, scales_w), outs)


@operator("_upsample_bilinear2d_aa_backward", accepts=FLOATS, pin=_SCALES)
def upsample_bilinear2d_aa_backward(
    grad_output, output_size, input_size, align_corners, scales_h=None, scales_w=None, outs=()
):
    return _backward(triangle, grad_output, output_size, input_size, align_corners, (scales_h, scales_w), outs)


@operator("_upsample_bicubic2d_aa_backward", accepts=FLOATS, pin=_SCALES)
def upsample_bicubic2d_aa_backward(
    grad_output, output_size, input_size, align_corners, scales_h=None, scales_w=None, outs=()
):
    return _backward(smooth_cubic, grad_output, output_size, input_size, align_corners, (scales_h, scales_w), outs)
