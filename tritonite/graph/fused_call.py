"""`tritonite::fused_call`: a call of an operator of ATen with pointwise programs before and after it, in its kernel."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tritonite import dtypes, registry
from tritonite.engine.fusing import Epilogue, Prologue, fusing
from tritonite.engine.iteration import contiguous_strides
from tritonite.errors import Decline
from tritonite.install import library
from tritonite.ops.convolution.call import Call, sizes_of, strides_of
from tritonite.registry import Declaration, LibraryFormulas, Op
from tritonite.registry.programs import from_text
from tritonite.runtime.contract import empty, empty_strided
from tritonite.runtime.hollow import hollow, without_elements

NAME = "tritonite::fused_call"
# The name of the prologue's result in the text of a call. Other tensors are t0, t1 and so on.
MADE = "made"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in dtypes.ALL}


class Called(NamedTuple):
    """A call by text: the overload's name, its arguments with a `Placed` for each tensor, and its results' dtypes."""

    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtypes: tuple[torch.dtype, ...]


class Placed(NamedTuple):
    """A tensor among a call's arguments by its place; -1 for the prologue's result."""

    place: int


def call_text(overload: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[torch.dtype]) -> str:
    """Return a call as text. Raises Decline for an argument that no text has."""
    given = [*map(_argument_text, args), *[f"{name}={_argument_text(value)}" for name, value in kwargs.items()]]
    return f"{overload}({', '.join(given)}) -> {', '.join(map(_argument_text, results))}"


def _argument_text(value: Any) -> str:
    if isinstance(value, Placed):
        return MADE if value.place < 0 else f"t{value.place}"
    if isinstance(value, torch.dtype) and value in dtypes.ALL:
        return str(value).removeprefix("torch.")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument_text, value))}]"
    if value is None or type(value) in (bool, int, str) or (type(value) is float and abs(value) < float("inf")):
        return repr(value)
    raise Decline(f"an argument {value!r}")


@functools.lru_cache(maxsize=4096)
def called(text: str) -> Called:
    """Return the call of a text. Raises Decline for any other text."""
    try:
        given, _, results = text.partition(" -> ")
        call: Any = ast.parse(given, mode="eval").body
        args = tuple([_argument(each) for each in call.args])
        kwargs = {each.arg: _argument(each.value) for each in call.keywords}
        return Called(ast.unparse(call.func), args, kwargs, tuple([_DTYPES[name] for name in results.split(", ")]))
    except (AttributeError, KeyError, SyntaxError, ValueError) as error:
        raise Decline(f"no call of an operator: {text!r} ({error!r})") from None


def _argument(node: ast.expr) -> Any:
    if isinstance(node, ast.List):
        return [_argument(each) for each in node.elts]
    if not isinstance(node, ast.Name):
        return ast.literal_eval(node)
    if node.id == MADE:
        return Placed(-1)
    return _DTYPES[node.id] if node.id in _DTYPES else Placed(int(node.id.removeprefix("t")))


class _Parts(NamedTuple):
    """The arguments of the operator."""

    before_operands: Sequence[torch.Tensor]
    before_numbers: Sequence[Any]
    before: str
    operands: Sequence[torch.Tensor]
    call: str
    shape: Sequence[int]
    after_operands: Sequence[torch.Tensor]
    after_numbers: Sequence[Any]
    after: str

    def op(self) -> Op:
        """Return the overload that is called."""
        name = called(self.call).overload
        found = registry.overloads().get(name)
        if found is None:
            raise Decline(f"{name} has no kernel")
        return found

    def arguments(self, made: torch.Tensor | None, like: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return the positional and keyword arguments of the call, with each tensor mapped by `like`."""

        def filled(value: Any) -> Any:
            if isinstance(value, Placed):
                tensor = made if value.place < 0 else self.operands[value.place]
                assert tensor is not None
                return like(tensor)
            return [filled(each) for each in value] if isinstance(value, list) else value

        call = called(self.call)
        return [filled(each) for each in call.args], {name: filled(each) for name, each in call.kwargs.items()}

    def prologue(self, allocate: Callable[..., torch.Tensor]) -> Prologue | None:
        """Return the program before the call, whose result `allocate` makes of sizes, strides, dtype and device."""
        if not self.before:
            return None
        tensors, numbers = tuple(self.before_operands), tuple(self.before_numbers)
        program = from_text(self.before, len(tensors), len(numbers))
        device, (own,) = program.outputs((*tensors, *numbers))
        return Prologue(program, tensors, numbers, allocate(own.shape, own.strides, own.dtype, device))

    def epilogue(self, called: torch.Tensor, allocate: Callable[..., torch.Tensor]) -> Epilogue:
        """Return the program after the call, which reads the result `called`. `allocate` makes its own results."""
        result = called.view(self.shape) if len(self.shape) else called
        tensors, numbers = tuple(self.after_operands), tuple(self.after_numbers)
        program = from_text(self.after, 1 + len(tensors), len(numbers))
        device, fresh = program.outputs((result, *tensors, *numbers))
        outs = tuple([allocate(own.shape, own.strides, own.dtype, device) for own in fresh])
        return Epilogue(program, tensors, numbers, result, outs)


