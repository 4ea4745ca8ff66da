"""Kernels that reduce the tensors of a list: partial states by program, then the states of a tensor or of the list."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tritonite.engine.lists.kernels import find_tensor
from tritonite.engine.lists.table import SIZES
from tritonite.language.math import minimum_nan
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.reduce import reduce_all, reduce_rows
from tritonite.runtime.libentry import libentry

# The rows of addresses in the table of a reduction: the list's tensors, and the results, if each tensor has one.
INPUTS, RESULTS = tl.constexpr(2), tl.constexpr(3)


@dataclass(frozen=True)
class ReduceListMeta:
    """The compile-time parameters of the kernels of this module.

    Triton's caches identify a function within an object by its name alone, so `__repr__`, which the caches use,
    includes a digest of the functions' sources.

    Attributes:
        leaf, combine, project, init: those of a `Reduction` whose state is one value.
        compute: the Triton dtype of a state in registers; in memory it may be wider.
        block: the elements, or states of a tensor, that a program loads at a time.
        memory: the Triton dtype of the tensors' elements, for kernels that read them.
        result: the Triton dtype of results in memory, for kernels that write them.
        leaf_number, number: whether `leaf` and `project` take the call's number.
        rows: the tensors whose states a program combines.
        aligned: whether all addresses are multiples of 16 bytes.
    """

    leaf: Any
    combine: Any
    project: Any
    init: float | int
    compute: Any
    block: int
    memory: Any = None
    result: Any = None
    leaf_number: bool = False
    number: bool = False
    rows: int = 1
    aligned: bool = False

    @functools.cached_property
    def _digest(self) -> str:
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        sources = [getattr(value, "cache_key", "") for value in fields]
        return hashlib.sha256(repr((fields, sources)).encode()).hexdigest()[:24]

    def __repr__(self) -> str:
        return f"ReduceListMeta_{self._digest}"


@triton.constexpr_function
def _pointer(dtype):
    return tl.pointer_type(dtype)


@triton.jit
def _leaf(address, offset, mask, number, META: tl.constexpr, MASKED: tl.constexpr):
    """Load a block and return the states of its elements."""
    if MASKED:
        values = tl.load(address + offset, mask=mask, other=0).to(META.compute)
    else:
        values = tl.load(address + offset).to(META.compute)
    if META.leaf_number:
        states = META.leaf(values, tl.full((1,), number, tl.float64))
    else:
        states = META.leaf(values)
    states = states.to(META.compute)
    if MASKED:
        states = tl.where(mask, states, META.init).to(META.compute)
    return states


@triton.jit
def _states_between(partial, begin, end, META: tl.constexpr):
    """Combine the partial states from index `begin` to `end`, in a fixed order."""
    state = tl.full((META.block,), META.init, META.compute)
    for start in range(begin, end, META.block):
        offset = start + tl.arange(0, META.block)
        mask = offset < end
        coming = tl.load(partial + offset, mask=mask, other=0).to(META.compute)
        state = META.combine(state, tl.where(mask, coming, META.init).to(META.compute))
    return reduce_all((state,), META.combine)[0]


@triton.jit
def _projected(state, count, number, META: tl.constexpr):
    """Return the results of states of `count` elements."""
    if META.number:
        result = META.project(state, count, tl.full((1,), number, tl.float64))
    else:
        result = META.project(state, count)
    return result


@libentry()
@triton.jit(do_not_specialize=["first", "count", "search_steps", "steps"])
def reduce_list(
    table,
    partial,
    first,
    count,
    search_steps,
    steps,
    number: tl.float64,
    META: tl.constexpr,
):
    """Reduce `steps` blocks of one tensor to a state, and store the state at the program's index, `first` added.

    Each lane of a block combines its elements of all blocks before the lanes are combined, so that roundoff grows with
    the logarithm of the block, and the order of combination is fixed. `search_steps` are the steps of a binary search
    among the `count` tensors of the table.
    """
    wait_for_previous_launch()
    program = tl.program_id(0)
    tensor, chunk = find_tensor(table, count, search_steps, program)
    size = tl.load(table + SIZES * count + tensor)
    address = tl.load(table + INPUTS * count + tensor).to(_pointer(META.memory))
    if META.aligned:
        address = tl.multiple_of(address, 16)
    begin = chunk.to(tl.int64) * steps * META.block
    whole = tl.minimum(steps, (size - begin) // META.block).to(tl.int32)
    state = tl.full((META.block,), META.init, META.compute)
    for step in range(whole):
        start = tl.multiple_of(begin + step * META.block, 16)
        offset = start + tl.arange(0, META.block)
        state = META.combine(state, _leaf(address, offset, None, number, META, False))
    start = tl.multiple_of(begin + whole * META.block, 16)
    if (whole < steps) & (start < size):
        offset = start + tl.arange(0, META.block)
        state = META.combine(state, _leaf(address, offset, offset < size, number, META, True))
    reduced = reduce_all((state,), META.combine)[0]
    tl.store(partial + (first + program + tl.arange(0, 1)), reduced.to(partial.dtype.element_ty))


@libentry()
@triton.jit(do_not_specialize=["count"])
def combine_list(table, partial, count, number: tl.float64, META: tl.constexpr):
    """Combine the partial states of each of `rows` tensors, and store the results at the addresses in the table."""
    wait_for_previous_launch()
    tensor = tl.program_id(0) * META.rows + tl.arange(0, META.rows)
    valid = tensor < count
    end = tl.load(table + tensor, mask=valid, other=0)
    begin = tl.load(table + tensor - 1, mask=valid & (tensor > 0), other=0)
    begin = tl.where(valid, begin, 0)
    state = tl.full((META.rows, META.block), META.init, META.compute)
    for start in range(0, tl.max(end - begin, 0).to(tl.int32), META.block):
        offset = begin[:, None] + (start + tl.arange(0, META.block))[None, :]
        mask = offset < end[:, None]
        coming = tl.load(partial + offset, mask=mask, other=0).to(META.compute)
        state = META.combine(state, tl.where(mask, coming, META.init).to(META.compute))
    reduced = reduce_rows((state,), META.combine)[0]
    size = tl.load(table + SIZES * count + tensor, mask=valid, other=1)
    result = _projected(reduced, size.to(tl.float64), number, META).to(META.result)
    address = tl.load(table + RESULTS * count + tensor, mask=valid, other=0).to(_pointer(META.result))
    tl.store(address, result, mask=valid)


@libentry()
@triton.jit(do_not_specialize=["count", "size"])
def combine_all(partial, total, factor, count, size, number: tl.float64, limit: tl.float64, META: tl.constexpr):
    """Combine all `count` partial states, of `size` elements, to a `total`, and store min(limit / (total + 1e-6), 1).

    One program runs. The quotient is stored in `factor`.
    """
    wait_for_previous_launch()
    state = _states_between(partial, 0, count, META)
    result = _projected(state, tl.full((1,), size, tl.float64), number, META).to(META.result)
    lane = tl.arange(0, 1)
    tl.store(total + lane, result)
    quotient = tl.full((1,), limit, tl.float64) / (result.to(tl.float64) + 1e-6)
    tl.store(factor + lane, minimum_nan(quotient, tl.full((1,), 1.0, tl.float64)).to(factor.dtype.element_ty))


@libentry()
@triton.jit(do_not_specialize=["count", "search_steps", "steps"])
def scale_list(
    table,
    factor,
    flag,
    count,
    search_steps,
    steps,
    MEMORY: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
):
    """Multiply `steps` blocks of one tensor by the element of `factor`.

    Row ROW of the table has the addresses of the results. An element that is inf or nan sets the element of
    `flag`, unless that is None, to 1. Several programs may store this same value.
    """
    wait_for_previous_launch()
    tensor, chunk = find_tensor(table, count, search_steps, tl.program_id(0))
    size = tl.load(table + SIZES * count + tensor)
    source = tl.load(table + INPUTS * count + tensor).to(_pointer(MEMORY))
    target = tl.load(table + ROW * count + tensor).to(_pointer(MEMORY))
    if ALIGNED:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    by = tl.load(factor).to(COMPUTE)
    begin = chunk.to(tl.int64) * steps * BLOCK
    whole = tl.minimum(steps, (size - begin) // BLOCK).to(tl.int32)
    unbounded = tl.zeros((BLOCK,), tl.int1)
    for step in range(whole):
        offset = tl.multiple_of(begin + step * BLOCK, 16) + tl.arange(0, BLOCK)
        values = tl.load(source + offset).to(COMPUTE)
        unbounded = unbounded | ((tl.abs(values) < float("inf")) == 0)
        tl.store(target + offset, (values * by).to(MEMORY))
    start = tl.multiple_of(begin + whole * BLOCK, 16)
    if (whole < steps) & (start < size):
        offset = start + tl.arange(0, BLOCK)
        values = tl.load(source + offset, mask=offset < size, other=0).to(COMPUTE)
        unbounded = unbounded | ((tl.abs(values) < float("inf")) == 0)
        tl.store(target + offset, (values * by).to(MEMORY), mask=offset < size)
    if flag is not None:
        tl.store(flag, 1.0, mask=tl.max(unbounded.to(tl.int32), 0) > 0)
