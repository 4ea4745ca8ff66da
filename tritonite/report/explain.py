"""Why a call goes where it goes."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite import devices, registry
from tritonite.errors import Decline, UnknownOperator, Unsupported
from tritonite.install import library
from tritonite.install.override import installed, native_dispatcher, select, unknown
from tritonite.install.python import recordable
from tritonite.registry import Op, names
from tritonite.registry.schema import schemas
from tritonite.runtime import contract
from tritonite.runtime.hollow import DataUnknown, hollow, without_elements
from tritonite.runtime.launch import LaunchDescription
from tritonite.runtime.plan import CopyStep, LaunchStep, ReadStep, ZeroStep
from tritonite.runtime.recorder import Recorder, record


def explain(function: str | Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What happens to a call with these arguments: the path, promotion, launches, results, or why ATen serves it.

    Nothing is computed, allocated, written or drawn, though kernels may be compiled: the host function runs, and what
    it would launch is noted instead.

    Args:
        function: an overload ("add.Tensor"), an operator outside ATen with its namespace ("tritonite::silu_and_mul"),
            the name of a function of torch's ("softmax", "torch.softmax", "aten::softmax"), a glob over overloads
            ("bitwise_*"), or a function (torch.softmax, one of your own). Of a function each call of ATen's operators
            is explained, with the arguments that the function gives it.
        args: the overload's or the function's.

    Raises UnknownOperator for a name that torch has not, Unsupported for a call outside ATen that would, and ATen's own
    error for arguments that ATen refuses.
    """
    if not isinstance(function, str):
        return _traced(getattr(function, "__name__", str(function)), function, args, kwargs)
    name = names.spelled(function)
    if "::" in name:
        return _overload(overload_named(name), args, kwargs)
    return _matching(name, args, kwargs) if names.is_glob(name) else _named(name, args, kwargs)


