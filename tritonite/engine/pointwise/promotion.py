"""The dtypes of a pointwise call, and the dtype in which each of its arguments reaches the formula."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import triton.language as tl

from tritonite import dtypes
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.pointwise.layout import VARIANTS, Operand
from tritonite.errors import Decline
from tritonite.runtime.symbols import Limits, limits_of

_LARGEST_IN_64_BITS = math.nextafter(2.0**63, 0.0)
# Dtypes whose values fp16 and bf16 hold exactly.
_EXACT_IN_16_BITS = (torch.bool, torch.uint8, torch.int8)


class Formula(Protocol):
    """The fields of a declaration that promotion reads; `declare.Pointwise` documents them."""

    formula: Any
    parameters: dict[str, str]
    promote: dtypes.Promotion
    accepts: tuple[torch.dtype, ...]
    output_dtypes: tuple[torch.dtype | None, ...]
    methods: tuple[tuple[tuple[int, ...], dtypes.Promotion], ...]
    one_dtype: bool
    truncates: bool
    asserting: bool


class TensorKind(NamedTuple):
    """A tensor as promotion sees it; `item` if it serves as a number."""

    dtype: torch.dtype
    zero_dim: bool
    item: bool


class ComponentsKind(NamedTuple):
    """An argument of `length` coordinates, integers, or strides of a gathered operand, which has a dtype."""

    dtype: torch.dtype | None
    length: int
    is_tuple: bool


class ConstantKind(NamedTuple):
    """A static argument with its type, because 1, 1.0 and True are equal as values."""

    type: type
    value: Any


Kind = TensorKind | ComponentsKind | ConstantKind | type


class Argument(NamedTuple):
    """An argument of a launch: that of the call at `position`, or one `component` of it.

    `how` is "tensor", "pointer" (a gathered operand), "stride" (one of its strides), "integer", "number", or "item"
    (the number in a 0-d tensor).
    """

    position: int
    how: str
    component: int = 0


def promoted(
    formula: Formula, kinds: Sequence[Kind], default: torch.dtype, out_dtypes: Sequence[torch.dtype]
) -> tuple[torch.dtype, torch.dtype, tuple[torch.dtype, ...]]:
    """Return (common dtype, compute dtype, dtypes of the results). The first output decides the first two."""
    for kind in kinds:
        if isinstance(kind, TensorKind) and kind.dtype not in dtypes.TRITON_NAMES:
            raise Decline(f"dtype {kind.dtype}")
        if isinstance(kind, type) and kind not in (bool, int, float):
            raise Decline(f"number of type {kind.__name__}")
    if formula.one_dtype:
        typed = zip(kinds, formula.parameters.values(), strict=True)
        found = {kind.dtype for kind, role in typed if isinstance(kind, TensorKind) and role != "own"}
        if len(found) > 1:
            raise Decline(f"tensors of dtypes {', '.join(sorted(map(str, found)))}")
    commons = []
    for j, (positions, _) in enumerate(formula.methods):
        if not positions:
            commons.append(out_dtypes[j])
            continue
        deciding = [kinds[i] for i in positions]
        among = [kind for kind in deciding if isinstance(kind, TensorKind)]
        commons.append(
            dtypes.common_dtype(
                tuple(kind.dtype for kind in among if not kind.zero_dim),
                tuple(kind.dtype for kind in among if kind.zero_dim),
                tuple(kind for kind in deciding if isinstance(kind, type)),
                default,
            )
        )
    if commons[0] not in formula.accepts:
        raise Decline(f"dtype {commons[0]}")
    each = [dtypes.promote(kind, common, default) for common, (_, kind) in zip(commons, formula.methods, strict=True)]
    results = tuple(own or result for own, (_, result) in zip(formula.output_dtypes, each, strict=True))
    return commons[0], each[0][0], results


@dataclass(frozen=True, eq=False)
class KernelTypes:
    """The compile-time parameters of a kernel that do not depend on shapes, one object for equal contents.

    `itemsize` is the widest tensor's in bytes, and `narrowest` the narrowest one's.
    """

    formula: Any
    parameters: tuple[Operand, ...]
    results: tuple[Operand, ...]
    pointers: tuple[tuple[str, ...], tuple[str, ...]]
    itemsize: int
    narrowest: int
    asserting: bool


@functools.lru_cache(maxsize=VARIANTS)
def kernel_types(
    formula: Any,
    parameters: tuple[Operand, ...],
    constant_types: tuple[type, ...],
    results: tuple[Operand, ...],
    pointers: tuple[tuple[str, ...], tuple[str, ...]],
    itemsize: int,
    narrowest: int,
    asserting: bool,
) -> KernelTypes:
    """Return the object for these parameters."""
    return KernelTypes(formula, parameters, results, pointers, itemsize, narrowest, asserting)


@dataclass(frozen=True)
class Typed:
    """The dtypes of a call, and the role of each argument, whatever its shapes."""

    common: torch.dtype
    compute: torch.dtype
    results: tuple[torch.dtype, ...]
    operands: tuple[Argument, ...]
    limits: tuple[tuple[int, Limits], ...]
    with_numbers: bool
    kernel: KernelTypes
    # The types of a program's numbers.
    number_types: tuple[type, ...] = ()


@functools.lru_cache(maxsize=VARIANTS)
def types_of(
    formula: Formula,
    kinds: tuple[Kind, ...],
    out_dtypes: tuple[torch.dtype, ...],
    default: torch.dtype,
) -> Typed:
    """Return the dtypes of a call and the kernel's operands, from the kinds of its arguments."""
    common, compute, results = promoted(formula, kinds, default, out_dtypes)
    operands: list[Argument] = []
    types: list[str] = []
    parameters: list[Operand] = []
    limits: list[tuple[int, Limits]] = []
    itemsizes = [dtype.itemsize for dtype in out_dtypes or results]
    indices = 0
    for i, (kind, (name, role)) in enumerate(zip(kinds, formula.parameters.items(), strict=True)):
        if isinstance(kind, ConstantKind):
            parameters.append(Operand(None, None, kind.value))
            continue
        if isinstance(kind, ComponentsKind):
            pointer = kind.dtype is not None
            position = len(operands)
            if kind.dtype is not None:
                operands.append(Argument(i, "pointer"))
                types.append("*" + dtypes.TRITON_NAMES[kind.dtype])
                itemsizes.append(kind.dtype.itemsize)
            if role == "index":
                # Coordinates are no arguments of a launch. Their strides come after those of all operands.
                components = tuple(range(~indices, ~indices - kind.length, -1))
                indices += kind.length
            else:
                components = tuple(range(len(operands), len(operands) + kind.length))
                operands += [Argument(i, "stride" if pointer else "integer", k) for k in range(kind.length)]
                types += ["i64"] * kind.length
            component_kinds = (None,) * kind.length
            parameters.append(
                Operand(
                    position, () if pointer else None, tl.int64, None, role, components, component_kinds, kind.is_tuple
                )
            )
            continue
        target = _arrives_as(kind, role, compute)
        truncated = formula.truncates and kind is float and not target.is_floating_point
        if truncated:
            # The conversion to the result's dtype cuts off the fraction.
            target = torch.float64
        if isinstance(kind, TensorKind) and not kind.item:
            # ATen rounds values that fp16 or bf16 does not hold to that dtype, before it computes in float32.
            rounds = role == "promoted" and target is not common and kind.dtype not in (common, *_EXACT_IN_16_BITS)
            via = TRITON_DTYPES[common] if rounds and common.itemsize == 2 and common.is_floating_point else None
            parameters.append(Operand(len(operands), (), TRITON_DTYPES[target], via))
            operands.append(Argument(i, "tensor"))
            types.append("*" + dtypes.TRITON_NAMES[kind.dtype])
            itemsizes.append(kind.dtype.itemsize)
            continue
        # A compared number is rounded to the common dtype.
        narrow = common.is_floating_point and common.itemsize == 2 and formula.promote is dtypes.Promotion.ALWAYS_BOOL
        via = TRITON_DTYPES[common] if narrow else None
        parameters.append(Operand(len(operands), None, TRITON_DTYPES[target], via))
        operands.append(Argument(i, "item" if isinstance(kind, TensorKind) else "number"))
        types.append("fp64" if target.is_floating_point else "i64")
        # ATen promotes a 0-d tensor, and lets it overflow.
        if not isinstance(kind, TensorKind) or role == "cast":
            held = _limits(kind, name, target, common, truncated)
            limits += [] if held is None else [(i, held)]
    for dtype in out_dtypes:
        if dtype not in dtypes.TRITON_NAMES:
            raise Decline(f"output of dtype {dtype}")
    deciding = sum(
        role == "promoted" and not isinstance(kind, ConstantKind)
        for kind, role in zip(kinds, formula.parameters.values(), strict=True)
    )
    parameters = [
        own._replace(components=tuple([len(operands) + ~component for component in own.components]))
        if own.role == "index"
        else own
        for own in parameters
    ]
    kernel = kernel_types(
        formula.formula,
        tuple(parameters),
        tuple([type(own.dtype) for own in parameters]),
        tuple([Operand(j, (), TRITON_DTYPES[dtype]) for j, dtype in enumerate(results)]),
        (tuple(types), tuple(["*" + dtypes.TRITON_NAMES[dtype] for dtype in out_dtypes or results])),
        max(itemsizes),
        min(itemsizes),
        formula.asserting,
    )
    in_memory = sum(how == "tensor" for _, how, _ in operands)
    return Typed(common, compute, results, tuple(operands), tuple(limits), in_memory < deciding, kernel)


