"""Pointwise operators over any shapes and strides: one pair of kernels for every formula."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices, dtypes
from tritonite.dispatch import call
from tritonite.dispatch.call import Limits, empty_strided, limits_of, number_type
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.iteration import (
    INT32_LIMIT,
    broadcast_shape,
    collapse,
    common_device,
    contiguous_strides,
    expand_strides,
    never_overlaps_itself,
    output_strides,
    power_of_2,
    same_strides,
    span,
    strides_after_conversion,
)
from tritonite.errors import Decline
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.places import by_inverse
from tritonite.launch import ASSERTING, Launch, Specialization, flatten
from tritonite.locks import brief

_ITERATIONS_PER_OPERATOR = 1024
_LARGEST_IN_64_BITS = math.nextafter(2.0**63, 0.0)
# Dtypes whose numbers every half type holds.
_HELD_BY_HALVES = (torch.bool, torch.uint8, torch.int8)
_VARIANTS = 8192


class Placed(NamedTuple):
    """An operand that the formula reads at places of its own along `dims`, and elsewhere at the result's.

    In its other dimensions it has the result's size, or 1. The formula reads it by `language.places.read_at`.
    """

    tensor: torch.Tensor
    dims: tuple[int, ...]


class Operand(NamedTuple):
    """How the kernels treat a parameter of the formula, or one of its results.

    `kinds` holds a stride kind for each dimension, fastest first: 0 broadcast, 1 unit stride, 2 a stride known at run
    time. It is None for a number, and `position` is None for a compile-time constant, whose value is `dtype`. What is
    read is converted to `through` first, if that is set, and then to `dtype`.

    `role` is "index" for coordinates, "integers" for numbers of the index's type, "pointer" for an operand that the
    formula reads itself, and "" for all others. Of the first two `several` are a tuple in the formula, of the positions
    `parts`; of a pointer those are the positions of its strides along the dimensions that it is placed in, whose kinds
    are `placed`.
    """

    position: Any
    kinds: tuple[int, ...] | None
    dtype: Any
    through: Any = None
    role: str = ""
    parts: tuple[int, ...] = ()
    placed: tuple[Any, ...] = ()
    several: bool = False


@dataclass(frozen=True)
class Layout:
    """Everything of an iteration space that a kernel is compiled for."""

    parameters: tuple[Operand, ...]
    results: tuple[Operand, ...]
    column_mask: bool = True
    row_mask: bool = False
    flat: bool = True


@triton.constexpr_function
def _count(layout, results):
    return len(layout.results if results else layout.parameters)


@triton.constexpr_function
def _position(layout, i):
    return layout.parameters[i].position


@triton.constexpr_function
def _dtype(layout, results, i):
    return (layout.results if results else layout.parameters)[i].dtype


@triton.constexpr_function
def _through(layout, i):
    own = layout.parameters[i]
    return own.dtype if own.through is None else own.through


@triton.constexpr_function
def _slot(layout, i):
    return tl.float64 if layout.parameters[i].dtype.is_floating() else tl.int64


@triton.constexpr_function
def _kinds(layout, results, i):
    return (layout.results if results else layout.parameters)[i].kinds


@triton.constexpr_function
def _role(layout, i):
    return layout.parameters[i].role


@triton.constexpr_function
def _several(layout, i):
    return layout.parameters[i].several


@triton.constexpr_function
def _part(layout, i, k):
    return layout.parameters[i].parts[k]


@triton.constexpr_function
def _part_count(layout, i):
    return len(layout.parameters[i].parts)


@triton.constexpr_function
def _placed(layout, i, k):
    return layout.parameters[i].placed[k]


@triton.constexpr_function
def _apart(layout):
    # Whether along the fastest dimension elements of some operand are apart, and none are next to each other elsewhere.
    every = [own.kinds for own in (*layout.parameters, *layout.results) if own.kinds]
    across = not layout.flat and any([kinds[1] == 1 for kinds in every])
    return not across and any([kinds[0] == 2 for kinds in every])


@triton.constexpr_function
def _masks(layout, kinds, masked):
    # 0 for no mask, 1 for the columns', 2 for the rows', 3 for both.
    if layout.flat:
        return int(masked and any(kinds))
    return int(layout.column_mask and kinds[0] != 0) + 2 * int(layout.row_mask and kinds[1] != 0)


@triton.jit
def _offset(index, strides, origin, KINDS: tl.constexpr):
    offset = origin
    for d in tl.static_range(len(KINDS)):
        if KINDS[d] == 1:
            offset = offset + index[d]
        elif KINDS[d] == 2:
            offset = offset + index[d] * strides[d]
    return offset


@triton.jit
def _unravel(linear, sizes, inverses):
    """The coordinates of places in a space of these sizes, fastest first, that is laid flat.

    By `inverses`, where there are any, which `_inverse` made: the device has no division of integers.
    """
    index = ()
    rest = linear
    for d in tl.static_range(len(sizes) - 1):
        if len(inverses) == 0:
            outer = rest // sizes[d]
        else:
            factor, shift = inverses[d][0].to(tl.uint32), inverses[d][1].to(tl.uint32)
            outer = by_inverse(rest.to(tl.uint32), factor, shift).to(rest.dtype)
        index = index + (rest - outer * sizes[d],)
        rest = outer
    return index + (rest,)


@triton.jit
def _load(pointers, column_mask, row_mask, MASKS: tl.constexpr):
    if MASKS == 0:
        value = tl.load(pointers)
    elif MASKS == 1:
        value = tl.load(pointers, mask=column_mask, other=0)
    elif MASKS == 2:
        value = tl.load(pointers, mask=row_mask, other=0)
    else:
        value = tl.load(pointers, mask=column_mask & row_mask, other=0)
    return value


@triton.jit
def _store(pointers, value, column_mask, row_mask, MASKS: tl.constexpr):
    if MASKS == 0:
        tl.store(pointers, value)
    elif MASKS == 1:
        tl.store(pointers, value, mask=column_mask)
    elif MASKS == 2:
        tl.store(pointers, value, mask=row_mask)
    else:
        tl.store(pointers, value, mask=column_mask & row_mask)


@triton.jit
def _coordinates(index, strides, origin, LAYOUT: tl.constexpr, PARAMETER: tl.constexpr):
    """The coordinates of a block's elements along the dimensions that a parameter names."""
    found = ()
    for k in tl.static_range(_part_count(LAYOUT, PARAMETER)):
        own = _offset(index, strides[_part(LAYOUT, PARAMETER, k)], origin, _placed(LAYOUT, PARAMETER, k))
        found = found + (own,)
    return found


