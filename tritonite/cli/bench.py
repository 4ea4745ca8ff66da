"""`tritonite report` and `tritonite bench`: count and time the calls of models and operators."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib.util
import itertools
import shlex
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

import tritonite
from tritonite.cli.common import INTERRUPTED, app, console, dtypes_named
from tritonite.errors import TritoniteError
from tritonite.registry import names, overloads
from tritonite.runtime import cache

if TYPE_CHECKING:
    from tritonite.bench import workers
    from tritonite.bench.cases import Case
    from tritonite.bench.console import Checked
    from tritonite.bench.results import Result, Run
    from tritonite.bench.run import Check
    from tritonite.bench.timing import Provider


# Spelled out, because importing the benchmarks would slow every other command.
MODEL_NAMES = (
    "bert, clip, convnext, gemma3, gpt2, llama, mamba, mistral, mixtral, phi, qwen3, resnet, roberta, smollm2, t5, "
    "unet, vae, vit, wav2vec2 or whisper"
)
TRAINED_NAMES = "any of them but smollm2"


@app.command()
def report(
    model: Annotated[list[str], typer.Option(help=f"model: {MODEL_NAMES}; repeatable")],
    dtype: Annotated[str, typer.Option(help="dtype; default bfloat16, in the interpreter float32")] = "",
    batch: Annotated[int, typer.Option(min=1, help="number of sequences or images")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="tokens of the prompt; default 512")] = None,
    channels_last: Annotated[bool, typer.Option(help="make models of images, and their images, channels-last")] = False,
) -> None:
    """Count who serves each operator in a model's passes, with reasons of declines and times on a GPU."""
    from tritonite.bench import models

    kind, tiny = model_dtype(dtype), tritonite.backend.interpreted
    for name in known_models(model):
        workload = models.Workload(kind, batch, tokens or usual_prompt(), tiny, channels_last)
        for phase in models.phases(name, workload):
            with torch.inference_mode():
                calls = tritonite.report(phase.forward)
                phase.restore()
            console.print(f"{name} {phase.name}, {phase.tokens} tokens, {str(kind).removeprefix('torch.')}")
            console.print(calls)


def _measure_regressions(patterns: list[str] | None, rounds: int) -> None:
    """Print the device times of choices and of their alternatives; patterns match names of cases and operators."""
    from rich.progress import track
    from rich.table import Table

    from tritonite.bench.regressions import cases, measure

    if not tritonite.backend.profiled:
        raise typer.BadParameter("needs a GPU", param_hint="--regressions")
    wanted = patterns or ["*"]
    chosen = [
        case
        for case in cases().values()
        if any(fnmatch.fnmatch(each, pattern) for each in (case.name, case.op) for pattern in wanted)
    ]
    if not chosen:
        raise typer.BadParameter("no regression case matches", param_hint="--op")
    table = Table("case", "operator", "choice, us", "alternative, us", "gain", "expected", "")
    try:
        for case in track(chosen, "measuring", console=console, transient=True):
            found = measure(case, rounds)
            times = f"{found.choice.median:.1f}", f"{found.alternative.median:.1f}"
            verdict = "" if found.pays else "no longer pays"
            table.add_row(case.name, case.op, *times, f"{found.gain:.2f}", f"{case.gain:.2f}", verdict)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted[/]")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        console.print(table)


def _measure_graphs(json: Path | None, **given: Any) -> None:
    """Print times of whole graphs as a Markdown table, and write them as JSON after each result."""
    from rich.progress import track

    from tritonite.bench.graphs import results, run
    from tritonite.bench.graphs.ways import WAYS
    from tritonite.bench.run import machine

    for name, chosen, known in (
        ("--model", given["models"], {model for model, _ in run.SUBJECTS}),
        ("--provider", given["ways"], WAYS.keys()),
    ):
        for each in chosen:
            if each not in known:
                raise typer.BadParameter(f"{each!r} is none of {', '.join(known)}", param_hint=name)
    measured = results.GraphRun(machine(shlex.join(["tritonite", *sys.argv[1:]])))
    plan = run.Plan(**given)
    try:
        for result in track(run.measure(plan), "measuring", run.count(plan), console=console, transient=True):
            measured.results.append(result)
            measured.results.sort(key=run.position)
            if json:
                measured.save(json)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted[/]")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        for line in results.table(measured):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if any(each.failure for each in measured.results):
        raise typer.Exit(1)


def _operators(chosen: list[str]) -> list[str]:
    """Return operators and globs unchanged, and add the operators that functions of these names call."""
    chosen = list(map(names.spelled, chosen))
    functions = [function for function in map(names.function_named, chosen) if function is not None]
    reached = [names.reached(function) for function in functions if names.candidate_calls(function, composite=True)]
    return [*chosen, *sorted({overloads()[name].packet for each in reached for name in each})]


def known_models(chosen: list[str] | None) -> list[str]:
    from tritonite.bench import models

    for name in chosen or ():
        if name not in models.MODELS:
            raise typer.BadParameter(
                f"no model {name!r}; known models: {', '.join(models.MODELS)}", param_hint="--model"
            )
    return chosen or []


