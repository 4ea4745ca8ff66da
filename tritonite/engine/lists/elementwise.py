"""A scalar formula over lists of tensors, from the arguments of a call to its launches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, TRITON_NAMES
from tritonite.engine.iteration import (
    common_device,
    contiguous_strides,
    is_dense,
    never_overlaps_itself,
    same_strides,
    shares_written_memory,
    span,
)
from tritonite.engine.lists.kernels import ListLayout, ListOperand, elementwise_list
from tritonite.engine.lists.table import Table, choose_blocks
from tritonite.engine.pointwise.declare import Pointwise
from tritonite.engine.pointwise.layout import VARIANTS
from tritonite.engine.pointwise.promotion import ConstantKind, Kind, TensorKind, Typed, types_of
from tritonite.errors import Decline
from tritonite.runtime import contract
from tritonite.runtime.contract import empty_strided
from tritonite.runtime.launch import ASSERTING, Launch, Specialization, flatten
from tritonite.runtime.symbols import number_type

# Triton's names of its types in signatures.
_TYPE_NAMES = {TRITON_DTYPES[dtype]: name for dtype, name in TRITON_NAMES.items()}
# The most blocks of a program.
_MOST_STEPS = 4


class Numbers(list[Any]):
    """A number for each tensor of a list."""


class Elements(list[torch.Tensor]):
    """A tensor for each tensor of a list, of which the first element alone is read, such as a step count."""


class _Kind(NamedTuple):
    """Facts that the tensors of one launch have in common.

    Attributes:
        roles: how each argument of the formula is read, as `ListOperand.kind` names it.
        arguments: the kinds of the arguments, for promotion.
        outs: the dtypes of given outputs.
        aligned: whether all addresses are multiples of 16 bytes.
    """

    roles: tuple[str, ...]
    arguments: tuple[Kind, ...]
    outs: tuple[torch.dtype, ...]
    aligned: bool


class _Item(NamedTuple):
    """One tensor of each list: its number, the formula's arguments, its given outputs, and the arguments' roles."""

    number: int
    values: tuple[Any, ...]
    outs: tuple[torch.Tensor, ...]
    roles: tuple[str, ...]

    def tensors(self) -> list[torch.Tensor]:
        """Return the arguments that are read element by element."""
        return [value for value, role in zip(self.values, self.roles, strict=True) if role == "tensors"]

    def elements(self) -> list[torch.Tensor]:
        """Return the arguments of which the first element alone is read."""
        return [value for value, role in zip(self.values, self.roles, strict=True) if role == "elements"]


def apply(
    kernel: Pointwise,
    values: Sequence[Any],
    outs: Sequence[Sequence[torch.Tensor]] = (),
    prepare: Callable[..., Sequence[Any]] | None = None,
) -> list[list[torch.Tensor]]:
    """Evaluate a formula for each tensor of the lists, and return a list of tensors for each result.

    Args:
        kernel: the formula, with its promotion.
        values: the arguments: lists of tensors, `Elements`, `Numbers`, a tensor of one element, a number or None for
            all tensors. All lists have the same length.
        outs: a list of tensors to write for each result, or none, to allocate them.
        prepare: a function from the arguments for one tensor to the formula's; may raise Decline.

    Raises Decline before anything is written.
    """
    lists = [value for value in values if isinstance(value, (list, tuple))]
    count = len(lists[0])
    if any([len(own) != count for own in (*lists, *outs)]):
        raise Decline(f"lists of {', '.join(str(len(own)) for own in (*lists, *outs))} tensors")
    if not count:
        raise Decline("lists without tensors")
    tensors = [x for own in lists if not isinstance(own, Numbers) for x in own]
    singles = [value for value in values if isinstance(value, torch.Tensor)]
    device, _ = common_device((*tensors, *singles), [x for own in outs for x in own])
    elements = {id(x) for own in lists if isinstance(own, Elements) for x in own}
    shared = {id(x) for x in singles}
    items = []
    for i in range(count):
        given = [value[i] if isinstance(value, (list, tuple)) else value for value in values]
        own = [value[i] for value in values if isinstance(value, Numbers)]
        called = tuple(prepare(*given) if prepare else given)
        # The call's argument at each position, if `prepare` has left it there.
        sources = [values[j] if j < len(given) and value is given[j] else None for j, value in enumerate(called)]
        roles = tuple(
            [
                "constant" if value is None or role == "static" else _role(value, source, shared, elements, own)
                for value, source, role in zip(called, sources, kernel.parameters.values(), strict=True)
            ]
        )
        items.append(_Item(i, called, tuple([out[i] for out in outs]), roles))
    singles = [x for x in singles if x.device == device]
    if outs and _overlap(items, singles):
        raise Decline("an output shares memory with another tensor of the lists")
    groups: dict[_Kind, list[_Item]] = {}
    alone: list[_Item] = []
    for item in items:
        kind = _kind_of(item)
        if kind is None:
            alone.append(item)
        else:
            groups.setdefault(kind, []).append(item)
    alone += [member for members in groups.values() if len(members) == 1 for member in members]
    prepared = []
    for kind, members in groups.items():
        if len(members) > 1:
            typed = types_of(kernel, kind.arguments, kind.outs, torch.get_default_dtype())
            _check(kernel, typed, members)
            prepared.append((kind, typed, members))
    for item in alone:
        kernel.check(item.values, _without_overlap(item.outs))
    results: list[tuple[torch.Tensor, ...]] = [item.outs for item in items]
    for kind, typed, members in prepared:
        for member in members:
            if not outs:
                results[member.number] = _allocated(kernel, typed, member, device)
        _launch(typed, members, [results[member.number] for member in members], kind, device)
    for item in alone:
        found = kernel.run(item.values, _without_overlap(item.outs))
        results[item.number] = item.outs or found
    return [list(column) for column in zip(*results, strict=True)]


def _without_overlap(outs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the outputs, with row-major strides where there are no elements and strides would overlap."""
    return tuple(
        [
            x
            if x.numel() or never_overlaps_itself(x.shape, x.stride())
            else x.as_strided(x.shape, contiguous_strides(x.shape))
            for x in outs
        ]
    )


