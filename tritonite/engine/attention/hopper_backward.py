"""The warp-specialised backward pass of attention, in Gluon, for tensor cores that read shared memory (sm_90).

As in `hopper`, one warp copies blocks, and groups of four warps each have 64 rows whose sums they keep in registers:
those of queries in one launch, those of keys and values in another. Where keys that heads of queries share are few,
every head has programs of its own, and what they find is added up after them, in order. Probabilities, and the
gradients of scores, go from the registers where they are computed into the products that they are for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonite import devices
from tritonite.dispatch.call import empty, settings
from tritonite.engine.attention.descriptors import (
    LOG2E,
    ROWS,
    bias_descriptor,
    biased,
    block_sizes,
    copy_bias,
    descriptor,
    take,
    wait_for_block,
)
from tritonite.engine.attention.place import place
from tritonite.engine.attention.problem import Problem
from tritonite.engine.gemm.hopper import load, store
from tritonite.engine.iteration import power_of_2
from tritonite.language.order import wait_for_previous_launch
from tritonite.launch import libentry
from tritonite.tune import attention as table

# The groups of four warps that multiply.
GROUPS = gl.constexpr(2)


@gluon.jit
def _halves(tile, DTYPE: gl.constexpr, total):
    """A tile as the first operand of a product that is added to `total`, in registers."""
    return gl.convert_layout(tile.to(DTYPE), gl.DotOperandLayout(0, total.type.layout, 2))


@gluon.jit
def _matrix(buffers, i):
    """A block in shared memory, of rows and columns."""
    return buffers.index(i).reshape((buffers.shape[3], buffers.shape[4]))


@gluon.jit
def _again(i, step):
    """The same number at every step, which the compiler does not see.

    Else it would keep what tensor cores are told of a block in registers, of which there are not enough.
    """
    return i + step // 2**30


@gluon.jit
def _keys_of_tile(sizes, BLOCK_M: gl.constexpr, FACTS: gl.constexpr):
    """(first query, batch, head, blocks of keys, how many of them some query does not see in whole) of a program.

    Blocks of keys are taken from the last to the first, and there is always one.
    """
    heads, batch_heads, group, blocks, _, keys, diagonal = sizes
    BLOCK_N: gl.constexpr = FACTS.block_n
    block, batch, head = place(gl.program_id(0), blocks, heads, batch_heads, group)
    end, whole = keys, keys // BLOCK_N
    if FACTS.causal:
        first = block * BLOCK_M + diagonal + 1
        end = gl.minimum(keys, gl.maximum(first + BLOCK_M - 1, 1))
        whole = gl.minimum(whole, gl.maximum(first, 0) // BLOCK_N)
    count = gl.cdiv(end, BLOCK_N)
    return block * BLOCK_M, batch.to(gl.int32), head.to(gl.int32), count, count - gl.minimum(whole, count - 1)


@gluon.jit
def _copy_keys(operands, buffers, barriers, sizes, FACTS: gl.constexpr):
    """What one warp does for the gradient of queries: copy these once, and keys and values through a ring."""
    query, key, value, grad_out, bias = operands
    qs, gs, ks, vs, biases = buffers
    q_ready, g_ready, k_ready, k_free, v_ready, v_free = barriers
    STAGES: gl.constexpr = ks.shape[0]
    V_STAGES: gl.constexpr = vs.shape[0]
    BLOCK_N: gl.constexpr = FACTS.block_n
    BIAS_BYTES: gl.constexpr = 0 if biases is None else biases.shape[0] // STAGES * biases.shape[3] * BLOCK_N * 2
    first, batch, head, count, _cut = _keys_of_tile(sizes, GROUPS * ROWS, FACTS)
    shared = head // FACTS.ratio
    for step in range(count):
        stage, phase = step % STAGES, 1 - step // STAGES % 2
        row = (count - 1 - step) * BLOCK_N
        if step == 0:
            for i in gl.static_range(GROUPS):
                mbarrier.expect(q_ready.index(i), ROWS * FACTS.block_d * 2)
                load(query, [batch, head, first + i * ROWS, 0], q_ready.index(i), qs.index(i))
        mbarrier.wait(k_free.index(stage), phase)
        mbarrier.expect(k_ready.index(stage), BLOCK_N * FACTS.block_d * 2 + BIAS_BYTES)
        load(key, [batch, shared, row, 0], k_ready.index(stage), ks.index(stage))
        if bias is not None:
            copy_bias(bias, biases, (batch, head, first, row), k_ready.index(stage), stage, STAGES, False)
        if step == 0:
            for i in gl.static_range(GROUPS):
                mbarrier.expect(g_ready.index(i), ROWS * FACTS.block_v * 2)
                load(grad_out, [batch, head, first + i * ROWS, 0], g_ready.index(i), gs.index(i))
        stage, phase = step % V_STAGES, 1 - step // V_STAGES % 2
        mbarrier.wait(v_free.index(stage), phase)
        mbarrier.expect(v_ready.index(stage), BLOCK_N * FACTS.block_v * 2)
        load(value, [batch, shared, row, 0], v_ready.index(stage), vs.index(stage))


@gluon.jit
def _logarithms(pointers, exists):
    """The logarithms of the sums of rows, of 2; infinite where there is no row or it sees nothing."""
    found = gl.load(pointers, mask=exists, other=float("inf"))
    return gl.where(found == float("-inf"), float("inf"), found) * LOG2E


@gluon.jit
def _row_products(grad, out, stride, first, queries, FACTS: gl.constexpr):
    """The sums over elements of rows of the result and its gradient."""
    BLOCK_V: gl.constexpr = FACTS.block_v
    THREADS: gl.constexpr = BLOCK_V // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_V, gl.SliceLayout(0, layout))
    pointers = out + (rows.to(FACTS.index) * stride)[:, None] + columns[None, :]
    exists = (rows < queries)[:, None] & (columns < FACTS.value_size)[None, :]
    result = gl.load(pointers, mask=exists, other=0.0)
    return gl.sum(grad.load(layout).to(gl.float32) * result.to(gl.float32), 1)


@gluon.jit
def _products(a, b, layout: gl.constexpr):
    """Start the products of rows and all rows of another matrix."""
    COLUMNS: gl.constexpr = b.shape[0]
    nothing = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    return warpgroup_mma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _take_keys(total, rows, buffers, barriers, factor, ends, numbers, MASKED: gl.constexpr):
    """The gradient of queries and what a block of keys adds to it.

    `numbers` are those of the block, of its first key, and how many blocks are left after it. Its keys have come, and
    those of the next block are waited for.
    """
    which, logarithms, delta = rows
    qs, gs, ks, vs, biases = buffers
    _, _, k_ready, k_free, v_ready, v_free = barriers
    step, first, left = numbers
    STAGES: gl.constexpr = ks.shape[0]
    V_STAGES: gl.constexpr = vs.shape[0]
    BLOCK_N: gl.constexpr = ks.shape[3]
    of_scores: gl.constexpr = logarithms.type.layout.parent
    stage, v_stage = step % STAGES, step % V_STAGES
    k, v = _matrix(ks, stage), _matrix(vs, _again(v_stage, step))
    q, grad = _matrix(qs, _again(which, step)), _matrix(gs, _again(which, step))
    scores = _products(q, k, of_scores)
    wait_for_block(vs, v_ready, step, True)
    grads = _products(grad, v, of_scores)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    scores, power = biased(scores, biases, step, which, factor, STAGES, False)
    probabilities = gl.exp2(scores * power - logarithms[:, None])
    # Here, because the assembler does not move what comes after it before the exponentials.
    wait_for_block(ks, k_ready, step + 1, left > 0)
    grads = warpgroup_mma_wait(0, deps=(grads,))
    mbarrier.arrive(v_free.index(v_stage))
    grad_scores = probabilities * (grads - delta[:, None])
    if MASKED:
        columns = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, of_scores))
        grad_scores = gl.where(columns[None, :] < ends[:, None], grad_scores, 0.0)
    halves = _halves(grad_scores, ks.dtype, total)
    total = warpgroup_mma(halves, k, total, is_async=True)
    total, halves = warpgroup_mma_wait(0, deps=(total, halves))
    mbarrier.arrive(k_free.index(stage))
    return total


@gluon.jit
def _for_queries(results, buffers, barriers, sizes, number, FACTS: gl.constexpr, WHICH: gl.constexpr):
    """What a group of four warps does: the gradient of the queries of number WHICH of a program."""
    grad_query, out, out_strides, logsumexp, logarithm_strides, sums, sum_strides = results
    qs, gs, ks, _, biases = buffers
    q_ready, g_ready, k_ready, _, _, _ = barriers
    _, _, _, _, queries, keys, diagonal = sizes
    BLOCK_N: gl.constexpr = FACTS.block_n
    BLOCK_D: gl.constexpr = FACTS.block_d
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    of_result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    row, batch, head, count, cut = _keys_of_tile(sizes, GROUPS * ROWS, FACTS)
    row += WHICH * ROWS
    rows = row + gl.arange(0, ROWS, of_rows)
    exists = rows < queries
    factor = (number * LOG2E).to(gl.float32) if biases is None else number.to(gl.float32)
    ends = gl.full((ROWS,), 0, gl.int32, of_rows) + keys
    if FACTS.causal:
        ends = gl.minimum(ends, rows + (diagonal + 1))
    far = batch.to(gl.int64)
    place_of_head = far * logarithm_strides[0] + head.to(gl.int64) * logarithm_strides[1]
    logarithms = _logarithms(logsumexp + place_of_head + rows.to(FACTS.index) * logarithm_strides[2], exists)
    out += far * out_strides[0] + head.to(gl.int64) * out_strides[1]
    q, grad = _matrix(qs, WHICH), _matrix(gs, WHICH)
    mbarrier.wait(g_ready.index(WHICH), 0)
    delta = gl.convert_layout(_row_products(grad, out, out_strides[2], row, queries, FACTS), of_rows)
    sums += far * sum_strides[0] + head.to(gl.int64) * sum_strides[1]
    gl.store(sums + rows, logarithms, mask=exists)
    gl.store(sums + sum_strides[2] + rows, delta, mask=exists)
    total = gl.zeros((ROWS, BLOCK_D), gl.float32, of_result)
    mbarrier.wait(q_ready.index(WHICH), 0)
    wait_for_block(ks, k_ready, 0, True)
    own = (WHICH, logarithms, delta)
    for i in range(0, cut):
        numbers = (i, (count - 1 - i) * BLOCK_N, count - 1 - i)
        total = _take_keys(total, own, buffers, barriers, factor, ends, numbers, True)
    for i in range(cut, count):
        numbers = (i, (count - 1 - i) * BLOCK_N, count - 1 - i)
        total = _take_keys(total, own, buffers, barriers, factor, ends, numbers, False)
    q.store((total * number.to(gl.float32)).to(qs.dtype))
    fence_async_shared()
    store(grad_query, [batch, head, row, 0], qs.index(WHICH))
    tma.store_wait(pendings=0)


@libentry()
@gluon.jit(do_not_specialize=["heads", "batch_heads", "group", "blocks", "queries", "keys", "diagonal"])
def attend_to_queries_warp_specialized(
    query,
    key,
    value,
    grad_out,
    bias,
    grad_query,
    out,
    logsumexp,
    sums,
    out_strides,
    logarithm_strides,
    sum_strides,
    heads,
    batch_heads,
    group,
    blocks,
    queries,
    keys,
    diagonal,
    scale: tl.float64,
    FACTS: gl.constexpr,
    STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """As `backward.attend_to_queries`, of operands that tensor descriptors tell of, without packed sequences.

    `sums`, of the batch, heads, two and queries, gets what the launch for keys reads of rows: the logarithms, of 2, and
    the sums over a value's elements of the result and its gradient.
    """
    qs = gl.allocate_shared_memory(query.dtype, [GROUPS] + query.block_shape, query.layout)
    gs = gl.allocate_shared_memory(grad_out.dtype, [GROUPS] + grad_out.block_shape, grad_out.layout)
    ks = gl.allocate_shared_memory(key.dtype, [STAGES] + key.block_shape, key.layout)
    vs = gl.allocate_shared_memory(value.dtype, [V_STAGES] + value.block_shape, value.layout)
    biases: gl.constexpr = None
    if bias is not None:
        COPIES: gl.constexpr = GROUPS if bias.block_shape[2] == ROWS else 1
        biases = gl.allocate_shared_memory(bias.dtype, [STAGES * COPIES] + bias.block_shape, bias.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    g_ready = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(g_ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=GROUPS)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=GROUPS)
    operands, buffers = (query, key, value, grad_out, bias), (qs, gs, ks, vs, biases)
    barriers = q_ready, g_ready, k_ready, k_free, v_ready, v_free
    results = grad_query, out, out_strides, logsumexp, logarithm_strides, sums, sum_strides
    sizes = heads, batch_heads, group, blocks, queries, keys, diagonal
    wait_for_previous_launch()
    gl.warp_specialize(
        [
            (_for_queries, (results, buffers, barriers, sizes, scale, FACTS, 0)),
            (_for_queries, (results, buffers, barriers, sizes, scale, FACTS, 1)),
            (_copy_keys, (operands, buffers, barriers, sizes, FACTS)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _queries_of_tile(sizes, BLOCK_N: gl.constexpr, FACTS: gl.constexpr):
    """(first key, batch, head of keys, first block of queries, blocks, how many have to be masked) of a program.

    Taken first is the last block where it is not full, then from the first on; masked are those before a block whose
    queries see all keys. Programs with the first keys, which most queries see, are begun first.
    """
    heads, batch_heads, group, blocks, queries, _, diagonal = sizes
    BLOCK_M: gl.constexpr = FACTS.block_m
    block, batch, head = place(gl.program_id(0), blocks, heads, batch_heads, group)
    row = (blocks - 1 - block) * BLOCK_N
    count = gl.cdiv(queries, BLOCK_M)
    partial = count - queries // BLOCK_M
    first, masked = 0, partial
    if FACTS.causal:
        first = gl.minimum(gl.maximum(row - diagonal, 0) // BLOCK_M, count)
        whole = gl.minimum(gl.cdiv(gl.maximum(row + BLOCK_N - 1 - diagonal, 0), BLOCK_M), count)
        masked = gl.minimum(whole - first + partial, count - first)
    return row, batch.to(gl.int32), head.to(gl.int32), first, count - first, masked


@gluon.jit
def _block_of_queries(i, first, count, queries, BLOCK_M: gl.constexpr):
    """The first query of the block that is taken as number i of `count` from block `first` on."""
    partial = gl.cdiv(queries, BLOCK_M) - queries // BLOCK_M
    return gl.where(i < partial, first + count - 1, first + i - partial) * BLOCK_M


@gluon.jit
def _copy_queries(operands, buffers, barriers, sizes, FACTS: gl.constexpr, SPLIT: gl.constexpr):
    """What one warp does for the gradients of keys and values: copy these once, and all of queries through a ring.

    Where heads that share keys are SPLIT, those of one alone.
    """
    query, key, value, grad_out, sums, bias = operands
    ks, vs, qs, gs, logarithms, deltas, biases, _shared = buffers
    k_ready, v_ready, q_ready, g_ready, free, _, _ = barriers
    _, _, _, _, queries, _, _ = sizes
    SETS: gl.constexpr = ks.shape[0]
    STAGES: gl.constexpr = qs.shape[0]
    BLOCK_M: gl.constexpr = FACTS.block_m
    BIAS_BYTES: gl.constexpr = 0 if biases is None else SETS * biases.shape[3] * ROWS * 2
    row, batch, own_head, first, count, _masked = _queries_of_tile(sizes, SETS * ROWS, FACTS)
    key_head = own_head // FACTS.ratio if SPLIT else own_head
    for i in gl.static_range(SETS):
        mbarrier.expect(k_ready.index(i), ROWS * FACTS.block_d * 2)
        load(key, [batch, key_head, row + i * ROWS, 0], k_ready.index(i), ks.index(i))
    for i in gl.static_range(SETS):
        mbarrier.expect(v_ready.index(i), ROWS * FACTS.block_v * 2)
        load(value, [batch, key_head, row + i * ROWS, 0], v_ready.index(i), vs.index(i))
    step = 0
    for member in range(1 if SPLIT else FACTS.ratio):
        head = own_head if SPLIT else key_head * FACTS.ratio + member
        for block in range(count):
            stage = step % STAGES
            begin = _block_of_queries(block, first, count, queries, BLOCK_M)
            mbarrier.wait(free.index(stage), 1 - step // STAGES % 2)
            here = q_ready.index(stage)
            mbarrier.expect(here, BLOCK_M * (FACTS.block_d * 2 + 4) + BIAS_BYTES)
            load(query, [batch, head, begin, 0], here, qs.index(stage))
            load(sums, [batch, head, 0, begin], here, logarithms.index(stage))
            if bias is not None:
                copy_bias(bias, biases, (batch, head, begin, row), here, stage, STAGES, True)
            here = g_ready.index(stage)
            mbarrier.expect(here, BLOCK_M * (FACTS.block_v * 2 + 4))
            load(grad_out, [batch, head, begin, 0], here, gs.index(stage))
            load(sums, [batch, head, 1, begin], here, deltas.index(stage))
            step += 1


@gluon.jit
def _are_seen(first, begins, queries, BLOCK_M: gl.constexpr, FACTS: gl.constexpr):
    """Which of the queries from `first` on there are and see keys, whose first queries are `begins`."""
    columns = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, begins.type.layout.parent))
    exists = (columns < queries)[None, :]
    if FACTS.causal:
        exists = exists & (columns[None, :] >= begins[:, None])
    return exists


@gluon.jit
def _take_queries(totals, rows, buffers, barriers, factor, numbers, queries, MASKED: gl.constexpr, FACTS: gl.constexpr):
    """The gradients of keys and of values and what a block of queries adds to them; tiles have a row for each key.

    `numbers` are those of the block and of its first query.
    """
    of_key, of_value = totals
    which, begins = rows
    ks, vs, qs, gs, logarithms, deltas, biases, _ = buffers
    _, _, q_ready, g_ready, free, _, _ = barriers
    step, first = numbers
    STAGES: gl.constexpr = qs.shape[0]
    BLOCK_M: gl.constexpr = qs.shape[3]
    of_scores: gl.constexpr = begins.type.layout.parent
    stage, phase = step % STAGES, step // STAGES % 2
    k, v = _matrix(ks, _again(which, step)), _matrix(vs, _again(which, step))
    q, grad = _matrix(qs, stage), _matrix(gs, stage)
    mbarrier.wait(q_ready.index(stage), phase)
    scores = _products(k, q, of_scores)
    mbarrier.wait(g_ready.index(stage), phase)
    grads = _products(v, grad, of_scores)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    scores, power = biased(scores, biases, step, which, factor, STAGES, True)
    # One row, which all rows of scores take theirs from.
    logarithm = _matrix(logarithms, stage).load(of_scores)
    probabilities = gl.exp2(scores * power - logarithm)
    if MASKED:
        exists = _are_seen(first, begins, queries, BLOCK_M, FACTS)
        probabilities = gl.where(exists, probabilities, 0.0)
    weights = _halves(probabilities, gs.dtype, of_value)
    of_value = warpgroup_mma(weights, grad, of_value, is_async=True)
    delta = _matrix(deltas, stage).load(of_scores)
    grads = warpgroup_mma_wait(1, deps=(grads,))
    grad_scores = probabilities * (grads - delta)
    if MASKED:
        grad_scores = gl.where(exists, grad_scores, 0.0)
    halves = _halves(grad_scores, qs.dtype, of_key)
    of_key = warpgroup_mma(halves, q, of_key, is_async=True)
    of_key, of_value, weights, halves = warpgroup_mma_wait(0, deps=(of_key, of_value, weights, halves))
    mbarrier.arrive(free.index(stage))
    return of_key, of_value


@gluon.jit
def _store_part(parts, total, part, SIZE: gl.constexpr):
    """Write what one head of queries adds to a tile of a gradient, into (batch, heads, keys, elements) of float32."""
    row, head, keys = part
    ROWS_OF: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    rows = row + gl.arange(0, ROWS_OF, gl.SliceLayout(1, total.type.layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, total.type.layout))
    pointers = parts + (head * keys + rows.to(gl.int64)[:, None]) * SIZE + columns[None, :]
    gl.store(pointers, total, mask=(rows < keys)[:, None] & (columns < SIZE)[None, :])


@gluon.jit
def _for_keys(results, buffers, barriers, sizes, number, FACTS: gl.constexpr, WHICH: gl.constexpr, SPLIT: gl.constexpr):
    """What a group of four warps does: the gradients of the keys and values of number WHICH of a program."""
    grad_key, grad_value = results
    ks, vs, _, _, _, _, biases, _ = buffers
    k_ready, v_ready, _, _, _, _, _ = barriers
    heads, _, _, _, queries, keys, diagonal = sizes
    BLOCK_M: gl.constexpr = FACTS.block_m
    BLOCK_D: gl.constexpr = FACTS.block_d
    BLOCK_V: gl.constexpr = FACTS.block_v
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    of_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    row, batch, head, first, count, masked = _queries_of_tile(sizes, GROUPS * ROWS, FACTS)
    row += WHICH * ROWS
    begins = row - diagonal + gl.arange(0, ROWS, gl.SliceLayout(1, of_scores))
    factor = (number * LOG2E).to(gl.float32) if biases is None else number.to(gl.float32)
    of_key = gl.zeros((ROWS, BLOCK_D), gl.float32, of_keys)
    of_value = gl.zeros((ROWS, BLOCK_V), gl.float32, of_values)
    mbarrier.wait(k_ready.index(WHICH), 0)
    mbarrier.wait(v_ready.index(WHICH), 0)
    own = (WHICH, begins)
    step = 0
    for _member in range(1 if SPLIT else FACTS.ratio):
        for i in range(0, masked):
            numbers = (step + i, _block_of_queries(i, first, count, queries, BLOCK_M))
            totals = (of_key, of_value)
            of_key, of_value = _take_queries(totals, own, buffers, barriers, factor, numbers, queries, True, FACTS)
        for i in range(masked, count):
            totals = (of_key, of_value)
            of_key, of_value = _take_queries(
                totals, own, buffers, barriers, factor, (step + i, 0), queries, False, FACTS
            )
        step += count
    of_key = of_key * number.to(gl.float32)
    if SPLIT:
        part = row, batch.to(gl.int64) * heads + head, keys
        _store_part(grad_key, of_key, part, FACTS.head_size)
        _store_part(grad_value, of_value, part, FACTS.value_size)
    else:
        _matrix(ks, WHICH).store(of_key.to(ks.dtype))
        _matrix(vs, WHICH).store(of_value.to(vs.dtype))
        fence_async_shared()
        store(grad_key, [batch, head, row, 0], ks.index(WHICH))
        store(grad_value, [batch, head, row, 0], vs.index(WHICH))
        tma.store_wait(pendings=0)


@gluon.jit
def _add_to_values(total, rows, buffers, barriers, factor, numbers, queries, MASKED: gl.constexpr, FACTS: gl.constexpr):
    """The gradient of values and what a block of queries adds to it, whose probabilities another group gets."""
    k, begins = rows
    _, _, qs, gs, logarithms, _, _, shared = buffers
    _, _, q_ready, g_ready, free, shared_ready, shared_free = barriers
    step, first = numbers
    STAGES: gl.constexpr = qs.shape[0]
    BUFFERS: gl.constexpr = shared.shape[0]
    BLOCK_M: gl.constexpr = qs.shape[3]
    of_scores: gl.constexpr = begins.type.layout.parent
    stage, phase = step % STAGES, step // STAGES % 2
    mbarrier.wait(q_ready.index(stage), phase)
    scores = _products(k, _matrix(qs, stage), of_scores)
    logarithm = _matrix(logarithms, stage).load(of_scores)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    probabilities = gl.exp2(scores * factor - logarithm)
    if MASKED:
        probabilities = gl.where(_are_seen(first, begins, queries, BLOCK_M, FACTS), probabilities, 0.0)
    weights = _halves(probabilities, gs.dtype, total)
    mbarrier.wait(g_ready.index(stage), phase)
    total = warpgroup_mma(weights, _matrix(gs, stage), total, is_async=True)
    mbarrier.wait(shared_free.index(step % BUFFERS), 1 - step // BUFFERS % 2)
    shared.index(step % BUFFERS).store(probabilities)
    mbarrier.arrive(shared_ready.index(step % BUFFERS))
    total, weights = warpgroup_mma_wait(0, deps=(total, weights))
    mbarrier.arrive(free.index(stage))
    return total


@gluon.jit
def _add_to_keys(total, rows, buffers, barriers, numbers, queries, MASKED: gl.constexpr, FACTS: gl.constexpr):
    """The gradient of keys and what a block of queries adds to it, whose probabilities another group computes."""
    v, begins = rows
    _, _, qs, gs, _, deltas, _, shared = buffers
    _, _, q_ready, g_ready, free, shared_ready, shared_free = barriers
    step, first = numbers
    STAGES: gl.constexpr = qs.shape[0]
    BUFFERS: gl.constexpr = shared.shape[0]
    BLOCK_M: gl.constexpr = qs.shape[3]
    of_scores: gl.constexpr = begins.type.layout.parent
    stage, phase = step % STAGES, step // STAGES % 2
    mbarrier.wait(g_ready.index(stage), phase)
    grads = _products(v, _matrix(gs, stage), of_scores)
    delta = _matrix(deltas, stage).load(of_scores)
    grads = warpgroup_mma_wait(0, deps=(grads,))
    mbarrier.wait(shared_ready.index(step % BUFFERS), step // BUFFERS % 2)
    grad_scores = shared.index(step % BUFFERS).load(of_scores) * (grads - delta)
    mbarrier.arrive(shared_free.index(step % BUFFERS))
    if MASKED:
        grad_scores = gl.where(_are_seen(first, begins, queries, BLOCK_M, FACTS), grad_scores, 0.0)
    halves = _halves(grad_scores, qs.dtype, total)
    mbarrier.wait(q_ready.index(stage), phase)
    total = warpgroup_mma(halves, _matrix(qs, stage), total, is_async=True)
    total, halves = warpgroup_mma_wait(0, deps=(total, halves))
    mbarrier.arrive(free.index(stage))
    return total


@gluon.jit
def _for_values_alone(result, buffers, barriers, sizes, number, FACTS: gl.constexpr):
    """What a group of four warps does where registers hold one gradient: that of a program's values."""
    ks, vs, _, _, _, _, _, _ = buffers
    k_ready, _, _, _, _, _, _ = barriers
    _, _, _, _, queries, _, diagonal = sizes
    BLOCK_M: gl.constexpr = FACTS.block_m
    BLOCK_V: gl.constexpr = FACTS.block_v
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    row, batch, head, first, count, masked = _queries_of_tile(sizes, ROWS, FACTS)
    factor = (number * LOG2E).to(gl.float32)
    total = gl.zeros((ROWS, BLOCK_V), gl.float32, of_values)
    mbarrier.wait(k_ready.index(0), 0)
    own = (_matrix(ks, 0), row - diagonal + gl.arange(0, ROWS, gl.SliceLayout(1, of_scores)))
    step = 0
    for _member in range(FACTS.ratio):
        for i in range(0, masked):
            numbers = (step + i, _block_of_queries(i, first, count, queries, BLOCK_M))
            total = _add_to_values(total, own, buffers, barriers, factor, numbers, queries, True, FACTS)
        for i in range(masked, count):
            total = _add_to_values(total, own, buffers, barriers, factor, (step + i, 0), queries, False, FACTS)
        step += count
    # Where the keys lie, which the other group does not read.
    ks.index(0).reshape((ROWS, BLOCK_V)).store(total.to(vs.dtype))
    fence_async_shared()
    store(result, [batch, head, row, 0], ks.index(0))
    tma.store_wait(pendings=0)


