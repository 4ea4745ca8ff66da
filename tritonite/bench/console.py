"""Terminal output of a benchmark run: a live table with progress, and summaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from tritonite.bench.percentiles import declines, percentiles, reproduction, worst
from tritonite.bench.results import REFERENCE, Change, Machine, ModelResult, Result, Run, readable, summaries
from tritonite.bench.timing import EVERY, TRITONITE
from tritonite.errors import ATEN_IS_FASTER

_LAST = 20
# Seconds between saves of partial results, in case the run is killed.
_SAVED_EVERY = 30.0
# Seconds between lines that tell how many cases are checked, where no terminal shows progress.
_TOLD_EVERY = 10.0


class Checked(NamedTuple):
    """News of a run between its results: the number of cases that are checked."""

    cases: int


def follow(
    console: Console,
    machine: Machine,
    results: Iterator[Result | ModelResult | Checked],
    total: int | None,
    providers: Sequence[str],
    json: Path | None = None,
) -> Run:
    """Show results as they come and return them as a Run. Ctrl-C ends the run early and keeps its results.

    A terminal shows progress and the last results. Otherwise each result is a line, which is printed at once.

    Args:
        total: number of results, if known.
        json: file for partial results while the run lasts, marked as interrupted.
    """
    run = Run(machine, interrupted=True)
    saved = told = monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)
    checking = progress.add_task("checking", total=total, visible=False)
    task = progress.add_task("measuring", total=total)
    interrupted = False
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        try:
            for result in results:
                if isinstance(result, Checked):
                    progress.update(checking, completed=result.cases, visible=True)
                    if not console.is_terminal and monotonic() > told + _TOLD_EVERY:
                        console.print(f"{result.cases} of {total} cases checked", highlight=False)
                        told = monotonic()
                elif isinstance(result, ModelResult):
                    # A pass comes again with its profile.
                    run.models[:] = [each for each in run.models if each.key != result.key] + [result]
                    progress.update(task, advance=1, description=result.model)
                else:
                    run.results.append(result)
                    progress.update(task, advance=1, description=result.op)
                    if not console.is_terminal:
                        console.print(_line(result, providers), highlight=False, soft_wrap=True)
                live.update(Group(table(run, run.results[-_LAST:], providers), progress))
                if json and monotonic() > saved + _SAVED_EVERY:
                    run.save(json)
                    saved = monotonic()
        except KeyboardInterrupt:
            interrupted = True
    return Run(machine, run.results, run.models, interrupted)


def table(run: Run, results: Sequence[Result], providers: Sequence[str]) -> Table:
    """Return a table with a row a result: times in microseconds, speedups over ATen, share of the roofline."""
    shown = Table("operator", "case", "dtype", "measure", box=None)
    for name in providers:
        shown.add_column(f"{name} us", justify="right")
    for name in providers[1:]:
        shown.add_column(f"{name} x", justify="right")
    shown.add_column("roofline", justify="right")
    left = any(result.declined for result in results)
    if left:
        shown.add_column("by default")
    for result in results:
        row = [result.op, result.label, result.dtype, result.measure]
        if result.failure:
            shown.add_row(*row, f"[red]{escape(result.failure)}[/]")
            continue
        row += [_time(result, name) for name in providers]
        row += [_speedup(result.speedup(name)) for name in providers[1:]]
        share = run.roofline_share(result, providers[-1] if len(providers) == 1 else providers[1])
        row.append("" if share is None else f"{readable(share * 100, 0)}%")
        shown.add_row(*row, *(["ATen" if result.declined else ""] if left else []))
    return shown


def _line(result: Result, providers: Sequence[str]) -> str:
    """Return a result as one line: its case, times in microseconds, and speedups over ATen."""
    case = f"{result.op} {escape(result.label)} {result.dtype} {result.measure}"
    if result.failure:
        return f"{case}: [red]{escape(result.failure)}[/]"
    times = [f"{name} {_time(result, name)} us" for name in providers]
    speedups = [f"{name} {_speedup(result.speedup(name))} x" for name in providers[1:]]
    return f"{case}: {', '.join(times + speedups)}"


def _time(result: Result, provider: str) -> str:
    time = result.times[provider]
    return f"{time.median:.2f} ±{time.spread:.0%}"


def _speedup(value: float | None) -> str:
    if value is None:
        return ""
    colour = "green" if value >= 1.05 else "red" if value < 0.95 else "default"
    return f"[{colour}]{readable(value, 2)}[/]"


def summarise(console: Console, run: Run) -> None:
    """Print the geometric means by family and measure, the reasons of declines, and every failure."""
    machine = run.machine
    console.print(f"{machine.device}, {', '.join(f'{k} {v}' for k, v in machine.versions.items())}", highlight=False)
    if machine.interpreted:
        console.print("[yellow]Triton's interpreter on a CPU: these times say nothing about a GPU[/]")
    if run.interrupted:
        console.print("[yellow]interrupted: not every case was measured[/]")
    console.print(f"copy {readable(machine.copy_bandwidth / 1e12, 2)} TB/s", highlight=False)
    shown = Table("family", "measure", "cases", "provider", "geometric mean", "lowest", "of", box=None)
    for each in summaries(run):
        worst_case = f"{each.worst.op} {each.worst.label} {each.worst.dtype}"
        means = _speedup(each.mean), _speedup(each.lowest)
        shown.add_row(each.family, each.measure, str(each.cases), each.provider, *means, worst_case)
    if run.results:
        console.print(shown)
    _show_drawn(console, run)
    for reason, count in Counter(
        result.declined for result in run.results if result.declined and result.number is None
    ).most_common():
        why = "ATen serves by default, which is faster" if reason == ATEN_IS_FASTER else f"are declined: {reason}"
        console.print(f"{count} cases {why}", highlight=False)
    for result in run.results:
        if result.failure:
            case = f"{result.op} {result.label} {result.dtype}"
            console.print(f"[red]{case}[/] {escape(result.failure)}", highlight=False, soft_wrap=True)
            if result.number is not None:
                console.print(f"  {reproduction(run, result)}", highlight=False, soft_wrap=True)


def _show_drawn(console: Console, run: Run) -> None:
    """Print percentiles, reasons of declines and the worst of drawn cases, if there are any."""
    numbers = ("cases", "served", "minimum", "10 %", "median", "geometric mean")
    shown = Table("family", "dtype", *(Column(name, justify="right") for name in numbers), box=None)
    for each in percentiles(run):
        share = f"{each.served / each.cases:.0%}"
        shown.add_row(each.family, each.dtype, str(each.cases), share, *map(_speedup, each.speedups))
    if shown.row_count:
        console.print(shown)
    for reason, count in declines(run)[:10]:
        console.print(f"{count} left to ATen: {reason}", highlight=False, markup=False, soft_wrap=True)
    for speedup, result in worst(run):
        case = f"{result.op} {result.label} {result.dtype} {result.measure}"
        line = f"{readable(speedup, 2)} {case}: {reproduction(run, result)}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def show_models(console: Console, models: Sequence[ModelResult]) -> None:
    """Print models' passes: tokens a second, times, and the operators whose times differ most; or the failure."""
    for model in models:
        length = f"{model.tokens} tokens" + (f" after {model.context}" if model.context else "")
        console.print(f"{model.model} {model.phase}, {model.dtype}, batch {model.batch}, {length}", highlight=False)
        if model.failure:
            console.print(f"[red]{escape(model.failure)}[/]", highlight=False, soft_wrap=True)
            continue
        shown = Table("provider", "tokens/s", "ms a pass", "host ms", "device ms", box=None)
        for name, time in model.times.items():
            host = model.host_times[name]
            row = (f"{model.tokens_per_second(name):.0f}", f"{time.median / 1e3:.3f}", f"{host.median / 1e3:.3f}")
            device = model.device_times.get(name)
            shown.add_row(name, *row, "" if device is None else f"{device / 1e3:.3f}")
        console.print(shown)
        for name, share in model.call_shares.items():
            spent = f", {model.device_shares[name]:.1%} of device time" if name in model.device_shares else ""
            console.print(f"Tritonite's kernels in {name}: {share:.1%} of calls{spent}", highlight=False)
        operators = Table("operator", "calls", "ATen us", "Tritonite us", box=None)
        for name, calls, aten, ours in model.operators:
            operators.add_row(name, str(calls), f"{aten:.1f}", f"{ours:.1f}")
        console.print(operators)


