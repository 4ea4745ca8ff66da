"""Scatter: write values to the elements that index tensors select, or combine values with those elements.

Elements are combined by atomics: the device's own addition if it has one for the dtype, otherwise a loop of compare and
swap. So the order of additions differs from run to run, as in ATen's kernels.

Sums and products of 16-bit floats are accumulated in float32 and rounded once, because a 16-bit sum stops growing:
bfloat16 counts no further than 256. `_accumulates_wide` says for which calls.
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
from tritonite.engine.indexing.indices import IN_RANGE, Index, IndexedSpace
from tritonite.engine.indexing.read import element_offsets, rows_and_columns
from tritonite.engine.indexing.table import indexing_table
from tritonite.engine.iteration import span
from tritonite.engine.movement import move, words
from tritonite.language.atomic import atomic_add_16bit, compare_and_swap
from tritonite.language.math import maximum_nan, minimum_nan
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty_strided
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry
from tritonite.runtime.symbols import Number, number_type

# Dtypes whose atomic addition every device has.
_ADDED_IN_MEMORY = (torch.float32, torch.float64, torch.int32, torch.int64)
# Warps of a program.
_WARPS = 4
ADD, MULTIPLY, LARGEST, SMALLEST = "add", "multiply", "largest", "smallest"


@triton.jit
def _combined(x, y, OPERATION: tl.constexpr, FLAGS: tl.constexpr):
    """Combine two elements; FLAGS says that they are bools, as the integers 0 and 1."""
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
    """Return the element in a word: the whole word, or the byte at bit `shift` of an int32."""
    if ELEMENT.primitive_bitwidth < 16:
        value = (word >> shift).to(tl.int8).to(tl.uint8 if tl.int1 == ELEMENT else ELEMENT, bitcast=True)
    else:
        value = word.to(ELEMENT, bitcast=True)
    return value.to(COMPUTE)


@triton.jit
def _word_with(word, value, shift, ELEMENT: tl.constexpr):
    """Return the word with another element in it."""
    if ELEMENT.primitive_bitwidth < 16:
        bits = value.to(tl.int32) & 0xFF
        result = (word & ~(tl.full(word.shape, 0xFF, tl.int32) << shift)) | (bits << shift)
    else:
        result = value.to(ELEMENT).to(word.dtype, bitcast=True)
    return result


@triton.jit
def _combine_by_swapping(target, offset, value, mask, WRITING: tl.constexpr):
    """Combine elements of `target` with values by compare and swap.

    A lane retries until no other has changed its word in between. Unless WRITING.masked, idle lanes swap a word with
    itself.
    """
    ELEMENT: tl.constexpr = target.dtype.element_ty
    FLAGS: tl.constexpr = tl.int1 == ELEMENT
    OPERATION: tl.constexpr = WRITING.operation
    COMPUTE: tl.constexpr = WRITING.compute
    pointers = target + tl.where(mask, offset, 0)
    if ELEMENT.primitive_bitwidth < 16:
        address = pointers.to(tl.int64)
        shift = ((address & 3) * 8).to(tl.int32)
        swapped = (address & -4).to(tl.pointer_type(tl.int32))
    else:
        shift = 0
        swapped = pointers.to(tl.pointer_type(WRITING.word), bitcast=True)
    # Read from L2, since L1 may have a value from before the atomics.
    old = tl.load(swapped, cache_modifier=".cg")
    pending = mask
    while tl.max(pending.to(tl.int32), axis=None) > 0:
        combined = _combined(_element_of(old, shift, ELEMENT, COMPUTE), value, OPERATION, FLAGS)
        wanted = tl.where(pending, _word_with(old, combined, shift, ELEMENT), old)
        if OPERATION == "largest" or OPERATION == "smallest" or FLAGS:
            # These operations are monotonic: an element that the value does not change needs no write.
            pending = pending & (wanted != old)
        if WRITING.masked:
            found = compare_and_swap(swapped, old, wanted, pending)
        else:
            found = tl.atomic_cas(swapped, old, wanted, sem="relaxed")
        pending = pending & (found != old)
        old = found


@dataclasses.dataclass(frozen=True)
class Writing:
    """Compile-time facts of a scatter, besides its `IndexedMeta`.

    `operation` combines values with elements, in the dtype `compute`; "" overwrites them.
    `number` is "float" or "int" if a number is written, or is a factor of the values if `scaled`; "" for none.
    `native` uses the device's atomic addition; `paired` adds 16-bit floats in pairs.
    `masked` says that compare and swap takes a mask; `word` is the dtype that is swapped.
    `rounded` is the dtype to which numbers and products are rounded before they are combined, or None.
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
    column_strides,
    ranges,
    n_rows,
    n_columns,
    reach,
    META: tl.constexpr,
    WRITING: tl.constexpr,
):
    """Write or combine a block of the space. `reach` is the number of elements that the target spans in memory."""
    wait_for_previous_launch()
    row, column = rows_and_columns(n_columns, META)
    direct, _, indexed, mask = element_offsets(
        indices, row, column, n_rows, n_columns, shape, strides, column_strides, ranges, META
    )
    if WRITING.number == "float":
        given = tl.full(indexed.shape, number, tl.float64).to(WRITING.compute)
    elif WRITING.number == "int":
        given = tl.full(indexed.shape, integer, tl.int64)
        if target.dtype.element_ty == tl.int1:
            given = given != 0
        given = given.to(WRITING.compute)
    if WRITING.number != "" and not WRITING.scaled:
        value = given
    else:
        value = tl.load(values + direct, mask=mask, other=0)
        if WRITING.operation != "":
            value = value.to(WRITING.compute)
        if WRITING.scaled:
            value = value * given
    if WRITING.rounded is not None:
        value = value.to(WRITING.rounded).to(WRITING.compute)
    if WRITING.operation == "":
        tl.store(target + indexed, value.to(target.dtype.element_ty), mask=mask)
    elif WRITING.paired:
        atomic_add_16bit(target, indexed, value.to(target.dtype.element_ty), mask, reach)
    elif WRITING.native:
        tl.atomic_add(target + indexed, value.to(target.dtype.element_ty), mask=mask, sem="relaxed")
    else:
        _combine_by_swapping(target, indexed, value, mask, WRITING)