def model_dtype(name: str) -> torch.dtype:
    """Return the named dtype, or the default for models on this device."""
    from tritonite.bench import models

    if not name:
        return torch.float32 if tritonite.backend.interpreted else torch.bfloat16
    (dtype,) = dtypes_named([name])
    if dtype not in models.MINIMUM_SIMILARITY:
        raise typer.BadParameter(f"models run in float16, bfloat16 and float32, not {name}", param_hint="--dtype")
    return dtype


def _model_dtypes(chosen: list[str] | None, zoo: str) -> list[torch.dtype]:
    """Return the dtypes that models run in; of a zoo, whose models run in autocast, the dtypes computed in."""
    from tritonite.bench import models

    if not zoo:
        return list(map(model_dtype, chosen or [""]))
    if zoo not in models.ZOOS:
        raise typer.BadParameter(f"no zoo {zoo!r}; known zoos: {', '.join(models.ZOOS)}", param_hint="--zoo")
    dtypes = list(map(model_dtype, chosen or ["bfloat16"]))
    if torch.float32 in dtypes:
        raise typer.BadParameter("a zoo runs in autocast to float16 or bfloat16", param_hint="--dtype")
    return dtypes


def usual_prompt() -> int:
    """Return the default number of tokens of a prompt."""
    return 16 if tritonite.backend.interpreted else 512


@app.command()
def bench(
    op: Annotated[list[str] | None, typer.Option(help="operator or glob; repeatable")] = None,
    family: Annotated[
        list[str] | None, typer.Option(help="family of operators, such as activation; repeatable")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="dtype, such as float16; repeatable")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="label of a case, such as 4096x4096, or a glob; repeatable")
    ] = None,
    measure: Annotated[
        list[str] | None, typer.Option(help="device, host or graph; repeatable; default device and host")
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            help="further provider: compile, compile+tritonite, tritonite-graph; of models patched, compiled; or "
            "name=module:context; with --graphs only this way to run models"
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help=f"time a whole model instead of operators: {MODEL_NAMES}")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences or images of a model's batch")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="tokens of a model's prompt; default 512")] = None,
    train: Annotated[bool, typer.Option(help=f"time a training step of --model: {TRAINED_NAMES}")] = False,
    zoo: Annotated[
        str,
        typer.Option(help="all or vision: time inference and training of its models in autocast; --model selects some"),
    ] = "",
    channels_last: Annotated[bool, typer.Option(help="make models of images, and their images, channels-last")] = False,
    quick: Annotated[
        bool, typer.Option(help="only the operators that models run most, or a few shapes of --op")
    ] = False,
    drawn: Annotated[int | None, typer.Option(min=1, help="draw this many random cases of each family instead")] = None,
    seed: Annotated[int, typer.Option(help="seed of the drawn cases")] = 0,
    case: Annotated[
        list[int] | None,
        typer.Option(help="measure the drawn cases of --family and --seed with these numbers; repeatable"),
    ] = None,
    regressions: Annotated[
        bool, typer.Option(help="measure choices in the code against their alternatives instead; --op filters by name")
    ] = False,
    graphs: Annotated[
        bool,
        typer.Option(
            help="measure cold start, steady state, new shapes and start from a file of whole graphs instead: bert, "
            "llama, resnet and vit; with --quick of tiny models"
        ),
    ] = False,
    limit: Annotated[
        float, typer.Option(min=1, help="seconds that a process of --graphs, or a model's with --jobs, may take")
    ] = 300.0,
    rounds: Annotated[int, typer.Option(min=1, help="rounds in which providers take turns")] = 10,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="processes that check answers in turn with the timing; default half of the cores; with --graphs, "
            "--model or --zoo results that are measured at a time; default 1",
        ),
    ] = None,
    part: Annotated[str, typer.Option(help="shard of the cases, such as 0/4 for the first of four")] = "0/1",
    json: Annotated[Path | None, typer.Option(help="file to write the results to")] = None,
    html: Annotated[Path | None, typer.Option(help="file to write a self-contained report to")] = None,
    charts: Annotated[Path | None, typer.Option(help="folder to write charts to, as PNG")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="earlier results to compare with; exits with 1 if a case got slower")
    ] = None,
) -> None:
    """Time operators against ATen on this machine. Every result is checked first; exits with 1 on a wrong one."""
    if regressions:
        _measure_regressions(op, rounds)
        return
    if graphs:
        _check_destinations(json, html, charts)
        (kind,) = map(model_dtype, dtype or [""])
        tiny = quick or tritonite.backend.interpreted
        _measure_graphs(
            json,
            models=model or (),
            ways=provider or (),
            dtype=str(kind).removeprefix("torch."),
            batch=batch,
            tokens=tokens or (16 if tiny else usual_prompt()),
            tiny=tiny,
            rounds=rounds,
            limit=limit,
            jobs=jobs or 1,
        )
        return
    from tritonite.bench import cases, models, results, run, timing, workers
    from tritonite.bench import console as view
    from tritonite.bench.drawn import cases as random_cases
    from tritonite.bench.models.apart import measure_apart

    _check_destinations(json, html, charts)
    model_dtypes = _model_dtypes(dtype, zoo) if known_models(model) or zoo else []
    dtypes = dtypes_named(dtype) if dtype else None
    for name in measure or ():
        if name not in results.MEASURES or (name == "graph" and not tritonite.backend.profiled):
            raise typer.BadParameter(
                f"cannot measure {name!r} on this device; measures are {', '.join(results.MEASURES)}",
                param_hint="--measure",
            )
    earlier = results.Run.load(compare) if compare else None
    providers = [timing.TRITONITE, *map(run.provider, provider or ())]
    if zoo:
        providers.insert(1, timing.EVERY)
    kinds = tuple(measure or (() if model or zoo else ("device", "host")))
    named = (op and _operators(op), family, shape, dtypes)
    at_random = drawn is not None or case is not None
    which = functools.partial(cases.chosen, quick, kinds, *named)
    if at_random:
        which = functools.partial(random_cases, drawn or 0, seed, case, measure, *named)
    which = functools.partial(cases.shard, which, *_part(part))
    chosen = which()
    if not chosen and not model and not zoo:
        raise typer.BadParameter("no case matches")
    names = [each.name for each in (timing.ATEN, *providers)]
    machine = run.machine(
        shlex.join(["tritonite", *sys.argv[1:]]), any(each.flops for each in chosen), seed if at_random else None
    )
    processes = jobs or workers.usual_jobs(len(chosen))
    timed = _checked_and_timed(which, chosen, provider or (), providers, rounds, processes)
    length, tiny = tokens or usual_prompt(), tritonite.backend.interpreted
    workloads = [models.Workload(kind, batch, length, tiny, channels_last) for kind in model_dtypes]
    subjects = [models.ModelCase(name, own, train) for name in model or () for own in workloads]
    if zoo:
        subjects = [each for own in workloads for each in models.zoo(zoo, own) if each.name in (model or [each.name])]
    passes: Iterator[results.ModelResult] = iter(())
    if subjects and (jobs or 1) > 1:
        passes = measure_apart(subjects, provider or (), bool(zoo), rounds, jobs or 1, limit)
    elif subjects:
        passes = models.measure(subjects, (timing.ATEN, *providers), rounds)
    with contextlib.closing(timed):
        every = itertools.chain(timed, passes)
        measured = view.follow(console, machine, every, None if subjects else len(chosen), names, json)
    if 0 < len(chosen) <= 40:
        console.print(view.table(measured, measured.results, names))
    view.summarise(console, measured)
    view.show_models(console, measured.models)
    if zoo:
        view.show_zoo(console, measured.models)
    _save(measured, json, html, charts)
    slower = view.show_changes(console, results.compare(earlier, measured)) if earlier else 0
    if measured.interrupted:
        raise typer.Exit(INTERRUPTED)
    failures = [each.failure for each in measured.results] + [each.failure for each in measured.models]
    if slower or any(failures):
        raise typer.Exit(1)


