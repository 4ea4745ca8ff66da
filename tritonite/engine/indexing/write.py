"""Writing at places that index tensors tell, and combining with what is there.

Programs combine by atomic operations: a device's own addition where it has one for the dtype, and else by comparing and
swapping the word that an element is in until nobody else has changed it between. So the order in which numbers
are added up differs from run to run, as it does in ATen's kernels.

Sums and products of 16-bit floats are accumulated in float32 and rounded once, because a 16-bit sum stops growing: 256
ones are the most that bfloat16 counts. `_accumulates_wide` says for which calls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.places import IN_RANGE, Index, Space
from tritonite.engine.indexing.read import places, rows_and_columns
from tritonite.engine.iteration import span
from tritonite.engine.movement import move, words
from tritonite.language.atomic import atomic_add_16bit, compare_and_swap
from tritonite.language.math import maximum_nan, minimum_nan
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty_strided
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry
from tritonite.runtime.symbols import Number, number_type

# Dtypes that every device adds to memory by itself.
_ADDED_IN_MEMORY = (torch.float32, torch.float64, torch.int32, torch.int64)
ADD, MULTIPLY, LARGEST, SMALLEST = "add", "multiply", "largest", "smallest"
# Elements of a target whose copy in float32 costs less than the launches that make it.
_SMALL = 2**16


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
    # From the cache that all programs share: the nearest one keeps what was there when the kernel began.
    old = tl.load(swapped, cache_modifier=".cg")
    pending = mask
    while tl.max(pending.to(tl.int32), axis=None) > 0:
        combined = _combined(_element_of(old, shift, ELEMENT, COMPUTE), value, OPERATION, FLAGS)
        wanted = tl.where(pending, _word_with(old, combined, shift, ELEMENT), old)
        if OPERATION == "largest" or OPERATION == "smallest" or FLAGS:
            # An element that a value leaves as it is will not change back, so that there is nothing to write.
            pending = pending & (wanted != old)
        if FACTS.masked:
            found = compare_and_swap(swapped, old, wanted, pending)
        else:
            found = tl.atomic_cas(swapped, old, wanted, sem="relaxed")
        pending = pending & (found != old)
        old = found


@dataclasses.dataclass(frozen=True)
class Writing:
    """What else a kernel that writes is compiled for.

    `number` is "float" or "int" where one is written instead of values, and `scaled` where values are multiplied with
    it. An `operation` combines what is written with what is there, in the dtype `compute`; a `native` one is the
    device's own, any other swaps each `word`, and where it is `masked` only words that a lane has to write. It adds
    halves in pairs where `paired`. Numbers and products are rounded to the dtype `rounded`, if there is one, before
    they are combined.
    """

    operation: str = ""
    number: str = ""
    scaled: bool = False
    native: bool = False
    paired: bool = False
    masked: bool = False
    compute: Any = None
    word: Any = None
    rounded: Any = None


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
    if WRITING.rounded is not None:
        value = value.to(WRITING.rounded).to(WRITING.compute)
    if WRITING.operation == "":
        tl.store(target + far, value.to(target.dtype.element_ty), mask=mask)
    elif WRITING.paired:
        atomic_add_16bit(target, far, value.to(target.dtype.element_ty), mask, reach)
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


def widened(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of 16-bit floats in float32, with the strides of a tensor `like` it."""
    wide = empty_strided(like.shape, like.stride(), opmath(tensor.dtype), tensor.device)
    move(tensor, wide)
    return wide


def _accumulates_wide(
    target: torch.Tensor, shape: Sequence[int], target_strides: Sequence[int], operation: str
) -> bool:
    """Whether sums and products of 16-bit floats are accumulated in a copy of the target in float32.

    They are where an element may get several updates: as many as there are along the dimensions that only indices
    count. On a GPU, whose own addition of 16-bit floats ATen uses too, the copy must not cost more than the updates,
    so the target must have no more elements than there are updates, or few.
    """
    if operation not in (ADD, MULTIPLY) or opmath(target.dtype) is target.dtype:
        return False
    if math.prod([size for size, stride in zip(shape, target_strides, strict=True) if stride == 0]) == 1:
        return False
    reach = span(target.shape, target.stride())
    return target.device.type == "cpu" or reach <= max(_SMALL, math.prod(shape))


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
    start: torch.Tensor | None = None,
) -> None:
    """Write to `target`, at the places that its strides over `shape`, and indices, tell.

    What is written are `values`, with their strides over `shape`, or a `number`, or their products. An `operation`
    (ADD, MULTIPLY, LARGEST, SMALLEST) combines them with what is there; without one the values have the target's dtype,
    and of several values for a place it is not defined which remains. Index tensors are as for `read_at`. A target that
    is not `start`, if that is given, first becomes a copy of it.
    """
    start = target if start is None else start
    wide = 0 not in shape and _accumulates_wide(target, shape, target_strides, operation)
    if start is not target and not wide and target.numel():
        target.copy_(start)
    if 0 in shape:
        return
    total = target
    if wide:
        total = widened(start, target)
    places_of = Space.of(
        *(shape, value_strides or (0,) * len(shape), target_strides, indices),
        8 if number is not None or operation else target.dtype.itemsize,
    )
    _launch(total, places_of, values, _as_integer(number), operation, wraps, message, target.dtype)
    if wide:
        move(total, target)


def _launch(
    target: torch.Tensor,
    space: Space,
    values: torch.Tensor | None,
    number: Any,
    operation: str,
    wraps: bool,
    message: str,
    dtype: torch.dtype,
) -> None:
    """Write to a target, which accumulates what is rounded to `dtype` in the end."""
    facts = space.facts(target.dtype.itemsize, wraps, message)
    if operation:
        # One lane an element at least, since lanes that have the same one would both combine it.
        facts = dataclasses.replace(facts, block=_filling(facts.block))
    if number is None and not operation:
        assert values is not None
        target, values = words(target), words(values)
        writing = Writing()
    else:
        writing = _combining(target, values, number, operation, dtype)
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


def _combining(
    target: torch.Tensor, values: torch.Tensor | None, number: Any, operation: str, dtype: torch.dtype
) -> Writing:
    """How numbers are written, or elements combined."""
    native = operation == ADD and _adds_in_memory(target.dtype, target.device)
    scaled = number is not None and values is not None
    # Numbers are converted to bools and to integers of 8 bits by way of wider ones.
    compute = torch.uint8 if target.dtype is torch.bool else opmath(target.dtype)
    # ATen converts a number first, and rounds products before it adds them, which costs a wide sum some of its digits.
    rounds = bool(operation) and number is not None and not (scaled and dtype is not target.dtype)
    return Writing(
        operation=operation,
        number="" if number is None else "float" if number_type(number) is float else "int",
        scaled=scaled,
        native=native,
        paired=native and target.dtype.itemsize == 2 and devices.current.ptx,
        masked=devices.current.ptx,
        compute=TRITON_DTYPES[target.dtype if target.dtype is torch.bool and not operation else compute],
        word={2: tl.int16, 4: tl.int32, 8: tl.int64}.get(target.dtype.itemsize),
        rounded=TRITON_DTYPES[dtype] if rounds else None,
    )


def _filling(block: tuple[int, int]) -> tuple[int, int]:
    """A block of 128 elements at least."""
    return max(block[0], 128 // block[1]), block[1]
