"""Gradients of the gated delta rule: the pass back over chunks, and the gradients of every chunk in parallel.

`prepare` and `forward` define the names; by_x is the gradient by x. Corrections d solve
(I + A) d = r with r = beta v - beta exp(G) k h. So by_r = (I + A)^-T by_d, and by_A = -by_r d^T below the diagonal.
With h' the next state:

    by_d = P^T by_o + exp(G[C] - G) k by_h'
    by_h = exp(G[C]) by_h' + (scale exp(G) q)^T by_o - (beta exp(G) k)^T by_r

The pass back over chunks computes by_r and by_h. All other gradients follow from by_r and by_h in each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.engine.delta_rule.forward import run_pass
from tritonite.engine.delta_rule.prepare import prepare
from tritonite.engine.delta_rule.problem import Problem, delta_table
from tritonite.engine.delta_rule.tiles import (
    Here,
    decays_between,
    head_rows,
    inverse_length,
    load_gates,
    load_rows,
    load_state,
    load_vectors,
    locate,
    numbers,
    product,
    square_block,
    store_rows,
    store_state,
)
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry


class Passed(NamedTuple):
    """Intermediate results of the passes, heads counted over the batch.

    states, by_states: (heads, chunks, key size, value size), the state before a chunk, and the gradient by the state
        behind a chunk.
    corrections, by_rests: (heads, tokens, value size), d and by_r.
    """

    states: Any
    by_states: Any
    corrections: Any
    by_rests: Any


class Gradients(NamedTuple):
    """Gradients by the operands, with their shapes, contiguous."""

    query: Any
    key: Any
    value: Any
    g: Any
    beta: Any


@libentry()
@triton.jit(do_not_specialize=["tokens", "chunks"])
def pass_back_over_chunks(
    inputs,
    scores,
    inverses,
    grad,
    by_final,
    by_initial,
    by_states,
    by_rests,
    strides,
    sizes,
    tokens,
    chunks,
    scale: tl.float64,
    META: tl.constexpr,
):
    """Pass back over the chunks of a head for BLOCK_V value columns.

    Write by_r and the gradient by the state behind every chunk, and the gradient by the initial state unless
    `by_initial` is None. `by_final` is the gradient by the state behind the last token, or None for zeros; `grad` is
    by_o.
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    strides, sizes = numbers(strides, sizes, INDEX)
    BLOCK_K: tl.constexpr = META.block_k
    BLOCK_V: tl.constexpr = META.block_v
    CHUNK: tl.constexpr = META.chunk
    NORMALIZE: tl.constexpr = META.normalize
    PRECISION: tl.constexpr = META.precision
    here = locate(tl.program_id(1), sizes)
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    query = head_rows(inputs.query, strides.query, here.batch, here.key_head)
    key = head_rows(inputs.key, strides.key, here.batch, here.key_head)
    grad = head_rows(grad, strides.out, here.batch, here.head)
    by_rests += tl.program_id(1).to(tl.int64) * tokens * sizes.value
    factor = tl.full((), scale, tl.float64).to(tl.float32)
    first = tl.program_id(1).to(tl.int64) * chunks
    if by_final is None:
        by_state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    else:
        by_state = load_state(by_final, tl.program_id(1), row, column, sizes).to(tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step
        token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(META.index)
        total, last, rate = load_gates(inputs.g, inputs.beta, strides, here, token, tokens)
        store_state(by_states, first + chunk, row, column, sizes, by_state)
        q = load_vectors(query, strides.query.token, token, tokens, row, sizes.key, NORMALIZE)
        k = load_vectors(key, strides.key.token, token, tokens, row, sizes.key, NORMALIZE)
        by_out = load_rows(grad, strides.out.token, token, tokens, column, sizes.value)
        by_correction = product(k, by_state.to(k.dtype), PRECISION) * tl.exp(last - total)[:, None]
        score = tl.load(square_block(scores, first + chunk, CHUNK))
        by_correction += product(tl.trans(score), by_out, PRECISION)
        inverse = tl.load(square_block(inverses, first + chunk, CHUNK))
        by_rest = product(tl.trans(inverse), by_correction.to(k.dtype), PRECISION)
        store_rows(by_rests, sizes.value, token, tokens, column, sizes.value, by_rest)
        faded = ((factor * tl.exp(total))[:, None] * by_out.to(tl.float32)).to(k.dtype)
        by_state = by_state * tl.exp(last) + product(tl.trans(q), faded, PRECISION)
        faded = ((rate * tl.exp(total))[:, None] * by_rest).to(k.dtype)
        by_state -= product(tl.trans(k), faded, PRECISION)
    if by_initial is not None:
        store_state(by_initial, tl.program_id(1), row, column, sizes, by_state)


@triton.jit
def _normalized_gradient(x, by_x, rows, stride, token, tokens, column, columns):
    """Return the gradient by rows x / |x|, of float32 x / |x| and the gradient by it; the rows are loaded anew."""
    own = load_rows(rows, stride, token, tokens, column, columns).to(tl.float32)
    return inverse_length(own, 1)[:, None] * (by_x - x * tl.sum(x * by_x, 1)[:, None])


@triton.jit
def _gradients_of_head(
    inputs,
    grad,
    passed,
    by_value,
    q,
    k,
    by_q,
    by_k,
    strides,
    sizes,
    here,
    token,
    tokens,
    chunks,
    factor,
    META: tl.constexpr,
):
    """Add a head's gradients by the chunk's queries and keys, and write the gradient by its values.

    Returns by_q, by_k, the gradients by the decays' logarithms, and those by the rates.
    """
    BLOCK_K: tl.constexpr = META.block_k
    CHUNK: tl.constexpr = META.chunk
    PRECISION: tl.constexpr = META.precision
    flat = here.batch * sizes.heads + here.head
    number = flat * chunks + tl.program_id(0)
    row = tl.arange(0, BLOCK_K)
    value = head_rows(inputs.value, strides.value, here.batch, here.head)
    grad = head_rows(grad, strides.out, here.batch, here.head)
    by_value += (here.batch * tokens * sizes.heads + here.head) * sizes.value
    corrections = passed.corrections + flat * tokens * sizes.value
    by_rests = passed.by_rests + flat * tokens * sizes.value
    total, last, rate = load_gates(inputs.g, inputs.beta, strides, here, token, tokens)
    grown, faded = tl.exp(total), tl.exp(last - total)
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    by_scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    by_system = tl.zeros((CHUNK, CHUNK), tl.float32)
    by_total = tl.zeros((CHUNK,), tl.float32)
    by_rate = tl.zeros((CHUNK,), tl.float32)
    by_last = tl.zeros((CHUNK,), tl.float32)
    kept = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, sizes.value, META.block_v):
        column = start + tl.arange(0, META.block_v)
        by_out = load_rows(grad, strides.out.token, token, tokens, column, sizes.value)
        v = load_rows(value, strides.value.token, token, tokens, column, sizes.value)
        correction = load_rows(corrections, sizes.value, token, tokens, column, sizes.value)
        by_rest = load_rows(by_rests, sizes.value, token, tokens, column, sizes.value)
        state = load_state(passed.states, number, row, column, sizes)
        by_state = load_state(passed.by_states, number, row, column, sizes)
        by_scores += product(by_out, tl.trans(correction), PRECISION)
        by_system -= product(by_rest, tl.trans(correction), PRECISION)
        wide = by_rest.to(tl.float32)
        store_rows(by_value, sizes.heads * sizes.value, token, tokens, column, sizes.value, rate[:, None] * wide)
        by_rate += tl.sum(wide * v.to(tl.float32), 1)
        kept += tl.sum(state.to(tl.float32) * by_state.to(tl.float32), 1)
        # Gradients through scale exp(G) q h.
        own = product(by_out, tl.trans(state), PRECISION) * (factor * grown)[:, None]
        by_q += own
        by_total += tl.sum(wide_q * own, 1)
        # Gradients through -beta exp(G) k h.
        own = product(by_rest, tl.trans(state), PRECISION) * -grown[:, None]
        by_k += rate[:, None] * own
        along = tl.sum(wide_k * own, 1)
        by_rate += along
        by_total += rate * along
        # Gradients through exp(G[C] - G) k d.
        own = product(correction, tl.trans(by_state), PRECISION) * faded[:, None]
        by_k += own
        by_last += tl.sum(wide_k * own, 1)
    local = tl.arange(0, CHUNK)
    decay = decays_between(total)
    # Gradients through the scores, scale q k^T D.
    by_scores *= decay * factor
    weighted = by_scores * product(q, tl.trans(k), PRECISION)
    by_q += product(by_scores.to(k.dtype), k, PRECISION)
    by_k += product(tl.trans(by_scores.to(k.dtype)), q, PRECISION)
    # Gradients through the system, beta k k^T D below the diagonal.
    by_system = tl.where(local[:, None] > local[None, :], by_system * decay, 0.0)
    products = product(k, tl.trans(k), PRECISION)
    by_rate += tl.sum(by_system * products, 1)
    by_system *= rate[:, None]
    weighted += by_system * products
    by_system = by_system.to(k.dtype)
    by_k += product(by_system, k, PRECISION) + product(tl.trans(by_system), k, PRECISION)
    by_total += tl.sum(weighted, 1) - tl.sum(weighted, 0) - by_last
    by_sum = tl.sum(by_last, 0) + tl.exp(last) * tl.sum(kept, 0)
    # G[t] is the sum of the logarithms up to token t.
    by_g = tl.sum(tl.where(local[:, None] >= local[None, :], by_total[:, None], 0.0), 0) + by_sum
    return by_q, by_k, by_g, by_rate


