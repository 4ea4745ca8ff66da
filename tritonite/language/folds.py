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


def _reduced(states: Any, axis: int, combine: Any, semantic: Any, generator: Any) -> tuple[Any, ...]:
    """What `tl.reduce` gives of several states, by a combine function that may be a constant of a kernel."""
    combine = getattr(combine, "value", combine)
    found = tl.reduce(tuple(states), axis, combine, _semantic=semantic, _generator=generator)
    return found if isinstance(found, tuple) else (found,)


@tl.core.builtin
def _fold_in_compiler(states, combine, _semantic=None, _generator=None):
    return tl.tuple(_reduced(states.values, 1, combine, _semantic, _generator))


def _fold_all_in_interpreter(states: tuple[Any, ...], combine: Any) -> tuple[Any, ...]:
    return _fold_in_interpreter(tuple([tl.reshape(state, (1, state.shape[0])) for state in states]), combine)


@tl.core.builtin
def _fold_all_in_compiler(states, combine, _semantic=None, _generator=None):
    found = _reduced(states.values, 0, combine, _semantic, _generator)
    # Numbers suit any layout; to bring a block of one to another's, threads would write it for each element of that.
    return tl.tuple([tl.full((1,), state, state.dtype, _semantic=_semantic) for state in found])


@triton.constexpr_function
def doublings(length):
    """How often 1 is doubled to be a power of 2."""
    return length.bit_length() - 1


@triton.jit
def _by_place(one, other):
    """The states of both, those whose place, which is the last of them, is lower first."""
    lower, higher = (), ()
    ordered = one[len(one) - 1] < other[len(other) - 1]
    for i in tl.static_range(len(one) - 1):
        lower = lower + (tl.where(ordered, one[i], other[i]),)
        higher = higher + (tl.where(ordered, other[i], one[i]),)
    return lower + higher


class _InPlaces:
    """Triton's code generator, but that it calls a combine function with states in the order of their places.

    A thread that has the higher state of a pair combines it with the lower one's, in that order otherwise.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def call_JitFunction(self, combine: Any, states: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:  # noqa: N802
        call, half = self._generator.call_JitFunction, len(states) // 2
        ordered = call(_by_place, [tl.tuple(states[:half]), tl.tuple(states[half:])], {})
        found = call(combine, list(ordered), kwargs)
        return (*(found if isinstance(found, tl.tuple) else (found,)), states[half - 1])


@tl.core.builtin
def _fold_pairs(states, places, combine, _semantic=None, _generator=None):
    return tl.tuple(_reduced((*states.values, places), 2, combine, _semantic, _InPlaces(_generator))[:-1])


@triton.jit
def _fold_by_halves(states, COMBINE: tl.constexpr):
    """Neighbours first, as in the interpreter: in an order that no layout of the block in threads decides.

    Pairs are reduced wherever they are. To split them Triton 3.6 would give each thread whole rows, back to the load.
    """
    ROWS: tl.constexpr = states[0].shape[0]
    LENGTH: tl.constexpr = states[0].shape[1]
    for i in tl.static_range(doublings(LENGTH)):
        pairs = ()
        for j in tl.static_range(len(states)):
            pairs = pairs + (tl.reshape(states[j], (ROWS, LENGTH // 2 ** (i + 1), 2)),)
        places = tl.broadcast_to(tl.arange(0, 2)[None, None, :], pairs[0].shape)
        states = _fold_pairs(pairs, places, COMBINE)
    folded = ()
    for j in tl.static_range(len(states)):
        folded = folded + (tl.reshape(states[j], (ROWS,)),)
    return folded


# `fold` reduces along the second dimension of a block, `fold_all` one of a single dimension, to a block of one.
# `fold_in_order` is `fold` in one order for all layouts.
fold = _fold_in_interpreter if knobs.runtime.interpret else _fold_in_compiler
fold_in_order = _fold_in_interpreter if knobs.runtime.interpret else _fold_by_halves
fold_all = _fold_all_in_interpreter if knobs.runtime.interpret else _fold_all_in_compiler
