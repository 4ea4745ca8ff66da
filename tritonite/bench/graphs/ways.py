"""Ways to run a model: eager, compiled by Inductor, as Tritonite's graphs, recorded, and from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tritonite

Call = Callable[..., Any]
# Only these ways have no gradients of their own: a training step cannot run in them.
FORWARD_ONLY = ("tritonite-record", "tritonite-file")
# Ways that write the disk caches which a second process finds.
CACHED = ("inductor", "inductor reduce-overhead", "tritonite", "tritonite-graph", "tritonite-record")


def _eager(call: Call, module: torch.nn.Module, file: Path) -> Call:
    return call


def _tritonite(call: Call, module: torch.nn.Module, file: Path) -> Call:
    tritonite.enable()
    return call


def _inductor(mode: str | None) -> Callable[[Call, torch.nn.Module, Path], Call]:
    return lambda call, module, file: torch.compile(call, mode=mode)


def _graph(mode: str | None) -> Callable[[Call, torch.nn.Module, Path], Call]:
    def wrap(call: Call, module: torch.nn.Module, file: Path) -> Call:
        import tritonite.graph  # noqa: F401 - registers the backend

        return torch.compile(call, backend="tritonite", mode=mode)

    return wrap


def _record(call: Call, module: torch.nn.Module, file: Path) -> Call:
    return tritonite.record(call)  # type: ignore[no-any-return]


def _file(call: Call, module: torch.nn.Module, file: Path) -> Call:
    tritonite.on_compile("raise")
    return tritonite.load(file, module)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[Call, torch.nn.Module, Path], Call]] = {
    "eager": _eager,
    "tritonite": _tritonite,
    "inductor": _inductor(None),
    "inductor reduce-overhead": _inductor("reduce-overhead"),
    "tritonite-graph": _graph(None),
    "tritonite-graph reduce-overhead": _graph("reduce-overhead"),
    "tritonite-record": _record,
    "tritonite-file": _file,
}
