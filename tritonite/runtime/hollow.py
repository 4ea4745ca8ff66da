"""Tensors without memory, which stand for results and scratch of a call that is described and not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

# No process has memory at these addresses. Each tensor has its own, so that none overlaps another.
_FIRST, _LAST = 2**62, 2**63 - 2**60
_ALIGNMENT = 512
_next = _FIRST


def hollow(
    sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return a tensor whose address is aligned as fresh memory is, and where nothing can be read or written.

    Its metadata and its views are those of any tensor. Raises RuntimeError where ATen would for sizes beyond 64 bits.
    """
    global _next
    with _disable_current_modes():
        likeness = torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device="meta")
        size = likeness.untyped_storage().nbytes()
        if not size:
            return torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device=device)
        address = _next if _next + size < _LAST else _FIRST
        _next = address + -(-size // _ALIGNMENT) * _ALIGNMENT
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        storage = torch._C._construct_storage_from_data_pointer(address, place, size)
        return _wrapped(torch.empty(0, dtype=dtype, device=place).set_(storage, 0, likeness.shape, likeness.stride()))


def is_hollow(value: object) -> bool:
    """Whether a value is such a tensor or a view of one."""
    return isinstance(value, _Hollow)


class DataUnknown(Exception):
    """What follows depends on data that nothing has computed."""


class _Hollow(torch.Tensor):
    """Its views and its likes can be taken. What would read or write its memory raises DataUnknown instead."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    plain: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (
            func.is_view or func.overloadpacket.__name__.removeprefix("new_").startswith(("empty", "_unsafe_view"))
        ):
            raise DataUnknown
        args, kwargs = pytree.tree_map_only(cls, lambda tensor: tensor.plain, (args, kwargs or {}))
        results = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, _wrapped, results) if func.is_view else results


def _wrapped(tensor: torch.Tensor) -> torch.Tensor:
    result = torch.Tensor._make_subclass(_Hollow, tensor)
    result.plain = tensor
    return result


def without_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same sizes, strides and dtype on the device "meta"."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
