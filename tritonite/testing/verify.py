"""Verification of operators: every way to call them, on samples, compared with ATen and with float64."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite import devices
from tritonite.engine.iteration import never_overlaps_itself
from tritonite.errors import NO_FP64
from tritonite.install.override import select, use_gems
from tritonite.registry import Op, overloads
from tritonite.registry.names import overload_named
from tritonite.runtime.stats import Counts, counts, totals
from tritonite.testing import opinfo
from tritonite.testing.judge import (
    comparable,
    judge,
    judge_residuals,
    may_cancel,
    poisoned,
    terms,
    to_reference,
    without_tf32,
)
from tritonite.testing.samples import (
    CHOSEN,
    DEVICE_DEFINED,
    MAY_DECLINE,
    NOT_REACHED,
    RESIDUALS,
    Sample,
    compares_zero_sign,
    reference_of,
    samples,
)

_left_to_aten = functools.partial(use_gems, include=())
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool)
# Dtypes of outputs that do not depend on the inputs.
_OUT_DTYPES = {"exponent": torch.int32} | dict.fromkeys(("max_values", "min_indices", "indices"), torch.int64)
_OUT_DTYPES |= dict.fromkeys(("out3", "reserve"), torch.uint8)
# Outputs that keep the dtype of the functional form: in other dtypes ATen writes some layouts of statistics wrongly.
_KEPT = ("save_mean", "save_invstd")
# Families whose outputs all keep it: ATen copies a transform to an output of any dtype, also without imaginary parts.
_KEPT_FAMILIES = ("fft",)


@dataclass
class Report:
    """The results of an operator's samples in one dtype.

    `error` and `aten_error` are the largest relative errors, in eps of the dtype. `served` counts samples that a kernel
    computed. `declined` has (label, reason) of the others; those that a kernel must serve are `failures`, too.
    """

    op: str
    dtype: torch.dtype
    samples: int = 0
    failures: list[str] = field(default_factory=list)
    error: float = 0.0
    aten_error: float = 0.0
    served: int = 0
    declined: list[tuple[str, str]] = field(default_factory=list)


def verify(
    names: str | Iterable[str] | None = None, dtypes: Iterable[torch.dtype] | None = None, full: bool = False
) -> Iterator[Report]:
    """Check the named operators (default: all) on this machine, and yield a report for each operator and dtype.

    Overloads are called on samples made from their schemas. Functions with OpInfo samples run forward, in place, with
    out= and backward. `full` takes all of OpInfo's samples instead of the first few.
    """
    chosen = select(names)
    packets = {name.partition(".")[0] for name in chosen}
    kinds = tuple(dtypes) if dtypes is not None else DTYPES
    for name, op in overloads().items():
        if name in chosen:
            for dtype in kinds:
                report = check_overload(op, dtype)
                if report.samples:
                    yield report
    for name, info in opinfo.infos().items():
        if names is None or opinfo.packet(info) in packets:
            for dtype in kinds:
                if opinfo.supported(info, dtype):
                    yield check_opinfo(name, info, dtype, limit=None if full else 8)


@without_tf32()
def check_overload(op: Op, dtype: torch.dtype, *, labels: Iterable[str] | None = None) -> Report:
    """Run an overload on the samples made from its schema.

    A kernel must serve a sample that ATen accepts in a dtype of the declaration, unless its family excuses the decline.
    `labels` are globs that restrict the samples.
    """
    report = Report(op.overload, dtype)
    function = overload_named(op.overload)
    wanted = None if labels is None else tuple(labels)
    runs = []
    for sample in samples(op, dtype, devices.current.type):
        if wanted is not None and not any(fnmatch.fnmatchcase(sample.label, glob) for glob in wanted):
            continue
        answer = by_aten(op, sample)
        if answer is None:
            continue
        template, expected = answer
        reference = None
        if op.packet not in DEVICE_DEFINED or dtype is not torch.float64:
            reference = _reference(
                dtype,
                expected,
                lambda widen: _exact(
                    function, op, _without_conversion(op, sample.map(widen)), pytree.tree_map(widen, template)
                ),
            )
        runs.append((sample, template, expected, reference))
    results = []
    with use_gems(include="*", faster_only=False), poisoned():
        for sample, template, *_ in runs:
            before = counts(op.overload)
            result = _quietly(lambda: _call(function, op, sample, template))
            results.append((result, became(before, counts(op.overload))))
    for (sample, _, expected, reference), (actual, (ran, reasons)) in zip(runs, results, strict=True):
        if ran and not reasons:
            report.served += 1
        for reason in reasons if ran or reasons else [NOT_REACHED]:
            report.declined.append((sample.label, reason))
            if _accepts(op, dtype, sample) and not excused(op.overload, sample.label, dtype, reason):
                report.failures.append(f"{sample.label}: declined: {op.overload}: {reason}")
        _record(report, op.packet, sample.label, (sample.args, sample.kwargs), actual, expected, reference)
    return report


def by_aten(op: Op, sample: Sample) -> tuple[Any, Any] | None:
    """Return ATen's outputs as templates and its result, or None if ATen refuses the call."""
    function = overload_named(op.overload)
    template = _quietly(lambda: _functional(function, op, sample)) if op.out_names else ()
    if isinstance(template, Exception):
        return None
    expected = _quietly(lambda: _call(function, op, sample, template))
    return None if isinstance(expected, Exception) else (template, expected)


