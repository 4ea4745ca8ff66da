"""What PyTorch's dispatcher knows of an operator: its overloads, their schemas, and which have kernels."""

from __future__ import annotations

import keyword
from typing import Any

import torch

_HAVE_NAMES = hasattr(torch.Tensor, "has_names")


def python_name(name: str) -> str:
    """What a parameter in Python is called for an argument of a schema: `from_` for what is a word of Python's own."""
    return f"{name}_" if keyword.iskeyword(name) else name


def is_out(argument: Any) -> bool:
    """Whether an argument of a schema is a destination to write, as `out` is."""
    return argument.alias_info is not None and argument.alias_info.is_write and argument.kwarg_only


def takes_numbers(argument: Any) -> bool:
    """Whether a schema's argument may be a number, as Scalars, floats, lists of them and tensors may."""
    kind = argument.type
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return kind.kind() in ("NumberType", "FloatType", "TensorType")


def has_lazy_bits(value: Any) -> bool:
    """Whether it is a tensor that is conjugated or negated when it is read, or holds one."""
    if isinstance(value, (list, tuple)):
        return any(map(has_lazy_bits, value))
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def outgrows_storage(value: Any) -> bool:
    """Whether a tensor, or one in a list, needs more memory than its storage has, which `resize_` may have freed."""
    if isinstance(value, (list, tuple)):
        return any(map(outgrows_storage, value))
    if not isinstance(value, torch.Tensor):
        return False
    try:
        held = value.untyped_storage().nbytes()
    except NotImplementedError:
        # It has none, as a sparse tensor.
        return False
    if held >= value.nbytes and value.is_contiguous() and not value.storage_offset():
        return False
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.numel() > 0 and (value.storage_offset() + last + 1) * value.itemsize > held


def raise_if_outgrown(value: Any) -> None:
    """Raise PyTorch's error for a tensor that needs more memory than its storage has, or for one in a list."""
    if isinstance(value, (list, tuple)):
        for item in value:
            raise_if_outgrown(item)
    elif outgrows_storage(value):
        # As a view, which PyTorch checks against the storage.
        value.as_strided(value.shape, value.stride(), value.storage_offset())


_ENUMERATIONS = {
    "ScalarTypeType": torch.dtype,
    "LayoutType": torch.layout,
    "MemoryFormatType": torch.memory_format,
}


def enumeration(argument: Any) -> type | None:
    """The class of what a schema's argument takes if that is a dtype, a layout or a memory format."""
    kind = argument.real_type
    while kind.kind() == "OptionalType":
        kind = kind.getElementType()
    return _ENUMERATIONS.get(kind.kind())


def most_dimensions(value: Any) -> int:
    """The dimensions of a tensor, the most of a list of tensors, 0 of anything else."""
    if isinstance(value, torch.Tensor):
        return value.dim()
    return max(map(most_dimensions, value), default=0) if isinstance(value, (list, tuple)) else 0


def has_names(value: Any) -> bool:
    """Whether it is a tensor whose dimensions have names, which torch has before 2.13, or holds one."""
    if not _HAVE_NAMES:
        return False
    if isinstance(value, (list, tuple)):
        return any(map(has_names, value))
    return isinstance(value, torch.Tensor) and value.has_names()


def overload_name(operator: Any) -> str:
    """What the catalog calls a torch.ops.OpOverload: "add.Tensor", "relu", "tritonite::silu_and_mul"."""
    name, overload = operator._schema.name.removeprefix("aten::"), operator._schema.overload_name
    return f"{name}.{overload}" if overload else name


def computes(operator: Any) -> bool:
    """Whether a call of a torch.ops.OpOverload computes: views do not, nor what PyTorch asks and notes for itself."""
    return not operator.is_view and operator.namespace not in ("prim", "profiler")


def decomposed(operator: Any, dispatch_key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the operators that ATen makes a torch.ops.OpOverload of; NotImplemented where it has a kernel of its own.

    PyTorch decomposes such a call before a dispatch mode sees it, except in inference mode. ATen's own formula is
    called, since the one that PyTorch's compilers have in Python may draw other random numbers.
    """
    has, composite = torch._C._dispatch_has_kernel_for_dispatch_key, torch._C.DispatchKey.CompositeImplicitAutograd
    name = operator.name()
    if operator.namespace == "prim" or has(name, dispatch_key) or not has(name, composite):
        return NotImplemented
    return operator._op_dk(composite, *args, **kwargs)


def schemas(packet: str) -> list[tuple[str, torch.FunctionSchema]]:
    """The overloads of an ATen packet, by the names `enable()` takes, with their schemas; none if torch lacks it."""
    found = torch._C._jit_get_schemas_for_operator(f"aten::{packet}")
    return [(f"{packet}.{schema.overload_name}" if schema.overload_name else packet, schema) for schema in found]


def packet_names() -> set[str]:
    """The names of all of ATen's operators, without their overloads."""
    every = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("aten::").partition(".")[0] for name in every if name.startswith("aten::")}


def has_kernel(overload: str, dispatch_key: str) -> bool:
    """Whether ATen has a kernel of its own for the overload, so that overriding it displaces no autograd formula."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    qualified = f"aten::{overload}"
    if not torch._C._dispatch_has_kernel(qualified):
        return False
    if has(qualified, dispatch_key):
        return True
    return not has(qualified, "CompositeImplicitAutograd") and (
        has(qualified, "CompositeExplicitAutograd") or has(qualified, "CompositeExplicitAutogradNonFunctional")
    )
