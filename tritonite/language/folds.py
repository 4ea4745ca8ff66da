"""Reductions of blocks by any combine function, for states of several values; the interpreter has twins of its own."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton import knobs


def _fold_in_interpreter(states: tuple[Any, ...], combine: Any) -> tuple[Any, ...]:
    """By halves: Triton's own reduction runs element by element there."""
    while states[0].shape[1] > 1:
        rows, columns = states[0].shape
        halves = [tl.split(tl.reshape(state, (rows, columns // 2, 2))) for state in states]
        found = combine(*[left for left, _ in halves], *[right for _, right in halves])
        states = found if isinstance(found, tuple) else (found,)
    return tuple([tl.reshape(state, (state.shape[0],)) for state in states])


@tl.core.builtin
def _fold_in_compiler(states, combine, _semantic=None, _generator=None):
    found = tl.reduce(
        tuple(states.values), 1, getattr(combine, "value", combine), _semantic=_semantic, _generator=_generator
    )
    return tl.tuple(found)


def _fold_all_in_interpreter(states: tuple[Any, ...], combine: Any) -> tuple[Any, ...]:
    return _fold_in_interpreter(tuple([tl.reshape(state, (1, state.shape[0])) for state in states]), combine)


@tl.core.builtin
def _fold_all_in_compiler(states, combine, _semantic=None, _generator=None):
    found = tl.reduce(
        tuple(states.values), 0, getattr(combine, "value", combine), _semantic=_semantic, _generator=_generator
    )
    found = found if isinstance(found, tuple) else (found,)
    # Numbers suit any layout; to bring a block of one to another's, threads would write it for each element of that.
    return tl.tuple([tl.full((1,), state, state.dtype, _semantic=_semantic) for state in found])


@triton.constexpr_function
def doublings(length):
    """How often 1 is doubled to be a power of 2."""
    return length.bit_length() - 1


@triton.jit
def _fold_by_halves(states, COMBINE: tl.constexpr):
    """Neighbours first, as in the interpreter: in an order that no layout of the block in threads decides."""
    ROWS: tl.constexpr = states[0].shape[0]
    LENGTH: tl.constexpr = states[0].shape[1]
    for i in tl.static_range(doublings(LENGTH)):
        left, right = (), ()
        for j in tl.static_range(len(states)):
            a, b = tl.split(tl.reshape(states[j], (ROWS, LENGTH // 2 ** (i + 1), 2)))
            left, right = left + (a,), right + (b,)
        found = COMBINE(*(left + right))
        if len(states) == 1:
            found = (found,)
        states = found
    folded = ()
    for j in tl.static_range(len(states)):
        folded = folded + (tl.reshape(states[j], (ROWS,)),)
    return folded


# `fold` reduces along the second dimension of a block, `fold_all` one of a single dimension, to a block of one.
# `fold_in_order` is `fold` in one order for all layouts.
fold = _fold_in_interpreter if knobs.runtime.interpret else _fold_in_compiler
fold_in_order = _fold_in_interpreter if knobs.runtime.interpret else _fold_by_halves
fold_all = _fold_all_in_interpreter if knobs.runtime.interpret else _fold_all_in_compiler
