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

from tritonite.devices.record import ENGINES, KINDS, Device, NativeDriver, Override
from tritonite.devices.runtime import Runtime
from tritonite.errors import InvalidDevice, did_you_mean

GROUP = "tritonite.devices"
# Our own plug-ins, which every process asks first.
BUILT_IN = ("nvidia", "amd", "interpreter")
# Fields of a record that are counts, and those that are powers of 2 because blocks and programs are.
COUNTS = ("programs", "shared_memory", "registers")
POWERS = ("num_warps", "most_warps", "warp_size", "flat_bytes", "tile_bytes", "row_elements", "row_columns")
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
                _check(device, package, kinds)
                kinds[device.kind] = replace(device, plugin=package)
        except Exception as error:  # noqa: BLE001 - a plug-in's mistake must not keep Tritonite from being imported
            (reason, *_) = str(error).splitlines() or [""]
            leave_out(name, package, f"{type(error).__name__}: {reason}")
    return list(kinds.values())


def leave_out(name: str, package: str, reason: str) -> None:
    """Note, and warn in one line, that a plug-in is not served."""
    broken[name] = reason
    warnings.warn(f"device plug-in {name!r} of {package} is left out: {reason}", stacklevel=2)


def _check(device: object, package: str, kinds: dict[str, Device]) -> None:
    """Raise InvalidDevice, with the field and what it may be, for a plug-in's record that cannot be served."""
    if not isinstance(device, Device):
        what = "the record that the entry point gives"
        raise InvalidDevice(what=what, given=f"a {type(device).__name__}", expected="a tritonite.devices.Device")
    _check_names(device, package, kinds)
    _expect(isinstance(device.runtime, Runtime), "runtime", device.runtime, "an object of a subclass of Runtime")
    _expect(device.interpreted or device.target != "", "target", device.target, "the name of Triton's backend")
    for name in COUNTS:
        given = getattr(device, name)
        _expect(_is_count(given), name, given, "an int of 1 or more")
    for name in POWERS:
        given = getattr(device, name)
        _expect(_is_count(given) and given & (given - 1) == 0, name, given, "a power of 2")
    tile = device.transpose_tile
    _expect(isinstance(tile, tuple) and len(tile) == 2, "transpose_tile", tile, "(rows, columns)")
    for name, kind in (("tensor_cores", torch.dtype), ("unverified", str)):
        given = getattr(device, name)
        sets = isinstance(given, (set, frozenset)) and all(isinstance(each, kind) for each in given)
        _expect(sets, name, given, f"a frozenset of {'dtypes' if kind is torch.dtype else 'names'}")
    native = device.native
    _expect(native is None or isinstance(native, NativeDriver), "native", native, "a tritonite.devices.NativeDriver")
    _check_additions(device)


def _check_names(device: Device, package: str, kinds: dict[str, Device]) -> None:
    """Check what names the device: kind, type, dispatch key, and the kinds and kernels that it follows."""
    kind, key = device.kind, device.dispatch_key
    _expect(isinstance(kind, str) and kind != "", "kind", kind, "a name")
    if kind in kinds:
        raise _invalid("kind", kind, f"another name, because this kind is {kinds[kind].plugin}'s already")
    _expect(kind not in KINDS or package == "tritonite", "kind", kind, "another name than Tritonite's own kinds")
    _expect(hasattr(torch._C.DispatchKey, key), "dispatch_key", key, "one of PyTorch's keys")
    if any(key == other.dispatch_key for other in kinds.values()):
        raise _invalid("dispatch_key", key, f"another key, because a device is registered at {key} already")
    try:
        torch.device(device.type)
    except RuntimeError as error:
        expected = "a device type of PyTorch, which an entry point of torch.backends may add"
        raise _invalid("type", device.type, expected) from error
    own = torch._C._dispatch_key_for_device(device.type)
    _expect(key == own, "dispatch_key", key, f"{own}, the key of PyTorch's device type {device.type!r}")
    _expect(device.aten in ("cpu", "cuda"), "aten", device.aten, "'cpu' or 'cuda'")
    likes = kind in KINDS or device.like in KINDS
    _expect(likes, "like", device.like, f"one of {', '.join(map(repr, KINDS))}")


def _check_additions(device: Device) -> None:
    """Check the tables and the overrides. Whether their names and functions exist is known after import."""
    for name, change in device.tables.items():
        what = f"the key {name!r} in tables"
        if name not in ENGINES:
            expected = f"an engine with tables{did_you_mean(name, ENGINES)}: {', '.join(ENGINES)}"
            raise InvalidDevice(what=what, given="no engine", expected=expected)
        _expect(callable(change), f"tables[{name!r}]", change, "a function from a table to a table")
    for name, given in device.overrides.items():
        fits = isinstance(given, Override) or (isinstance(given, str) and given.count(":") == 1)
        _expect(fits, f"overrides[{name!r}]", given, "a tritonite.devices.Override, or 'module:name' of one")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _expect(holds: bool, what: str, given: object, expected: str) -> None:
    if not holds:
        raise _invalid(what, given, expected)


def _invalid(what: str, given: object, expected: str) -> InvalidDevice:
    return InvalidDevice(what=what, given=repr(given), expected=expected)
