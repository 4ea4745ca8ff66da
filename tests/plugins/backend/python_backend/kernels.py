"""ATen's kernels at PrivateUse1: memory and views here, all others by the CPU's kernels on the same memory."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from python_backend.memory import allocate, on_host
from python_backend.runtime import MODULE, device_type

aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_libraries: list[Any] = []


def empty_strided(
    size: Sequence[int], stride: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None, **_: Any
) -> torch.Tensor:
    """Allocate a tensor on the device."""
    dtype = dtype or torch.get_default_dtype()
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
    vector = allocate(extent * dtype.itemsize)
    # The CPU's kernels of views look at sizes and strides alone.
    typed = aten.view.dtype.redispatch(_CPU, vector, dtype)
    return as_strided(typed, size, stride, 0)


def empty(size: Sequence[int], dtype: Any = None, memory_format: Any = None, **options: Any) -> torch.Tensor:
    like = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    return empty_strided(size, like.stride(), dtype)


def as_strided(self: Any, size: Any, stride: Any, storage_offset: Any = None) -> torch.Tensor:
    return aten.as_strided.default.redispatch(_CPU, self, size, stride, storage_offset)


def resize(self: torch.Tensor, size: Sequence[int], memory_format: Any = None) -> torch.Tensor:
    strides = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format).stride()
    if tuple(self.shape) == tuple(size):
        return self
    needed = (self.storage_offset() + torch.Size(size).numel()) * self.dtype.itemsize
    storage = self.untyped_storage() if self.untyped_storage().nbytes() >= needed else None
    storage = allocate(needed).untyped_storage() if storage is None else storage
    return set_(self, storage, self.storage_offset(), size, strides)


def set_(self: Any, source: Any, offset: int = 0, size: Any = None, stride: Any = None) -> torch.Tensor:
    if isinstance(source, torch.Tensor):
        source, offset, size, stride = source.untyped_storage(), source.storage_offset(), source.shape, source.stride()
    if size is None:
        size, stride = (source.nbytes() // self.dtype.itemsize,), (1,)
    return aten.set_.source_Storage_storage_offset.redispatch(_CPU, self, source, offset, size, stride)


def copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between devices: both are in the CPU's memory."""
    with _disable_current_modes():
        _host(dst).copy_(_host(self))
    return dst


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return on_host(tensor) if tensor.device.type == device_type() else tensor


def on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the CPU's kernel of an operator on the device's memory. Fresh results are copied to the device."""
    theirs: dict[int, torch.Tensor] = {}
    resized: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_cpu(value: Any, out: bool) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == device_type():
            # An empty output is one that ATen may resize, which memory of another owner cannot be.
            view = torch.empty(0, dtype=value.dtype) if out and not value.numel() else on_host(value)
            if out and not value.numel():
                resized.append((value, view))
            theirs[id(view)] = value
            alive.append(view)
            return view
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def to_device(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in theirs:
            return theirs[id(value)]
        memory = value.untyped_storage().data_ptr()
        for own in theirs.values():
            if memory and own.untyped_storage().data_ptr() == memory:
                return as_strided(own, value.shape, value.stride(), value.storage_offset())
        return moved(value)

    alive: list[torch.Tensor] = []
    arguments = op._schema.arguments
    given = {**dict(zip([each.name for each in arguments], args, strict=False)), **kwargs}
    outs = {each.name for each in arguments if each.is_out}
    if "generator" in {each.name for each in arguments} and given.get("generator") is None:
        kwargs = kwargs | {"generator": MODULE.default_generators[0]}
    with _disable_current_modes():
        host_args = pytree.tree_map(lambda value: to_cpu(value, False), args)
        host_kwargs = {
            name: pytree.tree_map(lambda value, name=name: to_cpu(value, name in outs), each)
            for name, each in kwargs.items()
        }
        result = op(*host_args, **host_kwargs)
        for own, view in resized:
            resize(own, view.shape)
            on_host(own).copy_(view)
        return pytree.tree_map(to_device, result)


def moved(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a CPU tensor on the device, with its strides."""
    result = empty_strided(value.shape, value.stride(), value.dtype)
    if value.numel():
        size = 1 + sum(itertools.starmap(lambda n, step: (n - 1) * step, zip(value.shape, value.stride(), strict=True)))
        ctypes.memmove(result.data_ptr(), value.data_ptr(), size * value.dtype.itemsize)
    return result


def convolution(*args: Any) -> Any:
    """Run the CPU's convolution. PyTorch calls this operator on devices that it does not know, before any fallback."""
    return on_cpu(aten.convolution.default, *args)


def convolution_backward(grad: torch.Tensor, *args: Any) -> Any:
    """Run the backward pass of the CPU's convolution, which takes the bias's sizes after input and weight."""
    return on_cpu(aten.convolution_backward.default, grad, *args[:2], [grad.shape[1]], *args[2:])


def _by_cpu(name: str) -> Any:
    """Return the CPU's kernel of views, which looks at sizes and strides alone."""
    packet, _, overload = name.partition(".")
    function = getattr(getattr(aten, packet), overload or "default")
    return lambda *args, **kwargs: function.redispatch(_CPU, *args, **kwargs)


def register() -> None:
    """Register the device's kernels with PyTorch."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    own = {
        "empty.memory_format": empty,
        "empty_strided": empty_strided,
        "as_strided": as_strided,
        "resize_": resize,
        "set_.source_Storage": set_,
        "set_.source_Storage_storage_offset": set_,
        "set_.source_Tensor": set_,
        "_copy_from": copy_from,
        "_copy_from_and_resize": lambda self, dst: copy_from(self, resize(dst, self.shape)),
        "_local_scalar_dense": lambda self: on_host(self).item(),
        "convolution_overrideable": convolution,
        "convolution_backward_overrideable": convolution_backward,
    }
    for name in ("view", "_reshape_alias", "unfold", "_unsafe_view"):
        own[name] = _by_cpu(name)
    for name, function in own.items():
        library.impl(name, function, "PrivateUse1")
    others = torch.library.Library("_", "IMPL")
    _libraries.append(others)
    others.fallback(on_cpu, "PrivateUse1")