def became(before: Counts, after: Counts) -> tuple[int, list[str]]:
    """Return how often kernels ran, and the reasons of declines, between two readings of counts.

    Declined copies between a CPU and a GPU, which only ATen makes, are left out. So are declines of what ATen calls
    after a decline of float64: its fallback may call operators that Tritonite serves on the CPU.
    """
    ran = after.launched + after.replayed - before.launched - before.replayed
    reasons = (Counter(after.declined) - Counter(before.declined)).elements()
    found = [reason for reason in reasons if not reason.endswith("on another device")]
    return ran, [reason for reason in found if NO_FP64 in reason] or found


def _accepts(op: Op, dtype: torch.dtype, sample: Sample) -> bool:
    """Return whether the declaration accepts a sample's dtype: the drawn one, or the first tensor's."""
    tensors = [x for x in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    return any(kind in op.declaration.accepts for kind in (dtype, *(x.dtype for x in tensors[:1])))


def excused(name: str, label: str, dtype: torch.dtype, reason: str) -> bool:
    """Return whether a family or a device without float64 excuses a decline."""
    return NO_FP64 in reason or any(exception.covers(name, label, dtype, reason) for exception in MAY_DECLINE)


def _without_conversion(op: Op, sample: Sample) -> Sample:
    """Return the sample without `half_to_float`, which ATen accepts for 16-bit inputs alone."""
    if "half_to_float" not in op.names:
        return sample
    i = op.names.index("half_to_float")
    return Sample(sample.label, (*sample.args[:i], False, *sample.args[i + 1 :]), sample.kwargs)


def _call(function: Any, op: Op, sample: Any, template: Any) -> Any:
    """Call an overload on a copy of the sample, with outputs like `template` if it has outputs."""
    copied = sample.map(_clone)
    templates = template if isinstance(template, tuple) else (template,)
    outs = {
        name: pytree.tree_map(torch.empty_like, value) for name, value in zip(op.out_names, templates, strict=False)
    }
    result = function(*copied.args, **copied.kwargs, **outs)
    # An overload that returns nothing writes some of its arguments.
    return result if op.schema.returns else (copied.args, outs)


def _exact(function: Any, op: Op, sample: Any, template: Any) -> Any:
    """Return the result of the family's reference, which has no outputs, or else of ATen."""
    reference = reference_of(op.overload, op.packet)
    copied = sample.map(_clone)
    if reference is None and isinstance(template, list) and (form := _functional_form(op)) is not None:
        # ATen converts no result to the dtype of an output in a list, which is float64 here.
        return copied.args, dict(zip(op.out_names, [form(*copied.args, **copied.kwargs)], strict=True))
    if reference is None:
        return _call(function, op, sample, template)
    return reference(*copied.args, **copied.kwargs)


def _functional(function: Any, op: Op, sample: Any) -> Any:
    """Return ATen's result for an out= overload, from empty outputs that ATen resizes.

    If ATen refuses to resize them, or does not, return the result of the functional form.
    """
    given = pytree.tree_leaves((sample.args, sample.kwargs))
    dtype = next((value.dtype for value in given if isinstance(value, torch.Tensor)), None)
    others = (torch.float32, torch.bool, torch.int32, torch.int64, torch.float64, torch.complex64)
    form, given = _functional_form(op), sample.map(_clone)
    returned = None if form is None else _quietly(lambda: form(*given.args, **given.kwargs))
    expected = None if isinstance(returned, Exception) else returned
    fixed = dict(_OUT_DTYPES)
    if expected is not None:
        results = zip(op.out_names, pytree.tree_leaves(expected), strict=False)
        fixed |= {name: result.dtype for name, result in results if name in _KEPT or op.family in _KEPT_FAMILIES}
    for candidate in (dtype, *others):
        outs = {name: torch.empty(0, dtype=candidate, device=devices.current.type) for name in op.out_names}
        outs |= {name: outs[name].to(fixed[name]) for name in op.out_names if name in fixed}
        copied = sample.map(_clone)
        result = _quietly(lambda: function(*copied.args, **copied.kwargs, **outs))
        if not isinstance(result, Exception):
            return result if expected is None or _shapes(result) == _shapes(expected) else expected
    return result if expected is None else expected


def _functional_form(op: Op) -> Any:
    """Return ATen's functional overload for an out= overload, if the catalog has it."""
    name = _functional_name(op.overload)
    return None if name is None else overload_named(name)


@functools.cache
def _functional_name(overload: str) -> str | None:
    op = overloads()[overload]
    kinds = _kinds(op)
    for other in overloads().values():
        if other.packet == op.packet and _kinds(other) == kinds and not (other.out_names or other.inplace):
            return other.overload
    return None


def _kinds(op: Op) -> dict[str, str]:
    """Return the types of an overload's arguments by name, without outputs."""
    types = {argument.name: str(argument.type) for argument in op.schema.arguments}
    return {name: types[name] for name in op.names}


def _shapes(results: Any) -> list[torch.Size]:
    return [result.shape for result in pytree.tree_leaves(results)]


@without_tf32()
def check_opinfo(
    name: str, info: Any, dtype: torch.dtype, *, limit: int | None, most_elements: int | None = None
) -> Report:
    """Run a function on OpInfo's samples: functional, in place, with out=, and its gradient.

    `limit` is the number of samples, without those whose input has more than `most_elements`.

    In each of these ways kernels alone must serve at least one sample, unless a declaration does not accept the dtype
    or a family excuses the decline.
    """
    report = Report(name, dtype)
    unsure = opinfo.packet(info) in (
        opinfo.UNSURE_GRADIENTS if dtype is torch.float64 else opinfo.ROUNDED_GRADIENTS if dtype.itemsize == 2 else ()
    )
    differentiable = info.supports_autograd and dtype.is_floating_point and not unsure
    runs: list[tuple[str, Any, Callable[[], Any], Any, Any]] = []

    def chosen(requires_grad: bool, full: bool) -> Iterator[Any]:
        found = opinfo.sample_inputs(info, dtype, requires_grad=requires_grad, full=full)
        return itertools.islice((sample for sample in found if _is_within(sample, most_elements)), limit)

    for sample in chosen(requires_grad=False, full=limit is None):
        for label, way in _ways(info, sample.input):
            run = _bind(way, sample)
            expected = _quietly(run)
            if isinstance(expected, Exception) or _is_elsewhere(sample.input, sample.args, sample.kwargs, expected):
                continue
            reference = _reference(dtype, expected, lambda widen: way(sample.transform(widen)))
            if dtype is torch.float64 and isinstance(reference, torch.Tensor):
                reference = opinfo.refine(info, sample, reference)
            runs.append((label, ((sample.input, *sample.args), sample.kwargs), run, expected, reference))
    if differentiable:
        for sample in chosen(requires_grad=True, full=False):
            run, wide_run = _bind_gradient(info, sample, None), _bind_gradient(info, sample, _widen(dtype, None))
            expected = _quietly(run)
            if isinstance(expected, Exception):
                continue
            reference = _quietly(wide_run)
            exact = None if isinstance(reference, Exception) else reference
            runs.append(("gradient", ((sample.input, *sample.args), sample.kwargs), run, expected, exact))
    results, after = [], totals()
    with use_gems(include="*", faster_only=False), poisoned():
        for _, _, run, _, _ in runs:
            before, result, after = after, _quietly(run), totals()
            results.append((result, became(before, after)))
    served, declined = set[str](), list[tuple[str, str]]()
    for (label, operands, _, expected, reference), (actual, (ran, reasons)) in zip(runs, results, strict=True):
        if ran and not reasons:
            report.served += 1
            served.add(label)
        else:
            declined += [(label, reason) for reason in reasons or [NOT_REACHED]]
        _record(report, opinfo.packet(info), label, operands, actual, expected, reference)
    report.declined = declined
    for label, reason in dict.fromkeys(declined):
        # A reason begins with the overload that declined.
        op = overloads().get(reason.partition(":")[0])
        accepted = op is None or dtype in op.declaration.accepts
        if accepted and label not in served and not excused(name, label, dtype, reason):
            report.failures.append(f"{label}: declined: {reason}")
    return report


def _is_within(sample: Any, most_elements: int | None) -> bool:
    """Return whether no tensor of a sample's input has more than `most_elements`."""
    tensors = [x for x in pytree.tree_leaves(sample.input) if isinstance(x, torch.Tensor)]
    return most_elements is None or all(x.numel() <= most_elements for x in tensors)


def _is_elsewhere(*values: Any) -> bool:
    """Return whether no tensor is on the device in use, as with a factory function that no device was given."""
    found = {x.device.type for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)}
    return bool(found) and devices.current.type not in found