def _role(value: Any, source: Any, shared: set[int], elements: set[int], numbers: Sequence[Any]) -> str:
    """Return the kind of a formula's argument, as `ListOperand` names it.

    Args:
        source: the argument of the call that has the value or is the value; None if `prepare` made or moved the value.
        shared, elements: the ids of tensors for all tensors and of `Elements`.
        numbers: the numbers of the tensor.
    """
    if isinstance(value, torch.Tensor):
        return "tensor" if id(value) in shared else "elements" if id(value) in elements else "tensors"
    if source is not None:
        return "numbers" if isinstance(source, Numbers) else "number"
    return "numbers" if any([value is number for number in numbers]) else "number"


def _kind_of(item: _Item) -> _Kind | None:
    """Return the kind of a tensor's launch, or None for a tensor without elements, or that is not read in order."""
    kinds: list[Kind] = []
    # Tensors of one dtype promote alike with and without dimensions, and can share a launch.
    several = len({value.dtype for value in item.values if isinstance(value, torch.Tensor)}) > 1
    for value, role in zip(item.values, item.roles, strict=True):
        if role == "tensors":
            kinds.append(TensorKind(value.dtype, several and not value.dim(), False))
        elif role == "elements":
            kinds.append(TensorKind(value.dtype, several, False))
        elif role == "tensor":
            item_of_host = value.device.type != devices.current.type
            kinds.append(TensorKind(value.dtype, not value.dim() and (several or item_of_host), item_of_host))
        elif role == "constant":
            kinds.append(ConstantKind(type(value), value))
        else:
            kinds.append(number_type(value))
    dense = [*item.tensors(), *item.outs]
    first = dense[0]
    if any([x.device.type != devices.current.type for x in (*item.tensors(), *item.elements())]):
        return None
    if not first.numel() or not (first.is_contiguous() or is_dense(first.shape, first.stride())):
        return None
    if not all([x.shape == first.shape and same_strides(x.shape, x.stride(), first.stride()) for x in dense]):
        return None
    aligned = all([x.data_ptr() % 16 == 0 for x in dense])
    return _Kind(item.roles, tuple(kinds), tuple([out.dtype for out in item.outs]), aligned)


def _check(kernel: Pointwise, typed: Typed, members: Sequence[_Item]) -> None:
    """Decline outputs of other dtypes than the results, and numbers outside the dtypes' ranges."""
    first = members[0]
    if first.outs:
        kernel.check_dtypes(first.outs, typed.results, first.tensors())
    for position, limits in typed.limits:
        for member in members if first.roles[position] == "numbers" else members[:1]:
            contract.limit(member.values[position], limits)


