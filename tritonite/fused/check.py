"""Checks of the arguments of fused operators. Each raises Decline with a reason that says what to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritonite.dtypes import FLOATS
from tritonite.engine.iteration import never_overlaps_itself
from tritonite.errors import Decline


def check_alike(**tensors: torch.Tensor | None) -> None:
    """Decline tensors that differ in shape, dtype or device, or have no dimension; None is skipped."""
    (first_name, first), *others = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    check_floats(**{first_name: first})
    if not first.dim():
        raise Decline(f"{first_name} has no dimension: it needs a dimension that rows lie along")
    for name, tensor in others:
        check_shape(name, tensor, first.shape, f"the shape of {first_name}")
        if tensor.dtype is not first.dtype:
            raise Decline(f"{name} is {tensor.dtype} and {first_name} {first.dtype}: give both one dtype")
        check_device(name, tensor, first_name, first)


def check_parameters(x: torch.Tensor, size: int, **parameters: torch.Tensor | None) -> None:
    """Decline parameters that have not `size` elements, the dtype of x or float32, and its device; None is skipped."""
    for name, parameter in parameters.items():
        if parameter is not None:
            check_shape(name, parameter, (size,), "that of x's last dimension")
            if parameter.dtype not in (x.dtype, torch.float32):
                raise Decline(f"{name} is {parameter.dtype}: it may be {x.dtype}, as x is, or torch.float32")
            check_device(name, parameter, "x", x)


def check_sinks(sinks: torch.Tensor, query: torch.Tensor, heads: int) -> None:
    """Decline sinks that have not one element for each of `heads`, query's dtype or float32, and its device."""
    check_shape("sinks", sinks, (heads,), "one element for each head of query")
    if sinks.dtype not in (query.dtype, torch.float32):
        raise Decline(f"sinks is {sinks.dtype}: it may be {query.dtype}, as query is, or torch.float32")
    check_device("sinks", sinks, "query", query)


def check_floats(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise Decline(f"{name} is {tensor.dtype}: it may be float16, bfloat16, float32 or float64")


def share_memory(*tensors: torch.Tensor) -> bool:
    """Return whether elements of one of the tensors, which a call writes, may share memory with each other."""
    return any(each.numel() and not never_overlaps_itself(each.shape, each.stride()) for each in tensors)


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int], whose: str) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise Decline(f"{name} has the shape {tuple(tensor.shape)}: it must have {whose}, {tuple(shape)}")


def check_device(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if tensor.device != other.device:
        raise Decline(f"{name} is on {tensor.device} and {other_name} on {other.device}: bring both to one device")
