"""Copies between tensors: of bits where dtypes are equal, else with ATen's conversions. Also fills and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

from tritonite import devices, dtypes
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.iteration import common_device, contiguous_strides, may_overlap, never_overlaps_itself
from tritonite.engine.pointwise.declare import Pointwise
from tritonite.errors import Decline
from tritonite.runtime.contract import empty_strided

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _same(source):
    return source


@triton.jit
def _constant(value):
    return value


@triton.jit
def _converted(source, to):
    """Return an element in a form that the last conversion turns into ATen's result.

    ATen converts between many dtypes by way of a third.
    """
    if to == tl.int1:
        source = source != 0
    elif source.dtype.is_floating() and to.is_int():
        # Values out of range go through a wider integer, which is truncated.
        if to == tl.uint8:
            source = source.to(tl.int64)
        elif to == tl.int8 or to == tl.int16:
            source = source.to(tl.int32)
    elif to.is_floating() and to.primitive_bitwidth == 16:
        source = source.to(tl.float32)
    return source


_move = Pointwise("move", _same, {"source": "own"})
_fill = Pointwise("fill", _constant, {"value": "cast"}, truncates=True)
convert = Pointwise("convert", _converted, {"source": "own", "to": "static"})


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor as integers of its element width; complex128 has two, in an added last dimension.

    Raises Decline for dtypes that are not moved as bits.
    """
    if tensor.dtype not in dtypes.MOVED:
        raise Decline(f"dtype {tensor.dtype}")
    check_memory(tensor)
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    integer = _INTEGERS[tensor.dtype.itemsize]
    return tensor if tensor.dtype is integer else tensor.view(integer)


def check_memory(tensor: torch.Tensor) -> None:
    """Decline tensors of zeros without memory, which autograd makes and ATen's copies handle."""
    if tensor._is_zerotensor():
        raise Decline("zeros without memory")


def check_conversion(source: torch.dtype, to: torch.dtype) -> None:
    """Raise Decline if elements of `source` are not converted to `to`."""
    if source is to:
        if source not in dtypes.MOVED:
            raise Decline(f"dtype {source}")
    elif to in dtypes.COMPLEX and source in (*dtypes.ALL, *dtypes.COMPLEX):
        return
    else:
        for dtype in (source, to):
            if dtype not in dtypes.ALL:
                raise Decline(f"conversion from {source} to {to}")


def move(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Write the elements of `source`, which broadcasts, to `destination`.

    Raises Decline before anything is written. Declined are: dtypes that are not converted, tensors on several devices,
    shapes that do not broadcast, and a destination that overlaps itself. A destination may be the source, but not
    overlap it otherwise.
    """
    check_conversion(source.dtype, destination.dtype)
    check_memory(source)
    if source.dim() > destination.dim():
        raise Decline(f"shape {tuple(source.shape)} does not broadcast to {tuple(destination.shape)}")
    if source.shape != destination.shape:
        try:
            source = source.expand(destination.shape)
        except RuntimeError:
            raise Decline(f"shape {tuple(source.shape)} does not broadcast to {tuple(destination.shape)}") from None
    if source.dtype is destination.dtype:
        _move.run((words(source),), (words(destination),))
    elif source.is_complex():
        move(torch.view_as_real(source), torch.view_as_real(destination))
    elif destination.is_complex():
        components = torch.view_as_real(destination)
        move(source, components[..., 0])
        fill_zero(components[..., 1])
    else:
        convert.run((source, TRITON_DTYPES[destination.dtype]), (destination,))


def fill(out: torch.Tensor, value: Any) -> None:
    """Write a number to every element. Raises Decline for numbers and dtypes that are not converted."""
    if out.dtype in dtypes.ALL:
        _fill.run((value,), (out,))
    elif type(value) is int and value == 0:
        _fill.run((0,), (words(out),))
    else:
        raise Decline(f"dtype {out.dtype}")


def fill_zero(out: torch.Tensor) -> None:
    """Write zeros of any dtype."""
    _fill.run((0,), (words(out),))


def strides_like(tensor: torch.Tensor, memory_format: torch.memory_format | None) -> tuple[int, ...]:
    """Return the strides of a copy of a tensor in a memory format; None preserves its own. Raises Decline as ATen."""
    kept = torch.preserve_format if memory_format is None else memory_format
    try:
        with _disable_current_modes():
            return torch.empty_like(tensor, device="meta", memory_format=kept).stride()
    except (RuntimeError, TypeError) as error:
        raise Decline(str(error)) from None


def strides_in(shape: Sequence[int], memory_format: torch.memory_format) -> tuple[int, ...]:
    """Return the strides of a fresh tensor in a memory format."""
    with _disable_current_modes():
        return torch.empty(tuple(shape), device="meta", memory_format=memory_format).stride()


def through(view: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a view function returns. Raises Decline where ATen refuses the view."""
    try:
        return view(*arguments)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise Decline(str(error)) from None


def check_placement(like: torch.Tensor | None, layout: Any, device: Any, pin_memory: Any) -> None:
    """Raise Decline for a layout that is not strided, pinned memory, or a device other than that of `like`."""
    if layout not in (None, torch.strided) or pin_memory:
        raise Decline(f"layout {layout}, pin_memory {pin_memory}; served: strided and unpinned")
    if like is not None and device is not None and torch.device(device) != like.device:
        raise Decline(devices.elsewhere(device))


def result(
    inputs: Sequence[torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    outs: Sequence[torch.Tensor] = (),
    strides: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return a fresh tensor, contiguous unless it has `strides`, or the given one of `outs`.

    A given tensor must have this shape and dtype, be on the device of all inputs, and not overlap them. A fresh one
    without inputs is on `device`.
    """
    if inputs or outs:
        found, scalars = common_device(inputs, outs)
        if scalars or (device is not None and device != found):
            raise Decline("a tensor on another device")
        device = found
    assert device is not None
    if not outs:
        return empty_strided(shape, contiguous_strides(tuple(shape)) if strides is None else strides, dtype, device)
    (out,) = outs
    if tuple(out.shape) != tuple(shape) or out.dtype is not dtype:
        raise Decline(
            f"output has shape {tuple(out.shape)} and dtype {out.dtype}, the result {tuple(shape)} and {dtype}"
        )
    if not never_overlaps_itself(out.shape, out.stride()):
        raise Decline("output overlaps itself")
    if any(may_overlap(out, x) for x in inputs):
        raise Decline("output overlaps an input")
    return out
