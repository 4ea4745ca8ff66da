"""Maxima over strided and adaptive windows with their indices, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.movement import result
from tritonite.engine.outputs import check_layout, outputs
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.engine.rows.declare import INDEX, Reduction
from tritonite.engine.windows.bounds import positions_of, windows_over
from tritonite.engine.windows.geometry import MAX_UNROLLED, Bounds, Windows, adaptive, strided
from tritonite.engine.windows.taps import count_of, product, row_major, tap_of, unrolled_tap, zeros_for
from tritonite.errors import Decline
from tritonite.language.indices import read_at
from tritonite.ops import aten
from tritonite.ops.pooling.images import (
    NUMBERS,
    batched,
    check_format,
    check_gradient,
    check_images,
    decline_where_aten_raises,
    strides_for,
    strides_of_volumes,
)
from tritonite.ops.reduction.extrema import lowest
from tritonite.ops.reduction.sums import both
from tritonite.registry import operator, scalar_kernel
from tritonite.runtime.contract import decline_if_slower, empty_strided

# Fewest elements of images, and of an image for each window, for which ATen's adaptive gradient is faster.
_LARGE_IMAGES, _LARGE_WINDOWS = 2**22, 100


@triton.jit
def _with_index(x, index):
    return x, index


@triton.jit
def _pooled(a, i, b, j):
    """Choose the last nan, else the larger element, else the lower index: ATen's loops replace by `>` and by nan."""
    later = (b != b) & ((a == a) | (j > i))
    larger = (a == a) & ((b > a) | ((a == b) & (j < i)))
    return tl.where(later | larger, b, a), tl.where(later | larger, j, i)


# The maximum of a whole image as a row.
_largest = Reduction(lowest, _with_index, _pooled, both, (None, INDEX), 2)


@triton.jit
def larger_of(source, tap, begins, ends, sizes, dilations, best, index):
    """Return the larger of `best` and the element of the window at a tap, and its row-major index.

    A nan replaces every element, as in ATen's kernels.
    """
    at, inside = (), begins[0] == begins[0]
    for d in tl.static_range(len(sizes)):
        position = begins[d] + tap[d] * dilations[d]
        at = at + (position,)
        inside = inside & (position >= 0) & (position < ends[d]) & (position < sizes[d])
    value = read_at(source, at, inside, 0.0).to(best.dtype)
    replaces = inside & ((value > best) | (value != value))
    return tl.where(replaces, value, best), tl.where(replaces, row_major(at, sizes), index)


@scalar_kernel(
    pointer=("source",),
    integers=NUMBERS,
    index=("at",),
    static=("kind", "unrolled", "from_zero"),
    accepts=FLOATS,
    output_dtypes=(None, None),
)
def _maximum(source, taps, sizes, counts, kernels, steps, dilations, pads, at, kind, unrolled, from_zero):
    """Maximum of a window and its index. Without an element above -inf the index is the first, or 0 if `from_zero`."""
    begins, ends, firsts = (), (), ()
    for d in tl.static_range(len(at)):
        begin, end = positions_of(at[d], sizes[d], counts[d], kernels[d], steps[d], dilations[d], pads[d], kind)
        begins, ends = begins + (begin,), ends + (end,)
        skipped = tl.maximum(dilations[d] - 1 - begin, 0) // dilations[d]
        firsts = firsts + (begin + skipped * dilations[d],)
    best = zeros_for(source) + float("-inf")
    index = tl.broadcast_to(row_major(firsts, sizes), best.shape)
    if from_zero:
        index = index * 0
    if unrolled is not None:
        for n in tl.static_range(count_of(unrolled)):
            tap = unrolled_tap(unrolled, n)
            best, index = larger_of(source, tap, begins, ends, sizes, dilations, best, index)
    else:
        for n in range(product(taps, 0)):
            tap = tap_of(n, taps)
            best, index = larger_of(source, tap, begins, ends, sizes, dilations, best, index)
    return best, index


