"""`Tables`: an engine's tables of tiles by kind of device, with those of plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tritonite import devices
from tritonite.errors import InvalidDevice

Table = TypeVar("Table")


class Tables(dict[str, Table]):
    """An engine's table for each kind of device.

    A plug-in's kind gets the table of the kind that it is `like`, changed by the plug-in's function for this engine, at
    the first look-up.
    """

    def __init__(self, engine: str, tables: Mapping[str, Table]) -> None:
        super().__init__(tables)
        self.engine = engine

    def __missing__(self, kind: str) -> Table:
        device = devices.named(kind)
        if device.like not in self:
            raise KeyError(kind)
        table = self[device.like]
        if self.engine in device.tables:
            table = _changed(device, self.engine, table)
        self[kind] = table
        return table


def _changed(device: devices.Device, engine: str, table: Table) -> Table:
    """Return the table that a plug-in's function makes of `table`. Raises InvalidDevice for another type."""
    what = f"tables[{engine!r}] of {device.served_by}"
    cause: Exception | None = None
    try:
        changed = device.tables[engine](table)
    except Exception as error:  # noqa: BLE001 - a ValueError of a plug-in would look like a refusal of the operator
        given, cause = f"a function that raises {type(error).__name__}: {error}", error
    else:
        if isinstance(changed, type(table)):
            return changed
        given = f"a function that returns {type(changed).__name__}"
    expected = f"a function from {type(table).__name__} to {type(table).__name__}"
    raise InvalidDevice(what=what, given=given, expected=expected) from cause
