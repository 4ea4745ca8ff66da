"""Factories: constants, ranges, triangles, windows, frequencies, sampling grids.

Constants are fills. All others are formulas of an element's index.
"""

# Over 500 lines: many factories of a few lines over `fresh`, `alike` and a formula of the index.

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import ALL, COMPLEX, FLOATS, MOVED, NUMBERS
from tritonite.engine.indexing.indices import INDEX_DTYPES
from tritonite.engine.movement import check_placement, fill, result, strides_like, words
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.ops import aten
from tritonite.ops.bessel import bessel_i0
from tritonite.registry import exclude, scalar_kernel
from tritonite.registry import operator as any_operator
from tritonite.runtime.symbols import number_type

operator = functools.partial(any_operator, tensors_only=True)
_TWO_PI = tl.constexpr(2 * math.pi)
_TRIANGLES = (*ALL, *COMPLEX)


def fresh(shape, dtype, layout, device, pin_memory, outs):
    """Return the output of a factory without a tensor argument: a new one on `device`, or the one in `outs`."""
    check_placement(None, layout, device, pin_memory)
    if any(type(size) is not int or size < 0 for size in shape):
        raise Decline("a size that is negative or not an integer")
    if device is None or device.index is None:
        device = devices.current_device()
    return result((), shape, outs[0].dtype if outs else dtype, outs, device=device)


def check_contiguous(outs):
    """Decline an output that is not contiguous: ATen writes it by slices or copies, with other numbers."""
    if outs and not outs[0].is_contiguous():
        raise Decline("an output that is not contiguous")


def alike(self, shape, dtype, layout, device, pin_memory, outs, strides=None):
    """Return the output of a factory that takes dtype and device from `self`: a new tensor, or the one in `outs`."""
    check_placement(self, layout, device, pin_memory)
    if any(size < 0 for size in shape):
        raise Decline(f"a negative size in {tuple(shape)}")
    dtype = outs[0].dtype if outs else self.dtype if dtype is None else dtype
    return result((self,), shape, dtype, outs, strides)


def _fill(out, value):
    fill(out, value)
    return (out,)


def _dtype_of(number):
    """Return the dtype of a tensor that is filled with a number."""
    kind = number_type(number)
    if kind is complex:
        raise Decline("a complex fill value")
    return torch.get_default_dtype() if kind is float else torch.bool if kind is bool else torch.int64