@gluon.jit
def _for_keys_alone(result, buffers, barriers, sizes, number, FACTS: gl.constexpr):
    """What a group of four warps does where registers hold one gradient: that of a program's keys."""
    ks, vs, _, _, _, _, _, _ = buffers
    _, v_ready, _, _, _, _, _ = barriers
    _, _, _, _, queries, _, diagonal = sizes
    BLOCK_M: gl.constexpr = FACTS.block_m
    BLOCK_D: gl.constexpr = FACTS.block_d
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row, batch, head, first, count, masked = _queries_of_tile(sizes, ROWS, FACTS)
    total = gl.zeros((ROWS, BLOCK_D), gl.float32, of_keys)
    mbarrier.wait(v_ready.index(0), 0)
    own = (_matrix(vs, 0), row - diagonal + gl.arange(0, ROWS, gl.SliceLayout(1, of_scores)))
    step = 0
    for _member in range(FACTS.ratio):
        for i in range(0, masked):
            numbers = (step + i, _block_of_queries(i, first, count, queries, BLOCK_M))
            total = _add_to_keys(total, own, buffers, barriers, numbers, queries, True, FACTS)
        for i in range(masked, count):
            total = _add_to_keys(total, own, buffers, barriers, (step + i, 0), queries, False, FACTS)
        step += count
    # Where the values lie, which the other group does not read.
    vs.index(0).reshape((ROWS, BLOCK_D)).store((total * number.to(gl.float32)).to(ks.dtype))
    fence_async_shared()
    store(result, [batch, head, row, 0], vs.index(0))
    tma.store_wait(pendings=0)


