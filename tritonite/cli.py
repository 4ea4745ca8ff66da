"""The command line: `tritonite info`, `build`, `demo`, `explain`, `report`, `verify`, `bench`, `tune`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import itertools
import os
import platform
import shlex
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import triton
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

import tritonite
from tritonite.engine.gemm import store
from tritonite.errors import NoDevice, TritoniteError
from tritonite.install.override import select, unknown
from tritonite.registry import names, overloads
from tritonite.report.explain import overload_named
from tritonite.runtime import cache, native

if TYPE_CHECKING:
    from tritonite.bench import workers
    from tritonite.bench.run import Check
    from tritonite.testing import verify as verification
    from tritonite.testing.fuzz import Finding, Tally

# How many sets of arguments are tried where they are guessed.
_MOST_ATTEMPTS = 64
# The shapes of tensors that are tried where none is given.
_SHAPES = ["64,64", "2,3,16,16", "2,3,8,8,8", "2,16,16", "64", "3,3", "4,1"]
app = typer.Typer(help=tritonite.__doc__, no_args_is_help=True, add_completion=False)
console = Console()

ENVIRONMENT = {
    "TRITON_INTERPRET": "1 runs kernels in the interpreter, 0 forbids it; set by Tritonite where there is no GPU",
    "TRITON_CACHE_DIR": "where Triton keeps compiled kernels",
    "TRITONITE_CACHE": "where the native dispatcher is built; by default tritonite in the user's cache folder",
    "TRITONITE_TUNE": "the file of tuned tiles; by default tritonite/tune.sqlite in the user's cache folder",
    "TRITONITE_NATIVE": "0 sends calls through Python, 1 through the native dispatcher (the default on NVIDIA's GPUs)",
    "TRITONITE_NATIVE_FLAGS": "more flags for the native dispatcher's compiler",
    "TRITONITE_FUZZ_LOG": "the file that processes of `tritonite verify --fuzz` write their errors to",
    "TRITONITE_QUIET": "1 writes no lines to standard error about waiting, compiling and interpreting",
    "CXX": "the native dispatcher's compiler",
    "TRITONITE_TEST_FULL": "1 makes the test suite take every sample and dtype",
}


def main() -> None:
    """Run the command line. Tritonite's own errors, and those of files, end it with one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal's encoding may lack what is printed.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except (TritoniteError, OSError, sqlite3.Error) as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


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
    """Options of no command."""
    if context.invoked_subcommand in ("verify", "bench", "tune"):
        # They show their progress, and their processes would each write these lines.
        os.environ.setdefault("TRITONITE_QUIET", "1")


@app.command()
def build() -> None:
    """Build the native dispatcher, if it is not yet built, and say where it is."""
    console.print(str(native.build()), highlight=False, soft_wrap=True)


@app.command()
def info() -> None:
    """Versions, device, mode, operators and environment variables."""
    table = Table(show_header=False, box=None)
    table.add_row("tritonite", tritonite.__version__)
    table.add_row("torch", torch.__version__)
    table.add_row("triton", triton.__version__)
    table.add_row("python", platform.python_version())
    name = torch.cuda.get_device_name() if tritonite.device == "cuda" else platform.processor() or platform.machine()
    table.add_row("device", f"{tritonite.device} ({name})")
    table.add_row("backend", tritonite.backend.kind)
    table.add_row("mode", "Triton's interpreter" if tritonite.backend.interpreted else "compiled kernels")
    table.add_row("call path", native.state() if native.wanted() else "Python")
    families = Counter(op.family for op in tritonite.overloads().values())
    table.add_row("overloads", f"{len(tritonite.overloads())}")
    for family, count in sorted(families.items()):
        table.add_row(f"  {family}", str(count))
    console.print(table)
    variables = Table("variable", "value", "meaning", title="Environment", title_justify="left")
    known = {name: "not a variable of Tritonite's" for name in sorted(os.environ) if name.startswith("TRITONITE_")}
    for variable, meaning in (known | ENVIRONMENT).items():
        value = os.environ.get(variable)
        variables.add_row(variable, "[dim]unset[/]" if value is None else escape(value), meaning)
    console.print(variables)


