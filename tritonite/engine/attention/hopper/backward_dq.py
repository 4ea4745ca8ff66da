"""The gradient of queries: a program has their rows, and takes blocks of keys and values from a ring."""

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

from tritonite.engine.attention.hopper.descriptors import LOG2E, ROWS, biased, copy_bias, thread_sums, wait_for_block
from tritonite.engine.attention.hopper.tiles import GROUPS, again, in_halves, matrix, products
from tritonite.engine.attention.place import place
from tritonite.engine.attention.scores import excess_of, exponentials, score_factor
from tritonite.engine.gemm.kernels.hopper import load, store
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@gluon.jit
def keys_of_tile(sizes, BLOCK_M: gl.constexpr, FACTS: gl.constexpr):
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
    first, batch, head, count, _cut = keys_of_tile(sizes, GROUPS * ROWS, FACTS)
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
    """The logarithms of the sums of rows; infinite where there is no row or it sees nothing."""
    found = gl.load(pointers, mask=exists, other=float("inf"))
    return gl.where(found == float("-inf"), float("inf"), found)


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
def _take_keys(totals, rows, buffers, barriers, factor, ends, numbers, MASKED: gl.constexpr):
    """Add a block of keys to the totals: the gradient of queries and, beside a bias, sums of probabilities by thread.

    `numbers` are those of the block, of its first key, and how many blocks are left
    after it. Its keys have come, and those of the next block are waited for.
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
    k, v = matrix(ks, stage), matrix(vs, again(v_stage, step))
    q, grad = matrix(qs, again(which, step)), matrix(gs, again(which, step))
    scores = products(q, k, of_scores)
    wait_for_block(vs, v_ready, step, True)
    grads = products(grad, v, of_scores)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    scores = biased(scores, biases, step, which, factor, STAGES, False)
    if biases is None:
        scores = scores * factor
    probabilities = exponentials(scores, logarithms[:, None], False, biases is not None)
    # Here, because the assembler does not move what comes after it before the exponentials.
    wait_for_block(ks, k_ready, step + 1, left > 0)
    grads = warpgroup_mma_wait(0, deps=(grads,))
    mbarrier.arrive(v_free.index(v_stage))
    if MASKED:
        columns = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, of_scores))
        exists = columns[None, :] < ends[:, None]
    if biases is not None:
        if MASKED:
            probabilities = gl.where(exists, probabilities, 0.0)
        sums = totals[1] + thread_sums(probabilities)
    grad_scores = probabilities * (grads - delta[:, None])
    if MASKED:
        grad_scores = gl.where(exists, grad_scores, 0.0)
    halves = in_halves(grad_scores, ks.dtype, totals[0])
    total = warpgroup_mma(halves, k, totals[0], is_async=True)
    total, halves = warpgroup_mma_wait(0, deps=(total, halves))
    mbarrier.arrive(k_free.index(stage))
    # Triton 3.6 takes no None in a result.
    if biases is None:
        return (total,)
    else:
        return total, sums


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
    row, batch, head, count, cut = keys_of_tile(sizes, GROUPS * ROWS, FACTS)
    row += WHICH * ROWS
    rows = row + gl.arange(0, ROWS, of_rows)
    exists = rows < queries
    factor = score_factor(number, FACTS.nats)
    ends = gl.full((ROWS,), 0, gl.int32, of_rows) + keys
    if FACTS.causal:
        ends = gl.minimum(ends, rows + (diagonal + 1))
    far = batch.to(gl.int64)
    place_of_head = far * logarithm_strides[0] + head.to(gl.int64) * logarithm_strides[1]
    logarithms = _logarithms(logsumexp + place_of_head + rows.to(FACTS.index) * logarithm_strides[2], exists)
    out += far * out_strides[0] + head.to(gl.int64) * out_strides[1]
    q, grad = matrix(qs, WHICH), matrix(gs, WHICH)
    mbarrier.wait(g_ready.index(WHICH), 0)
    delta = gl.convert_layout(_row_products(grad, out, out_strides[2], row, queries, FACTS), of_rows)
    sums += far * sum_strides[0] + head.to(gl.int64) * sum_strides[1]
    if not FACTS.nats:
        logarithms = logarithms * LOG2E
    gl.store(sums + rows, logarithms, mask=exists)
    gl.store(sums + sum_strides[2] + rows, delta, mask=exists)
    total = gl.zeros((ROWS, BLOCK_D), gl.float32, of_result)
    mbarrier.wait(q_ready.index(WHICH), 0)
    wait_for_block(ks, k_ready, 0, True)
    own = (WHICH, logarithms, delta)
    totals = (total,)
    if biases is not None:
        totals = total, thread_sums(gl.zeros((ROWS, BLOCK_N), gl.float32, of_scores))
    for i in range(0, cut):
        numbers = (i, (count - 1 - i) * BLOCK_N, count - 1 - i)
        totals = _take_keys(totals, own, buffers, barriers, factor, ends, numbers, True)
    for i in range(cut, count):
        numbers = (i, (count - 1 - i) * BLOCK_N, count - 1 - i)
        totals = _take_keys(totals, own, buffers, barriers, factor, ends, numbers, False)
    total = totals[0]
    if biases is not None:
        excess = excess_of(gl.convert_layout(gl.sum(totals[1], 1), of_rows), logarithms, False)
        gl.store(sums + 2 * sum_strides[2] + rows, excess, mask=exists)
        total = total * gl.convert_layout(gl.exp2(-excess), gl.SliceLayout(1, of_result))[:, None]
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
    the sums over a value's elements of the result and its gradient. Beside a bias the logarithms are in nats, and their
    excess is the third of three.
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
