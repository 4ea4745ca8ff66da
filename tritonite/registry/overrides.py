"""Host functions of a device's vendor, which a plug-in gives by overload."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from tritonite import devices
from tritonite.devices import Override
from tritonite.errors import NO_FP64, Decline, InvalidDevice, did_you_mean

Host = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


@functools.cache
def _loaded(path: str, what: str) -> Override:
    """Return the override at "module:name". Raises InvalidDevice, which names the field `what`, if there is none."""
    module, _, name = path.partition(":")
    expected = "the module:name of a tritonite.devices.Override or of a function"
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidDevice(what=what, given=f"{path!r} ({error})", expected=expected) from error
    if isinstance(found, Override):
        return found
    if not callable(found):
        raise InvalidDevice(what=what, given=f"{path!r}, a {type(found).__name__}", expected=expected)
    return Override(found)


def vendors(overload: str) -> Override | None:
    """Return the current device's override of an overload, or None. Raises InvalidDevice if it cannot be imported."""
    device = devices.current
    found = device.overrides.get(overload)
    return _loaded(found, f"overrides[{overload!r}] of {device.served_by}") if isinstance(found, str) else found


def unknown(known: Collection[str]) -> list[InvalidDevice]:
    """Return an error for each override of the devices present whose overload is not in `known`.

    Overloads of operators outside ATen, which are registered at first use, are all taken to be known.
    """
    errors = []
    for device in devices.present:
        for name in sorted({name for name in device.overrides if name not in known and "::" not in name}):
            packet = [each for each in known if each.partition(".")[0] == name]
            hint = f"one of its overloads {', '.join(packet)}" if packet else "an overload of tritonite.overloads()"
            hint += "" if packet else did_you_mean(name, known)
            what = f"the key {name!r} in the overrides of {device.served_by}"
            errors.append(InvalidDevice(what=what, given="no overload that Tritonite serves", expected=hint))
    return errors


def host_of(overload: str, own: Host) -> Host:
    """Return a host function that runs the current device's override where that serves the call, else `own`.

    On a device without float64, `own` declines calls with tensors of float64.
    """
    own = own if devices.all_have_fp64() else _without_fp64(own)
    if overload not in devices.overridden():
        return own

    def host(values: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
        override = vendors(overload)
        if override is None or not override.serves(*values):
            return own(values, outs)
        return override.function(*values, outs=outs)

    return host


def _without_fp64(own: Host) -> Host:
    """Return a host function that declines calls with float64 on devices without it."""

    def host(values: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
        if not devices.current.fp64 and any(map(_has_fp64, (*values, *outs))):
            raise Decline(NO_FP64)
        return own(values, outs)

    return host


def _has_fp64(value: Any) -> bool:
    """Return whether an argument is torch.float64, a tensor of float64, or a sequence with one."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_fp64, value))
    return value is torch.float64 or (isinstance(value, torch.Tensor) and value.dtype is torch.float64)
