"""Tensors made of numbers and of coordinates."""

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
from tritonite.ops.bessel import bessel_i0
from tritonite.registry import exclude, scalar_kernel
from tritonite.registry import operator as any_operator
from tritonite.runtime.contract import number_type

operator = functools.partial(any_operator, tensors_only=True)
_CIRCLE = tl.constexpr(2 * math.pi)
_ON_CPU = devices.current.type == "cpu"
_TRIANGLES = (*ALL, *COMPLEX)


def fresh(shape, dtype, layout, device, pin_memory, outs):
    """What a factory writes: a tensor on its device, or the one that is given, of whatever dtype."""
    check_placement(None, layout, device, pin_memory)
    if any(type(size) is not int or size < 0 for size in shape):
        raise Decline("a negative size")
    if device is None or device.index is None:
        current = torch.cuda.current_device() if devices.current.type == "cuda" else None
        device = torch.device(devices.current.type, current)
    return result((), shape, outs[0].dtype if outs else dtype, outs, device=device)


def check_contiguous(outs):
    """Raise Decline for an output with gaps, through whose slices or copies ATen's kernels give other numbers."""
    if outs and not outs[0].is_contiguous():
        raise Decline("an output with gaps, where contiguous ones are served")


def alike(self, shape, dtype, layout, device, pin_memory, outs, strides=None):
    """What an operator writes that takes dtype and device from a tensor, of which it reads nothing."""
    check_placement(self, layout, device, pin_memory)
    if any(size < 0 for size in shape):
        raise Decline("a negative size")
    dtype = outs[0].dtype if outs else self.dtype if dtype is None else dtype
    return result((self,), shape, dtype, outs, strides)


def _fill(out, value):
    fill(out, value)
    return (out,)


def _dtype_of(number):
    """The dtype of a tensor made of a number."""
    kind = number_type(number)
    if kind is complex:
        raise Decline("a complex number")
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
    # The default dtype, whatever the number is.
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
        reached = start.to(tl.float32) + step.to(tl.float32) * position
    else:
        reached = start + step * position.to(start.dtype)
    return reached


def _ends(start, end, step):
    """Three numbers of a range, as Python's. Raises Decline where ATen refuses them."""
    start, step = 0 if start is None else start, 1 if step is None else step
    if any(type(x) not in (bool, int, float) or not math.isfinite(x) for x in (start, end, step)):
        raise Decline("ends of a range that are no finite numbers")
    if step == 0 or (end - start) * step < 0:
        raise Decline("a step away from the end")
    return start, end, step


def _ascend(size, dtype, start, step, placement, outs):
    number = float if dtype.is_floating_point else int
    start, step = number(start), number(step)
    if not size < 2**62 or (number is int and not all(-(2**63) <= x < 2**63 for x in (start, step))):
        raise Decline("a range that is longer than memory, or of integers of more than 64 bits")
    out = fresh((size,), dtype, *placement, outs)
    narrow = out.dtype.is_floating_point and out.dtype is not torch.float64 and not _ON_CPU
    ascending.run((start, step, 0, narrow), (out,))
    return (out,)


