"""The names that users know: which overloads of the catalog a call of torch's function of that name reaches.

PyTorch itself says so: the function is called with tensors that hold nothing, of shapes that are tried until some fit,
and what its decomposition, and the formulas of its gradient, call of ATen is noted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree

from tritonite import devices
from tritonite.registry.op import overloads
from tritonite.registry.schema import computes, decomposed, has_kernel, is_out, overload_name, schemas
from tritonite.runtime.opaque import OpaqueMode

# Where functions are looked up: those of tensors, not those that set what torch does.
_MODULES = (torch.nn.functional, torch.functional, torch._C._VariableFunctions, torch.special, torch.linalg)
# What a name begins with where its operator is found, and what ATen's name begins with instead.
_PREFIXES = {
    "torch.ops.aten.": "",
    "aten::": "",
    "torch.nn.functional.": "",
    "nn.functional.": "",
    "F.": "",
    "torch.functional.": "",
    "torch.Tensor.": "",
    "torch.special.": "special_",
    "torch.linalg.": "linalg_",
    "torch.fft.": "fft_",
    "torch.": "",
}
_MOST_ATTEMPTS, _MOST_CALLS = 500, 32


class AtenCall(NamedTuple):
    """A call of an operator, with its arguments."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def overload(self) -> str:
        return overload_name(self.operator)


class Calls(OpaqueMode):
    """Notes the calls of ATen's operators that compute within it; views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[AtenCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = decomposed(func, devices.current.dispatch_key or "CPU", args, kwargs)
        if result is not NotImplemented:
            return result
        if computes(func):
            self.found.append(AtenCall(func, args, kwargs))
        return func(*args, **kwargs)


def spelled(name: str) -> str:
    """Return a name or glob as ATen has it: "add.Tensor" for "aten::add.Tensor", "softmax" for "torch.softmax"."""
    prefix = next((each for each in _PREFIXES if name.startswith(each)), "")
    if not prefix:
        return name
    own = name.removeprefix(prefix)
    aten = _PREFIXES[prefix] + own
    # Not every function of torch.special and torch.linalg is an operator of that name.
    return aten if is_glob(name) or schemas(aten.partition(".")[0]) else own


def is_glob(name: str) -> bool:
    """Whether a name is a pattern over overloads."""
    return any(character in name for character in "*?[")


def function_named(name: str) -> Callable[..., Any] | None:
    """ATen's operator of that name, as "softmax" or "add.Tensor", or torch's function; None where there is neither."""
    packet, _, overload = name.partition(".")
    if schemas(packet):
        found = getattr(torch.ops.aten, packet)
        return getattr(found, overload, None) if overload else found
    function = python_function(name)
    called = getattr(function, "__name__", name)
    return function_named(called) if called != name and schemas(called) else function


def python_function(name: str) -> Callable[..., Any] | None:
    """Return torch's own function of that name, which may take arguments otherwise than ATen's operator does."""
    return next((getattr(module, name) for module in _MODULES if callable(getattr(module, name, None))), None)


def overload_named(name: str) -> Callable[..., Any]:
    """ATen's overload of that name, as "add.Tensor", or the default one of a name without a point, as "softmax"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def known_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """ATen's operator that a function of torch's stands for; any other function is itself."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return function
    name = getattr(function, "__name__", "")
    # Functions in C++, those of torch.special too, bear ATen's names.
    of_torch = inspect.isbuiltin(function) or any(getattr(m, name, None) == function for m in (*_MODULES, torch.Tensor))
    return (of_torch and function_named(name)) or function


@functools.lru_cache(maxsize=1024)
def reached(function: Callable[..., Any]) -> frozenset[str]:
    """The overloads of the catalog that calls of a function reach, and the backward formulas of their gradients."""
    if isinstance(function, torch._ops.OpOverload) and overload_name(function) in overloads():
        return frozenset({overload_name(function)})
    found: set[str] = set()
    if isinstance(function, torch._ops.OpOverloadPacket):
        name = function.__name__
        own = {overload for overload, _ in schemas(name)}
        found = {known for known in overloads() if known in own or known.partition(".")[0] == f"{name}_backward"}
    for way, parameters in ways(function, composite=True):
        found |= _reached_by(way, parameters)
    return frozenset(found)


def ways(function: Callable[..., Any], composite: bool = False) -> list[tuple[Any, list[Sequence[Any]]]]:
    """A function or its overloads, or those that ATen makes of others, with what may be tried for their parameters."""
    if isinstance(function, torch._ops.OpOverload):
        found = [(function, _of_schema(function._schema))]
    elif isinstance(function, torch._ops.OpOverloadPacket):
        key = devices.current.dispatch_key or "CPU"
        every = [each for name, each in schemas(function.__name__) if not (composite and has_kernel(name, key))]
        found = [(getattr(function, each.overload_name or "default", None), _of_schema(each)) for each in every]
    else:
        found = [(function, _of_signature(function))]
    return [(way, parameters) for way, parameters in found if way is not None and parameters is not None]


