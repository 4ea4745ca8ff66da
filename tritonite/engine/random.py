"""Random numbers that are ATen's on CUDA: the same elements get the same words of Philox, whatever draws them.

ATen launches `threads` of its own over an operator's elements, each a subsequence of the generator's: a draw gives a
thread four words, or two of 64 bits. By most of its kernels the i-th value of a thread's draw is for the element
`i * threads` after its first one; by those that load vectors, for the i-th of a vector. A program here takes a block of
ATen's threads for one draw, so that each word is computed once, and what it writes lies side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, strides_after_conversion
from tritonite.engine.sorting.keys import Keys
from tritonite.engine.sorting.radix import route, sort_along, sort_long_rows
from tritonite.errors import Decline
from tritonite.language.indices import aligned_to
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.random import interleave4, words
from tritonite.runtime.contract import empty_strided, random_state
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

# ATen's block, and how far a draw moves a generator on.
_ATEN_BLOCK = 256
_ADVANCE = 4
# What a program writes of each result.
_ELEMENTS = 2048
# The threads of ATen's blocks that sample several elements each, and those that a program has here.
_SHARING = 128
_SAMPLED = 128
# How many numbers of a permutation a program shuffles.
_SHUFFLED = 1024


class Distribution(NamedTuple):
    """What is made of random words: `narrow` samples four values at a draw, `wide` two, which float64 goes by.

    `transform` makes results of a value: (value, inputs, first, second, low, span, DTYPE) -> tuple, of the first
    result's dtype, the call's numbers, two float64 and two int64, and the operands' elements.
    """

    transform: Any
    narrow: Any
    wide: Any


class Order(NamedTuple):
    """How ATen hands elements to `threads`: `vector` side by side at a time, or 0 for one at a distance of `threads`.

    `advance` is how far it moves the generator on.
    """

    threads: int
    vector: int
    advance: int


@triton.jit
def _side_by_side(SAMPLE: tl.constexpr, VECTOR: tl.constexpr, seed, counter, thread):
    """The values of each thread's vector, those of one thread after those of another."""
    a, b, c, d = SAMPLE(seed, counter, thread)
    if VECTOR == 2:
        values = tl.interleave(a, b)
    elif VECTOR == 4:
        values = interleave4(a, b, c, d)
    else:
        e, f, g, h = SAMPLE(seed, counter + 1, thread)
        values = tl.interleave(interleave4(a, c, e, g), interleave4(b, d, f, h))
    return values


@triton.jit
def _of_neighbours(SAMPLE: tl.constexpr, VALUES: tl.constexpr, BESIDE: tl.constexpr, seed, counter, first):
    """The values of BESIDE threads each from `first` on, in the threads' order: of elements that lie side by side."""
    values = SAMPLE(seed, counter, first)
    if BESIDE == 4:
        second, third = SAMPLE(seed, counter, first + 1), SAMPLE(seed, counter, first + 2)
        fourth = SAMPLE(seed, counter, first + 3)
        found = ()
        for i in tl.static_range(VALUES):
            found = found + (interleave4(values[i], second[i], third[i], fourth[i]),)
        values = found
    elif BESIDE == 2:
        second = SAMPLE(seed, counter, first + 1)
        found = ()
        for i in tl.static_range(VALUES):
            found = found + (tl.interleave(values[i], second[i]),)
        values = found
    return values