@app.command()
def explain(
    operator: Annotated[str, typer.Argument(help="such as softmax, add.Tensor or tritonite::silu_and_mul")],
    shape: Annotated[
        list[str] | None, typer.Option(help="of each tensor argument, such as 64,64; the last is repeated")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="of each tensor argument, such as float16; likewise")] = None,
) -> None:
    """What happens to a call: path, promotion, kernel and launch, or why ATen serves it."""
    dtypes = _dtypes(dtype) if dtype else None
    name = operator if operator.startswith("tritonite::") else names.spelled(operator)
    chosen = sorted({overloads()[each].packet for each in select(name)}) if names.is_glob(name) else [name]
    refusals = dict[str, str]()
    for each in chosen:
        text = _explained(each, shape, dtypes, refusals)
        if text:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    if len(refusals) == len(chosen):
        refusal = next(iter(refusals.values()))
        message = f"ATen refuses these arguments: {refusal}" if refusal else "no arguments for it are known"
        console.print(message, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2)


def _explained(
    name: str, shape: list[str] | None, dtypes: list[torch.dtype] | None, refusals: dict[str, str]
) -> str | None:
    """What explain says of the first arguments that ATen takes; None, with a refusal noted, where it takes none."""
    attempts = _calls(name, functools.partial(_tensors, shape or _SHAPES[:1], dtypes or [torch.float32]))
    if not shape:
        attempts = itertools.chain(attempts, _fitting(name, dtypes))
    refused = ""
    for args, kwargs in attempts:
        try:
            return tritonite.explain(name, *args, **kwargs)
        except TritoniteError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, AttributeError) as refusal:
            refused = refused or str(refusal)
    refusals[name] = refused
    return None


def _fitting(name: str, dtypes: list[torch.dtype] | None) -> Iterator[tuple[Sequence[object], dict[str, object]]]:
    """Arguments for a name where two dimensions do not fit: what tests have for it, then tensors of other shapes."""
    from tritonite.testing.arguments import arguments_for

    for kind in dtypes or [None]:
        yield from arguments_for(name, kind)
    for shape in _SHAPES[1:]:
        yield from _calls(name, functools.partial(_tensors, [shape], dtypes or [torch.float32]))


def _tensors(shapes: list[str], dtypes: list[torch.dtype]) -> Iterator[torch.Tensor]:
    """Those of a call, one after another; the last shape and dtype stand for all that follow."""
    pairs = zip(*(itertools.chain(each, itertools.repeat(each[-1])) for each in (shapes, dtypes)), strict=True)
    return itertools.starmap(_tensor, pairs)


def _calls(
    operator: str, tensors: Callable[[], Iterator[torch.Tensor]]
) -> Iterator[tuple[Sequence[object], dict[str, object]]]:
    """Arguments to explain a call with: one set of an overload, several to try of a function."""
    if "::" in operator or operator in overloads():
        yield _call(overload_named(operator), tensors())
        return
    function = names.function_named(operator)
    if function is None:
        raise unknown(operator)
    for _, parameters in names.ways(function):
        given = _given(parameters, tensors())
        yield from ((values, {}) for values in itertools.islice(itertools.product(*given), _MOST_ATTEMPTS))


def _given(parameters: Iterable[Sequence[object]], tensors: Iterator[torch.Tensor]) -> list[list[object]]:
    """What is tried for parameters, with a tensor for those that take one, and its last size for a list of sizes."""
    given, sizes = list[list[object]](), list[int]()
    for values in parameters:
        others = [value for value in values if not names.is_like(value)]
        if len(others) < len(values):
            others.append(tensor := next(tensors))
            sizes = sizes or list(tensor.shape[-1:])
        given.append([sizes, *others] if [1] in others and sizes else others)
    return given


def _call(op: tritonite.Op, tensors: Iterator[torch.Tensor]) -> tuple[list[object], dict[str, object]]:
    """Arguments of an overload by position, and by name those that have to be."""
    args, kwargs, dtype = list[object](), dict[str, object](), torch.float32
    for argument in op.schema.arguments:
        value: object
        if str(argument.type) in ("Tensor", "Optional[Tensor]"):
            value = tensor = next(tensors)
            dtype = tensor.dtype
        elif argument.has_default_value():
            value = argument.default_value
        else:
            value = _guess(str(argument.real_type), dtype)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _guess(kind: str, dtype: torch.dtype) -> object:
    """An argument of a type that is no tensor's, for a schema that has no default."""
    if kind.startswith("Optional"):
        return None
    return {"bool": False, "ScalarType": dtype}.get(kind, [1] if kind.startswith("List") else 1)


