"""The warp-specialised forward pass of attention.

One warp copies blocks, and groups of four warps each take 64 queries: while one's exponentials are computed, tensor
cores multiply for another, and within a group for its next block (Shah et al. 2024).
"""

from __future__ import annotations

from dataclasses import replace

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
from tritonite.engine.attention import table as table
from tritonite.engine.attention.hopper.descriptors import (
    LOG2E,
    ROWS,
    bias_descriptor,
    biased,
    block_sizes,
    by_thread,
    copy_bias,
    descriptor,
    take,
    thread_sums,
    wait_for_block,
)
from tritonite.engine.attention.place import by_length
from tritonite.engine.attention.problem import Problem
from tritonite.engine.attention.scores import base_of, exponentials
from tritonite.engine.gemm.kernels.hopper import load, store
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import settings
from tritonite.runtime.libentry import libentry

_LN2 = gl.constexpr(0.6931471805599453)
# The bytes of shared memory that are left for barriers, and for what Triton has beside them.
_BARRIERS = 1024
_COPYING = gl.constexpr(table.COPYING)
_PAIRED_ROUNDS = gl.constexpr(table.PAIRED_ROUNDS)


@gluon.jit
def _end(tiles, programs, FACTS: gl.constexpr, ORDER: gl.constexpr):
    """Where the numbers of a program's tiles end, which are so many `programs` apart."""
    SLOTS: gl.constexpr = ORDER[5]
    end = tiles
    if FACTS.causal and SLOTS > 1:
        program, pairs = gl.program_id(0), (tiles + 1) // 2
        turns = gl.cdiv(pairs - program, programs) * 2
        if (pairs - 1) % programs == program:
            # Of an odd number of tiles the last is alone.
            turns -= tiles % 2
        if tiles >= _PAIRED_ROUNDS * programs:
            end = turns * programs
    return end


