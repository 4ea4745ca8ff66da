"""A program's own room in shared memory, where its threads add to each other's numbers: in NVIDIA's assembly.

Triton has no such thing but `tl.histogram`, which counts each bin in each thread. Between what is written and what is
read there has to be a `tl.debug_barrier()`. In the interpreter a program's room is an array.
"""

from __future__ import annotations

import threading
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
_of_thread = threading.local()


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
def _loads(dtype: Any) -> str:
    return f"ld.volatile.shared.{_PTX[dtype][0]} $0, [$1];"


@triton.constexpr_function
def _constraints(dtype: Any, loads: bool) -> str:
    return f"={_PTX[dtype][1]},r" if loads else f"=r,r,{_PTX[dtype][1]}"


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
def _get(room, place, like):
    address = room + place * _bytes(like.dtype)
    return tl.inline_asm_elementwise(
        _loads(like.dtype), _constraints(like.dtype, True), [address], dtype=like.dtype, is_pure=False, pack=1
    )


def _room_in_interpreter(COUNT: Any, DTYPE: Any) -> Any:
    # Of numbers that nobody has put there.
    _of_thread.room = np.full((int(COUNT),), 77, _DTYPES[DTYPE])


def _put_in_interpreter(room: Any, place: Any, value: Any) -> None:
    _of_thread.room[place.handle.data] = value.handle.data


def _add_in_interpreter(room: Any, place: Any, value: Any) -> None:
    np.add.at(_of_thread.room, place.handle.data, value.handle.data)


def _get_in_interpreter(room: Any, place: Any, like: Any) -> Any:
    return tl.tensor(TensorHandle(_of_thread.room[place.handle.data], like.dtype), like.type)


# `room(COUNT, DTYPE)` is where so many numbers are, of int32, int64, float32 or float64. `put` and `add` take it, a
# block of places in it, of int32, and one of numbers; `get` takes a block like the one that it returns.
room = _room_in_interpreter if knobs.runtime.interpret else _room
put = _put_in_interpreter if knobs.runtime.interpret else _put
add = _add_in_interpreter if knobs.runtime.interpret else _add
get = _get_in_interpreter if knobs.runtime.interpret else _get
