"""Rows that a program holds in registers, sorted by a bitonic network (Batcher 1968).

A key and the place that its element came from are one integer of 64 bits where they fit, so that no two are equal and
the order is stable; keys of 64 bits and places are two, which are compared one after the other.
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
from tritonite.engine.sorting.keys import Keys, Rows, ordered, words
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.reduce import exact_log2
from tritonite.runtime.libentry import libentry

# The longest row that a program sorts, and how many elements of several it takes.
LONGEST = 2048
_ELEMENTS = 1024
_LAST = tl.constexpr(2**63 - 1)
# Which element of a row is selected: one by its rank, or the middle one, also of those that are not nan.
BY_RANK, MEDIAN, NANMEDIAN = range(3)


def _like(state: Any, data: np.ndarray) -> Any:
    return tl.tensor(TensorHandle(np.ascontiguousarray(data), state.dtype), state.type)


def _sort_in_interpreter(packed: Any) -> Any:
    return _like(packed, np.sort(packed.handle.data, axis=-1))


def _sort_pairs_in_interpreter(key: Any, place: Any) -> tuple[Any, Any]:
    order = np.lexsort((place.handle.data, key.handle.data), axis=-1)
    return tuple([_like(state, np.take_along_axis(state.handle.data, order, -1)) for state in (key, place)])  # type: ignore[return-value]


@triton.jit
def _sort_in_compiler(packed):
    return tl.sort(packed)


@triton.jit
def _compared(key, place, index, DIMENSIONS: tl.constexpr, STAGE: tl.constexpr, LEVEL: tl.constexpr):
    """Neighbours along a dimension of a hypercube in order: up and down by turns as the stage has it.

    Turns are bits of each element's `index`: of blocks of 0 and 1 along single dimensions Triton 3.6 fails in loops.
    """
    other = key ^ tl.xor_sum(key, DIMENSIONS - 1 - LEVEL, True)
    other_place = place ^ tl.xor_sum(place, DIMENSIONS - 1 - LEVEL, True)
    larger = (key > other) | ((key == other) & (place > other_place))
    swapped = larger != ((((index >> LEVEL) ^ (index >> STAGE)) & 1) != 0)
    return tl.where(swapped, other, key), tl.where(swapped, other_place, place)


@triton.jit
def sort_pairs_by_network(key, place):
    """Rows of (key, place), sorted by the keys and where they are equal by the places."""
    SHAPE: tl.constexpr = key.shape
    DIMENSIONS: tl.constexpr = exact_log2(key.numel)
    STAGES: tl.constexpr = exact_log2(key.shape[1])
    index = tl.broadcast_to(tl.arange(0, SHAPE[1])[None, :], SHAPE)
    key, place = tl.reshape(key, [2] * DIMENSIONS), tl.reshape(place, [2] * DIMENSIONS)
    index = tl.reshape(index, [2] * DIMENSIONS)
    for stage in tl.static_range(1, STAGES + 1):
        for i in tl.static_range(stage):
            key, place = _compared(key, place, index, DIMENSIONS, stage, stage - 1 - i)
    return tl.reshape(key, SHAPE), tl.reshape(place, SHAPE)


# Triton's reductions of single elements, of which networks are made, take the interpreter seconds.
sort_integers = _sort_in_interpreter if devices.current.interpreted else _sort_in_compiler
sort_pairs = _sort_pairs_in_interpreter if devices.current.interpreted else sort_pairs_by_network


@triton.jit
def _sorted_places(words, offset, n, rows, column, step, KEYS: tl.constexpr):
    """(keys, places) of rows in order, both of int64, what is beyond their ends behind all others."""
    mask = rows[:, None] & (column < n)[None, :]
    key = ordered(tl.load(words + offset[:, None] + (column * step)[None, :], mask=mask, other=0), KEYS)
    place = tl.broadcast_to(column.to(tl.int64)[None, :], key.shape)
    if KEYS.bits == 64:
        key, place = sort_pairs(tl.where(mask, key, _LAST), place)
    else:
        packed = sort_integers(tl.where(mask, (key.to(tl.int64) << 32) | place, _LAST))
        key, place = packed >> 32, packed & 0xFFFFFFFF
    return key, place


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n", "limit"])
def _sort_rows(
    values,
    indices,
    words,
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
    """A program writes the first `limit` elements of each of its rows in order, and the places that they came from.

    Where they have a number `given`, that is written for a place.
    """
    wait_for_previous_launch()
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(INDEX)
    rows = row < n_rows
    source = strided_offset(row, shape, strides[0])
    _, place = _sorted_places(words, source, n, rows, column, steps[0], KEYS)
    place = place.to(INDEX)
    mask = rows[:, None] & (column < limit)[None, :]
    if len(values) > 0:
        word = tl.load(words + source[:, None] + place * steps[0], mask=mask, other=0)
        target = strided_offset(row, shape, strides[1])
        tl.store(values[0] + target[:, None] + (column * steps[1])[None, :], word, mask=mask)
    if len(indices) > 0:
        number = place
        if len(given) > 0:
            number = tl.load(given[0] + strided_offset(row, shape, strides[3])[:, None] + place * steps[3], mask=mask)
        target = strided_offset(row, shape, strides[2])
        pointers = indices[0] + target[:, None] + (column * steps[2])[None, :]
        tl.store(pointers, number.to(indices[0].dtype.element_ty), mask=mask)


@triton.jit
def wanted_rank(n, nans, rank, MODE: tl.constexpr):
    """The rank of the element that is selected of n, of which some are nan, and those are the last."""
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
    words,
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
    """A program writes one element of each of its rows, by its rank, and its place."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(INDEX)
    rows = row < n_rows
    source = strided_offset(row, shape, strides[0])
    key, place = _sorted_places(words, source, n, rows, column, step, KEYS)
    nans = tl.zeros((ROWS,), tl.int32)
    if MODE != 0 and KEYS.infinity > 0:
        nan = (key == 2 ** (KEYS.bits - 1) - 1) & (column < n)[None, :]
        nans = tl.sum(nan.to(tl.int32), axis=1)
    chosen = column[None, :] == wanted_rank(n, nans, rank, MODE)[:, None]
    place = tl.sum(tl.where(chosen, place, 0), axis=1)
    if len(values) > 0:
        word = tl.load(words + source + place.to(INDEX) * step, mask=rows, other=0)
        tl.store(values[0] + strided_offset(row, shape, strides[1]), word, mask=rows)
    if len(indices) > 0:
        tl.store(indices[0] + strided_offset(row, shape, strides[2]), place, mask=rows)


