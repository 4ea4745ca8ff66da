"""The command line, `tritonite COMMAND`; each module registers its commands.

- `common.py`: the application, its console, options that commands share.
- `info.py`: `info`, `build`, `demo`.
- `doctor.py`: `doctor`.
- `explain.py`: `explain`.
- `verify.py`: `verify`.
- `bench.py`: `report`, `bench`.
- `tune.py`: `tune`.
- `warm.py`: `warm`.
"""

from __future__ import annotations

import importlib
import io
import sqlite3
import sys

from rich.markup import escape

from tritonite.cli.common import INTERRUPTED, app, console
from tritonite.errors import TritoniteError

# Help lists commands in this order.
for _module in ("info", "doctor", "explain", "verify", "bench", "tune", "warm"):
    importlib.import_module(f"tritonite.cli.{_module}")


def main() -> None:
    """Run the command line. A TritoniteError, OSError or SQLite error prints one line and exits with code 2.

    Ctrl-C exits with code 130.
    """
    for stream in (sys.stdout, sys.stderr):
        # The terminal's encoding may lack characters of the output.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except (TritoniteError, OSError, sqlite3.Error) as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
