"""Schemas as Python signatures, for editors and `help`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from types import GenericAlias
from typing import Any

import torch

from tritonite.registry.names import reached
from tritonite.registry.op import overloads
from tritonite.registry.schema import default_of, is_out, python_name, schemas

Number = bool | int | float | complex
_TYPES = {
    "Tensor": torch.Tensor,
    "number": Number,
    "bool": bool,
    "int": int,
    "SymInt": int,
    "float": float,
    "str": str,
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "Device": torch.device,
    "MemoryFormat": torch.memory_format,
    "Generator": torch.Generator,
}


def _annotation(kind: Any, length: int | None = None) -> Any:
    """Return the Python type of a schema's type. PyTorch also takes one integer for a list with a given `length`."""
    if kind.kind() == "OptionalType":
        return _annotation(kind.getElementType(), length) | None
    if kind.kind() == "ListType":
        item = _annotation(kind.getElementType())
        items = GenericAlias(Sequence, (item,))
        return items if length is None or item is not int else item | items
    return _TYPES.get(str(kind), Any)


def _parameter(argument: Any, kind: Any) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty
    if argument.has_default_value():
        default = default_of(argument)
        if isinstance(default, list):
            default = tuple(default)
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else kind
    annotation = _annotation(argument.real_type, argument.N)
    return inspect.Parameter(python_name(argument.name), kind, default=default, annotation=annotation)


def _parameters(schema: torch.FunctionSchema) -> list[inspect.Parameter]:
    """Return the parameters of a schema. Arguments named like a Python keyword, and all before, are positional-only."""
    own = [i for i, argument in enumerate(schema.arguments) if python_name(argument.name) != argument.name]
    last = max(own, default=-1)
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [_parameter(argument, kinds[i > last]) for i, argument in enumerate(schema.arguments)]


def _signature(schema: torch.FunctionSchema) -> inspect.Signature:
    returned = [_annotation(each.real_type) for each in schema.returns]
    result = returned[0] if len(returned) == 1 else GenericAlias(tuple, tuple(returned)) if returned else None
    return inspect.Signature(_parameters(schema), return_annotation=result)


@functools.lru_cache(maxsize=1024)
def signatures(packet: str) -> dict[str, inspect.Signature]:
    """Return the signature of each overload of an ATen packet, in ATen's order, with out= overloads last.

    TorchScript's own overloads, for numbers, lists and dictionaries, are left out.
    """
    known = torch._C._dispatch_has_kernel
    found = [(name, schema) for name, schema in schemas(packet) if known(f"aten::{name}")]
    found.sort(key=lambda each: any(is_out(argument) for argument in each[1].arguments))
    return {name: _signature(schema) for name, schema in found}


@functools.lru_cache(maxsize=1024)
def described(packet: str) -> tuple[inspect.Signature, str]:
    """Return (signature, docstring) of a packet: the first overload's with a kernel, and a list of all overloads.

    A composite packet has no such overload, and gets the first signature.
    """
    served = {name: op for name, op in overloads().items() if name.partition(".")[0] == packet}
    declarations = {id(op.declaration): op.declaration for op in served.values()}.values()
    accepted = dict.fromkeys(dtype for each in declarations for dtype in each.accepts)
    found = signatures(packet)
    if not served:
        called = ", ".join(sorted(reached(getattr(torch.ops.aten, packet))))
        lines = [f"aten::{packet}, a composite of other operators.", f"\nKernels serve {called}.", "\nOverloads:"]
        return next(iter(found.values())), "\n".join([*lines, *(f"    {name}{each}" for name, each in found.items())])
    lines = [
        f"aten::{packet}, run directly. Family: {', '.join(dict.fromkeys(each.family for each in declarations))}.",
        *(f"\n{each.method}" for each in declarations if each.method),
        f"\nKernels serve {', '.join(str(dtype).removeprefix('torch.') for dtype in accepted)}.",
        "ATen serves all other calls, and raises its errors.",
        "\nOverloads:",
        *(f"    {name}{signature}{'' if name in served else '  (ATen)'}" for name, signature in found.items()),
    ]
    return next(found[name] for name in found if name in served), "\n".join(lines)
