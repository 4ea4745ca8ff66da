"""Explicit shared memory for Triton kernels, in PTX: allocation, indexed loads and stores, atomics, ranks in a warp.

Triton has no stores at computed indices of shared memory. A `tl.debug_barrier()` has to stand between stores and the
loads that read them. In the interpreter a buffer is a NumPy array.

- `alloc_shared(COUNT, DTYPE)` returns a buffer of COUNT elements of int32, int64, float32 or float64. Its contents are
  undefined.
- `store_shared(buffer, index, value)` stores a block of values at a block of int32 indices.
- `add_shared(buffer, index, value)` adds atomically.
- `or_shared(buffer, index, value)` ors int32 atomically, and makes no access where a value is 0.
- `load_shared(buffer, index, like)` returns elements in the shape and dtype of `like`.
- `warp_rank(counters, index)` increments the int32 counter at each lane's index, in the order of lanes, and returns its
  value before that. `index` has one element a thread. The lanes of a warp have indices that differ in the last 8 bits
  alone, and no two warps share an index.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.interpreter import TensorHandle

# Bytes a program may allocate. Static shared memory is limited to 48 KiB; Triton needs the other 8 KiB.
SHARED_BYTES = 40 * 1024
_PTX = {tl.int32: ("u32", "r"), tl.int64: ("u64", "l"), tl.float32: ("f32", "f"), tl.float64: ("f64", "d")}
_DTYPES = {tl.int32: np.int32, tl.int64: np.int64, tl.float32: np.float32, tl.float64: np.float64}
# Bits of an index that `warp_rank` compares, and bits of a lane number.
_INDEX_BITS, _LANE_BITS = 8, 5


@triton.constexpr_function
def _bytes(dtype: Any) -> int:
    return int(dtype.primitive_bitwidth) // 8


@triton.constexpr_function
def _alloc_text(count: int, dtype: Any) -> str:
    return f"{{ .shared .align 16 .b8 room[{count * _bytes(dtype)}]; mov.u32 $0, room; }}"


@triton.constexpr_function
def _store_text(dtype: Any) -> str:
    return f"st.shared.{_PTX[dtype][0]} [$1], $2; mov.b32 $0, 0;"


@triton.constexpr_function
def _add_text(dtype: Any) -> str:
    return f"red.shared.add.{_PTX[dtype][0]} [$1], $2; mov.b32 $0, 0;"


@triton.constexpr_function
def _or_text(dtype: Any) -> str:
    return "{ .reg .pred some; setp.ne.b32 some, $2, 0; @some red.shared.or.b32 [$1], $2; mov.b32 $0, 0; }"


@triton.constexpr_function
def _load_text(dtype: Any) -> str:
    return f"ld.volatile.shared.{_PTX[dtype][0]} $0, [$1];"


@triton.constexpr_function
def _constraints(dtype: Any, loads: bool) -> str:
    return f"={_PTX[dtype][1]},r" if loads else f"=r,r,{_PTX[dtype][1]}"


def _warp_rank_text() -> str:
    """Return PTX that ranks each lane among the lanes with its index: the counter plus the number of such lanes below.

    The lanes with an equal index are found by one ballot an index bit. Lane i collects the lanes whose low five index
    bits are i, and the lanes whose high three bits are i. Two shuffles fetch both sets for a lane's own index; their
    intersection is the lanes with the same index. Operands: $0 rank, $1 index, $2 counters' address, $3 mask of lower
    lanes, $4 to $8 -1 or 0 for each bit of the lane number.
    """
    text = ["{ .reg .pred set; .reg .b32 vote, last, first, at;", "mov.b32 last, -1; mov.b32 first, -1;"]
    for bit in range(_INDEX_BITS):
        lanes, lane_bit = ("last", bit) if bit < _LANE_BITS else ("first", bit - _LANE_BITS)
        text.append(f"and.b32 vote, $1, {1 << bit}; setp.ne.b32 set, vote, 0; vote.sync.ballot.b32 vote, set, -1;")
        # Keep the lanes whose index bit equals this lane's bit: lanes & ~(vote ^ bit).
        text.append(f"lop3.b32 {lanes}, {lanes}, vote, ${4 + lane_bit}, 0x90;")
    text += [
        "shfl.sync.idx.b32 last, last, $1, 31, -1;",
        f"shr.u32 at, $1, {_LANE_BITS}; shfl.sync.idx.b32 first, first, at, 31, -1;",
        "and.b32 last, last, first; mad.lo.u32 at, $1, 4, $2; ld.shared.u32 vote, [at];",
        "popc.b32 first, last; add.u32 first, first, vote;",
        "and.b32 last, last, $3; popc.b32 last, last; add.u32 $0, last, vote;",
        "bar.warp.sync -1; st.shared.u32 [at], first; bar.warp.sync -1; }",
    ]
    return "\n".join(text)


_WARP_RANK = tl.constexpr(_warp_rank_text())


@triton.jit
def _alloc(COUNT: tl.constexpr, DTYPE: tl.constexpr):
    return tl.inline_asm_elementwise(
        _alloc_text(COUNT, DTYPE), "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _send(buffer, index, value, TEXT: tl.constexpr):
    address = buffer + index * _bytes(value.dtype)
    tl.inline_asm_elementwise(
        TEXT, _constraints(value.dtype, False), [address, value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _store(buffer, index, value):
    _send(buffer, index, value, _store_text(value.dtype))


@triton.jit
def _add(buffer, index, value):
    _send(buffer, index, value, _add_text(value.dtype))


@triton.jit
def _or(buffer, index, value):
    _send(buffer, index, value, _or_text(value.dtype))


@triton.jit
def _load(buffer, index, like):
    address = buffer + index * _bytes(like.dtype)
    return tl.inline_asm_elementwise(
        _load_text(like.dtype), _constraints(like.dtype, True), [address], dtype=like.dtype, is_pure=False, pack=1
    )


@triton.jit
def _warp_rank(counters, index):
    lane = tl.arange(0, index.shape[0]) & 31
    below = (1 << lane) - 1
    return tl.inline_asm_elementwise(
        _WARP_RANK,
        "=&r,r,r,r,r,r,r,r,r",
        [index, counters, below, -(lane & 1), -(lane >> 1 & 1), -(lane >> 2 & 1), -(lane >> 3 & 1), -(lane >> 4)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def _alloc_in_interpreter(COUNT: Any, DTYPE: Any) -> Any:
    # A value no kernel stores, so that a load of an element that was never stored shows.
    return np.full((int(COUNT),), 77, _DTYPES[DTYPE])


def _store_in_interpreter(buffer: Any, index: Any, value: Any) -> None:
    buffer[index.handle.data] = value.handle.data


def _add_in_interpreter(buffer: Any, index: Any, value: Any) -> None:
    np.add.at(buffer, index.handle.data, value.handle.data)


def _or_in_interpreter(buffer: Any, index: Any, value: Any) -> None:
    np.bitwise_or.at(buffer, index.handle.data, value.handle.data)


def _load_in_interpreter(buffer: Any, index: Any, like: Any) -> Any:
    return tl.tensor(TensorHandle(buffer[index.handle.data].astype(_DTYPES[like.dtype]), like.dtype), like.type)


def _warp_rank_in_interpreter(counters: Any, index: Any) -> Any:
    indices = index.handle.data
    earlier = np.tril(indices[:, None] == indices[None, :], -1).sum(axis=1)
    ranks = (counters[indices] + earlier).astype(np.int32)
    np.add.at(counters, indices, 1)
    return tl.tensor(TensorHandle(ranks, tl.int32), index.type)


alloc_shared = _alloc_in_interpreter if knobs.runtime.interpret else _alloc
store_shared = _store_in_interpreter if knobs.runtime.interpret else _store
add_shared = _add_in_interpreter if knobs.runtime.interpret else _add
or_shared = _or_in_interpreter if knobs.runtime.interpret else _or
load_shared = _load_in_interpreter if knobs.runtime.interpret else _load
warp_rank = _warp_rank_in_interpreter if knobs.runtime.interpret else _warp_rank
