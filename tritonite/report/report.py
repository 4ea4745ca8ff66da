"""`report`: run a function and count its operators' calls by who served them, with reasons and device times."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.utils import _pytree as pytree

from tritonite import devices, registry, text_table
from tritonite.errors import ATEN_IS_FASTER
from tritonite.install.override import installed, unknown, use_gems
from tritonite.registry import names
from tritonite.registry.schema import computes, decomposed, overload_name
from tritonite.report.audit import Finding, running
from tritonite.report.stats import stats
from tritonite.runtime.compilation import Compilation, listening, summary
from tritonite.runtime.opaque import OpaqueMode
from tritonite.runtime.stats import Counts

# Prefix of the profiler ranges around operators' calls.
_RANGE = "tritonite.report "


@dataclasses.dataclass(frozen=True)
class OperatorReport:
    """Counts of one overload's calls.

    Attributes:
        calls: number of calls; the sum of `tritonite` and `aten`.
        tritonite: calls that Triton kernels served.
        aten: calls that ATen served.
        reasons: number of ATen's calls by reason.
        microseconds: device time of all calls; None without a GPU.
        share: device time as a fraction of all operators' time, 0 to 1; None without a GPU.
    """

    calls: int
    tritonite: int
    aten: int
    reasons: dict[str, int]
    microseconds: float | None = None
    share: float | None = None

    @property
    def faster_in_aten(self) -> int:
        """The number of ATen's calls that a kernel could serve, but more slowly."""
        return self.reasons.get(ATEN_IS_FASTER, 0)


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of `report()`. `str` and rich print it as a table; `as_dict()` is for programs.

    Attributes:
        operators: an OperatorReport by overload name, in descending order of device time, then of calls.
        result: the return value of the reported function.
        compiled: kernels that the call compiled, or loaded from Triton's disk cache.
        findings: what `tritonite.audit` found in the call, if an audit runs.
    """

    operators: dict[str, OperatorReport]
    result: Any = dataclasses.field(repr=False)
    compiled: tuple[Compilation, ...] = ()
    findings: tuple[Finding, ...] = ()

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return `operators` as nested dicts of plain values."""
        return {name: dataclasses.asdict(each) for name, each in self.operators.items()}

    def __rich__(self) -> Any:
        from rich.table import Column, Table
        from rich.text import Text

        timed = any(each.microseconds is not None for each in self.operators.values())
        numbers = ["calls", "Triton", "ATen", *(["device us", "share"] if timed else [])]
        columns = (Column(name, justify="right") for name in numbers)
        table = Table(
            Column("operator", overflow="fold"), *columns, "why ATen", title=self._title(), title_justify="left"
        )
        if self.findings:
            lines = (f"{each.check} of {each.overload}, {each.count} calls: {each.detail}" for each in self.findings)
            table.caption, table.caption_justify = Text("\n".join(("audit:", *lines))), "left"
        for name, each in self.operators.items():
            times = [f"{each.microseconds:.1f}", f"{each.share:.1%}"] if timed else []
            counts = (str(count or "") for count in (each.calls, each.tritonite, each.aten))
            table.add_row(name, *counts, *times, "; ".join(each.reasons))
        return table

    def __str__(self) -> str:
        return text_table.text_of(self)

    def _repr_html_(self) -> str:
        return text_table.html_of(self.__rich__())

    def _title(self) -> str:
        reports = self.operators.values()
        ours, calls = sum(each.tritonite for each in reports), sum(each.calls for each in reports)
        timed = [each for each in reports if each.microseconds is not None]
        spent = f", {sum(each.microseconds or 0 for each in timed):.0f} us on the device" if timed else ""
        faster = sum(each.faster_in_aten for each in reports)
        left = f", {faster} where ATen is faster" if faster else ""
        kernels = f"; {summary(self.compiled)}" if self.compiled else ""
        return f"{calls} calls of {len(reports)} operators, {ours} in Triton kernels{left}{spent}{kernels}"


