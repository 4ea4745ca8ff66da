"""The two kernels of all pointwise formulas, over a flattened iteration space and over tiles of it."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.pointwise.layout import Layout
from tritonite.language.indices import divide_by_inverse
from tritonite.language.order import wait_for_previous_launch


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
def _via(layout, i):
    own = layout.parameters[i]
    return own.dtype if own.via is None else own.via


@triton.constexpr_function
def _number_dtype(layout, i):
    return tl.float64 if layout.parameters[i].dtype.is_floating() else tl.int64


@triton.constexpr_function
def _kinds(layout, results, i):
    return (layout.results if results else layout.parameters)[i].kinds


@triton.constexpr_function
def _role(layout, i):
    return layout.parameters[i].role


@triton.constexpr_function
def _is_tuple(layout, i):
    return layout.parameters[i].is_tuple


@triton.constexpr_function
def _component(layout, i, k):
    return layout.parameters[i].components[k]


@triton.constexpr_function
def _component_count(layout, i):
    return len(layout.parameters[i].components)


@triton.constexpr_function
def _component_kind(layout, i, k):
    return layout.parameters[i].component_kinds[k]


@triton.constexpr_function
def _one_element_per_thread(layout):
    # A thread has one element at a time along the fastest dimension if an operand is strided there or accesses are to
    # be coalesced, unless an operand is contiguous along the tile's other dimension.
    every = [own.kinds for own in (*layout.parameters, *layout.results) if own.kinds]
    across = not layout.flat and any([kinds[1] == 1 for kinds in every])
    return not across and (layout.coalesced or any([kinds[0] == 2 for kinds in every]))


@triton.constexpr_function
def _masks(layout, kinds, masked):
    # 0 for no mask, 1 for a column mask, 2 for a row mask, 3 for both.
    if layout.flat:
        return int(masked and any(kinds))
    along_rows = any(kinds[1:]) if layout.linear else kinds[1] != 0
    return int(layout.column_mask and kinds[0] != 0) + 2 * int(layout.row_mask and along_rows)


@triton.constexpr_function
def _linear(layout):
    return layout.linear


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
    """Return the coordinates of indices in a flattened space of these sizes, fastest first.

    `inverses` are `blocks.inverse` of the sizes, since devices have no integer division; () divides.
    """
    index = ()
    rest = linear
    for d in tl.static_range(len(sizes) - 1):
        if len(inverses) == 0:
            outer = rest // sizes[d]
        else:
            factor, shift = inverses[d][0].to(tl.uint32), inverses[d][1].to(tl.uint32)
            outer = divide_by_inverse(rest.to(tl.uint32), factor, shift).to(rest.dtype)
        index = index + (rest - outer * sizes[d],)
        rest = outer
    return index + (rest,)


@triton.constexpr_function
def _ordinary(pointers):
    # A division by x or 1 - x takes a slow branch at 0, and a whole warp waits for it. Float8 gets 0, the only constant
    # that some devices can convert to it.
    dtype = pointers.dtype.element_ty
    if not dtype.is_floating():
        return 1
    return 0.5 if dtype.primitive_bitwidth >= 16 else 0


@triton.jit
def _load(pointers, column_mask, row_mask, MASKS: tl.constexpr):
    """Return the values at the pointers, and a number that is fast in all formulas where the mask is off."""
    if MASKS == 0:
        value = tl.load(pointers)
    elif MASKS == 1:
        value = tl.load(pointers, mask=column_mask, other=_ordinary(pointers))
    elif MASKS == 2:
        value = tl.load(pointers, mask=row_mask, other=_ordinary(pointers))
    else:
        value = tl.load(pointers, mask=column_mask & row_mask, other=_ordinary(pointers))
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
    """Return the coordinates of a block's elements along the dimensions that a parameter names."""
    found = ()
    for k in tl.static_range(_component_count(LAYOUT, PARAMETER)):
        own = _offset(index, strides[_component(LAYOUT, PARAMETER, k)], origin, _component_kind(LAYOUT, PARAMETER, k))
        found = found + (own,)
    return found


@triton.jit
def _integers(operands, origin, LAYOUT: tl.constexpr, PARAMETER: tl.constexpr):
    """Return the numbers of a parameter, or the strides of a gathered operand, in the type of indices."""
    found = ()
    for k in tl.static_range(_component_count(LAYOUT, PARAMETER)):
        if _component_kind(LAYOUT, PARAMETER, k) == 1:
            found = found + (1,)
        else:
            found = found + (operands[_component(LAYOUT, PARAMETER, k)].to(origin.dtype),)
    return found


