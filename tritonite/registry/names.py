"""Names that users know: the overloads that a call of one of torch's functions reaches.

The function is called with fake tensors, of several shapes until some fit. A dispatch mode notes the ATen operators
that its decomposition and its backward formulas call.
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

# Modules with functions of tensors; torch itself also has functions that change settings.
_MODULES = (torch.nn.functional, torch.functional, torch._C._VariableFunctions, torch.special, torch.linalg)
# Prefixes of names, and the prefix that the ATen operator has instead.
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
    """A call of an ATen operator with its arguments."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def overload(self) -> str:
        return overload_name(self.operator)


class ShapesUnknown(Exception):
    """Raised where PyTorch's own function for the shapes of an operator's results fails."""


class Calls(OpaqueMode):
    """A dispatch mode that notes calls of ATen's computing operators. Views compute nothing."""

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
        try:
            return func(*args, **kwargs)
        except AttributeError as error:
            # Up to torch 2.13 that of an LSTM cell reads the bias that is not given.
            raise ShapesUnknown(str(func)) from error


def spelled(name: str) -> str:
    """Return ATen's form of a name or glob: "add.Tensor" for "aten::add.Tensor", "softmax" for "torch.softmax"."""
    prefix = next((each for each in _PREFIXES if name.startswith(each)), "")
    if not prefix:
        return name
    own = name.removeprefix(prefix)
    aten = _PREFIXES[prefix] + own
    # Not every function of torch.special and torch.linalg is an operator of that name.
    return aten if is_glob(name) or schemas(aten.partition(".")[0]) else own


def is_glob(name: str) -> bool:
    """Return whether a name is a glob over overloads."""
    return any(character in name for character in "*?[")


def function_named(name: str) -> Callable[..., Any] | None:
    """Return ATen's operator for a name such as "softmax" or "add.Tensor", or torch's function, or None."""
    packet, _, overload = name.partition(".")
    if schemas(packet):
        found = getattr(torch.ops.aten, packet)
        return getattr(found, overload, None) if overload else found
    function = python_function(name)
    called = getattr(function, "__name__", name)
    return function_named(called) if called != name and schemas(called) else function


def python_function(name: str) -> Callable[..., Any] | None:
    """Return torch's function of a name, or None. Its arguments may differ from those of ATen's operator."""
    return next((getattr(module, name) for module in _MODULES if callable(getattr(module, name, None))), None)


def overload_named(name: str) -> Callable[..., Any]:
    """Return ATen's overload for a name such as "add.Tensor", or the default overload for a name such as "softmax"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def known_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ATen's operator for one of torch's functions, or the function itself if ATen has none."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return function
    name = getattr(function, "__name__", "")
    # Functions in C++, also those of torch.special, have ATen's names.
    of_torch = inspect.isbuiltin(function) or any(getattr(m, name, None) == function for m in (*_MODULES, torch.Tensor))
    return (of_torch and function_named(name)) or function


@functools.lru_cache(maxsize=1024)
def reached(function: Callable[..., Any]) -> frozenset[str]:
    """Return the overloads with a kernel that calls of a function reach, backward formulas included."""
    if isinstance(function, torch._ops.OpOverload) and overload_name(function) in overloads():
        return frozenset({overload_name(function)})
    found: set[str] = set()
    if isinstance(function, torch._ops.OpOverloadPacket):
        name = function.__name__
        own = {overload for overload, _ in schemas(name)}
        found = {known for known in overloads() if known in own or known.partition(".")[0] == f"{name}_backward"}
    for callable_, parameters in candidate_calls(function, composite=True):
        found |= _reached_by(callable_, parameters)
    return frozenset(found)


def candidate_calls(function: Callable[..., Any], composite: bool = False) -> list[tuple[Any, list[Sequence[Any]]]]:
    """Return pairs (callable, candidates for each parameter): a function itself, or the overloads of a packet.

    With `composite`, a packet's overloads that have a kernel of their own are left out.
    """
    if isinstance(function, torch._ops.OpOverload):
        found = [(function, _of_schema(function._schema))]
    elif isinstance(function, torch._ops.OpOverloadPacket):
        key = devices.current.aten_key
        chosen = [schema for name, schema in schemas(function.__name__) if not (composite and has_kernel(name, key))]
        found = [(getattr(function, each.overload_name or "default", None), _of_schema(each)) for each in chosen]
    else:
        found = [(function, _of_signature(function))]
    return [(each, parameters) for each, parameters in found if each is not None and parameters is not None]


def _reached_by(function: Callable[..., Any], parameters: Sequence[Sequence[Any]]) -> set[str]:
    """Return the overloads with a kernel that calls reach, trying combinations of the candidates for each parameter."""
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
    """Silence the log of fake tensors, which log shapes that do not fit before they raise."""
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
    """Return the ATen calls of a function call, and with `gradient` those of its backward pass. Computes nothing.

    Tensors and `Like`s become fake tensors. In the returned calls the arguments of the function are the original ones.
    The trace ends at a data-dependent number or size.
    """
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    undecided = (
        *(fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException),
        ShapesUnknown,
    )
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
    """The shape and the dtype of a candidate tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point


def is_like(value: Any) -> bool:
    return isinstance(value, Like)


_FLOATS = tuple(Like(shape) for shape in ((4, 4), (4,), (2, 4, 4), (2, 4, 4, 4), (3, 3)))
_TENSORS = (*_FLOATS, Like((4,), torch.int64))
# Candidates by the beginning of a type's name, without Optional[...].
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
    """Return the candidates for a parameter of type `kind`, none for an unknown type."""
    if kind.startswith("Optional["):
        kind, optional = kind.removeprefix("Optional["), True
    values = next((found for name, found in _CANDIDATES.items() if kind.startswith(name)), ())
    return (None, *values[:2]) if optional else values


def _of_schema(schema: torch.FunctionSchema) -> list[Sequence[Any]] | None:
    """Return candidates for a schema's parameters, up to the first keyword or default other than a tensor.

    Returns None if the operator writes arguments, takes no tensor, or has a parameter without candidates.
    """
    if any(is_out(argument) or argument.alias_info is not None for argument in schema.arguments):
        return None
    parameters: list[Sequence[Any]] = []
    for argument in schema.arguments:
        kind = str(argument.real_type)
        if argument.kwarg_only or (argument.has_default_value() and "Tensor" not in kind):
            break
        parameters.append(_candidates(kind))
    # Functions without tensor arguments create tensors or change settings.
    return parameters if all(parameters) and any(any(map(is_like, values)) for values in parameters) else None


def _of_signature(function: Callable[..., Any]) -> list[Sequence[Any]] | None:
    """Return candidates for a Python function's parameters without default: tensors if they have no annotation."""
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
    """Yield combinations of candidates, first those whose tensors share a shape, in float32 and in float16."""
    for dtype in (torch.float32, torch.float16):
        for like in _FLOATS:
            alike = [[like._replace(dtype=dtype)] if any(map(is_like, values)) else values for values in parameters]
            yield from itertools.product(*alike)
    yield from itertools.product(*parameters)