def show_zoo(console: Console, models: Sequence[ModelResult]) -> None:
    """Print a row a pass: shares of Tritonite's kernels, and ATen's times over Tritonite's; then the slower passes."""
    numbers = ("of calls", "of device", "device x", "host x")
    by_default = (Column(f"{name}", justify="right") for name in numbers)
    every = (Column(f"every: {name}", justify="right") for name in numbers[:3])
    aten = (Column(f"ATen {name} ms", justify="right") for name in ("device", "host"))
    shown = Table("model", "pass", *aten, *by_default, *every, box=None)
    for model in models:
        if model.failure:
            shown.add_row(model.model, model.phase, "[red]wrong[/]")
            continue
        device = model.device_times.get(REFERENCE)
        times = "" if device is None else f"{device / 1e3:.2f}", f"{model.host_times[REFERENCE].median / 1e3:.2f}"
        own = [*_shares(model, TRITONITE.name), _speedup(model.host_speedup())]
        shown.add_row(model.model, model.phase, *times, *own, *_shares(model, EVERY.name))
    console.print(shown)
    slower = [each for each in models if (each.device_speedup() or 1.0) < 1.0]
    for each in slower:
        line = f"slower than ATen on the device by default: {each.model} {each.phase}, {each.device_speedup():.2f}"
        console.print(line, highlight=False)


def _shares(model: ModelResult, provider: str) -> list[str]:
    """Return the parts of calls and device time that Tritonite's kernels take, and the speedup of device time."""
    shares = (each.get(provider) for each in (model.call_shares, model.device_shares))
    return [*("" if each is None else f"{each:.1%}" for each in shares), _speedup(model.device_speedup(provider))]


def show_changes(console: Console, changes: Sequence[Change]) -> int:
    """Print changes between two runs beyond the noise. Return the number of cases that got slower."""
    shown = Table("operator", "case", "dtype", "measure", "time", "noise", box=None)
    for change in changes:
        colour = "red" if change.ratio > 1 else "green"
        result, ratio = change.result, f"[{colour}]{change.ratio - 1:+.0%}[/]"
        shown.add_row(result.op, result.label, result.dtype, result.measure, ratio, f"±{change.noise:.0%}")
    if changes:
        console.print(shown)
    slower = sum(change.ratio > 1 for change in changes)
    console.print(f"{slower} cases slower beyond the noise, {len(changes) - slower} faster")
    return slower
