"""`tritonite tune`: find the fastest GEMM tiles of single products, or fit the cost model to this GPU."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

import tritonite
from tritonite.cli.common import app, console, dtypes_named
from tritonite.engine.gemm import store
from tritonite.errors import NoDevice
from tritonite.runtime import cache


@app.command()
def tune(
    shape: Annotated[
        list[str] | None, typer.Option(help="MxNxK or BATCHESxMxNxK; repeatable; default: the benchmark's products")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="dtype, such as float16; repeatable; default bfloat16 and float16")
    ] = None,
    layout: Annotated[list[str] | None, typer.Option(help="nn, nt, tn or tt; repeatable; default nn and nt")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes that compile")] = os.cpu_count() or 1,
    model: Annotated[
        bool, typer.Option(help="fit the cost model that chooses tiles of all shapes to this GPU instead")
    ] = False,
    convolutions: Annotated[
        Path | None,
        typer.Option(help="time tiles of convolutions instead, write the times to this JSON file, and print a table"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="seconds of timing, for --model of each dtype, after compilation")
    ] = 90,
    seed: Annotated[int, typer.Option(help="seed of the products or convolutions to draw")] = 0,
) -> None:
    """Find the fastest tiles of matrix products on this GPU and store them for later processes."""
    if convolutions is not None and convolutions.exists():
        _fit_convolutions(convolutions)
        return
    if tritonite.backend.interpreted or not tritonite.backend.dispatch_key:
        raise NoDevice
    if model:
        _fit_model(seconds, seed, jobs)
        return
    if convolutions is not None:
        _time_convolutions(convolutions, seconds, seed, jobs)
        _fit_convolutions(convolutions)
        return
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


def _fit_model(seconds: float, seed: int, jobs: int) -> None:
    """Time drawn products of bfloat16 and float32, fit the cost model, and print its regret on an unseen third."""
    from tritonite import devices
    from tritonite.engine.gemm import cost
    from tritonite.tuning import sweep

    device = devices.current_device()
    name, count = devices.name_of(device), devices.multiprocessors(device)
    cache.check_writable(cost.own(name))
    tables = dict(cost.tables(name, devices.architecture(device)) or cost.tables("", "sm_90"))
    if not devices.has_wgmma(device):
        tables = {size: cost.without_wgmma(table) for size, table in tables.items()}
    for dtype in (torch.bfloat16, torch.float32):
        whole = tables[dtype.itemsize]
        kinds = {sweep.Kind.MEMORY: whole, sweep.Kind.CACHE: whole.cached or whole}
        # A table fitted here by an earlier version may lack these.
        shipped = cost.tables("", "sm_90")[dtype.itemsize]
        others = {
            sweep.Kind.SHORT: whole.short or shipped.short,
            sweep.Kind.POINTERS: whole.pointers or shipped.pointers,
        }
        kinds |= {kind: table for kind, table in others.items() if table}
        fitted = {}
        for kind, table in kinds.items():
            with console.status(f"timing drawn products of {dtype} {kind.value}"):
                timed = list(sweep.sweep(dtype, seconds / len(kinds), seed, jobs, table, kind))
            with console.status(f"fitting {len(timed)} products of {dtype} {kind.value}"):
                seen, unseen = timed[: len(timed) * 2 // 3], timed[len(timed) * 2 // 3 :]
                regret = sweep.regret(unseen, sweep.fit(seen, table, count), count)
                fitted[kind] = sweep.fit(timed, table, count)
                # In float32 the model does not describe cuBLAS's times.
                if dtype is torch.bfloat16 and kind is not sweep.Kind.POINTERS:
                    fitted[kind] = sweep.fit_aten(timed, fitted[kind], count)
            line = f"{dtype} {kind.value}: {len(timed)} products, {regret:.3f} of the best time on unseen ones"
            console.print(line, highlight=False, soft_wrap=True)
        tables[dtype.itemsize] = dataclasses.replace(
            fitted[sweep.Kind.MEMORY],
            cached=fitted[sweep.Kind.CACHE],
            short=fitted.get(sweep.Kind.SHORT),
            pointers=fitted.get(sweep.Kind.POINTERS),
        )
    cost.save(cost.own(name), tables)
    console.print(f"stored in {cost.own(name)}", highlight=False, soft_wrap=True)


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
