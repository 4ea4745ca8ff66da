"""The warp-specialised backward_dkdv kernels: programs have blocks of keys and values, and a ring of queries.

Where several query heads share a key head and programs are few, each query head has programs of its own, and
`add_heads` adds up their float32 results in order.
"""

from dataclasses import dataclass

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

from tritonite.engine.attention.hopper.descriptors import (
    LOG2E,
    ROWS,
    Barriers,
    Buffers,
    copy_bias,
    scale_and_add_bias,
)
from tritonite.engine.attention.hopper.tiles import GROUPS, as_operand, matrix, opaque_index, start_product
from tritonite.engine.attention.problem import AttentionMeta
from tritonite.engine.attention.prologue import Tensors, TileSizes, program_tile
from tritonite.engine.attention.scores import probabilities_in_nats, score_factor
from tritonite.engine.gemm.kernels.hopper import load, store
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared_memory import init_barriers, new_barriers, new_blocks
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class DkdvMeta(AttentionMeta):
    """Compile-time facts of the warp-specialised backward_dkdv kernel.

    separate: both consumer groups have the same 64 keys, one computes dv and the other dk. Needs block_d == block_v and
        no bias.
    split: a program has one query head, and stores float32 partial results.
    stages: blocks of queries in shared memory.
    """

    separate: bool
    split: bool
    stages: int


@gluon.jit
def key_tile(block, blocks, extent, BLOCK_N: gl.constexpr, META: gl.constexpr):
    """Return (first key, first block of queries, blocks, how many need a mask) of one of `blocks` blocks of keys.

    A partial last block comes first, then the others in order. Masked are those up to the first block whose queries all
    see all keys. Programs of the first keys, which most queries see, start first.
    """
    BLOCK_M: gl.constexpr = META.block_m
    row = (blocks - 1 - block) * BLOCK_N
    count = gl.cdiv(extent.queries, BLOCK_M)
    partial = count - extent.queries // BLOCK_M
    first, masked = 0, partial
    if META.causal:
        first = gl.minimum(gl.maximum(row - extent.diagonal, 0) // BLOCK_M, count)
        whole = gl.minimum(gl.cdiv(gl.maximum(row + BLOCK_N - 1 - extent.diagonal, 0), BLOCK_M), count)
        masked = gl.minimum(whole - first + partial, count - first)
    return row, first, count - first, masked


@gluon.jit
def _locate_tile(sizes, BLOCK_N: gl.constexpr, META: gl.constexpr):
    """Return (first key, batch, head, first block of queries, blocks, how many need a mask) of a program."""
    block, batch, head = program_tile(gl.program_id(0), sizes.blocks, sizes.heads, sizes.batch_heads, sizes.group)
    row, first, count, masked = key_tile(block, sizes.blocks, sizes, BLOCK_N, META)
    return row, batch.to(gl.int32), head.to(gl.int32), first, count, masked


@gluon.jit
def query_block_start(i, first, count, queries, BLOCK_M: gl.constexpr):
    """Return the first query of the i-th of `count` blocks from block `first`, in the order of `key_tile`."""
    partial = gl.cdiv(queries, BLOCK_M) - queries // BLOCK_M
    return gl.where(i < partial, first + count - 1, first + i - partial) * BLOCK_M


@gluon.jit
def _produce(operands, buffers, barriers, sizes, META: gl.constexpr):
    """Run the producer warp: load keys and values once, and the queries of all heads that share them through a ring.

    With META.split only the program's own query head is loaded.
    """
    SETS: gl.constexpr = buffers.k.shape[0]
    STAGES: gl.constexpr = buffers.q.shape[0]
    BLOCK_M: gl.constexpr = META.block_m
    biases = buffers.bias
    BIAS_BYTES: gl.constexpr = 0 if biases is None else SETS * biases.shape[3] * ROWS * 2 + BLOCK_M * 4
    row, batch, own_head, first, count, _masked = _locate_tile(sizes, SETS * ROWS, META)
    kv_head = own_head // META.ratio if META.split else own_head
    for i in gl.static_range(SETS):
        mbarrier.expect(barriers.k_ready.index(i), ROWS * META.block_d * 2)
        load(operands.key, [batch, kv_head, row + i * ROWS, 0], barriers.k_ready.index(i), buffers.k.index(i))
    for i in gl.static_range(SETS):
        mbarrier.expect(barriers.v_ready.index(i), ROWS * META.block_v * 2)
        load(operands.value, [batch, kv_head, row + i * ROWS, 0], barriers.v_ready.index(i), buffers.v.index(i))
    step = 0
    for member in range(1 if META.split else META.ratio):
        head = own_head if META.split else kv_head * META.ratio + member
        for block in range(count):
            stage = step % STAGES
            begin = query_block_start(block, first, count, sizes.queries, BLOCK_M)
            mbarrier.wait(barriers.free.index(stage), 1 - step // STAGES % 2)
            ready = barriers.q_ready.index(stage)
            mbarrier.expect(ready, BLOCK_M * (META.block_d * 2 + 4) + BIAS_BYTES)
            load(operands.query, [batch, head, begin, 0], ready, buffers.q.index(stage))
            load(operands.row_stats, [batch, head, 0, begin], ready, buffers.logsumexp.index(stage))
            if operands.bias is not None:
                copy_bias(operands.bias, biases, (batch, head, begin, row), ready, stage, STAGES, True)
                load(operands.row_stats, [batch, head, 2, begin], ready, buffers.excess.index(stage))
            ready = barriers.grad_ready.index(stage)
            mbarrier.expect(ready, BLOCK_M * (META.block_v * 2 + 4))
            load(operands.grad_out, [batch, head, begin, 0], ready, buffers.grad.index(stage))
            load(operands.row_stats, [batch, head, 1, begin], ready, buffers.delta.index(stage))
            step += 1


@gluon.jit
def _visible(first, begins, queries, BLOCK_M: gl.constexpr, META: gl.constexpr):
    """Return the (keys, queries) mask of a block of queries from `first`; key i is seen from query begins[i] on."""
    columns = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, begins.type.layout.parent))
    visible = (columns < queries)[None, :]
    if META.causal:
        visible = visible & (columns[None, :] >= begins[:, None])
    return visible


