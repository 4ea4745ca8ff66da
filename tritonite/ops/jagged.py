"""Sequences of different lengths that lie end to end, and padded to one length."""

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import FLOATS, INTS, TRITON_DTYPES, opmath
from tritonite.engine.iteration import contiguous_strides, offset_type, power_of_2
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.language.order import wait_for_previous_launch
from tritonite.ops.indexing import check_index
from tritonite.registry import operator
from tritonite.runtime.contract import empty
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

# Where ATen refuses sequences beyond the values; on a GPU it does not look.
_ON_CPU = devices.current.type == "cpu"


@libentry()
@triton.jit(do_not_specialize=["padding"])
def _pad(
    out,
    values,
    offsets,
    padding: tl.float64,
    n_rows,
    n_values,
    longest,
    n_columns,
    stride,
    CHECKS: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program writes a block of rows of padded sequences, of `longest` rows each."""
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)
    mask = row < n_rows
    sequence = row // longest
    begin = tl.load(offsets + sequence, mask=mask, other=0).to(tl.int64)
    end = tl.load(offsets + sequence + 1, mask=mask, other=0).to(tl.int64)
    if CHECKS:
        last = tl.minimum(end, begin + longest)
        tl.device_assert((mask == 0) | ((begin >= 0) & (begin <= end) & (last <= n_values)), "a sequence out of range")
    own = begin + row % longest
    exists = mask & (own < end) & (own >= 0) & (own < n_values)
    pointers = values + ((tl.where(exists, own, 0) * stride).to(INDEX)[:, None] + column[None, :])
    whole = (column < n_columns)[None, :]
    value = tl.load(pointers, mask=exists[:, None] & whole, other=0)
    rest = tl.full((ROWS, COLUMNS), padding, tl.float64).to(COMPUTE).to(value.dtype)
    value = tl.where(exists[:, None], value, rest)
    tl.store(out + ((row * n_columns)[:, None] + column[None, :]), value, mask=mask[:, None] & whole)


@operator("_jagged_to_padded_dense_forward", accepts=FLOATS)
def jagged_to_padded_dense(values, offsets, max_lengths, padding_value=0.0, outs=()):
    if len(offsets) != 1 or len(max_lengths) != 1 or not values.dim() or values.dtype not in FLOATS:
        raise Decline("sequences of sequences, or another dtype")
    if values.dim() > 2 and not _ON_CPU:
        raise Decline("elements of several dimensions, which ATen refuses on GPUs")
    (ends,), (longest,) = offsets, max_lengths
    check_index(ends)
    inner = tuple(values.shape[1:])
    if ends.dim() != 1 or len(ends) < 2 or not ends.is_contiguous() or longest <= 0 or not values.numel():
        raise Decline("no sequences")
    if values.stride()[1:] != contiguous_strides(inner):
        raise Decline("values that are not contiguous")
    outputs((values, ends), [], [], (), accepts=FLOATS + INTS)
    result = empty((len(ends) - 1, longest, *inner), values.dtype, values.device)
    n_rows, n_columns = (len(ends) - 1) * longest, values[0].numel()
    elements = devices.current.row_elements
    columns = min(elements, power_of_2(n_columns))
    rows = min(max(1, elements // columns), power_of_2(n_rows))
    _pad[(-(-n_rows // rows) * -(-n_columns // columns),)](
        *(result, values, ends, padding_value, n_rows, len(values), longest, n_columns, values.stride(0)),
        CHECKS=_ON_CPU,
        COMPUTE=TRITON_DTYPES[opmath(values.dtype)],
        INDEX=offset_type(result, values),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
        **ASSERTING,
    )
    return (result,)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_sequences", "n_searched", "longest"])
def _take_apart(
    out,
    dense,
    offsets,
    n_rows,
    n_sequences,
    n_searched,
    longest,
    n_columns,
    strides,
    CHECKS: tl.constexpr,
    STEPS: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program writes a block of rows, and zeros for rows of no sequence or beyond the padded length.

    It looks at the same of the first `n_searched` offsets after 0 as ATen's bisection does, whose answer depends on
    that where offsets are not in order.
    """
    wait_for_previous_launch()
    blocks = tl.cdiv(n_columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)
    mask = row < n_rows
    sequence = tl.zeros((ROWS,), tl.int32)
    count = sequence + n_searched
    for _ in tl.static_range(STEPS):
        step = count // 2
        looking = mask & (count > 0)
        begin = tl.load(offsets + sequence + 1 + step, mask=looking, other=0).to(tl.int64)
        further = looking & (begin <= row)
        sequence = tl.where(further, sequence + 1 + step, sequence)
        count = tl.where(further, count - step - 1, step)
    place = row.to(tl.int64) - tl.load(offsets + sequence, mask=mask, other=0).to(tl.int64)
    if CHECKS:
        end = tl.load(offsets + sequence + 1, mask=mask, other=0).to(tl.int64)
        total = tl.load(offsets + n_sequences).to(tl.int64)
        fits = (place >= 0) & (place < longest) & (row < end) & (total == n_rows)
        tl.device_assert((mask == 0) | fits, "sequences that are longer than the padded ones, or of another length")
        for i in range(n_sequences):
            length = tl.load(offsets + i + 1).to(tl.int64) - tl.load(offsets + i).to(tl.int64)
            tl.device_assert((length >= 0) & (length <= longest), "a sequence longer than the padded ones, or below 0")
    exists = mask & (sequence < n_sequences) & (place >= 0) & (place < longest)
    begins = tl.where(exists, sequence, 0).to(INDEX) * strides[0] + tl.where(exists, place, 0).to(INDEX) * strides[1]
    whole = (column < n_columns)[None, :]
    value = tl.load(dense + begins[:, None] + (column * strides[2])[None, :], mask=exists[:, None] & whole, other=0)
    tl.store(out + (row * n_columns)[:, None] + column[None, :], value, mask=mask[:, None] & whole)


def _are_aligned(dense: torch.Tensor) -> bool:
    """Whether ATen's kernel for rows of fp16 in words of 16 bytes takes a tensor."""
    aligned = dense.shape[2] % 8 == dense.stride(1) % 8 == dense.data_ptr() % 16 == 0
    return dense.dtype is torch.float16 and dense.stride(2) == 1 and aligned


@operator("_padded_dense_to_jagged_forward", accepts=FLOATS)
def padded_dense_to_jagged(dense, offsets, total_L=None, outs=()):
    if len(offsets) != 1 or dense.dim() != 3 or dense.dtype not in FLOATS or not dense.numel():
        raise Decline("sequences of sequences, or another dtype")
    (ends,) = offsets
    check_index(ends)
    if ends.dim() != 1 or len(ends) != len(dense) + 1 or not ends.is_contiguous():
        raise Decline("other sequences than those that are padded")
    if total_L is None or total_L < 0:
        raise Decline("a length that the host reads from the device, or a negative one")
    if not total_L and dense.device.type == "cpu":
        raise Decline("no rows, which ATen's kernel for CPUs compares with the last offset")
    outputs((dense, ends), [], [], (), accepts=FLOATS + INTS)
    n_columns = dense.shape[2]
    result = empty((total_L, n_columns), dense.dtype, dense.device)
    if not total_L:
        return (result,)
    elements = devices.current.row_elements
    columns = min(elements, power_of_2(n_columns))
    rows = min(max(1, elements // columns), power_of_2(total_L))
    # ATen's kernel for aligned rows of fp16 takes rows behind the last sequence for rows of that one.
    searched = len(dense) - (_ON_CPU or _are_aligned(dense))
    _take_apart[(-(-total_L // rows) * -(-n_columns // columns),)](
        *(result, dense, ends, total_L, len(dense), searched, dense.shape[1], n_columns, dense.stride()),
        CHECKS=_ON_CPU,
        STEPS=searched.bit_length(),
        INDEX=offset_type(result, dense),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
        **ASSERTING,
    )
    return (result,)