def _matching(pattern: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What happens to a call of each overload that a glob names and ATen gives these arguments to.

    Raises ATen's error where it refuses them to all.
    """
    texts, refusals = list[str](), list[Exception]()
    for name in sorted(select(pattern)):
        try:
            texts.append(_overload(registry.overloads()[name], args, kwargs))
        except (RuntimeError, ValueError, IndexError, TypeError) as refusal:
            refusals.append(refusal)
    if not texts:
        raise refusals[0]
    if refusals:
        texts.append(f"{len(refusals)} more overloads of {pattern} do not take these arguments")
    return "\n\n".join(texts)


def _named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What happens to a call of an overload or of a function of torch's."""
    known = registry.overloads()
    if "." not in name and schemas(name):
        chosen = _chosen(name, args, kwargs)
        function = names.python_function(name)
        if not chosen and function is not None:
            # torch.randn takes sizes one by one, which the operator does not.
            with contextlib.suppress(TypeError):
                return _traced(name, function, args, kwargs)
        if chosen in known:
            return _overload(known[chosen], args, kwargs)
    if name in known:
        return _overload(known[name], args, kwargs)
    function = names.function_named(name)
    if function is None:
        raise unknown(name)
    return _traced(name, function, args, kwargs)


def _chosen(packet: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the overload that ATen chooses for these arguments; "" where none takes them."""
    try:
        overload = torch._C._jit_resolve_packet(f"aten::{packet}", *args, **kwargs)
    except RuntimeError:
        return ""
    return packet if overload in ("", "default") else f"{packet}.{overload}"


def _traced(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What happens to each call of ATen's operators in a function."""
    devices_seen = [torch.cuda.current_device()] if devices.current.type == "cuda" else []
    # What sets or moves a generator by itself is called.
    with torch.random.fork_rng(devices_seen):
        calls, _ = names.traced(function, args, kwargs)
    given = {id(value) for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
    title = f"{name}{_describe(args, kwargs)}\nruns as    {', '.join(call.overload for call in calls) or 'views alone'}"
    if len(calls) == 1 and name == calls[0].overload:
        # It is an operator, and has said so.
        return _call(calls[0], given)
    return "\n\n".join([title, *(_call(each, given) for each in calls)])


def _call(each: names.AtenCall, given: set[int]) -> str:
    """What happens to a call of ATen's that was traced; tensors that it would compute have no memory."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in given or tensor.layout is not torch.strided:
            return tensor
        if not tensor.dim() and tensor.device.type == "cpu":
            # It may be read as a number of the call.
            return torch.ones((), dtype=tensor.dtype)
        return hollow(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    args, kwargs = pytree.tree_map_only(torch.Tensor, real, (each.args, each.kwargs))
    op = {**registry.overloads(), **library.registered()}.get(each.overload)
    if op is not None:
        return _overload(op, args, kwargs)
    reason = registry.excluded.get(each.overload)
    return f"{each.overload}{_describe(args, kwargs)}\npath       ATen: no kernel{f' ({reason})' if reason else ''}"


def _overload(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What happens to a call of an overload."""
    refusal = _refusal(op, args, kwargs)
    foreign = str(refusal).startswith((op.qualified.partition("::")[0] + "::", "Unknown keyword"))
    if refusal is not None and foreign:
        # They are not the schema's arguments.
        raise refusal
    values = _in_schema_order(op, args, kwargs)
    dispatcher = native_dispatcher()
    kept = dispatcher.kept(op.overload, values) if dispatcher is not None else ""
    state = "overridden now" if op.overload in installed() else "not overridden now: ATen serves it"
    if op.declaration.library is not None:
        state = "outside ATen: always registered"
    elif not op.has_place:
        state = "ATen has it on CUDA alone; here it can be called directly"
    elif not op.verified and op.overload not in installed():
        state = "not overridden now: not verified on this kind of device, it is only where include= names it"
    lines = [f"{op.overload}{_describe(args, kwargs)}", f"state      {state}"]
    if contract.settings().invariant:
        lines.append("settings   invariant")
    try:
        results, recorder = _dry(op, values)
    except Decline as decline:
        if op.declaration.library is not None:
            raise Unsupported(name=op.overload, reason=decline.reason) from None
        if refusal is not None:
            raise refusal from None
        lines.append(f"path       ATen: {decline.reason}{', remembered natively' if kept == 'decline' else ''}")
        return "\n".join(lines)
    path = {"plan": "native: replayed from a plan", "nothing": "native: the next call is recorded"}.get(kept, "Python")
    if recorder.reason:
        path = f"Python: no plan can repeat it, {recorder.reason}"
    lines.append(f"path       {path}")
    return "\n".join([*lines, *_steps(recorder), *_results(results)])


def _dry(op: Op, values: Sequence[Any]) -> tuple[Sequence[Any] | None, Recorder]:
    """What a call would return, None where its own data decides, and the recorder of what it would do."""
    recorder: Recorder | None = None
    run, leaves, numbers = recordable(op, values)

    def noting() -> Sequence[Any]:
        nonlocal recorder
        recorder = contract.recorder()
        return run()

    results: Sequence[Any] | None = None
    # As in a call, autograd is done: it would note what is written.
    with contextlib.suppress(DataUnknown), torch._C._AutoDispatchBelowADInplaceOrView():
        results, _ = record(noting, leaves, numbers, watch=op.declaration.watched, dry=True)
    assert recorder is not None
    return results, recorder


def declined_unasked(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call goes to ATen where an operator is enabled and nothing else is asked for; "" where it does not."""
    try:
        with contract.under(contract.settings_of()):
            _dry(op, _in_schema_order(op, args, kwargs))
    except Decline as decline:
        return decline.reason
    return ""


def overload_named(name: str) -> Op:
    """The overload of this name, "tritonite::" before it where it is outside ATen. Raises UnknownOperator."""
    found = registry.overloads()
    if "::" in name:
        importlib.import_module("tritonite.fused")
        found = library.registered()
    if name in found:
        return found[name]
    reason = registry.excluded.get(name)
    raise UnknownOperator(name=name, hint=f" ({reason})" if reason else "")


def _refusal(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What ATen raises for these arguments, as far as it tells of tensors without elements."""
    space, _, name = op.qualified.partition("::")
    packet, _, overload = name.partition(".")
    function = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return None
    metas, named = pytree.tree_map_only(torch.Tensor, without_elements, (args, kwargs))
    # Such tensors have no generator, and what is made on another device would take memory.
    metas, named = pytree.tree_map_only(torch.Generator, lambda _: None, (metas, named))
    if any(argument.name == "device" for argument in op.schema.arguments[len(args) :]):
        named |= {"device": "meta", "pin_memory": None}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(*metas, **named)
    except (NotImplementedError, TypeError, AssertionError, Unsupported):
        # Some formulas for such tensors lack what ATen has, or are stricter.
        return None
    except (RuntimeError, ValueError, IndexError) as error:
        return error
    return None


def _in_schema_order(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All of the schema's arguments, with defaults for those that are not given."""
    values = list(args)
    for argument in op.schema.arguments[len(args) :]:
        values.append(kwargs.get(argument.name, argument.default_value if argument.has_default_value() else None))
    return values


def _steps(recorder: Recorder) -> Iterator[str]:
    """A line for what a call does in turn."""
    for summary in recorder.promotions:
        results = ", ".join(map(_short, summary["results"]))
        common, compute = _short(summary["common"]), _short(summary["compute"])
        yield f"promotion  common {common}, computed in {compute}, result {results}"
    launches = iter(recorder.descriptions)
    for step in recorder.steps:
        if isinstance(step, LaunchStep):
            yield from _launch(next(launches))
        elif isinstance(step, ZeroStep):
            yield "zero       memory of its own"
        elif isinstance(step, CopyStep):
            yield f"copy       {_short(step.source.dtype)}{list(step.source.sizes)}"
        elif isinstance(step, ReadStep):
            yield f"read       {step.numbers} sizes that data decides; what follows depends on them"


def _launch(launch: LaunchDescription) -> Iterator[str]:
    runs = "Triton interpreter" if devices.current.interpreted else "Triton kernel"
    yield f"kernel     {launch.kernel}{' of ' + launch.formula if launch.formula else ''} ({runs})"
    constants = {name: value for name, value in launch.constants.items() if name != "num_warps"}
    listed = ", ".join(f"{name} {value}" for name, value in constants.items())
    yield f"config     {listed}{', ' if listed else ''}{launch.constants['num_warps']} warps"
    yield f"launch     {' x '.join(map(str, launch.grid))} programs"


def _results(results: Sequence[Any] | None) -> Iterator[str]:
    for result in results or ():
        for item in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(item, torch.Tensor):
                yield f"result     {_short(item.dtype)}{list(item.shape)}, strides {tuple(item.stride())}"


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{_short(value.dtype)}{list(value.shape)}"
        if isinstance(value, (list, tuple)):
            inside = ", ".join(map(show, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
        return repr(value)

    parts = [show(value) for value in args] + [f"{name}={show(value)}" for name, value in kwargs.items()]
    return f"({', '.join(parts)})"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
