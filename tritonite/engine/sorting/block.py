"""Rows that a program sorts in registers by a bitonic network (Batcher 1968).

A key of 32 bits at most and its element's index are packed into one int64, so that no two are equal and the order is
stable. A 64-bit key and its index are a pair, compared by key and then by index.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tritonite import devices
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting.keys import Keys, Rows, as_integers, signed_key
from tritonite.engine.sorting.table import sorting_table
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.reduce import exact_log2
from tritonite.runtime.libentry import libentry

_LAST = tl.constexpr(2**63 - 1)
# Modes of selection: the element of a given rank, the median (nan if the row has one), the median of all but nan.
BY_RANK, MEDIAN, NANMEDIAN = range(3)


def _like(state: Any, data: np.ndarray) -> Any:
    return tl.tensor(TensorHandle(np.ascontiguousarray(data), state.dtype), state.type)


def _sort_in_interpreter(packed: Any) -> Any:
    return _like(packed, np.sort(packed.handle.data, axis=-1))


def _sort_pairs_in_interpreter(key: Any, index: Any) -> tuple[Any, Any]:
    order = np.lexsort((index.handle.data, key.handle.data), axis=-1)
    return tuple([_like(state, np.take_along_axis(state.handle.data, order, -1)) for state in (key, index)])  # type: ignore[return-value]


@triton.jit
def _sort_in_compiler(packed):
    return tl.sort(packed)


@triton.jit
def _compare_and_swap(key, index, lane, DIMENSIONS: tl.constexpr, STAGE: tl.constexpr, LEVEL: tl.constexpr):
    """Compare and swap pairs of neighbours along one dimension of a hypercube of (key, index).

    Bit STAGE of an element's `lane` in its row says whether its pair is put in ascending or descending order. The bits
    are computed from lanes because Triton 3.6 fails in loops on blocks of 0 and 1 along single dimensions.
    """
    other = key ^ tl.xor_sum(key, DIMENSIONS - 1 - LEVEL, True)
    other_index = index ^ tl.xor_sum(index, DIMENSIONS - 1 - LEVEL, True)
    larger = (key > other) | ((key == other) & (index > other_index))
    swapped = larger != ((((lane >> LEVEL) ^ (lane >> STAGE)) & 1) != 0)
    return tl.where(swapped, other, key), tl.where(swapped, other_index, index)


@triton.jit
def sort_pairs_by_network(key, index):
    """Sort rows of (key, index) pairs by key, and pairs of equal keys by index."""
    SHAPE: tl.constexpr = key.shape
    DIMENSIONS: tl.constexpr = exact_log2(key.numel)
    STAGES: tl.constexpr = exact_log2(key.shape[1])
    lane = tl.broadcast_to(tl.arange(0, SHAPE[1])[None, :], SHAPE)
    key, index = tl.reshape(key, [2] * DIMENSIONS), tl.reshape(index, [2] * DIMENSIONS)
    lane = tl.reshape(lane, [2] * DIMENSIONS)
    for stage in tl.static_range(1, STAGES + 1):
        for i in tl.static_range(stage):
            key, index = _compare_and_swap(key, index, lane, DIMENSIONS, stage, stage - 1 - i)
    return tl.reshape(key, SHAPE), tl.reshape(index, SHAPE)


# The interpreter takes seconds for a network, which is made of reductions of two elements; it sorts by NumPy.
sort_integers = _sort_in_interpreter if devices.current.interpreted else _sort_in_compiler
sort_pairs = _sort_pairs_in_interpreter if devices.current.interpreted else sort_pairs_by_network


@triton.jit
def _sorted_keys(x, offset, n, rows, column, step, KEYS: tl.constexpr):
    """Load rows and return (keys, indices), both int64, in sorted order. Columns from n on sort last."""
    mask = rows[:, None] & (column < n)[None, :]
    key = signed_key(tl.load(x + offset[:, None] + (column * step)[None, :], mask=mask, other=0), KEYS)
    index = tl.broadcast_to(column.to(tl.int64)[None, :], key.shape)
    if KEYS.bits == 64:
        key, index = sort_pairs(tl.where(mask, key, _LAST), index)
    else:
        packed = sort_integers(tl.where(mask, (key.to(tl.int64) << 32) | index, _LAST))
        key, index = packed >> 32, packed & 0xFFFFFFFF
    return key, index


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n", "limit"])
def _sort_rows(
    values,
    indices,
    x,
    given,
    shape,
    strides,
    steps,
    n_rows,
    n,
    limit,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sort the program's rows; write the first `limit` elements of each, and their indices.

    If the elements have numbers `given`, these are written instead of the indices.
    """
    wait_for_previous_launch()
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(INDEX)
    rows = row < n_rows
    source = strided_offset(row, shape, strides[0])
    _, index = _sorted_keys(x, source, n, rows, column, steps[0], KEYS)
    index = index.to(INDEX)
    mask = rows[:, None] & (column < limit)[None, :]
    if len(values) > 0:
        value = tl.load(x + source[:, None] + index * steps[0], mask=mask, other=0)
        target = strided_offset(row, shape, strides[1])
        tl.store(values[0] + target[:, None] + (column * steps[1])[None, :], value, mask=mask)
    if len(indices) > 0:
        number = index
        if len(given) > 0:
            number = tl.load(given[0] + strided_offset(row, shape, strides[3])[:, None] + index * steps[3], mask=mask)
        target = strided_offset(row, shape, strides[2])
        pointers = indices[0] + target[:, None] + (column * steps[2])[None, :]
        tl.store(pointers, number.to(indices[0].dtype.element_ty), mask=mask)