def _tensor(shape: str, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized, so that a shape may be larger than the memory that can be touched."""
    try:
        size = [int(part) for part in shape.split(",") if part]
    except ValueError:
        raise typer.BadParameter("a shape is numbers and commas", param_hint="--shape") from None
    try:
        return torch.empty(size, dtype=dtype, device=tritonite.device)
    except RuntimeError as error:
        raise typer.BadParameter(f"no tensor of shape {size} and {dtype}: {error}") from None


def _dtypes(names: list[str]) -> list[torch.dtype]:
    found = [getattr(torch, name, None) for name in names]
    for name, dtype in zip(names, found, strict=True):
        if not isinstance(dtype, torch.dtype):
            raise typer.BadParameter(f"torch has no dtype {name!r}", param_hint="--dtype")
    return found


@app.command()
def verify(
    op: Annotated[list[str] | None, typer.Option(help="operator, overload or glob; several allowed")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="such as float16; several allowed")] = None,
    full: Annotated[bool, typer.Option(help="all of OpInfo's samples")] = False,
    fuzz: Annotated[float | None, typer.Option(min=0, help="instead, draw calls for so many seconds")] = None,
    seed: Annotated[int, typer.Option(help="of the calls drawn")] = 0,
    case: Annotated[int | None, typer.Option(help="instead, one call of --op and --seed by its number")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes to draw calls in")] = os.cpu_count() or 1,
) -> None:
    """Check operators on this machine against ATen and float64; exits with 1 if one fails."""
    if case is not None or fuzz is not None:
        _fuzz(op, fuzz, seed, case, jobs)
        return
    from tritonite.testing.verify import verify as reports

    dtypes = _dtypes(dtype) if dtype else None
    table = Table(Column("operator", overflow="fold"), "dtype", "samples", "result", "worst error (eps)", "ATen's own")
    failures = total = served = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
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
    if not total:
        console.print("[red]error:[/] nothing to verify: no operator named has samples in these dtypes")
        raise typer.Exit(2)
    console.print(table)
    console.print(f"{total} samples, {failures} of {table.row_count} checks failed")
    if not served:
        console.print("[red]error:[/] nothing was verified: kernels declined every sample, so that ATen served all")
    if failures or not served:
        raise typer.Exit(1)


def _verdict(report: verification.Report) -> str:
    """Whether an operator's samples passed, and by whom they were served where that was not a kernel."""
    if report.failures:
        return f"[red]{len(report.failures)} fail[/]"
    return "[green]pass[/]" if report.served else "[yellow]declined: ATen served all[/]"


def _fuzz(op: list[str] | None, seconds: float | None, seed: int, case: int | None, jobs: int) -> None:
    """Print what is wrong with calls drawn from the schemas; exits with 1 if anything is."""
    from tritonite.testing.fuzz import Tally, fuzz

    tally, findings = Tally(), 0
    found: Iterable[Finding | None]
    found = fuzz(seconds or 0, op, seed, jobs, tally) if case is None else _repeated(op, seed, case, tally)
    for finding in found:
        if finding is not None:
            findings += 1
            console.print(str(finding), highlight=False, markup=False, soft_wrap=True)
    console.print(f"{tally.calls} calls, {tally.served} served by kernels, {findings} findings")
    for crash in tally.aten_crashes:
        console.print(f"ATen: {crash}", highlight=False, markup=False, soft_wrap=True)
    if findings:
        raise typer.Exit(1)


def _repeated(op: list[str] | None, seed: int, case: int, tally: Tally) -> Iterator[Finding | None]:
    """What is wrong with one drawn call of each operator; prints who served it."""
    from tritonite.runtime.stats import counts
    from tritonite.testing.fuzz import fuzz_one
    from tritonite.testing.verify import became

    for name in sorted(select(op)):
        before = counts(name)
        yield fuzz_one(name, seed, case)
        ran, reasons = became(before, counts(name))
        tally.calls, tally.served = tally.calls + 1, tally.served + bool(ran)
        who = "a kernel" if ran else f"ATen: {'; '.join(dict.fromkeys(reasons)) or 'no kernel was asked'}"
        console.print(f"{name}: served by {who}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def report(
    model: Annotated[list[str], typer.Option(help="such as bert or t5; several allowed")],
    dtype: Annotated[str, typer.Option(help="default bfloat16, and float32 in the interpreter")] = "",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="of the prompt; default 512")] = None,
) -> None:
    """Who runs each call of ATen in a model's passes, how often, why not Tritonite, and what it costs on a GPU."""
    from tritonite.bench import models

    kind, tiny = _model_dtype(dtype), tritonite.backend.interpreted
    for name in _models(model):
        for phase in models.phases(name, kind, batch, tokens or _prompt(), tiny):
            with torch.inference_mode():
                found = tritonite.report(phase.forward)
                phase.restore()
            console.print(f"{name} {phase.name}, {phase.tokens} tokens, {str(kind).removeprefix('torch.')}")
            console.print(found)


