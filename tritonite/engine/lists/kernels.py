"""The kernel of all formulas over lists of tensors, and how a program finds its tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tritonite.engine.lists.table import SIZES
from tritonite.engine.pointwise.kernels import with_constants
from tritonite.language.order import wait_for_previous_launch


@dataclass(frozen=True)
class ListOperand:
    """A parameter of the formula, or one of its results, as `elementwise_list` handles it.

    Attributes:
        kind: "tensors", a list of tensors; "elements", a list of tensors of which the first element alone is read;
            "numbers", a number for each tensor; "tensor", one element for all tensors; "number", a number for all
            tensors; "constant", whose value is `dtype`.
        position: the row of the table, or the index among the kernel's operands; None for a constant.
        memory: the Triton dtype in memory.
        dtype: the Triton dtype in which the formula receives or returns the value.
        via: a Triton dtype to which a loaded value is converted first, or None.
    """

    kind: str
    position: int | None
    memory: Any
    dtype: Any
    via: Any = None


@dataclass(frozen=True)
class ListLayout:
    """The compile-time parameters of `elementwise_list`. All addresses are multiples of 16 bytes if `aligned`."""

    parameters: tuple[ListOperand, ...]
    results: tuple[ListOperand, ...]
    aligned: bool


@triton.constexpr_function
def _count(layout, results):
    return len(layout.results if results else layout.parameters)


@triton.constexpr_function
def _is(layout, i, kind):
    return layout.parameters[i].kind == kind


@triton.constexpr_function
def _position(layout, results, i):
    return (layout.results if results else layout.parameters)[i].position


@triton.constexpr_function
def _memory(layout, results, i):
    return (layout.results if results else layout.parameters)[i].memory


@triton.constexpr_function
def _pointer(layout, results, i):
    return tl.pointer_type((layout.results if results else layout.parameters)[i].memory)


@triton.constexpr_function
def _dtype(layout, results, i):
    return (layout.results if results else layout.parameters)[i].dtype


@triton.constexpr_function
def _via(layout, i):
    own = layout.parameters[i]
    return own.dtype if own.via is None else own.via


@triton.constexpr_function
def _is_floating(layout, i):
    return layout.parameters[i].memory.is_floating()


@triton.jit
def find_tensor(table, count, search_steps, program):
    """Return (tensor, index of the program among the tensor's) by a binary search in the table's ends."""
    low, high = program * 0, program * 0 + count - 1
    for _ in range(search_steps):
        middle = (low + high) // 2
        after = tl.load(table + middle) <= program
        low = tl.where(after, middle + 1, low)
        high = tl.where(after, high, middle)
    begin = tl.load(table + low - 1, mask=low > 0, other=0)
    return low, program - begin


@triton.jit
def _address(table, count, tensor, LAYOUT: tl.constexpr, RESULTS: tl.constexpr, NUMBER: tl.constexpr):
    address = tl.load(table + _position(LAYOUT, RESULTS, NUMBER) * count + tensor).to(_pointer(LAYOUT, RESULTS, NUMBER))
    return tl.multiple_of(address, 16) if LAYOUT.aligned else address


@triton.jit
def _uniform(table, operands, count, tensor, LAYOUT: tl.constexpr):
    """Return for each parameter the address of the tensor's elements, or the number or element that is used for all."""
    found = ()
    for i in tl.static_range(_count(LAYOUT, False)):
        if _is(LAYOUT, i, "tensors"):
            found = found + (_address(table, count, tensor, LAYOUT, False, i),)
        elif _is(LAYOUT, i, "elements"):
            element = tl.load(table + _position(LAYOUT, False, i) * count + tensor).to(_pointer(LAYOUT, False, i))
            found = found + (tl.load(element),)
        elif _is(LAYOUT, i, "numbers"):
            bits = tl.load(table + _position(LAYOUT, False, i) * count + tensor)
            if _is_floating(LAYOUT, i):
                found = found + (bits.to(tl.float64, bitcast=True),)
            else:
                found = found + (bits,)
        elif _is(LAYOUT, i, "tensor"):
            found = found + (tl.load(operands[_position(LAYOUT, False, i)]),)
        elif _is(LAYOUT, i, "number"):
            found = found + (tl.full((), operands[_position(LAYOUT, False, i)], _memory(LAYOUT, False, i)),)
        else:
            found = found + (0,)
    return found


@triton.jit
def _evaluate(fn: tl.constexpr, uniform, results, offset, mask, LAYOUT: tl.constexpr, MASKED: tl.constexpr):
    """Load a block of each list, call the formula, and store its results."""
    values = ()
    for i in tl.static_range(_count(LAYOUT, False)):
        if _is(LAYOUT, i, "tensors"):
            if MASKED:
                value = tl.load(uniform[i] + offset, mask=mask, other=0)
            else:
                value = tl.load(uniform[i] + offset)
            values = values + (value.to(_via(LAYOUT, i)).to(_dtype(LAYOUT, False, i)),)
        elif not _is(LAYOUT, i, "constant"):
            value = tl.full((1,), uniform[i], _memory(LAYOUT, False, i))
            values = values + (value.to(_via(LAYOUT, i)).to(_dtype(LAYOUT, False, i)),)
    found = fn(*with_constants(values, LAYOUT))
    if _count(LAYOUT, True) == 1:
        found = (found,)
    for i in tl.static_range(_count(LAYOUT, True)):
        value = tl.broadcast_to(found[i].to(_dtype(LAYOUT, True, i)).to(_memory(LAYOUT, True, i)), offset.shape)
        if MASKED:
            tl.store(results[i] + offset, value, mask=mask)
        else:
            tl.store(results[i] + offset, value)


@triton.jit
def elementwise_list(
    fn: tl.constexpr,
    operands,
    tables,
    count,
    search_steps,
    steps,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Evaluate the formula on `steps` blocks of one tensor of each list, in the order of their memory.

    Args:
        operands: numbers, and tensors of one element, that are used for all tensors.
        tables: the table of `count` tensors alone; its programs handle `steps` times BLOCK elements each.
        search_steps: the steps of a binary search among `count` tensors.
    """
    wait_for_previous_launch()
    table = tables[0]
    tensor, chunk = find_tensor(table, count, search_steps, tl.program_id(0))
    size = tl.load(table + SIZES * count + tensor)
    uniform = _uniform(table, operands, count, tensor, LAYOUT)
    results = ()
    for i in tl.static_range(_count(LAYOUT, True)):
        results = results + (_address(table, count, tensor, LAYOUT, True, i),)
    first = chunk.to(tl.int64) * steps * BLOCK
    own = tl.minimum(steps, tl.cdiv(size - first, BLOCK).to(tl.int32))
    for step in range(own):
        start = tl.multiple_of(first + step * BLOCK, 16)
        offset = start + tl.arange(0, BLOCK)
        if start + BLOCK <= size:
            _evaluate(fn, uniform, results, offset, offset < size, LAYOUT, False)
        else:
            _evaluate(fn, uniform, results, offset, offset < size, LAYOUT, True)
