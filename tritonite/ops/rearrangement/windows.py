"""Sliding windows as columns, and sums of the elements that windows share."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from tritonite.dtypes import FLOATS
from tritonite.engine.movement import result, words
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.errors import Decline
from tritonite.language.indices import read_at
from tritonite.ops.rearrangement.order import operator
from tritonite.ops.rearrangement.padding import EXTENDED
from tritonite.registry import scalar_kernel

# Largest window of col2im that is unrolled, so that all its loads are in flight at once; a compile for each size.
_MAX_UNROLLED = 16


@scalar_kernel(pointer=("source",), integers=("sizes", "strides", "dilations", "pads"), index=("at",))
def _in_windows(source, sizes, strides, dilations, pads, at):
    """Element of the image, or 0 in the padding. `at` is (row, column) in the window, then that of the window."""
    indices, inside = (), at[0] >= 0
    for d in tl.static_range(2):
        index = at[d] * dilations[d] + at[d + 2] * strides[d] - pads[d]
        indices = indices + (index,)
        inside = inside & (index >= 0) & (index < sizes[d])
    return read_at(source, indices, inside, 0)


def _check_contiguous(outs):
    if outs and not outs[0].is_contiguous():
        raise Decline("an output that is not contiguous, which ATen takes for contiguous")


def _windows(sizes, kernel_size, dilation, padding, stride):
    """Return the number of windows along the two dimensions of an image."""
    if any(len(numbers) != 2 for numbers in (sizes, kernel_size, dilation, padding, stride)):
        raise Decline("a kernel size, dilation, padding or stride that is not a pair")
    every = zip(sizes, kernel_size, dilation, padding, stride, strict=True)
    if any(min(kernel, spread, step) < 1 or pad < 0 for _, kernel, spread, pad, step in every):
        raise Decline(f"kernel {kernel_size}, dilation {dilation}, padding {padding}, stride {stride}")
    every = zip(sizes, kernel_size, dilation, padding, stride, strict=True)
    found = [(size + 2 * pad - spread * (kernel - 1) - 1) // step + 1 for size, kernel, spread, pad, step in every]
    if any(n < 1 for n in found):
        raise Decline(f"kernel {kernel_size} with dilation {dilation} in a padded image of {list(sizes)}")
    return found


@operator("im2col", accepts=EXTENDED)
def im2col(self, kernel_size, dilation, padding, stride, outs=()):
    if self.dim() not in (3, 4) or 0 in self.shape[-3:] or self.dtype not in EXTENDED:
        raise Decline(f"shape {list(self.shape)} of dtype {self.dtype}; images are served")
    _check_contiguous(outs)
    images = self if self.dim() == 4 else self.unsqueeze(0)
    batch, channels, *sizes = images.shape
    windows = _windows(sizes, kernel_size, dilation, padding, stride)
    shape = (batch, channels * math.prod(kernel_size), math.prod(windows))
    out = result((self,), shape if self.dim() == 4 else shape[1:], self.dtype, outs)
    # (batch, channels, height and width of a window, rows and columns of windows)
    written = (out if self.dim() == 4 else out.unsqueeze(0)).unflatten(-1, windows)
    written = words(written.unflatten(1, (channels, *kernel_size)))
    source = words(images)
    source = source.reshape(*source.shape[:4], 1, 1, *source.shape[4:])
    numbers = map(tuple, (sizes, stride, dilation, padding))
    _in_windows.run((Gathered(source, (2, 3)), *numbers, (2, 3, 4, 5)), (written,))
    return (out,)


@triton.jit
def _entry_in_window(columns, within, windows, strides, dilations, pads, at, UNIT: tl.constexpr):
    """Column entry of the window that has the element `at` at position `within`; 0 if none. UNIT: strides are 1."""
    indices, inside = within, at[0] >= 0
    for d in tl.static_range(2):
        start = at[d] + pads[d] - within[d] * dilations[d]
        window = start if UNIT else start // strides[d]
        indices = indices + (window,)
        inside = inside & (start >= 0) & (window < windows[d])
        if not UNIT:
            inside = inside & (window * strides[d] == start)
    return read_at(columns, indices, inside, 0.0)


@scalar_kernel(
    pointer=("columns",),
    integers=("kernel_size", "windows", "strides", "dilations", "pads"),
    static=("height", "width", "unit"),
    index=("at",),
    accepts=FLOATS,
)
def _sum_of_windows(columns, kernel_size, windows, strides, dilations, pads, at, height, width, unit):
    """Sum over the windows that contain an element. `height` and `width` unroll the loop, 0 keeps it."""
    element = columns[0].dtype.element_ty
    total = tl.zeros(columns[0].shape, tl.float64 if element == tl.float64 else tl.float32)
    if height > 0:
        for y in tl.static_range(height):
            for x in tl.static_range(width):
                value = _entry_in_window(columns, (y, x), windows, strides, dilations, pads, at, unit)
                total += value.to(total.dtype)
    else:
        for n in range(kernel_size[0] * kernel_size[1]):
            within = (n // kernel_size[1], n % kernel_size[1])
            value = _entry_in_window(columns, within, windows, strides, dilations, pads, at, unit)
            total += value.to(total.dtype)
    return total


@operator("col2im", accepts=FLOATS)
def col2im(self, output_size, kernel_size, dilation, padding, stride, outs=()):
    if self.dim() not in (2, 3) or 0 in self.shape[-2:] or self.dtype not in FLOATS:
        raise Decline(f"shape {list(self.shape)} of dtype {self.dtype}; columns are served")
    _check_contiguous(outs)
    columns = self if self.dim() == 3 else self.unsqueeze(0)
    windows = _windows(output_size, kernel_size, dilation, padding, stride)
    elements = math.prod(kernel_size)
    if columns.shape[1] % elements or columns.shape[2] != math.prod(windows):
        raise Decline(f"columns of shape {list(columns.shape)} for {math.prod(windows)} windows of {elements} elements")
    shape = (columns.shape[0], columns.shape[1] // elements, *output_size)
    out = result((self,), shape if self.dim() == 3 else shape[1:], self.dtype, outs)
    written = (out if self.dim() == 3 else out.unsqueeze(0)).unsqueeze(-1).unsqueeze(-1)
    source = columns.unflatten(-1, windows).unflatten(1, (shape[1], *kernel_size))
    numbers = map(tuple, (kernel_size, windows, stride, dilation, padding))
    height, width = kernel_size if elements <= _MAX_UNROLLED else (0, 0)
    unit = all(step == 1 for step in stride)
    _sum_of_windows.run((Gathered(source, (2, 3, 4, 5)), *numbers, (2, 3), height, width, unit), (written,))
    return (out,)


@scalar_kernel(pointer=("grad",), integers=("size", "step", "windows"), index=("at",), accepts=FLOATS)
def _sum_of_unfolded(grad, size, step, windows, at):
    """Sum over the windows that contain the element `at`: at most size / step, rounded up."""
    element = grad[0].dtype.element_ty
    total = tl.zeros(grad[0].shape, tl.float64 if element == tl.float64 else tl.float32)
    for n in range(tl.cdiv(size, step)):
        window = at // step - n
        within = at - window * step
        inside = (window >= 0) & (window < windows) & (within < size)
        total += read_at(grad, (window, within), inside, 0.0).to(total.dtype)
    return total


@operator("unfold_backward", accepts=FLOATS)
def unfold_backward(grad_in, input_sizes, dim, size, step, outs=()):
    rank = len(input_sizes)
    if grad_in.dtype not in FLOATS or not rank or not -rank <= dim < rank or size < 1 or step < 1:
        raise Decline(f"size {size}, step {step} and dimension {dim} of {list(input_sizes)}, {grad_in.dtype}")
    dim %= rank
    shape = list(input_sizes)
    shape[dim] = (input_sizes[dim] - size) // step + 1
    if size > input_sizes[dim] or list(grad_in.shape) != [*shape, size]:
        raise Decline(f"gradient of shape {list(grad_in.shape)} for sizes {list(input_sizes)}")
    out = result((grad_in,), input_sizes, grad_in.dtype, outs)
    # The kernel counts in int32, and a step beyond the end is never taken.
    step = min(step, input_sizes[dim])
    _sum_of_unfolded.run((Gathered(grad_in, (dim, rank)), size, step, shape[dim], dim), (out.unsqueeze(-1),))
    return (out,)