@gluon.jit
def _add_query_block(
    gradients, own, buffers, barriers, factor, step, first, queries, MASKED: gl.constexpr, META: gl.constexpr
):
    """Return (dk, dv) after a block of queries from `first`; tiles of scores have a row for each key.

    `own` is (consumer group, the first query that sees each key).
    """
    dk, dv = gradients
    which, begins = own
    STAGES: gl.constexpr = buffers.q.shape[0]
    BLOCK_M: gl.constexpr = buffers.q.shape[3]
    score_layout: gl.constexpr = begins.type.layout.parent
    stage, phase = step % STAGES, step // STAGES % 2
    k, v = matrix(buffers.k, opaque_index(which, step)), matrix(buffers.v, opaque_index(which, step))
    q, grad = matrix(buffers.q, stage), matrix(buffers.grad, stage)
    mbarrier.wait(barriers.q_ready.index(stage), phase)
    scores = start_product(k, q, score_layout)
    mbarrier.wait(barriers.grad_ready.index(stage), phase)
    dp = start_product(v, grad, score_layout)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    scores = scale_and_add_bias(scores, buffers.bias, step, which, factor, STAGES, True)
    # One row of BLOCK_M, which broadcasts to all keys.
    logsumexp = matrix(buffers.logsumexp, stage).load(score_layout)
    if buffers.bias is None:
        p = gl.exp2(scores * factor - logsumexp)
    else:
        excess = matrix(buffers.excess, stage).load(score_layout)
        p = probabilities_in_nats(scores, logsumexp, excess, False)
    if MASKED:
        visible = _visible(first, begins, queries, BLOCK_M, META)
        p = gl.where(visible, p, 0.0)
    weights = as_operand(p, buffers.grad.dtype, dv)
    dv = warpgroup_mma(weights, grad, dv, is_async=True)
    delta = matrix(buffers.delta, stage).load(score_layout)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = p * (dp - delta)
    if MASKED:
        ds = gl.where(visible, ds, 0.0)
    operand = as_operand(ds, buffers.q.dtype, dk)
    dk = warpgroup_mma(operand, q, dk, is_async=True)
    dk, dv, weights, operand = warpgroup_mma_wait(0, deps=(dk, dv, weights, operand))
    mbarrier.arrive(barriers.free.index(stage))
    return dk, dv


