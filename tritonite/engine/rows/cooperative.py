"""Cooperative rows: several programs (CTAs) share a row and wait for each other's states within one launch.

A program takes a ticket, which tells it its row and its share of that row. Tickets are counted by an atomic operation,
so that the programs of a row are next to each other in the order in which programs run, whatever order the device
starts them in: at any time all rows but the last one begun have all of their programs at work, and those end and make
room. That takes a device on which a running program keeps running while others wait (`Device.forward_progress`), and
room for the programs of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.language.reduce import reduce_all
from tritonite.runtime.contract import zeros

# The words that the counter of tickets has for itself, so that it shares no cache line with states.
_COUNTER = tl.constexpr(16)


def scratch(n_rows: int, states: int, sharing: int, device: torch.device) -> torch.Tensor:
    """The counter of a launch and the words of all rows, each `states` by `sharing`. All must be zero at its start."""
    return zeros((_COUNTER.value + n_rows * states * sharing,), torch.int64, device)


@triton.jit
def take_ticket(scratch, SHARING: tl.constexpr, INDEX: tl.constexpr):
    """(row, share): which of the rows, and which of its SHARING shares, is the program's."""
    # Without a sign, because a division of one with a sign takes registers that two programs need to fit.
    ticket = tl.atomic_add(scratch, 1, sem="relaxed").to(tl.uint32)
    return (ticket // SHARING).to(INDEX), (ticket % SHARING).to(INDEX)


@triton.jit
def states_of_row(states, scratch, row, share, FACTS: tl.constexpr):
    """The states of a row, from those of all its shares, which the programs leave in words for each other.

    A word says both what a state is and that it is there. So nothing has to come in order: an operation that acquires
    would empty the multiprocessor's cache each time, for all of its programs. All combine in the order of the shares.
    """
    SHARING: tl.constexpr = FACTS.sharing
    shares = tl.arange(0, triton.next_power_of_2(SHARING))
    words = scratch + (row * (len(states) * SHARING) + _COUNTER)
    for i in tl.static_range(len(states)):
        word = states[i].to(tl.uint32, bitcast=True).to(tl.int64) * 2 + 1
        tl.atomic_xchg(words + (i * SHARING + share + tl.arange(0, 1)), word, sem="relaxed")
    every = ()
    for i in tl.static_range(len(states)):
        pointers = words + i * SHARING + shares
        found = tl.load(pointers, mask=shares < SHARING, other=1, volatile=True)
        while tl.min(found & 1) == 0:
            found = tl.load(pointers, mask=shares < SHARING, other=1, volatile=True)
        state = (found >> 1).to(tl.uint32).to(FACTS.states[i], bitcast=True)
        every = every + (tl.where(shares < SHARING, state, FACTS.init[i]),)
    return reduce_all(every, FACTS.combine)
