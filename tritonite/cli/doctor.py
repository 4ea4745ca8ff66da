"""`tritonite doctor`: check this machine and this environment."""

from __future__ import annotations

import dataclasses
import json as encoding
from typing import Annotated

import typer
from rich.markup import escape

from tritonite.cli.common import app, console
from tritonite.report.doctor import LEVELS, diagnose

_COLOURS = dict(zip(LEVELS, ("green", "cyan", "yellow", "red"), strict=True))


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False) -> None:
    """Check driver, versions, compilers, caches, dispatcher, clashes and variables. Exits with 1 on an error."""
    findings = list(diagnose())
    if json:
        text = encoding.dumps([dataclasses.asdict(each) for each in findings], indent=2)
        typer.echo(text)
    else:
        for each in findings:
            level = f"[{_COLOURS[each.level]}]{each.level:8}[/]"
            console.print(f"{level} {each.check:12} {escape(each.message)}", highlight=False, soft_wrap=True)
            if each.advice:
                console.print(f"{'':21} -> {escape(each.advice)}", highlight=False, soft_wrap=True)
        counts = {level: sum(each.level == level for each in findings) for level in LEVELS[:0:-1]}
        console.print(", ".join(f"{count} {level}s" for level, count in counts.items()), highlight=False)
    if any(each.level == "error" for each in findings):
        raise typer.Exit(1)
