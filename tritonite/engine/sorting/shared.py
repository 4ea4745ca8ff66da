"""What a program's threads do with each other's elements in shared memory, at places that the elements tell.

Triton's language has no stores to places of shared memory, so these are NVIDIA's assembly, each operation with a buffer
of its own; the interpreter has twins. Elements are tuples of blocks of one element a thread: in *blocked* order a
thread's are next to each other, in *striped* order those of neighbouring threads are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tritonite import devices


def _block(data: np.ndarray, dtype: Any) -> Any:
    return tl.tensor(TensorHandle(np.ascontiguousarray(data), dtype), tl.block_type(dtype, list(data.shape)))


def _exchange_in_interpreter(values: Any, others: Any, positions: Any, striped: Any) -> tuple[Any, Any]:
    order = np.stack([each.handle.data for each in positions]).reshape(-1)
    each, threads = len(positions), positions[0].shape[0]
    results = []
    for elements in (values, others):
        if len(elements):
            moved = np.empty(order.size, elements[0].handle.data.dtype)
            moved[order] = np.stack([element.handle.data for element in elements]).reshape(-1)
            read = moved.reshape(each, threads) if bool(striped) else moved.reshape(threads, each).T
            results.append(tuple([_block(part, elements[0].dtype) for part in read]))
        else:
            results.append(())
    return results[0], results[1]


def _count_in_interpreter(digits: Any, bins: Any) -> Any:
    every = np.stack([digit.handle.data for digit in digits]).reshape(-1)
    return _block(np.bincount(every, minlength=int(bins)).astype(np.int32), tl.int32)


def _look_up_in_interpreter(table: Any, digits: Any) -> tuple[Any, ...]:
    return tuple([_block(table.handle.data[digit.handle.data], table.dtype) for digit in digits])


def _sums_before_in_interpreter(values: Any) -> tuple[Any, Any]:
    sums = [np.cumsum(each.handle.data, dtype=np.int64) for each in values]
    before = [_block(total - each.handle.data, tl.int64) for total, each in zip(sums, values, strict=True)]
    return tuple(before), tuple([_block(np.full_like(total, total[-1]), tl.int64) for total in sums])


@tl.core.builtin
def _assembly(lines, outputs, inputs, dtypes, _semantic=None):
    """Assembly that all threads run once; its results, of which there may be one."""
    lines, outputs = [getattr(each, "value", each) for each in (lines, outputs)]
    constraints = ",".join([outputs, *("l" if each.dtype.primitive_bitwidth == 64 else "r" for each in inputs)])
    found = tl.inline_asm_elementwise(
        lines, constraints, list(inputs), tuple(dtypes), is_pure=False, pack=1, _semantic=_semantic
    )
    return tl.tuple(found if isinstance(found, (tuple, list, tl.tuple)) else [found])


def _moves(text: list[str], bits: int, first: int, value: int, address: int, each: int, read: int) -> None:
    """Elements to their addresses and, once all are there, from those that the thread reads, `read` and a stride."""
    text.append("bar.sync 0;")
    for k in range(each):
        text.append(f"add.u32 at, base, ${address + k}; st.shared.b{bits} [at], ${value + k};")
    text += ["bar.sync 0;", f"add.u32 at, base, ${read};"]
    for k in range(each):
        text.append(f"ld.shared.b{bits} ${first + k}, [at]; add.u32 at, at, ${read + 1};")


@tl.core.builtin
def _exchange_by_assembly(
    values, value_addresses, value_read, others, other_addresses, other_read, bytes, _semantic=None
):
    """The elements that a thread reads, of which each has been written to its address.

    An address is a number of bytes; `value_read` is the first one that a thread reads and the distance of the others.
    """
    each, two = len(values), len(others) > 0
    wide = values[0].dtype.primitive_bitwidth == 64
    n_outputs = each * (1 + two)
    inputs = [*values, *value_addresses, *value_read]
    text = [
        "{",
        f".shared .align 16 .b8 exchanged[{bytes.value}];",
        ".reg .b32 base, at;",
        "mov.u32 base, exchanged;",
    ]
    start = n_outputs
    _moves(text, 64 if wide else 32, 0, start, start + each, each, start + 2 * each)
    if two:
        # 32-bit values share their addresses with the others.
        if wide:
            value = start + len(inputs)
            inputs += [*others, *other_addresses, *other_read]
            _moves(text, 32, each, value, value + each, each, value + 2 * each)
        else:
            value = start + len(inputs)
            inputs += others
            _moves(text, 32, each, value, start + each, each, start + 2 * each)
    text.append("}")
    outputs = ["=&l" if wide else "=&r"] * each + ["=&r"] * (each if two else 0)
    dtypes = [values[0].dtype] * each + ([others[0].dtype] * each if two else [])
    found = _assembly("\n".join(text), ",".join(outputs), inputs, dtypes, _semantic=_semantic)
    found = list(found.values)
    return tl.tuple([tl.tuple(found[:each]), tl.tuple(found[each:])])


@tl.core.builtin
def _count_by_assembly(digits, lane, bins, _semantic=None):
    bins, each = bins.value, len(digits)
    text = ["{", f".shared .align 16 .b8 counted[{4 * bins}];", ".reg .b32 base, at, one;", ".reg .pred mine;"]
    text += ["mov.u32 base, counted;", "mov.u32 one, 0;", f"setp.lt.s32 mine, ${1 + each}, {bins};"]
    text += ["bar.sync 0;", f"mad.lo.u32 at, ${1 + each}, 4, base;", "@mine st.shared.b32 [at], one;", "bar.sync 0;"]
    for k in range(each):
        text.append(f"mad.lo.u32 at, ${1 + k}, 4, base; red.shared.add.u32 [at], 1;")
    text += ["bar.sync 0;", f"mad.lo.u32 at, ${1 + each}, 4, base;", "mov.u32 $0, 0;", "@mine ld.shared.b32 $0, [at];"]
    text.append("}")
    (found,) = _assembly("\n".join(text), "=&r", [*digits, lane], [tl.int32], _semantic=_semantic).values
    return found


@tl.core.builtin
def _look_up_by_assembly(table, lane, digits, size, _semantic=None):
    size, each = size.value, len(digits)
    text = ["{", f".shared .align 16 .b8 table[{4 * size}];", ".reg .b32 base, at;", ".reg .pred mine;"]
    text += ["mov.u32 base, table;", f"setp.lt.s32 mine, ${each + 1}, {size};", "bar.sync 0;"]
    text += [f"mad.lo.u32 at, ${each + 1}, 4, base;", f"@mine st.shared.b32 [at], ${each};", "bar.sync 0;"]
    for k in range(each):
        text.append(f"mad.lo.u32 at, ${each + 2 + k}, 4, base; ld.shared.b32 ${k}, [at];")
    text.append("}")
    return _assembly(
        "\n".join(text), ",".join(["=&r"] * each), [table, lane, *digits], [tl.int32] * each, _semantic=_semantic
    )


@triton.jit
def _addresses(positions, SIZE: tl.constexpr):
    """Where elements of SIZE bytes are, with a gap after as many as there are banks: a thread's next to each other."""
    BANKS: tl.constexpr = 5 if SIZE == 4 else 4
    found = ()
    for k in tl.static_range(len(positions)):
        found = found + ((positions[k] + (positions[k] >> BANKS)) * SIZE,)
    return found


