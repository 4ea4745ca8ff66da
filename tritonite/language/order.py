"""Programmatic dependent launch: a kernel may start while the launch before it ends, and waits before it reads."""

from __future__ import annotations

from typing import Any

from triton import knobs
from triton.language import core


def _wait(_semantic: Any = None) -> None:
    """Wait until earlier launches on this stream have ended and their writes are visible.

    A kernel calls this function before its first read or write. Devices with programmatic dependent launch schedule
    the kernel's programs while the last programs of the launch before it end (CUDA Programming Guide, "Programmatic
    Dependent Launch and Synchronization"). No kernel triggers dependents early, because a profiler would count the
    waiting as run time.
    """
    if getattr(_semantic.builder.options, "launch_pdl", False):
        assembly = "griddepcontrol.wait; // dummy $0"
        core.inline_asm_elementwise(assembly, "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic)


def _nothing() -> None:
    """Do nothing: launches run one after the other in the interpreter."""


wait_for_previous_launch = _nothing if knobs.runtime.interpret else core.builtin(_wait)


def waits(kernel: Any) -> bool:
    """Return whether a function of `triton.jit` or `gluon.jit` calls `wait_for_previous_launch` itself."""
    return "wait_for_previous_launch" in kernel.fn.__code__.co_names