def _whole(rounded, extent):
    """How many elements an extent has, which may be infinite."""
    return rounded(extent) if math.isfinite(extent) else extent


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
            raise Decline("a step of 0")
        size = max(0, -((first - last) // by))
    else:
        size = _whole(math.ceil, (float(end) - float(start)) / float(step))
    return _ascend(size, dtype, start, step, (layout, device, pin_memory), outs)


@operator("range", pin=("start", "end", "step"), accepts=NUMBERS)
def range_(start, end, step=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    """A range with its end."""
    start, end, step = _ends(start, end, step)
    dtype = outs[0].dtype if outs else torch.get_default_dtype() if dtype is None else dtype
    if dtype not in NUMBERS or (dtype is torch.bfloat16 and not _ON_CPU):
        raise Decline(f"dtype {dtype}")
    if dtype.is_floating_point:
        size = _whole(int, (float(end) - float(start)) / float(step) + 1)
    elif int(step) == 0:
        raise Decline("a step of 0")
    else:
        size = (int(end) - int(start)) // int(step) + 1
    return _ascend(size, dtype, start, step, (layout, device, pin_memory), outs)


@scalar_kernel(exact=("start", "end"), integers=("steps",), index=("position",), accepts=NUMBERS)
def _between(start, end, steps, position):
    """From both ends, so that both are exact."""
    last = tl.maximum(steps - 1, 1)
    step = (end.to(tl.float64) - start.to(tl.float64)) / last
    below, above = start + step * position, end - step * (last - position)
    return tl.where(position < steps // 2, below, above)


@operator("linspace", accepts=FLOATS)
def linspace(start, end, steps, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    dtype = outs[0].dtype if outs else torch.get_default_dtype() if dtype is None else dtype
    if dtype not in FLOATS:
        # How ATen rounds steps between integers differs from device to device.
        raise Decline(f"dtype {dtype}")
    _check_numbers(start, end)
    out = fresh((steps,), dtype, layout, device, pin_memory, outs)
    _between.run((start, end if steps != 1 else start, steps, 0), (out,))
    return (out,)


def _check_numbers(*numbers):
    if any(number_type(x) not in (bool, int, float) for x in numbers):
        raise Decline("ends that are no numbers")


for _name in ("linspace", "logspace"):
    for _ends_are in ("Scalar_Tensor", "Tensor_Scalar", "Tensor_Tensor"):
        for _form in ("", "_out"):
            exclude(f"{_name}.{_ends_are}{_form}", "reads its ends from the device and calls the overload of numbers")


@scalar_kernel(exact=("start", "end", "base"), integers=("steps",), index=("position",), accepts=NUMBERS)
def _powers_between(start, end, base, steps, position):
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
    _powers_between.run((start, end if steps != 1 else start, base, steps, 0), (out,))
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
        raise Decline(f"no matrix, or dtype {self.dtype}")
    if not (outs and outs[0] is self):
        outs = (result((self,), self.shape, self.dtype, outs),)
    # Elements of two words have them in a dimension behind the matrix's.
    row = self.dim() - 2
    # Beyond any matrix one diagonal is like another.
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
    """A window of `length` points; a periodic one is the beginning of a symmetric one of one point more."""
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
    return alpha - beta * libdevice.cos(position.to(tl.float64) * _CIRCLE / last)


@scalar_kernel(integers=("last",), index=("position",), accepts=FLOATS)
def _triangular_window(last, position):
    rising = position.to(tl.float64) * 2 / last
    return tl.where(2 * position <= last, rising, 2 - rising)


@scalar_kernel(integers=("last",), index=("position",), accepts=FLOATS)
def _blackman(last, position):
    angle = position.to(tl.float64) * _CIRCLE / last
    value = 0.42 - 0.5 * libdevice.cos(angle) + 0.08 * libdevice.cos(2 * angle)
    return tl.maximum(value, 0.0)


@scalar_kernel(exact=("beta",), integers=("last",), index=("position",), accepts=FLOATS)
def _kaiser(beta, last, position):
    place = position.to(tl.float64) * 2 / last - 1
    beta = tl.broadcast_to(tl.abs(beta), place.shape)
    width = tl.maximum(1 - place * place, 0.0)
    return bessel_i0(beta * tl.sqrt(width)) / bessel_i0(beta)


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
    """Those from `wrapped` on are negative."""
    return tl.where(position < wrapped, position, position - n) * (1 / (n * spacing))


def _frequency(n, d, half, placement, outs):
    dtype, *others = placement
    dtype = outs[0].dtype if outs else torch.get_default_dtype() if dtype is None else dtype
    check_contiguous(outs)
    if dtype not in FLOATS or n < 0:
        raise Decline(f"dtype {dtype}, or a negative size")
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
    """The row and column of an element, counted row by row, in rows that grow by one from `width` to all `columns`.

    The rows that grow are `slant` many, with `slanted` elements. What is above a diagonal is what is below another,
    counted from the end.
    """
    at = position.to(tl.int64)
    at = last - at if mirrored else at
    twice = 2 * width - 1
    root = libdevice.sqrt((twice * twice + 8 * tl.minimum(at, slanted)).to(tl.float64))
    row = ((root - twice.to(tl.float64)) * 0.5).to(tl.int64)
    # The root is rounded.
    row = tl.where(row * width + row * (row - 1) // 2 > at, row - 1, row)
    row = tl.where((row + 1) * width + row * (row + 1) // 2 <= at, row + 1, row)
    column = at - row * width - row * (row - 1) // 2
    rest = at - slanted
    row = first + tl.where(rest < 0, row, slant + rest // columns)
    column = tl.where(rest < 0, column, rest % columns)
    return (corner - row, columns - 1 - column) if mirrored else (row, column)


def _indices_of_triangle(row, col, offset, mirrored, placement, outs):
    dtype, *others = placement
    # The schema's default is the number of a dtype.
    if not outs and dtype is None:
        raise Decline("the default dtype, which is that of floats")
    dtype = outs[0].dtype if outs else dtype if isinstance(dtype, torch.dtype) else torch.int64
    if row < 0 or col < 0 or max(row, col, abs(offset)) >= 2**31:
        raise Decline("a negative size, or a huge one")
    below = col - row - offset if mirrored else offset
    first = max(0, -below)
    rows = max(0, row - first) if col else 0
    width = min(col, first + below + 1)
    slant = min(rows, col - width)
    slanted = slant * width + slant * (slant - 1) // 2
    count = slanted + (rows - slant) * col
    # ATen's kernels for GPUs are for integers, and not asked where there are no indices.
    if dtype not in INDEX_DTYPES and (count or _ON_CPU):
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
    """Where an element is between -1 and 1, which are the centres of the first and the last, or their outer edges."""
    if CORNERS:
        place = (2 * position - size + 1).to(dtype) / tl.maximum(size - 1, 1).to(dtype)
    else:
        place = (2 * position - size + 1).to(dtype) / size.to(dtype)
    return place


@scalar_kernel(integers=("sizes",), static=("corners",), index=("at",), accepts=FLOATS)
def _transformed(x, y, z, shift, sizes, at, corners):
    """A row of a matrix times the coordinates of an element, of two or three dimensions, the last first."""
    result = shift + x * _centred(at[0], sizes[0], shift.dtype, corners)
    result += y * _centred(at[1], sizes[1], shift.dtype, corners)
    if len(sizes) == 3:
        result += z * _centred(at[2], sizes[2], shift.dtype, corners)
    return result


@operator("affine_grid_generator", accepts=FLOATS)
def affine_grid_generator(theta, size, align_corners, outs=()):
    rank = len(size) - 2
    if rank not in (2, 3) or tuple(theta.shape) != (size[0], rank, rank + 1) or theta.dtype not in FLOATS:
        raise Decline("other sizes than those of images or volumes, or a matrix that does not fit them")
    if any(extent <= 0 for extent in size):
        raise Decline("a size that is not positive")
    if theta.dtype.itemsize == 2 and 1 in size[2:]:
        raise Decline("a half type and an extent of 1, which ATen refuses")
    out = result((theta,), (size[0], *size[2:], rank), theta.dtype, outs)
    columns = [theta[(slice(None), *[None] * rank, slice(None), k)].expand(out.shape) for k in range(rank + 1)]
    x, y, z = (*columns[:rank], columns[0])[:3]
    dims = tuple(range(rank, 0, -1))
    _transformed.run((x, y, z, columns[rank], tuple(size[:1:-1]), dims, align_corners), (out,))
    return (out,)