@gluon.jit
def _store_partial(partial, tile, row, batch_head, keys, SIZE: gl.constexpr):
    """Store a query head's part of a gradient to `partial`, float32 (batch * query heads, keys, SIZE)."""
    ROWS_OF: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    rows = row + gl.arange(0, ROWS_OF, gl.SliceLayout(1, tile.type.layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, tile.type.layout))
    pointers = partial + (batch_head * keys + rows.to(gl.int64)[:, None]) * SIZE + columns[None, :]
    gl.store(pointers, tile, mask=(rows < keys)[:, None] & (columns < SIZE)[None, :])


@gluon.jit
def _consume(results, buffers, barriers, sizes, scale, META: gl.constexpr, WHICH: gl.constexpr):
    """Run consumer group WHICH: compute dk and dv of its 64 keys."""
    BLOCK_M: gl.constexpr = META.block_m
    BLOCK_D: gl.constexpr = META.block_d
    BLOCK_V: gl.constexpr = META.block_v
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    row, batch, head, first, count, masked = _locate_tile(sizes, GROUPS * ROWS, META)
    row += WHICH * ROWS
    begins = row - sizes.diagonal + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))
    factor = score_factor(scale, META.nats)
    dk = gl.zeros((ROWS, BLOCK_D), gl.float32, dk_layout)
    dv = gl.zeros((ROWS, BLOCK_V), gl.float32, dv_layout)
    mbarrier.wait(barriers.k_ready.index(WHICH), 0)
    mbarrier.wait(barriers.v_ready.index(WHICH), 0)
    own = (WHICH, begins)
    step = 0
    for _member in range(1 if META.split else META.ratio):
        for i in range(0, masked):
            number, start = step + i, query_block_start(i, first, count, sizes.queries, BLOCK_M)
            dk, dv = _add_query_block(
                (dk, dv), own, buffers, barriers, factor, number, start, sizes.queries, True, META
            )
        for i in range(masked, count):
            dk, dv = _add_query_block((dk, dv), own, buffers, barriers, factor, step + i, 0, sizes.queries, False, META)
        step += count
    dk = dk * scale.to(gl.float32)
    if META.split:
        batch_head = batch.to(gl.int64) * sizes.heads + head
        _store_partial(results.grad_key, dk, row, batch_head, sizes.keys, META.head_size)
        _store_partial(results.grad_value, dv, row, batch_head, sizes.keys, META.value_size)
    else:
        # Results leave through the shared memory of the keys and values.
        matrix(buffers.k, WHICH).store(dk.to(buffers.k.dtype))
        matrix(buffers.v, WHICH).store(dv.to(buffers.v.dtype))
        fence_async_shared()
        store(results.grad_key, [batch, head, row, 0], buffers.k.index(WHICH))
        store(results.grad_value, [batch, head, row, 0], buffers.v.index(WHICH))
        tma.store_wait(pendings=0)