def _as_integer(number: Any) -> Any:
    """Return a bool as an int, since kernels have no parameter for it, and other numbers as they are."""
    if isinstance(number, Number) and type(number.value) is bool:
        whole = Number(int(number.value), number.argument, number.item, number.keyed)
        whole.limits = number.limits
        return whole
    return int(number) if type(number) is bool else number


def _adds_in_memory(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype is torch.bfloat16:
        # NVIDIA's devices have it from sm_90 on.
        return devices.current.ptx and devices.has_tma(device)
    return dtype in _ADDED_IN_MEMORY or (dtype is torch.float16 and not devices.current.interpreted)


def widened(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of 16-bit floats in float32, with the strides of `like`."""
    wide = empty_strided(like.shape, like.stride(), opmath(tensor.dtype), tensor.device)
    move(tensor, wide)
    return wide


def _accumulates_wide(
    target: torch.Tensor, shape: Sequence[int], target_strides: Sequence[int], operation: str
) -> bool:
    """Return whether a sum or product of 16-bit floats is accumulated in a float32 copy of the target.

    An element must be able to get several updates: some dimension of the space is addressed by indices only. On a GPU
    ATen adds 16-bit floats without a copy. There the target must also be small, or have no more elements than there are
    updates, so that the copy costs no more than these.
    """
    if operation not in (ADD, MULTIPLY) or opmath(target.dtype) is target.dtype:
        return False
    if math.prod([size for size, stride in zip(shape, target_strides, strict=True) if stride == 0]) == 1:
        return False
    reach = span(target.shape, target.stride())
    return devices.current.aten == "cpu" or reach <= max(indexing_table().small_target, math.prod(shape))


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
    """Write to the elements of `target` that the indices select.

    `shape` is the space of updates; `target_strides` are 0 along dimensions that only indices address. The updates are
    `values`, with `value_strides` over the space, or a `number`, or their products. `operation` (ADD, MULTIPLY,
    LARGEST, SMALLEST) combines updates with elements. Without it, values have the target's dtype, and one of several
    updates of an element remains. Index tensors are as for `read_at`. If `start` is given and not the target, the
    target first becomes a copy of it.
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
    space = IndexedSpace.of(
        *(shape, value_strides or (0,) * len(shape), target_strides, indices),
        8 if number is not None or operation else target.dtype.itemsize,
    )
    _launch(total, space, values, _as_integer(number), operation, wraps, message, target.dtype)
    if wide:
        move(total, target)


def _launch(
    target: torch.Tensor,
    space: IndexedSpace,
    values: torch.Tensor | None,
    number: Any,
    operation: str,
    wraps: bool,
    message: str,
    dtype: torch.dtype,
) -> None:
    """Write to a target whose elements are rounded to `dtype` after this launch."""
    meta = space.meta(target.dtype.itemsize, wraps, message)
    if operation:
        # With fewer elements than threads, two threads would combine the same element.
        meta = dataclasses.replace(meta, block=_filling(meta.block))
    if number is None and not operation:
        assert values is not None
        target, values = words(target), words(values)
        writing = Writing()
    else:
        writing = _combining(target, values, number, operation, dtype)
    floating = writing.number == "float"
    _write_at[(space.programs(meta),)](
        *(target, values, number if floating else 0.0, number if writing.number == "int" else 0),
        *space.arguments(),
        span(target.shape, target.stride()) if writing.paired else 0,
        META=meta,
        WRITING=writing,
        num_warps=_WARPS,
        **ASSERTING,
    )


def _combining(
    target: torch.Tensor, values: torch.Tensor | None, number: Any, operation: str, dtype: torch.dtype
) -> Writing:
    """Return the facts of a launch that writes a number or combines elements."""
    native = operation == ADD and _adds_in_memory(target.dtype, target.device)
    scaled = number is not None and values is not None
    # Bools are combined as uint8.
    compute = torch.uint8 if target.dtype is torch.bool else opmath(target.dtype)
    # ATen rounds numbers and products to the dtype before it adds them. A wide sum does not round products, which
    # keeps digits that ATen loses.
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
    """Return a block of at least one element for each thread."""
    return max(block[0], _WARPS * devices.warp_size() // block[1]), block[1]
