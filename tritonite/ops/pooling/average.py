"""Averages over strided and adaptive windows, and their gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.movement import result
from tritonite.engine.outputs import check_layout
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_states
from tritonite.engine.windows.bounds import length, positions_of, windows_over
from tritonite.engine.windows.geometry import MAX_UNROLLED, Windows, adaptive, strided
from tritonite.engine.windows.taps import count_of, product, tap_of, unrolled_tap, zeros_for
from tritonite.errors import Decline
from tritonite.language.indices import read_at
from tritonite.language.math import true_divide
from tritonite.ops.pooling.images import (
    batched,
    check_gradient,
    check_images,
    decline_where_aten_raises,
    strides_for,
)
from tritonite.ops.reduction.sums import over_count, same
from tritonite.registry import operator, scalar_kernel

# The limits of a formula's loop, the numbers of its windows, and the divisor that all windows have.
_INTEGERS = ("taps", "sizes", "counts", "kernels", "steps", "pads", "divisor")
# The mean of whole windows as rows.
_mean = Reduction((0,), same, add_states, over_count)


@triton.jit
def _element(source, tap, begins, ends, sizes):
    """Element of the window at a tap, or 0 outside the window or the image."""
    indices, inside = (), begins[0] == begins[0]
    for d in tl.static_range(len(sizes)):
        index = begins[d] + tap[d]
        indices = indices + (index,)
        inside = inside & (index >= 0) & (index < ends[d]) & (index < sizes[d])
    return read_at(source, indices, inside, 0.0)


@scalar_kernel(
    pointer=("source",),
    integers=_INTEGERS,
    index=("at",),
    static=("kind", "unrolled", "padded"),
    accepts=FLOATS,
)
def _average(source, taps, sizes, counts, kernels, steps, pads, divisor, at, kind, unrolled, padded):
    """Sum over a window divided by its length in the image or its padding, or by `divisor` if `padded` is None."""
    begins, ends = (), ()
    for d in tl.static_range(len(at)):
        begin, end = positions_of(at[d], sizes[d], counts[d], kernels[d], steps[d], 1, pads[d], kind)
        begins, ends = begins + (begin,), ends + (end,)
    total = zeros_for(source)
    if unrolled is not None:
        for n in tl.static_range(count_of(unrolled)):
            total += _element(source, unrolled_tap(unrolled, n), begins, ends, sizes).to(total.dtype)
    else:
        for n in range(product(taps, 0)):
            total += _element(source, tap_of(n, taps), begins, ends, sizes).to(total.dtype)
    if padded is not None:
        divisor = length(begins[0], ends[0], sizes[0], pads[0], padded)
        for d in tl.static_range(1, len(at)):
            divisor = divisor * length(begins[d], ends[d], sizes[d], pads[d], padded)
    return true_divide(total, tl.broadcast_to(divisor.to(total.dtype), total.shape))


@triton.jit
def _share(grad, tap, firsts, ends, sizes, counts, kernels, steps, pads, kind: tl.constexpr, padded: tl.constexpr):
    """Gradient of the window at a tap over its length, or 0 if it does not cover the element.

    If `padded` is None the gradient is not divided.
    """
    indices, inside = (), firsts[0] == firsts[0]
    for d in tl.static_range(len(sizes)):
        index = firsts[d] + tap[d]
        indices = indices + (index,)
        inside = inside & (index < ends[d])
    loaded = read_at(grad, indices, inside, 0.0)
    value = loaded.to(tl.float64 if loaded.dtype == tl.float64 else tl.float32)
    if padded is not None:
        area = tl.where(inside, 1, 1)
        for d in tl.static_range(len(sizes)):
            begin, end = positions_of(indices[d], sizes[d], counts[d], kernels[d], steps[d], 1, pads[d], kind)
            area = area * length(begin, end, sizes[d], pads[d], padded)
        value = true_divide(value, tl.where(inside, area, 1).to(value.dtype))
    return value


@scalar_kernel(
    pointer=("grad",),
    integers=_INTEGERS,
    index=("at",),
    static=("kind", "unrolled", "padded"),
    accepts=FLOATS,
)
def _sum_of_shares(grad, taps, sizes, counts, kernels, steps, pads, divisor, at, kind, unrolled, padded):
    """Sum over the windows that cover an element of their gradients, each over the window's divisor."""
    firsts, ends = (), ()
    for d in tl.static_range(len(at)):
        first, end = windows_over(at[d], sizes[d], counts[d], kernels[d], steps[d], 1, pads[d], kind)
        firsts, ends = firsts + (first,), ends + (end,)
    total = zeros_for(grad)
    if unrolled is not None:
        for n in tl.static_range(count_of(unrolled)):
            tap = unrolled_tap(unrolled, n)
            total += _share(grad, tap, firsts, ends, sizes, counts, kernels, steps, pads, kind, padded)
    else:
        for n in range(product(taps, 0)):
            tap = tap_of(n, taps)
            total += _share(grad, tap, firsts, ends, sizes, counts, kernels, steps, pads, kind, padded)
    if padded is None:
        mean = true_divide(total, tl.broadcast_to(divisor.to(total.dtype), total.shape))
        # Where no window reaches, ATen divides nothing, so that a negative divisor leaves the sign of 0.
        total = tl.where(total == 0.0, total, mean)
    return total


