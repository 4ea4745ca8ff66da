"""The application that commands register with, its console, and options that several commands share."""

from __future__ import annotations

import torch
import typer
from rich.console import Console

import tritonite

app = typer.Typer(help=tritonite.__doc__, no_args_is_help=True, add_completion=False)
console = Console()


def dtypes_named(names: list[str]) -> list[torch.dtype]:
    """Return the torch dtypes of names such as "float16". Raises typer.BadParameter for another name."""
    dtypes = [getattr(torch, name, None) for name in names]
    for name, dtype in zip(names, dtypes, strict=True):
        if not isinstance(dtype, torch.dtype):
            raise typer.BadParameter(f"torch has no dtype {name!r}", param_hint="--dtype")
    return dtypes