class _Watching(OpaqueMode):
    """Dispatch mode that counts calls of operators that compute, and opens a profiler range around each if timed."""

    def __init__(self, timed: bool) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        # Calls whose tensors are all on devices without kernels, by operator: the names of those devices.
        self.elsewhere: dict[str, Counter[str]] = {}
        self._timed = timed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = decomposed(func, devices.current.dispatch_key or "CPU", args, kwargs)
        if result is not NotImplemented:
            # A composite operator: its component calls were counted.
            return result
        if not computes(func):
            return func(*args, **kwargs)
        name = overload_name(func)
        self.calls[name] += 1
        if elsewhere := _without_kernels((args, kwargs)):
            self.elsewhere.setdefault(name, Counter())[elsewhere] += 1
        with torch.profiler.record_function(_RANGE + name) if self._timed else contextlib.nullcontext():
            return func(*args, **kwargs)


def report(function: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run a function once and report, for each ATen operator it calls, who served the calls and why.

    Calls in backward passes count too. Views do not, because they compute nothing. The overrides that are enabled stay
    in force; if none is, all of Tritonite is enabled while the function runs. On a GPU torch's profiler measures device
    times. Under a profile that the caller takes already, the report has no times.

    Args:
        function: a callable, such as a model or a training step, or the name of a function of torch ("softmax").
        args: the function's positional arguments; `kwargs` has its keyword arguments.

    Returns:
        A Report, with the counts by operator and the function's result.

    Raises UnknownOperator for a name that torch does not have. Exceptions of the function pass through.
    """
    if isinstance(function, str):
        name = names.spelled(function)
        function = names.python_function(name) or names.function_named(name) or ""
        if isinstance(function, str):
            raise unknown(name)
    timed = devices.current.profiled and not torch.autograd.profiler._is_profiler_enabled
    with contextlib.nullcontext() if installed() else use_gems():
        selected, before, auditing = installed(), stats(), running()
        known = auditing.findings if auditing else []
        profiled = profiler() if timed else contextlib.nullcontext()
        with listening() as compiled, profiled as profile, _Watching(timed) as watching:
            result = function(*args, **kwargs)
            if timed:
                devices.current.runtime.synchronize(devices.current)
        after = stats()
    times: dict[str, float] = {}
    for event in profile.key_averages() if profile is not None else ():
        if event.key.startswith(_RANGE) and event.device_type == torch.autograd.DeviceType.CPU:
            times[event.key.removeprefix(_RANGE)] = float(event.device_time_total)
    total = sum(times.values())
    operators = {}
    for name in {*watching.calls, *after}:
        counts = _since(before.get(name, Counts()), after.get(name, Counts()))
        ours, declined = counts.launched + counts.replayed, sum(counts.declined.values())
        # ATen kernels call further operators, which the mode does not see but `stats` counts.
        calls = max(watching.calls[name], ours + declined)
        if not calls:
            continue
        reasons, unseen = dict(counts.declined), calls - ours - declined
        for kinds, count in watching.elsewhere.get(name, {}).items():
            reasons[f"tensors on {kinds}"] = count
            unseen -= count
        if unseen > 0:
            reasons[_why_not_asked(name, selected)] = unseen
        microseconds = times.get(name, 0.0) if timed else None
        share = None if microseconds is None else microseconds / (total or 1.0)
        operators[name] = OperatorReport(calls, ours, calls - ours, reasons, microseconds, share)
    findings = tuple(auditing.since(known)) if auditing else ()
    slowest = sorted(operators, key=lambda name: (-(operators[name].microseconds or 0), -operators[name].calls, name))
    return Report({name: operators[name] for name in slowest}, result, tuple(compiled), findings)


def profiler() -> Any:
    """Return torch's profiler of the host, and of the GPU if there is one."""
    # Kineto otherwise logs to standard error whenever a profile starts or stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if devices.current.profiled else [])]
    return torch.profiler.profile(activities=activities, acc_events=True)


def _since(before: Counts, after: Counts) -> Counts:
    """Return the difference of two counts."""
    declined = Counter(after.declined)
    declined.subtract(before.declined)
    return Counts(after.replayed - before.replayed, after.launched - before.launched, dict(+declined))


def _without_kernels(values: Any) -> str:
    """Return the kinds of device of a call's tensors if none of them has kernels, else an empty string."""
    kinds = {value.device.type for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)}
    served = {device.type for device in devices.present}
    return "" if kinds & served else " and ".join(sorted(kinds))


def _why_not_asked(name: str, selected: frozenset[str]) -> str:
    """Return why ATen served calls that no host function saw."""
    if name in selected:
        return "reached below the dispatcher's key"
    if name in registry.overloads():
        return "not enabled"
    return registry.excluded.get(name, "no kernel")
