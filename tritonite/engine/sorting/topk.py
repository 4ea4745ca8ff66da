"""Top-k: the k smallest keys of rows, without sorting the rows.

A row is split into groups: element i belongs to group i mod GROUPS. The k-th smallest of the groups' minima is a bound.
At least k elements are at or before the bound, and all elements before it are in fewer than k groups. So the number of
elements up to the bound has a limit that is known without the data. Those are selected, and then sorted. Elements with
equal keys are ordered by index, so that ties do not change the limit.

A row that one program holds takes two launches: `_select_from_held_rows`, `_sort_selected`. A longer row takes four:
`_find_minima` of the groups, `_find_bound`, `_select_to_bound`, `_sort_selected`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting.block import sort_integers, sort_pairs
from tritonite.engine.sorting.keys import Keys, Rows, as_integers, signed_key
from tritonite.engine.sorting.table import sorting_table
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry


@triton.jit
def last_key(KEYS: tl.constexpr):
    """Return the largest key, which stands for elements behind the row's end."""
    return (2**63 if KEYS.bits == 64 else 2**31) - 1


@triton.jit
def keys_of(pointers, mask, KEYS: tl.constexpr):
    """Load the signed keys of elements; masked lanes get the last key."""
    return tl.where(mask, signed_key(tl.load(pointers, mask=mask, other=0), KEYS), last_key(KEYS))


@triton.jit
def key_of_rank(key, mask, rank):
    """Return the key of a rank in each row, by bisection: the least key that more than `rank` keys do not exceed.

    Only keys of the mask bound the search.
    """
    low = tl.min(key, axis=1)
    high = tl.max(tl.where(mask, key, low[:, None]), axis=1)
    while tl.max((low < high).to(tl.int32), axis=0) > 0:
        middle = (low & high) + ((low ^ high) >> 1)
        enough = tl.sum((key <= middle[:, None]).to(tl.int32), axis=1) > rank
        searching = low < high
        low = tl.where(searching & (enough == 0), middle + 1, low)
        high = tl.where(searching & enough, middle, high)
    return low


@triton.jit
def _packed(key, index, INTEGER: tl.constexpr):
    """Pack a key (upper half) and an index (lower half) into one integer, which orders by key and then by index."""
    HALF: tl.constexpr = INTEGER.primitive_bitwidth // 2
    return (key.to(INTEGER) << HALF) | index.to(INTEGER)