@libentry()
@triton.jit(do_not_specialize=["tokens", "chunks"])
def chunk_gradients(
    inputs, grad, passed, gradients, strides, sizes, tokens, chunks, scale: tl.float64, META: tl.constexpr
):
    """Compute the gradients of a chunk of a key's head, adding those by query and key over the heads that share it."""
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    strides, sizes = numbers(strides, sizes, INDEX)
    BLOCK_K: tl.constexpr = META.block_k
    CHUNK: tl.constexpr = META.chunk
    NORMALIZE: tl.constexpr = META.normalize
    key_heads = sizes.heads // sizes.ratio
    batch, key_head = (tl.program_id(1) // key_heads).to(tl.int64), (tl.program_id(1) % key_heads).to(tl.int64)
    token = (tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)).to(META.index)
    row = tl.arange(0, BLOCK_K)
    query = head_rows(inputs.query, strides.query, batch, key_head)
    key = head_rows(inputs.key, strides.key, batch, key_head)
    q = load_vectors(query, strides.query.token, token, tokens, row, sizes.key, NORMALIZE)
    k = load_vectors(key, strides.key.token, token, tokens, row, sizes.key, NORMALIZE)
    factor = tl.full((), scale, tl.float64).to(tl.float32)
    by_q = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    by_k = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    for i in range(sizes.ratio):
        here = Here(batch, key_head * sizes.ratio + i, key_head)
        by_q, by_k, by_g, by_rate = _gradients_of_head(
            *(inputs, grad, passed, gradients.value, q, k, by_q, by_k),
            *(strides, sizes, here, token, tokens, chunks, factor, META),
        )
        gates = (batch * tokens + token) * sizes.heads + here.head
        tl.store(gradients.g + gates, by_g.to(gradients.g.dtype.element_ty), mask=token < tokens)
        tl.store(gradients.beta + gates, by_rate.to(gradients.beta.dtype.element_ty), mask=token < tokens)
    if META.normalize:
        by_q = _normalized_gradient(q.to(tl.float32), by_q, query, strides.query.token, token, tokens, row, sizes.key)
        by_k = _normalized_gradient(k.to(tl.float32), by_k, key, strides.key.token, token, tokens, row, sizes.key)
    first = (batch * tokens * key_heads + key_head) * sizes.key
    store_rows(gradients.query + first, key_heads * sizes.key, token, tokens, row, sizes.key, by_q)
    store_rows(gradients.key + first, key_heads * sizes.key, token, tokens, row, sizes.key, by_k)


