"""Moving elements from a tensor to another: as bits where both have one dtype, else converted as ATen converts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

from tritonite import dtypes
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.iteration import common_device, contiguous_strides, may_overlap, never_overlaps_itself
from tritonite.engine.pointwise.declare import Pointwise
from tritonite.errors import Decline
from tritonite.runtime.contract import empty_strided

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _same(source):
    return source


@triton.jit
def _constant(value):
    return value


@triton.jit
def _converted(source, to):
    """What the engine's last conversion makes an element of ATen's: of many dtypes ATen goes by another one."""
    if to == tl.int1:
        source = source != 0
    elif source.dtype.is_floating() and to.is_int():
        # Numbers that the dtype does not hold go by a wider integer, which is cut off.
        if to == tl.uint8:
            source = source.to(tl.int64)
        elif to == tl.int8 or to == tl.int16:
            source = source.to(tl.int32)
    elif to.is_floating() and to.primitive_bitwidth == 16:
        source = source.to(tl.float32)
    return source


_move = Pointwise("move", _same, {"source": "own"})
_fill = Pointwise("fill", _constant, {"value": "cast"}, truncates=True)
_convert = Pointwise("convert", _converted, {"source": "own", "to": "static"})


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as integers of the same width; complex128 has two for each, in a dimension behind the others.

    Raises Decline for dtypes that are not moved as bits.
    """
    if tensor.dtype not in dtypes.MOVED:
        raise Decline(f"dtype {tensor.dtype}")
    _check_memory(tensor)
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    word = _WORDS[tensor.dtype.itemsize]
    return tensor if tensor.dtype is word else tensor.view(word)


def _check_memory(tensor: torch.Tensor) -> None:
    """Autograd has tensors of zeros that have none, which ATen's copies know of."""
    if tensor._is_zerotensor():
        raise Decline("zeros without memory")


def check_conversion(source: torch.dtype, to: torch.dtype) -> None:
    """Raises Decline where elements of `source` are not converted to `to`."""
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

    Raises Decline, before anything is written, for dtypes that are not converted, tensors on several devices, shapes
    that do not broadcast, a destination that overlaps itself, or that overlaps another source than itself.
    """
    check_conversion(source.dtype, destination.dtype)
    _check_memory(source)
    if source.dim() > destination.dim():
        raise Decline("shapes do not broadcast")
    if source.shape != destination.shape:
        try:
            source = source.expand(destination.shape)
        except RuntimeError:
            raise Decline("shapes do not broadcast") from None
    if source.dtype is destination.dtype:
        _move.run((words(source),), (words(destination),))
    elif source.is_complex():
        move(torch.view_as_real(source), torch.view_as_real(destination))
    elif destination.is_complex():
        parts = torch.view_as_real(destination)
        move(source, parts[..., 0])
        fill_zero(parts[..., 1])
    else:
        _convert.run((source, TRITON_DTYPES[destination.dtype]), (destination,))


def fill(out: torch.Tensor, value: Any) -> None:
    """Write a number to every element. Raises Decline for what the dtype does not hold, and for dtypes that it is not
    converted to.
    """
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
    """The strides of a copy of a tensor in a memory format; None preserves its own. Raises Decline as ATen would."""
    kept = torch.preserve_format if memory_format is None else memory_format
    try:
        with _disable_current_modes():
            return torch.empty_like(tensor, device="meta", memory_format=kept).stride()
    except (RuntimeError, TypeError) as error:
        raise Decline(str(error)) from None


def strides_in(shape: Sequence[int], memory_format: torch.memory_format) -> tuple[int, ...]:
    """The strides of a fresh tensor in a memory format."""
    with _disable_current_modes():
        return torch.empty(tuple(shape), device="meta", memory_format=memory_format).stride()


def through(view: Callable[..., Any], *arguments: Any) -> Any:
    """What a view is. Raises Decline where ATen refuses it."""
    try:
        return view(*arguments)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise Decline(str(error)) from None


def check_placement(like: torch.Tensor | None, layout: Any, device: Any, pin_memory: Any) -> None:
    """Raises Decline for what is not strided, in ordinary memory, and on the device of `like`."""
    if layout not in (None, torch.strided) or pin_memory:
        raise Decline("another layout, or pinned memory")
    if like is not None and device is not None and torch.device(device) != like.device:
        raise Decline(f"device {device}")


def result(
    inputs: Sequence[torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    outs: Sequence[torch.Tensor] = (),
    strides: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A fresh tensor, contiguous unless it has `strides`, or the one of `outs` where it can be written.

    That has to be of this shape and dtype, on the device of all inputs, and apart from them. A fresh one without inputs
    is on `device`.
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
        raise Decline("output has another shape or dtype")
    if not never_overlaps_itself(out.shape, out.stride()):
        raise Decline("output overlaps itself")
    if any(may_overlap(out, x) for x in inputs):
        raise Decline("output overlaps an input")
    return out