def _averaged(self, windows: Windows, padded: bool, override: int | None, outs):
    """Return the average of each window, over `override` if given."""
    rank = len(windows.sizes)
    shape = (*self.shape[:-rank], *windows.counts)
    strides = strides_for(self, shape, rank)
    check_layout(outs, strides)
    out = result((self,), shape, self.dtype, outs, strides)
    if not out.numel():
        return (out,)
    images, written = batched(self, rank), batched(out, rank)
    area = windows.area(padded)
    divisor = override or area
    if divisor == area and windows.partitions() and area > MAX_UNROLLED:
        for d, (count, kernel) in enumerate(zip(windows.counts, windows.kernels, strict=True)):
            images = images.narrow(2 + 2 * d, 0, count * kernel).unflatten(2 + 2 * d, (count, kernel))
        _mean.run((images,), tuple(range(3, 3 + 2 * rank, 2)), (written,), opmath(self.dtype))
        return (out,)
    dims = tuple(range(2, 2 + rank))
    kind, taps, unrolled = windows.positions()
    lengths = None if divisor else padded
    _average.run(
        (Gathered(images, dims), taps, *windows.undilated, divisor or 1, dims, kind, unrolled, lengths), (written,)
    )
    return (out,)


def _gradient(grad_output, self, windows: Windows, padded: bool, override: int | None, outs):
    """Return the gradient by the elements of averages over windows."""
    rank = len(windows.sizes)
    check_gradient(grad_output, self, windows.counts)
    shape = tuple(self.shape)
    strides = strides_for(self, shape, rank)
    check_layout(outs, strides)
    out = result((grad_output, self), shape, self.dtype, outs, strides)
    if not out.numel():
        return (out,)
    dims = tuple(range(2, 2 + rank))
    divisor = override or windows.area(padded)
    kind, taps, unrolled = windows.over()
    lengths = None if divisor else padded
    gathered = Gathered(batched(grad_output, rank), dims)
    _sum_of_shares.run(
        (gathered, taps, *windows.undilated, divisor or 1, dims, kind, unrolled, lengths), (batched(out, rank),)
    )
    return (out,)


def _strided(rank, self, kernel_size, stride, padding, ceil_mode, override):
    check_images(self, rank, 0)
    if override == 0 or abs(override or 1) >= 2**31:
        raise Decline(f"divisor {override}; other than 0 and of 32 bits are served")
    windows = strided(self.shape[-rank:], kernel_size, stride, padding, (1,), ceil_mode)
    if rank == 3 and any(size < kernel for size, kernel in zip(windows.sizes, windows.kernels, strict=True)):
        raise Decline(f"a window of {list(windows.kernels)} in a volume of {list(windows.sizes)}")
    return windows