@libentry()
@gluon.jit(do_not_specialize=["heads", "batch_heads", "group", "blocks", "queries", "keys", "diagonal"])
def attend_to_keys_warp_specialized(
    query,
    key,
    value,
    grad_out,
    sums,
    bias,
    grad_key,
    grad_value,
    heads,
    batch_heads,
    group,
    blocks,
    queries,
    keys,
    diagonal,
    scale: tl.float64,
    FACTS: gl.constexpr,
    APART: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `backward.attend_to_keys`, of operands that tensor descriptors tell of, without packed sequences.

    `sums` are what the launch for queries has left there; `heads` are those of the key. Two groups of warps that are
    APART have one the gradient of values and one that of keys of the same rows, for heads and values of one size in
    powers of two, without a bias. Where heads of queries that share keys are SPLIT, a program has one of them, `heads`
    are those of the query, and what each adds is left in float32.
    """
    SETS: gl.constexpr = 1 if APART else GROUPS
    ks = gl.allocate_shared_memory(key.dtype, [SETS] + key.block_shape, key.layout)
    vs = gl.allocate_shared_memory(value.dtype, [SETS] + value.block_shape, value.layout)
    qs = gl.allocate_shared_memory(query.dtype, [STAGES] + query.block_shape, query.layout)
    gs = gl.allocate_shared_memory(grad_out.dtype, [STAGES] + grad_out.block_shape, grad_out.layout)
    logarithms = gl.allocate_shared_memory(sums.dtype, [STAGES] + sums.block_shape, sums.layout)
    deltas = gl.allocate_shared_memory(sums.dtype, [STAGES] + sums.block_shape, sums.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [SETS, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [SETS, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SETS):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(g_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    biases, shared, shared_ready, shared_free = None, None, None, None
    if bias is not None:
        biases = gl.allocate_shared_memory(bias.dtype, [STAGES * SETS] + bias.block_shape, bias.layout)
    if APART:
        # A thread's eight columns lie apart from those of rows that are written with it.
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        shared = gl.allocate_shared_memory(gl.float32, [2, ROWS, FACTS.block_m], swizzled)
        shared_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        shared_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(shared_ready.index(i), count=1)
            mbarrier.init(shared_free.index(i), count=1)
    operands = query, key, value, grad_out, sums, bias
    buffers = ks, vs, qs, gs, logarithms, deltas, biases, shared
    barriers = k_ready, v_ready, q_ready, g_ready, free, shared_ready, shared_free
    results = grad_key, grad_value
    sizes = heads, batch_heads, group, blocks, queries, keys, diagonal
    wait_for_previous_launch()
    if APART:
        gl.warp_specialize(
            [
                (_for_values_alone, (grad_value, buffers, barriers, sizes, scale, FACTS)),
                (_for_keys_alone, (grad_key, buffers, barriers, sizes, scale, FACTS)),
                (_copy_queries, (operands, buffers, barriers, sizes, FACTS, SPLIT)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_for_keys, (results, buffers, barriers, sizes, scale, FACTS, 0, SPLIT)),
                (_for_keys, (results, buffers, barriers, sizes, scale, FACTS, 1, SPLIT)),
                (_copy_queries, (operands, buffers, barriers, sizes, FACTS, SPLIT)),
            ],
            [4, 1],
            [240, 24],
        )


@libentry()
@triton.jit(do_not_specialize=["keys", "heads"])
def _add_heads(
    grad,
    parts,
    strides,
    heads,
    keys,
    SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The gradient of keys or of values from what each of the heads of queries that share them adds, in their order."""
    wait_for_previous_launch()
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < keys)[:, None] & (columns < SIZE)[None, :]
    pointers = parts + (head * RATIO * keys + rows[:, None]) * SIZE + columns[None, :]
    total = tl.load(pointers, mask=mask, other=0.0)
    for member in tl.static_range(1, RATIO):
        total += tl.load(pointers + member * keys * SIZE, mask=mask, other=0.0)
    pointers = grad + head // heads * strides[0] + head % heads * strides[1] + rows[:, None] * strides[2].to(tl.int64)
    tl.store(pointers + columns[None, :], total.to(grad.dtype.element_ty), mask=mask)