@triton.jit
def _read(striped, THREADS: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr):
    """The address of the first element that a thread reads, and how far the next ones are."""
    BANKS: tl.constexpr = 5 if SIZE == 4 else 4
    lane = tl.arange(0, THREADS)
    first = tl.where(striped, lane, lane * EACH)
    stride = tl.where(striped, THREADS + (THREADS >> BANKS), 1) * SIZE
    return (first + (first >> BANKS)) * SIZE, tl.zeros_like(lane) + stride


@triton.jit
def _exchange_in_compiler(values, others, positions, striped):
    EACH: tl.constexpr = len(positions)
    THREADS: tl.constexpr = positions[0].shape[0]
    SIZE: tl.constexpr = values[0].dtype.primitive_bitwidth // 8
    addresses = _addresses(positions, SIZE)
    read = _read(striped, THREADS, EACH, SIZE)
    BYTES: tl.constexpr = THREADS * EACH * SIZE + THREADS * EACH * SIZE // (32 if SIZE == 4 else 16)
    if SIZE == 8 and len(others) > 0:
        found = _exchange_by_assembly(
            values, addresses, read, others, _addresses(positions, 4), _read(striped, THREADS, EACH, 4), BYTES
        )
    else:
        found = _exchange_by_assembly(values, addresses, read, others, (), (), BYTES)
    return found


