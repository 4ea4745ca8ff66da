"""Scores and inverted systems of every chunk of the gated delta rule, computed in parallel.

With D[t, s] = exp(G[t] - G[s]) for s <= t and G the running sum of g, the corrections d of a chunk solve
(I + A) d = r, where A[t, s] = beta[t] k[t].k[s] D[t, s] for s < t (the UT transform, Yang et al. 2024). The scores are
P[t, s] = scale q[t].k[s] D[t, s] for s <= t.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.engine.delta_rule.problem import Problem, delta_table
from tritonite.engine.delta_rule.tiles import (
    decays_between,
    head_rows,
    load_gates,
    load_vectors,
    locate,
    numbers,
    product,
    square_block,
)
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry


@triton.jit
def _inverted(system, META: tl.constexpr):
    """Return the inverse of I + system for a strictly lower triangular system.

    Blocks on the diagonal double in size: the inverse of [[A, 0], [L, B]] is [[A', 0], [-B' L A', B']], where A' and
    B' are the inverses of A and B. Powers of the system, which may be large, do not occur.
    """
    CHUNK: tl.constexpr = META.chunk
    LEVELS: tl.constexpr = META.levels
    INVERSE: tl.constexpr = META.inverse
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where((row >> 1) == (column >> 1), system, 0.0)
    for level in tl.static_range(1, LEVELS):
        within = ((row >> (level + 1)) == (column >> (level + 1))) & ((row >> level) != (column >> level))
        step = product(tl.where(within, system, 0.0), inverse, INVERSE)
        inverse -= product(inverse, step, INVERSE)
    return inverse


@libentry()
@triton.jit(do_not_specialize=["tokens", "chunks"])
def prepare_chunks(inputs, scores, inverses, strides, sizes, tokens, chunks, scale: tl.float64, META: tl.constexpr):
    """Write the scores and the inverted system of a chunk of a head."""
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    strides, sizes = numbers(strides, sizes, INDEX)
    CHUNK: tl.constexpr = META.chunk
    NORMALIZE: tl.constexpr = META.normalize
    PRECISION: tl.constexpr = META.precision
    here = locate(tl.program_id(1), sizes)
    number = tl.program_id(1).to(tl.int64) * chunks + tl.program_id(0)
    local = tl.arange(0, CHUNK)
    token = (tl.program_id(0) * CHUNK + local).to(META.index)
    column = tl.arange(0, META.block_k)
    total, _, rate = load_gates(inputs.g, inputs.beta, strides, here, token, tokens)
    decay = decays_between(total)
    key = head_rows(inputs.key, strides.key, here.batch, here.key_head)
    k = load_vectors(key, strides.key.token, token, tokens, column, sizes.key, NORMALIZE)
    system = product(k, tl.trans(k), PRECISION) * decay * rate[:, None]
    inverse = _inverted(tl.where(local[:, None] > local[None, :], system, 0.0), META)
    tl.store(square_block(inverses, number, CHUNK), inverse.to(inverses.dtype.element_ty))
    query = head_rows(inputs.query, strides.query, here.batch, here.key_head)
    q = load_vectors(query, strides.query.token, token, tokens, column, sizes.key, NORMALIZE)
    factor = tl.full((), scale, tl.float64).to(tl.float32)
    result = product(q, tl.trans(k), PRECISION) * decay * factor
    tl.store(square_block(scores, number, CHUNK), result.to(scores.dtype.element_ty))


def prepare(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and inverted systems, both (heads, chunks, chunk, chunk) with heads counted over the batch."""
    blocks, chunk, query = delta_table().prepare, problem.chunk, problem.inputs.query
    shape = (problem.heads, problem.chunks, chunk, chunk)
    scores, inverses = [empty(shape, query.dtype, query.device) for _ in range(2)]
    grid = (problem.chunks, problem.heads)
    if all(grid):
        prepare_chunks[grid](
            *(problem.inputs, scores, inverses, problem.strides(problem.inputs.value), problem.sizes),
            *(problem.tokens, problem.chunks, problem.scale),
            META=problem.meta(blocks),
            **blocks.options,
        )
    return scores, inverses