@triton.jit
def _write(value, place, mask, inputs, outs, numbers, TRANSFORM: tl.constexpr):
    elements = ()
    for i in tl.static_range(len(inputs)):
        elements = elements + (tl.load(inputs[i] + place, mask=mask, other=0),)
    first, second, low, span = numbers
    results = TRANSFORM(value, elements, first, second, low, span, outs[0].dtype.element_ty)
    for i in tl.static_range(len(outs)):
        tl.store(outs[i] + place, results[i].to(outs[i].dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["seed", "offset", "low", "span"])
def draw_kernel(
    outs,
    inputs,
    numel,
    threads,
    seed: tl.int64,
    offset: tl.int64,
    first: tl.float64,
    second: tl.float64,
    low: tl.int64,
    span: tl.int64,
    SAMPLE: tl.constexpr,
    TRANSFORM: tl.constexpr,
    VALUES: tl.constexpr,
    USED: tl.constexpr,
    VECTOR: tl.constexpr,
    BESIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEX: tl.constexpr,
):
    """A program has BLOCK of ATen's threads for one turn: USED of the VALUES of a draw, or vectors side by side.

    Where ATen's threads have elements at a distance, a thread here is BESIDE of them, and stores theirs at once.
    ALIGNED divides `numel`.
    """
    wait_for_previous_launch()
    blocks = tl.cdiv(threads, BLOCK)
    turn = tl.program_id(0) // blocks
    begin = tl.program_id(0) % blocks * BLOCK
    DRAWS: tl.constexpr = 2 if VECTOR == 8 else 1
    # In the interpreter numbers have no type of their own.
    seed, counter = seed.to(tl.int64), (offset.to(tl.int64) >> 2) + turn * DRAWS
    first, second = tl.full((), first, tl.float64), tl.full((), second, tl.float64)
    numbers = (first, second, low.to(tl.int64), span.to(tl.int64))
    if VECTOR:
        values = _side_by_side(SAMPLE, VECTOR, seed, counter, begin + tl.arange(0, BLOCK))
        lane = tl.arange(0, BLOCK * VECTOR)
        place = (turn.to(INDEX) * threads + begin) * VECTOR + lane
        mask = (lane < (threads - begin) * VECTOR) & (place < aligned_to(numel, ALIGNED))
        _write(values, place, mask, inputs, outs, numbers, TRANSFORM)
    else:
        first_thread = begin + tl.arange(0, BLOCK // BESIDE) * BESIDE
        values = _of_neighbours(SAMPLE, VALUES, BESIDE, seed, counter, first_thread)
        thread = begin + tl.arange(0, BLOCK)
        for i in tl.static_range(USED):
            place = (turn.to(INDEX) * VALUES + i) * threads + thread
            _write(values[i], place, (thread < threads) & (place < numel), inputs, outs, numbers, TRANSFORM)


def elementwise(numel: int, values: int, device: torch.device) -> Order:
    """The order of ATen's kernels that stride over their grid, of draws of so many values."""
    blocks = min(devices.resident_threads(device) // _ATEN_BLOCK, -(-numel // _ATEN_BLOCK))
    threads = blocks * _ATEN_BLOCK
    return Order(threads, 0, -(-numel // (threads * values)) * _ADVANCE)


def _launch(
    distribution: Distribution,
    order: Order,
    outs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    numbers: tuple[Any, Any],
    span: tuple[int, int],
    generator: torch.Generator | None,
    wide: bool,
    options: dict[str, Any],
) -> None:
    numel, threads = outs[0].numel(), order.threads
    values = 2 if wide else 4
    a_turn = threads * (order.vector or values)
    turns = -(-numel // a_turn)
    elements = _ELEMENTS * (4 if devices.current.interpreted else 1)
    block = min(power_of_2(threads), elements // (order.vector or 4))
    # In the last turn few of ATen's threads may have an element.
    busy = min(threads, -(-(numel - (turns - 1) * a_turn) // (order.vector or 1)))
    far = (turns + 1) * threads * max(order.vector, values) >= INT32_LIMIT
    draw_kernel[((turns - 1) * -(-threads // block) + -(-busy // block),)](
        tuple(outs),
        tuple(inputs),
        numel,
        threads,
        *random_state(outs[0].device, order.advance, generator),
        *numbers,
        *span,
        SAMPLE=distribution.wide if wide else distribution.narrow,
        TRANSFORM=distribution.transform,
        VALUES=values,
        USED=min(values, -(-numel // threads)),
        VECTOR=order.vector,
        # As many as 16 bytes have, up to a draw's words.
        BESIDE=max(1, min(4, 16 // outs[0].dtype.itemsize)),
        # Triton knows by itself of 16 alone, and would access elements one by one.
        ALIGNED=order.vector if order.vector and numel % order.vector == 0 else 1,
        BLOCK=block,
        INDEX=tl.int64 if far else tl.int32,
        **options,
    )


def _within_32_bits(numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """(begin, length) of what ATen launches a kernel for, of elements side by side: halves until 32 bits reach all."""
    if numel < 2**31 and (numel - 1) * itemsize + 1 < 2**31:
        yield 0, numel
        return
    half = numel // 2
    yield from _within_32_bits(half, itemsize)
    yield from ((half + begin, length) for begin, length in _within_32_bits(numel - half, itemsize))


def draw(
    distribution: Distribution,
    out: torch.Tensor,
    numbers: tuple[Any, Any] = (0.0, 0.0),
    span: tuple[int, int] = (0, 0),
    generator: torch.Generator | None = None,
    wide: bool | None = None,
) -> None:
    """Write random numbers to a tensor of any layout that does not overlap itself, as ATen's own kernels would.

    `wide` where draws are of two values, as those of float64 are.
    """
    numel = out.numel()
    if not numel:
        return
    wide = out.dtype is torch.float64 if wide is None else wide
    strides = strides_after_conversion(out.shape, out.stride())
    dense = strides == tuple(out.stride())
    buffer = out if dense else empty_strided(out.shape, strides, out.dtype, out.device)
    parts = list(_within_32_bits(numel, out.dtype.itemsize))
    if len(parts) > 1:
        if not dense:
            raise Decline("elements apart from each other that 32 bits do not reach")
        # ATen moves the generator on for the whole, too, before it does for the parts.
        random_state(out.device, elementwise(numel, 2 if wide else 4, out.device).advance, generator)
    for begin, length in parts:
        part = buffer if length == numel else buffer.as_strided((length,), (1,), buffer.storage_offset() + begin)
        order = elementwise(length, 2 if wide else 4, out.device)
        _launch(distribution, order, (part,), (), numbers, span, generator, wide, {})
    if not dense:
        out.copy_(buffer)


def draw_beside(
    distribution: Distribution,
    order: Order,
    inputs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    numbers: tuple[Any, Any] = (0.0, 0.0),
    generator: torch.Generator | None = None,
    wide: bool = False,
    asserting: bool = False,
) -> None:
    """The same for results of operands' elements, all of them side by side in memory, in one order.

    With `asserting` the transformation has assertions, which stop the program.
    """
    if outs[0].numel():
        options = ASSERTING if asserting else {}
        _launch(distribution, order, outs, inputs, numbers, (0, 0), generator, wide, options)


def vectors(numel: int, vector: int, device: torch.device) -> Order:
    """The order of ATen's kernels that load vectors, over the grid of those that do not."""
    order = elementwise(numel, 4, device)
    return order._replace(vector=vector)


@libentry()
@triton.jit(do_not_specialize=["numel", "seed", "offset"])
def sample_kernel(
    out,
    inputs,
    numel,
    seed: tl.int64,
    offset: tl.int64,
    SAMPLER: tl.constexpr,
    TURNS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has BLOCK of ATen's threads, each of which samples TURNS elements one after the other.

    Those of a block of LANES threads are at a distance of LANES from each other.
    """
    wait_for_previous_launch()
    thread = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, counter = seed.to(tl.int64), offset.to(tl.int64) >> 2
    used = tl.zeros((BLOCK,), tl.int32)
    for turn in range(TURNS):
        place = thread // LANES * (LANES * TURNS) + turn * LANES + thread % LANES
        mask = place < numel
        elements = ()
        for i in tl.static_range(len(inputs)):
            elements = elements + (tl.load(inputs[i] + place, mask=mask, other=0),)
        value, used = SAMPLER(seed, counter, thread, used, elements, mask, out.dtype.element_ty)
        tl.store(out + place, value, mask=mask)


def sample_each(
    sampler: Any,
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor,
    advance: int,
    turns: int = 1,
    generator: torch.Generator | None = None,
    asserting: bool = False,
) -> None:
    """Write a sample for each of the operands' elements, all contiguous, by a sampler of `language/rejection.py`.

    In the order of ATen's kernels that give an element, or `turns` of them, a thread.
    """
    numel = out.numel()
    if numel >= INT32_LIMIT:
        raise Decline("elements that 32 bits do not reach")
    if not numel:
        # ATen moves the generator on before it looks.
        random_state(out.device, advance, generator)
        return
    threads = numel if turns == 1 else -(-numel // (_SHARING * turns)) * _SHARING
    block = min(power_of_2(threads), _SAMPLED)
    sample_kernel[(-(-threads // block),)](
        *(out, tuple(inputs), numel, *random_state(out.device, advance, generator)),
        SAMPLER=sampler,
        TURNS=turns,
        LANES=_SHARING,
        BLOCK=block,
        **(ASSERTING if asserting else {}),
    )


@libentry()
@triton.jit(do_not_specialize=["n", "seed", "offset"])
def _shuffle_kernel(sorted_keys, out, n, seed: tl.int64, offset: tl.int64, BLOCK: tl.constexpr):
    """Shuffle numbers of equal keys (Fisher and Yates 1938), each such run by the words of its first one's thread.

    A program has the runs that begin in its block.
    """
    wait_for_previous_launch()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, counter = seed.to(tl.int64), offset.to(tl.int64) >> 2
    key = tl.load(sorted_keys + index, mask=index < n, other=-1)
    before = tl.load(sorted_keys + index - 1, mask=(index > 0) & (index < n), other=-1)
    length = ((index < n) & (key != before)).to(tl.int32)
    longest = 1
    step = 1
    while longest == step:
        after = tl.load(sorted_keys + index + step, mask=index + step < n, other=-1)
        length += ((length == step) & (after == key)).to(tl.int32)
        longest = tl.max(length)
        step += 1
    for i in range(longest - 1, 0, -1):
        drawn = length - 1 - i
        a, b, c, d = words(seed, counter + tl.maximum(drawn, 0).to(tl.int64) // 4, index)
        word = tl.where(drawn % 4 == 0, a, tl.where(drawn % 4 == 1, b, tl.where(drawn % 4 == 2, c, d)))
        other = index + (word % (length - drawn).to(tl.uint32)).to(tl.int32)
        swaps = drawn >= 0
        first = tl.load(out + index + i, mask=swaps)
        second = tl.load(out + other, mask=swaps)
        tl.debug_barrier()
        tl.store(out + index + i, second, mask=swaps)
        tl.debug_barrier()
        tl.store(out + other, first, mask=swaps)
        tl.debug_barrier()


def permute(keys: torch.Tensor, out: torch.Tensor, bits: int, generator: torch.Generator | None) -> None:
    """Write the numbers up to the count of `keys`, in the order of those, and shuffled where they are equal.

    Keys have no other than their last `bits`, unless there are as many as an int32 has.
    """
    n, order = keys.numel(), Keys.of(keys.dtype)
    sorted_keys = empty_strided((n,), (1,), keys.dtype, keys.device)
    if route(n, order) == "long":
        sort_long_rows(keys, 0, order, sorted_keys, out, passes=-(-bits // 8))
    else:
        sort_along(keys, 0, order, sorted_keys, out)
    block = min(_SHUFFLED, power_of_2(n))
    state = random_state(keys.device, -(-n // _ADVANCE) * _ADVANCE, generator)
    _shuffle_kernel[(-(-n // block),)](sorted_keys, out, n, *state, BLOCK=block)
