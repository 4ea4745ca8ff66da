"""Facts that PyTorch's dispatcher has about operators: overloads, schemas and kernels."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_HAVE_NAMES = hasattr(torch.Tensor, "has_names")


def python_name(name: str) -> str:
    """Return the Python parameter name for an argument of a schema: `from_` for the keyword `from`."""
    return f"{name}_" if keyword.iskeyword(name) else name


def is_out(argument: Any) -> bool:
    """Return whether an argument of a schema is an out= argument."""
    return argument.alias_info is not None and argument.alias_info.is_write and argument.kwarg_only


def takes_numbers(argument: Any) -> bool:
    """Return whether a schema's argument may be a number: Scalars, floats, tensors and lists of these."""
    kind = argument.type
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return kind.kind() in ("NumberType", "FloatType", "TensorType")


def has_lazy_bits(value: Any) -> bool:
    """Return whether a tensor, or one in a list, has a lazy conjugation or negation."""
    if isinstance(value, (list, tuple)):
        return any(map(has_lazy_bits, value))
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def outgrows_storage(value: Any) -> bool:
    """Return whether a tensor, or one in a list, reaches beyond its storage, which `resize_` may have freed."""
    if isinstance(value, (list, tuple)):
        return any(map(outgrows_storage, value))
    if not isinstance(value, torch.Tensor):
        return False
    try:
        held = value.untyped_storage().nbytes()
    except NotImplementedError:
        # Sparse tensors have no storage.
        return False
    if held >= value.nbytes and value.is_contiguous() and not value.storage_offset():
        return False
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.numel() > 0 and (value.storage_offset() + last + 1) * value.itemsize > held


def raise_if_outgrown(value: Any) -> None:
    """Raise PyTorch's error for a tensor, or one in a list, that reaches beyond its storage."""
    if isinstance(value, (list, tuple)):
        for item in value:
            raise_if_outgrown(item)
    elif outgrows_storage(value):
        # PyTorch checks views against the storage.
        value.as_strided(value.shape, value.stride(), value.storage_offset())


_ENUMERATIONS = {
    "ScalarTypeType": torch.dtype,
    "LayoutType": torch.layout,
    "MemoryFormatType": torch.memory_format,
}


def enumeration(argument: Any) -> type | None:
    """Return torch.dtype, torch.layout or torch.memory_format if a schema's argument is one, else None."""
    kind = argument.real_type
    while kind.kind() == "OptionalType":
        kind = kind.getElementType()
    return _ENUMERATIONS.get(kind.kind())


# Dtypes that are defaults in schemas, by their numbers there.
_DTYPES = {4: torch.int64}


def default_of(argument: Any) -> Any:
    """Return the default of a schema's argument, None if it has none; a torch.dtype where the schema has its number."""
    value = argument.default_value
    return _DTYPES[value] if type(value) is int and enumeration(argument) is torch.dtype else value


def in_schema_order(schema: torch.FunctionSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return a value for each of a schema's arguments, in order, with defaults for those not given."""
    values = list(args)
    for argument in schema.arguments[len(args) :]:
        values.append(kwargs[argument.name] if argument.name in kwargs else default_of(argument))
    return values


def most_dimensions(value: Any) -> int:
    """Return the number of dimensions of a tensor, the largest number in a list of tensors, or 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return value.dim()
    return max(map(most_dimensions, value), default=0) if isinstance(value, (list, tuple)) else 0


def has_names(value: Any) -> bool:
    """Return whether a tensor, or one in a list, has named dimensions, which torch dropped in 2.13."""
    if not _HAVE_NAMES:
        return False
    if isinstance(value, (list, tuple)):
        return any(map(has_names, value))
    return isinstance(value, torch.Tensor) and value.has_names()


def overload_name(operator: Any) -> str:
    """Return the name of a torch.ops.OpOverload for `enable()`: "add.Tensor", "relu", "tritonite::silu_and_mul"."""
    name, overload = operator._schema.name.removeprefix("aten::"), operator._schema.overload_name
    return f"{name}.{overload}" if overload else name


def computes(operator: Any) -> bool:
    """Return whether a torch.ops.OpOverload computes something. Views, `prim` and `profiler` operators do not."""
    return not operator.is_view and operator.namespace not in ("prim", "profiler")


def decomposed(operator: Any, dispatch_key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a composite operator by ATen's formula. Returns NotImplemented for an operator with a kernel of its own.

    PyTorch decomposes composite operators before a dispatch mode sees them, except in inference mode. PyTorch's Python
    decompositions are not used, because they may draw other random numbers.
    """
    has, composite = torch._C._dispatch_has_kernel_for_dispatch_key, torch._C.DispatchKey.CompositeImplicitAutograd
    name = operator.name()
    if operator.namespace == "prim" or has(name, dispatch_key) or not has(name, composite):
        return NotImplemented
    return operator._op_dk(composite, *args, **kwargs)


def schemas(packet: str) -> list[tuple[str, torch.FunctionSchema]]:
    """Return (name for `enable()`, schema) for each overload of an ATen packet, none if torch lacks the packet."""
    found = torch._C._jit_get_schemas_for_operator(f"aten::{packet}")
    return [(f"{packet}.{schema.overload_name}" if schema.overload_name else packet, schema) for schema in found]


def packet_names() -> set[str]:
    """Return the names of all ATen operators, without overloads."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("aten::").partition(".")[0] for name in names if name.startswith("aten::")}


def has_kernel(overload: str, dispatch_key: str) -> bool:
    """Return whether ATen has a kernel of its own for an overload. Overriding any other would displace autograd."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    qualified = f"aten::{overload}"
    if not torch._C._dispatch_has_kernel(qualified):
        return False
    if has(qualified, dispatch_key):
        return True
    return not has(qualified, "CompositeImplicitAutograd") and (
        has(qualified, "CompositeExplicitAutograd") or has(qualified, "CompositeExplicitAutogradNonFunctional")
    )