def _results_on_meta(parts: _Parts, made: torch.Tensor | None, op: Op) -> list[torch.Tensor]:
    """Return the results of the call on the device "meta"."""
    packet, _, overload = op.overload.partition(".")
    # A mode that records would keep tensors of the device "meta" as buffers of its graph.
    with _disable_current_modes():
        args, kwargs = parts.arguments(made, without_elements)
        results = getattr(getattr(torch.ops.aten, packet), overload or "default")(*args, **kwargs)
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _strides(op: Op, values: Sequence[Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a call's first result, which its host function would allocate."""
    if op.packet != "convolution":
        return contiguous_strides(shape)
    input, weight, bias, *steps = values
    call = Call(input, weight, sizes_of(bias), *steps)
    return tuple(strides_of(call.shape, call.channels_last()))


def _host(values: Sequence[Any], outs: Sequence[torch.Tensor]) -> Sequence[Any]:
    parts = _Parts(*values)
    op = parts.op()
    prologue = parts.prologue(hollow)
    made = None if prologue is None else prologue.operand
    args, kwargs = parts.arguments(made, lambda tensor: tensor)
    epilogue = None
    given: tuple[torch.Tensor, ...] = ()
    if parts.after:
        shapes = [tuple(own.shape) for own in _results_on_meta(parts, made, op)]
        first, *others = zip(shapes, called(parts.call).dtypes, strict=True)
        device = (made if made is not None else parts.operands[0]).device
        result = hollow(first[0], _strides(op, op.bind(tuple(args), kwargs)[0], first[0]), first[1], device)
        given = (result, *[empty(shape, dtype, device) for shape, dtype in others])
        epilogue = parts.epilogue(given[0], empty_strided)
    with fusing(prologue, epilogue):
        found = op.declaration.host(op.bind(tuple(args), kwargs)[0], given)
    return [[*(found if epilogue is None else (*epilogue.outs, *found[1:]))]]


def _fake(*values: Any) -> list[torch.Tensor]:
    parts = _Parts(*values)
    op = parts.op()

    def allocate(shape: Any, strides: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    prologue = parts.prologue(allocate)
    args, kwargs = parts.arguments(None if prologue is None else prologue.operand, lambda tensor: tensor)
    packet, _, overload = op.overload.partition(".")
    found = getattr(getattr(torch.ops.aten, packet), overload or "default")(*args, **kwargs)
    results = [*found] if isinstance(found, (tuple, list)) else [found]
    if not parts.after:
        return results
    return [*parts.epilogue(results[0], allocate).outs, *results[1:]]


_declaration = Declaration(
    packets=(NAME,),
    arguments=_Parts._fields,
    optional=frozenset(),
    host=_host,
    family="graph",
    kernels=(),
    accepts=dtypes.ALL,
    promotion="own",
    method="",
    # Programs within other kernels have their numbers as constants.
    pinned=frozenset(("before_numbers", "shape", "after_numbers")),
    library=LibraryFormulas(
        f"{NAME.partition('::')[2]}(Tensor[] before_operands, Scalar[] before_numbers, str before, Tensor[] operands,"
        " str call, SymInt[] shape, Tensor[] after_operands, Scalar[] after_numbers, str after) -> Tensor[]",
        _fake,
    ),
)


def fused_call() -> Any:
    """Return the overload `torch.ops.tritonite.fused_call.default`, registered with torch on first use.

    Its arguments are the operands, the numbers and the text (`registry/programs.py`) of a program before the call, or
    "". Then come the call's operands t0, t1 and so on, and its text, such as `sum.dim_IntList(made, [-1], False) ->
    float32`, where `made` is the program's result. Last are the program after it, and before that the `shape` of a view
    of the call's first result, or []. That program's first tensor is this result. The operator returns the program's
    results, then the call's other results. It is an operator of inference: it has no gradient.
    """
    library.register([_declaration])
    return library.overload_of(NAME)