def _operators(chosen: list[str]) -> list[str]:
    """Operators and globs as they are, and those that ATen makes the functions of that name of."""
    chosen = list(map(names.spelled, chosen))
    functions = [function for function in map(names.function_named, chosen) if function is not None]
    reached = [names.reached(function) for function in functions if names.ways(function, composite=True)]
    return [*chosen, *sorted({overloads()[name].packet for each in reached for name in each})]


def _models(chosen: list[str] | None) -> list[str]:
    from tritonite.bench import models

    for name in chosen or ():
        if name not in models.MODELS:
            raise typer.BadParameter(f"no model {name!r}; there are {', '.join(models.MODELS)}", param_hint="--model")
    return chosen or []


def _model_dtype(name: str) -> torch.dtype:
    """The one named, or what models usually have here."""
    from tritonite.bench import models

    if not name:
        return torch.float32 if tritonite.backend.interpreted else torch.bfloat16
    (dtype,) = _dtypes([name])
    if dtype not in models.MINIMUM_SIMILARITY:
        raise typer.BadParameter("models run in float16, bfloat16 and float32", param_hint="--dtype")
    return dtype


def _prompt() -> int:
    """How many tokens a model's prompt has."""
    return 16 if tritonite.backend.interpreted else 512


@app.command()
def bench(
    op: Annotated[list[str] | None, typer.Option(help="operator or glob; several allowed")] = None,
    family: Annotated[list[str] | None, typer.Option(help="such as activation; several allowed")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="such as float16; several allowed")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="a case's label, such as 4096x4096, or a glob")] = None,
    measure: Annotated[list[str] | None, typer.Option(help="device, host or graph; default device and host")] = None,
    provider: Annotated[
        list[str] | None, typer.Option(help="compile, compile+tritonite, or name=module:context")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="a whole model instead of operators: bert, llama, t5, vit, whisper")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="of a model")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="of a model's prompt; default 512")] = None,
    quick: Annotated[
        bool, typer.Option(help="what models run most, or of --op a few shapes: under three minutes")
    ] = False,
    drawn: Annotated[int | None, typer.Option(min=1, help="instead, so many cases of each family at random")] = None,
    seed: Annotated[int, typer.Option(help="of the cases drawn")] = 0,
    case: Annotated[list[int] | None, typer.Option(help="instead, cases of --family and --seed by number")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="in which providers take turns")] = 10,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="processes to check answers in, before; by default half of the cores")
    ] = None,
    part: Annotated[str, typer.Option(help="of the cases, such as 0/4: the first of four parts")] = "0/1",
    json: Annotated[Path | None, typer.Option(help="write the results")] = None,
    html: Annotated[Path | None, typer.Option(help="write a report, one file")] = None,
    charts: Annotated[Path | None, typer.Option(help="write charts as PNG into a folder")] = None,
    compare: Annotated[Path | None, typer.Option(help="earlier results: print what changed; exit 1 if slower")] = None,
) -> None:
    """Time operators against ATen on this machine, each result checked first; exits with 1 on a wrong one."""
    from tritonite.bench import cases, models, results, run, timing, workers
    from tritonite.bench import console as view
    from tritonite.bench.drawn import cases as random_cases

    _check_destinations(json, html, charts)
    model_dtypes = list(map(_model_dtype, dtype or [""])) if _models(model) else []
    dtypes = _dtypes(dtype) if dtype else None
    for name in measure or ():
        if name not in results.MEASURES or (name == "graph" and tritonite.device != "cuda"):
            raise typer.BadParameter(f"cannot measure {name!r} here", param_hint="--measure")
    earlier = results.Run.load(compare) if compare else None
    providers = [timing.TRITONITE, *map(run.provider, provider or ())]
    kinds = tuple(measure or (() if model else ("device", "host")))
    named = (op and _operators(op), family, shape, dtypes)
    at_random = drawn is not None or case is not None
    which = functools.partial(cases.chosen, quick, kinds, *named)
    if at_random:
        which = functools.partial(random_cases, drawn or 0, seed, case, measure, *named)
    which = functools.partial(cases.shard, which, *_part(part))
    chosen = which()
    if not chosen and not model:
        raise typer.BadParameter("no case matches")
    names = [each.name for each in (timing.ATEN, *providers)]
    machine = run.machine(
        shlex.join(["tritonite", *sys.argv[1:]]), any(each.flops for each in chosen), seed if at_random else None
    )
    checks = _checks(which, len(chosen), provider or (), jobs or workers.usual_jobs(len(chosen)))
    tiny = tritonite.backend.interpreted
    length = tokens or _prompt()
    passes = (
        models.measure(
            name, (timing.ATEN, *providers), dtype=kind, batch=batch, tokens=length, tiny=tiny, rounds=rounds
        )
        for name in model or ()
        for kind in model_dtypes
    )
    every: Iterator[results.Result | results.ModelResult]
    every = itertools.chain(run.run(chosen, providers, rounds, checks), itertools.chain.from_iterable(passes))
    found = view.follow(console, machine, every, None if model else len(chosen), names, json)
    if 0 < len(chosen) <= 40:
        console.print(view.table(found, found.results, names))
    view.summarise(console, found)
    view.show_models(console, found.models)
    if json:
        found.save(json)
    if charts:
        from tritonite.bench.charts import save

        save(found, charts)
    if html:
        from tritonite.bench.page import write

        write(found, html)
    slower = view.show_changes(console, results.compare(earlier, found)) if earlier else 0
    if found.interrupted:
        raise typer.Exit(130)
    if slower or any(result.failure for result in found.results):
        raise typer.Exit(1)


