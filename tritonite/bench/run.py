"""A benchmark run: every case is checked against ATen, then timed for every provider."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib
import itertools
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils import _pytree as pytree

import tritonite
from tritonite import devices
from tritonite.bench import timing
from tritonite.bench.cases import Case, bytes_moved
from tritonite.bench.fused import PAIRS
from tritonite.bench.results import Machine, Result, Timing
from tritonite.bench.timing import ATEN, BOTH, COMPILE, COMPILED, GRAPH, PATCHED, TRITONITE, Provider
from tritonite.errors import InvalidProvider, Unsupported
from tritonite.registry.names import overload_named
from tritonite.report.explain import declined_unasked
from tritonite.runtime.stats import Counts, totals
from tritonite.testing.judge import comparable, judge, judge_residuals, may_cancel, terms, to_reference
from tritonite.testing.samples import CHOSEN, NOT_REACHED, RANDOM, RESIDUALS, Sample, compares_zero_sign, reference_of


def provider(text: str) -> Provider:
    """Return the provider of a name, or for "name=module:attribute".

    The names are "compile", "compile+tritonite", "tritonite-graph", "patched" and "compiled". The attribute is a
    function that returns a context manager. Raises InvalidProvider for any other text.
    """
    known = {each.name: each for each in (COMPILE, BOTH, GRAPH, PATCHED, COMPILED)}
    if text in known:
        return known[text]
    name, _, path = text.partition("=")
    module, _, attribute = path.partition(":")
    if not (name and module and attribute):
        raise InvalidProvider(text=text, reason=f"give {', '.join(known)}, or name=module:attribute")
    if name in (ATEN.name, TRITONITE.name):
        raise InvalidProvider(text=text, reason=f"{name} is always measured")
    try:
        scope = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidProvider(text=text, reason=str(error)) from error
    return Provider(name, lambda _: scope())


def _device_name() -> str:
    """Return the name of the GPU, or of the processor where kernels run on the CPU."""
    if tritonite.backend.host_memory:
        return platform.processor() or platform.machine()
    return devices.name_of(devices.current_device())


def machine(command: str, with_matmul: bool = False, seed: int | None = None) -> Machine:
    """Describe this machine and the run; measures its bandwidth and, if asked, its matmul rates."""
    rates = dict(timing.matmul_rates((torch.float16, torch.bfloat16, torch.float32))) if with_matmul else {}
    return Machine(
        device=_device_name(),
        kind=tritonite.backend.kind,
        versions={
            "tritonite": tritonite.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        commit=current_commit(),
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        copy_bandwidth=timing.copy_bandwidth(),
        matmul_rates=rates,
        seed=seed,
    )


def current_commit() -> str:
    """Return the source's commit, with "-dirty" appended if files differ; "" outside a checkout."""
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


@dataclass(frozen=True)
class Check:
    """The outcome of checking a case before it is timed.

    Attributes:
        bytes, elements: sizes, as in Result.
        failure: how a provider's answer differs from ATen's; "" if all agree.
        declined: why no Tritonite kernel served the call; "" if one did.
        taken: False if ATen itself does not run the case in this dtype on this device.
    """

    bytes: int = 0
    elements: int = 0
    failure: str = ""
    declined: str = ""
    taken: bool = True


def run(
    cases: Sequence[Case],
    providers: Sequence[Provider],
    rounds: int = timing.ROUNDS,
    checks: Sequence[Check | None] = (),
) -> Iterator[Result]:
    """Check and time cases, and yield their results; cases that ATen does not run are skipped.

    `checks` has the checks of the first cases, in order. A case without one is checked here.
    """
    for case, known in itertools.zip_longest(cases, checks):
        checked, times, measure = known, dict[str, Timing](), case.measure
        try:
            checked = checked or check(case, providers)
            if checked.taken and not checked.failure:
                times, measure = _times(case, providers, rounds)
        except Exception as error:  # noqa: BLE001 - a provider may raise what it likes, and the other cases go on
            checked = dataclasses.replace(checked or Check(), failure=message(error))
        if checked.taken:
            yield Result(
                op=case.op,
                family=case.family,
                label=case.label,
                dtype=str(case.dtype).removeprefix("torch."),
                measure=measure,
                elements=checked.elements,
                bytes=checked.bytes,
                flops=case.flops,
                times=times,
                failure=checked.failure,
                declined=checked.declined,
                number=case.number,
            )


def message(error: BaseException) -> str:
    """Return one line about an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def check(case: Case, providers: Sequence[Provider]) -> Check:
    """Compare every provider's answer with ATen's. Raises what a provider raises."""
    try:
        sample = case.sample()
        # A call that writes into its arguments needs fresh ones each time.
        fresh = case.sample if case.inplace else lambda: sample
        functions = _functions(case, providers, fresh())
        expected = _results(functions[ATEN], fresh(), _written(case))
    except NotImplementedError:
        return Check(taken=False)
    moved = bytes_moved(case.op, sample, expected)
    leaves = pytree.tree_leaves([sample.args, expected])
    elements = max(value.numel() for value in leaves if isinstance(value, torch.Tensor))
    failure, declined = _disagreement(case, functions, fresh, expected)
    if not declined and case.pair is None:
        declined = declined_unasked(tritonite.overloads()[case.overload], sample.args, sample.kwargs)
    return Check(moved, elements, failure, declined)


def _times(case: Case, providers: Sequence[Provider], rounds: int) -> tuple[dict[str, Timing], str]:
    """Return times by provider, and the measure taken. Raises what a provider raises.

    A drawn call that waits for the device, or draws random numbers, cannot be captured. It is measured without a graph.
    """
    sample = case.sample()
    functions = _functions(case, providers, case.sample() if case.inplace else sample)
    calls = {each: functools.partial(f, *sample.args, **sample.kwargs) for each, f in functions.items()}
    try:
        return timing.measure(calls, case.packet, case.measure, rounds), case.measure
    except (RuntimeError, Unsupported):
        if case.number is None or case.measure != "graph":
            raise
    return timing.measure(calls, case.packet, "device", rounds), "device"


def _functions(case: Case, providers: Sequence[Provider], sample: Sample) -> dict[Provider, Callable[..., Any]]:
    """Return the function of each provider, ATen first, for the case's arguments."""
    function = function_of(case.overload, sample)
    functions = {each: each.wrap(function) for each in (ATEN, *providers)}
    if case.pair is not None and TRITONITE in functions:
        functions[TRITONITE] = case.pair.fused
    return functions


