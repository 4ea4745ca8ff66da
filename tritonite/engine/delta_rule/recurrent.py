"""Gated delta rule token by token, for decoding: a program holds a state's value columns in registers.

The state S, (key size, value size), becomes S exp(g), then S + k d with d = beta (v - S^T k), and the output is
scale S^T q.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.engine.delta_rule.problem import Problem, delta_table
from tritonite.engine.delta_rule.tiles import head_rows, inverse_length, load_state, locate, numbers, store_state
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@triton.jit
def _load_vector(pointers, column, columns, NORMALIZE: tl.constexpr):
    """Load a query or key in float32, divided by its length if NORMALIZE."""
    x = tl.load(pointers + column, mask=column < columns, other=0.0).to(tl.float32)
    if NORMALIZE:
        x *= inverse_length(x, 0)
    return x


@libentry()
@triton.jit(do_not_specialize=["tokens"])
def update_states(inputs, out, final, strides, sizes, tokens, scale: tl.float64, META: tl.constexpr):
    """Pass over the tokens of a head for BLOCK_V value columns.

    Write the outputs, and the state behind the last token to `final` unless it is None. `final` may be the initial
    states' memory.
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    strides, sizes = numbers(strides, sizes, INDEX)
    BLOCK_K: tl.constexpr = META.block_k
    BLOCK_V: tl.constexpr = META.block_v
    NORMALIZE: tl.constexpr = META.normalize
    here = locate(tl.program_id(1), sizes)
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    query = head_rows(inputs.query, strides.query, here.batch, here.key_head)
    key = head_rows(inputs.key, strides.key, here.batch, here.key_head)
    value = head_rows(inputs.value, strides.value, here.batch, here.head)
    g = head_rows(inputs.g, strides.g, here.batch, here.head)
    beta = head_rows(inputs.beta, strides.beta, here.batch, here.head)
    out = head_rows(out, strides.out, here.batch, here.head)
    factor = tl.full((), scale, tl.float64).to(tl.float32)
    mask = column < sizes.value
    if inputs.initial is None:
        state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    else:
        state = load_state(inputs.initial, tl.program_id(1), row, column, sizes).to(tl.float32)
    for t in range(tokens):
        token = tl.full((), t, META.index)
        q = _load_vector(query + token * strides.query.token, row, sizes.key, NORMALIZE) * factor
        k = _load_vector(key + token * strides.key.token, row, sizes.key, NORMALIZE)
        v = tl.load(value + token * strides.value.token + column, mask=mask, other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(g + token * strides.g.token).to(tl.float32))
        rate = tl.load(beta + token * strides.beta.token).to(tl.float32)
        state *= decay
        correction = rate * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * correction[None, :]
        result = tl.sum(state * q[:, None], 0)
        tl.store(out + token * strides.out.token + column, result.to(out.dtype.element_ty), mask=mask)
    if final is not None:
        store_state(final, tl.program_id(1), row, column, sizes, state)


def recurrent(problem: Problem, out: torch.Tensor, final: torch.Tensor | None) -> None:
    """Write the outputs to `out`, (batch, tokens, heads, value size), and the last states to `final` unless it is None.

    `final` has the shape of the initial states, and may be the initial states.
    """
    blocks = delta_table().recurrent
    meta = problem.meta(blocks, out)
    grid = (-(-problem.sizes.value // meta.block_v), problem.heads)
    if all(grid):
        update_states[grid](
            *(problem.inputs, out, final, problem.strides(out), problem.sizes, problem.tokens, problem.scale),
            META=meta,
            **blocks.options,
        )