def _check_destinations(json: Path | None, html: Path | None, charts: Path | None) -> None:
    """Raise TritoniteError where results could not be written once they are measured."""
    if (html or charts) and importlib.util.find_spec("matplotlib") is None:
        raise TritoniteError(message="charts come from matplotlib: pip install 'tritonite[bench]'")
    for path in (json, html, charts and charts / "speedup.png"):
        if path:
            cache.check_writable(path)


def _part(text: str) -> tuple[int, int]:
    """Which part of how many."""
    from tritonite.testing.parts import part_of

    try:
        return part_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--part") from None


def _checks(cases: workers.Cases, count: int, providers: Sequence[str], jobs: int) -> list[Check | None]:
    """What several processes find of cases before they are timed; nothing where one process does all."""
    from tritonite.bench import console as view
    from tritonite.bench import workers

    if jobs == 1 or count == 0:
        return []
    try:
        with contextlib.closing(workers.checks(cases, count, providers, jobs)) as found:
            return view.checking(console, found, count)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: nothing was measured[/]")
        raise typer.Exit(130) from None


@app.command()
def tune(
    shape: Annotated[
        list[str] | None, typer.Option(help="MxNxK or BATCHESxMxNxK; default: those of the benchmark")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="such as float16; several allowed")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="nn, nt, tn or tt; default nn and nt")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes to compile in")] = os.cpu_count() or 1,
    model: Annotated[
        bool, typer.Option(help="instead, fit the model that chooses tiles for every shape to this GPU")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="of --model, for each dtype, once all is compiled")] = 90,
    seed: Annotated[int, typer.Option(help="of the products that --model draws")] = 0,
) -> None:
    """Find the fastest tiles for products of matrices on this GPU and keep them for every later process."""
    if tritonite.device != "cuda" or tritonite.backend.interpreted:
        raise NoDevice
    if model:
        _fit_model(seconds, seed, jobs)
        return
    store.check()
    from tritonite.bench import cases
    from tritonite.engine.gemm.problem import Problem
    from tritonite.tuning import tuner

    sizes = [_sizes(text) for text in shape] if shape else [(1, *each) for each in cases.PRODUCTS + cases.DECODING]
    kinds, layouts = _dtypes(dtype) if dtype else [torch.bfloat16, torch.float16], layout or ["nn", "nt"]
    if not set(layouts) <= {"nn", "nt", "tn", "tt"}:
        raise typer.BadParameter("layouts are nn, nt, tn and tt", param_hint="--layout")
    problems = [
        Problem(batches, M, N, K, kind, kind, which[0] == "n", which[1] == "t")
        for batches, M, N, K in sizes
        for kind in kinds
        for which in layouts
    ]
    configs = {problem: list(tuner.candidates(problem)) for problem in problems}
    with console.status(f"compiling the candidates of {len(problems)} problems"):
        tuner.compile_all([(problem, config) for problem, found in configs.items() for config in found], jobs)
    table = Table("problem", *(Column(name, justify="right") for name in ("us", "rule", "ATen", "of ATen")), "tiles")
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console) as progress:
        for problem in progress.track(problems, description="tuning"):
            found = tuner.tune_problem(problem, configs[problem])
            times = [f"{time:.1f}" for time in (found.microseconds, found.rule, found.aten)]
            table.add_row(problem.key, *times, f"{found.aten / found.microseconds:.2f}", str(tuple(found.config)))
    console.print(table)
    console.print(f"kept in {store.path()}", highlight=False, soft_wrap=True)