@operator("avg_pool2d", accepts=FLOATS)
def avg_pool2d(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, outs=()):
    windows = _strided(2, self, kernel_size, stride, padding, ceil_mode, divisor_override)
    return _averaged(self, windows, count_include_pad, divisor_override, outs)


@operator("avg_pool3d", accepts=FLOATS)
def avg_pool3d(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, outs=()):
    windows = _strided(3, self, kernel_size, stride, padding, ceil_mode, divisor_override)
    return _averaged(self, windows, count_include_pad, divisor_override, outs)


def _as_row(images: torch.Tensor) -> torch.Tensor:
    """Return sequences as images of one row."""
    if images.dim() not in (2, 3):
        raise Decline(f"shape {tuple(images.shape)}; sequences with channels are served")
    return images.unsqueeze(-2)


def _in_a_row(numbers, other):
    if len(numbers) > 1:
        raise Decline(f"{list(numbers)} for sequences; one number is served")
    return [other, *numbers] if len(numbers) else []


@operator("avg_pool1d", accepts=FLOATS)
def avg_pool1d(self, kernel_size, stride, padding, ceil_mode, count_include_pad, outs=()):
    arguments = (_in_a_row(kernel_size, 1), _in_a_row(stride, 1), _in_a_row(padding, 0))
    (out,) = avg_pool2d(
        _as_row(self), *arguments, ceil_mode, count_include_pad, None, outs=[_as_row(out) for out in outs]
    )
    return (outs[0] if outs else out.squeeze(-2),)


@operator("avg_pool2d_backward", accepts=FLOATS)
def avg_pool2d_backward(
    grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, outs=()
):
    windows = _strided(2, self, kernel_size, stride, padding, ceil_mode, divisor_override)
    return _gradient(grad_output, self, windows, count_include_pad, divisor_override, outs)


@operator("avg_pool3d_backward", accepts=FLOATS)
def avg_pool3d_backward(
    grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, outs=()
):
    decline_where_aten_raises()
    windows = _strided(3, self, kernel_size, stride, padding, ceil_mode, divisor_override)
    return _gradient(grad_output, self, windows, count_include_pad, divisor_override, outs)


def _adaptive(rank, self, output_size, outs):
    # ATen refuses volumes without channels, but not images without channels.
    check_images(self, rank, 0 if self.dim() == 5 else 1)
    return _averaged(self, adaptive(self.shape[-rank:], output_size), False, None, outs)


@operator("_adaptive_avg_pool2d", "adaptive_avg_pool2d", accepts=FLOATS)
def adaptive_avg_pool2d(self, output_size, outs=()):
    return _adaptive(2, self, output_size, outs)


@operator("_adaptive_avg_pool3d", "adaptive_avg_pool3d", accepts=FLOATS)
def adaptive_avg_pool3d(self, output_size, outs=()):
    return _adaptive(3, self, output_size, outs)


@operator("adaptive_avg_pool1d", accepts=FLOATS)
def adaptive_avg_pool1d(self, output_size, outs=()):
    size = _in_a_row(output_size, 1)
    (out,) = _adaptive(2, _as_row(self), size, [_as_row(out) for out in outs])
    return (outs[0] if outs else out.squeeze(-2),)


def _adaptive_gradient(rank, grad_output, self, outs):
    decline_where_aten_raises()
    check_images(self, rank, 1)
    windows = adaptive(self.shape[-rank:], grad_output.shape[-rank:])
    return _gradient(grad_output, self, windows, False, None, outs)


@operator("_adaptive_avg_pool2d_backward", accepts=FLOATS)
def adaptive_avg_pool2d_backward(grad_output, self, outs=()):
    return _adaptive_gradient(2, grad_output, self, outs)


@operator("_adaptive_avg_pool3d_backward", "adaptive_avg_pool3d_backward", accepts=FLOATS)
def adaptive_avg_pool3d_backward(grad_output, self, outs=()):
    return _adaptive_gradient(3, grad_output, self, outs)