@triton.jit
def wanted_rank(n, nans, rank, MODE: tl.constexpr):
    """Return the rank of the element that MODE selects of n elements, the last `nans` of which are nan."""
    if MODE == 0:
        result = nans * 0 + rank
    elif MODE == 1:
        result = tl.where(nans > 0, n - nans, (n - 1) // 2)
    else:
        result = (tl.maximum(n - nans, 1) - 1) // 2
    return result


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n", "rank"])
def _select_rows(
    values,
    indices,
    x,
    shape,
    strides,
    n_rows,
    n,
    step,
    rank,
    MODE: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the element of a rank of each of the program's rows, and its index."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(INDEX)
    rows = row < n_rows
    source = strided_offset(row, shape, strides[0])
    key, index = _sorted_keys(x, source, n, rows, column, step, KEYS)
    nans = tl.zeros((ROWS,), tl.int32)
    if MODE != 0 and KEYS.infinity > 0:
        nan = (key == 2 ** (KEYS.bits - 1) - 1) & (column < n)[None, :]
        nans = tl.sum(nan.to(tl.int32), axis=1)
    chosen = column[None, :] == wanted_rank(n, nans, rank, MODE)[:, None]
    index = tl.sum(tl.where(chosen, index, 0), axis=1)
    if len(values) > 0:
        value = tl.load(x + source + index.to(INDEX) * step, mask=rows, other=0)
        tl.store(values[0] + strided_offset(row, shape, strides[1]), value, mask=rows)
    if len(indices) > 0:
        tl.store(indices[0] + strided_offset(row, shape, strides[2]), index, mask=rows)


def _grid(n_rows: int, n: int) -> tuple[tuple[int], dict[str, Any]]:
    """Return (the grid, the options of a launch): the rows and columns of a program, and its warps."""
    columns = max(2, power_of_2(n))
    rows = min(max(1, sorting_table().network_elements // columns), power_of_2(n_rows))
    warps = min(16, devices.warps(rows * columns // 4))
    return (-(-n_rows // rows),), {"ROWS": rows, "COLUMNS": columns, "num_warps": warps}


def sort_rows(
    x: torch.Tensor,
    dim: int,
    keys: Keys,
    values: torch.Tensor | None,
    indices: torch.Tensor | None,
    given: torch.Tensor | None = None,
) -> None:
    """Sort rows of at most 2,048 elements, and write the first elements of each.

    The size of `values`, or else of `indices`, along `dim` is the number of elements that are written. `indices` gets
    the indices of the elements, or the numbers `given` for them.
    """
    every = [
        tensor if tensor is not None else values if values is not None else indices for tensor in (values, indices)
    ]
    rows = Rows((x, *every, x if given is None else given), dim)  # type: ignore[arg-type]
    n, limit = x.shape[dim], every[0].shape[dim]  # type: ignore[union-attr]
    grid, block = _grid(rows.n_rows, n)
    _sort_rows[grid](
        () if values is None else (as_integers(values),),
        () if indices is None else (indices,),
        as_integers(x),
        () if given is None else (given,),
        *(rows.shape, rows.strides, rows.steps, rows.n_rows, n, limit),
        KEYS=keys,
        INDEX=rows.index,
        **block,
    )


def select_rows(
    x: torch.Tensor,
    dim: int,
    rank: int,
    mode: int,
    values: torch.Tensor,
    indices: torch.Tensor | None,
) -> None:
    """Write one element, and its index, of each row of at most 2,048 elements. Results have size 1 along `dim`."""
    rows = Rows((x, values, values if indices is None else indices), dim)
    grid, block = _grid(rows.n_rows, x.shape[dim])
    _select_rows[grid](
        (as_integers(values),),
        () if indices is None else (indices,),
        as_integers(x),
        *(rows.shape, rows.strides, rows.n_rows, x.shape[dim], rows.steps[0], rank),
        MODE=mode,
        KEYS=Keys.of(x.dtype),
        INDEX=rows.index,
        **block,
    )
