"""Cooperative rows: several programs (CTAs) share a row and exchange their states within one launch.

A program draws a ticket from an atomic counter, which gives it a row and a slice of that row. The programs of a row so
have consecutive tickets, whatever order the device starts programs in. All rows but the last one begun have all of
their programs running, so these end and make room. This needs a device on which a running program makes progress while
others wait (`Device.forward_progress`), and room for the programs of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.language.reduce import reduce_all
from tritonite.runtime.contract import zeros

# The int64 words at the start of the scratch that hold the ticket counter, so that it shares no cache line with states.
_COUNTER = tl.constexpr(16)


def scratch(n_rows: int, states: int, programs_per_row: int, device: torch.device) -> torch.Tensor:
    """Allocate the zeroed scratch of a launch: the ticket counter, then (n_rows, states, programs_per_row) words."""
    return zeros((_COUNTER.value + n_rows * states * programs_per_row,), torch.int64, device)


@triton.jit
def take_ticket(scratch, PROGRAMS_PER_ROW: tl.constexpr, INDEX: tl.constexpr):
    """Return the row of this program, and its slice of that row, below PROGRAMS_PER_ROW."""
    # Unsigned, because a signed division takes registers that two programs need to fit.
    ticket = tl.atomic_add(scratch, 1, sem="relaxed").to(tl.uint32)
    return (ticket // PROGRAMS_PER_ROW).to(INDEX), (ticket % PROGRAMS_PER_ROW).to(INDEX)


@triton.jit
def states_of_row(states, scratch, row, row_slice, META: tl.constexpr):
    """Return the state of a whole row, combined from the states of its slices in the order of the slices.

    Every program stores its slice's state and waits for the others. A word holds a state of 32 bits and a flag that it
    is set, so no ordering of memory operations is needed. An acquire would invalidate the L1 cache of all programs on
    the multiprocessor.
    """
    PROGRAMS_PER_ROW: tl.constexpr = META.programs_per_row
    slices = tl.arange(0, triton.next_power_of_2(PROGRAMS_PER_ROW))
    words = scratch + (row * (len(states) * PROGRAMS_PER_ROW) + _COUNTER)
    for i in tl.static_range(len(states)):
        word = states[i].to(tl.uint32, bitcast=True).to(tl.int64) * 2 + 1
        tl.atomic_xchg(words + (i * PROGRAMS_PER_ROW + row_slice + tl.arange(0, 1)), word, sem="relaxed")
    every = ()
    for i in tl.static_range(len(states)):
        pointers = words + i * PROGRAMS_PER_ROW + slices
        found = tl.load(pointers, mask=slices < PROGRAMS_PER_ROW, other=1, volatile=True)
        while tl.min(found & 1) == 0:
            found = tl.load(pointers, mask=slices < PROGRAMS_PER_ROW, other=1, volatile=True)
        state = (found >> 1).to(tl.uint32).to(META.states[i], bitcast=True)
        every = every + (tl.where(slices < PROGRAMS_PER_ROW, state, META.init[i]),)
    return reduce_all(every, META.combine)
