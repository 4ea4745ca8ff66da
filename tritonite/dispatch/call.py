"""What a host function may ask for: memory, and what else a plan repeats for it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tritonite import launch

_poison = False


def set_poison(on: bool) -> None:
    """Whether fresh memory has all bits set, which is nan, so that an element that nobody writes shows."""
    global _poison
    _poison = on


def empty_strided(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor to write: a result, or what one launch hands on to the next."""
    result = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if _poison:
        _fill_bits(result)
    if (recorder := launch.recorder()) is not None:
        recorder.allocated((result,))
    return result


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same, contiguous."""
    sizes = [max(size, 1) for size in shape[:0:-1]]
    strides = (*itertools.accumulate(sizes, lambda a, b: a * b, initial=1),) if len(shape) else ()
    return empty_strided(tuple(shape), strides[::-1], dtype, device)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor of zeros: scratch that a kernel counts in, or that its programs tell each other by."""
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


def _fill_bits(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu":
        ctypes.memset(tensor.data_ptr(), 0xFF, storage.nbytes())
        return
    # A recorder would take it for a part of the operator.
    with _disable_current_modes():
        storage.fill_(0xFF)
