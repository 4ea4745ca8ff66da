"""Hollow tensors: metadata without memory, for the results and scratch of a call that is described but not run.

A call that runs may have them, too: values that a kernel computes and that never reach memory are `guarded`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tritonite import devices
from tritonite.errors import Decline

# No process maps these addresses. Each tensor gets a range of its own, so that no two tensors overlap.
_FIRST, _LAST = 2**62, 2**63 - 2**60
_ALIGNMENT = 512
_next = _FIRST


def hollow(
    sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return a tensor at an unmapped address, aligned to 512 bytes as fresh memory is.

    Metadata and views work as for any tensor; reading or writing raises DataUnknown. Raises RuntimeError, as ATen does,
    for sizes beyond 64 bits.
    """
    global _next
    with _disable_current_modes():
        meta = torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device="meta")
        size = meta.untyped_storage().nbytes()
        if not size:
            return torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device=device)
        address = _next if _next + size < _LAST else _FIRST
        _next = address + -(-size // _ALIGNMENT) * _ALIGNMENT
        device = torch.device(device)
        if device.index is None:
            device = devices.indexed(device)
        storage = torch._C._construct_storage_from_data_pointer(address, device, size)
        return _wrapped(torch.empty(0, dtype=dtype, device=device).set_(storage, 0, meta.shape, meta.stride()))


def is_hollow(value: object) -> bool:
    """Return whether a value is a hollow tensor or a view of one."""
    return isinstance(value, _Hollow)


class _Guarded(threading.local):
    storages: frozenset[int] = frozenset()


_guarded = _Guarded()


@contextlib.contextmanager
def guarded(values: Iterable[torch.Tensor]) -> Iterator[None]:
    """Decline launches, and operators of ATen but views, that take one of these hollow tensors or a view of one.

    The guard holds for this thread within the with block. Tensors that are not hollow have no guard.
    """
    outer = _guarded.storages
    _guarded.storages = outer | {value.untyped_storage()._cdata for value in values if is_hollow(value)}
    try:
        yield
    finally:
        _guarded.storages = outer


def decline_guarded(*arguments: Any) -> None:
    """Raise Decline if a guarded tensor is among arguments, also within lists, tuples, dicts and descriptors."""
    if _guarded.storages:
        for value in arguments:
            _decline_guarded(value)


def _decline_guarded(value: Any) -> None:
    if isinstance(value, (list, tuple)):
        decline_guarded(*value)
    elif isinstance(value, dict):
        decline_guarded(*value.values())
    elif is_hollow(base := getattr(value, "base", value)) and base.untyped_storage()._cdata in _guarded.storages:
        raise Decline("an operator that reads or writes a fused value in memory, where it never is")


class DataUnknown(Exception):
    """Raised where a call depends on the contents of a hollow tensor."""


class _Hollow(torch.Tensor):
    """A hollow tensor. Views and `empty_like` work; operators that would read or write memory raise DataUnknown."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    plain: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # The schema of _unsafe_view names no alias.
        is_view = func.is_view or name == "_unsafe_view"
        is_empty = name.removeprefix("new_").startswith("empty") and func._overloadname != "out"
        if not is_view and not is_empty:
            decline_guarded(args, kwargs)
            raise DataUnknown
        args, kwargs = pytree.tree_map_only(cls, lambda tensor: tensor.plain, (args, kwargs or {}))
        results = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, _wrapped, results) if is_view else results


def _wrapped(tensor: torch.Tensor) -> torch.Tensor:
    result = torch.Tensor._make_subclass(_Hollow, tensor)
    result.plain = tensor
    return result


def without_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device "meta" with the sizes, strides and dtype of `tensor`."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