def _merge(values: Any, layout: Layout, constant: Any = lambda value: value) -> list[Any]:
    """Return the formula's arguments: the values, with constants where a parameter has no position."""
    remaining = iter(values)
    return [constant(own.dtype) if own.position is None else next(remaining) for own in layout.parameters]


@tl.core.builtin
def _merge_in_compiler(values, layout, _semantic=None):
    return tl.tuple(_merge(values, layout.value, tl.constexpr))


# Constants join the values only in the call: a tuple assigned to a name cannot hold None or a string.
with_constants = _merge if devices.current.interpreted else _merge_in_compiler


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
    """Load a block of each operand, call the formula, and store its results."""
    values = ()
    for i in tl.static_range(_count(LAYOUT, False)):
        if _role(LAYOUT, i) == "index" or _role(LAYOUT, i) == "integers":
            if _role(LAYOUT, i) == "index":
                components = _coordinates(index, strides, origin, LAYOUT, i)
            else:
                components = _integers(operands, origin, LAYOUT, i)
            if _is_tuple(LAYOUT, i):
                values = values + (components,)
            else:
                values = values + (components[0],)
        elif _role(LAYOUT, i) == "pointer":
            offset = _offset(index, strides[_position(LAYOUT, i)], origin, _kinds(LAYOUT, False, i))
            within = column_mask & row_mask
            own = operands[_position(LAYOUT, i)] + tl.broadcast_to(offset, within.shape)
            values = values + ((own, within, _integers(operands, origin, LAYOUT, i)),)
        elif _position(LAYOUT, i) is not None and _kinds(LAYOUT, False, i) is None:
            number = tl.full(origin.shape, operands[_position(LAYOUT, i)], _number_dtype(LAYOUT, i))
            values = values + (number.to(_via(LAYOUT, i)).to(_dtype(LAYOUT, False, i)),)
        elif _position(LAYOUT, i) is not None:
            offset = _offset(index, strides[_position(LAYOUT, i)], origin, _kinds(LAYOUT, False, i))
            value = _load(
                operands[_position(LAYOUT, i)] + offset,
                column_mask,
                row_mask,
                _masks(LAYOUT, _kinds(LAYOUT, False, i), MASKED),
            )
            values = values + (value.to(_via(LAYOUT, i)).to(_dtype(LAYOUT, False, i)),)
    if _role(LAYOUT, 0) == "program":
        results = fn(_dtype(LAYOUT, False, 0), values)
    else:
        results = fn(*with_constants(values, LAYOUT))
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
    """Evaluate the formula on BLOCK elements of the flattened iteration space `shape`, fastest dimension first.

    MASK: 0 where BLOCK divides n, 1 for a mask on every block, 2 for a mask on the last block alone.
    """
    wait_for_previous_launch()
    start = tl.program_id(0).to(INDEX) * BLOCK
    linear = start + tl.arange(0, BLOCK)
    if _one_element_per_thread(LAYOUT):
        # With the result's vector width, neighbouring threads would read every element from another cache line.
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
    """Evaluate the formula on a (ROWS, COLUMNS) tile of dimensions 1 and 0 of `shape`, at one index of the others.

    `tiles` are the numbers of tiles along each dimension. A linear layout has rows of all dimensions but the fastest.
    There `tiles` are (column tiles, row tiles, rows).
    """
    wait_for_previous_launch()
    if _linear(LAYOUT):
        tile = _unravel(tl.program_id(0), tiles[:2], inverses[:1])
    else:
        tile = _unravel(tl.program_id(0), tiles, inverses)
    column = tile[0].to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tile[1].to(INDEX) * ROWS + tl.arange(0, ROWS)[:, None]
    if _one_element_per_thread(LAYOUT):
        column = tl.max_contiguous(column, (1, 1))
    if _linear(LAYOUT):
        index = (column,) + _unravel(row, shape[1:], inverses[1:])
        row_mask = row < tiles[2]
    else:
        index = (column, row)
        for d in tl.static_range(2, len(shape)):
            index = index + (tile[d].to(INDEX),)
        row_mask = row < shape[1]
    origin = tl.zeros((1, 1), INDEX)
    _evaluate(fn, operands, outs, strides, out_strides, index, origin, column < shape[0], row_mask, LAYOUT, False)
