"""The application that commands register with, its console, and options that several commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import typer
from rich.console import Console

import tritonite

# The exit code of a command that Ctrl-C ended: 128 and the number of SIGINT.
INTERRUPTED = 130

app = typer.Typer(help=tritonite.__doc__, no_args_is_help=True, add_completion=False)
console = Console()


@contextlib.contextmanager
def interruptible() -> Iterator[list[bool]]:
    """End a with block at Ctrl-C, and print so. The list that it yields is empty unless the block was interrupted."""
    interrupted: list[bool] = []
    try:
        yield interrupted
    except KeyboardInterrupt:
        interrupted.append(True)
        console.print("[yellow]interrupted[/]")


def dtypes_named(names: list[str]) -> list[torch.dtype]:
    """Return the torch dtypes of names such as "float16". Raises typer.BadParameter for another name."""
    dtypes = [getattr(torch, name, None) for name in names]
    for name, dtype in zip(names, dtypes, strict=True):
        if not isinstance(dtype, torch.dtype):
            raise typer.BadParameter(f"torch has no dtype {name!r}", param_hint="--dtype")
    return dtypes