def _reached_by(function: Callable[..., Any], parameters: Sequence[Sequence[Any]]) -> set[str]:
    """What calls reach with each parameter one of its candidates."""
    found: set[str] = set()
    calls = 0
    for values in itertools.islice(_combinations(parameters), _MOST_ATTEMPTS):
        with contextlib.suppress(Exception):
            forward, backward = traced(function, values, {}, gradient=True)
            found.update(call.overload for call in forward)
            found.update(call.overload for call in backward if "backward" in call.overload)
            calls += 1
        if calls == _MOST_CALLS:
            break
    return found & overloads().keys()


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Fake tensors log the shapes that do not fit, and raise."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def traced(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    gradient: bool = False,
) -> tuple[list[AtenCall], list[AtenCall]]:
    """The calls of ATen that a call of a function makes, and those of its `gradient`; nothing is computed.

    Tensors, and Like for them, become fake ones of the same device. What the function was given is so again in the
    calls' arguments. They end where a number or a size is wanted that data decides.
    """
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    undecided = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
    given: dict[int, torch.Tensor] = {}

    def tensor(value: Any) -> Any:
        if isinstance(value, Like):
            options: dict[str, Any] = {"device": devices.current.type, "requires_grad": gradient and value.floating}
            return torch.empty(value.shape, dtype=value.dtype, **options)
        if isinstance(value, torch.Tensor):
            like = mode.from_tensor(value)
            given[id(like)] = value
            return like
        return value

    with torch.inference_mode(False), torch.set_grad_enabled(gradient or torch.is_grad_enabled()), mode:
        args, kwargs = pytree.tree_map(tensor, (tuple(args), kwargs), is_leaf=is_like)
        with warnings.catch_warnings(), _unlogged(), Calls() as calls:
            warnings.simplefilter("ignore")
            results = None
            with contextlib.suppress(*undecided):
                results = function(*args, **kwargs)
            count = len(calls.found)
            inputs = [x for x in pytree.tree_leaves((args, kwargs)) if _differentiable(x)]
            outputs = [x for x in pytree.tree_leaves(results) if _differentiable(x)]
            if gradient and inputs and outputs:
                torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs], allow_unused=True)
    found = [
        AtenCall(call.operator, *pytree.tree_map(lambda value: given.get(id(value), value), call[1:]))
        for call in calls.found
    ]
    return found[:count], found[count:]


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class Like(NamedTuple):
    """A tensor that is tried: nothing but its shape and dtype counts."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point


def is_like(value: Any) -> bool:
    return isinstance(value, Like)


_FLOATS = tuple(Like(shape) for shape in ((4, 4), (4,), (2, 4, 4), (2, 4, 4, 4), (3, 3)))
_TENSORS = (*_FLOATS, Like((4,), torch.int64))
# By what a type's name begins with, once it is no longer optional.
_CANDIDATES: dict[str, tuple[Any, ...]] = {
    "Tensor": _TENSORS,
    "List[Tensor": ([_TENSORS[0]] * 2,),
    "List[": ([4], [0], [1], [4, 4]),
    "bool": (False, True),
    "int": (1, 0, 4),
    "SymInt": (1, 0, 4),
    "float": (0.5,),
    "number": (0.5,),
}


def _candidates(kind: str, optional: bool = False) -> tuple[Any, ...]:
    """What is tried for a parameter of a type; nothing for a type that is not known."""
    if kind.startswith("Optional["):
        kind, optional = kind.removeprefix("Optional["), True
    values = next((found for name, found in _CANDIDATES.items() if kind.startswith(name)), ())
    return (None, *values[:2]) if optional else values


def _of_schema(schema: torch.FunctionSchema) -> list[Sequence[Any]] | None:
    """Candidates for a schema's parameters, up to the last that has no default or is a tensor.

    None where it writes, or has some that cannot be tried.
    """
    if any(is_out(argument) or argument.alias_info is not None for argument in schema.arguments):
        return None
    parameters: list[Sequence[Any]] = []
    for argument in schema.arguments:
        kind = str(argument.real_type)
        if argument.kwarg_only or (argument.has_default_value() and "Tensor" not in kind):
            break
        parameters.append(_candidates(kind))
    # Those of no tensors set what torch does, or make tensors.
    return parameters if all(parameters) and any(any(map(is_like, values)) for values in parameters) else None


def _of_signature(function: Callable[..., Any]) -> list[Sequence[Any]] | None:
    """Candidates for the parameters without default of a function in Python: tensors, where it says nothing else."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    kinds = ["" if p.annotation is p.empty else inspect.formatannotation(p.annotation) for p in required]
    return [_candidates(kind.replace("list[", "List[")) or _TENSORS for kind in kinds]


def _combinations(parameters: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Each parameter with each candidate, first those with tensors that are alike, in float32 and in float16."""
    for dtype in (torch.float32, torch.float16):
        for like in _FLOATS:
            alike = [[like._replace(dtype=dtype)] if any(map(is_like, values)) else values for values in parameters]
            yield from itertools.product(*alike)
    yield from itertools.product(*parameters)
