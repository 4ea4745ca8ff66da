"""ATen's random numbers on CUDA: every element gets the Philox numbers that ATen would give it for a seed.

ATen launches `threads` threads for an operator, each with a subsequence of the generator. A draw gives a thread four
32-bit numbers or two 64-bit ones. In most of ATen's kernels the i-th value of a thread's draw is for the element
`i * threads` after its first one; in kernels that load vectors, for the i-th element of a vector.

A program here has a block of ATen's threads for one draw, so that each number is computed once and stores are
contiguous.

- `draw`: fill a tensor; `draw_elementwise`: results of operands' elements, such as dropout (`draw_kernel`)
- `sample_each`: samples by rejection, whose number of draws depends on the element (`sample_kernel`)
- `permute`: a permutation, by sorting random keys and shuffling equal ones (`_shuffle_kernel`)

A call of `uniform_` (`ops/random/distributions.py`): `draw` gives the result ATen's layout, splits it if 32-bit
offsets do not reach all elements, and asks `elementwise` for ATen's threads. `_launch` takes seed and offset from the
generator, moves it on as ATen would, and launches `draw_kernel` with the distribution's sampler and transform.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.devices.tables import Tables
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

# Threads of ATen's blocks, and the offset by which a draw advances the generator.
_ATEN_BLOCK = 256
_ADVANCE = 4
# Threads of ATen's blocks whose threads sample several elements each.
_SHARING = 128


class RandomTable(NamedTuple):
    """Blocks of a kind of device.

    `elements`: elements of each result that a program writes.
    `sampled`: ATen's threads of a program that samples by rejection.
    `shuffled`: numbers of a permutation that a program shuffles.
    """

    elements: int = 2048
    sampled: int = 128
    shuffled: int = 1024


RANDOM: Tables[RandomTable] = Tables("random", dict.fromkeys(devices.KINDS, RandomTable()))
# Blocks in the interpreter are large because every block costs milliseconds of Python.
RANDOM["interpreter"] = RandomTable(elements=8192)


def random_table() -> RandomTable:
    """Return the table of the current device."""
    return RANDOM[devices.current.kind]


class Distribution(NamedTuple):
    """A sampler of random numbers, and the transform of its values to results.

    `narrow` samples four values a draw, `wide` two, which float64 uses.
    `transform(value, inputs, first, second, low, span, DTYPE)` returns the results of a value as a tuple. `inputs` are
    the operands' elements, `first` and `second` float64 and `low` and `span` int64 numbers of the call, and DTYPE is
    the first result's dtype.
    """

    transform: Any
    narrow: Any
    wide: Any


class Order(NamedTuple):
    """ATen's distribution of elements over `threads`.

    `vector` is the number of contiguous elements of a thread's vector, or 0 if a thread has single elements at a
    stride of `threads`. `advance` is the offset by which the call advances the generator.
    """

    threads: int
    vector: int
    advance: int


@triton.jit
def _sample_vectors(SAMPLE: tl.constexpr, VECTOR: tl.constexpr, seed, counter, thread):
    """Return the values of each thread's vector, concatenated in the order of the threads."""
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
def _sample_neighbours(SAMPLE: tl.constexpr, VALUES: tl.constexpr, ADJACENT: tl.constexpr, seed, counter, first):
    """Return the i-th values of ADJACENT threads from each `first` on, interleaved, for each of the VALUES."""
    values = SAMPLE(seed, counter, first)
    if ADJACENT == 4:
        second, third = SAMPLE(seed, counter, first + 1), SAMPLE(seed, counter, first + 2)
        fourth = SAMPLE(seed, counter, first + 3)
        found = ()
        for i in tl.static_range(VALUES):
            found = found + (interleave4(values[i], second[i], third[i], fourth[i]),)
        values = found
    elif ADJACENT == 2:
        second = SAMPLE(seed, counter, first + 1)
        found = ()
        for i in tl.static_range(VALUES):
            found = found + (tl.interleave(values[i], second[i]),)
        values = found
    return values