@triton.jit
def _count_in_compiler(digits, BINS: tl.constexpr):
    THREADS: tl.constexpr = digits[0].shape[0]
    found = _count_by_assembly(digits, tl.arange(0, THREADS), BINS)
    if THREADS > BINS:
        found = tl.sum(tl.reshape(found, (THREADS // BINS, BINS)), axis=0)
    return found


@triton.jit
def _look_up_in_compiler(table, digits):
    THREADS: tl.constexpr = digits[0].shape[0]
    SIZE: tl.constexpr = table.shape[0]
    if THREADS > SIZE:
        table = tl.reshape(tl.broadcast_to(table[None, :], (THREADS // SIZE, SIZE)), (THREADS,))
    return _look_up_by_assembly(table, tl.arange(0, THREADS), digits, SIZE)


@tl.core.builtin
def _of_last_by_assembly(values, lane, last, _semantic=None):
    """The values of the last thread."""
    each = len(values)
    text = ["{", f".shared .align 16 .b8 kept[{8 * each}];", ".reg .b32 base;", ".reg .pred mine;"]
    text += ["mov.u32 base, kept;", f"setp.eq.s32 mine, ${2 * each}, {last.value};", "bar.sync 0;"]
    text += [f"@mine st.shared.b64 [base + {8 * k}], ${each + k};" for k in range(each)]
    text += ["bar.sync 0;", *(f"ld.shared.b64 ${k}, [base + {8 * k}];" for k in range(each)), "}"]
    return _assembly("\n".join(text), ",".join(["=&l"] * each), [*values, lane], [tl.int64] * each, _semantic=_semantic)


@triton.jit
def _add_each(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _sums_before_in_compiler(values):
    THREADS: tl.constexpr = values[0].shape[0]
    a, b, c, d = tl.associative_scan((values[0], values[1], values[2], values[3]), 0, _add_each)
    sums = (a, b, c, d)
    before = ()
    for k in tl.static_range(4):
        before = before + (sums[k] - values[k],)
    return before, _of_last_by_assembly(sums, tl.arange(0, THREADS), THREADS - 1)


# What programs do, by these or by the interpreter's twins; they have as many threads as there are bins, or more.
# exchange(values, others, positions, striped): elements moved to positions, each of which there is once, in striped or
#   blocked order; `others` may be ().
# count(digits, BINS): how often each digit is there.
# look_up(table, digits): the table's elements at them.
# sums_before(values): of four words the sums over the threads before, and over all.
exchange = _exchange_in_interpreter if devices.current.interpreted else _exchange_in_compiler
count = _count_in_interpreter if devices.current.interpreted else _count_in_compiler
look_up = _look_up_in_interpreter if devices.current.interpreted else _look_up_in_compiler
sums_before = _sums_before_in_interpreter if devices.current.interpreted else _sums_before_in_compiler