def _widen(dtype: torch.dtype, expected: Any) -> Callable[[Any], Any]:
    """Return a function that converts arguments to float64. float64 arguments move to the CPU, to other kernels."""
    floating = any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in pytree.tree_leaves(expected))
    device = "cpu" if dtype is torch.float64 else None
    return functools.partial(to_reference, integers=floating, device=device)


def _reference(dtype: torch.dtype, expected: Any, run: Callable[[Callable[[Any], Any]], Any]) -> Any:
    """Return the float64 result of `run`, or None if it fails. Integers are converted unless `run` needs them."""
    for like in (expected, None):
        reference = _quietly(lambda: run(_widen(dtype, like)))
        if not isinstance(reference, Exception):
            return reference
    return None


def _ways(info: Any, first: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield labelled ways to call a function with a sample.

    A first operand that overlaps itself is not written in place, where its result would be undefined.
    """
    yield "functional", lambda sample: _on_copies(info.op, sample)
    lists = isinstance(first, list)
    written = first if lists else [first]
    writable = all([isinstance(x, torch.Tensor) and never_overlaps_itself(x.shape, x.stride()) for x in written])
    if info.inplace_variant is not None and writable:
        yield "in-place", lambda sample: _in_place(info.inplace_variant, sample)
    # Functions over lists of tensors have no out= argument.
    if info.supports_out and not lists and info.name not in opinfo.UNWRITTEN_OUTPUTS:
        yield "out=", lambda sample: _with_out(info.op, sample)


def _with_out(function: Callable[..., Any], sample: Any) -> Any:
    shapes = pytree.tree_map(lambda t: torch.empty_like(t), _on_copies(function, sample))
    return _on_copies(function, sample, out=shapes)


def _on_copies(function: Callable[..., Any], sample: Any, **keywords: Any) -> Any:
    own = sample.transform(_clone)
    return function(own.input, *own.args, **own.kwargs, **keywords)


def _in_place(function: Callable[..., Any], sample: Any) -> Any:
    """Return the result, or the first argument of a function that returns nothing."""
    own = sample.transform(_clone)
    result = function(own.input, *own.args, **own.kwargs)
    return own.input if result is None else result


def _bind(way: Callable[[Any], Any], sample: Any) -> Callable[[], Any]:
    return lambda: way(sample)


def _bind_gradient(info: Any, sample: Any, widen: Callable[[Any], Any] | None) -> Callable[[], Any]:
    def run() -> Any:
        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return widen(value) if widen else value
            needed = value.requires_grad
            copy = widen(value) if widen else value.detach()
            value = copy.clone()
            return value.requires_grad_(needed and value.is_floating_point())

        arguments = pytree.tree_map(leaf, (sample.input, sample.args, sample.kwargs))
        # OpInfo takes what it may of results that are not unique, such as the size of an eigenvector's elements.
        result = sample.output_process_fn_grad(info.op(arguments[0], *arguments[1], **arguments[2]))
        leaves = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor) and t.requires_grad]
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        return torch.autograd.grad(outputs, leaves, [_seed(t) for t in outputs], allow_unused=True)

    return run


def _seed(output: torch.Tensor) -> torch.Tensor:
    """Return a gradient for an output, with values that every floating-point dtype represents."""
    values = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64).bfloat16()
    return values.to(output.device, output.dtype).reshape(output.shape)


def _record(
    report: Report, packet: str | None, label: str, operands: Any, actual: Any, expected: Any, reference: Any
) -> None:
    report.samples += 1
    if isinstance(actual, Exception):
        report.failures.append(f"{label}: {type(actual).__name__}: {actual}")
        return
    arguments = None if label == "gradient" else operands
    if label == "gradient" and packet in RESIDUALS:
        # Residuals judge results. Elements of gradients are compared.
        packet, cancels = None, True
    else:
        cancels = may_cancel(packet, label == "gradient")
    ours, aten = (comparable(packet, pytree.tree_leaves(results), arguments) for results in (actual, expected))
    exact = pytree.tree_leaves(reference) if reference is not None else [None] * len(aten)
    if packet in CHOSEN and arguments is not None:
        exact = [exact[0], *[None] * (len(aten) - 1)]
    for i, (own, theirs, c) in enumerate(zip(ours, aten, exact, strict=True)):
        a, b = own.value, theirs.value
        if not isinstance(b, torch.Tensor):
            if isinstance(b, bool) and a is not b:
                report.failures.append(f"{label}: {a} where ATen gives {b}")
            continue
        if theirs.extent != "values":
            if own.kind != theirs.kind:
                report.failures.append(f"{label}: result {i} of {own.kind} where ATen gives {theirs.kind}")
            continue
        # Some outputs, such as log_sigmoid's buffer, are empty on one kind of device alone.
        exact_one = c.detach() if c is not None and c.shape == b.shape else None
        if exact_one is None and b.dtype is torch.float64:
            # Without a result from the CPU ATen's own is the reference.
            exact_one = b.detach()
        roundoff = terms(packet, operands, b, exact_one)
        verdict = judge(
            *(a.detach(), b.detach(), exact_one, compares_zero_sign(packet)),
            terms=roundoff,
            cancels=cancels,
        )
        report.error, report.aten_error = max(report.error, verdict.error), max(report.aten_error, verdict.aten_error)
        if verdict.failure:
            report.failures.append(f"{label}: {verdict.failure}")
    if packet in RESIDUALS and not report.failures:
        failure = judge_residuals(packet, operands, [x.value for x in ours], [x.value for x in aten])
        if failure is not None:
            report.failures.append(f"{label}: {failure}")


def _clone(value: Any) -> Any:
    """Copy a tensor with its strides and gaps, so that in-place calls do not change the sample."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided or 0 in value.shape:
        with _left_to_aten():
            return value.detach().clone()
    if any(stride == 0 for stride in value.stride()):
        return value.detach()
    # By ATen's own copy: ours is one of the operators under test.
    with _left_to_aten():
        whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.detach().untyped_storage())
        # A storage itself cannot be cloned without an allocator in C++, which a device in Python lacks.
        storage = whole.clone().untyped_storage()
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(storage, value.storage_offset(), value.size(), value.stride())


def _quietly(run: Callable[[], Any]) -> Any:
    """Return the result or the exception, without ATen's warnings about resized outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except Exception as error:  # noqa: BLE001 - the caller compares or reports it
            return error