@triton.jit
def gradient_at(grad, indices, tap, firsts, ends, own):
    """Return the gradient of the window at a tap if its maximum has the index `own`, else 0."""
    at, inside = (), own >= 0
    for d in tl.static_range(len(firsts)):
        position = firsts[d] + tap[d]
        at = at + (position,)
        inside = inside & (position < ends[d])
    loaded = read_at(grad, at, inside, 0.0)
    value = loaded.to(tl.float64 if loaded.dtype == tl.float64 else tl.float32)
    return tl.where(read_at(indices, at, inside, -1) == own, value, 0.0)


@scalar_kernel(
    pointer=("grad", "indices"),
    integers=NUMBERS,
    index=("at",),
    static=("kind", "unrolled"),
    accepts=FLOATS,
)
def sum_of_chosen(grad, indices, taps, sizes, counts, kernels, steps, dilations, pads, at, kind, unrolled):
    """Sum of the gradients of the windows over an element whose maximum is this element."""
    firsts, ends = (), ()
    for d in tl.static_range(len(at)):
        first, end = windows_over(at[d], sizes[d], counts[d], kernels[d], steps[d], dilations[d], pads[d], kind)
        firsts, ends = firsts + (first,), ends + (end,)
    total = zeros_for(grad)
    own = row_major(at, sizes)
    if unrolled is not None:
        for n in tl.static_range(count_of(unrolled)):
            total += gradient_at(grad, indices, unrolled_tap(unrolled, n), firsts, ends, own)
    else:
        for n in range(product(taps, 0)):
            total += gradient_at(grad, indices, tap_of(n, taps), firsts, ends, own)
    return total


def value_and_index(
    self: torch.Tensor,
    others: Sequence[torch.Tensor],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    outs: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """Return the outputs of a maximum, both with these strides, or those given."""
    check_layout(outs, strides)
    checked = outputs((self, *others), [shape] * 2, (self.dtype, torch.int64), outs) if outs else ()
    if checked:
        return checked
    outputs((self, *others), [], [], ())
    return tuple([empty_strided(shape, strides, dtype, self.device) for dtype in (self.dtype, torch.int64)])


def _maximized(self, windows: Windows, strides, outs, from_zero=False):
    """Return the maximum of each window and its row-major index in the image."""
    rank = len(windows.sizes)
    shape = (*self.shape[:-rank], *windows.counts)
    outs = value_and_index(self, (), shape, strides(self, shape), outs)
    if not math.prod(shape):
        return outs
    images, written = batched(self, rank), tuple([batched(out, rank) for out in outs])
    dims = tuple(range(2, 2 + rank))
    whole = windows.kernels == windows.sizes and windows.partitions()
    if whole and math.prod(windows.sizes) > MAX_UNROLLED and written[0].stride() == written[1].stride():
        _largest.run((images,), dims, written, opmath(self.dtype))
        return outs
    kind, taps, unrolled = windows.positions()
    _maximum.run((Gathered(images, dims), taps, *windows.numbers, dims, kind, unrolled, from_zero), written)
    return outs


def check_indices(indices: torch.Tensor, grad_output: torch.Tensor) -> None:
    if indices.dtype is not torch.int64 or indices.shape != grad_output.shape:
        raise Decline(f"indices of {indices.dtype} and shape {tuple(indices.shape)} for {tuple(grad_output.shape)}")


def gradient_of_maxima(kernel, grad_output, self, indices, numbers, bounds: Bounds, strides, outs):
    """Return the gradient by the elements of maxima over windows, which are those at `indices`."""
    rank = len(bounds.taps)
    check_indices(indices, grad_output)
    shape = tuple(self.shape)
    check_layout(outs, strides(self, shape))
    out = result((grad_output, self, indices), shape, self.dtype, outs, strides(self, shape))
    if not out.numel():
        return (out,)
    dims = tuple(range(2, 2 + rank))
    gathered = [Gathered(batched(each, rank), dims) for each in (grad_output, indices)]
    kernel.run((*gathered, bounds.taps, *numbers, dims, bounds.kind, bounds.unrolled), (batched(out, rank),))
    return (out,)


def _gradient(grad_output, self, indices, windows: Windows, strides, outs):
    check_gradient(grad_output, self, windows.counts)
    bounds = windows.over()
    return gradient_of_maxima(sum_of_chosen, grad_output, self, indices, windows.numbers, bounds, strides, outs)


def strides_of_images(self, shape):
    return strides_for(self, shape, len(shape) - 2)


def row_major_strides(self, shape):
    return strides_for(self, shape, 3)


@operator("max_pool2d_with_indices", accepts=FLOATS)
def max_pool2d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode, outs=()):
    check_images(self, 2, 0)
    windows = strided(self.shape[-2:], kernel_size, stride, padding, dilation, ceil_mode)
    # ATen's kernel for channels-last images on a GPU starts with the index 0.
    from_zero = aten.on_gpu() and strides_of_images(self, tuple(self.shape))[-3] == 1 and self.shape[-3] > 1
    return _maximized(self, windows, strides_of_images, outs, from_zero)


