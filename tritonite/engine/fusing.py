"""Programs fused into a call of another operator: its prologue, which makes an operand, and its epilogue.

The host function of the operator knows nothing of them. It is called with a hollow tensor in the place of the operand
that the prologue makes, and of the result that the epilogue reads. An engine that serves programs asks `prologue_of`
and `epilogue_of` for each tensor before it launches anything, and passes the kernel the program's tensors instead.

So no kernel reads or writes a value that is not in memory. A launch that takes a hollow tensor declines the call, and
so does a host function without a launch that asks for the program. The program and the operator are then called one by
one, with the value in memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from tritonite.engine.pointwise.program import Program
from tritonite.errors import Decline
from tritonite.runtime.hollow import guarded, is_hollow


class Prologue(NamedTuple):
    """A program whose only result is an operand of the call. `operand` is the hollow tensor in its place."""

    program: Program
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[Any, ...]
    operand: torch.Tensor


class Epilogue(NamedTuple):
    """A program of the call's first result and of further tensors of its shape, or broadcast to it.

    `result` is the hollow tensor in the place of the call's result, and `outs` are the program's results.
    """

    program: Program
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[Any, ...]
    result: torch.Tensor
    outs: tuple[torch.Tensor, ...]


_Asked = TypeVar("_Asked", Prologue, Epilogue)


class _Local(threading.local):
    prologue: Prologue | None = None
    epilogue: Epilogue | None = None
    # The programs that an engine has asked for.
    asked: frozenset[type] = frozenset()


_local = _Local()


@contextlib.contextmanager
def fusing(prologue: Prologue | None, epilogue: Epilogue | None) -> Iterator[None]:
    """Have the host function that is called in the context compute these programs, too.

    Raises Decline if the host function uses a fused value otherwise than by asking for its program.
    """
    outer = _local.prologue, _local.epilogue, _local.asked
    _local.prologue, _local.epilogue, _local.asked = prologue, epilogue, frozenset()
    values: list[tuple[type, torch.Tensor]] = []
    if prologue is not None:
        values.append((Prologue, prologue.operand))
    if epilogue is not None:
        values.append((Epilogue, epilogue.result))
    try:
        with guarded([value for _, value in values]):
            yield
        # A tensor without elements is not hollow: an engine need not ask for the program that makes it.
        if any(kind not in _local.asked for kind, value in values if is_hollow(value)):
            raise Decline("an operator whose kernels do not ask for the program")
    finally:
        _local.prologue, _local.epilogue, _local.asked = outer


def prologue_of(tensor: torch.Tensor) -> Prologue | None:
    """Return the prologue that makes an operand, or None for a tensor in memory. Declines a view of the operand."""
    found = _local.prologue
    return _asked(found) if found is not None and _is(tensor, found.operand) else None


def epilogue_of(tensor: torch.Tensor) -> Epilogue | None:
    """Return the epilogue that reads a result, or None for a tensor in memory. Declines a view of the result."""
    found = _local.epilogue
    return _asked(found) if found is not None and _is(tensor, found.result) else None


def epilogue_sharing(tensor: torch.Tensor) -> Epilogue | None:
    """Return the epilogue that reads a result of which `tensor` is any view, or None for a tensor in memory."""
    found = _local.epilogue
    if found is None or tensor.untyped_storage()._cdata != found.result.untyped_storage()._cdata:
        return None
    return _asked(found)


def epilogue_behind(tensor: torch.Tensor) -> Epilogue | None:
    """Return the epilogue that reads a result of which `tensor` is a row-major view, or None for a tensor in memory.

    Its further tensors and its results have the view's shape. Declines more than one result, and tensors that have no
    such view.
    """
    found = epilogue_sharing(tensor)
    if found is None:
        return None
    if tensor.shape.numel() != found.result.shape.numel() or not tensor.is_contiguous() or len(found.outs) > 1:
        raise Decline("a result that is not row-major, or several of them")
    try:
        tensors = [x.expand(found.result.shape).view(tensor.shape) for x in found.tensors]
        outs = [out.view(tensor.shape) for out in found.outs]
    except RuntimeError:
        raise Decline("operands of a program that are not rows or columns of the product") from None
    return found._replace(tensors=tuple(tensors), outs=tuple(outs))


def _asked(program: _Asked) -> _Asked:
    """Note that an engine has asked for a program, and return the program."""
    _local.asked |= {type(program)}
    return program


def _is(tensor: torch.Tensor, hollow: torch.Tensor) -> bool:
    if tensor is hollow:
        return True
    if tensor.untyped_storage()._cdata != hollow.untyped_storage()._cdata:
        return False
    if tensor.shape != hollow.shape or tensor.stride() != hollow.stride() or tensor.dtype is not hollow.dtype:
        raise Decline("a view of a value that is not in memory")
    return True