@triton.jit
def _store_pairs(keys, indices, begin, target, key, index, mask, KEYS: tl.constexpr):
    """Store (key, index) pairs at `begin + target`: packed into `keys`, or in both tensors if keys have 64 bits."""
    if KEYS.bits == 64:
        tl.store(keys + begin + target, key, mask=mask)
        tl.store(indices[0] + begin + target, index.to(tl.int32), mask=mask)
    else:
        tl.store(keys + begin + target, _packed(key, index, keys.dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n", "k", "slots"])
def _select_from_held_rows(
    selected,
    selected_indices,
    counts,
    x,
    shape,
    strides,
    step,
    n_rows,
    n,
    k,
    slots,
    GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Select the elements up to the bound from each of the program's rows, which it holds in registers."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(INDEX)
    mask = (row < n_rows)[:, None] & (column < n)[None, :]
    key = keys_of(x + strided_offset(row, shape, strides)[:, None] + (column * step)[None, :], mask, KEYS)
    if GROUPS < COLUMNS:
        minima = tl.min(tl.reshape(key, (ROWS, COLUMNS // GROUPS, GROUPS)), axis=1)
        # The mask leaves out groups without elements.
        bound = key_of_rank(minima, (row < n_rows)[:, None] & (tl.arange(0, GROUPS) < n)[None, :], k - 1)
    else:
        bound = key_of_rank(key, mask, k - 1)
    smaller = mask & (key < bound[:, None])
    equal = mask & (key == bound[:, None])
    # One prefix sum counts both classes, 16 bits each.
    both = smaller.to(tl.int32) + (equal.to(tl.int32) << 16)
    count = tl.sum(both, axis=1)
    before = tl.cumsum(both, axis=1) - both
    n_smaller = count & 0xFFFF
    # With k smaller elements, none equal to the bound is needed.
    n_equal = tl.minimum(count >> 16, tl.maximum(k - n_smaller, 0))
    chosen = smaller | (equal & ((before >> 16) < n_equal[:, None]))
    target = tl.where(smaller, before & 0xFFFF, n_smaller[:, None] + (before >> 16))
    index = tl.broadcast_to(column[None, :], (ROWS, COLUMNS))
    _store_pairs(selected, selected_indices, (row.to(tl.int64) * slots)[:, None], target, key, index, chosen, KEYS)
    tl.store(counts + row, n_smaller + n_equal, mask=row < n_rows)


@libentry()
@triton.jit(do_not_specialize=["n", "group_blocks", "slices", "stripes"])
def _find_minima(
    minima,
    minimum_indices,
    x,
    shape,
    strides,
    step,
    n,
    group_blocks,
    slices,
    stripes,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    GROUPS: tl.constexpr,
    OWN: tl.constexpr,
    STRIPES: tl.constexpr,
):
    """Find the minima of OWN groups of a row in one slice of it, and their indices.

    A stripe is one element of every group; a slice has `stripes` of them, of which a block has STRIPES. The index of a
    group without elements in the slice is n.
    """
    wait_for_previous_launch()
    group_block = tl.program_id(0) % group_blocks
    slice_id = tl.program_id(0) // group_blocks % slices
    row = tl.program_id(0) // (group_blocks * slices)
    source = x + strided_offset(row.to(INDEX), shape, strides)
    group = group_block * OWN + tl.arange(0, OWN)
    stripe = tl.arange(0, STRIPES)
    best = tl.full((STRIPES, OWN), last_key(KEYS), tl.int64 if KEYS.bits == 64 else tl.int32)
    best_index = tl.zeros((STRIPES, OWN), tl.int32) + n
    for begin in range(slice_id * stripes, (slice_id + 1) * stripes, STRIPES):
        index = (begin + stripe).to(INDEX)[:, None] * GROUPS + group[None, :]
        mask = (index < n) & (begin + stripe < (slice_id + 1) * stripes)[:, None]
        key = keys_of(source + index * step, mask, KEYS)
        better = mask & ((key < best) | (best_index == n))
        best = tl.where(better, key, best)
        best_index = tl.where(better, index.to(tl.int32), best_index)
    key = tl.min(best, axis=0)
    index = tl.min(tl.where(best == key[None, :], best_index, n), axis=0)
    target = (row * slices + slice_id).to(tl.int64) * GROUPS
    _store_pairs(minima, minimum_indices, target, group, key, index, index >= 0, KEYS)


@triton.jit
def _load_pairs(keys, indices, source, mask, KEYS: tl.constexpr):
    """Return the (keys, indices) that `_store_pairs` has stored at `source`."""
    INTEGER: tl.constexpr = keys.dtype.element_ty
    if KEYS.bits == 64:
        key = tl.load(keys + source, mask=mask, other=last_key(KEYS))
        index = tl.load(indices[0] + source, mask=mask, other=2**31 - 1)
    else:
        HALF: tl.constexpr = INTEGER.primitive_bitwidth // 2
        packed = tl.load(keys + source, mask=mask, other=2 ** (2 * HALF - 1) - 1)
        key, index = (packed >> HALF).to(tl.int32), (packed & (2**HALF - 1)).to(tl.int32)
    return key, index


@libentry()
@triton.jit(do_not_specialize=["slices", "k", "n"])
def _find_bound(bounds, minima, minimum_indices, slices, k, n, KEYS: tl.constexpr, GROUPS: tl.constexpr):
    """Find the key and the index of the k-th smallest of a row's group minima."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[None, :]
    key, index = _load_pairs(minima, minimum_indices, row * slices * GROUPS + group, group >= 0, KEYS)
    for slice_id in range(1, slices):
        source = (row * slices + slice_id) * GROUPS + group
        more, more_index = _load_pairs(minima, minimum_indices, source, group >= 0, KEYS)
        better = (more < key) | ((more == key) & (more_index < index))
        key, index = tl.where(better, more, key), tl.where(better, more_index, index)
    # A group without elements has the index n.
    bound = key_of_rank(key, index < n, k - 1)
    left = k - 1 - tl.sum((key < bound[:, None]).to(tl.int32), axis=1)
    equal = key == bound[:, None]
    last = key_of_rank(tl.where(equal, index, 2**31 - 1), equal, left)
    zero = tl.arange(0, 1)
    tl.store(bounds + row * 2 + zero, bound.to(tl.int64))
    tl.store(bounds + row * 2 + 1 + zero, last.to(tl.int64))


@libentry()
@triton.jit(do_not_specialize=["n", "programs", "slots"])
def _select_to_bound(
    selected,
    selected_indices,
    counts,
    bounds,
    x,
    shape,
    strides,
    step,
    n,
    programs,
    slots,
    COUNTED: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Select the elements of COUNTED blocks up to the row's bound, in no order."""
    wait_for_previous_launch()
    row = tl.program_id(0) // programs
    begin = (tl.program_id(0) % programs).to(INDEX) * (BLOCK * COUNTED)
    source = x + strided_offset(row.to(INDEX), shape, strides)
    bound = tl.load(bounds + row * 2)
    if KEYS.bits < 64:
        bound = bound.to(tl.int32)
    last = tl.load(bounds + row * 2 + 1).to(INDEX)
    counter = counts + row + tl.zeros((BLOCK,), tl.int32)
    for j in range(COUNTED):
        index = begin + j * BLOCK + tl.arange(0, BLOCK)
        mask = index < n
        key = keys_of(source + index * step, mask, KEYS)
        chosen = mask & ((key < bound) | ((key == bound) & (index <= last)))
        target = tl.atomic_add(counter, 1, mask=chosen, sem="relaxed")
        chosen = chosen & (target < slots)
        _store_pairs(selected, selected_indices, row.to(tl.int64) * slots, target, key, index, chosen, KEYS)


@triton.jit
def _replace_upper_half(best, more):
    """Return rows with the lower half of sorted rows and, in place of the upper half, `more` elements."""
    ROWS: tl.constexpr = best.shape[0]
    HALF: tl.constexpr = more.shape[1]
    first, _ = tl.split(tl.permute(tl.reshape(best, (ROWS, 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.join(first, more), (ROWS, 2 * HALF))


@libentry()
@triton.jit(do_not_specialize=["n_rows", "k", "first", "slots"])
def _sort_selected(
    values,
    indices,
    selected,
    selected_indices,
    counts,
    x,
    layout,
    n_rows,
    k,
    first,
    slots,
    MERGES: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sort the selected elements of each row; write those of ranks `first` to k - 1, and their indices.

    If more elements than WIDTH were selected (MERGES), the program sorts them in rounds. Each round replaces the upper
    half of the sorted row by the next WIDTH / 2 elements.
    """
    wait_for_previous_launch()
    shape, strides, steps = layout.shape, layout.strides, layout.steps
    INTEGER: tl.constexpr = selected.dtype.element_ty
    HALF: tl.constexpr = INTEGER.primitive_bitwidth // 2
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    count = tl.load(counts + row, mask=row < n_rows, other=0)[:, None]
    begin = (row.to(tl.int64) * slots)[:, None]
    # Before the rounds of a merge, the upper half is empty.
    mask = lane[None, :] < (tl.minimum(count, WIDTH // 2) if MERGES else count)
    key = tl.load(selected + begin + lane[None, :], mask=mask, other=2 ** (2 * HALF - 1) - 1)
    if KEYS.bits == 64:
        index = tl.load(selected_indices[0] + begin + lane[None, :], mask=mask, other=2**31 - 1)
    if MERGES:
        half = tl.arange(0, WIDTH // 2)[None, :]
        most = tl.maximum(tl.max(tl.max(count, axis=1), axis=0), WIDTH // 2 + 1)
        for behind in range(WIDTH // 2, most, WIDTH // 2):
            left = behind + half < count
            source = begin + behind + half
            more = tl.load(selected + source, mask=left, other=2 ** (2 * HALF - 1) - 1)
            if KEYS.bits == 64:
                more_indices = tl.load(selected_indices[0] + source, mask=left, other=2**31 - 1)
                key, index = sort_pairs(_replace_upper_half(key, more), _replace_upper_half(index, more_indices))
            else:
                key = sort_integers(_replace_upper_half(key, more))
    elif KEYS.bits == 64:
        key, index = sort_pairs(key, index)
    else:
        key = sort_integers(key)
    if KEYS.bits < 64:
        index = key & (2**HALF - 1)
    index = index.to(INDEX)
    mask = (row < n_rows)[:, None] & ((lane >= first) & (lane < k))[None, :]
    target = (lane - first).to(INDEX)
    value = tl.load(x + strided_offset(row, shape, strides[0])[:, None] + index * steps[0], mask=mask, other=0)
    tl.store(values + strided_offset(row, shape, strides[1])[:, None] + (target * steps[1])[None, :], value, mask=mask)
    if len(indices) > 0:
        pointers = indices[0] + strided_offset(row, shape, strides[2])[:, None] + (target * steps[2])[None, :]
        tl.store(pointers, index.to(tl.int64), mask=mask)


class _Selected(NamedTuple):
    """Memory for the elements selected from rows: `slots` (key, index) pairs of each row, and their `counts`.

    `indices` is empty if keys and indices are packed.
    """

    keys: torch.Tensor
    indices: tuple[torch.Tensor, ...]
    counts: torch.Tensor
    slots: int

    @classmethod
    def of(cls, n_rows: int, n: int, slots: int, keys: Keys, device: torch.device) -> _Selected:
        return cls(*_pairs(n_rows * slots, n, keys, device), zeros((n_rows,), torch.int32, device), slots)


def _pairs(count: int, n: int, keys: Keys, device: torch.device) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Allocate `count` pairs of a key and an index of at most n, packed if they fit into 64 bits."""
    if keys.bits == 64:
        return empty((count,), torch.int64, device), (empty((count,), torch.int32, device),)
    narrow = keys.bits <= 16 and n < 2**16
    return empty((count,), torch.int32 if narrow else torch.int64, device), ()


def _select_held(x: torch.Tensor, rows: Rows, n: int, k: int, keys: Keys) -> tuple[_Selected, int]:
    """Select from rows that a program holds; return (the elements, how many of a row to sort at a time)."""
    columns = max(16, power_of_2(n))
    groups = max(128, power_of_2(4 * k))
    if groups * 2 > columns or groups > n:
        groups, slots, width = columns, k, power_of_2(k)
    else:
        slots, width = min(n, (k - 1) * (columns // groups) + 1), power_of_2(2 * k)
    selected = _Selected.of(rows.n_rows, n, slots, keys, x.device)
    held = min(max(1, 1024 // columns), power_of_2(rows.n_rows))
    _select_from_held_rows[(-(-rows.n_rows // held),)](
        *(selected.keys, selected.indices, selected.counts, as_integers(x)),
        *(rows.shape, rows.strides[0], rows.steps[0]),
        *(rows.n_rows, n, k, slots),
        GROUPS=groups,
        KEYS=keys,
        INDEX=rows.index,
        ROWS=held,
        COLUMNS=columns,
        num_warps=warps_for(held * columns, keys),
    )
    return selected, width


def _select_streamed(x: torch.Tensor, rows: Rows, n: int, k: int, keys: Keys) -> tuple[_Selected, int]:
    """Select from longer rows, as `_select_held` does."""
    chosen = sorting_table().topk
    groups = min(chosen.most_groups, max(chosen.least_groups, power_of_2(4 * k)))
    # Programs that fill the device split a row by groups first, and then into slices, whose minima must be compared.
    stripes = -(-n // groups)
    wanted = -(-chosen.programs * devices.multiprocessors(x.device) // rows.n_rows)
    own = max(min(chosen.own_groups, groups), groups // power_of_2(wanted))
    group_blocks = groups // own
    stripes_of_block = max(1, chosen.block // own)
    slices = max(1, min(chosen.most_slices, -(-wanted // group_blocks), stripes // stripes_of_block))
    each = -(-stripes // slices)
    minima, minimum_indices = _pairs(rows.n_rows * slices * groups, n, keys, x.device)
    space = (as_integers(x), rows.shape, rows.strides[0], rows.steps[0], n)
    facts: dict[str, Any] = {"KEYS": keys, "INDEX": rows.index}
    _find_minima[(rows.n_rows * slices * group_blocks,)](
        *(minima, minimum_indices, *space, group_blocks, slices, each),
        GROUPS=groups,
        OWN=own,
        STRIPES=stripes_of_block,
        num_warps=8,
        **facts,
    )
    bounds = empty((rows.n_rows, 2), torch.int64, x.device)
    _find_bound[(rows.n_rows,)](bounds, minima, minimum_indices, slices, k, n, KEYS=keys, GROUPS=groups, num_warps=8)
    selected = _Selected.of(rows.n_rows, n, min(n, (k - 1) * stripes + 1), keys, x.device)
    blocks = -(-n // chosen.block)
    counted = power_of_2(max(1, min(8, blocks // wanted)))
    programs = -(-blocks // counted)
    _select_to_bound[(rows.n_rows * programs,)](
        *(selected.keys, selected.indices, selected.counts, bounds, *space, programs, selected.slots),
        COUNTED=counted,
        BLOCK=chosen.block,
        num_warps=8,
        **facts,
    )
    return selected, power_of_2(2 * k)


def serves(n: int, k: int, keys: Keys) -> bool:
    """Return whether a program can sort the selected elements, and whether those are fewer than all n of a row."""
    chosen = sorting_table().topk
    most = chosen.most_sorted[keys.bits]
    if n >= 2**31:
        return False
    if held(n, keys):
        return n > chosen.sorted_at_once and power_of_2(k) * 2 <= power_of_2(n) and power_of_2(k) <= most
    return power_of_2(2 * k) <= min(most, chosen.most_groups)


def warps_for(elements: int, keys: Keys) -> int:
    """Return the number of warps whose registers hold `elements` keys."""
    registers = elements * max(1, keys.bits // 32)
    return min(16, devices.warps(registers // sorting_table().topk.thread_registers))


def held(n: int, keys: Keys) -> bool:
    """Return whether one program holds the keys of a row of n elements in registers."""
    return power_of_2(n) * max(32, keys.bits) // 8 <= sorting_table().topk.held_bytes


def write_smallest(
    x: torch.Tensor,
    dim: int,
    k: int,
    keys: Keys,
    values: torch.Tensor,
    indices: torch.Tensor | None,
    first: int = 0,
) -> None:
    """Write the elements of ranks `first` to k - 1 of each row in order, and their indices, if `serves`."""
    n = x.shape[dim]
    # All operands are in one layout, so that launches number rows alike.
    rows = Rows((x, values, values if indices is None else indices), dim)
    selected, width = (_select_held if held(n, keys) else _select_streamed)(x, rows, n, k, keys)
    width = max(width, 16)
    each = min(max(1, 512 // width), power_of_2(rows.n_rows))
    _sort_selected[(-(-rows.n_rows // each),)](
        as_integers(values),
        () if indices is None else (indices,),
        *(selected.keys, selected.indices, selected.counts, as_integers(x), rows.layout),
        *(rows.n_rows, k, first, selected.slots),
        MERGES=selected.slots > width,
        KEYS=keys,
        INDEX=rows.index,
        ROWS=each,
        WIDTH=width,
        num_warps=min(16, devices.warps(each * width // (4 if width <= 512 else 8))),
    )