def backward(problem: Problem, grad: torch.Tensor, by_final: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """Return the gradients by query, key, value, g, beta and the initial state; None for a state that is None.

    `grad` is the gradient by the outputs, contiguous along the last dimension. `by_final` is that by the last state,
    contiguous, or None.
    """
    inputs, sizes, table = problem.inputs, problem.sizes, delta_table()
    device, dtype = inputs.query.device, inputs.query.dtype
    gradients = Gradients(*[empty(each.shape, each.dtype, device) for each in inputs[:5]])
    by_initial = None if inputs.initial is None else empty(inputs.initial.shape, inputs.initial.dtype, device)
    state_shape = (problem.heads, problem.chunks, sizes.key, sizes.value)
    token_shape = (problem.heads, problem.tokens, sizes.value)
    passed = Passed(*[empty(shape, dtype, device) for shape in (state_shape, state_shape, token_shape, token_shape)])
    prepared = prepare(problem)
    run_pass(problem, prepared, None, None, passed.states, passed.corrections)
    strides = problem.strides(grad)
    blocks = table.passes_fp32 if problem.single else table.passes
    meta = problem.meta(blocks, grad)
    grid = (-(-sizes.value // meta.block_v), problem.heads)
    if all(grid):
        pass_back_over_chunks[grid](
            *(inputs, *prepared, grad, by_final, by_initial, passed.by_states, passed.by_rests),
            *(strides, sizes, problem.tokens, problem.chunks, problem.scale),
            META=meta,
            **blocks.options,
        )
    blocks = table.gradients_fp32 if problem.single else table.gradients
    grid = (problem.chunks, problem.heads // max(1, sizes.ratio))
    if all(grid):
        chunk_gradients[grid](
            *(inputs, grad, passed, gradients, strides, sizes, problem.tokens, problem.chunks, problem.scale),
            META=problem.meta(blocks, grad),
            **blocks.options,
        )
    return [*gradients, by_initial]
