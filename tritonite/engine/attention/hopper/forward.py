"""The warp-specialised forward kernel of attention.

One warp, the producer, copies blocks by TMA. Consumer groups of four warps take 64 queries each. Tensor cores multiply
for one group while another computes exponentials, and within a group for its next block (Shah et al. 2024).
"""
# Over 500 lines: one kernel, whose producer and consumers must be read together, because they share barriers.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonite import devices
from tritonite.engine.attention import table
from tritonite.engine.attention.arguments import tile_sizes
from tritonite.engine.attention.hopper.descriptors import (
    LOG2E,
    ROWS,
    Barriers,
    Buffers,
    bias_descriptor,
    block_sizes,
    by_thread,
    copy_bias,
    descriptor,
    new_bias_blocks,
    scale_and_add_bias,
    serves_operands,
    thread_sums,
    wait_for_block,
)
from tritonite.engine.attention.problem import AttentionMeta, Problem
from tritonite.engine.attention.prologue import Tensors, TileSizes, longest_first
from tritonite.engine.attention.scores import exponentials, finite_max, row_logsumexp
from tritonite.engine.gemm.kernels.hopper import load, store
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared_memory import init_barriers, new_barriers, new_blocks
from tritonite.runtime.contract import settings
from tritonite.runtime.libentry import libentry

# Bytes of shared memory that are left for barriers and for Triton's own use.
_BARRIER_BYTES = 1024
_COPYING = gl.constexpr(table.COPYING)
_PAIRED_ROUNDS = gl.constexpr(table.PAIRED_ROUNDS)


@dataclass(frozen=True)
class ForwardMeta(AttentionMeta):
    """Compile-time facts of the warp-specialised forward kernel.

    consumers: consumer warp groups, one to three.
    ping_pong: consumer groups take turns to start their products.
    overlapped: a group's products with values overlap the next block's exponentials.
    own_staging: results leave through shared memory of their own, which programs with several tiles need; otherwise
        through that of the queries.
    registers: per consumer thread.
    slots: tiles whose queries fit in shared memory, 1 or 2.
    stages: blocks of keys, and of values, in shared memory.
    """

    consumers: int
    ping_pong: bool
    overlapped: bool
    own_staging: bool
    registers: int
    slots: int
    stages: int


class Results(NamedTuple):
    """Descriptor of out, pointer to logsumexp or None, its strides, and the buffer that out leaves through."""

    out: Any
    logsumexp: Any
    strides: Any
    staging: Any


class Sizes(NamedTuple):
    """Run-time sizes: `blocks` per head, `padded` rows of logsumexp, the end of a program's `tiles`, `programs`."""

    heads: int
    batch_heads: int
    group: int
    blocks: int
    queries: int
    keys: int
    diagonal: int
    padded: int
    tiles: int
    programs: int


@gluon.jit
def _tile_end(tiles, programs, META: gl.constexpr):
    """Return the end of a program's tile numbers, which have stride `programs`."""
    end = tiles
    if META.causal and META.slots > 1:
        program, pairs = gl.program_id(0), (tiles + 1) // 2
        turns = gl.cdiv(pairs - program, programs) * 2
        if (pairs - 1) % programs == program:
            # The last pair of an odd number of tiles has one tile.
            turns -= tiles % 2
        if tiles >= _PAIRED_ROUNDS * programs:
            end = turns * programs
    return end