@triton.jit
def _integers(operands, origin, LAYOUT: tl.constexpr, PARAMETER: tl.constexpr):
    """The numbers of a parameter, or the strides of a pointer, in the type of indices."""
    found = ()
    for k in tl.static_range(_part_count(LAYOUT, PARAMETER)):
        if _placed(LAYOUT, PARAMETER, k) == 1:
            found = found + (1,)
        else:
            found = found + (operands[_part(LAYOUT, PARAMETER, k)].to(origin.dtype),)
    return found


def _merge(values: Any, layout: Layout, constant: Any = lambda value: value) -> list[Any]:
    remaining = iter(values)
    return [constant(own.dtype) if own.position is None else next(remaining) for own in layout.parameters]


@tl.core.builtin
def _merge_in_compiler(values, layout, _semantic=None):
    return tl.tuple(_merge(values, layout.value, tl.constexpr))


# Only in the call of the formula do constants join the values: a tuple assigned to a name cannot hold None or a string.
_with_constants = _merge if devices.current.interpreted else _merge_in_compiler


@triton.jit
def _evaluate(
    fn: tl.constexpr,
    operands,
    outs,
    strides,
    out_strides,
    index,
    origin,
    column_mask,
    row_mask,
    LAYOUT: tl.constexpr,
    MASKED: tl.constexpr,
):
    values = ()
    for i in tl.static_range(_count(LAYOUT, False)):
        if _role(LAYOUT, i) == "index" or _role(LAYOUT, i) == "integers":
            if _role(LAYOUT, i) == "index":
                several = _coordinates(index, strides, origin, LAYOUT, i)
            else:
                several = _integers(operands, origin, LAYOUT, i)
            if _several(LAYOUT, i):
                values = values + (several,)
            else:
                values = values + (several[0],)
        elif _role(LAYOUT, i) == "pointer":
            offset = _offset(index, strides[_position(LAYOUT, i)], origin, _kinds(LAYOUT, False, i))
            within = column_mask & row_mask
            own = operands[_position(LAYOUT, i)] + tl.broadcast_to(offset, within.shape)
            values = values + ((own, within, _integers(operands, origin, LAYOUT, i)),)
        elif _position(LAYOUT, i) is not None and _kinds(LAYOUT, False, i) is None:
            number = tl.full(origin.shape, operands[_position(LAYOUT, i)], _slot(LAYOUT, i))
            values = values + (number.to(_through(LAYOUT, i)).to(_dtype(LAYOUT, False, i)),)
        elif _position(LAYOUT, i) is not None:
            offset = _offset(index, strides[_position(LAYOUT, i)], origin, _kinds(LAYOUT, False, i))
            value = _load(
                operands[_position(LAYOUT, i)] + offset,
                column_mask,
                row_mask,
                _masks(LAYOUT, _kinds(LAYOUT, False, i), MASKED),
            )
            values = values + (value.to(_through(LAYOUT, i)).to(_dtype(LAYOUT, False, i)),)
    results = fn(*_with_constants(values, LAYOUT))
    if _count(LAYOUT, True) == 1:
        results = (results,)
    for i in tl.static_range(_count(LAYOUT, True)):
        offset = _offset(index, out_strides[i], origin, _kinds(LAYOUT, True, i))
        value = results[i].to(_dtype(LAYOUT, True, i)).to(outs[i].dtype.element_ty)
        _store(
            outs[i] + offset,
            tl.broadcast_to(value, offset.shape),
            column_mask,
            row_mask,
            _masks(LAYOUT, _kinds(LAYOUT, True, i), MASKED),
        )


