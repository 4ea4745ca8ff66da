"""`tritonite info`, `build` and `demo`, and the options of no command."""

from __future__ import annotations

import os
import platform
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import triton
import typer
from rich.markup import escape
from rich.table import Table

import tritonite
from tritonite import devices
from tritonite.cli.common import app, console
from tritonite.devices import plugins
from tritonite.engine.gemm import fitted
from tritonite.report.environment import ENVIRONMENT
from tritonite.runtime import native


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(tritonite.__version__, highlight=False)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Handle options given without a command."""
    if context.invoked_subcommand in ("verify", "bench", "tune"):
        # These commands show progress of their own, and each of their processes would repeat the messages.
        os.environ.setdefault("TRITONITE_QUIET", "1")


@app.command()
def build(
    output: Annotated[
        Path | None,
        typer.Option(help="write a wheel of the built dispatcher into this folder, for machines without a compiler"),
    ] = None,
) -> None:
    """Build the native dispatcher and a plug-in's driver unless they are built already, and print their paths."""
    path = native.build() if output is None else native.write_wheel(tritonite.__version__, output)
    for each in (str(path), native.driver()):
        if os.sep in each:
            console.print(each, highlight=False, soft_wrap=True)


@app.command()
def info() -> None:
    """Print versions, device, mode, numbers of operators, and environment variables."""
    table = Table(show_header=False, box=None)
    table.add_row("tritonite", tritonite.__version__)
    table.add_row("torch", torch.__version__)
    table.add_row("triton", triton.__version__)
    table.add_row("python", platform.python_version())
    name = platform.processor() or platform.machine()
    if not tritonite.backend.host_memory:
        name = devices.name_of(devices.current_device())
    table.add_row("device", f"{tritonite.device} ({name})")
    table.add_row("backend", tritonite.backend.served_by)
    for other in devices.present[1:]:
        table.add_row("  also", f"{other.served_by}, device type {other.type}")
    for plugin, reason in plugins.broken.items():
        table.add_row("  left out", f"{plugin}: {reason}")
    table.add_row("tables", _origin_of_tables())
    table.add_row("mode", "Triton's interpreter" if tritonite.backend.interpreted else "compiled kernels")
    table.add_row("call path", native.state() if native.wanted() else "Python")
    families = Counter(op.family for op in tritonite.overloads().values())
    table.add_row("overloads", f"{len(tritonite.overloads())}")
    for family, count in sorted(families.items()):
        table.add_row(f"  {family}", str(count))
    console.print(table)
    variables = Table("variable", "value", "meaning", title="Environment", title_justify="left")
    known = {name: "not read by Tritonite" for name in sorted(os.environ) if name.startswith("TRITONITE_")}
    for variable, meaning in (known | ENVIRONMENT).items():
        value = os.environ.get(variable)
        variables.add_row(variable, "[dim]unset[/]" if value is None else escape(value), meaning)
    console.print(variables)


def _origin_of_tables() -> str:
    """Return where the default device's tables of products come from."""
    device = devices.current_device()
    return fitted.fitted(devices.name_of(device), devices.architecture(device)).origin


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="minilm: embeddings of sentences; llama: answers of SmolLM2")] = "minilm",
) -> None:
    """Run a pretrained model in ATen and in Tritonite, and compare."""
    from tritonite.demo import DEMOS, run

    if model not in DEMOS:
        raise typer.BadParameter(f"no demo of {model!r}; demos: {', '.join(DEMOS)}", param_hint="--model")
    if not run(console, model):
        raise typer.Exit(1)
