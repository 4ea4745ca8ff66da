"""`Tables`: an engine's tables of tiles by kind of device, with those of plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tritonite import devices

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
            table = device.tables[self.engine](table)
        self[kind] = table
        return table
