"""`tritonite tune`: fit this GPU's tables of products and share them, or time single products and convolutions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

import tritonite
from tritonite import devices
from tritonite.cli.common import INTERRUPTED, app, console, dtypes_named
from tritonite.engine.gemm import fitted, store
from tritonite.errors import NothingToMeasure
from tritonite.runtime import cache


@app.command()
def tune(
    seconds: Annotated[float, typer.Option(min=1, help="seconds for everything: compilation, timing and fits")] = 300,
    output: Annotated[Path | None, typer.Option(help="also write the fitted tables to this file, to share it")] = None,
    imported: Annotated[
        Path | None, typer.Option("--import", help="store the tables of such a file for this GPU, and measure nothing")
    ] = None,
    products: Annotated[
        bool, typer.Option("--products", help="find the fastest tiles of single products in place of fitting tables")
    ] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="a product, MxNxK or BATCHESxMxNxK; repeatable; default: the benchmark's products"),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="dtype of products, such as float16; repeatable; default bfloat16 and float16"),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="layout of products: nn, nt, tn or tt; repeatable; default nn and nt")
    ] = None,
    convolutions: Annotated[
        Path | None,
        typer.Option(help="time tiles of convolutions instead, write the times to this JSON file, and print a table"),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes that compile")] = os.cpu_count() or 1,
    seed: Annotated[int, typer.Option(help="seed of the products or convolutions to draw")] = 0,
) -> None:
    """Fit the tables by which tiles of matrix products are chosen to this GPU, and store them for later processes.

    Ctrl-C ends the measurements, and fits what there is by then.
    """
    if imported is not None:
        _import(imported)
        return
    if convolutions is not None and convolutions.exists():
        _fit_convolutions(convolutions)
        return
    _check_device()
    if convolutions is not None:
        _time_convolutions(convolutions, seconds / 3, seed, jobs)
        _fit_convolutions(convolutions)
    elif products or shape or dtype or layout:
        _tune_products(shape, dtype, layout, jobs)
    else:
        _fit_tables(seconds, output, seed, jobs)


def _check_device() -> None:
    """Raise NothingToMeasure where kernels do not run compiled."""
    if tritonite.backend.interpreted:
        raise NothingToMeasure(reason="here they run in Triton's interpreter")
    if not tritonite.backend.dispatch_key:
        raise NothingToMeasure(reason="no GPU driver was found")


def _import(path: Path) -> None:
    """Store the tables of a file for this machine's device. Raises InvalidTables or MismatchedTables."""
    name = devices.name_of(devices.current_device())
    tables, versions = fitted.load(path, name), fitted.versions_of(path)
    cache.check_writable(fitted.own(name))
    fitted.save(fitted.own(name), name, versions, tables)
    console.print(f"stored in {fitted.own(name)}", highlight=False, soft_wrap=True)


def _fit_tables(seconds: float, output: Path | None, seed: int, jobs: int) -> None:
    """Fit the device's tables, store them, and print for each how close to the best its choices come."""
    from tritonite.tuning.session import Session

    name = devices.name_of(devices.current_device())
    for path in (fitted.own(name), output):
        if path is not None:
            cache.check_writable(path)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as progress:
        bar = progress.add_task("starting", total=seconds)

        def tell(gone: float, text: str) -> None:
            progress.update(bar, completed=min(gone, seconds), description=text)

        session = Session(seconds, seed, jobs, tell)
        session.run()
    table = Table(
        "products", *(Column(text, justify="right") for text in ("timed", "of the best before", "after")), "fit"
    )
    for part in session.parts:
        shares = [f"{1 / each:.3f}" for each in part.regrets or ()] or ["", ""]
        kept = "fitted" if part.fitted else "too few products" if part.regrets is None else "no better, dropped"
        table.add_row(str(part), str(len(part.timed)), *shares, kept)
    console.print(table)
    if session.n_fitted:
        tables = session.tables
        for path in (fitted.own(name), output):
            if path is not None:
                fitted.save(path, name, session.versions, tables)
                console.print(f"stored in {path}", highlight=False, soft_wrap=True)
    else:
        console.print("nothing was fitted, and nothing was stored")
    if session.interrupted:
        console.print("[yellow]interrupted[/]")
        raise typer.Exit(INTERRUPTED)


def _tune_products(shape: list[str] | None, dtype: list[str] | None, layout: list[str] | None, jobs: int) -> None:
    """Find the fastest tiles of single products, and store them."""
    store.check()
    from tritonite.bench import cases
    from tritonite.engine.gemm.problem import Problem
    from tritonite.tuning import tuner

    sizes = [_sizes(text) for text in shape] if shape else [(1, *each) for each in cases.PRODUCTS + cases.DECODING]
    kinds, layouts = dtypes_named(dtype) if dtype else [torch.bfloat16, torch.float16], layout or ["nn", "nt"]
    if not set(layouts) <= {"nn", "nt", "tn", "tt"}:
        raise typer.BadParameter(f"layouts are nn, nt, tn and tt, not {', '.join(layouts)}", param_hint="--layout")
    problems = [
        Problem(batches, M, N, K, kind, kind, which[0] == "n", which[1] == "t")
        for batches, M, N, K in sizes
        for kind in kinds
        for which in layouts
    ]
    configs = {problem: list(tuner.candidates(problem)) for problem in problems}
    with console.status(f"compiling the candidates of {len(problems)} problems"):
        tuner.compile_all([(problem, config) for problem, own in configs.items() for config in own], jobs)
    table = Table("problem", *(Column(name, justify="right") for name in ("us", "rule", "ATen", "of ATen")), "tiles")
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console) as progress:
        for problem in progress.track(problems, description="tuning"):
            tuned = tuner.tune_problem(problem, configs[problem])
            times = [f"{time:.1f}" for time in (tuned.microseconds, tuned.rule, tuned.aten)]
            table.add_row(problem.key, *times, f"{tuned.aten / tuned.microseconds:.2f}", str(tuple(tuned.config)))
    console.print(table)
    console.print(f"stored in {store.path()}", highlight=False, soft_wrap=True)


def _time_convolutions(path: Path, seconds: float, seed: int, jobs: int) -> None:
    """Time tiles of layers of models, and write the times to a JSON file."""
    from tritonite.testing import judge
    from tritonite.tuning import convolution

    timed = []
    with console.status("compiling and timing convolutions"), judge.without_tf32():
        try:
            # Compilation has twice as long as timing, which leaves out what has not been compiled by then.
            for each in convolution.sweep(2 * seconds, seconds, jobs, seed):
                timed.append(each)
        finally:
            convolution.save(timed, path)
    console.print(f"{len(timed)} runs stored in {path}", highlight=False, soft_wrap=True)


def _fit_convolutions(path: Path) -> None:
    """Print the table of convolutions that fits the times in a JSON file."""
    from tritonite.tuning import convolution_fit

    for line in convolution_fit.report(path):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if len(sizes) not in (3, 4) or not all(size.isdecimal() for size in sizes):
        raise typer.BadParameter(f"{text!r} is neither MxNxK nor BATCHESxMxNxK", param_hint="--shape")
    return tuple(map(int, ["1", *sizes][-4:]))