def _disagreement(
    case: Case,
    functions: dict[Provider, Callable[..., Any]],
    fresh: Callable[[], Sample],
    expected: Sequence[torch.Tensor | None],
) -> tuple[str, str]:
    """Return (how an answer differs from ATen's, why no Tritonite kernel served the call); "" where neither applies.

    Answers are judged against ATen in float64.
    """
    declined = ""
    reference, sample, name, scanned = None, fresh(), case.packet or case.op, 1
    packet = name if case.pair is None or name in RANDOM else None
    judged = [result for result in expected if packet not in RESIDUALS and result is not None]
    if case.pair is None and (op := tritonite.overloads()[case.overload]).family == "scan":
        scanned = sample.args[0].shape[sample.args[op.names.index("dim")]]
    if any(result.is_floating_point() or result.is_complex() for result in judged):
        reference = _exact(case, functions[ATEN], sample)
    for each, function in functions.items():
        if each is ATEN:
            continue
        before = totals()
        with each.scope(case.packet):
            actual = _results(function, fresh(), _written(case))
        if each is TRITONITE and case.pair is None:
            declined = _why_declined(before, totals())
        if residual := judge_residuals(packet, (sample.args, sample.kwargs), actual, expected):
            return f"{each.name} gives another answer than ATen: {residual}", declined
        exacts = reference[:1] if reference and packet in CHOSEN else reference
        results = [comparable(packet, found, (sample.args, sample.kwargs)) for found in (actual, expected)]
        for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
            own, aten = ours.value, theirs.value
            if own is None or aten is None:
                if own is not aten:
                    return f"result {i} is a tensor for only one of ATen and {each.name}", declined
                continue
            if theirs.extent != "values" and ours.kind == theirs.kind:
                continue
            exact = exacts[i] if exacts and i < len(exacts) else None
            roundoff = max(scanned, terms(name, sample.args, aten, exact))
            zero_sign = case.pair is None and compares_zero_sign(name)
            cancels = may_cancel(name, gradient="backward" in name)
            # A fused operator rounds intermediate numbers that many results share.
            sided = case.pair is None
            verdict = judge(own, aten, exact, zero_sign, tritonite.device, roundoff, cancels, sided)
            if verdict.failure:
                return f"{each.name} gives another answer than ATen: {verdict.failure}", declined
    return "", declined


def _exact(case: Case, aten: Callable[..., Any], sample: Sample) -> list[torch.Tensor | None] | None:
    """Return the results of the operator's reference, or of ATen in float64; None if ATen refuses float64."""
    reference = reference_of(case.overload, case.packet or case.op)
    try:
        return _results(reference or aten, sample.map(to_reference), _written(case))
    except RuntimeError:
        if reference is not None:
            raise
        return None


def _why_declined(before: Counts, after: Counts) -> str:
    """Return why ATen served a call made between two counts; "" if only Tritonite kernels did."""
    reasons = Counter(after.declined) - Counter(before.declined)
    if not reasons and (after.replayed, after.launched) == (before.replayed, before.launched):
        return NOT_REACHED
    return "; ".join(reasons)


def _written(case: Case) -> tuple[int, ...]:
    """Return the indices of the arguments that the call writes."""
    return () if case.pair is not None else tritonite.overloads()[case.overload].written


def _results(function: Callable[..., Any], sample: Sample, written: Sequence[int] = ()) -> list[torch.Tensor | None]:
    """Return a call's results, flattened, with None for those that are no tensors.

    The results of a call that returns nothing are its `written` arguments.
    """
    value = function(*sample.args, **sample.kwargs)
    if value is None:
        value = [sample.args[i] for i in written]
    return [each if isinstance(each, torch.Tensor) else None for each in pytree.tree_leaves(value)]


def python_functions(overload: str) -> Iterator[Callable[..., Any]]:
    """Yield the Python functions that may call an overload: of torch, torch.Tensor and torch's modules."""
    packet = overload.partition(".")[0]
    homes = ((torch, packet), (torch.Tensor, packet), (torch._C._nn, packet))
    for home, name in (*homes, (torch.special, packet.removeprefix("special_"))):
        found = getattr(home, name, None)
        if callable(found):
            yield found


def function_of(overload: str, sample: Sample) -> Callable[..., Any]:
    """Return the first Python function that accepts the sample, or else the operator in torch.ops.

    For a fused operator, return ATen's composition.
    """
    if overload in PAIRS:
        return PAIRS[overload].composition
    for found in python_functions(overload):
        try:
            found(*sample.args, **sample.kwargs)
        except (RuntimeError, TypeError, ValueError):
            continue
        return found
    return overload_named(overload)
