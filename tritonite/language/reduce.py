"""Block reductions by any associative combine function, over states of several values.

A state is a tuple of blocks of one shape. Each reduction also has a version for Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton import knobs


def _reduce_rows_in_interpreter(states: tuple[Any, ...], combine: Any) -> tuple[Any, ...]:
    """Reduce dimension 1 by combining neighbours pairwise; the interpreter's own reduction runs element by element."""
    from tritonite.language.shortcuts import even_and_odd

    while states[0].shape[1] > 1:
        pairs = [even_and_odd(state) for state in states]
        combined = combine(*[even for even, _ in pairs], *[odd for _, odd in pairs])
        states = combined if isinstance(combined, tuple) else (combined,)
    return tuple([tl.reshape(state, (state.shape[0],)) for state in states])


def _reduce(states: Any, axis: int, combine: Any, semantic: Any, generator: Any) -> tuple[Any, ...]:
    """Call `tl.reduce` and return a tuple, also for a single state; `combine` may be a `tl.constexpr`."""
    combine = getattr(combine, "value", combine)
    reduced = tl.reduce(tuple(states), axis, combine, _semantic=semantic, _generator=generator)
    return reduced if isinstance(reduced, tuple) else (reduced,)


@tl.core.builtin
def _reduce_rows_in_compiler(states, combine, _semantic=None, _generator=None):
    return tl.tuple(_reduce(states.values, 1, combine, _semantic, _generator))


def _reduce_all_in_interpreter(states: tuple[Any, ...], combine: Any) -> tuple[Any, ...]:
    return _reduce_rows_in_interpreter(tuple([tl.reshape(state, (1, state.shape[0])) for state in states]), combine)


@tl.core.builtin
def _reduce_all_in_compiler(states, combine, _semantic=None, _generator=None):
    reduced = _reduce(states.values, 0, combine, _semantic, _generator)
    # A scalar suits any layout. Converting the layout of a block of one would go through shared memory.
    return tl.tuple([tl.full((1,), state, state.dtype, _semantic=_semantic) for state in reduced])


@triton.constexpr_function
def exact_log2(length):
    """Return log2 of a power of 2."""
    return length.bit_length() - 1


@triton.jit
def _order_by_index(one, other):
    """Concatenate two states, the one whose index (last value) is lower first, without the indices."""
    lower, higher = (), ()
    ordered = one[len(one) - 1] < other[len(other) - 1]
    for i in tl.static_range(len(one) - 1):
        lower = lower + (tl.where(ordered, one[i], other[i]),)
        higher = higher + (tl.where(ordered, other[i], one[i]),)
    return lower + higher


class _InIndexOrder:
    """Triton's code generator, changed to call a combine function with the two states in the order of their indices.

    `tl.reduce` passes a thread's own state first, so the thread with the higher index would combine in reverse order.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def call_JitFunction(self, combine: Any, states: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:  # noqa: N802
        call, half = self._generator.call_JitFunction, len(states) // 2
        ordered = call(_order_by_index, [tl.tuple(states[:half]), tl.tuple(states[half:])], {})
        combined = call(combine, list(ordered), kwargs)
        return (*(combined if isinstance(combined, tl.tuple) else (combined,)), states[half - 1])


@tl.core.builtin
def _reduce_pairs(states, indices, combine, _semantic=None, _generator=None):
    """Reduce dimension 2, of size 2; `indices` holds each element's index along it."""
    return tl.tuple(_reduce((*states.values, indices), 2, combine, _semantic, _InIndexOrder(_generator))[:-1])


@triton.jit
def _reduce_rows_pairwise(states, COMBINE: tl.constexpr):
    """Reduce dimension 1 by combining neighbours pairwise, an order that no thread layout changes.

    `tl.reduce` combines each pair in the layout at hand. For `tl.split`, Triton 3.6 would assign whole rows to a
    thread, in every block back to the load.
    """
    ROWS: tl.constexpr = states[0].shape[0]
    LENGTH: tl.constexpr = states[0].shape[1]
    for i in tl.static_range(exact_log2(LENGTH)):
        pairs = ()
        for j in tl.static_range(len(states)):
            pairs = pairs + (tl.reshape(states[j], (ROWS, LENGTH // 2 ** (i + 1), 2)),)
        indices = tl.broadcast_to(tl.arange(0, 2)[None, None, :], pairs[0].shape)
        states = _reduce_pairs(pairs, indices, COMBINE)
    reduced = ()
    for j in tl.static_range(len(states)):
        reduced = reduced + (tl.reshape(states[j], (ROWS,)),)
    return reduced


# reduce_rows(states, combine): reduce dimension 1 of 2-D blocks, in the order that is fastest for the layout.
# reduce_rows_in_order(states, combine): the same reduction, in one order for every layout.
# reduce_all(states, combine): reduce 1-D blocks to blocks of one element.
reduce_rows = _reduce_rows_in_interpreter if knobs.runtime.interpret else _reduce_rows_in_compiler
reduce_rows_in_order = _reduce_rows_in_interpreter if knobs.runtime.interpret else _reduce_rows_pairwise
reduce_all = _reduce_all_in_interpreter if knobs.runtime.interpret else _reduce_all_in_compiler
