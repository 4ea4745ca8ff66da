"""Decoupled look-back: the counts of all blocks before a program's own, within one launch (Merrill and Garland 2016).

Programs take tickets, so that the programs of all earlier blocks have started, whatever order the device starts them
in. Each publishes the counts of its block, then reads the counts of earlier blocks until one has an inclusive prefix,
then publishes its own inclusive prefix.

A published integer has a state in its two lowest bits: 0 for nothing yet, 1 for the counts of one block, 2 for the
counts of all blocks up to it. So the state and the count arrive together, and no fence is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite import devices
from tritonite.errors import Decline

# The ticket counter takes a cache line of 128 bytes of its own: the published integers start behind it.
TICKET_INT32, TICKET_INT64 = 32, 16
# A published count has 30 bits: its sign bit and the two bits of the state are taken.
_MOST = 2**29


def check_length(n: int) -> None:
    """Decline rows whose programs cannot wait for each other, or whose counts do not fit next to a state."""
    if not (devices.current.forward_progress or devices.current.interpreted):
        raise Decline("a row of several blocks on a device whose programs may not wait for each other")
    if n >= _MOST:
        raise Decline(f"rows of {n} elements, of at most {_MOST - 1} whose counts have 30 bits")


@triton.jit
def is_skipped(flag):
    """Return whether a launch has a flag and its value is 0, which tells programs to end at once."""
    return tl.load(flag[0]) == 0 if len(flag) > 0 else False


@triton.jit
def publish_counts(counts, block, own):
    """Publish the counts of a block, one for each class.

    `counts` points to the int32 of the row's first block; each block has one for each class. The first block's counts
    are its inclusive prefix.
    """
    CLASSES: tl.constexpr = own.shape[0]
    pointers = counts + block * CLASSES + tl.arange(0, CLASSES)
    tl.atomic_xchg(pointers, own * 4 + tl.where(block == 0, 2, 1), sem="relaxed")


@triton.jit
def counts_before(counts, block, own):
    """Return the counts of each class in all earlier blocks, and publish the inclusive prefix.

    The program has published its `own` counts before. Each class looks back on its own, at several blocks at a time,
    and waits for a block whose counts are not published yet.
    """
    CLASSES: tl.constexpr = own.shape[0]
    AT_ONCE: tl.constexpr = 8 if CLASSES > 32 else 16
    classes = tl.arange(0, CLASSES)
    before = tl.zeros((CLASSES,), tl.int32)
    if block > 0:
        # The next block to look at, -1 once an inclusive prefix was found.
        looked = tl.zeros((CLASSES,), tl.int32) + (block - 1)
        while tl.max(looked, axis=0) >= 0:
            pointers = counts + looked.to(tl.int64) * CLASSES + classes
            found = ()
            for j in tl.static_range(AT_ONCE):
                found = found + (tl.load(pointers - j * CLASSES, mask=looked >= j, other=0, volatile=True),)
            pending = looked >= 0
            for j in tl.static_range(AT_ONCE):
                known = pending & ((found[j] & 3) != 0)
                before += tl.where(known, found[j] >> 2, 0)
                looked -= known.to(tl.int32)
                pending = known & ((found[j] & 3) == 1)
                looked = tl.where(known & ((found[j] & 3) == 2), -1, looked)
        pointers = counts + block * CLASSES + classes
        tl.atomic_xchg(pointers, (before + own) * 4 + 2, sem="relaxed")
    return before


@triton.jit
def _packed(count, start, state):
    """Pack an int64: the number of runs that begin (32 bits), the start of the last one plus 1 (30 bits), the state."""
    return (count.to(tl.int64) << 32) | ((start + 1).to(tl.int64) << 2) | state


@triton.jit
def runs_before(published, block, count, start, AT_ONCE: tl.constexpr):
    """Publish a block's runs; return (the number of runs that begin in earlier blocks, the start of the last of them).

    `count` runs begin in the block, the last of them at index `start`; a start is -1 where there is no run. Lane i
    looks at the i-th block before, so that the whole program goes on or stops together.
    """
    before = tl.zeros((), tl.int32)
    last = tl.full((), -1, tl.int32)
    tl.atomic_xchg(published + block, _packed(count, start, tl.where(block == 0, 2, 1)), sem="relaxed")
    if block > 0:
        distance = tl.arange(0, AT_ONCE)
        nearest = block - 1
        while nearest >= 0:
            packed = tl.load(published + (nearest - distance), mask=distance <= nearest, other=2, volatile=True)
            state = (packed & 3).to(tl.int32)
            # The nearest lane whose state is not 1, and that state.
            end = tl.min(tl.where(state == 1, AT_ONCE * 4, distance * 4 + state), axis=0)
            known = (distance * 4 < end) & (state != 0)
            before += tl.sum(tl.where(known, (packed >> 32).to(tl.int32), 0), axis=0)
            starts = (packed & 0xFFFFFFFF).to(tl.int32) // 4 - 1
            last = tl.maximum(last, tl.max(tl.where(known, starts, -1), axis=0))
            nearest = tl.where((end & 3) == 2, -1, nearest - end // 4)
        tl.atomic_xchg(published + block, _packed(before + count, tl.maximum(last, start), 2), sem="relaxed")
    return before, last
