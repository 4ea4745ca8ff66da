"""Reductions of blocks by any combine function, for states of several values; the interpreter has twins of its own."""

from __future__ import annotations

from typing import Any

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


# `fold` reduces along the second dimension of a block, `fold_all` one of a single dimension, to a block of one.
fold = _fold_in_interpreter if knobs.runtime.interpret else _fold_in_compiler
fold_all = _fold_all_in_interpreter if knobs.runtime.interpret else _fold_all_in_compiler
