"""`tritonite verify`: check operators on samples, or on calls drawn at random."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from tritonite.cli.common import INTERRUPTED, app, console, dtypes_named, interruptible

if TYPE_CHECKING:
    from tritonite.testing import verify as verification
    from tritonite.testing.fuzz import Finding, Tally


@app.command()
def verify(
    op: Annotated[list[str] | None, typer.Option(help="operator, overload or glob; repeatable")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="dtype, such as float16; repeatable")] = None,
    full: Annotated[bool, typer.Option(help="run all of OpInfo's samples")] = False,
    fuzz: Annotated[
        float | None, typer.Option(min=0, help="check calls drawn at random instead, for this many seconds")
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the drawn calls")] = 0,
    case: Annotated[
        int | None, typer.Option(help="repeat the one drawn call of --op and --seed with this number")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes of --fuzz")] = os.cpu_count() or 1,
) -> None:
    """Check operators on this machine against ATen and float64. Exits with 1 if a check fails."""
    if case is not None or fuzz is not None:
        _fuzz(op, fuzz, seed, case, jobs)
        return
    from tritonite.testing.verify import verify as reports

    dtypes = dtypes_named(dtype) if dtype else None
    table = Table(Column("operator", overflow="fold"), "dtype", "samples", "result", "worst error (eps)", "ATen's own")
    failures = total = served = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with interruptible() as interrupted, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("verifying", total=None)
        for report in reports(op, dtypes, full):
            progress.update(task, description=report.op, advance=1)
            total += report.samples
            served += report.served
            passed = not report.failures
            failures += not passed
            table.add_row(
                report.op,
                str(report.dtype).removeprefix("torch."),
                str(report.samples),
                _verdict(report),
                f"{report.error:.3g}",
                f"{report.aten_error:.3g}",
            )
            for failure in report.failures[:3]:
                line = f"[red]{report.op} {report.dtype}[/] {escape(failure)}"
                progress.console.print(line, highlight=False, soft_wrap=True)
    if not total and not interrupted:
        console.print("[red]error:[/] nothing to verify: none of these operators has samples in these dtypes")
        raise typer.Exit(2)
    console.print(table)
    console.print(f"{total} samples, {failures} of {table.row_count} checks failed")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not served:
        console.print("[red]error:[/] nothing was verified: kernels declined every sample, and ATen served them")
    if failures or not served:
        raise typer.Exit(1)


def _verdict(report: verification.Report) -> str:
    """Return the table cell for an operator's result: pass, the number of failures, or declined."""
    if report.failures:
        return f"[red]{len(report.failures)} fail[/]"
    return "[green]pass[/]" if report.served else "[yellow]declined: ATen served all[/]"


def _fuzz(op: list[str] | None, seconds: float | None, seed: int, case: int | None, jobs: int) -> None:
    """Print findings in drawn calls. Raises typer.Exit(1) if there are any."""
    from tritonite.testing.fuzz import Tally, fuzz

    tally, findings = Tally(), 0
    outcomes: Generator[Finding | None, None, None]
    outcomes = fuzz(seconds or 0, op, seed, jobs, tally) if case is None else _repeated(op, seed, case, tally)
    with interruptible() as interrupted, contextlib.closing(outcomes):
        for finding in outcomes:
            if finding is not None:
                findings += 1
                console.print(str(finding), highlight=False, markup=False, soft_wrap=True)
    kinds = f"{tally.calls} calls, {tally.fused} of fused operators"
    console.print(f"{kinds}, {tally.served} served by kernels, {findings} findings")
    for name in tally.never_served():
        console.print(f"{name}: no kernel has served any of {tally.calls_of[name]} calls", highlight=False)
    for crash in tally.aten_crashes:
        console.print(f"ATen: {crash}", highlight=False, markup=False, soft_wrap=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if findings:
        raise typer.Exit(1)


def _repeated(op: list[str] | None, seed: int, case: int, tally: Tally) -> Generator[Finding | None, None, None]:
    """Yield the finding, or None, of one drawn call of each operator, and print who served it."""
    from tritonite.runtime.stats import counts
    from tritonite.testing.fuzz import chosen_names, fuzz_one
    from tritonite.testing.verify import became

    chosen = chosen_names(op)
    for name in chosen.fused:
        yield fuzz_one(name, seed, case)
        tally.calls, tally.fused, tally.served = tally.calls + 1, tally.fused + 1, tally.served + 1
        console.print(f"{name}: checked against its composition", highlight=False, markup=False, soft_wrap=True)
    for name in chosen.overloads:
        before = counts(name)
        yield fuzz_one(name, seed, case)
        ran, reasons = became(before, counts(name))
        tally.calls, tally.served = tally.calls + 1, tally.served + bool(ran)
        who = "a kernel" if ran else f"ATen: {'; '.join(dict.fromkeys(reasons)) or 'no kernel was asked'}"
        console.print(f"{name}: served by {who}", highlight=False, markup=False, soft_wrap=True)
