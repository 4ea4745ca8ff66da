"""Host functions of a device's vendor, which a plug-in gives by overload."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from tritonite import devices
from tritonite.devices import Override

Host = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


@functools.cache
def _loaded(path: str) -> Override:
    """Return the override at "module:name"."""
    module, _, name = path.partition(":")
    found = getattr(importlib.import_module(module), name)
    return found if isinstance(found, Override) else Override(found)


def vendors(overload: str) -> Override | None:
    """Return the current device's override of an overload, or None."""
    found = devices.current.overrides.get(overload)
    return _loaded(found) if isinstance(found, str) else found


def host_of(overload: str, own: Host) -> Host:
    """Return a host function that runs the current device's override where that serves the call, else `own`."""
    if overload not in devices.overridden():
        return own

    def host(values: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
        override = vendors(overload)
        if override is None or not override.serves(*values):
            return own(values, outs)
        return override.function(*values, outs=outs)

    return host