def _allocated(kernel: Pointwise, typed: Typed, member: _Item, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Allocate the results of one tensor, with the strides that ATen gives them."""
    tensors = member.tensors()
    shape = tensors[0].shape
    row_major = contiguous_strides(shape)
    if all([x.stride() == row_major for x in tensors]):
        return tuple([empty_strided(shape, row_major, dtype, device) for dtype in typed.results])
    _, fresh = kernel.outputs(member.values)
    return tuple([empty_strided(own.shape, own.strides, own.dtype, device) for own in fresh])


def _overlap(items: Sequence[_Item], singles: Sequence[torch.Tensor]) -> bool:
    """Return whether an output shares memory with anything but the tensors at its own index that start where it does.

    ATen computes the tensors of such lists one after the other, and one launch would not.
    """
    spans: dict[tuple[int, int, int], bool] = {}
    for index, values, outs, _ in items:
        for written, tensors in ((False, values), (True, outs)):
            for x in tensors:
                if isinstance(x, torch.Tensor) and x.numel() and not any([x is one for one in singles]):
                    start = x.data_ptr()
                    key = (start, start + span(x.shape, x.stride()) * x.itemsize, index)
                    spans[key] = spans.get(key, False) or written
    for x in singles:
        spans[x.data_ptr(), x.data_ptr() + x.itemsize, -1] = False
    return shares_written_memory([(start, stop, written) for (start, stop, _), written in spans.items()])


def _launch(
    typed: Typed,
    members: Sequence[_Item],
    results: Sequence[tuple[torch.Tensor, ...]],
    kind: _Kind,
    device: torch.device,
) -> None:
    """Write the table of a group, and launch its formula."""
    sizes = [own[0].numel() for own in results]
    itemsize = max([x.itemsize for x in (*members[0].tensors(), *results[0])])
    largest = min(2048, devices.current.flat_bytes // max(itemsize, 2))
    block, steps = choose_blocks(largest, sizes, _MOST_STEPS)
    table = Table(sizes, block * steps)
    operands: list[Any] = []
    parameters, number_rows = [], []
    rows: dict[int, int] = {}
    in_tensors = {argument.position for argument in typed.operands if argument.how == "item"}
    for i, (role, own) in enumerate(zip(kind.roles, typed.kernel.parameters, strict=True)):
        column = [member.values[i] for member in members]
        wide = None if own.position is None else tl.float64 if own.dtype.is_floating() else tl.int64
        if wide is None:
            parameter = ListOperand("constant", None, None, own.dtype)
        elif role in ("tensors", "elements"):
            rows[i] = table.add_tensors(column)
            parameter = ListOperand(role, rows[i], TRITON_DTYPES[column[0].dtype], own.dtype, own.via)
        elif role == "numbers":
            # Numbers come after all addresses, so that one launch writes those.
            number_rows.append((i, column))
            parameter = ListOperand(role, None, wide, own.dtype, own.via)
        else:
            value, memory = column[0], wide
            if i in in_tensors:
                value = contract.number_in(value)
            elif role == "tensor":
                memory = TRITON_DTYPES[value.dtype]
            parameter = ListOperand("number" if i in in_tensors else role, len(operands), memory, own.dtype, own.via)
            operands.append(int(value) if type(value) is bool else value)
        parameters.append(parameter)
    returned = []
    for j, own in enumerate(typed.kernel.results):
        column = [one[j] for one in results]
        # In place, the row of the argument that is written.
        row = next((row for i, row in rows.items() if _is_column(members, i, column)), None)
        row = table.add_tensors(column) if row is None else row
        returned.append(ListOperand("tensors", row, TRITON_DTYPES[column[0].dtype], own.dtype))
    for i, numbers in number_rows:
        row = table.add_numbers(numbers, parameters[i].memory.is_floating())
        parameters[i] = replace(parameters[i], position=row)
    layout = ListLayout(tuple(parameters), tuple(returned), kind.aligned)
    variant = _variant(typed.kernel.formula, layout, block, typed.kernel.asserting)
    specialization = variant.over((table.count, table.search_steps, steps), table.programs)
    Launch(specialization, device)(operands, (table.write(device),))


def _is_column(members: Sequence[_Item], i: int, column: Sequence[torch.Tensor]) -> bool:
    """Return whether argument `i` of each tensor is that of `column`."""
    return all([member.values[i] is x for member, x in zip(members, column, strict=True)])


@functools.lru_cache(maxsize=VARIANTS)
def _variant(formula: Any, layout: ListLayout, block: int, asserting: bool) -> Specialization:
    """Return the kernel of a formula for all lists of a layout, whatever their lengths and sizes."""
    device = devices.current
    kinds = tuple(
        [
            f"*{_TYPE_NAMES[own.memory]}" if own.kind == "tensor" else _TYPE_NAMES[own.memory]
            for own in layout.parameters
            if own.kind in ("number", "tensor")
        ]
    )
    signature: dict[str, Any] = {
        "fn": "constexpr",
        "operands": kinds,
        "tables": ("*i64",),
        "count": "i32",
        "search_steps": "i32",
        "steps": "i32",
        "LAYOUT": "constexpr",
        "BLOCK": "constexpr",
    }
    names = list(signature)
    constants = {"LAYOUT": layout, "BLOCK": block}
    return Specialization(
        kernel=elementwise_list,
        signature=signature,
        constants={(0,): formula, **{(names.index(name),): value for name, value in constants.items()}},
        attributes={(2, 0): [["tt.divisibility", 16]]},
        leading=(formula,),
        trailing=tuple(constants.values()),
        # A thread has 16 bytes of each list of floats. More would take the registers of other programs.
        options={"num_warps": device.num_warps * (2 if block >= 1024 else 1), **device.options}
        | (ASSERTING if asserting else {}),
        types=tuple(flatten(tuple(signature.values()), tuple(signature.values()))),
    )
