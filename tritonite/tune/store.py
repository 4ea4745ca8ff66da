"""What tuning found: tables that come with Tritonite, and a SQLite file of this machine's own for many processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tritonite import cache
from tritonite.tune.tiles import Config

_SHIPPED = Path(__file__).parent
_CREATE = """create table if not exists tiles (
    device text, problem text, config text, microseconds real, primary key (device, problem)
)"""


def path() -> Path:
    """The file of this machine's results, which need not exist."""
    return Path(os.environ.get("TRITONITE_TUNE") or cache.folder() / "tune.sqlite")


@contextlib.contextmanager
def _connection() -> Iterator[sqlite3.Connection]:
    # Writers wait for each other; readers for nobody, with a log of what is being written.
    with contextlib.closing(sqlite3.connect(path(), timeout=60)) as connection:
        connection.execute("pragma journal_mode=wal")
        connection.execute(_CREATE)
        with connection:
            yield connection


def save(device: str, problem: str, config: Config, microseconds: float) -> None:
    """Keep the tiles for a problem on a device, in place of earlier ones."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with _connection() as connection:
        row = (device, problem, json.dumps(config), microseconds)
        connection.execute("insert or replace into tiles values (?, ?, ?, ?)", row)
    known.cache_clear()


@functools.lru_cache(maxsize=8)
def known(device: str) -> dict[str, Config]:
    """The tiles for problems on a device: those shipped, and over them those of this machine, read once a process."""
    shipped = _SHIPPED / f"{device.replace(' ', '_')}.json"
    found = json.loads(shipped.read_text()) if shipped.exists() else {}
    if path().exists():
        with _connection() as connection:
            rows = connection.execute("select problem, config from tiles where device = ?", (device,))
            found |= {problem: json.loads(config) for problem, config in rows}
    return {problem: Config(*config) for problem, config in found.items()}