@gluon.jit
def _add_to_one(
    grad,
    own,
    buffers,
    barriers,
    factor,
    step,
    first,
    queries,
    MASKED: gl.constexpr,
    META: gl.constexpr,
    WHICH: gl.constexpr,
):
    """Return dv, or with WHICH 1 dk, after a block of queries from `first`.

    The group that computes dv hands the block's probabilities to the other. `own` is (keys for dv or values for dk in
    shared memory, the first query that sees each key).
    """
    kept, begins = own
    STAGES: gl.constexpr = buffers.q.shape[0]
    P_STAGES: gl.constexpr = buffers.p.shape[0]
    BLOCK_M: gl.constexpr = buffers.q.shape[3]
    score_layout: gl.constexpr = begins.type.layout.parent
    stage, phase = step % STAGES, step // STAGES % 2
    if WHICH == 0:
        mbarrier.wait(barriers.q_ready.index(stage), phase)
        scores = start_product(kept, matrix(buffers.q, stage), score_layout)
        logsumexp = matrix(buffers.logsumexp, stage).load(score_layout)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        p = gl.exp2(scores * factor - logsumexp)
        if MASKED:
            p = gl.where(_visible(first, begins, queries, BLOCK_M, META), p, 0.0)
        operand = as_operand(p, buffers.grad.dtype, grad)
        mbarrier.wait(barriers.grad_ready.index(stage), phase)
        grad = warpgroup_mma(operand, matrix(buffers.grad, stage), grad, is_async=True)
        mbarrier.wait(barriers.p_free.index(step % P_STAGES), 1 - step // P_STAGES % 2)
        buffers.p.index(step % P_STAGES).store(p)
        mbarrier.arrive(barriers.p_ready.index(step % P_STAGES))
    else:
        mbarrier.wait(barriers.grad_ready.index(stage), phase)
        dp = start_product(kept, matrix(buffers.grad, stage), score_layout)
        delta = matrix(buffers.delta, stage).load(score_layout)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.wait(barriers.p_ready.index(step % P_STAGES), step // P_STAGES % 2)
        ds = buffers.p.index(step % P_STAGES).load(score_layout) * (dp - delta)
        mbarrier.arrive(barriers.p_free.index(step % P_STAGES))
        if MASKED:
            ds = gl.where(_visible(first, begins, queries, BLOCK_M, META), ds, 0.0)
        operand = as_operand(ds, buffers.q.dtype, grad)
        mbarrier.wait(barriers.q_ready.index(stage), phase)
        grad = warpgroup_mma(operand, matrix(buffers.q, stage), grad, is_async=True)
    grad, operand = warpgroup_mma_wait(0, deps=(grad, operand))
    mbarrier.arrive(barriers.free.index(stage))
    return grad


@gluon.jit
def _consume_for_one(result, buffers, barriers, sizes, scale, META: gl.constexpr, WHICH: gl.constexpr):
    """Run consumer group WHICH of separate ones: compute dv (0) or dk (1) of a program's 64 keys."""
    BLOCK_M: gl.constexpr = META.block_m
    BLOCK_D: gl.constexpr = META.block_d
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row, batch, head, first, count, masked = _locate_tile(sizes, ROWS, META)
    factor = (scale * LOG2E).to(gl.float32)
    grad = gl.zeros((ROWS, BLOCK_D), gl.float32, grad_layout)
    if WHICH == 0:
        kept, ready = buffers.k, barriers.k_ready
    else:
        kept, ready = buffers.v, barriers.v_ready
    mbarrier.wait(ready.index(0), 0)
    own = (matrix(kept, 0), row - sizes.diagonal + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout)))
    step = 0
    for _member in range(META.ratio):
        for i in range(0, masked):
            number, start = step + i, query_block_start(i, first, count, sizes.queries, BLOCK_M)
            grad = _add_to_one(grad, own, buffers, barriers, factor, number, start, sizes.queries, True, META, WHICH)
        for i in range(masked, count):
            grad = _add_to_one(grad, own, buffers, barriers, factor, step + i, 0, sizes.queries, False, META, WHICH)
        step += count
    if WHICH == 1:
        grad = grad * scale.to(gl.float32)
    # The result leaves through the shared memory of the keys or values, which the other group does not read.
    kept.index(0).reshape((ROWS, BLOCK_D)).store(grad.to(kept.dtype))
    fence_async_shared()
    store(result, [batch, head, row, 0], kept.index(0))
    tma.store_wait(pendings=0)