@gluon.jit
def _balanced_tile(tile, blocks, batch_heads, group, programs):
    """Return (block, flattened batch and head) of a causal tile, so that all programs have equal work.

    With many tiles, a program takes a long tile of one head and then a short one of the next, and programs that run at
    once share the keys of few heads. With few tiles, programs go from the longest to the shortest, in alternating
    directions, and forwards in the last round.
    """
    tiles, turn = blocks * batch_heads, tile // programs
    if tiles >= _PAIRED_ROUNDS * programs:
        pair = turn // 2 * programs + tile % programs
        flat_head = gl.minimum(pair // blocks * 2 + turn % 2, batch_heads - 1)
        block = pair % blocks
        if turn % 2 == 0:
            block = blocks - 1 - block
    else:
        if ((tiles - 1) // programs - turn) % 2 == 1:
            tile = (2 * turn + 1) * programs - 1 - tile
        block, flat_head = longest_first(tile, blocks, batch_heads, group)
    return block, flat_head


@gluon.jit
def _locate_tile(tile, sizes, META: gl.constexpr):
    """Return (first query, batch, head, blocks of keys) of a tile.

    Blocks of keys are taken from the last to the first, and there is at least one.
    """
    BLOCK_M: gl.constexpr = META.block_m
    if META.causal and META.slots > 1:
        block, batch_head = _balanced_tile(tile, sizes.blocks, sizes.batch_heads, sizes.group, sizes.programs)
    else:
        block, batch_head = longest_first(tile, sizes.blocks, sizes.batch_heads, sizes.group)
    end = sizes.keys
    if META.causal:
        end = gl.minimum(sizes.keys, gl.maximum(block * BLOCK_M + sizes.diagonal + BLOCK_M, 1))
    return block * BLOCK_M, batch_head // sizes.heads, batch_head % sizes.heads, gl.cdiv(end, META.block_n)


@gluon.jit
def _masked_blocks(first, count, sizes, META: gl.constexpr):
    """Return how many of a tile's last blocks of keys need a mask."""
    whole = sizes.keys // META.block_n
    if META.causal:
        whole = gl.minimum(whole, gl.maximum(first + sizes.diagonal + 1, 0) // META.block_n)
    return count - gl.minimum(whole, count)


@gluon.jit
def _query_slot(tile, programs, META: gl.constexpr):
    """Return (index of a tile's first query buffer, phase of that buffer's barriers)."""
    number = tile // programs
    return number % META.slots * META.consumers, number // META.slots % 2


@gluon.jit
def _opaque(number):
    """Return the same number in a way that ptxas cannot see.

    Where two loops multiply by an operand with a computed address, ptxas of CUDA 12.8 keeps its descriptor in the block
    before the first loop only, and the second loop reads garbage if the first is skipped.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _produce(operands, buffers, barriers, sizes, META: gl.constexpr):
    """Run the producer warp: load each tile's queries, keys, values and bias into buffers that are free."""
    STAGES: gl.constexpr = buffers.k.shape[0]
    CONSUMERS: gl.constexpr = META.consumers
    BLOCK_N: gl.constexpr = buffers.k.shape[3]
    Q_BYTES: gl.constexpr = ROWS * buffers.q.shape[4] * 2
    K_BYTES: gl.constexpr = BLOCK_N * buffers.k.shape[4] * 2
    V_BYTES: gl.constexpr = BLOCK_N * buffers.v.shape[4] * 2
    biases = buffers.bias
    BIAS_BYTES: gl.constexpr = 0 if biases is None else biases.shape[0] // STAGES * biases.shape[3] * BLOCK_N * 2
    step = 0
    for tile in range(gl.program_id(0), sizes.tiles, sizes.programs):
        first, batch, head, count = _locate_tile(tile, sizes, META)
        kv_head = head // META.ratio
        for block in range(count):
            stage, phase = step % STAGES, 1 - step // STAGES % 2
            row = (count - 1 - block) * BLOCK_N
            mbarrier.wait(barriers.k_free.index(stage), phase)
            k_ready = barriers.k_ready.index(stage)
            mbarrier.expect(k_ready, K_BYTES + BIAS_BYTES)
            load(operands.key, [batch, kv_head, row, 0], k_ready, buffers.k.index(stage))
            if operands.bias is not None:
                copy_bias(operands.bias, biases, (batch, head, first, row), k_ready, stage, STAGES, False)
            if block == 0:
                slot, turn = _query_slot(tile, sizes.programs, META)
                for i in gl.static_range(CONSUMERS):
                    mbarrier.wait(barriers.q_free.index(slot + i), 1 - turn)
                    q_ready = barriers.q_ready.index(slot + i)
                    mbarrier.expect(q_ready, Q_BYTES)
                    load(operands.query, [batch, head, first + i * ROWS, 0], q_ready, buffers.q.index(slot + i))
            if META.overlapped:
                mbarrier.wait(barriers.v_free.index(stage), phase)
            v_ready = barriers.v_ready.index(stage)
            mbarrier.expect(v_ready, V_BYTES)
            load(operands.value, [batch, kv_head, row, 0], v_ready, buffers.v.index(stage))
            step += 1


@gluon.jit
def _start_scores(q, ks, step, layout: gl.constexpr):
    """Start the products of queries and the next block of keys."""
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK_N: gl.constexpr = ks.shape[3]
    k = ks.index(step % STAGES).reshape((BLOCK_N, ks.shape[4])).permute((1, 0))
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _packed(p, DTYPE: gl.constexpr):
    """Round probabilities to a 16-bit DTYPE and pack pairs of columns into int32.

    ptxas keeps loop-carried 16-bit values in a register each; packed they take half as many.
    """
    ROUND: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if gl.float16 == DTYPE else "cvt.rn.bf16x2.f32 $0, $2, $1;"
    even, odd = p.reshape((p.shape[0], p.shape[1] // 2, 2)).split()
    return gl.inline_asm_elementwise(ROUND, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpacked(pairs, DTYPE: gl.constexpr, acc):
    """Return packed probabilities as the first operand, in registers, of a product that is added to `acc`."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    p = gl.join(even, odd).reshape((pairs.shape[0], 2 * pairs.shape[1])).to(DTYPE, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def _start_values(pairs, acc, vs, v_ready, step):
    """Start acc += probabilities @ values; return (accumulator, operand that must stay in registers until then)."""
    weights = _unpacked(pairs, vs.dtype, acc)
    STAGES: gl.constexpr = vs.shape[0]
    stage = step % STAGES
    mbarrier.wait(v_ready.index(stage), step // STAGES % 2)
    v = vs.index(stage).reshape((vs.shape[3], vs.shape[4]))
    return warpgroup_mma(weights, v, acc, is_async=True), weights


@gluon.jit
def _nan_max(x, y):
    return gl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _row_max(x):
    """Return the maximum of each row, or NaN for a row with one."""
    thread_max = gl.reduce(gl.reduce(by_thread(x), 4, _nan_max), 2, _nan_max)
    m_i = gl.reduce(gl.reduce(thread_max, 1, _nan_max), 1, _nan_max)
    return gl.convert_layout(m_i, gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def _softmax_block(scores, m_i, factor, ends, first, MASKED: gl.constexpr, NATS: gl.constexpr):
    """Return (exponentials, row max, rescaling factor of earlier sums) of a block of keys from `first`.

    Row i sees the keys before ends[i]. Scores are in NATS, or products that `factor` scales to base 2.
    """
    if MASKED:
        columns = first + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(columns[None, :] < ends[:, None], scores, float("-inf"))
    if NATS:
        new_max = _nan_max(m_i, _row_max(scores))
    else:
        new_max = _nan_max(m_i, _row_max(scores) * factor)
        scores = scores * factor
    base = finite_max(new_max)
    return exponentials(scores, base[:, None], False, NATS), new_max, exponentials(m_i, base, False, NATS)


@gluon.jit
def _scale_rows(acc, factors):
    """Multiply each row by its factor."""
    return acc * gl.convert_layout(factors, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _wait_for_turn(turns, step, WHICH: gl.constexpr, PING_PONG: gl.constexpr):
    """Wait for a ping-pong turn, which all blocks have but a program's first."""
    if PING_PONG:
        mbarrier.wait(turns.index(WHICH), (step + (0 if WHICH == 0 else 1)) % 2)


@gluon.jit
def _attend_block(
    state, q, buffers, barriers, factor, ends, step, left, MASKED: gl.constexpr, WHICH: gl.constexpr, META: gl.constexpr
):
    """Return (accumulator, packed probabilities, row max, row sums by thread) after a block of keys.

    Starts the block's scores, then the previous block's products with values, under which the exponentials run. `step`
    counts blocks over all tiles; `left` blocks follow in this tile.
    """
    acc, pairs, m_i, l_i = state
    ks, vs = buffers.k, buffers.v
    STAGES: gl.constexpr = ks.shape[0]
    layout: gl.constexpr = m_i.type.layout.parent
    _wait_for_turn(barriers.turns, step, WHICH, META.ping_pong)
    scores = _start_scores(q, ks, step, layout)
    if META.overlapped:
        acc, weights = _start_values(pairs, acc, vs, barriers.v_ready, step - 1)
    if META.ping_pong:
        mbarrier.arrive(barriers.turns.index((WHICH + 1) % META.consumers))
    if META.overlapped:
        scores = warpgroup_mma_wait(1, deps=(scores,))
    else:
        scores = warpgroup_mma_wait(0, deps=(scores,))
    scores = scale_and_add_bias(scores, buffers.bias, step, WHICH, factor, STAGES, False)
    if META.overlapped:
        mbarrier.arrive(barriers.k_free.index(step % STAGES))
    NATS: gl.constexpr = buffers.bias is not None
    p, m_i, rescale = _softmax_block(scores, m_i, factor, ends, left * ks.shape[3], MASKED, NATS)
    if not META.overlapped:
        acc = _scale_rows(acc, rescale)
    rows: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    l_i = l_i * gl.convert_layout(rescale, rows, assert_trivial=True)[:, None] + thread_sums(p)
    # The wait is here because ptxas does not move what follows it before the exponentials.
    wait_for_block(ks, barriers.k_ready, step + 1, left > 0)
    if META.overlapped:
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
        mbarrier.arrive(barriers.v_free.index((step - 1) % STAGES))
        acc = _scale_rows(acc, rescale)
    pairs = _packed(p, vs.dtype)
    if not META.overlapped:
        acc, weights = _start_values(pairs, acc, vs, barriers.v_ready, step)
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
        # One arrival frees keys and values, since each arrival synchronises the group's warps.
        mbarrier.arrive(barriers.k_free.index(step % STAGES))
    return acc, pairs, m_i, l_i


@gluon.jit
def _first_scores(
    tile, scale, step, buffers, barriers, programs, layout: gl.constexpr, WHICH: gl.constexpr, META: gl.constexpr
):
    """Start the products of a tile's queries and its first block of keys."""
    slot, turn = _query_slot(tile, programs, META)
    q = buffers.q.index(slot + WHICH).reshape((ROWS, buffers.q.shape[4]))
    mbarrier.wait(barriers.q_ready.index(slot + WHICH), turn)
    # The row max is taken before scaling, which a positive factor permits.
    if scale < 0:
        q.store(-q.load(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
        fence_async_shared()
    wait_for_block(buffers.k, barriers.k_ready, step, True)
    return _start_scores(q, buffers.k, step, layout)


@gluon.jit
def _first_softmax(scores, factor, ends, first, count, sizes, META: gl.constexpr):
    """Return (exponentials, row max, row sums by thread) of a tile's first block."""
    minus_inf = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, scores.type.layout))
    last = (count - 1) * scores.shape[1]
    if _masked_blocks(first, count, sizes, META) > 0:
        p, m_i, _rescale = _softmax_block(scores, minus_inf, factor, ends, last, True, META.nats)
    else:
        p, m_i, _rescale = _softmax_block(scores, minus_inf, factor, ends, last, False, META.nats)
    return p, m_i, thread_sums(p)


@gluon.jit
def _finish(state, where, sizes, results, META: gl.constexpr, WHICH: gl.constexpr):
    """Store a tile's out and logsumexp; `where` is (first query, batch, head)."""
    acc, m_i, l_i = state
    row, batch, head = where
    l_i = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
    no_keys = l_i == 0
    l_i = gl.where(no_keys, 1.0, l_i)
    if results.logsumexp is not None:
        rows = row + gl.arange(0, ROWS, m_i.type.layout)
        found = gl.where(no_keys, float(META.empty), row_logsumexp(m_i, l_i, META))
        found = gl.where(rows < sizes.queries, found, float("inf"))
        offset = batch.to(gl.int64) * results.strides.batch + head.to(gl.int64) * results.strides.head
        pointers = results.logsumexp + offset + rows.to(META.index) * results.strides.row
        gl.store(pointers, found, mask=rows < gl.maximum(sizes.queries, sizes.padded))
    scaled = _scale_rows(acc, 1.0 / l_i)
    here = results.staging.index(WHICH)
    if META.own_staging:
        # Until the previous tile's result has left.
        tma.store_wait(pendings=0)
    here.reshape((ROWS, scaled.shape[1])).store(scaled.to(results.out.dtype))
    fence_async_shared()
    store(results.out, [batch, head, row, 0], here)


@gluon.jit
def _consume(work, META: gl.constexpr, WHICH: gl.constexpr):
    """Run consumer group WHICH: attend its 64 queries of every tile.

    `work` is (`Results`, `Buffers`, `Barriers`, `Sizes`, scale of scores). The next tile's first scores and
    exponentials overlap a tile's last products and the store of its result.
    """
    results, buffers, barriers, sizes, scale = work
    ks, vs = buffers.k, buffers.v
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK_V: gl.constexpr = META.block_v
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, META.block_n, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    # At least the smallest normal number, because 0 times a masked score of -inf is NaN.
    if buffers.bias is None:
        factor = _nan_max((gl.abs(scale) * LOG2E).to(gl.float32), 2.0**-126)
    else:
        factor = gl.abs(scale).to(gl.float32)
    step = 0
    first, batch, head, count = _locate_tile(gl.program_id(0), sizes, META)
    ends = gl.full((ROWS,), 0, gl.int32, row_layout) + sizes.keys
    if META.causal:
        ends = gl.minimum(ends, first + WHICH * ROWS + gl.arange(0, ROWS, row_layout) + (sizes.diagonal + 1))
    scores = _first_scores(gl.program_id(0), scale, step, buffers, barriers, sizes.programs, score_layout, WHICH, META)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    scores = scale_and_add_bias(scores, buffers.bias, step, WHICH, factor, STAGES, False)
    if META.overlapped:
        mbarrier.arrive(barriers.k_free.index(step % STAGES))
    p, m_i, l_i = _first_softmax(scores, factor, ends, first, count, sizes, META)
    wait_for_block(ks, barriers.k_ready, step + 1, count > 1)
    pairs = _packed(p, vs.dtype)
    for tile in range(gl.program_id(0), sizes.tiles, sizes.programs):
        acc = gl.zeros((ROWS, BLOCK_V), gl.float32, acc_layout)
        # Inside the loop: Triton 3.6 drops loop-carried values that only bound other loops, and keeps the first one.
        masked = _masked_blocks(first, count, sizes, META)
        slot, _turn = _query_slot(tile, sizes.programs, META)
        q = buffers.q.index(slot + WHICH).reshape((ROWS, META.block_d))
        if not META.overlapped:
            acc, weights = _start_values(pairs, acc, vs, barriers.v_ready, step)
            acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            mbarrier.arrive(barriers.k_free.index(step % STAGES))
        for i in range(1, masked):
            state = (acc, pairs, m_i, l_i)
            acc, pairs, m_i, l_i = _attend_block(
                state, q, buffers, barriers, factor, ends, step + i, count - 1 - i, True, WHICH, META
            )
        if META.slots > 1:
            q = buffers.q.index(_opaque(slot) + WHICH).reshape((ROWS, META.block_d))
        for i in range(gl.maximum(masked, 1), count):
            state = (acc, pairs, m_i, l_i)
            acc, pairs, m_i, l_i = _attend_block(
                state, q, buffers, barriers, factor, ends, step + i, count - 1 - i, False, WHICH, META
            )
        if not META.overlapped:
            # The last block's pairs are used; zeros keep them from occupying registers meanwhile.
            pairs = gl.zeros_like(pairs)
        step += count
        where = first + WHICH * ROWS, batch, head
        if META.own_staging and tile + sizes.programs < sizes.tiles:
            # No product reads this tile's queries any more.
            mbarrier.arrive(barriers.q_free.index(slot + WHICH))
            first, batch, head, count = _locate_tile(tile + sizes.programs, sizes, META)
            if META.causal:
                rows = first + WHICH * ROWS + gl.arange(0, ROWS, row_layout)
                ends = gl.minimum(sizes.keys, rows + (sizes.diagonal + 1))
            _wait_for_turn(barriers.turns, step, WHICH, META.ping_pong)
            scores = _first_scores(
                tile + sizes.programs, scale, step, buffers, barriers, sizes.programs, score_layout, WHICH, META
            )
            if META.overlapped:
                acc, weights = _start_values(pairs, acc, vs, barriers.v_ready, step - 1)
            if META.ping_pong:
                mbarrier.arrive(barriers.turns.index((WHICH + 1) % META.consumers))
            if META.overlapped:
                scores = warpgroup_mma_wait(1, deps=(scores,))
            else:
                _finish((acc, m_i, l_i), where, sizes, results, META, WHICH)
                scores = warpgroup_mma_wait(0, deps=(scores,))
            scores = scale_and_add_bias(scores, buffers.bias, step, WHICH, factor, STAGES, False)
            if META.overlapped:
                mbarrier.arrive(barriers.k_free.index(step % STAGES))
            p, next_max, next_sum = _first_softmax(scores, factor, ends, first, count, sizes, META)
            wait_for_block(ks, barriers.k_ready, step + 1, count > 1)
            if META.overlapped:
                acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
                mbarrier.arrive(barriers.v_free.index((step - 1) % STAGES))
                _finish((acc, m_i, l_i), where, sizes, results, META, WHICH)
            pairs, m_i, l_i = _packed(p, vs.dtype), next_max, next_sum
        else:
            if META.overlapped:
                acc, weights = _start_values(pairs, acc, vs, barriers.v_ready, step - 1)
                acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            _finish((acc, m_i, l_i), where, sizes, results, META, WHICH)
    tma.store_wait(pendings=0)


@libentry()
@gluon.jit(do_not_specialize=[*TileSizes._fields, "padded", "programs"])
def attend_warp_specialized(
    query,
    key,
    value,
    bias,
    out,
    logsumexp,
    logsumexp_strides,
    heads,
    batch_heads,
    group,
    blocks,
    queries,
    keys,
    diagonal,
    padded,
    programs,
    scale: tl.float64,
    META: gl.constexpr,
):
    """Attend as `forward.attend` does, without packed sequences or dropout; tensors but logsumexp are descriptors."""
    CONSUMERS: gl.constexpr = META.consumers
    SLOTS: gl.constexpr = META.slots
    STAGES: gl.constexpr = META.stages
    buffers = Buffers(
        q=new_blocks(query, SLOTS * CONSUMERS),
        k=new_blocks(key, STAGES),
        v=new_blocks(value, STAGES),
        bias=new_bias_blocks(bias, STAGES, CONSUMERS),
    )
    staging = buffers.q
    if META.own_staging:
        staging = new_blocks(out, CONSUMERS)
    barriers = Barriers(
        q_ready=new_barriers(SLOTS * CONSUMERS),
        q_free=new_barriers(SLOTS * CONSUMERS),
        turns=new_barriers(CONSUMERS),
        k_ready=new_barriers(STAGES),
        k_free=new_barriers(STAGES),
        v_ready=new_barriers(STAGES),
        v_free=new_barriers(STAGES),
    )
    init_barriers((barriers.q_ready, barriers.q_free, barriers.turns), (1, 1, 1))
    rings = (barriers.k_ready, barriers.k_free, barriers.v_ready, barriers.v_free)
    init_barriers(rings, (1, CONSUMERS, 1, CONSUMERS))
    operands, results = Tensors(query, key, value, bias), Results(out, logsumexp, logsumexp_strides, staging)
    tiles = _tile_end(blocks * batch_heads, programs, META)
    sizes = Sizes(heads, batch_heads, group, blocks, queries, keys, diagonal, padded, tiles, programs)
    wait_for_previous_launch()
    # The first group, the default partition, gets the registers that the others leave.
    REGISTERS: gl.constexpr = META.registers
    work = (results, buffers, barriers, sizes, scale)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consume, (work, META, 0)),
                (_consume, (work, META, 1)),
                (_consume, (work, META, 2)),
                (_produce, (operands, buffers, barriers, sizes, META)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, _COPYING],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (work, META, 0)),
                (_consume, (work, META, 1)),
                (_produce, (operands, buffers, barriers, sizes, META)),
            ],
            [4, 1],
            [REGISTERS, _COPYING],
        )
    else:
        gl.warp_specialize(
            [(_consume, (work, META, 0)), (_produce, (operands, buffers, barriers, sizes, META))], [1], [_COPYING]
        )


def serves(problem: Problem, out: torch.Tensor) -> bool:
    """Return whether the warp-specialised forward kernel serves a problem on its device."""
    return serves_operands(problem, (problem.query, problem.key, problem.value, out))


def attention(problem: Problem, out: torch.Tensor, logsumexp: torch.Tensor | None, empty: str = "inf") -> None:
    """Do what `forward.attention` does, for a problem that this kernel serves."""
    block_d, block_v = block_sizes(problem)
    heads, queries, keys = problem.query.shape[1], problem.queries, problem.keys
    multiprocessors = devices.multiprocessors(out.device)
    # In invariant mode the number of other rows must not decide the order of sums.
    idle = 0 if settings().invariant else multiprocessors
    tile = table.warp_specialized(block_d, block_v, queries, keys, problem.batch * heads, idle, problem.causal)
    blocks = -(-queries // tile.BLOCK_M)
    tiles = blocks * problem.batch * heads
    size, columns = out.dtype.itemsize, block_d + block_v
    bias_rows = 0 if problem.bias is None else tile.BLOCK_M if problem.bias.stride(2) else 1
    stage_bytes = size * tile.BLOCK_N * (columns + bias_rows)
    # Persistent programs have two slots of queries and a staging buffer.
    other_bytes = size * tile.BLOCK_M * (block_d + columns) + _BARRIER_BYTES
    most_stages = (devices.shared_memory(out.device) // tile.resident - other_bytes) // stage_bytes
    persistent = tile.persistent and most_stages >= tile.num_stages
    programs = min(tiles, multiprocessors * tile.resident) if persistent else tiles
    several = programs < tiles
    meta = problem.meta(table.Tile(tile.BLOCK_M, tile.BLOCK_N), out, empty=empty, least=min(table.WARP_SPECIALIZED))
    attend_warp_specialized[(programs,)](
        descriptor(problem.query, ROWS.value, block_d),
        descriptor(problem.key, tile.BLOCK_N, block_d),
        descriptor(problem.value, tile.BLOCK_N, block_v),
        None if problem.bias is None else bias_descriptor(problem.bias, ROWS.value, tile.BLOCK_N),
        descriptor(out, ROWS.value, block_v),
        logsumexp,
        logsumexp_strides=problem.logsumexp_strides(logsumexp),
        **tile_sizes(problem, heads, blocks, problem.group),
        padded=problem.padded_rows(logsumexp),
        programs=programs,
        META=ForwardMeta(
            **vars(meta),
            consumers=tile.groups,
            ping_pong=tile.ping_pong,
            overlapped=tile.overlapped,
            own_staging=several or block_d != block_v,
            registers=tile.registers,
            slots=1 + several,
            stages=max(tile.num_stages, min(most_stages, tile.most_stages)) if several else tile.num_stages,
        ),
        num_warps=4,
        maxnreg=tile.maxnreg if tile.resident > 1 else None,
    )
