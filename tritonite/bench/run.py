"""One benchmark run: case by case, checked against ATen first, then timed for every provider."""

from __future__ import annotations

import datetime
import functools
import importlib
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

import tritonite
from tritonite.bench import timing
from tritonite.bench.cases import Case, bytes_moved
from tritonite.bench.fused import PAIRS
from tritonite.bench.results import Machine, Result
from tritonite.bench.timing import ATEN, BOTH, COMPILE, TRITONITE, Provider
from tritonite.errors import InvalidProvider
from tritonite.testing.judge import cancelling, judge, terms, to_reference
from tritonite.testing.samples import REFERENCES, Sample, compares_zero_sign


def provider(text: str) -> Provider:
    """From "compile", "compile+tritonite", or "name=module:attribute", whose attribute called makes a context manager.

    Raises InvalidProvider.
    """
    if text in (COMPILE.name, BOTH.name):
        return COMPILE if text == COMPILE.name else BOTH
    name, _, place = text.partition("=")
    module, _, attribute = place.partition(":")
    if not (name and module and attribute):
        raise InvalidProvider(text=text, reason="give compile, compile+tritonite, or name=module:attribute")
    if name in (ATEN.name, TRITONITE.name):
        raise InvalidProvider(text=text, reason=f"{name} is always measured")
    try:
        scope = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidProvider(text=text, reason=str(error)) from error
    return Provider(name, lambda _: scope())


def machine(command: str, with_matmul: bool = False) -> Machine:
    """This machine, its rates measured."""
    cuda = tritonite.device == "cuda"
    rates = dict(timing.matmul_rates((torch.float16, torch.bfloat16, torch.float32))) if with_matmul else {}
    return Machine(
        device=torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        kind=tritonite.backend.kind,
        versions={
            "tritonite": tritonite.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        commit=_commit(),
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        copy_bandwidth=timing.copy_bandwidth(),
        matmul_rates=rates,
    )


def _commit() -> str:
    """The commit of the source, where it is a checkout, with "-dirty" after it where files differ."""
    git = shutil.which("git")
    if git is None:
        return ""
    done = subprocess.run(
        [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def run(cases: Sequence[Case], providers: Sequence[Provider], rounds: int = timing.ROUNDS) -> Iterator[Result]:
    """The results, one case after the other; what ATen itself does not do here, in that dtype, has none."""
    for case in cases:
        if (result := _result(case, providers, rounds)) is not None:
            yield result


def _result(case: Case, providers: Sequence[Provider], rounds: int) -> Result | None:
    times, failure, moved, elements = {}, "", 0, 0
    try:
        sample = case.sample()
        # What writes into its arguments needs others each time.
        anew = case.sample if case.inplace else lambda: sample
        function = function_of(case.overload, anew())
        functions = {each: each.wrap(function) for each in (ATEN, *providers)}
        if case.pair is not None and TRITONITE in functions:
            functions[TRITONITE] = case.pair.fused
        try:
            expected = _results(function, anew())
        except NotImplementedError:
            return None
        moved = bytes_moved(case.op, sample, expected)
        elements = max(value.numel() for value in (*sample.args, *expected) if isinstance(value, torch.Tensor))
        failure = _disagreement(case, functions, anew, expected)
        if not failure:
            del expected
            calls = {each: functools.partial(f, *sample.args, **sample.kwargs) for each, f in functions.items()}
            times = timing.measure(calls, case.packet, case.measure, rounds)
    except Exception as error:  # noqa: BLE001 - a provider may raise what it likes, and the other cases go on
        failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return Result(
        op=case.op,
        family=case.family,
        label=case.label,
        dtype=str(case.dtype).removeprefix("torch."),
        measure=case.measure,
        elements=elements,
        bytes=moved,
        flops=case.flops,
        times=times,
        failure=failure,
    )


def _disagreement(
    case: Case,
    functions: dict[Provider, Callable[..., Any]],
    anew: Callable[[], Sample],
    expected: Sequence[torch.Tensor],
) -> str:
    """Whose answer is not ATen's, judged against float64, and how; "" where all are."""
    reference, sample, name, scanned = None, anew(), case.packet or case.op, 1
    if case.family == "scan":
        names = tritonite.overloads()[case.overload].names
        scanned = sample.args[0].shape[sample.args[names.index("dim")]]
    if any(result.is_floating_point() for result in expected):
        reference = _results(REFERENCES.get(name, functions[ATEN]), sample.map(to_reference))
    for each, function in functions.items():
        if each is ATEN:
            continue
        with each.scope(case.packet):
            actual = _results(function, anew())
        for i, (own, aten) in enumerate(zip(actual, expected, strict=True)):
            exact = None if reference is None else reference[i]
            roundoff = max(scanned, terms(name, sample.args, aten, exact))
            zero_sign = case.pair is None and compares_zero_sign(name)
            cancels = "backward" in name and cancelling(name)
            verdict = judge(own, aten, exact, zero_sign, tritonite.device, roundoff, cancels)
            if verdict.failure:
                return f"{each.name} gives another answer than ATen: {verdict.failure}"
    return ""


def _results(function: Callable[..., Any], sample: Sample) -> Sequence[torch.Tensor]:
    value = function(*sample.args, **sample.kwargs)
    return value if isinstance(value, (list, tuple)) else (value,)


def python_functions(overload: str) -> Iterator[Callable[..., Any]]:
    """The functions by which users may call an overload: of torch, Tensor and torch's own modules."""
    packet = overload.partition(".")[0]
    places = ((torch, packet), (torch.Tensor, packet), (torch._C._nn, packet))
    for home, name in (*places, (torch.special, packet.removeprefix("special_"))):
        found = getattr(home, name, None)
        if callable(found):
            yield found


def function_of(overload: str, sample: Sample) -> Callable[..., Any]:
    """The first of those that takes the sample, or else torch.ops' own; of a fused operator ATen's composition."""
    if overload in PAIRS:
        return PAIRS[overload].composition
    for found in python_functions(overload):
        try:
            found(*sample.args, **sample.kwargs)
        except (RuntimeError, TypeError, ValueError):
            continue
        return found
    packet, _, name = overload.partition(".")
    return getattr(getattr(torch.ops.aten, packet), name or "default")
