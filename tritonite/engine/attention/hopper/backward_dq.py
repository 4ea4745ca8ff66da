"""The warp-specialised backward_dq kernel: programs have blocks of queries, and rings of keys and values."""

from dataclasses import dataclass

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
    new_bias_blocks,
    scale_and_add_bias,
    thread_sums,
    wait_for_block,
)
from tritonite.engine.attention.hopper.tiles import GROUPS, as_operand, matrix, opaque_index, start_product
from tritonite.engine.attention.problem import AttentionMeta
from tritonite.engine.attention.prologue import Tensors, TileSizes, program_tile
from tritonite.engine.attention.scores import exponentials, logsumexp_excess, score_factor
from tritonite.engine.gemm.kernels.hopper import load, store
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared_memory import init_barriers, new_barriers, new_blocks
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class DqMeta(AttentionMeta):
    """Compile-time facts of the warp-specialised backward_dq kernel: blocks of keys and of values in shared memory."""

    stages: int
    value_stages: int


@gluon.jit
def query_tile(block, extent, BLOCK_M: gl.constexpr, META: gl.constexpr):
    """Return (first query, blocks of keys, how many of the first ones need a mask) of a block of queries.

    Blocks of keys are taken from the last to the first, and there is at least one.
    """
    BLOCK_N: gl.constexpr = META.block_n
    end, whole = extent.keys, extent.keys // BLOCK_N
    if META.causal:
        first = block * BLOCK_M + extent.diagonal + 1
        end = gl.minimum(extent.keys, gl.maximum(first + BLOCK_M - 1, 1))
        whole = gl.minimum(whole, gl.maximum(first, 0) // BLOCK_N)
    count = gl.cdiv(end, BLOCK_N)
    return block * BLOCK_M, count, count - gl.minimum(whole, count - 1)


@gluon.jit
def _locate_tile(sizes, META: gl.constexpr):
    """Return (first query, batch, head, blocks of keys, how many of the first ones need a mask) of a program."""
    block, batch, head = program_tile(gl.program_id(0), sizes.blocks, sizes.heads, sizes.batch_heads, sizes.group)
    first, count, masked = query_tile(block, sizes, GROUPS * ROWS, META)
    return first, batch.to(gl.int32), head.to(gl.int32), count, masked


@gluon.jit
def _produce(operands, buffers, barriers, sizes, META: gl.constexpr):
    """Run the producer warp: load queries and the gradient of out once, and keys, values and bias through rings."""
    STAGES: gl.constexpr = buffers.k.shape[0]
    V_STAGES: gl.constexpr = buffers.v.shape[0]
    BLOCK_N: gl.constexpr = META.block_n
    biases = buffers.bias
    BIAS_BYTES: gl.constexpr = 0 if biases is None else biases.shape[0] // STAGES * biases.shape[3] * BLOCK_N * 2
    first, batch, head, count, _masked = _locate_tile(sizes, META)
    kv_head = head // META.ratio
    for step in range(count):
        stage, phase = step % STAGES, 1 - step // STAGES % 2
        row = (count - 1 - step) * BLOCK_N
        if step == 0:
            for i in gl.static_range(GROUPS):
                mbarrier.expect(barriers.q_ready.index(i), ROWS * META.block_d * 2)
                load(operands.query, [batch, head, first + i * ROWS, 0], barriers.q_ready.index(i), buffers.q.index(i))
        mbarrier.wait(barriers.k_free.index(stage), phase)
        mbarrier.expect(barriers.k_ready.index(stage), BLOCK_N * META.block_d * 2 + BIAS_BYTES)
        load(operands.key, [batch, kv_head, row, 0], barriers.k_ready.index(stage), buffers.k.index(stage))
        if operands.bias is not None:
            corner = batch, head, first, row
            copy_bias(operands.bias, biases, corner, barriers.k_ready.index(stage), stage, STAGES, False)
        if step == 0:
            for i in gl.static_range(GROUPS):
                mbarrier.expect(barriers.grad_ready.index(i), ROWS * META.block_v * 2)
                load(
                    *(operands.grad_out, [batch, head, first + i * ROWS, 0]),
                    *(barriers.grad_ready.index(i), buffers.grad.index(i)),
                )
        stage, phase = step % V_STAGES, 1 - step // V_STAGES % 2
        mbarrier.wait(barriers.v_free.index(stage), phase)
        mbarrier.expect(barriers.v_ready.index(stage), BLOCK_N * META.block_v * 2)
        load(operands.value, [batch, kv_head, row, 0], barriers.v_ready.index(stage), buffers.v.index(stage))


@gluon.jit
def _load_logsumexp(pointers, exists):
    """Load logsumexp where a row exists; inf elsewhere and for rows that see no key."""
    found = gl.load(pointers, mask=exists, other=float("inf"))
    return gl.where(found == float("-inf"), float("inf"), found)


@gluon.jit
def _row_delta(grad, out, stride, first, queries, META: gl.constexpr):
    """Return delta, each row's sum of out * grad_out, for rows from `first`."""
    BLOCK_V: gl.constexpr = META.block_v
    THREADS: gl.constexpr = BLOCK_V // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_V, gl.SliceLayout(0, layout))
    pointers = out + (rows.to(META.index) * stride)[:, None] + columns[None, :]
    exists = (rows < queries)[:, None] & (columns < META.value_size)[None, :]
    result = gl.load(pointers, mask=exists, other=0.0)
    return gl.sum(grad.load(layout).to(gl.float32) * result.to(gl.float32), 1)


@gluon.jit
def _add_key_block(state, own, buffers, barriers, factor, ends, numbers, MASKED: gl.constexpr):
    """Return (dq,) after a block of keys, or with a bias (dq, row sums of probabilities by thread).

    `own` is (consumer group, logsumexp, delta), `numbers` (step, first key, blocks that follow). The block's keys have
    arrived, and the next block's are waited for.
    """
    which, logsumexp, delta = own
    step, first, left = numbers
    STAGES: gl.constexpr = buffers.k.shape[0]
    V_STAGES: gl.constexpr = buffers.v.shape[0]
    BLOCK_N: gl.constexpr = buffers.k.shape[3]
    score_layout: gl.constexpr = logsumexp.type.layout.parent
    stage, v_stage = step % STAGES, step % V_STAGES
    k, v = matrix(buffers.k, stage), matrix(buffers.v, opaque_index(v_stage, step))
    q, grad = matrix(buffers.q, opaque_index(which, step)), matrix(buffers.grad, opaque_index(which, step))
    scores = start_product(q, k, score_layout)
    wait_for_block(buffers.v, barriers.v_ready, step, True)
    dp = start_product(grad, v, score_layout)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    scores = scale_and_add_bias(scores, buffers.bias, step, which, factor, STAGES, False)
    if buffers.bias is None:
        scores = scores * factor
    p = exponentials(scores, logsumexp[:, None], False, buffers.bias is not None)
    # The wait is here because ptxas does not move what follows it before the exponentials.
    wait_for_block(buffers.k, barriers.k_ready, step + 1, left > 0)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(barriers.v_free.index(v_stage))
    if MASKED:
        columns = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_layout))
        visible = columns[None, :] < ends[:, None]
    if buffers.bias is not None:
        if MASKED:
            p = gl.where(visible, p, 0.0)
        sums = state[1] + thread_sums(p)
    ds = p * (dp - delta[:, None])
    if MASKED:
        ds = gl.where(visible, ds, 0.0)
    operand = as_operand(ds, buffers.k.dtype, state[0])
    dq = warpgroup_mma(operand, k, state[0], is_async=True)
    dq, operand = warpgroup_mma_wait(0, deps=(dq, operand))
    mbarrier.arrive(barriers.k_free.index(stage))
    # Triton 3.6 takes no None in a result.
    if buffers.bias is None:
        return (dq,)
    else:
        return dq, sums


