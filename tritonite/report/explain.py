"""`explain`: describe what a call would run, without running it."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite import devices, registry
from tritonite.errors import Decline, UnknownOperator, Unsupported
from tritonite.install import library
from tritonite.install.override import installed, native_dispatcher, select, unknown
from tritonite.install.python import record_dry
from tritonite.registry import Op, names
from tritonite.registry.overrides import vendors
from tritonite.registry.schema import in_schema_order, schemas
from tritonite.runtime import contract
from tritonite.runtime.hollow import hollow, without_elements
from tritonite.runtime.launch import LaunchDescription
from tritonite.runtime.plan import CopyStep, LaunchStep, ReadStep, ZeroStep
from tritonite.runtime.recorder import Recorder
from tritonite.text_table import html_text


class Explanation(str):
    """Text of `explain`, which notebooks show with its lines."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return html_text(self)


def explain(function: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Describe a call: the path it takes, its promotion, launches and results, or why ATen serves it.

    The host function runs, and its launches are recorded instead of made. Nothing is computed, allocated, written or
    drawn from a generator, and no kernel is compiled.

    Args:
        function: one of
            - an overload ("add.Tensor");
            - an operator outside ATen, with its namespace ("tritonite::silu_and_mul");
            - the name of a function of torch ("softmax", "torch.softmax", "aten::softmax");
            - a glob over overloads ("bitwise_*");
            - a function (torch.softmax, or your own).
            For a function, every call of an ATen operator in it is explained, with the arguments of that call;
            - without arguments, a function by torch.compile(backend="tritonite") or `record`, for the plans that it
              has so far.
        args: the positional arguments of the overload or function; `kwargs` has its keyword arguments.

    Returns:
        Text of several lines, one paragraph for each operator call.

    Raises:
        UnknownOperator: torch has no function or operator of this name.
        Unsupported: the operator is outside ATen and does not serve these arguments.
        Exception: ATen's own error, if ATen refuses the arguments.
    """
    return Explanation(_explained(function, args, kwargs))


def _explained(function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the text of `explain`."""
    if not isinstance(function, str):
        if not args and not kwargs and (text := _compiled(function)):
            return text
        return _traced(getattr(function, "__name__", str(function)), function, args, kwargs)
    name = names.spelled(function)
    if "::" in name:
        return _overload(overload_named(name), args, kwargs)
    return _matching(name, args, kwargs) if names.is_glob(name) else _named(name, args, kwargs)


def _compiled(function: Any) -> str:
    """Describe the plans of a function by torch.compile or `tritonite.record`; "" for any other function."""
    # Without the module, which imports Dynamo, no function has a plan.
    if "tritonite.graph" not in sys.modules:
        return ""
    module = importlib.import_module("tritonite.graph.explain")
    graphs = module.graphs_of(function)
    return "" if graphs is None else module.described(graphs)


def _matching(pattern: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Explain each overload that matches a glob and takes these arguments. Raises ATen's error if none does."""
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
    """Explain an overload, or a function of torch, by name."""
    known = registry.overloads()
    if "." not in name and schemas(name):
        chosen = _chosen(name, args, kwargs)
        function = names.python_function(name)
        if not chosen and function is not None:
            # Some functions, such as torch.randn, take sizes one by one, which their operators do not.
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
    """Return the overload that ATen chooses for these arguments; "" if none takes them."""
    try:
        overload = torch._C._jit_resolve_packet(f"aten::{packet}", *args, **kwargs)
    except RuntimeError:
        return ""
    return packet if overload in ("", "default") else f"{packet}.{overload}"


def _traced(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Explain each call of an ATen operator in a function."""
    index = devices.current_device().index
    # A function that seeds or advances a generator itself does so while it is traced.
    with torch.random.fork_rng([] if index is None else [index], device_type=devices.current.accelerator):
        calls, _ = names.traced(function, args, kwargs)
    given = {id(value) for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
    title = f"{name}{_describe(args, kwargs)}\nruns as    {', '.join(call.overload for call in calls) or 'views alone'}"
    if len(calls) == 1 and name == calls[0].overload:
        # The function is the operator: its own paragraph says all.
        return _call(calls[0], given)
    return "\n\n".join([title, *(_call(each, given) for each in calls)])


def _call(each: names.AtenCall, given: set[int]) -> str:
    """Explain a traced call; intermediate tensors, which are not among the `given` ids, get no memory."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in given or tensor.layout is not torch.strided:
            return tensor
        if not tensor.dim() and tensor.device.type == "cpu":
            # The call may read its value, as it does a number's.
            return torch.ones((), dtype=tensor.dtype)
        return hollow(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    args, kwargs = pytree.tree_map_only(torch.Tensor, real, (each.args, each.kwargs))
    op = {**registry.overloads(), **library.registered()}.get(each.overload)
    if op is not None:
        return _overload(op, args, kwargs)
    reason = registry.excluded.get(each.overload)
    return f"{each.overload}{_describe(args, kwargs)}\npath       ATen: no kernel{f' ({reason})' if reason else ''}"


def _overload(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Explain a call of an overload."""
    refusal = _refusal(op, args, kwargs)
    foreign = str(refusal).startswith((op.qualified.partition("::")[0] + "::", "Unknown keyword"))
    if refusal is not None and foreign:
        # ATen's message names the schema: the arguments do not match it.
        raise refusal
    values = in_schema_order(op.schema, args, kwargs)
    dispatcher = native_dispatcher()
    kept = dispatcher.kept(op.overload, values) if dispatcher is not None else ""
    state = "overridden now" if op.overload in installed() else "not overridden now: ATen serves it"
    if op.declaration.library is not None:
        state = "outside ATen: always registered"
    elif not op.has_place:
        state = "an operator of CUDA alone; here it can be called directly"
    elif not op.verified and op.overload not in installed():
        state = "not overridden now: not verified on this kind of device; include= can name it"
    lines = [f"{op.overload}{_describe(args, kwargs)}", f"state      {state}"]
    device = _kind_of(values)
    if device.plugin not in ("", "tritonite") or len(devices.present) > 1:
        lines.append(f"device     {device.served_by}")
    if op.overload in device.overrides:
        with devices.serving(device):
            override = vendors(op.overload)
            vendor = override is not None and override.serves(*op.bind(args, kwargs)[0])
        lines.append(f"override   {device.kind}'s host function {'serves' if vendor else 'does not serve'} the call")
    if contract.settings().invariant:
        lines.append("settings   invariant")
    try:
        with devices.serving(device):
            results, recorder = record_dry(op, values)
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


def _kind_of(values: Sequence[Any]) -> devices.Device:
    """Return the kind of device of a call's tensors, or the current one."""
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor) and (value.dim() or value.device.type != "cpu"):
            return devices.of(value.device)
    return devices.current


def declined_unasked(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why a call declines under default settings, as if its operator were enabled; "" if a kernel serves it."""
    try:
        with contract.under(contract.settings_of()):
            record_dry(op, in_schema_order(op.schema, args, kwargs))
    except Decline as decline:
        return decline.reason
    return ""


def overload_named(name: str) -> Op:
    """Return the overload of a name ("tritonite::..." outside ATen). Raises UnknownOperator."""
    known = registry.overloads()
    if "::" in name:
        importlib.import_module("tritonite.fused")
        known = library.registered()
    if name in known:
        return known[name]
    reason = registry.excluded.get(name)
    raise UnknownOperator(name=name, hint=f" ({reason})" if reason else "")


def _refusal(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Return ATen's error for these arguments, as far as meta tensors show it; None if there is none."""
    space, _, name = op.qualified.partition("::")
    packet, _, overload = name.partition(".")
    function = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return None
    metas, named = pytree.tree_map_only(torch.Tensor, without_elements, (args, kwargs))
    # Meta tensors have no generator. A factory's result on another device would take memory.
    metas, named = pytree.tree_map_only(torch.Generator, lambda _: None, (metas, named))
    if any(argument.name == "device" for argument in op.schema.arguments[len(args) :]):
        named |= {"device": "meta", "pin_memory": None}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(*metas, **named)
    except (NotImplementedError, TypeError, AttributeError, AssertionError, Unsupported):
        # Some meta functions are missing, or stricter than ATen.
        return None
    except (RuntimeError, ValueError, IndexError) as error:
        return error
    return None


def _steps(recorder: Recorder) -> Iterator[str]:
    """Yield a line for each promotion and each step of a call, in order."""
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
