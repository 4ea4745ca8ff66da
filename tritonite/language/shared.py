"""A program's own room in shared memory, where its threads reach each other's numbers: in NVIDIA's assembly.

Triton has no stores to places of shared memory, and of counting only `tl.histogram`, which counts each bin in each
thread. Between what is written and what is read there has to be a `tl.debug_barrier()`. In the interpreter a program's
room is an array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.interpreter import TensorHandle

# The bytes that programs may have of this kind, so that 8 KiB are left to Triton of what needs no leave of the driver.
ROOM = 40 * 1024
_PTX = {tl.int32: ("u32", "r"), tl.int64: ("u64", "l"), tl.float32: ("f32", "f"), tl.float64: ("f64", "d")}
_DTYPES = {tl.int32: np.int32, tl.int64: np.int64, tl.float32: np.float32, tl.float64: np.float64}
# What `number` matches: this many of a place's last bits, 5 of which are as many as the lanes of a warp have.
_MATCHED, _OF_LANES = 8, 5


@triton.constexpr_function
def _bytes(dtype: Any) -> int:
    return int(dtype.primitive_bitwidth) // 8


@triton.constexpr_function
def _declares(count: int, dtype: Any) -> str:
    return f"{{ .shared .align 16 .b8 room[{count * _bytes(dtype)}]; mov.u32 $0, room; }}"


@triton.constexpr_function
def _stores(dtype: Any) -> str:
    return f"st.shared.{_PTX[dtype][0]} [$1], $2; mov.b32 $0, 0;"


@triton.constexpr_function
def _adds(dtype: Any) -> str:
    return f"red.shared.add.{_PTX[dtype][0]} [$1], $2; mov.b32 $0, 0;"


@triton.constexpr_function
def _sets(dtype: Any) -> str:
    return "{ .reg .pred some; setp.ne.b32 some, $2, 0; @some red.shared.or.b32 [$1], $2; mov.b32 $0, 0; }"


@triton.constexpr_function
def _loads(dtype: Any) -> str:
    return f"ld.volatile.shared.{_PTX[dtype][0]} $0, [$1];"


@triton.constexpr_function
def _constraints(dtype: Any, loads: bool) -> str:
    return f"={_PTX[dtype][1]},r" if loads else f"=r,r,{_PTX[dtype][1]}"


def _number_in_order() -> str:
    """Each lane's number among those of its place: how many have been there, and how many lanes before it are.

    Which lanes have the same place is asked for bit by bit. A lane keeps which lanes have the place whose last bits are
    its own number, and which those whose first bits are; two shuffles fetch what other lanes keep.
    """
    text = ["{ .reg .pred set; .reg .b32 vote, last, first, at;", "mov.b32 last, -1; mov.b32 first, -1;"]
    for bit in range(_MATCHED):
        kept, lane_bit = ("last", bit) if bit < _OF_LANES else ("first", bit - _OF_LANES)
        text.append(f"and.b32 vote, $1, {1 << bit}; setp.ne.b32 set, vote, 0; vote.sync.ballot.b32 vote, set, -1;")
        # Those whose bit is the lane's.
        text.append(f"lop3.b32 {kept}, {kept}, vote, ${4 + lane_bit}, 0x90;")
    text += [
        "shfl.sync.idx.b32 last, last, $1, 31, -1;",
        f"shr.u32 at, $1, {_OF_LANES}; shfl.sync.idx.b32 first, first, at, 31, -1;",
        "and.b32 last, last, first; mad.lo.u32 at, $1, 4, $2; ld.shared.u32 vote, [at];",
        "popc.b32 first, last; add.u32 first, first, vote;",
        "and.b32 last, last, $3; popc.b32 last, last; add.u32 $0, last, vote;",
        "bar.warp.sync -1; st.shared.u32 [at], first; bar.warp.sync -1; }",
    ]
    return "\n".join(text)


_NUMBERS = tl.constexpr(_number_in_order())


@triton.jit
def _room(COUNT: tl.constexpr, DTYPE: tl.constexpr):
    return tl.inline_asm_elementwise(
        _declares(COUNT, DTYPE), "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _send(room, place, value, TEXT: tl.constexpr):
    address = room + place * _bytes(value.dtype)
    tl.inline_asm_elementwise(
        TEXT, _constraints(value.dtype, False), [address, value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _put(room, place, value):
    _send(room, place, value, _stores(value.dtype))


@triton.jit
def _add(room, place, value):
    _send(room, place, value, _adds(value.dtype))


@triton.jit
def _set(room, place, value):
    _send(room, place, value, _sets(value.dtype))


@triton.jit
def _get(room, place, like):
    address = room + place * _bytes(like.dtype)
    return tl.inline_asm_elementwise(
        _loads(like.dtype), _constraints(like.dtype, True), [address], dtype=like.dtype, is_pure=False, pack=1
    )


@triton.jit
def _number(room, place):
    lane = tl.arange(0, place.shape[0]) & 31
    return tl.inline_asm_elementwise(
        _NUMBERS,
        "=&r,r,r,r,r,r,r,r,r",
        [place, room, (1 << lane) - 1, -(lane & 1), -(lane >> 1 & 1), -(lane >> 2 & 1), -(lane >> 3 & 1), -(lane >> 4)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def _room_in_interpreter(COUNT: Any, DTYPE: Any) -> Any:
    # Of numbers that nobody has put there.
    return np.full((int(COUNT),), 77, _DTYPES[DTYPE])


def _put_in_interpreter(room: Any, place: Any, value: Any) -> None:
    room[place.handle.data] = value.handle.data


def _add_in_interpreter(room: Any, place: Any, value: Any) -> None:
    np.add.at(room, place.handle.data, value.handle.data)


def _set_in_interpreter(room: Any, place: Any, value: Any) -> None:
    np.bitwise_or.at(room, place.handle.data, value.handle.data)


def _get_in_interpreter(room: Any, place: Any, like: Any) -> Any:
    return tl.tensor(TensorHandle(room[place.handle.data].astype(_DTYPES[like.dtype]), like.dtype), like.type)


def _number_in_interpreter(room: Any, place: Any) -> Any:
    places = place.handle.data
    earlier = np.tril(places[:, None] == places[None, :], -1).sum(axis=1)
    numbers = (room[places] + earlier).astype(np.int32)
    np.add.at(room, places, 1)
    return tl.tensor(TensorHandle(numbers, tl.int32), place.type)


# `room(COUNT, DTYPE)` is where so many numbers are, of int32, int64, float32 or float64. `put` and `add` take it, a
# block of places in it, of int32, and one of numbers; so does `set_bits`, of int32, which costs nothing where a number
# is 0; `get` takes a block like the one that it returns. `number` counts
# at places, of int32: it returns what was there and adds 1, for one thread of a warp after the other. It takes a block
# of one place for each thread, those of a warp different in their last 8 bits alone, and of no other warp's.
room = _room_in_interpreter if knobs.runtime.interpret else _room
put = _put_in_interpreter if knobs.runtime.interpret else _put
add = _add_in_interpreter if knobs.runtime.interpret else _add
set_bits = _set_in_interpreter if knobs.runtime.interpret else _set
get = _get_in_interpreter if knobs.runtime.interpret else _get
number = _number_in_interpreter if knobs.runtime.interpret else _number