@libentry()
@gluon.jit(do_not_specialize=TileSizes._fields)
def attend_backward_dkdv_warp_specialized(
    query,
    key,
    value,
    grad_out,
    row_stats,
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
    META: gl.constexpr,
):
    """Compute dk and dv as `backward.attend_backward_dkdv` does, without packed sequences or dropout.

    All tensors are descriptors. `row_stats` is what attend_backward_dq_warp_specialized has stored. `heads` counts key
    heads, or query heads with META.split, where grad_key and grad_value are pointers to float32 partial results.
    """
    SETS: gl.constexpr = 1 if META.separate else GROUPS
    STAGES: gl.constexpr = META.stages
    ks, vs = new_blocks(key, SETS), new_blocks(value, SETS)
    qs, grads = new_blocks(query, STAGES), new_blocks(grad_out, STAGES)
    logsumexps, deltas = new_blocks(row_stats, STAGES), new_blocks(row_stats, STAGES)
    k_ready, v_ready, q_ready = new_barriers(SETS), new_barriers(SETS), new_barriers(STAGES)
    grad_ready, free = new_barriers(STAGES), new_barriers(STAGES)
    init_barriers((k_ready, v_ready), (1, 1))
    init_barriers((q_ready, grad_ready, free), (1, 1, GROUPS))
    biases, excesses, ps, p_ready, p_free = None, None, None, None, None
    if bias is not None:
        biases, excesses = new_blocks(bias, STAGES * SETS), new_blocks(row_stats, STAGES)
    if META.separate:
        # Swizzled so that a thread's eight columns miss the banks of the rows that are written with it.
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        ps = gl.allocate_shared_memory(gl.float32, [2, ROWS, META.block_m], swizzled)
        p_ready, p_free = new_barriers(2), new_barriers(2)
        init_barriers((p_ready, p_free), (1, 1))
    operands = Tensors(query, key, value, bias, grad_out, row_stats=row_stats)
    buffers = Buffers(qs, ks, vs, grads, biases, logsumexps, deltas, excesses, ps)
    barriers = Barriers(q_ready, k_ready, v_ready, grad_ready=grad_ready, free=free, p_ready=p_ready, p_free=p_free)
    results = Tensors(grad_key=grad_key, grad_value=grad_value)
    sizes = TileSizes(heads, batch_heads, group, blocks, queries, keys, diagonal)
    wait_for_previous_launch()
    if META.separate:
        gl.warp_specialize(
            [
                (_consume_for_one, (grad_value, buffers, barriers, sizes, scale, META, 0)),
                (_consume_for_one, (grad_key, buffers, barriers, sizes, scale, META, 1)),
                (_produce, (operands, buffers, barriers, sizes, META)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (results, buffers, barriers, sizes, scale, META, 0)),
                (_consume, (results, buffers, barriers, sizes, scale, META, 1)),
                (_produce, (operands, buffers, barriers, sizes, META)),
            ],
            [4, 1],
            [240, 24],
        )


@libentry()
@triton.jit(do_not_specialize=["keys", "heads"])
def add_heads(
    grad,
    partial,
    strides,
    heads,
    keys,
    SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up, in order, the gradients of keys or values from the RATIO query heads that share each key head."""
    wait_for_previous_launch()
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < keys)[:, None] & (columns < SIZE)[None, :]
    pointers = partial + (head * RATIO * keys + rows[:, None]) * SIZE + columns[None, :]
    total = tl.load(pointers, mask=mask, other=0.0)
    for member in tl.static_range(1, RATIO):
        total += tl.load(pointers + member * keys * SIZE, mask=mask, other=0.0)
    pointers = grad + head // heads * strides[0] + head % heads * strides[1] + rows[:, None] * strides[2].to(tl.int64)
    tl.store(pointers + columns[None, :], total.to(grad.dtype.element_ty), mask=mask)
