"""The gradients of keys and values: a program has their rows, and takes blocks of queries from a ring.

Where keys that heads of queries share are few, every head has programs of its own, and what they find is added up after
them, in order.
"""

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

from tritonite.engine.attention.hopper.descriptors import LOG2E, ROWS, biased, copy_bias
from tritonite.engine.attention.hopper.tiles import GROUPS, again, in_halves, matrix, products
from tritonite.engine.attention.place import place
from tritonite.engine.attention.scores import probabilities_of, score_factor
from tritonite.engine.gemm.kernels.hopper import load, store
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@gluon.jit
def queries_of_tile(sizes, BLOCK_N: gl.constexpr, FACTS: gl.constexpr):
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
def block_of_queries(i, first, count, queries, BLOCK_M: gl.constexpr):
    """The first query of the block that is taken as number i of `count` from block `first` on."""
    partial = gl.cdiv(queries, BLOCK_M) - queries // BLOCK_M
    return gl.where(i < partial, first + count - 1, first + i - partial) * BLOCK_M


@gluon.jit
def _copy_queries(operands, buffers, barriers, sizes, FACTS: gl.constexpr, SPLIT: gl.constexpr):
    """What one warp does for the gradients of keys and values: copy these once, and all of queries through a ring.

    Where heads that share keys are SPLIT, those of one alone.
    """
    query, key, value, grad_out, sums, bias = operands
    ks, vs, qs, gs, logarithms, deltas, biases, _shared, excesses = buffers
    k_ready, v_ready, q_ready, g_ready, free, _, _ = barriers
    _, _, _, _, queries, _, _ = sizes
    SETS: gl.constexpr = ks.shape[0]
    STAGES: gl.constexpr = qs.shape[0]
    BLOCK_M: gl.constexpr = FACTS.block_m
    BIAS_BYTES: gl.constexpr = 0 if biases is None else SETS * biases.shape[3] * ROWS * 2 + BLOCK_M * 4
    row, batch, own_head, first, count, _masked = queries_of_tile(sizes, SETS * ROWS, FACTS)
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
            begin = block_of_queries(block, first, count, queries, BLOCK_M)
            mbarrier.wait(free.index(stage), 1 - step // STAGES % 2)
            here = q_ready.index(stage)
            mbarrier.expect(here, BLOCK_M * (FACTS.block_d * 2 + 4) + BIAS_BYTES)
            load(query, [batch, head, begin, 0], here, qs.index(stage))
            load(sums, [batch, head, 0, begin], here, logarithms.index(stage))
            if bias is not None:
                copy_bias(bias, biases, (batch, head, begin, row), here, stage, STAGES, True)
                load(sums, [batch, head, 2, begin], here, excesses.index(stage))
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
    ks, vs, qs, gs, logarithms, deltas, biases, _, excesses = buffers
    _, _, q_ready, g_ready, free, _, _ = barriers
    step, first = numbers
    STAGES: gl.constexpr = qs.shape[0]
    BLOCK_M: gl.constexpr = qs.shape[3]
    of_scores: gl.constexpr = begins.type.layout.parent
    stage, phase = step % STAGES, step // STAGES % 2
    k, v = matrix(ks, again(which, step)), matrix(vs, again(which, step))
    q, grad = matrix(qs, stage), matrix(gs, stage)
    mbarrier.wait(q_ready.index(stage), phase)
    scores = products(k, q, of_scores)
    mbarrier.wait(g_ready.index(stage), phase)
    grads = products(v, grad, of_scores)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    scores = biased(scores, biases, step, which, factor, STAGES, True)
    # One row, which all rows of scores take theirs from.
    logarithm = matrix(logarithms, stage).load(of_scores)
    if biases is None:
        probabilities = gl.exp2(scores * factor - logarithm)
    else:
        excess = matrix(excesses, stage).load(of_scores)
        probabilities = probabilities_of(scores, logarithm, excess, False)
    if MASKED:
        exists = _are_seen(first, begins, queries, BLOCK_M, FACTS)
        probabilities = gl.where(exists, probabilities, 0.0)
    weights = in_halves(probabilities, gs.dtype, of_value)
    of_value = warpgroup_mma(weights, grad, of_value, is_async=True)
    delta = matrix(deltas, stage).load(of_scores)
    grads = warpgroup_mma_wait(1, deps=(grads,))
    grad_scores = probabilities * (grads - delta)
    if MASKED:
        grad_scores = gl.where(exists, grad_scores, 0.0)
    halves = in_halves(grad_scores, qs.dtype, of_key)
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
    ks, vs, _, _, _, _, _, _, _ = buffers
    k_ready, v_ready, _, _, _, _, _ = barriers
    heads, _, _, _, queries, keys, diagonal = sizes
    BLOCK_M: gl.constexpr = FACTS.block_m
    BLOCK_D: gl.constexpr = FACTS.block_d
    BLOCK_V: gl.constexpr = FACTS.block_v
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    of_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    row, batch, head, first, count, masked = queries_of_tile(sizes, GROUPS * ROWS, FACTS)
    row += WHICH * ROWS
    begins = row - diagonal + gl.arange(0, ROWS, gl.SliceLayout(1, of_scores))
    factor = score_factor(number, FACTS.nats)
    of_key = gl.zeros((ROWS, BLOCK_D), gl.float32, of_keys)
    of_value = gl.zeros((ROWS, BLOCK_V), gl.float32, of_values)
    mbarrier.wait(k_ready.index(WHICH), 0)
    mbarrier.wait(v_ready.index(WHICH), 0)
    own = (WHICH, begins)
    step = 0
    for _member in range(1 if SPLIT else FACTS.ratio):
        for i in range(0, masked):
            numbers = (step + i, block_of_queries(i, first, count, queries, BLOCK_M))
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
        matrix(ks, WHICH).store(of_key.to(ks.dtype))
        matrix(vs, WHICH).store(of_value.to(vs.dtype))
        fence_async_shared()
        store(grad_key, [batch, head, row, 0], ks.index(WHICH))
        store(grad_value, [batch, head, row, 0], vs.index(WHICH))
        tma.store_wait(pendings=0)


@gluon.jit
def _add_to_values(total, rows, buffers, barriers, factor, numbers, queries, MASKED: gl.constexpr, FACTS: gl.constexpr):
    """The gradient of values and what a block of queries adds to it, whose probabilities another group gets."""
    k, begins = rows
    _, _, qs, gs, logarithms, _, _, shared, _ = buffers
    _, _, q_ready, g_ready, free, shared_ready, shared_free = barriers
    step, first = numbers
    STAGES: gl.constexpr = qs.shape[0]
    BUFFERS: gl.constexpr = shared.shape[0]
    BLOCK_M: gl.constexpr = qs.shape[3]
    of_scores: gl.constexpr = begins.type.layout.parent
    stage, phase = step % STAGES, step // STAGES % 2
    mbarrier.wait(q_ready.index(stage), phase)
    scores = products(k, matrix(qs, stage), of_scores)
    logarithm = matrix(logarithms, stage).load(of_scores)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    probabilities = gl.exp2(scores * factor - logarithm)
    if MASKED:
        probabilities = gl.where(_are_seen(first, begins, queries, BLOCK_M, FACTS), probabilities, 0.0)
    weights = in_halves(probabilities, gs.dtype, total)
    mbarrier.wait(g_ready.index(stage), phase)
    total = warpgroup_mma(weights, matrix(gs, stage), total, is_async=True)
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
    _, _, qs, gs, _, deltas, _, shared, _ = buffers
    _, _, q_ready, g_ready, free, shared_ready, shared_free = barriers
    step, first = numbers
    STAGES: gl.constexpr = qs.shape[0]
    BUFFERS: gl.constexpr = shared.shape[0]
    BLOCK_M: gl.constexpr = qs.shape[3]
    of_scores: gl.constexpr = begins.type.layout.parent
    stage, phase = step % STAGES, step // STAGES % 2
    mbarrier.wait(g_ready.index(stage), phase)
    grads = products(v, matrix(gs, stage), of_scores)
    delta = matrix(deltas, stage).load(of_scores)
    grads = warpgroup_mma_wait(0, deps=(grads,))
    mbarrier.wait(shared_ready.index(step % BUFFERS), step // BUFFERS % 2)
    grad_scores = shared.index(step % BUFFERS).load(of_scores) * (grads - delta)
    mbarrier.arrive(shared_free.index(step % BUFFERS))
    if MASKED:
        grad_scores = gl.where(_are_seen(first, begins, queries, BLOCK_M, FACTS), grad_scores, 0.0)
    halves = in_halves(grad_scores, qs.dtype, total)
    mbarrier.wait(q_ready.index(stage), phase)
    total = warpgroup_mma(halves, matrix(qs, stage), total, is_async=True)
    total, halves = warpgroup_mma_wait(0, deps=(total, halves))
    mbarrier.arrive(free.index(stage))
    return total


@gluon.jit
def _for_values_alone(result, buffers, barriers, sizes, number, FACTS: gl.constexpr):
    """What a group of four warps does where registers hold one gradient: that of a program's values."""
    ks, vs, _, _, _, _, _, _, _ = buffers
    k_ready, _, _, _, _, _, _ = barriers
    _, _, _, _, queries, _, diagonal = sizes
    BLOCK_M: gl.constexpr = FACTS.block_m
    BLOCK_V: gl.constexpr = FACTS.block_v
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    row, batch, head, first, count, masked = queries_of_tile(sizes, ROWS, FACTS)
    factor = (number * LOG2E).to(gl.float32)
    total = gl.zeros((ROWS, BLOCK_V), gl.float32, of_values)
    mbarrier.wait(k_ready.index(0), 0)
    own = (matrix(ks, 0), row - diagonal + gl.arange(0, ROWS, gl.SliceLayout(1, of_scores)))
    step = 0
    for _member in range(FACTS.ratio):
        for i in range(0, masked):
            numbers = (step + i, block_of_queries(i, first, count, queries, BLOCK_M))
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
    ks, vs, _, _, _, _, _, _, _ = buffers
    _, v_ready, _, _, _, _, _ = barriers
    _, _, _, _, queries, _, diagonal = sizes
    BLOCK_M: gl.constexpr = FACTS.block_m
    BLOCK_D: gl.constexpr = FACTS.block_d
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row, batch, head, first, count, masked = queries_of_tile(sizes, ROWS, FACTS)
    total = gl.zeros((ROWS, BLOCK_D), gl.float32, of_keys)
    mbarrier.wait(v_ready.index(0), 0)
    own = (matrix(vs, 0), row - diagonal + gl.arange(0, ROWS, gl.SliceLayout(1, of_scores)))
    step = 0
    for _member in range(FACTS.ratio):
        for i in range(0, masked):
            numbers = (step + i, block_of_queries(i, first, count, queries, BLOCK_M))
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
    biases, excesses, shared, shared_ready, shared_free = None, None, None, None, None
    if bias is not None:
        biases = gl.allocate_shared_memory(bias.dtype, [STAGES * SETS] + bias.block_shape, bias.layout)
        excesses = gl.allocate_shared_memory(sums.dtype, [STAGES] + sums.block_shape, sums.layout)
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
    buffers = ks, vs, qs, gs, logarithms, deltas, biases, shared, excesses
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
def add_heads(
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