def takes(problem: Problem, grad_out: torch.Tensor, grads: tuple[torch.Tensor, ...]) -> bool:
    """Whether these are the kernels for a problem, on a device that has what they need."""
    sizes = block_sizes(problem)
    return take(problem, (problem.query, problem.key, problem.value, grad_out, *grads)) and (
        problem.bias is None or max(sizes) in table.WARP_SPECIALIZED_BACKWARD_WITH_BIAS
    )


def _of_sums(sums: torch.Tensor, queries: int, rows: int) -> TensorDescriptor:
    """Of blocks of one number for each of so many rows."""
    layout = gl.NVMMASharedLayout(0, 32, 4)
    return TensorDescriptor(sums, [*sums.shape[:3], queries], list(sums.stride()), [1, 1, 1, rows], layout)


def _group_of_keys(problem: Problem) -> int:
    """How many heads of keys are begun together: of causal attention as many as share a cache with their queries."""
    if not problem.causal:
        return 1
    size = problem.queries * (problem.query.shape[3] + problem.value.shape[3]) * problem.query.dtype.itemsize
    return max(1, table.CACHED // (size * problem.ratio))


def _splits_heads(problem: Problem, programs: int) -> bool:
    """Whether a program has one head of queries, not all that share keys: so few programs leave half a device idle."""
    few = 2 * programs <= devices.multiprocessors(problem.query.device)
    return problem.ratio > 1 and few and not settings().invariant


def attention_backward(
    problem: Problem,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """As `backward.attention_backward`, of a problem that these kernels take."""
    block_d, block_v = block_sizes(problem)
    bias = problem.bias
    tiles = table.warp_specialized_backward(block_d, block_v, bias is not None)
    if tiles.key.apart:
        block_d = block_v = max(block_d, block_v)
    query, key, value = problem.query, problem.key, problem.value
    grad_query, grad_key, grad_value = grads
    batch, heads, queries, _ = query.shape
    # Rows of 16 bytes, as descriptors take them.
    sums = empty((batch, heads, 2, -(-queries // 4) * 4), torch.float32, query.device)
    numbers = {"queries": queries, "keys": problem.keys, "diagonal": problem.diagonal, "scale": problem.factor}
    tile = tiles.query
    BLOCK_M = GROUPS.value * ROWS.value
    blocks = -(-queries // BLOCK_M)
    facts = problem.facts(table.Tile(BLOCK_M, tile.block), grad_out, out, logsumexp, sums, *grads)
    attend_to_queries_warp_specialized[(blocks * batch * heads,)](
        descriptor(query, ROWS.value, block_d),
        descriptor(key, tile.block, block_d),
        descriptor(value, tile.block, block_v),
        descriptor(grad_out, ROWS.value, block_v),
        None if bias is None else bias_descriptor(bias, ROWS.value, tile.block),
        descriptor(grad_query, ROWS.value, block_d),
        *(out, logsumexp, sums),
        out_strides=out.stride(),
        logarithm_strides=problem.logarithm_strides(logsumexp),
        sum_strides=sums.stride(),
        heads=heads,
        batch_heads=batch * heads,
        group=problem.group,
        blocks=blocks,
        **numbers,
        FACTS=replace(facts, block_d=block_d, block_v=block_v),
        STAGES=tile.num_stages,
        V_STAGES=tile.value_stages or tile.num_stages,
        num_warps=4,
    )
    tile, shared, ratio = tiles.key, key.shape[1], problem.ratio
    BLOCK_N = ROWS.value if tile.apart else GROUPS.value * ROWS.value
    blocks = -(-problem.keys // BLOCK_N)
    facts = problem.facts(table.Tile(tile.block, BLOCK_N), grad_out, out, logsumexp, sums, *grads)
    split = not tile.apart and _splits_heads(problem, blocks * batch * shared)
    sizes = query.shape[3], value.shape[3]
    if split:
        results: Any = [empty((batch, heads, problem.keys, size), torch.float32, query.device) for size in sizes]
        shared = heads
    else:
        results = descriptor(grad_key, ROWS.value, block_d), descriptor(grad_value, ROWS.value, block_v)
    attend_to_keys_warp_specialized[(blocks * batch * shared,)](
        descriptor(query, tile.block, block_d),
        descriptor(key, ROWS.value, block_d),
        descriptor(value, ROWS.value, block_v),
        descriptor(grad_out, tile.block, block_v),
        _of_sums(sums, queries, tile.block),
        None if bias is None else bias_descriptor(bias, tile.block, ROWS.value),
        *results,
        heads=shared,
        batch_heads=batch * shared,
        group=_group_of_keys(problem) * (ratio if split else 1),
        blocks=blocks,
        **numbers,
        FACTS=replace(facts, block_d=block_d, block_v=block_v),
        APART=tile.apart,
        SPLIT=split,
        STAGES=tile.num_stages,
        num_warps=4,
    )
    if split:
        for grad, parts, size in zip((grad_key, grad_value), results, sizes, strict=True):
            columns = power_of_2(size)
            rows = 2048 // columns
            _add_heads[(-(-problem.keys // rows), batch * key.shape[1])](
                *(grad, parts, grad.stride(), key.shape[1], problem.keys),
                SIZE=size,
                RATIO=ratio,
                BLOCK_N=rows,
                BLOCK_D=columns,
            )
