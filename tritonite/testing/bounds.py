"""Checks that interpreted kernels access only the memory of their launch's tensors, as memcheck does on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite.language import launches

# Atomics on a byte read and write the word that has it, and GPUs allocate whole words.
_WORD = 4
# Kernels of these modules read the addresses of their tensors from a table.
_BY_ADDRESS = "tritonite.engine.lists"
# The interpreter's functions that access memory, with the place of the mask among their arguments.
_ACCESSES = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3, "create_atomic_cas": None}


class OutsideMemory(Exception):
    """A kernel accesses memory that no tensor of its launch has."""


class _Launch:
    """The kernel that runs, and [first byte, end) of its tensors' memory, (2, tensors); None if it is not checked."""

    name = ""
    memory: np.ndarray[Any, np.dtype[np.uint64]] | None = None


@contextlib.contextmanager
def checked_bounds() -> Iterator[None]:
    """Have an interpreted kernel that accesses memory outside its tensors' storages fail within the context.

    The launch raises Triton's InterpreterError, whose cause is an OutsideMemory.
    """
    launch = _Launch()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(launches, "execute", _noting(launches.execute, launch)))
        for name, mask in _ACCESSES.items():
            own = getattr(InterpreterBuilder, name)
            stack.enter_context(mock.patch.object(InterpreterBuilder, name, _checking(own, mask, launch)))
        yield


def _noting(execute: Callable[..., None], launch: _Launch) -> Callable[..., None]:
    """Return `launches.execute` that notes the memory of each launch."""

    def noting(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launch.name = self.fn.__name__
        launch.memory = None
        if not self.fn.__module__.startswith(_BY_ADDRESS):
            found = sorted(set(_memory((args, tuple(kwargs.values())))))
            launch.memory = np.array(found, np.uint64).reshape(-1, 2).T
        try:
            execute(self, *args, **kwargs)
        finally:
            launch.memory = None

    return noting


def _memory(value: Any) -> Iterator[tuple[int, int]]:
    """Yield (first byte, end) of the storages of tensors in nested arguments, in whole words."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.nbytes():
            first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            yield first // _WORD * _WORD, -(-end // _WORD) * _WORD
    elif isinstance(value, TensorDescriptor):
        yield from _memory(value.base)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _memory(item)


def _checking(own: Callable[..., Any], mask: int | None, launch: _Launch) -> Callable[..., Any]:
    """Return a function of the interpreter that first checks where it accesses memory."""

    def checking(self: InterpreterBuilder, *args: Any, **kwargs: Any) -> Any:
        if launch.memory is not None:
            # rmw's first argument is its operation.
            pointers = next(each for each in args if isinstance(each, TensorHandle))
            active = None if mask is None else kwargs["mask"] if "mask" in kwargs else args[mask]
            _check(pointers, active, launch)
        return own(self, *args, **kwargs)

    return checking


def _check(pointers: TensorHandle, mask: TensorHandle | None, launch: _Launch) -> None:
    """Raise OutsideMemory if an active pointer points outside the launch's memory."""
    assert launch.memory is not None
    first = np.asarray(pointers.data)
    if mask is not None:
        first = first[np.broadcast_to(mask.data, first.shape)]
    first = first.reshape(-1).astype(np.uint64)
    if not first.size:
        return
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    begins, ends = launch.memory
    # Storages do not overlap, so that the last one that begins before a pointer is the only one that can have it.
    place = np.searchsorted(begins, first, "right") - 1
    inside = place >= 0
    inside[inside] = first[inside] + np.uint64(size) <= ends[place[inside]]
    if not inside.all():
        raise OutsideMemory(f"{launch.name} accesses {int((~inside).sum())} elements outside its tensors' memory")