@gluon.jit
def _consume(results, buffers, barriers, sizes, scale, META: gl.constexpr, WHICH: gl.constexpr):
    """Run consumer group WHICH: compute dq of its 64 queries, and store their row_stats.

    `results` are the descriptor of grad_query, and out, logsumexp and row_stats with their strides.
    """
    BLOCK_N: gl.constexpr = META.block_n
    BLOCK_D: gl.constexpr = META.block_d
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    row, batch, head, count, masked = _locate_tile(sizes, META)
    row += WHICH * ROWS
    rows = row + gl.arange(0, ROWS, row_layout)
    exists = rows < sizes.queries
    factor = score_factor(scale, META.nats)
    ends = gl.full((ROWS,), 0, gl.int32, row_layout) + sizes.keys
    if META.causal:
        ends = gl.minimum(ends, rows + (sizes.diagonal + 1))
    grad_query, tensors, strides = results
    batch64, head64 = batch.to(gl.int64), head.to(gl.int64)
    offset = batch64 * strides.logsumexp.batch + head64 * strides.logsumexp.head
    pointers = tensors.logsumexp + offset + rows.to(META.index) * strides.logsumexp.row
    logsumexp = _load_logsumexp(pointers, exists)
    out = tensors.out + (batch64 * strides.out.batch + head64 * strides.out.head)
    q, grad = matrix(buffers.q, WHICH), matrix(buffers.grad, WHICH)
    mbarrier.wait(barriers.grad_ready.index(WHICH), 0)
    delta = gl.convert_layout(_row_delta(grad, out, strides.out.row, row, sizes.queries, META), row_layout)
    row_stats = tensors.row_stats + (batch64 * strides.row_stats.batch + head64 * strides.row_stats.head)
    if not META.nats:
        logsumexp = logsumexp * LOG2E
    gl.store(row_stats + rows, logsumexp, mask=exists)
    gl.store(row_stats + strides.row_stats.row + rows, delta, mask=exists)
    dq = gl.zeros((ROWS, BLOCK_D), gl.float32, dq_layout)
    mbarrier.wait(barriers.q_ready.index(WHICH), 0)
    wait_for_block(buffers.k, barriers.k_ready, 0, True)
    own = (WHICH, logsumexp, delta)
    state = (dq,)
    if buffers.bias is not None:
        state = dq, thread_sums(gl.zeros((ROWS, BLOCK_N), gl.float32, score_layout))
    for i in range(0, masked):
        numbers = (i, (count - 1 - i) * BLOCK_N, count - 1 - i)
        state = _add_key_block(state, own, buffers, barriers, factor, ends, numbers, True)
    for i in range(masked, count):
        numbers = (i, (count - 1 - i) * BLOCK_N, count - 1 - i)
        state = _add_key_block(state, own, buffers, barriers, factor, ends, numbers, False)
    dq = state[0]
    if buffers.bias is not None:
        excess = logsumexp_excess(gl.convert_layout(gl.sum(state[1], 1), row_layout), logsumexp, False)
        gl.store(row_stats + 2 * strides.row_stats.row + rows, excess, mask=exists)
        dq = dq * gl.convert_layout(gl.exp2(-excess), gl.SliceLayout(1, dq_layout))[:, None]
    # The result leaves through the shared memory of the queries.
    q.store((dq * scale.to(gl.float32)).to(buffers.q.dtype))
    fence_async_shared()
    store(grad_query, [batch, head, row, 0], buffers.q.index(WHICH))
    tma.store_wait(pendings=0)