@operator("full", accepts=ALL)
def full(size, fill_value, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    dtype = _dtype_of(fill_value) if dtype is None else dtype
    return _fill(fresh(size, dtype, layout, device, pin_memory, outs), fill_value)


@operator("zeros", accepts=MOVED)
def zeros(size, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return _fill(fresh(size, dtype, layout, device, pin_memory, outs), 0)


@operator("ones", accepts=ALL)
def ones(size, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return _fill(fresh(size, dtype, layout, device, pin_memory, outs), 1)


@operator("scalar_tensor", accepts=ALL)
def scalar_tensor(s, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    # The default dtype is a float, also for integers and bools.
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return _fill(fresh((), dtype, layout, device, pin_memory, outs), s)


@operator("full_like", accepts=ALL)
def full_like(self, fill_value, memory_format, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    strides = strides_like(self, memory_format)
    return _fill(alike(self, self.shape, dtype, layout, device, pin_memory, outs, strides), fill_value)


@operator("zeros_like", accepts=MOVED)
def zeros_like(self, memory_format, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _fill(alike(self, self.shape, dtype, layout, device, pin_memory, outs, strides_like(self, memory_format)), 0)


@operator("ones_like", accepts=ALL)
def ones_like(self, memory_format, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _fill(alike(self, self.shape, dtype, layout, device, pin_memory, outs, strides_like(self, memory_format)), 1)


@operator("new_full", accepts=ALL)
def new_full(self, size, fill_value, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _fill(alike(self, size, dtype, layout, device, pin_memory, outs), fill_value)


@operator("new_zeros", accepts=MOVED)
def new_zeros(self, size, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _fill(alike(self, size, dtype, layout, device, pin_memory, outs), 0)


@operator("new_ones", accepts=ALL)
def new_ones(self, size, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _fill(alike(self, size, dtype, layout, device, pin_memory, outs), 1)


@scalar_kernel(exact=("start", "step"), static=("narrow",), index=("position",), accepts=NUMBERS)
def ascending(start, step, position, narrow):
    if narrow:
        value = start.to(tl.float32) + step.to(tl.float32) * position
    else:
        value = start + step * position.to(start.dtype)
    return value


def _ends(start, end, step):
    """Return start, end and step of a range, with Python's defaults. Decline values for which ATen raises."""
    start, step = 0 if start is None else start, 1 if step is None else step
    if any(type(x) not in (bool, int, float) or not math.isfinite(x) for x in (start, end, step)):
        raise Decline("a range with a start, end or step that is not a finite real number")
    if step == 0 or (end - start) * step < 0:
        raise Decline(f"a range from {start} to {end} with step {step}")
    return start, end, step


def _fill_range(size, dtype, start, step, placement, outs):
    number = float if dtype.is_floating_point else int
    start, step = number(start), number(step)
    if not size < 2**62 or (number is int and not all(-(2**63) <= x < 2**63 for x in (start, step))):
        raise Decline(f"a range of {size} elements from {start} with step {step}, beyond 64 bits")
    out = fresh((size,), dtype, *placement, outs)
    # ATen's GPU kernel computes floats other than float64 in float32.
    narrow = out.dtype.is_floating_point and out.dtype is not torch.float64 and aten.on_gpu()
    ascending.run((start, step, 0, narrow), (out,))
    return (out,)


def _round_if_finite(rounding, count):
    return rounding(count) if math.isfinite(count) else count


@operator("arange", pin=("start", "end", "step"), accepts=NUMBERS)
def arange(end, start=None, step=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    start, end, step = _ends(start, end, step)
    if dtype is None:
        dtype = torch.get_default_dtype() if float in map(type, (start, end, step)) else torch.int64
    dtype = outs[0].dtype if outs else dtype
    if dtype not in NUMBERS:
        raise Decline(f"dtype {dtype}")
    if dtype is torch.int64:
        first, last, by = int(start), int(end), int(step)
        if by == 0:
            raise Decline(f"step {step}, which is 0 in int64")
        size = max(0, -((first - last) // by))
    else:
        size = _round_if_finite(math.ceil, (float(end) - float(start)) / float(step))
    return _fill_range(size, dtype, start, step, (layout, device, pin_memory), outs)


@operator("range", pin=("start", "end", "step"), accepts=NUMBERS)
def range_(start, end, step=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    """A range that includes its end."""
    start, end, step = _ends(start, end, step)
    dtype = outs[0].dtype if outs else torch.get_default_dtype() if dtype is None else dtype
    # ATen's GPU kernel has no bfloat16.
    if dtype not in NUMBERS or (dtype is torch.bfloat16 and aten.on_gpu()):
        raise Decline(f"dtype {dtype}")
    if dtype.is_floating_point:
        size = _round_if_finite(int, (float(end) - float(start)) / float(step) + 1)
    elif int(step) == 0:
        raise Decline(f"step {step}, which is 0 in {dtype}")
    else:
        size = (int(end) - int(start)) // int(step) + 1
    return _fill_range(size, dtype, start, step, (layout, device, pin_memory), outs)


@scalar_kernel(exact=("start", "end"), integers=("steps",), index=("position",), accepts=NUMBERS)
def between(start, end, steps, position):
    """Interpolate from the nearer end, so that both ends are exact."""
    last = tl.maximum(steps - 1, 1)
    step = (end.to(tl.float64) - start.to(tl.float64)) / last
    below, above = start + step * position, end - step * (last - position)
    return tl.where(position < steps // 2, below, above)


@operator("linspace", accepts=FLOATS)
def linspace(start, end, steps, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    dtype = outs[0].dtype if outs else torch.get_default_dtype() if dtype is None else dtype
    if dtype not in FLOATS:
        # ATen rounds steps between integers otherwise on CPUs than on GPUs.
        raise Decline(f"dtype {dtype}")
    _check_numbers(start, end)
    out = fresh((steps,), dtype, layout, device, pin_memory, outs)
    between.run((start, end if steps != 1 else start, steps, 0), (out,))
    return (out,)


def _check_numbers(*numbers):
    if any(number_type(x) not in (bool, int, float) for x in numbers):
        raise Decline("an end that is complex or not a number")


for _name in ("linspace", "logspace"):
    for _ends_are in ("Scalar_Tensor", "Tensor_Scalar", "Tensor_Tensor"):
        for _form in ("", "_out"):
            exclude(
                f"{_name}.{_ends_are}{_form}", "ATen reads its ends from the device and calls the overload of numbers"
            )


@scalar_kernel(exact=("start", "end", "base"), integers=("steps",), index=("position",), accepts=NUMBERS)
def _powersbetween(start, end, base, steps, position):
    last = tl.maximum(steps - 1, 1)
    step = (end.to(tl.float64) - start.to(tl.float64)) / last
    below, above = start + step * position, end - step * (last - position)
    return libdevice.pow(tl.broadcast_to(base, position.shape), tl.where(position < steps // 2, below, above))


@operator("logspace", accepts=FLOATS)
def logspace(start, end, steps, base, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    dtype = outs[0].dtype if outs else torch.get_default_dtype() if dtype is None else dtype
    if dtype not in FLOATS:
        raise Decline(f"dtype {dtype}")
    _check_numbers(start, end, base)
    out = fresh((steps,), dtype, layout, device, pin_memory, outs)
    _powersbetween.run((start, end if steps != 1 else start, base, steps, 0), (out,))
    return (out,)


@scalar_kernel(index=("row", "column"))
def _identity(row, column):
    return row == column


@operator("eye", accepts=ALL)
def eye(n, m=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    dtype = torch.get_default_dtype() if dtype is None else dtype
    out = fresh((n, n if m is None else m), dtype, layout, device, pin_memory, outs)
    if out.dtype not in ALL:
        raise Decline(f"dtype {out.dtype}")
    _identity.run((0, 1), (out,))
    return (out,)


@scalar_kernel(own=("self",), integers=("diagonal",), index=("row", "column"))
def _upper(self, diagonal, row, column):
    return tl.where(column - row >= diagonal, self, 0)


@scalar_kernel(own=("self",), integers=("diagonal",), index=("row", "column"))
def _lower(self, diagonal, row, column):
    return tl.where(column - row <= diagonal, self, 0)


def _triangle(kernel, self, diagonal, outs):
    if self.dim() < 2 or self.dtype not in _TRIANGLES:
        raise Decline(f"{self.dim()} dimensions of dtype {self.dtype}; matrices are served")
    if not (outs and outs[0] is self):
        outs = (result((self,), self.shape, self.dtype, outs),)
    # Counted from the first dimension: views as integers may have one more at the end.
    row = self.dim() - 2
    # All diagonals outside the matrix are equivalent, and the kernel counts in int32.
    diagonal = max(-(2**31) + 1, min(diagonal, 2**31 - 1))
    kernel.run((words(self), diagonal, row, row + 1), (words(outs[0]),))
    return outs


@operator("triu", accepts=_TRIANGLES)
def triu(self, diagonal, outs=()):
    return _triangle(_upper, self, diagonal, outs)


@operator("tril", accepts=_TRIANGLES)
def tril(self, diagonal, outs=()):
    return _triangle(_lower, self, diagonal, outs)


def _window(kernel, length, periodic, numbers, placement, outs):
    """Write a window of `length` points. A periodic window is a symmetric one of length + 1 without its last point."""
    dtype, *others = placement
    dtype = outs[0].dtype if outs else torch.get_default_dtype() if dtype is None else dtype
    if dtype not in FLOATS:
        raise Decline(f"dtype {dtype}")
    out = fresh((length,), dtype, *others, outs)
    if length == 1:
        return _fill(out, 1)
    whole = length + int(periodic is not False)
    kernel.run((*numbers, whole - 1, 0), (out,))
    return (out,)


@scalar_kernel(exact=("alpha", "beta"), integers=("last",), index=("position",), accepts=FLOATS)
def _cosine_window(alpha, beta, last, position):
    return alpha - beta * libdevice.cos(position.to(tl.float64) * _TWO_PI / last)


@scalar_kernel(integers=("last",), index=("position",), accepts=FLOATS)
def _triangular_window(last, position):
    rising = position.to(tl.float64) * 2 / last
    return tl.where(2 * position <= last, rising, 2 - rising)


@scalar_kernel(integers=("last",), index=("position",), accepts=FLOATS)
def _blackman(last, position):
    angle = position.to(tl.float64) * _TWO_PI / last
    value = 0.42 - 0.5 * libdevice.cos(angle) + 0.08 * libdevice.cos(2 * angle)
    return tl.maximum(value, 0.0)


@scalar_kernel(exact=("beta",), integers=("last",), index=("position",), accepts=FLOATS)
def _kaiser(beta, last, position):
    x = position.to(tl.float64) * 2 / last - 1
    beta = tl.broadcast_to(tl.abs(beta), x.shape)
    return bessel_i0(beta * tl.sqrt(tl.maximum(1 - x * x, 0.0))) / bessel_i0(beta)


@operator("hann_window", accepts=FLOATS)
def hann_window(window_length, periodic=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    placement = (dtype, layout, device, pin_memory)
    return _window(_cosine_window, window_length, periodic, (0.5, 0.5), placement, outs)


@operator("hamming_window", accepts=FLOATS)
def hamming_window(
    window_length,
    periodic=None,
    alpha=None,
    beta=None,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
    outs=(),
):
    numbers = (0.54 if alpha is None else alpha, 0.46 if beta is None else beta)
    return _window(_cosine_window, window_length, periodic, numbers, (dtype, layout, device, pin_memory), outs)


@operator("bartlett_window", accepts=FLOATS)
def bartlett_window(window_length, periodic=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _window(_triangular_window, window_length, periodic, (), (dtype, layout, device, pin_memory), outs)


@operator("blackman_window", accepts=FLOATS)
def blackman_window(window_length, periodic=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _window(_blackman, window_length, periodic, (), (dtype, layout, device, pin_memory), outs)


@operator("kaiser_window", accepts=FLOATS)
def kaiser_window(
    window_length, periodic=None, beta=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()
):
    numbers = (12.0 if beta is None else beta,)
    return _window(_kaiser, window_length, periodic, numbers, (dtype, layout, device, pin_memory), outs)


@scalar_kernel(exact=("spacing",), integers=("n", "wrapped"), index=("position",), accepts=FLOATS)
def _frequencies(spacing, n, wrapped, position):
    """Multiples of 1 / (n * spacing); those from index `wrapped` on are negative."""
    return tl.where(position < wrapped, position, position - n) * (1 / (n * spacing))


def _frequency(n, d, half, placement, outs):
    dtype, *others = placement
    dtype = outs[0].dtype if outs else torch.get_default_dtype() if dtype is None else dtype
    check_contiguous(outs)
    if dtype not in FLOATS or n < 0:
        raise Decline(f"n is {n} and the dtype {dtype}; floats and n of at least 0 are served")
    out = fresh((n // 2 + 1 if half else n,), dtype, *others, outs)
    _frequencies.run((d, n, n if half else (n + 1) // 2, 0), (out,))
    return (out,)


@operator("fft_fftfreq", accepts=FLOATS)
def fft_fftfreq(n, d, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _frequency(n, d, False, (dtype, layout, device, pin_memory), outs)


@operator("fft_rfftfreq", accepts=FLOATS)
def fft_rfftfreq(n, d, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _frequency(n, d, True, (dtype, layout, device, pin_memory), outs)


@scalar_kernel(
    integers=("first", "width", "slanted", "slant", "columns", "last", "corner"),
    static=("mirrored",),
    index=("position",),
    accepts=INDEX_DTYPES,
    output_dtypes=(None, None),
)
def _triangle_indices(first, width, slanted, slant, columns, last, corner, position, mirrored):
    """Row and column of the element at `position` of a lower triangle, counted row by row.

    The first `slant` rows grow by one element each from `width` on and have `slanted` elements together; the rows after
    have all `columns`. An upper triangle is a lower one that is `mirrored`: counted from the last element.
    """
    index = position.to(tl.int64)
    index = last - index if mirrored else index
    twice = 2 * width - 1
    root = libdevice.sqrt((twice * twice + 8 * tl.minimum(index, slanted)).to(tl.float64))
    row = ((root - twice.to(tl.float64)) * 0.5).to(tl.int64)
    # Correct the rounding of the root by one row.
    row = tl.where(row * width + row * (row - 1) // 2 > index, row - 1, row)
    row = tl.where((row + 1) * width + row * (row + 1) // 2 <= index, row + 1, row)
    column = index - row * width - row * (row - 1) // 2
    rest = index - slanted
    row = first + tl.where(rest < 0, row, slant + rest // columns)
    column = tl.where(rest < 0, column, rest % columns)
    return (corner - row, columns - 1 - column) if mirrored else (row, column)


def _indices_of_triangle(row, col, offset, mirrored, placement, outs):
    dtype, *others = placement
    # The schema's default is an integer that stands for int64.
    if not outs and dtype is None:
        raise Decline("dtype None, for which ATen takes the default float dtype")
    dtype = outs[0].dtype if outs else dtype if isinstance(dtype, torch.dtype) else torch.int64
    if row < 0 or col < 0 or max(row, col, abs(offset)) >= 2**31:
        raise Decline(f"{row} rows, {col} columns and offset {offset}; less than 2**31 are served")
    below = col - row - offset if mirrored else offset
    first = max(0, -below)
    rows = max(0, row - first) if col else 0
    width = min(col, first + below + 1)
    slant = min(rows, col - width)
    slanted = slant * width + slant * (slant - 1) // 2
    count = slanted + (rows - slant) * col
    # ATen's GPU kernel raises for other dtypes, but is not launched for an empty result.
    if dtype not in INDEX_DTYPES and (count or aten.on_cpu()):
        raise Decline(f"dtype {dtype}")
    out = fresh((2, count), dtype, *others, outs)
    if not count:
        return (out,)
    numbers = (first, width, slanted, slant, col, count - 1, row - 1)
    _triangle_indices.run((*numbers, 0, mirrored), (out[0], out[1]))
    return (out,)


@operator("tril_indices", accepts=INDEX_DTYPES)
def tril_indices(row, col, offset=0, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _indices_of_triangle(row, col, offset, False, (dtype, layout, device, pin_memory), outs)


@operator("triu_indices", accepts=INDEX_DTYPES)
def triu_indices(row, col, offset=0, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _indices_of_triangle(row, col, offset, True, (dtype, layout, device, pin_memory), outs)


@triton.jit
def _centred(position, size, dtype: tl.constexpr, CORNERS: tl.constexpr):
    """Coordinate of an element in [-1, 1]. The ends are the outer elements' centres with CORNERS, else their edges."""
    if CORNERS:
        x = (2 * position - size + 1).to(dtype) / tl.maximum(size - 1, 1).to(dtype)
    else:
        x = (2 * position - size + 1).to(dtype) / size.to(dtype)
    return x


@scalar_kernel(integers=("sizes",), static=("corners",), index=("at",), accepts=FLOATS)
def _transformed(x, y, z, shift, sizes, at, corners):
    """Multiply a matrix row (x, y, z, shift) by an element's coordinates, last dimension first; only volumes use z."""
    result = shift + x * _centred(at[0], sizes[0], shift.dtype, corners)
    result += y * _centred(at[1], sizes[1], shift.dtype, corners)
    if len(sizes) == 3:
        result += z * _centred(at[2], sizes[2], shift.dtype, corners)
    return result


@operator("affine_grid_generator", accepts=FLOATS)
def affine_grid_generator(theta, size, align_corners, outs=()):
    rank = len(size) - 2
    if rank not in (2, 3) or tuple(theta.shape) != (size[0], rank, rank + 1) or theta.dtype not in FLOATS:
        raise Decline(f"size {list(size)} and theta of shape {tuple(theta.shape)} and {theta.dtype}")
    if any(extent <= 0 for extent in size):
        raise Decline(f"size {list(size)}; extents have to be positive")
    if theta.dtype.itemsize == 2 and 1 in size[2:]:
        raise Decline(f"{theta.dtype} with an extent of 1 in {list(size)}, for which ATen raises")
    return affine_grid(theta, size, align_corners, outs)


def affine_grid(theta, size, align_corners, outs):
    """Return the positions that matrices of (N, rank, rank + 1) give to the elements of images or volumes."""
    rank = len(size) - 2
    out = result((theta,), (size[0], *size[2:], rank), theta.dtype, outs)
    columns = [theta[(slice(None), *[None] * rank, slice(None), k)].expand(out.shape) for k in range(rank + 1)]
    x, y, z = (*columns[:rank], columns[0])[:3]
    dims = tuple(range(rank, 0, -1))
    _transformed.run((x, y, z, columns[rank], tuple(size[:1:-1]), dims, align_corners), (out,))
    return (out,)