def _grid(n_rows: int, n: int) -> tuple[tuple[int], dict[str, Any]]:
    """How many programs there are, and how many rows and columns each has."""
    columns = max(2, power_of_2(n))
    rows = min(max(1, _ELEMENTS // columns), power_of_2(n_rows))
    warps = min(16, max(1, rows * columns // 128))
    return (-(-n_rows // rows),), {"ROWS": rows, "COLUMNS": columns, "num_warps": warps}


def sort_rows(
    x: torch.Tensor,
    dim: int,
    keys: Keys,
    values: torch.Tensor | None,
    indices: torch.Tensor | None,
    given: torch.Tensor | None = None,
) -> None:
    """Sort rows of LONGEST elements at most; what is written of each is as many as there are in `values`."""
    every = [
        tensor if tensor is not None else values if values is not None else indices for tensor in (values, indices)
    ]
    rows = Rows((x, *every, x if given is None else given), dim)  # type: ignore[arg-type]
    n, limit = x.shape[dim], every[0].shape[dim]  # type: ignore[union-attr]
    grid, block = _grid(rows.n_rows, n)
    _sort_rows[grid](
        () if values is None else (words(values),),
        () if indices is None else (indices,),
        words(x),
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
    """Select of rows of LONGEST elements at most; results have size 1 along the dimension."""
    rows = Rows((x, values, values if indices is None else indices), dim)
    grid, block = _grid(rows.n_rows, x.shape[dim])
    _select_rows[grid](
        (words(values),),
        () if indices is None else (indices,),
        words(x),
        *(rows.shape, rows.strides, rows.n_rows, x.shape[dim], rows.steps[0], rank),
        MODE=mode,
        KEYS=Keys.of(x.dtype),
        INDEX=rows.index,
        **block,
    )