def _fit_model(seconds: float, seed: int, jobs: int) -> None:
    """Sweep drawn products of bfloat16 and float32, fit the model to them, and say how well it fits a third unseen."""
    from tritonite import devices
    from tritonite.engine.gemm import cost
    from tritonite.tuning import sweep

    device = torch.device("cuda", torch.cuda.current_device())
    name, count = devices.name_of(device), devices.multiprocessors(device)
    cache.check_writable(cost.own(name))
    tables = dict(cost.tables(name, devices.architecture(device)) or cost.tables("", "sm_90"))
    if not devices.has_wgmma(device):
        tables = {size: cost.without_wgmma(table) for size, table in tables.items()}
    for dtype in (torch.bfloat16, torch.float32):
        whole = tables[dtype.itemsize]
        kinds = {sweep.Kind.MEMORY: whole, sweep.Kind.CACHE: whole.cached or whole}
        # A table that was fitted here before there were others has none for these.
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
                # In float32 the times of ATen's library differ by a fifth from any such estimate.
                if dtype is torch.bfloat16 and kind is not sweep.Kind.POINTERS:
                    fitted[kind] = sweep.fit_aten(timed, fitted[kind], count)
            found = f"{dtype} {kind.value}: {len(timed)} products, chosen over best tiles {regret:.3f} where unseen"
            console.print(found, highlight=False, soft_wrap=True)
        tables[dtype.itemsize] = dataclasses.replace(
            fitted[sweep.Kind.MEMORY],
            cached=fitted[sweep.Kind.CACHE],
            short=fitted.get(sweep.Kind.SHORT),
            pointers=fitted.get(sweep.Kind.POINTERS),
        )
    cost.save(cost.own(name), tables)
    console.print(f"kept in {cost.own(name)}", highlight=False, soft_wrap=True)


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) not in (3, 4) or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is neither MxNxK nor BATCHESxMxNxK", param_hint="--shape")
    return tuple(map(int, ["1", *parts][-4:]))


@app.command()
def demo() -> None:
    """Sentence embedding by a pretrained MiniLM, in ATen and with every pointwise operator in Triton."""
    from tritonite.demo import run

    if not run(console):
        raise typer.Exit(1)