@triton.jit
def elementwise_flat(
    fn: tl.constexpr,
    operands,
    outs,
    strides,
    out_strides,
    shape,
    inverses,
    n,
    LAYOUT: tl.constexpr,
    INDEX: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes BLOCK elements of the iteration space, `shape` (fastest dimension first) laid flat.

    MASK: 0 where BLOCK divides n, 1 for a mask on every block, 2 for a mask on the last block alone.
    """
    wait_for_previous_launch()
    start = tl.program_id(0).to(INDEX) * BLOCK
    linear = start + tl.arange(0, BLOCK)
    if _apart(LAYOUT):
        # As wide as the result is stored, neighbouring threads would read every element from another cache line.
        linear = tl.max_contiguous(linear, 1)
    index = _unravel(linear, shape, inverses)
    origin = tl.zeros((1,), INDEX)
    mask = linear < n
    if MASK == 2:
        if start + BLOCK <= n:
            _evaluate(fn, operands, outs, strides, out_strides, index, origin, mask, mask, LAYOUT, False)
        else:
            _evaluate(fn, operands, outs, strides, out_strides, index, origin, mask, mask, LAYOUT, True)
    else:
        _evaluate(fn, operands, outs, strides, out_strides, index, origin, mask, mask, LAYOUT, MASK == 1)


@triton.jit
def elementwise_tile(
    fn: tl.constexpr,
    operands,
    outs,
    strides,
    out_strides,
    shape,
    inverses,
    tiles,
    LAYOUT: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program takes a (ROWS, COLUMNS) tile of dimensions 1 and 0 of `shape`, at one index of the others.

    `tiles` are how many there are along each dimension.
    """
    wait_for_previous_launch()
    place = _unravel(tl.program_id(0), tiles, inverses)
    column = place[0].to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = place[1].to(INDEX) * ROWS + tl.arange(0, ROWS)[:, None]
    if _apart(LAYOUT):
        column = tl.max_contiguous(column, (1, 1))
    index = (column, row)
    for d in tl.static_range(2, len(shape)):
        index = index + (place[d].to(INDEX),)
    origin = tl.zeros((1, 1), INDEX)
    _evaluate(fn, operands, outs, strides, out_strides, index, origin, column < shape[0], row < shape[1], LAYOUT, False)


class Fresh(NamedTuple):
    """The metadata of an output to allocate."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Iteration:
    """What a call with one key does: allocate outputs, then launch. Holds no tensors."""

    __slots__ = ("device", "extents", "fresh", "items", "launch", "limits", "operands", "specialization", "summary")

    def __init__(self) -> None:
        self.fresh: tuple[Fresh, ...] = ()
        self.device: torch.device
        self.launch: Launch | None = None
        self.specialization: Specialization | None = None
        self.operands: tuple[tuple[int, str, int], ...] = ()
        self.items: tuple[int, ...] = ()
        self.limits: tuple[tuple[int, Limits], ...] = ()
        self.extents: tuple[tuple[int, int, int, int, bool, tuple[tuple[int, int, int], ...]], ...] = ()
        self.summary: dict[str, Any] = {}


class Pointwise:
    """A tensor operator made of a scalar formula.

    Args:
        formula: a `triton.jit` function from values to a value or a tuple of them. Values arrive in the dtype the
            promotion computes in, so half types arrive as float32.
        parameters: the role of each of its parameters: "promoted" (a tensor or number that takes part in promotion),
            "cast" (one that does not and is cast to the dtype computed in), "own" (one that keeps its own dtype, half
            types becoming float32), "exact" (a number in float64, or int64 where it and the outputs are integers),
            "static" (a compile-time constant). None is always a compile-time constant. Or it is no operand in step with
            the result: "index" (dimensions of the result, one or a tuple: it arrives as the coordinate of the element
            in each), "integers" (one number or a tuple: they arrive in the type of coordinates), "pointer" (a `Placed`
            operand). The dimensions and integers of a call are pinned.
        promote: how the promoted arguments decide the dtype of every output. Where none is promoted, outputs have to be
            given, and each has its own.
        accepts: the common dtypes it serves; ATen serves the others.
        output_dtypes: a dtype for each output that does not follow the promotion; None for one that does.
        methods: instead of `promote`, for each output, the positions of the arguments that decide its dtype, and how.
        contiguous: fresh outputs are contiguous, whatever the layout of the arguments.
        one_dtype: tensors of several dtypes are not promoted but declined.
        cpu_numbers: a 0-d tensor on the CPU may stand beside tensors on another device.
        casts: flags may be written to an output of any dtype, and floats in place to one of a narrower dtype.
        truncates: a number that is cast to integers may be a float, whose fraction is cut off.
        asserting: the formula has assertions, which stop the program.
    """

    def __init__(
        self,
        name: str,
        formula: Any,
        parameters: dict[str, str],
        *,
        promote: dtypes.Promotion = dtypes.Promotion.DEFAULT,
        accepts: tuple[torch.dtype, ...] = dtypes.ALL,
        output_dtypes: tuple[torch.dtype | None, ...] = (None,),
        methods: tuple[tuple[tuple[int, ...], dtypes.Promotion], ...] | None = None,
        contiguous: bool = False,
        one_dtype: bool = False,
        cpu_numbers: bool = False,
        casts: bool = False,
        truncates: bool = False,
        asserting: bool = False,
    ) -> None:
        self.name = name
        self.formula = formula
        self.parameters = parameters
        self.accepts = accepts
        self.output_dtypes = output_dtypes
        self.promote = promote
        self._contiguous = contiguous
        self.asserting, self.truncates = asserting, truncates
        self._one_dtype, self._cpu_numbers, self._casts = one_dtype, cpu_numbers, casts
        self._roles = tuple(parameters.values())
        self._placed = not {"index", "pointer"}.isdisjoint(self._roles)
        deciding = tuple(i for i, role in enumerate(self._roles) if role == "promoted")
        self._methods = methods or ((deciding, promote),) * len(output_dtypes)
        self._iterations: dict[tuple[object, ...], Iteration | str] = {}

    def run(self, values: Sequence[Any], outs: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
        """Compute the outputs, into `outs` where they are given. Raises Decline before it has written anything."""
        iteration = self.iteration(values, outs)
        if iteration.items:
            values = self._with_numbers(values, iteration.items)
        for position, limits in iteration.limits:
            call.limit(values[position], limits)
        if not outs:
            device = iteration.device
            outs = tuple([empty_strided(f.shape, f.strides, f.dtype, device) for f in iteration.fresh])
        elif iteration.extents:
            self._check_overlap(iteration, values, outs)
        recorder = call.recorder()
        if recorder is not None and recorder.dry:
            recorder.promotions.append(iteration.summary)
        if iteration.launch is not None:
            self._launch(iteration, values, outs)
        return tuple(outs)

    def iteration(self, values: Sequence[Any], outs: Sequence[torch.Tensor] = ()) -> Iteration:
        """The iteration for these arguments, from the cache where one like it has been made. Raises Decline."""
        if call.recorder() is not None:
            # What records keeps plans of its own.
            return self._ready(values, outs)
        key: list[object] = [torch.get_default_dtype()]
        for value, role in zip(values, self._roles, strict=True):
            if type(value) is Placed:
                key.append(value.dims)
                value = value.tensor
            if isinstance(value, torch.Tensor):
                key += (value.dtype, value.shape, value.stride(), value.data_ptr() & 15, value.device)
            elif role in ("static", "index", "integers") or value is None:
                key.append(value)
            else:
                key.append(type(value))
        for out in outs:
            key.append(any([out is value for value in values]))
            key += (out.dtype, out.shape, out.stride(), out.data_ptr() & 15, out.device)
        hashed = tuple(key)
        iteration = self._iterations.get(hashed)
        if iteration is None:
            try:
                iteration = self._ready(values, outs)
            except Decline as decline:
                if not decline.lasting:
                    raise
                iteration = decline.reason
            with brief:
                while len(self._iterations) >= _ITERATIONS_PER_OPERATOR:
                    self._iterations.pop(next(iter(self._iterations)))
                self._iterations[hashed] = iteration
        if isinstance(iteration, str):
            raise Decline(iteration)
        return iteration

    def _after_conversion(
        self, typed: _Typed, strided: dict[int, torch.Tensor]
    ) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Shapes and strides of operands, converted where the common dtype is another one."""
        integers = typed.common if self.promote is not dtypes.Promotion.INT_TO_FLOAT else typed.results[0]
        common = typed.common if typed.common.is_floating_point else integers
        return [
            (
                value.shape,
                value.stride()
                if value.dtype is common or self._roles[i] == "own"
                else strides_after_conversion(value.shape, value.stride()),
            )
            for i, value in strided.items()
        ]

    def _check_dtypes(
        self, outs: Sequence[torch.Tensor], results: Sequence[torch.dtype], operands: Sequence[torch.Tensor]
    ) -> None:
        for out, result in zip(outs, results, strict=True):
            # In place alone: into a wider output ATen computes in its dtype, and some overloads refuse any other.
            floats = result.is_floating_point and out.dtype.is_floating_point and any([out is x for x in operands])
            cast = self._casts and (floats or self.promote is dtypes.Promotion.ALWAYS_BOOL)
            if out.dtype not in dtypes.TRITON_NAMES or (out.dtype is not result and not cast):
                raise Decline(f"result {result} for an output {out.dtype}")

    @staticmethod
    def _check_overlap(iteration: Iteration, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> None:
        for written, position, written_bytes, read_bytes, identical, grains in iteration.extents:
            read = _tensor_of(values[position] if position >= 0 else outs[~position])
            a, b = outs[written].data_ptr(), read.data_ptr()
            if a == b and identical:
                continue
            # Interleaved, as real and imaginary parts are, or halves of rows, they share nothing.
            apart = any([own_read <= (a - b) % grain <= grain - own for grain, own, own_read in grains])
            if a < b + read_bytes and b < a + written_bytes and not apart:
                raise Decline("output overlaps an input")

    @staticmethod
    def _with_numbers(values: Sequence[Any], items: tuple[int, ...]) -> Sequence[Any]:
        """The values, with a number for each tensor among them that serves as one."""
        found = list(values)
        for i in items:
            found[i] = call.number_in(found[i])
        return found

    @staticmethod
    def _launch(iteration: Iteration, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> None:
        assert iteration.launch is not None
        operands = []
        for position, how, part in iteration.operands:
            value = values[position]
            if how == "pointer":
                value = value.tensor
            elif how == "stride":
                value = value.tensor.stride(value.dims[part])
            elif how == "integer":
                value = value[part] if type(value) is tuple else value
            operands.append(int(value) if type(value) is bool else value)
        iteration.launch(operands, outs)

    def _ready(self, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> Iteration:
        iteration = self._make_iteration(values, outs)
        if iteration.specialization is not None:
            iteration.launch = Launch(iteration.specialization, iteration.device)
        return iteration

    def promoted(
        self, kinds: Sequence[_Kind], default: torch.dtype, out_dtypes: Sequence[torch.dtype] = ()
    ) -> tuple[torch.dtype, torch.dtype, tuple[torch.dtype, ...]]:
        """(common dtype, dtype to compute in, dtypes of the results); the first output decides the first two."""
        for kind in kinds:
            if isinstance(kind, _Tensor) and kind.dtype not in dtypes.TRITON_NAMES:
                raise Decline(f"dtype {kind.dtype}")
            if isinstance(kind, type) and kind not in (bool, int, float):
                raise Decline(f"number of type {kind.__name__}")
        if self._one_dtype:
            typed = zip(kinds, self._roles, strict=True)
            if len({kind.dtype for kind, role in typed if isinstance(kind, _Tensor) and role != "own"}) > 1:
                raise Decline("tensors of several dtypes")
        commons = []
        for j, (positions, _) in enumerate(self._methods):
            if not positions:
                commons.append(out_dtypes[j])
                continue
            deciding = [kinds[i] for i in positions]
            among = [kind for kind in deciding if isinstance(kind, _Tensor)]
            commons.append(
                dtypes.common_dtype(
                    tuple(kind.dtype for kind in among if not kind.zero_dim),
                    tuple(kind.dtype for kind in among if kind.zero_dim),
                    tuple(kind for kind in deciding if isinstance(kind, type)),
                    default,
                )
            )
        if commons[0] not in self.accepts:
            raise Decline(f"dtype {commons[0]}")
        promoted = [
            dtypes.promote(kind, common, default) for common, (_, kind) in zip(commons, self._methods, strict=True)
        ]
        results = tuple(own or result for own, (_, result) in zip(self.output_dtypes, promoted, strict=True))
        return commons[0], promoted[0][0], results

    def outputs(
        self, values: Sequence[Any], outs: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.device, tuple[Fresh, ...]]:
        """The device, and the outputs to allocate, or none where `outs` are given. Raises Decline as a call would.

        Tensors are asked for metadata alone, so that they may be fake.
        """
        iteration, *_ = self._typed_iteration(values, outs)
        return iteration.device, iteration.fresh

    def _typed_iteration(
        self, values: Sequence[Any], outs: Sequence[torch.Tensor]
    ) -> tuple[Iteration, _Typed, dict[int, torch.Tensor], tuple[int, ...], bool]:
        """What metadata decides: an iteration without its kernel, its types, the operands in memory, the shape.

        And whether all are contiguous and of that shape.
        """
        iteration = Iteration()
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        placed = [value.tensor for value in values if type(value) is Placed]
        iteration.device, scalars = common_device((*tensors, *placed), outs)
        if scalars and (not self._cpu_numbers or len(scalars) > 1 or len(scalars) == len(tensors)):
            raise Decline("a tensor on the CPU")
        kinds: list[_Kind] = []
        strided: dict[int, torch.Tensor] = {}
        for i, (value, role) in enumerate(zip(values, self._roles, strict=True)):
            if isinstance(value, torch.Tensor):
                item = bool(scalars) and any([value is scalar for scalar in scalars])
                kinds.append(_Tensor(value.dtype, not value.dim(), item))
                if not item:
                    strided[i] = value
            elif type(value) is Placed:
                kinds.append(_Parts(value.tensor.dtype, len(value.dims), True))
            elif role in ("index", "integers"):
                several = type(value) is tuple
                kinds.append(_Parts(None, len(value) if several else 1, several))
            elif role == "static" or value is None:
                kinds.append(_Constant(type(value), value))
            else:
                kinds.append(number_type(value))
        typed = _typed(self, tuple(kinds), tuple([out.dtype for out in outs]), torch.get_default_dtype())
        iteration.operands, iteration.limits = typed.operands, typed.limits
        iteration.items = tuple([i for i, how, _ in typed.operands if how == "item"])
        every = [*strided.values(), *outs]
        shape = tuple(every[0].shape)
        row_major = contiguous_strides(shape)
        # Most calls: contiguous tensors of one shape. What follows gives them the same iteration, only later.
        plain = not scalars and all([value.shape == shape and value.stride() == row_major for value in every])
        if not plain:
            # Where no operand is read in step with the results, their shape is the one.
            shape = broadcast_shape([value.shape for value in tensors or outs])
        results = typed.results
        iteration.summary = {"common": typed.common, "compute": typed.compute, "results": results, "shape": shape}

        if outs:
            self._check_dtypes(outs, results, tensors)
            _check_outputs(outs, shape)
        else:
            if plain and (not typed.with_numbers or 1 not in shape):
                strides = row_major
            elif self._contiguous:
                strides = contiguous_strides(shape)
            else:
                layout = [(value.shape, value.stride()) for value in strided.values()]
                if iteration.device.type == "cpu":
                    layout = self._after_conversion(typed, strided)
                strides = output_strides(shape, layout, typed.with_numbers or bool(scalars))
            iteration.fresh = tuple([Fresh(shape, strides, dtype) for dtype in results])
        return iteration, typed, strided, shape, plain

    def _make_iteration(self, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> Iteration:
        iteration, typed, strided, shape, plain = self._typed_iteration(values, outs)
        if 0 in shape:
            return iteration
        placed = {i: value for i, value in enumerate(values) if type(value) is Placed}
        _check_placed(placed.values(), shape)
        read = strided | {i: value.tensor for i, value in placed.items()}
        iteration.extents = _extents(outs, shape, list(read.items()), frozenset(placed))

        out_strides = [out.stride() for out in outs] or [fresh.strides for fresh in iteration.fresh]
        n = math.prod(shape)
        if plain and n > 1 and not self._placed and all([own == contiguous_strides(shape) for own in out_strides]):
            flat = tuple([(1,) if how == "tensor" else () for _, how, _ in iteration.operands])
            space = _Space((n,), flat, ((1,),) * len(out_strides))
        else:
            indices = [d for i, role in enumerate(self._roles) if role == "index" for d in _as_tuple(values[i])]
            in_strides = [expand_strides(value.shape, value.stride(), shape) for value in strided.values()]
            in_strides += [_strides_in_step(own, shape) for own in placed.values()]
            in_strides += [_one_along(d, len(shape)) for d in indices]
            sizes, merged = collapse(shape, [list(own) for own in out_strides] + in_strides)
            own_strides = [tuple(own) for own in merged]
            outer, inner = len(out_strides), len(own_strides) - len(indices)
            of_value = dict(zip((*strided, *placed), own_strides[outer:inner], strict=True))
            space = _Space(
                tuple(sizes),
                tuple([of_value[i] if how in ("tensor", "pointer") else () for i, how, _ in iteration.operands]),
                # Of one element, so that a block of places is written as a block, of which the others are masked.
                ((1,),) * outer if n == 1 and self._placed else tuple(own_strides[:outer]),
                tuple(own_strides[inner:]),
            )
        aligned = (
            [_is_aligned(values[i], how, part) for i, how, part in iteration.operands],
            [out.data_ptr() % 16 == 0 for out in outs] or [True] * len(typed.results),
        )
        far = any([span(x.shape, x.stride()) >= INT32_LIMIT for x in (value.tensor for value in placed.values())])
        units = tuple([(i, tuple([x.stride(d) == 1 for d in dims])) for i, (x, dims) in placed.items()])
        iteration.specialization = _specialize(typed.kernel, space, aligned, units, far)
        return iteration


class _Tensor(NamedTuple):
    """A tensor as typing sees it; `item` where it serves as a number."""

    dtype: torch.dtype
    zero_dim: bool
    item: bool


class _Parts(NamedTuple):
    """Coordinates or integers, so many of them, or a placed operand's strides, of which there is a dtype."""

    dtype: torch.dtype | None
    count: int
    several: bool


class _Constant(NamedTuple):
    """A static argument. Among values 1, 1.0 and True are equal, so it has its type beside it."""

    type: type
    value: Any


_Kind = _Tensor | _Parts | _Constant | type


def _tensor_of(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.tensor if type(value) is Placed else value
    return tensor


def _as_tuple(value: Any) -> tuple[int, ...]:
    return value if type(value) is tuple else (value,)


def _is_aligned(value: Any, how: str, part: int) -> bool:
    """Whether 16 divides an argument of a launch: an address, a stride or an integer."""
    if how in ("tensor", "pointer"):
        return _tensor_of(value).data_ptr() % 16 == 0
    if how == "stride":
        return bool(value.tensor.stride(value.dims[part]) % 16 == 0)
    return how == "integer" and _as_tuple(value)[part] % 16 == 0


def _one_along(dim: int, rank: int) -> list[int]:
    """The strides of an operand that is the coordinate along a dimension."""
    return [int(d == dim % rank) for d in range(rank)]


def _strides_in_step(placed: Placed, shape: Sequence[int]) -> list[int]:
    """The strides by which a placed operand moves with the result: 0 along the dimensions that it is placed in."""
    dims = {d % len(shape) for d in placed.dims}
    own = zip(placed.tensor.shape, placed.tensor.stride(), strict=True)
    return [0 if d in dims or size == 1 else stride for d, (size, stride) in enumerate(own)]


def _check_placed(placed: Iterable[Placed], shape: Sequence[int]) -> None:
    for tensor, dims in placed:
        if tensor.dim() != len(shape):
            raise Decline("a placed operand of another rank")
        if any(
            size not in (1, shape[d])
            for d, size in enumerate(tensor.shape)
            if d - len(shape) not in dims and d not in dims
        ):
            raise Decline("a placed operand of another shape")


@dataclass(frozen=True, eq=False)
class _KernelTypes:
    """All but a layout that a kernel is compiled for, one for each content; `itemsize` is of the widest tensor."""

    formula: Any
    parameters: tuple[Operand, ...]
    results: tuple[Operand, ...]
    pointers: tuple[tuple[str, ...], tuple[str, ...]]
    itemsize: int
    asserting: bool


@functools.lru_cache(maxsize=_VARIANTS)
def _kernel_types(
    formula: Any,
    parameters: tuple[Operand, ...],
    constant_types: tuple[type, ...],
    results: tuple[Operand, ...],
    pointers: tuple[tuple[str, ...], tuple[str, ...]],
    itemsize: int,
    asserting: bool,
) -> _KernelTypes:
    return _KernelTypes(formula, parameters, results, pointers, itemsize, asserting)


@dataclass(frozen=True)
class _Typed:
    """What the types of a call's arguments decide, whatever their shapes: dtypes, and what becomes of each argument."""

    common: torch.dtype
    compute: torch.dtype
    results: tuple[torch.dtype, ...]
    operands: tuple[tuple[int, str, int], ...]
    limits: tuple[tuple[int, Limits], ...]
    with_numbers: bool
    kernel: _KernelTypes


@functools.lru_cache(maxsize=_VARIANTS)
def _typed(
    operator: Pointwise,
    kinds: tuple[_Kind, ...],
    out_dtypes: tuple[torch.dtype, ...],
    default: torch.dtype,
) -> _Typed:
    common, compute, results = operator.promoted(kinds, default, out_dtypes)
    operands: list[tuple[int, str, int]] = []
    types: list[str] = []
    parameters: list[Operand] = []
    limits: list[tuple[int, Limits]] = []
    itemsizes = [dtype.itemsize for dtype in out_dtypes or results]
    indices = 0
    for i, (kind, (name, role)) in enumerate(zip(kinds, operator.parameters.items(), strict=True)):
        if isinstance(kind, _Constant):
            parameters.append(Operand(None, None, kind.value))
            continue
        if isinstance(kind, _Parts):
            pointer = kind.dtype is not None
            position = len(operands)
            if kind.dtype is not None:
                operands.append((i, "pointer", 0))
                types.append("*" + dtypes.TRITON_NAMES[kind.dtype])
                itemsizes.append(kind.dtype.itemsize)
            if role == "index":
                # Without numbers of their own, they have strides after those of all operands.
                parts = tuple(range(~indices, ~indices - kind.count, -1))
                indices += kind.count
            else:
                parts = tuple(range(len(operands), len(operands) + kind.count))
                operands += [(i, "stride" if pointer else "integer", k) for k in range(kind.count)]
                types += ["i64"] * kind.count
            kinds_of_parts = (None,) * kind.count
            parameters.append(
                Operand(position, () if pointer else None, tl.int64, None, role, parts, kinds_of_parts, kind.several)
            )
            continue
        if role == "exact":
            target = torch.float64 if kind is float or compute.is_floating_point else torch.int64
        elif role != "own":
            target = compute
        elif isinstance(kind, _Tensor):
            target = dtypes.opmath(kind.dtype)
        else:
            target = _number_dtype(kind, compute)
        truncated = operator.truncates and kind is float and not target.is_floating_point
        if truncated:
            # The conversion to the result's dtype cuts it off.
            target = torch.float64
        if isinstance(kind, _Tensor) and not kind.item:
            # ATen rounds what a half type does not hold to it before it computes in float32.
            rounds = role == "promoted" and target is not common and kind.dtype not in (common, *_HELD_BY_HALVES)
            through = TRITON_DTYPES[common] if rounds and common.itemsize == 2 and common.is_floating_point else None
            parameters.append(Operand(len(operands), (), TRITON_DTYPES[target], through))
            operands.append((i, "tensor", 0))
            types.append("*" + dtypes.TRITON_NAMES[kind.dtype])
            itemsizes.append(kind.dtype.itemsize)
            continue
        # A number that is compared is one of the common dtype.
        half = common.is_floating_point and common.itemsize == 2 and operator.promote is dtypes.Promotion.ALWAYS_BOOL
        through = TRITON_DTYPES[common] if half else None
        parameters.append(Operand(len(operands), None, TRITON_DTYPES[target], through))
        operands.append((i, "item" if isinstance(kind, _Tensor) else "number", 0))
        types.append("fp64" if target.is_floating_point else "i64")
        if isinstance(kind, _Tensor) and role != "cast":
            # ATen promotes it, and lets it overflow.
            continue
        if kind is float and not target.is_floating_point:
            raise Decline("floating-point number for integer tensors")
        if kind is bool and name == "alpha" and common is not torch.bool:
            raise Decline("a bool alpha for tensors of numbers")
        if kind is not bool:
            # ATen converts numbers to the common dtype, or to the one computed in. A flag is any integer of 64 bits.
            holds = limits_of(target if common is torch.bool else common)
            largest = limits_of(common if common.is_floating_point else target).largest
            # ATen negates some.
            low = -holds.high if name == "alpha" else holds.low
            if truncated and common is not torch.bool:
                # ATen refuses others, of which nan is one.
                largest = min(float(holds.high), _LARGEST_IN_64_BITS)
                holds = holds._replace(finite=True, least=max(float(holds.low), -largest))
            limits.append((i, holds._replace(low=low, largest=largest)))
    for dtype in out_dtypes:
        if dtype not in dtypes.TRITON_NAMES:
            raise Decline(f"output of dtype {dtype}")
    promoted = sum(
        role == "promoted" and not isinstance(kind, _Constant)
        for kind, role in zip(kinds, operator.parameters.values(), strict=True)
    )
    parameters = [
        own._replace(parts=tuple([len(operands) + ~part for part in own.parts])) if own.role == "index" else own
        for own in parameters
    ]
    kernel = _kernel_types(
        operator.formula,
        tuple(parameters),
        tuple([type(own.dtype) for own in parameters]),
        tuple([Operand(j, (), TRITON_DTYPES[dtype]) for j, dtype in enumerate(results)]),
        (tuple(types), tuple(["*" + dtypes.TRITON_NAMES[dtype] for dtype in out_dtypes or results])),
        max(itemsizes),
        operator.asserting,
    )
    in_memory = sum(how == "tensor" for _, how, _ in operands)
    return _Typed(common, compute, results, tuple(operands), tuple(limits), in_memory < promoted, kernel)


def _number_dtype(kind: type, compute: torch.dtype) -> torch.dtype:
    """What a number that takes no part in promotion is cast to, for a formula that sees every dtype as it is."""
    if kind is float:
        return torch.float64 if compute is torch.float64 else torch.float32
    return torch.bool if kind is bool else torch.int64


def _check_outputs(outs: Sequence[torch.Tensor], shape: tuple[int, ...]) -> None:
    for out in outs:
        if tuple(out.shape) != shape:
            raise Decline("output has another shape")
        if not never_overlaps_itself(shape, out.stride()):
            raise Decline("output overlaps itself")


def _extents(
    outs: Sequence[torch.Tensor],
    shape: tuple[int, ...],
    strided: list[tuple[int, torch.Tensor]],
    placed: frozenset[int] = frozenset(),
) -> tuple[tuple[int, int, int, int, bool, tuple[tuple[int, int, int], ...]], ...]:
    """What each call compares addresses by: of every output, and every other tensor."""
    extents: list[tuple[int, int, int, int, bool, tuple[tuple[int, int, int], ...]]] = []
    for j, out in enumerate(outs):
        others = strided + [(~k, other) for k, other in enumerate(outs) if k != j]
        for position, read in others:
            identical = (
                position >= 0
                and position not in placed
                and read.dtype.itemsize == out.dtype.itemsize
                and tuple(read.shape) == shape
                and same_strides(shape, read.stride(), out.stride())
            )
            out_bytes = span(out.shape, out.stride()) * out.dtype.itemsize
            read_bytes = span(read.shape, read.stride()) * read.dtype.itemsize
            extents.append((j, position, out_bytes, read_bytes, identical, _grains(out, read)))
    return tuple(extents)


def _grains(written: torch.Tensor, read: torch.Tensor) -> tuple[tuple[int, int, int], ...]:
    """Ways to see that tensors do not share memory: both repeat after so many bytes, of which each has so many."""
    sides = [
        [(size, stride * x.dtype.itemsize) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
        for x in (written, read)
    ]
    found = []
    for least in sorted({stride for side in sides for _, stride in side}):
        grain = math.gcd(*(stride for side in sides for _, stride in side if stride >= least))
        own = [
            x.dtype.itemsize + sum((size - 1) * stride for size, stride in side if stride < least)
            for x, side in zip((written, read), sides, strict=True)
        ]
        if sum(own) <= grain:
            found.append((grain, *own))
    return tuple(found)


def _lies_along(strides: Sequence[int], d: int) -> bool:
    """Whether an operand's elements are next to each other along dimension d, and apart along the fastest.

    One that repeats along the fastest is read once for each row, whichever way a tile lies.
    """
    return strides[d] == 1 and strides[0] != 0


def _choose_tile(sizes: Sequence[int], strides: Sequence[Sequence[int]], itemsize: int) -> tuple[int, int] | None:
    """(rows, columns) of a tile over dimensions 1 and 0, or None for the flat kernel.

    A thread wants 32 bytes of the widest operand, whose elements are of `itemsize`: silu_and_mul of 8,192 rows of 4,096
    bfloat16 takes 49 us so on an H200, and 54 with half as many.
    """
    device = devices.current
    n = math.prod(sizes)
    elements, transposed = _block(n, device.tile_bytes // max(itemsize, 2)), device.transpose_tile
    if len(sizes) < 2 or sizes[0] < 16:
        return None
    if n <= device.small_elements:
        transposed = device.small_transpose_tile
    # Fewer rows than a tile has matter where there are many tiles of them; elsewhere one kernel serves all.
    most_rows = power_of_2(sizes[1]) if len(sizes) > 2 or device.interpreted else elements
    if any(_lies_along(own, 1) for own in strides):
        rows, columns = transposed
        return min(rows, most_rows), min(columns, power_of_2(sizes[0]))
    columns = min(elements, power_of_2(sizes[0]))
    # A column block that does not divide the row leaves lanes idle; halve it while that wastes an eighth or more.
    while columns > 128 and -sizes[0] % columns * 8 >= sizes[0]:
        columns //= 2
    rows = max(1, min(elements // columns, most_rows))
    if n < INT32_LIMIT and not device.interpreted:
        # Where nothing is lost that could be read several elements at a time, the flat kernel leaves none idle.
        wasteful = sizes[0] % 16 != 0 and -sizes[0] % columns * 5 >= sizes[0]
        # Where no elements are next to each other, Triton 3.6 gives neighbouring threads of a tile different rows.
        if wasteful or (rows > 1 and any(own[0] > 1 for own in strides)):
            return None
    return rows, columns


def _block(n: int, most: int) -> int:
    """How many elements a program takes of a space of n.

    Programs that take few are many, each soon done, and of small spaces all run at a time; those that take many have
    less to do for each element, which matters where they come one after another. So with four times the elements there
    are twice as many programs, of twice as many.
    """
    device = devices.current
    least = device.small_block or most
    return min(most, max(least, power_of_2(math.isqrt(max(n - 1, 0)) // 2 + 1)))


@functools.lru_cache(maxsize=_VARIANTS)
def _inverse(divisor: int) -> tuple[int, int]:
    """A multiplier, in the bits of an int32, and a shift: (n + (multiplier * n >> 32)) >> shift is n // divisor.

    For n below 2**31.
    """
    shift = (divisor - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return multiplier - (1 << 32 if multiplier >= 1 << 31 else 0), shift


class _Space(NamedTuple):
    """A collapsed iteration space and its operands, fastest dimension first; strides are () for a number.

    `indices` are the strides of coordinates, which are not in memory.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    out_strides: tuple[tuple[int, ...], ...]
    indices: tuple[tuple[int, ...], ...] = ()

    def every(self) -> list[tuple[int, ...]]:
        return [own for own in (*self.out_strides, *self.strides) if own]

    def reorder(self, order: Sequence[int]) -> _Space:
        def pick(own: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(own[d] for d in order) if own else own

        strides, out_strides, indices = (tuple(map(pick, own)) for own in self[1:])
        return _Space(pick(self.sizes), strides, out_strides, indices)

    def with_tile_second(self) -> _Space:
        """The dimension that some operand is contiguous in, if it is not the fastest, becomes the tile's second."""
        for d in range(2, len(self.sizes)):
            if self.sizes[0] >= 16 and any(_lies_along(own, d) for own in self.every()):
                return self.reorder([0, d, *(e for e in range(1, len(self.sizes)) if e != d)])
        return self


def _specialize(
    types: _KernelTypes,
    space: _Space,
    aligned: tuple[Sequence[bool], Sequence[bool]],
    units: tuple[tuple[int, tuple[bool, ...]], ...] = (),
    far: bool = False,
) -> Specialization:
    """Choose the kernel and its blocks for an iteration space, and spell out its signature.

    `aligned` (to 16 bytes) holds the operands' first, then the outputs'. `units` tell of placed operands, by parameter,
    which of the strides that formulas use are 1, and `far` that some of these take 64 bits.
    """
    device = devices.current
    space = space.with_tile_second()
    sizes, strides, out_strides = space.sizes, space.strides, space.out_strides
    n = math.prod(sizes)
    every = space.every()
    wide = far or n >= INT32_LIMIT or any([span(sizes, own) >= INT32_LIMIT for own in every])
    tile = _choose_tile(sizes, every, types.itemsize)
    if tile is None:
        # Elements that are read one by one are as many of halves, which would only take registers.
        one_by_one = len(sizes) > 1 or any([own[0] > 1 for own in every])
        block = _block(n, device.flat_bytes // max(types.itemsize, 4 if one_by_one else 2))
        block = min(block, power_of_2(n)) if device.interpreted else block
        several = block > 32 * device.num_warps
        mask = 0 if n % block == 0 else 1 if n % 16 == 0 or n < block * 4 or not several else 2
        blocks = (("MASK", mask), ("BLOCK", block))
        inverses = tuple([_inverse(size) for size in sizes[:-1]]) if n < INT32_LIMIT else ()
        masks, grid, sized = (True, False), -(-n // block), (sizes, inverses, n)
    else:
        rows, columns = tile
        blocks = (("ROWS", rows), ("COLUMNS", columns))
        masks = (sizes[0] % columns != 0, sizes[1] % rows != 0)
        tiles: tuple[int, ...] = (-(-sizes[0] // columns), -(-sizes[1] // rows), *sizes[2:])
        inverses = tuple([_inverse(count) for count in tiles[:-1]])
        grid, sized = math.prod(tiles), (sizes, inverses, tiles)
    # Only what lets accesses be vectorised is told apart, so that few kernels serve all shapes.
    paths: list[tuple[int, ...]] = [
        (1 + which, i) for which in (0, 1) for i, holds in enumerate(aligned[which]) if holds
    ]
    if tile is None:
        paths += [(7,)] if n % 16 == 0 else []
    else:
        paths += [(5, 0)] if sizes[0] % 16 == 0 else []
        for which, owners in ((3, strides), (4, out_strides)):
            for i, own in enumerate(owners):
                if all(stride % 16 == 0 for stride in own if stride > 1):
                    paths += [(which, i, d) for d, stride in enumerate(own) if stride > 1]
    strides += space.indices
    kinds, out_kinds = tuple([_kinds_of(own) for own in strides]), tuple([_kinds_of(own) for own in out_strides])
    variant = _variant(types, kinds, out_kinds, wide, len(inverses), blocks, masks, tuple(paths), units)
    return variant.over((strides, out_strides, *sized), grid)


@functools.lru_cache(maxsize=_VARIANTS)
def _variant(
    types: _KernelTypes,
    kinds: tuple[tuple[int, ...], ...],
    out_kinds: tuple[tuple[int, ...], ...],
    wide: bool,
    inverses: int,
    blocks: tuple[tuple[str, int], ...],
    masks: tuple[bool, bool],
    divisible: tuple[tuple[int, ...], ...],
    units: tuple[tuple[int, tuple[bool, ...]], ...],
) -> Specialization:
    """The kernel for every iteration space of a kind, without the space's sizes and strides."""
    device = devices.current
    integer, index = ("i64", tl.int64) if wide else ("i32", tl.int32)
    flat = blocks[0][0] == "MASK"
    dims = (integer,) * len(out_kinds[0])
    signature: dict[str, Any] = {
        "fn": "constexpr",
        "operands": types.pointers[0],
        "outs": types.pointers[1],
        "strides": tuple(dims if own else () for own in kinds),
        "out_strides": tuple(dims for _ in out_kinds),
        "shape": dims,
        "inverses": (("i32", "i32"),) * inverses,
    }
    if flat:
        signature["n"] = integer
    else:
        signature["tiles"] = ("i32",) * len(dims)
    layout = Layout(
        parameters=tuple(_over(own, i, kinds, dict(units)) for i, own in enumerate(types.parameters)),
        results=tuple(own._replace(kinds=out_kinds[own.position]) for own in types.results),
        column_mask=masks[0],
        row_mask=masks[1],
        flat=flat,
    )
    constants: dict[str, Any] = {"LAYOUT": layout, "INDEX": index, **dict(blocks)}
    signature |= dict.fromkeys(constants, "constexpr")
    names = list(signature)
    elements = blocks[1][1] * (1 if flat else blocks[0][1])
    return Specialization(
        kernel=elementwise_flat if flat else elementwise_tile,
        signature=signature,
        constants={(0,): types.formula} | {(names.index(name),): value for name, value in constants.items()},
        attributes={path: [["tt.divisibility", 16]] for path in divisible},
        leading=(types.formula,),
        trailing=tuple(constants.values()),
        options={"num_warps": device.num_warps * (2 if elements >= 4096 else 1), **device.options}
        | (ASSERTING if types.asserting else {}),
        types=tuple(flatten(tuple(signature.values()), tuple(signature.values()))),
    )


def _kinds_of(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple([stride if stride in (0, 1) else 2 for stride in strides])


def _over(
    own: Operand, parameter: int, kinds: tuple[tuple[int, ...], ...], units: dict[int, tuple[bool, ...]]
) -> Operand:
    """A parameter of the formula over an iteration space of such strides."""
    if own.role == "index":
        return own._replace(placed=tuple([kinds[part] for part in own.parts]))
    if own.role == "pointer":
        own = own._replace(placed=tuple([int(unit) for unit in units[parameter]]))
    return own if own.kinds is None else own._replace(kinds=kinds[own.position])