def _save(measured: Run, json: Path | None, html: Path | None, charts: Path | None) -> None:
    """Write a run to the files that are asked for."""
    if json:
        measured.save(json)
    if charts:
        from tritonite.bench.charts import save

        save(measured, charts)
    if html:
        from tritonite.bench.page import write

        write(measured, html)


def _check_destinations(json: Path | None, html: Path | None, charts: Path | None) -> None:
    """Raise TritoniteError, before anything is measured, if results could not be written."""
    if (html or charts) and importlib.util.find_spec("matplotlib") is None:
        raise TritoniteError(message="charts come from matplotlib: pip install 'tritonite[bench]'")
    for path in (json, html, charts and charts / "speedup.png"):
        if path:
            cache.check_writable(path)


def _part(text: str) -> tuple[int, int]:
    """Parse a shard "I/N". Raises typer.BadParameter."""
    from tritonite.testing.parts import part_of

    try:
        return part_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--part") from None


def _checked_and_timed(
    cases: workers.Cases,
    chosen: Sequence[Case],
    names: Sequence[str],
    providers: Sequence[Provider],
    rounds: int,
    jobs: int,
) -> Generator[Result | Checked, None, None]:
    """Check cases in several processes, time those of each wave after it, and yield results and progress.

    One process does both. `names` are those of the `providers` but Tritonite.
    """
    from tritonite.bench import run, workers
    from tritonite.bench.console import Checked

    if jobs == 1:
        yield from run.run(chosen, providers, rounds)
        return
    with contextlib.closing(workers.checks(cases, len(chosen), names, jobs)) as checked:
        for wave in workers.waves(len(chosen), jobs):
            found: dict[int, Check | None] = {}
            for index, check in itertools.islice(checked, len(wave)):
                found[index] = check
                yield Checked(wave.start + len(found))
            own = [chosen[index] for index in wave]
            yield from run.run(own, providers, rounds, [found[index] for index in wave])
