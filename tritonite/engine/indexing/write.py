"""Writing at places that index tensors tell, and combining with what is there.

Programs combine by atomic operations: a device's own addition where it has one for the dtype, and else by comparing and
swapping the word that an element is in until nobody else has changed it between. So the order in which numbers
are added up differs from run to run, as it does in ATen's kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dispatch.call import Number, number_type
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.places import IN_RANGE, Index, Space
from tritonite.engine.indexing.read import places, rows_and_columns
from tritonite.engine.iteration import span
from tritonite.engine.movement import words
from tritonite.language.atomic import add_halves
from tritonite.language.math import maximum_nan, minimum_nan
from tritonite.language.order import wait_for_previous_launch
from tritonite.launch import ASSERTING, libentry

# Dtypes that every device adds to memory by itself.
_ADDED_IN_MEMORY = (torch.float32, torch.float64, torch.int32, torch.int64)
ADD, MULTIPLY, LARGEST, SMALLEST = "add", "multiply", "largest", "smallest"


@triton.jit
def _combined(x, y, OPERATION: tl.constexpr, FLAGS: tl.constexpr):
    """What becomes of two elements; FLAGS are bools, as integers of 0 and 1."""
    if OPERATION == "add":
        result = (x | y) if FLAGS else x + y
    elif OPERATION == "multiply":
        result = x * y
    elif OPERATION == "largest":
        result = maximum_nan(x, y)
    else:
        result = minimum_nan(x, y)
    return result


@triton.jit
def _element_of(word, shift, ELEMENT: tl.constexpr, COMPUTE: tl.constexpr):
    """The element in a word, which is the word itself or one of its bytes."""
    if ELEMENT.primitive_bitwidth < 16:
        value = (word >> shift).to(tl.int8).to(tl.uint8 if tl.int1 == ELEMENT else ELEMENT, bitcast=True)
    else:
        value = word.to(ELEMENT, bitcast=True)
    return value.to(COMPUTE)


@triton.jit
def _word_with(word, value, shift, ELEMENT: tl.constexpr):
    """The word with another element in it."""
    if ELEMENT.primitive_bitwidth < 16:
        bits = value.to(tl.int32) & 0xFF
        result = (word & ~(tl.full(word.shape, 0xFF, tl.int32) << shift)) | (bits << shift)
    else:
        result = value.to(ELEMENT).to(word.dtype, bitcast=True)
    return result


@triton.jit
def _combine_by_swapping(target, offset, value, mask, FACTS: tl.constexpr):
    """Combine elements of `target` with values by compare and swap; lanes off the mask swap a word with itself."""
    ELEMENT: tl.constexpr = target.dtype.element_ty
    FLAGS: tl.constexpr = tl.int1 == ELEMENT
    OPERATION: tl.constexpr = FACTS.operation
    COMPUTE: tl.constexpr = FACTS.compute
    pointers = target + tl.where(mask, offset, 0)
    if ELEMENT.primitive_bitwidth < 16:
        address = pointers.to(tl.int64)
        shift = ((address & 3) * 8).to(tl.int32)
        swapped = (address & -4).to(tl.pointer_type(tl.int32))
    else:
        shift = 0
        swapped = pointers.to(tl.pointer_type(FACTS.word), bitcast=True)
    old = tl.load(swapped)
    pending = mask
    while tl.max(pending.to(tl.int32), axis=None) > 0:
        combined = _combined(_element_of(old, shift, ELEMENT, COMPUTE), value, OPERATION, FLAGS)
        wanted = tl.where(pending, _word_with(old, combined, shift, ELEMENT), old)
        found = tl.atomic_cas(swapped, old, wanted, sem="relaxed")
        pending = pending & (found != old)
        old = found


@dataclasses.dataclass(frozen=True)
class Writing:
    """What else a kernel that writes is compiled for.

    `number` is "float" or "int" where one is written instead of values, and `scaled` where values are multiplied with
    it. An `operation` combines what is written with what is there, in the dtype `compute`; a `native` one is the
    device's own, any other swaps each `word`. It adds halves in pairs where `paired`.
    """

    operation: str = ""
    number: str = ""
    scaled: bool = False
    native: bool = False
    paired: bool = False
    compute: Any = None
    word: Any = None


@libentry()
@triton.jit(do_not_specialize=["number", "integer", "n_rows", "reach"])
def _write_at(
    target,
    values,
    number: tl.float64,
    integer: tl.int64,
    indices,
    shape,
    strides,
    columns,
    counted,
    n_rows,
    n_columns,
    reach,
    FACTS: tl.constexpr,
    WRITING: tl.constexpr,
):
    """A program writes a block at the places of its indices, within the `reach` of the target."""
    wait_for_previous_launch()
    row, column = rows_and_columns(n_columns, FACTS)
    near, _, far, mask = places(indices, row, column, n_rows, n_columns, shape, strides, columns, counted, FACTS)
    if WRITING.number == "float":
        given = tl.full(far.shape, number, tl.float64).to(WRITING.compute)
    elif WRITING.number == "int":
        given = tl.full(far.shape, integer, tl.int64)
        if target.dtype.element_ty == tl.int1:
            given = given != 0
        given = given.to(WRITING.compute)
    if WRITING.number != "" and not WRITING.scaled:
        value = given
    else:
        value = tl.load(values + near, mask=mask, other=0)
        if WRITING.operation != "":
            value = value.to(WRITING.compute)
        if WRITING.scaled:
            value = value * given
    if WRITING.operation != "" and WRITING.scaled:
        # ATen rounds the product before it adds.
        value = value.to(target.dtype.element_ty).to(WRITING.compute)
    if WRITING.operation == "":
        tl.store(target + far, value.to(target.dtype.element_ty), mask=mask)
    elif WRITING.paired:
        add_halves(target, far, value.to(target.dtype.element_ty), mask, reach)
    elif WRITING.native:
        tl.atomic_add(target + far, value.to(target.dtype.element_ty), mask=mask, sem="relaxed")
    else:
        _combine_by_swapping(target, far, value, mask, WRITING)


def _as_integer(number: Any) -> Any:
    """A number that is no bool, which kernels have no parameters for."""
    if isinstance(number, Number) and type(number.value) is bool:
        whole = Number(int(number.value), number.argument, number.item, number.keyed)
        whole.limits = number.limits
        return whole
    return int(number) if type(number) is bool else number


def _adds_in_memory(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype is torch.bfloat16:
        # As few devices do: NVIDIA's from sm_90 on.
        return devices.current.ptx and devices.has_tma(device)
    return dtype in _ADDED_IN_MEMORY or (dtype is torch.float16 and not devices.current.interpreted)


def write_at(
    target: torch.Tensor,
    shape: Sequence[int],
    target_strides: Sequence[int],
    indices: Sequence[Index],
    values: torch.Tensor | None = None,
    value_strides: Sequence[int] = (),
    number: Any = None,
    operation: str = "",
    wraps: bool = False,
    message: str = IN_RANGE,
) -> None:
    """Write to `target`, at the places that its strides over `shape`, and indices, tell.

    What is written are `values`, of the same dtype, with their strides over `shape`, or a `number`, or their products.
    An `operation` (ADD, MULTIPLY, LARGEST, SMALLEST) combines them with what is there; without one, of several values
    for a place it is not defined which remains. Index tensors are as for `read_at`.
    """
    if 0 in shape:
        return
    number = _as_integer(number)
    itemsize, moved = target.dtype.itemsize, number is None and not operation
    space = Space.of(shape, value_strides or (0,) * len(shape), target_strides, indices, itemsize if moved else 8)
    facts = space.facts(itemsize, wraps, message)
    native = operation == ADD and _adds_in_memory(target.dtype, target.device)
    if operation:
        # One lane an element at least, since lanes that have the same one would both combine it.
        facts = dataclasses.replace(facts, block=_filling(facts.block))
    if moved:
        assert values is not None
        target, values = words(target), words(values)
        writing = Writing()
    else:
        # Numbers are converted to bools and to integers of 8 bits by way of wider ones.
        compute = torch.uint8 if target.dtype is torch.bool else opmath(target.dtype)
        writing = Writing(
            operation=operation,
            number="" if number is None else "float" if number_type(number) is float else "int",
            scaled=number is not None and values is not None,
            native=native,
            paired=native and itemsize == 2 and devices.current.ptx,
            compute=TRITON_DTYPES[target.dtype if target.dtype is torch.bool and not operation else compute],
            word={2: tl.int16, 4: tl.int32, 8: tl.int64}.get(itemsize),
        )
    floating = writing.number == "float"
    _write_at[(space.programs(facts),)](
        *(target, values, number if floating else 0.0, number if writing.number == "int" else 0),
        *space.arguments(),
        span(target.shape, target.stride()) if writing.paired else 0,
        FACTS=facts,
        WRITING=writing,
        num_warps=4,
        **ASSERTING,
    )


def _filling(block: tuple[int, int]) -> tuple[int, int]:
    """A block of 128 elements at least."""
    return max(block[0], 128 // block[1]), block[1]