@operator("max_pool3d_with_indices", accepts=FLOATS)
def max_pool3d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode, outs=()):
    check_images(self, 3, 0)
    check_format(self)
    windows = strided(self.shape[-3:], kernel_size, stride, padding, dilation, ceil_mode)
    return _maximized(self, windows, strides_of_volumes, outs)


@operator("max_pool2d_with_indices_backward", accepts=FLOATS)
def max_pool2d_with_indices_backward(
    grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices, outs=()
):
    check_images(self, 2, 0)
    windows = strided(self.shape[-2:], kernel_size, stride, padding, dilation, ceil_mode)
    return _gradient(grad_output, self, indices, windows, strides_of_images, outs)


@operator("max_pool3d_with_indices_backward", accepts=FLOATS)
def max_pool3d_with_indices_backward(
    grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices, outs=()
):
    decline_where_aten_raises()
    check_images(self, 3, 0)
    check_format(self)
    check_format(grad_output)
    if self.dim() == 4 and strides_of_volumes(self, tuple(self.shape))[0] == 1 and self.shape[0] > 1:
        raise Decline("a channels-last volume without a batch, whose gradient ATen gives another shape")
    windows = strided(self.shape[-3:], kernel_size, stride, padding, dilation, ceil_mode)
    return _gradient(grad_output, self, indices, windows, strides_of_volumes, outs)


def _check_adaptive(self, rank):
    """Decline empty dimensions other than the first, for which ATen raises."""
    check_images(self, rank, 1 if self.dim() == rank + 1 else 0)


@operator("adaptive_max_pool2d", accepts=FLOATS)
def adaptive_max_pool2d(self, output_size, outs=()):
    _check_adaptive(self, 2)
    return _maximized(self, adaptive(self.shape[-2:], output_size), strides_of_images, outs)


@operator("adaptive_max_pool3d", accepts=FLOATS)
def adaptive_max_pool3d(self, output_size, outs=()):
    _check_adaptive(self, 3)
    return _maximized(self, adaptive(self.shape[-3:], output_size), row_major_strides, outs)


def _decline_large_windows(self, grad_output):
    """Decline large images under large windows: ATen fills them with 0, and writes one element of each window."""
    decline_if_slower(self.numel() >= _LARGE_IMAGES and self.numel() > _LARGE_WINDOWS * grad_output.numel())


@operator("adaptive_max_pool2d_backward", accepts=FLOATS)
def adaptive_max_pool2d_backward(grad_output, self, indices, outs=()):
    decline_where_aten_raises()
    _check_adaptive(self, 2)
    _decline_large_windows(self, grad_output)
    windows = adaptive(self.shape[-2:], grad_output.shape[-2:])
    return _gradient(grad_output, self, indices, windows, strides_of_images, outs)


@operator("adaptive_max_pool3d_backward", accepts=FLOATS)
def adaptive_max_pool3d_backward(grad_output, self, indices, outs=()):
    decline_where_aten_raises()
    _check_adaptive(self, 3)
    _decline_large_windows(self, grad_output)
    windows = adaptive(self.shape[-3:], grad_output.shape[-3:])
    return _gradient(grad_output, self, indices, windows, row_major_strides, outs)