def _limits(kind: Kind, name: str, target: torch.dtype, common: torch.dtype, truncated: bool) -> Limits | None:
    """Return the limits of a number to be converted to `target`, or None. Raises Decline as ATen refuses types."""
    if kind is float and not target.is_floating_point:
        raise Decline("floating-point number for integer tensors")
    if kind is bool and name == "alpha" and common is not torch.bool:
        raise Decline(f"bool alpha for tensors of {common}")
    if kind is bool:
        # Any 64-bit integer holds a bool.
        return None
    # ATen converts numbers to the common dtype or to the compute dtype.
    holds = limits_of(target if common is torch.bool else common)
    largest = limits_of(common if common.is_floating_point else target).largest
    # ATen negates alpha in sub.
    low = -holds.high if name == "alpha" else holds.low
    if truncated and common is not torch.bool:
        # ATen refuses nan and values out of range.
        largest = min(float(holds.high), _LARGEST_IN_64_BITS)
        holds = holds._replace(finite=True, least=max(float(holds.low), -largest))
    return holds._replace(low=low, largest=largest)


def _arrives_as(kind: TensorKind | type, role: str, compute: torch.dtype) -> torch.dtype:
    """Return the dtype in which a formula sees a tensor or a number."""
    if role == "exact":
        return torch.float64 if kind is float or compute.is_floating_point else torch.int64
    if role != "own":
        return compute
    if isinstance(kind, TensorKind):
        return dtypes.opmath(kind.dtype)
    if kind is float:
        return torch.float64 if compute is torch.float64 else torch.float32
    return torch.bool if kind is bool else torch.int64
