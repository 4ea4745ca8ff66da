"""Tiles that tuning measured: shipped tables, and this machine's SQLite file, which many processes may share."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tritonite.engine.gemm.table import Config
from tritonite.errors import UnusableFile
from tritonite.runtime import cache

_SHIPPED = Path(__file__).parent
_CREATE = """create table if not exists tiles (
    device text, problem text, config text, microseconds real, primary key (device, problem)
)"""


def path() -> Path:
    """Return the path of this machine's file, which need not exist."""
    return Path(os.environ.get("TRITONITE_TUNE") or cache.folder() / "tune.sqlite")


@contextlib.contextmanager
def _writing() -> Iterator[sqlite3.Connection]:
    """Yield a connection in a transaction. With a write-ahead log only writers wait for each other."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path(), timeout=60)) as connection:
        connection.execute("pragma journal_mode=wal")
        connection.execute(_CREATE)
        with connection:
            yield connection


def check() -> None:
    """Raise UnusableFile if this machine's file cannot be written."""
    try:
        with _writing():
            pass
    except (OSError, sqlite3.Error) as error:
        raise UnusableFile(path=path(), reason=error) from error


def save(device: str, problem: str, config: Config, microseconds: float) -> None:
    """Store the tile for a problem on a device, in place of an earlier one. Warn if the file cannot be written."""
    try:
        with _writing() as connection:
            row = (device, problem, json.dumps(config), microseconds)
            connection.execute("insert or replace into tiles values (?, ?, ?, ?)", row)
    except (OSError, sqlite3.Error) as error:
        cache.warn_once(f"tuned tiles cannot be kept in {path()}: {error}")
    known.cache_clear()


@functools.lru_cache(maxsize=8)
def known(device: str) -> dict[str, Config]:
    """Return a device's tiles by problem, read once: the shipped ones, overridden by this machine's.

    Warn, once, if this machine's file cannot be read.
    """
    shipped = _SHIPPED / f"{device.replace(' ', '_')}.json"
    found = json.loads(shipped.read_text()) if shipped.exists() else {}
    return {problem: Config(*config) for problem, config in found.items()} | _own(device)


def _own(device: str) -> dict[str, Config]:
    where = ""
    try:
        where = f" in {path()}"
        return {problem: _config(json.loads(config)) for problem, config in _rows(device)}
    except (OSError, sqlite3.Error, ValueError, TypeError) as error:
        cache.warn_once(f"tuned tiles{where} cannot be read, and are left out: {error}")
        return {}


def _rows(device: str) -> list[tuple[str, str]]:
    if not path().exists():
        return []
    # SQLite cannot open the log of a read-only file in a read-only folder, unless the file is declared immutable.
    for how in ("mode=ro", "mode=ro&immutable=1"):
        with contextlib.closing(sqlite3.connect(f"{path().absolute().as_uri()}?{how}", timeout=60, uri=True)) as reader:
            try:
                # Another process may have created the file, but not yet the table.
                if not reader.execute("select 1 from sqlite_master where name = 'tiles'").fetchall():
                    return []
                return reader.execute("select problem, config from tiles where device = ?", (device,)).fetchall()
            except sqlite3.OperationalError as error:
                refused = error
    raise refused


def _config(fields: Any) -> Config:
    if not all(isinstance(value, (int, float)) for value in fields):
        raise TypeError(f"tiles of {fields}")
    return Config(*fields)
