"""Plug-ins: how kinds of devices are found, ours and those of other packages.

A plug-in is a `Device`, or a function without arguments that returns a `Device`, or None if there is none of its kind
here. Ours are modules of this folder with such a function `device`; other packages name theirs in the entry point group
`tritonite.devices`. A plug-in that fails is left out with a warning of one line.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch

from tritonite.devices.record import KINDS, Device

GROUP = "tritonite.devices"
# Our own plug-ins, which every process asks first.
BUILT_IN = ("nvidia", "amd", "interpreter")
# By entry point: why a plug-in was left out.
broken: dict[str, str] = {}


def _known() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield (name, package, function that loads it) of each plug-in."""
    for name in BUILT_IN:
        yield name, "tritonite", lambda name=name: importlib.import_module(f"tritonite.devices.{name}").device  # type: ignore[misc]
    for entry in metadata.entry_points(group=GROUP):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
        yield entry.name, package, entry.load


def found() -> list[Device]:
    """Return the devices of all plug-ins that have one here, each named after its package."""
    kinds: dict[str, Device] = {}
    for name, package, load in _known():
        try:
            made = load()
            device = made() if callable(made) else made
            if device is not None:
                _check(device, kinds)
                kinds[device.kind] = replace(device, plugin=package)
        except Exception as error:  # noqa: BLE001 - a plug-in's mistake must not keep Tritonite from being imported
            (reason, *_) = str(error).splitlines() or [""]
            leave_out(name, package, f"{type(error).__name__}: {reason}")
    return list(kinds.values())


def leave_out(name: str, package: str, reason: str) -> None:
    """Note, and warn in one line, that a plug-in is not served."""
    broken[name] = reason
    warnings.warn(f"device plug-in {name!r} of {package} is left out: {reason}", stacklevel=2)


def _check(device: object, kinds: dict[str, Device]) -> None:
    """Raise TypeError or ValueError, with what is wrong, for a plug-in that cannot be served."""
    if not isinstance(device, Device):
        raise TypeError(f"it gives {type(device).__name__}, where a tritonite.devices.Device is expected")
    if device.kind in kinds:
        raise ValueError(f"kind {device.kind!r} is {kinds[device.kind].plugin}'s already")
    if any(device.dispatch_key == other.dispatch_key for other in kinds.values()):
        raise ValueError(f"another device is registered at dispatch key {device.dispatch_key} already")
    if not hasattr(torch._C.DispatchKey, device.dispatch_key):
        raise ValueError(f"dispatch_key {device.dispatch_key!r} is none of PyTorch's")
    if device.aten not in ("cpu", "cuda"):
        raise ValueError(f"aten is {device.aten!r}: it may be 'cpu' or 'cuda'")
    if device.kind not in KINDS and device.like not in KINDS:
        raise ValueError(f"like is {device.like!r}: it may be one of {', '.join(KINDS)}")
    torch.device(device.type)