@gluon.jit
def _balanced(tile, blocks, batch_heads, group, programs):
    """(block, batch and head as one) of a causal tile, so that all programs have as much to do.

    Where tiles are many a program takes a long one of a head and then a short one of the next head, and programs that
    run at once share the keys of few heads. Few are taken from the longest to the shortest, by the programs forwards in
    the last round, and backwards and forwards by turns in those before.
    """
    tiles, turn = blocks * batch_heads, tile // programs
    if tiles >= _PAIRED_ROUNDS * programs:
        pair = turn // 2 * programs + tile % programs
        own = gl.minimum(pair // blocks * 2 + turn % 2, batch_heads - 1)
        block = pair % blocks
        if turn % 2 == 0:
            block = blocks - 1 - block
    else:
        if ((tiles - 1) // programs - turn) % 2 == 1:
            tile = (2 * turn + 1) * programs - 1 - tile
        block, own = by_length(tile, blocks, batch_heads, group)
    return block, own


@gluon.jit
def _tile(tile, sizes, FACTS: gl.constexpr, ORDER: gl.constexpr):
    """(first query, batch, head, blocks of keys) of a tile.

    Blocks of keys are taken from the last to the first, and there is always one.
    """
    heads, batch_heads, group, blocks, _, keys, diagonal, _, _, programs = sizes
    BLOCK_M: gl.constexpr = FACTS.block_m
    SLOTS: gl.constexpr = ORDER[5]
    if FACTS.causal and SLOTS > 1:
        block, own = _balanced(tile, blocks, batch_heads, group, programs)
    else:
        block, own = by_length(tile, blocks, batch_heads, group)
    end = keys
    if FACTS.causal:
        end = gl.minimum(keys, gl.maximum(block * BLOCK_M + diagonal + BLOCK_M, 1))
    return block * BLOCK_M, own // heads, own % heads, gl.cdiv(end, FACTS.block_n)


@gluon.jit
def _masked_blocks(first, count, sizes, FACTS: gl.constexpr):
    """How many of a tile's blocks of keys, the last ones, some query does not see in whole."""
    _, _, _, _, _, keys, diagonal, _, _, _ = sizes
    whole = keys // FACTS.block_n
    if FACTS.causal:
        whole = gl.minimum(whole, gl.maximum(first + diagonal + 1, 0) // FACTS.block_n)
    return count - gl.minimum(whole, count)


@gluon.jit
def _slot(tile, programs, ORDER: gl.constexpr):
    """(where a tile's queries are, the parity of those who were there before)."""
    CONSUMERS: gl.constexpr = ORDER[0]
    SLOTS: gl.constexpr = ORDER[5]
    number = tile // programs
    return number % SLOTS * CONSUMERS, number // SLOTS % 2


@gluon.jit
def _anew(number):
    """The same number, which the assembler does not know to be the same.

    Where two loops multiply by one operand whose address is computed, that of CUDA 12.8 keeps the descriptor in the
    block in front of the first loop, and the second has none if the first is passed over.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _copy(operands, buffers, barriers, sizes, FACTS: gl.constexpr, ORDER: gl.constexpr):
    """What one warp does: copy a tile's queries, and its keys and values to where those before have been used."""
    query, key, value, bias = operands
    qs, ks, vs, biases = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free, _turns = barriers
    _, _, _, _, _, _, _, _, tiles, programs = sizes
    STAGES: gl.constexpr = ks.shape[0]
    CONSUMERS: gl.constexpr = ORDER[0]
    OVERLAPPED: gl.constexpr = ORDER[2]
    BLOCK_N: gl.constexpr = ks.shape[3]
    Q_BYTES: gl.constexpr = ROWS * qs.shape[4] * 2
    K_BYTES: gl.constexpr = BLOCK_N * ks.shape[4] * 2
    V_BYTES: gl.constexpr = BLOCK_N * vs.shape[4] * 2
    BIAS_BYTES: gl.constexpr = 0 if biases is None else biases.shape[0] // STAGES * biases.shape[3] * BLOCK_N * 2
    step = 0
    for tile in range(gl.program_id(0), tiles, programs):
        first, batch, head, count = _tile(tile, sizes, FACTS, ORDER)
        shared = head // FACTS.ratio
        for block in range(count):
            stage, phase = step % STAGES, 1 - step // STAGES % 2
            row = (count - 1 - block) * BLOCK_N
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_ready.index(stage), K_BYTES + BIAS_BYTES)
            load(key, [batch, shared, row, 0], k_ready.index(stage), ks.index(stage))
            if bias is not None:
                copy_bias(bias, biases, (batch, head, first, row), k_ready.index(stage), stage, STAGES, False)
            if block == 0:
                slot, turn = _slot(tile, programs, ORDER)
                for i in gl.static_range(CONSUMERS):
                    mbarrier.wait(q_free.index(slot + i), 1 - turn)
                    mbarrier.expect(q_ready.index(slot + i), Q_BYTES)
                    load(query, [batch, head, first + i * ROWS, 0], q_ready.index(slot + i), qs.index(slot + i))
            if OVERLAPPED:
                mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_ready.index(stage), V_BYTES)
            load(value, [batch, shared, row, 0], v_ready.index(stage), vs.index(stage))
            step += 1


@gluon.jit
def _scores(q, ks, step, layout: gl.constexpr):
    """Start the products of queries and the next block of keys."""
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK_N: gl.constexpr = ks.shape[3]
    k = ks.index(step % STAGES).reshape((BLOCK_N, ks.shape[4])).permute((1, 0))
    nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _packed(exponentials, DTYPE: gl.constexpr):
    """Pairs of a half type, each in an int32: of halves that go round a loop the assembler takes each by itself."""
    ROUND: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if gl.float16 == DTYPE else "cvt.rn.bf16x2.f32 $0, $2, $1;"
    even, odd = exponentials.reshape((exponentials.shape[0], exponentials.shape[1] // 2, 2)).split()
    return gl.inline_asm_elementwise(ROUND, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpacked(pairs, DTYPE: gl.constexpr, total):
    """The halves of pairs, as the first operand of a product has them in registers."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    halves = gl.join(even, odd).reshape((pairs.shape[0], 2 * pairs.shape[1])).to(DTYPE, bitcast=True)
    return gl.convert_layout(halves, gl.DotOperandLayout(0, total.type.layout, 2))


@gluon.jit
def _add_values(pairs, total, vs, v_ready, step):
    """Start the products of probabilities and a block of values: (these, what has to stay until they are there)."""
    weights = _unpacked(pairs, vs.dtype, total)
    STAGES: gl.constexpr = vs.shape[0]
    stage = step % STAGES
    mbarrier.wait(v_ready.index(stage), step // STAGES % 2)
    v = vs.index(stage).reshape((vs.shape[3], vs.shape[4]))
    return warpgroup_mma(weights, v, total, is_async=True), weights


@gluon.jit
def _larger(x, y):
    return gl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _row_max(x):
    """The largest of each row, or NaN."""
    of_threads = gl.reduce(gl.reduce(by_thread(x), 4, _larger), 2, _larger)
    largest = gl.reduce(gl.reduce(of_threads, 1, _larger), 1, _larger)
    return gl.convert_layout(largest, gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def _exponentials(scores, largest, factor, ends, first, MASKED: gl.constexpr, NATS: gl.constexpr):
    """(exponentials of scores, the largest, what is kept of sums so far), for keys from `first` to each row's end.

    Scores are in NATS, or products that `factor` makes powers of two.
    """
    if MASKED:
        columns = first + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(columns[None, :] < ends[:, None], scores, float("-inf"))
    if NATS:
        most = _larger(largest, _row_max(scores))
    else:
        most = _larger(largest, _row_max(scores) * factor)
        scores = scores * factor
    base = base_of(most)
    return exponentials(scores, base[:, None], False, NATS), most, exponentials(largest, base, False, NATS)


@gluon.jit
def _rows_times(total, factors):
    """Every row by its own factor."""
    return total * gl.convert_layout(factors, gl.SliceLayout(1, total.type.layout))[:, None]


@gluon.jit
def _wait_for_turn(turns, step, WHICH: gl.constexpr, PING_PONG: gl.constexpr):
    """All blocks but a program's first have a turn."""
    if PING_PONG:
        mbarrier.wait(turns.index(WHICH), (step + (0 if WHICH == 0 else 1)) % 2)


@gluon.jit
def _attend_block(
    state, q, buffers, barriers, factor, ends, numbers, MASKED: gl.constexpr, WHICH: gl.constexpr, ORDER: gl.constexpr
):
    """Start a block's scores, then the block before's products with values, and have exponentials under these.

    `numbers` are that of the block, counted over all tiles, and how many are left after it.
    """
    step, left = numbers
    total, pairs, largest, denominator = state
    _, ks, vs, biases = buffers
    _, _, k_ready, k_free, v_ready, v_free, turns = barriers
    STAGES: gl.constexpr = ks.shape[0]
    CONSUMERS: gl.constexpr = ORDER[0]
    PING_PONG: gl.constexpr = ORDER[1]
    OVERLAPPED: gl.constexpr = ORDER[2]
    layout: gl.constexpr = largest.type.layout.parent
    _wait_for_turn(turns, step, WHICH, PING_PONG)
    scores = _scores(q, ks, step, layout)
    if OVERLAPPED:
        total, weights = _add_values(pairs, total, vs, v_ready, step - 1)
    if PING_PONG:
        mbarrier.arrive(turns.index((WHICH + 1) % CONSUMERS))
    if OVERLAPPED:
        scores = warpgroup_mma_wait(1, deps=(scores,))
    else:
        scores = warpgroup_mma_wait(0, deps=(scores,))
    scores = biased(scores, biases, step, WHICH, factor, STAGES, False)
    if OVERLAPPED:
        mbarrier.arrive(k_free.index(step % STAGES))
    NATS: gl.constexpr = biases is not None
    shares, largest, kept = _exponentials(scores, largest, factor, ends, left * ks.shape[3], MASKED, NATS)
    if not OVERLAPPED:
        total = _rows_times(total, kept)
    rows: gl.constexpr = gl.SliceLayout(1, denominator.type.layout)
    denominator = denominator * gl.convert_layout(kept, rows, assert_trivial=True)[:, None] + thread_sums(shares)
    # Here, because the assembler does not move what comes after it before the exponentials.
    wait_for_block(ks, k_ready, step + 1, left > 0)
    if OVERLAPPED:
        total, weights = warpgroup_mma_wait(0, deps=(total, weights))
        mbarrier.arrive(v_free.index((step - 1) % STAGES))
        total = _rows_times(total, kept)
    pairs = _packed(shares, vs.dtype)
    if not OVERLAPPED:
        total, weights = _add_values(pairs, total, vs, v_ready, step)
        total, weights = warpgroup_mma_wait(0, deps=(total, weights))
        # Its values, too, have been used: to arrive makes the group's warps wait for each other.
        mbarrier.arrive(k_free.index(step % STAGES))
    return total, pairs, largest, denominator


@gluon.jit
def _first_scores(
    tile, number, step, buffers, barriers, programs, layout: gl.constexpr, WHICH: gl.constexpr, ORDER: gl.constexpr
):
    """Start the products of a tile's queries and the first block of its keys."""
    qs, ks, _vs, _biases = buffers
    q_ready, _, k_ready, _, _, _, _ = barriers
    slot, turn = _slot(tile, programs, ORDER)
    q = qs.index(slot + WHICH).reshape((ROWS, qs.shape[4]))
    mbarrier.wait(q_ready.index(slot + WHICH), turn)
    # What is largest is so after scaling by a positive number.
    if number < 0:
        q.store(-q.load(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
        fence_async_shared()
    wait_for_block(ks, k_ready, step, True)
    return _scores(q, ks, step, layout)


@gluon.jit
def _first_exponentials(scores, factor, ends, first, count, sizes, FACTS: gl.constexpr):
    """(exponentials of a tile's first block, the largest score of each row, sums of rows by thread)."""
    nothing = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, scores.type.layout))
    last = (count - 1) * scores.shape[1]
    if _masked_blocks(first, count, sizes, FACTS) > 0:
        shares, largest, _kept = _exponentials(scores, nothing, factor, ends, last, True, FACTS.nats)
    else:
        shares, largest, _kept = _exponentials(scores, nothing, factor, ends, last, False, FACTS.nats)
    return shares, largest, thread_sums(shares)


@gluon.jit
def _finish(state, where, sizes, results, FACTS: gl.constexpr, WHICH: gl.constexpr, OWN_STAGING: gl.constexpr):
    """Write the result of a tile, and the logarithms of its sums."""
    total, largest, denominator = state
    row, batch, head = where
    out, logsumexp, logarithm_strides, staging = results
    _, _, _, _, queries, _, _, padded, _, _ = sizes
    EMPTY: gl.constexpr = FACTS.empty
    denominator = gl.convert_layout(gl.sum(denominator, 1), largest.type.layout)
    nothing = denominator == 0
    denominator = gl.where(nothing, 1.0, denominator)
    if logsumexp is not None:
        rows = row + gl.arange(0, ROWS, largest.type.layout)
        if FACTS.nats:
            logarithm = largest + gl.log2(denominator) * _LN2
        else:
            logarithm = (largest + gl.log2(denominator)) * _LN2
        logarithm = gl.where(nothing, float(EMPTY), logarithm)
        logarithm = gl.where(rows < queries, logarithm, float("inf"))
        place_of_head = batch.to(gl.int64) * logarithm_strides[0] + head.to(gl.int64) * logarithm_strides[1]
        pointers = logsumexp + place_of_head + rows.to(FACTS.index) * logarithm_strides[2]
        gl.store(pointers, logarithm, mask=rows < gl.maximum(queries, padded))
    scaled = _rows_times(total, 1.0 / denominator)
    here = staging.index(WHICH)
    if OWN_STAGING:
        # The result before has left.
        tma.store_wait(pendings=0)
    here.reshape((ROWS, scaled.shape[1])).store(scaled.to(out.dtype))
    fence_async_shared()
    store(out, [batch, head, row, 0], here)


@gluon.jit
def _attend(results, buffers, barriers, sizes, number, FACTS: gl.constexpr, WHICH: gl.constexpr, ORDER: gl.constexpr):
    """What a group of four warps does: the queries of number WHICH of every tile.

    The next tile's first scores, and their exponentials, are under the last products and the writing of one.
    """
    qs, ks, vs, biases = buffers
    _, q_free, k_ready, k_free, v_ready, v_free, turns = barriers
    _, _, _, _, _, keys, diagonal, _, tiles, programs = sizes
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK_V: gl.constexpr = FACTS.block_v
    CONSUMERS: gl.constexpr = ORDER[0]
    PING_PONG: gl.constexpr = ORDER[1]
    OVERLAPPED: gl.constexpr = ORDER[2]
    OWN_STAGING: gl.constexpr = ORDER[3]
    SLOTS: gl.constexpr = ORDER[5]
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FACTS.block_n, 16])
    of_result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    # Not 0, of which a masked score's product would be NaN.
    if biases is None:
        factor = _larger((gl.abs(number) * LOG2E).to(gl.float32), 2.0**-126)
    else:
        factor = gl.abs(number).to(gl.float32)
    step = 0
    first, batch, head, count = _tile(gl.program_id(0), sizes, FACTS, ORDER)
    ends = gl.full((ROWS,), 0, gl.int32, of_rows) + keys
    if FACTS.causal:
        ends = gl.minimum(ends, first + WHICH * ROWS + gl.arange(0, ROWS, of_rows) + (diagonal + 1))
    scores = _first_scores(gl.program_id(0), number, step, buffers, barriers, programs, of_scores, WHICH, ORDER)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    scores = biased(scores, biases, step, WHICH, factor, STAGES, False)
    if OVERLAPPED:
        mbarrier.arrive(k_free.index(step % STAGES))
    shares, largest, denominator = _first_exponentials(scores, factor, ends, first, count, sizes, FACTS)
    wait_for_block(ks, k_ready, step + 1, count > 1)
    pairs = _packed(shares, vs.dtype)
    for tile in range(gl.program_id(0), tiles, programs):
        total = gl.zeros((ROWS, BLOCK_V), gl.float32, of_result)
        # Here, because Triton 3.6 takes what goes round a loop and only bounds others for unused, and keeps the first.
        masked = _masked_blocks(first, count, sizes, FACTS)
        slot, _turn = _slot(tile, programs, ORDER)
        q = qs.index(slot + WHICH).reshape((ROWS, FACTS.block_d))
        if not OVERLAPPED:
            total, weights = _add_values(pairs, total, vs, v_ready, step)
            total, weights = warpgroup_mma_wait(0, deps=(total, weights))
            mbarrier.arrive(k_free.index(step % STAGES))
        for i in range(1, masked):
            state = (total, pairs, largest, denominator)
            total, pairs, largest, denominator = _attend_block(
                state, q, buffers, barriers, factor, ends, (step + i, count - 1 - i), True, WHICH, ORDER
            )
        if SLOTS > 1:
            q = qs.index(_anew(slot) + WHICH).reshape((ROWS, FACTS.block_d))
        for i in range(gl.maximum(masked, 1), count):
            state = (total, pairs, largest, denominator)
            total, pairs, largest, denominator = _attend_block(
                state, q, buffers, barriers, factor, ends, (step + i, count - 1 - i), False, WHICH, ORDER
            )
        if not OVERLAPPED:
            # Not those of the last block, which would be kept beside its products.
            pairs = gl.zeros_like(pairs)
        step += count
        where = first + WHICH * ROWS, batch, head
        if OWN_STAGING and tile + programs < tiles:
            # All products with these queries have been computed.
            mbarrier.arrive(q_free.index(slot + WHICH))
            first, batch, head, count = _tile(tile + programs, sizes, FACTS, ORDER)
            if FACTS.causal:
                ends = gl.minimum(keys, first + WHICH * ROWS + gl.arange(0, ROWS, of_rows) + (diagonal + 1))
            _wait_for_turn(turns, step, WHICH, PING_PONG)
            scores = _first_scores(tile + programs, number, step, buffers, barriers, programs, of_scores, WHICH, ORDER)
            if OVERLAPPED:
                total, weights = _add_values(pairs, total, vs, v_ready, step - 1)
            if PING_PONG:
                mbarrier.arrive(turns.index((WHICH + 1) % CONSUMERS))
            if OVERLAPPED:
                scores = warpgroup_mma_wait(1, deps=(scores,))
            else:
                _finish((total, largest, denominator), where, sizes, results, FACTS, WHICH, OWN_STAGING)
                scores = warpgroup_mma_wait(0, deps=(scores,))
            scores = biased(scores, biases, step, WHICH, factor, STAGES, False)
            if OVERLAPPED:
                mbarrier.arrive(k_free.index(step % STAGES))
            shares, most, sums = _first_exponentials(scores, factor, ends, first, count, sizes, FACTS)
            wait_for_block(ks, k_ready, step + 1, count > 1)
            if OVERLAPPED:
                total, weights = warpgroup_mma_wait(0, deps=(total, weights))
                mbarrier.arrive(v_free.index((step - 1) % STAGES))
                _finish((total, largest, denominator), where, sizes, results, FACTS, WHICH, OWN_STAGING)
            pairs, largest, denominator = _packed(shares, vs.dtype), most, sums
        else:
            if OVERLAPPED:
                total, weights = _add_values(pairs, total, vs, v_ready, step - 1)
                total, weights = warpgroup_mma_wait(0, deps=(total, weights))
            _finish((total, largest, denominator), where, sizes, results, FACTS, WHICH, OWN_STAGING)
    tma.store_wait(pendings=0)


@libentry()
@gluon.jit(
    do_not_specialize=["heads", "batch_heads", "group", "blocks", "queries", "keys", "diagonal", "padded", "programs"]
)
def attend_warp_specialized(
    query,
    key,
    value,
    bias,
    out,
    logsumexp,
    logarithm_strides,
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
    FACTS: gl.constexpr,
    ORDER: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `forward.attend`, of operands that tensor descriptors tell of, without packed sequences.

    ORDER is how many groups of warps there are, whether they take turns to multiply, whether a group's products are
    under its exponentials, whether a result leaves by a place in shared memory of its own, so that a program may have
    several tiles, or by that of the queries, the registers of a group's threads, and the tiles whose queries there is
    room for. Keys and values have STAGES blocks each.
    """
    CONSUMERS: gl.constexpr = ORDER[0]
    SLOTS: gl.constexpr = ORDER[5]
    qs = gl.allocate_shared_memory(query.dtype, [SLOTS * CONSUMERS] + query.block_shape, query.layout)
    ks = gl.allocate_shared_memory(key.dtype, [STAGES] + key.block_shape, key.layout)
    vs = gl.allocate_shared_memory(value.dtype, [STAGES] + value.block_shape, value.layout)
    biases: gl.constexpr = None
    if bias is not None:
        # The groups' rows one after the other, or one row that all have.
        COPIES: gl.constexpr = CONSUMERS if bias.block_shape[2] == ROWS else 1
        biases = gl.allocate_shared_memory(bias.dtype, [STAGES * COPIES] + bias.block_shape, bias.layout)
    staging = qs
    if ORDER[3]:
        staging = gl.allocate_shared_memory(out.dtype, [CONSUMERS] + out.block_shape, out.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS * CONSUMERS):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
        if i < CONSUMERS:
            mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=CONSUMERS)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=CONSUMERS)
    operands, buffers = (query, key, value, bias), (qs, ks, vs, biases)
    barriers = q_ready, q_free, k_ready, k_free, v_ready, v_free, turns
    results = out, logsumexp, logarithm_strides, staging
    tiles = _end(blocks * batch_heads, programs, FACTS, ORDER)
    sizes = heads, batch_heads, group, blocks, queries, keys, diagonal, padded, tiles, programs
    wait_for_previous_launch()
    # The first group has what the others leave.
    REGISTERS: gl.constexpr = ORDER[4]
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_attend, (results, buffers, barriers, sizes, scale, FACTS, 0, ORDER)),
                (_attend, (results, buffers, barriers, sizes, scale, FACTS, 1, ORDER)),
                (_attend, (results, buffers, barriers, sizes, scale, FACTS, 2, ORDER)),
                (_copy, (operands, buffers, barriers, sizes, FACTS, ORDER)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, _COPYING],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (results, buffers, barriers, sizes, scale, FACTS, 0, ORDER)),
                (_attend, (results, buffers, barriers, sizes, scale, FACTS, 1, ORDER)),
                (_copy, (operands, buffers, barriers, sizes, FACTS, ORDER)),
            ],
            [4, 1],
            [REGISTERS, _COPYING],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (results, buffers, barriers, sizes, scale, FACTS, 0, ORDER)),
                (_copy, (operands, buffers, barriers, sizes, FACTS, ORDER)),
            ],
            [1],
            [_COPYING],
        )


def takes(problem: Problem, out: torch.Tensor) -> bool:
    """Whether this is the kernel for a problem, on a device that has what it needs."""
    return take(problem, (problem.query, problem.key, problem.value, out))


def attention(problem: Problem, out: torch.Tensor, logsumexp: torch.Tensor | None, empty: str = "inf") -> None:
    """As `forward.attention`, of a problem that this kernel `takes`."""
    block_d, block_v = block_sizes(problem)
    heads, queries, keys = problem.query.shape[1], problem.queries, problem.keys
    multiprocessors = devices.multiprocessors(out.device)
    # How many other rows there are must not decide how keys are added up.
    idle = 0 if settings().invariant else multiprocessors
    tile = table.warp_specialized(block_d, block_v, queries, keys, problem.batch * heads, idle, problem.causal)
    blocks = -(-queries // tile.BLOCK_M)
    tiles = blocks * problem.batch * heads
    size, columns = out.dtype.itemsize, block_d + block_v
    of_bias = 0 if problem.bias is None else tile.BLOCK_M if problem.bias.stride(2) else 1
    stage_bytes = size * tile.BLOCK_N * (columns + of_bias)
    beside = size * tile.BLOCK_M * (block_d + columns) + _BARRIERS
    most = (devices.shared_memory(out.device) // tile.resident - beside) // stage_bytes
    persistent = tile.persistent and most >= tile.num_stages
    programs = min(tiles, multiprocessors * tile.resident) if persistent else tiles
    several = programs < tiles
    order = tile.groups, tile.ping_pong, tile.overlapped, several or block_d != block_v, tile.registers, 1 + several
    facts = problem.facts(table.Tile(tile.BLOCK_M, tile.BLOCK_N), out, empty=empty)
    attend_warp_specialized[(programs,)](
        descriptor(problem.query, ROWS.value, block_d),
        descriptor(problem.key, tile.BLOCK_N, block_d),
        descriptor(problem.value, tile.BLOCK_N, block_v),
        None if problem.bias is None else bias_descriptor(problem.bias, ROWS.value, tile.BLOCK_N),
        descriptor(out, ROWS.value, block_v),
        logsumexp,
        logarithm_strides=problem.logarithm_strides(logsumexp),
        heads=heads,
        batch_heads=problem.batch * heads,
        group=problem.group,
        blocks=blocks,
        queries=queries,
        keys=keys,
        diagonal=problem.diagonal,
        padded=0 if logsumexp is None else logsumexp.shape[2],
        programs=programs,
        scale=problem.factor,
        FACTS=replace(facts, block_d=block_d, block_v=block_v),
        ORDER=order,
        STAGES=max(tile.num_stages, min(most, tile.most_stages)) if several else tile.num_stages,
        num_warps=4,
        maxnreg=tile.maxnreg if tile.resident > 1 else None,
    )