@triton.jit
def _write(value, index, mask, inputs, outs, numbers, TRANSFORM: tl.constexpr):
    elements = ()
    for i in tl.static_range(len(inputs)):
        elements = elements + (tl.load(inputs[i] + index, mask=mask, other=0),)
    first, second, low, span = numbers
    results = TRANSFORM(value, elements, first, second, low, span, outs[0].dtype.element_ty)
    for i in tl.static_range(len(outs)):
        tl.store(outs[i] + index, results[i].to(outs[i].dtype.element_ty), mask=mask)


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
    ADJACENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Draw once for BLOCK of ATen's threads, and write USED of the VALUES of the draw, or vectors of VECTOR elements.

    A turn is the number of draws that a thread has made before. For single elements, a lane here stands for ADJACENT
    threads of ATen, so that it stores contiguous elements at once. ALIGNED divides `numel`.
    """
    wait_for_previous_launch()
    blocks = tl.cdiv(threads, BLOCK)
    turn = tl.program_id(0) // blocks
    begin = tl.program_id(0) % blocks * BLOCK
    DRAWS: tl.constexpr = 2 if VECTOR == 8 else 1
    # The interpreter passes Python numbers.
    seed, counter = seed.to(tl.int64), (offset.to(tl.int64) >> 2) + turn * DRAWS
    first, second = tl.full((), first, tl.float64), tl.full((), second, tl.float64)
    numbers = (first, second, low.to(tl.int64), span.to(tl.int64))
    if VECTOR:
        values = _sample_vectors(SAMPLE, VECTOR, seed, counter, begin + tl.arange(0, BLOCK))
        lane = tl.arange(0, BLOCK * VECTOR)
        index = (turn.to(INDEX) * threads + begin) * VECTOR + lane
        mask = (lane < (threads - begin) * VECTOR) & (index < aligned_to(numel, ALIGNED))
        _write(values, index, mask, inputs, outs, numbers, TRANSFORM)
    else:
        first_thread = begin + tl.arange(0, BLOCK // ADJACENT) * ADJACENT
        values = _sample_neighbours(SAMPLE, VALUES, ADJACENT, seed, counter, first_thread)
        thread = begin + tl.arange(0, BLOCK)
        for i in tl.static_range(USED):
            index = (turn.to(INDEX) * VALUES + i) * threads + thread
            _write(values[i], index, (thread < threads) & (index < numel), inputs, outs, numbers, TRANSFORM)


def elementwise(numel: int, values: int, device: torch.device) -> Order:
    """Return the order of ATen's kernels that stride over their grid, with `values` values a draw."""
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
    block = min(power_of_2(threads), random_table().elements // (order.vector or 4))
    # In the last turn, threads behind the last element draw nothing.
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
        # The elements of 16 bytes, at most 4.
        ADJACENT=max(1, min(4, 16 // outs[0].dtype.itemsize)),
        # Triton detects divisibility by 16 only; without this hint it would access single elements.
        ALIGNED=order.vector if order.vector and numel % order.vector == 0 else 1,
        BLOCK=block,
        INDEX=tl.int64 if far else tl.int32,
        **options,
    )


def _within_32_bits(numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, length) of the slices for which ATen launches kernels: halved until 32-bit offsets reach all."""
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
    """Fill a tensor, of any layout without overlap, with ATen's random numbers.

    `numbers` and `span` are passed to the distribution's transform. `wide` selects draws of two values, the default
    for float64.
    """
    numel = out.numel()
    if not numel:
        return
    wide = out.dtype is torch.float64 if wide is None else wide
    strides = strides_after_conversion(out.shape, out.stride())
    dense = strides == tuple(out.stride())
    buffer = out if dense else empty_strided(out.shape, strides, out.dtype, out.device)
    slices = list(_within_32_bits(numel, out.dtype.itemsize))
    if len(slices) > 1:
        if not dense:
            raise Decline(f"{numel} elements in a layout with gaps, which 32-bit offsets do not reach")
        # ATen advances the generator for the whole tensor before it does for each slice.
        random_state(out.device, elementwise(numel, 2 if wide else 4, out.device).advance, generator)
    for begin, length in slices:
        own = buffer if length == numel else buffer.as_strided((length,), (1,), buffer.storage_offset() + begin)
        order = elementwise(length, 2 if wide else 4, out.device)
        _launch(distribution, order, (own,), (), numbers, span, generator, wide, {})
    if not dense:
        out.copy_(buffer)


def draw_elementwise(
    distribution: Distribution,
    order: Order,
    inputs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    numbers: tuple[Any, Any] = (0.0, 0.0),
    generator: torch.Generator | None = None,
    wide: bool = False,
    asserting: bool = False,
) -> None:
    """Write results that a distribution makes of random numbers and the operands' elements.

    All tensors are dense and have the same layout. `asserting` says that the transform has assertions.
    """
    if outs[0].numel():
        options = ASSERTING if asserting else {}
        _launch(distribution, order, outs, inputs, numbers, (0, 0), generator, wide, options)


def vectors(numel: int, vector: int, device: torch.device) -> Order:
    """Return the order of ATen's kernels that load vectors, whose grid is that of the elementwise ones."""
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
    """Sample for BLOCK of ATen's threads, each of which samples TURNS elements one after the other.

    A thread's elements are at a stride of LANES, the threads of ATen's block.
    """
    wait_for_previous_launch()
    thread = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, counter = seed.to(tl.int64), offset.to(tl.int64) >> 2
    used = tl.zeros((BLOCK,), tl.int32)
    for turn in range(TURNS):
        index = thread // LANES * (LANES * TURNS) + turn * LANES + thread % LANES
        mask = index < numel
        elements = ()
        for i in tl.static_range(len(inputs)):
            elements = elements + (tl.load(inputs[i] + index, mask=mask, other=0),)
        value, used = SAMPLER(seed, counter, thread, used, elements, mask, out.dtype.element_ty)
        tl.store(out + index, value, mask=mask)


def sample_each(
    sampler: Any,
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor,
    advance: int,
    turns: int = 1,
    generator: torch.Generator | None = None,
    asserting: bool = False,
) -> None:
    """Write a sample for each element of contiguous operands, by a sampler of `language/rejection.py`.

    A thread of ATen samples `turns` elements. `advance` is the offset by which the call advances the generator.
    """
    numel = out.numel()
    if numel >= INT32_LIMIT:
        raise Decline(f"{numel} elements, which 32-bit offsets do not reach")
    if not numel:
        # ATen advances the generator even if there are no elements.
        random_state(out.device, advance, generator)
        return
    threads = numel if turns == 1 else -(-numel // (_SHARING * turns)) * _SHARING
    block = min(power_of_2(threads), random_table().sampled)
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
    """Shuffle the numbers of equal keys (Fisher and Yates 1938), for the runs of equal keys that begin in a block.

    A run is shuffled with the random numbers of the thread of its first index.
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
    """Write the permutation that sorts random `keys`; numbers of equal keys are shuffled.

    Keys have only their lowest `bits` bits set.
    """
    n, order = keys.numel(), Keys.of(keys.dtype)
    sorted_keys = empty_strided((n,), (1,), keys.dtype, keys.device)
    if route(n, order) == "long":
        sort_long_rows(keys, 0, order, sorted_keys, out, passes=-(-bits // 8))
    else:
        sort_along(keys, 0, order, sorted_keys, out)
    block = min(random_table().shuffled, power_of_2(n))
    state = random_state(keys.device, -(-n // _ADVANCE) * _ADVANCE, generator)
    _shuffle_kernel[(-(-n // block),)](sorted_keys, out, n, *state, BLOCK=block)