@libentry()
@gluon.jit(do_not_specialize=TileSizes._fields)
def attend_backward_dq_warp_specialized(
    query,
    key,
    value,
    grad_out,
    bias,
    grad_query,
    tensors,
    strides,
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
    """Compute dq as `backward.attend_backward_dq` does, without packed sequences, dropout or a gradient of the bias.

    Operands and grad_query are descriptors; `tensors` and `strides` are those of out, logsumexp and row_stats.
    row_stats, (batch, heads, 2, queries), gets each row's logsumexp in base 2 and delta for backward_dkdv. With a bias
    it is (batch, heads, 3, queries): logsumexp in nats, delta, and excess.
    """
    STAGES: gl.constexpr = META.stages
    V_STAGES: gl.constexpr = META.value_stages
    buffers = Buffers(
        q=new_blocks(query, GROUPS),
        grad=new_blocks(grad_out, GROUPS),
        k=new_blocks(key, STAGES),
        v=new_blocks(value, V_STAGES),
        bias=new_bias_blocks(bias, STAGES, GROUPS),
    )
    barriers = Barriers(
        q_ready=new_barriers(GROUPS),
        grad_ready=new_barriers(GROUPS),
        k_ready=new_barriers(STAGES),
        k_free=new_barriers(STAGES),
        v_ready=new_barriers(V_STAGES),
        v_free=new_barriers(V_STAGES),
    )
    init_barriers((barriers.q_ready, barriers.grad_ready), (1, 1))
    init_barriers((barriers.k_ready, barriers.k_free), (1, GROUPS))
    init_barriers((barriers.v_ready, barriers.v_free), (1, GROUPS))
    operands = Tensors(query, key, value, bias, grad_out)
    results = grad_query, tensors, strides
    sizes = TileSizes(heads, batch_heads, group, blocks, queries, keys, diagonal)
    wait_for_previous_launch()
    gl.warp_specialize(
        [
            (_consume, (results, buffers, barriers, sizes, scale, META, 0)),
            (_consume, (results, buffers, barriers, sizes, scale, META, 1)),
            (_produce, (operands, buffers, barriers, sizes, META)),
        ],
        [4, 1],
        [240, 24],
    )
