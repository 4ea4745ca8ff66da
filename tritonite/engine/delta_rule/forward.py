"""The pass over chunks of the gated delta rule: corrections, outputs and states.

With h the state before a chunk, G the running sum of g and C the last token of the chunk, the corrections are
d = (I + A)^-1 (beta v - beta exp(G) k h), the outputs scale exp(G) q h + P d, and the next state is
exp(G[C]) h + sum over s of exp(G[C] - G[s]) k[s] d[s]. `prepare` computes P and (I + A)^-1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.engine.delta_rule.prepare import prepare
from tritonite.engine.delta_rule.problem import Problem, delta_table
from tritonite.engine.delta_rule.tiles import (
    head_rows,
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
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit(do_not_specialize=["tokens", "chunks"])
def pass_over_chunks(
    inputs,
    scores,
    inverses,
    out,
    final,
    states,
    corrections,
    strides,
    sizes,
    tokens,
    chunks,
    scale: tl.float64,
    META: tl.constexpr,
):
    """Pass over the chunks of a head for BLOCK_V value columns.

    Write the results that are not None: the outputs, the state behind the last token (`final`), the state before every
    chunk (`states`), and the corrections, whose rows are contiguous over (heads of the batch, tokens).
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
    value = head_rows(inputs.value, strides.value, here.batch, here.head)
    factor = tl.full((), scale, tl.float64).to(tl.float32)
    first = tl.program_id(1).to(tl.int64) * chunks
    if out is not None:
        out = head_rows(out, strides.out, here.batch, here.head)
    if corrections is not None:
        corrections += tl.program_id(1).to(tl.int64) * tokens * sizes.value
    if inputs.initial is None:
        state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    else:
        state = load_state(inputs.initial, tl.program_id(1), row, column, sizes).to(tl.float32)
    for chunk in range(chunks):
        token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(META.index)
        total, last, rate = load_gates(inputs.g, inputs.beta, strides, here, token, tokens)
        if states is not None:
            store_state(states, first + chunk, row, column, sizes, state)
        k = load_vectors(key, strides.key.token, token, tokens, row, sizes.key, NORMALIZE)
        v = load_rows(value, strides.value.token, token, tokens, column, sizes.value)
        before = state.to(k.dtype)
        rest = v.to(tl.float32) - tl.exp(total)[:, None] * product(k, before, PRECISION)
        inverse = tl.load(square_block(inverses, first + chunk, CHUNK))
        correction = product(inverse, (rate[:, None] * rest).to(k.dtype), PRECISION)
        if corrections is not None:
            store_rows(corrections, sizes.value, token, tokens, column, sizes.value, correction)
        if out is not None:
            q = load_vectors(query, strides.query.token, token, tokens, row, sizes.key, NORMALIZE)
            result = product(q, before, PRECISION) * (factor * tl.exp(total))[:, None]
            score = tl.load(square_block(scores, first + chunk, CHUNK))
            result += product(score, correction.to(k.dtype), PRECISION)
            store_rows(out, strides.out.token, token, tokens, column, sizes.value, result)
        faded = (tl.exp(last - total)[:, None] * correction).to(k.dtype)
        state = state * tl.exp(last) + product(tl.trans(k), faded, PRECISION)
    if final is not None:
        store_state(final, tl.program_id(1), row, column, sizes, state)


def run_pass(
    problem: Problem,
    prepared: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor | None,
    final: torch.Tensor | None,
    states: torch.Tensor | None = None,
    corrections: torch.Tensor | None = None,
) -> None:
    """Launch `pass_over_chunks` for the results that are not None."""
    blocks = delta_table().passes_fp32 if problem.single else delta_table().passes
    meta = problem.meta(blocks, *([] if out is None else [out]))
    grid = (-(-problem.sizes.value // meta.block_v), problem.heads)
    if all(grid):
        pass_over_chunks[grid](
            *(problem.inputs, *prepared, out, final, states, corrections),
            *(problem.strides(problem.inputs.value if out is None else out), problem.sizes),
            *(problem.tokens, problem.chunks, problem.scale),
            META=meta,
            **blocks.options,
        )


def chunked(problem: Problem, out: torch.Tensor, final: torch.Tensor | None) -> None:
    """Write the outputs to `out`, (batch, tokens, heads, value size), and the last states to `final` unless it is None.

    `final` has the shape of the initial states.
    """
    run_pass(problem, prepare(problem), out, final)
