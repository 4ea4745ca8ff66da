"""Cooperative rows: several programs (CTAs) share a row and wait for each other's states within one launch.

A program takes tickets, each of which tells it a row and a share of that row. Tickets are counted by an atomic
operation, and a program draws none before it has done with waiting: so all rows but the last one begun have programs at
work on all of their shares, in whatever order the device starts them and however many run at a time. The next ticket is
on its way while results are written. That takes a device on which a running program keeps running while others wait
(`Device.forward_progress`), and room for the programs of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.dispatch.call import zeros
from tritonite.language.folds import fold_all

# The words that the counter of tickets has for itself, so that it shares no cache line with states.
_COUNTER = tl.constexpr(16)


def scratch(n_rows: int, states: int, sharing: int, device: torch.device) -> torch.Tensor:
    """The counter of a launch and the words of all rows, each `states` by `sharing`. All must be zero at its start."""
    return zeros((_COUNTER.value + n_rows * states * sharing,), torch.int64, device)


@triton.jit
def draw_ticket(scratch, FACTS: tl.constexpr):
    """What a program's first thread will have of a ticket; nobody waits for it yet."""
    threads = tl.arange(0, FACTS.threads)
    # At one address for all threads the compiler would have a warp wait, to count for all of its threads at once.
    return tl.atomic_add(scratch + threads, 1, mask=threads == 0, sem="relaxed").to(tl.uint32)


@triton.jit
def row_and_share(drawn, FACTS: tl.constexpr):
    """Which of the rows, and which of its shares, is the program's by what was drawn."""
    # Without a sign, because a division of one with a sign takes registers that two programs need to fit.
    ticket = tl.sum(tl.where(tl.arange(0, FACTS.threads) == 0, drawn, 0)).to(tl.uint32)
    return (ticket // FACTS.sharing).to(FACTS.index), (ticket % FACTS.sharing).to(FACTS.index)


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
    return fold_all(every, FACTS.combine)
