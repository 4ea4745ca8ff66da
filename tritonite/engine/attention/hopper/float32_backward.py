"""The backward pass of attention in float32 on Hopper: `backward`'s, with products that are under way beside others.

A program has four warps and 64 rows, of queries in one launch and of keys in another, whose parts stay in shared
memory. Of the blocks that it goes through the next is on its way from memory, in registers, under the products of one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from tritonite import devices
from tritonite.engine.attention import table as table
from tritonite.engine.attention.hopper.backward_dkdv import block_of_queries, queries_of_tile
from tritonite.engine.attention.hopper.descriptors import ROWS
from tritonite.engine.attention.hopper.float32_tiles import (
    added_to,
    facts,
    keys_of_rows,
    load_keys,
    load_rows,
    masked,
    scaled,
    store_rows,
    take,
)
from tritonite.engine.attention.place import place, sequence
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.scores import are_rounded, excess_of, load_logarithms, probabilities_of, store_scores
from tritonite.engine.gemm.kernels.hopper_fp32 import (
    SMALL_PRODUCTS,
    in_registers,
    shared_parts,
    start_main_product,
    start_small_products,
    store_parts,
    transposed,
    wait,
)
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry


@gluon.jit
def _probabilities(scores, logarithms, excess):
    """The probabilities of scores; without a bias of numbers `excess` is None."""
    if excess is None:
        result = gl.exp(scores - logarithms)
    else:
        result = probabilities_of(scores, logarithms, excess, True)
    return result


@gluon.jit
def _excess(rows, operands, buffers, strides, count, factor, span, FACTS: gl.constexpr):
    """The logarithms of the sums of probabilities of rows whose logarithms are rounded, 0 of other rows.

    Only a program that has such a row goes through its `count` blocks of keys for that.
    """
    places, logarithms = rows
    key, bias = operands
    qs, ks = buffers
    of_rows: gl.constexpr = logarithms.type.layout
    of_scores: gl.constexpr = of_rows.parent
    excess = gl.zeros((ROWS,), gl.float32, of_rows)
    if gl.max(are_rounded(logarithms).to(gl.int32), 0) > 0:
        sums = gl.zeros((ROWS,), gl.float32, of_rows)
        for i in range(0, count):
            first = i * FACTS.block_n
            k = load_rows(
                key, first, strides[1][2], span[1], FACTS.head_size, FACTS.block_n, FACTS.block_d, FACTS.index
            )
            store_parts(ks, k)
            fence_async_shared()
            scores = start_small_products(qs, transposed(ks), of_scores)
            columns = first + gl.arange(0, FACTS.block_n, gl.SliceLayout(0, of_scores))
            own = places[:, None], columns[None, :]
            added = added_to(own, bias, strides[3], span, FACTS)
            scores = start_main_product(qs, transposed(ks), warpgroup_mma_wait(0, deps=(scores,)))
            scores = scaled(warpgroup_mma_wait(0, deps=(scores,)), added, factor)
            probabilities = probabilities_of(scores, logarithms[:, None], excess[:, None], True)
            sums += gl.sum(masked(probabilities, own, span, True, FACTS), 1)
        excess = excess_of(sums, logarithms, True)
    return excess


@gluon.jit
def _take_keys(
    total,
    loaded,
    rows,
    excess,
    operands,
    grad_bias,
    buffers,
    strides,
    numbers,
    span,
    MASKED: gl.constexpr,
    FACTS: gl.constexpr,
):
    """The gradient of queries and what a block of keys adds to it, and the next block.

    The scores' own gradient is written where a bias' is asked for. Beside a bias of numbers `excess` is that of rows'
    logarithms. `numbers` are the first keys of the block and of the next, and what scores are multiplied by.
    """
    qs, gs, ks, vs = buffers
    key, value, bias = operands
    places, logarithms, delta = rows
    if excess is not None:
        excess = excess[:, None]
    first, following, factor = numbers
    of_scores: gl.constexpr = logarithms.type.layout.parent
    of_result: gl.constexpr = total.type.layout
    store_parts(ks, loaded[0])
    store_parts(vs, loaded[1])
    fence_async_shared()
    scores = start_small_products(qs, transposed(ks), of_scores)
    grads = start_small_products(gs, transposed(vs), of_scores)
    columns = first + gl.arange(0, FACTS.block_n, gl.SliceLayout(0, of_scores))
    own = places[:, None], columns[None, :]
    added = added_to(own, bias, strides[3], span, FACTS)
    loaded = load_keys((key, value), strides, following, span[1], FACTS)
    scores = start_main_product(qs, transposed(ks), warpgroup_mma_wait(SMALL_PRODUCTS, deps=(scores,)))
    grads = start_main_product(gs, transposed(vs), warpgroup_mma_wait(1, deps=(grads,)))
    scores = scaled(warpgroup_mma_wait(1, deps=(scores,)), added, factor)
    probabilities = _probabilities(scores, logarithms[:, None], excess)
    grads = warpgroup_mma_wait(0, deps=(grads,))
    grad_scores = masked(probabilities * (grads - delta[:, None]), own, span, MASKED, FACTS)
    if grad_bias is not None:
        store_scores(grad_bias, grad_scores, strides[8], places, columns, span)
    weights = in_registers(grad_scores, of_result)
    more = start_small_products(weights, ks, of_result)
    more = start_main_product(weights, ks, warpgroup_mma_wait(0, deps=(more,)))
    return total + wait(weights, more, 0), loaded


@libentry()
@gluon.jit(do_not_specialize=["heads", "batch_heads", "group", "blocks", "queries", "keys", "diagonal"])
def attend_to_queries_in_parts(
    query,
    key,
    value,
    bias,
    grad_out,
    out,
    logsumexp,
    grad_query,
    grad_bias,
    delta,
    excesses,
    query_starts,
    key_starts,
    strides,
    heads,
    batch_heads,
    group,
    blocks,
    queries,
    keys,
    diagonal,
    scale: tl.float64,
    FACTS: gl.constexpr,
):
    """As `backward.attend_to_queries`, without dropout."""
    wait_for_previous_launch()
    BLOCK_D: gl.constexpr = FACTS.block_d
    BLOCK_V: gl.constexpr = FACTS.block_v
    BLOCK_N: gl.constexpr = FACTS.block_n
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    of_result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    qs = shared_parts(ROWS, BLOCK_D)
    gs = shared_parts(ROWS, BLOCK_V)
    ks = shared_parts(BLOCK_N, BLOCK_D)
    vs = shared_parts(BLOCK_N, BLOCK_V)
    _block, batch, head = place(gl.program_id(0), blocks, heads, batch_heads, group)
    queries, keys, diagonal, first_query, first_key = sequence(
        query_starts, key_starts, batch, queries, keys, diagonal, FACTS
    )
    sizes = heads, batch_heads, group, blocks, queries, keys, diagonal
    first, count, cut = keys_of_rows(sizes, FACTS)
    shared = head // FACTS.ratio
    query += batch * strides[0][0] + head * strides[0][1] + first_query * strides[0][2]
    key += batch * strides[1][0] + shared * strides[1][1] + first_key * strides[1][2]
    value += batch * strides[2][0] + shared * strides[2][1] + first_key * strides[2][2]
    if bias is not None:
        bias += batch * strides[3][0] + head * strides[3][1]
    grad_out += batch * strides[4][0] + head * strides[4][1] + first_query * strides[4][2]
    out += batch * strides[5][0] + head * strides[5][1] + first_query * strides[5][2]
    logsumexp += batch * strides[6][0] + head * strides[6][1] + first_query * strides[6][3]
    grad_query += batch * strides[7][0] + head * strides[7][1] + first_query * strides[7][2]
    if grad_bias is not None:
        grad_bias += batch * strides[8][0] + head * strides[8][1]
    delta += batch * strides[9][0] + head * strides[9][1] + first_query
    if excesses is not None:
        excesses += batch * strides[9][0] + head * strides[9][1] + first_query
    span = queries, keys, diagonal
    loaded = load_keys((key, value), strides, gl.maximum(count - 1, 0) * BLOCK_N, keys, FACTS)
    store_parts(qs, load_rows(query, first, strides[0][2], queries, FACTS.head_size, ROWS, BLOCK_D, FACTS.index))
    grad = load_rows(grad_out, first, strides[4][2], queries, FACTS.value_size, ROWS, BLOCK_V, FACTS.index)
    result = load_rows(out, first, strides[5][2], queries, FACTS.value_size, ROWS, BLOCK_V, FACTS.index)
    store_parts(gs, grad)
    products = gl.convert_layout(gl.sum(grad * result, 1), of_rows)
    places = (first + gl.arange(0, ROWS, of_rows)).to(FACTS.index)
    gl.store(delta + places, products, mask=places < queries)
    logarithms = load_logarithms(logsumexp, places, strides[6][2], queries, True)
    factor = scale.to(gl.float32)
    excess = None
    if excesses is not None:
        excess = _excess((places, logarithms), (key, bias), (qs, ks), strides, count, factor, span, FACTS)
        gl.store(excesses + places, excess, mask=places < queries)
    own = places, logarithms, products
    total = gl.zeros((ROWS, BLOCK_D), gl.float32, of_result)
    operands, buffers = (key, value, bias), (qs, gs, ks, vs)
    for i in range(0, cut):
        numbers = (count - 1 - i) * BLOCK_N, gl.maximum(count - 2 - i, 0) * BLOCK_N, factor
        total, loaded = _take_keys(
            total, loaded, own, excess, operands, grad_bias, buffers, strides, numbers, span, True, FACTS
        )
    for i in range(cut, count):
        numbers = (count - 1 - i) * BLOCK_N, gl.maximum(count - 2 - i, 0) * BLOCK_N, factor
        total, loaded = _take_keys(
            total, loaded, own, excess, operands, grad_bias, buffers, strides, numbers, span, False, FACTS
        )
    if grad_bias is not None:
        nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, of_scores)
        for start in range(count * BLOCK_N, keys, BLOCK_N):
            columns = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, of_scores))
            store_scores(grad_bias, nothing, strides[8], places, columns, span)
    store_rows(grad_query, first, strides[7][2], queries, total * factor, FACTS.head_size, FACTS.index)


@gluon.jit
def _load_queries(operands, strides, first, queries, FACTS: gl.constexpr):
    """A block of queries, and of the result's gradient."""
    query, grad_out = operands
    q = load_rows(query, first, strides[0][2], queries, FACTS.head_size, FACTS.block_m, FACTS.block_d, FACTS.index)
    grad = load_rows(
        grad_out, first, strides[4][2], queries, FACTS.value_size, FACTS.block_m, FACTS.block_v, FACTS.index
    )
    return q, grad


@gluon.jit
def _take_queries(
    totals,
    loaded,
    columns,
    operands,
    excesses,
    bias,
    shift,
    buffers,
    strides,
    numbers,
    span,
    MASKED: gl.constexpr,
    FACTS: gl.constexpr,
):
    """The gradients of keys and of values and what a block of queries adds to them, and the next block.

    Tiles have a row for each key. Beside a bias of numbers `excesses` are those of rows' logarithms. The head's bias is
    `shift` from the first one's. `numbers` are the first queries of the block and of the next, and what scores are
    multiplied by.
    """
    of_key, of_value = totals
    ks, vs, qs, gs = buffers
    query, grad_out, logsumexp, delta = operands
    first, following, factor = numbers
    of_scores: gl.constexpr = columns.type.layout.parent
    of_keys: gl.constexpr = of_key.type.layout
    of_values: gl.constexpr = of_value.type.layout
    store_parts(qs, loaded[0])
    store_parts(gs, loaded[1])
    fence_async_shared()
    scores = start_small_products(ks, transposed(qs), of_scores)
    grads = start_small_products(vs, transposed(gs), of_scores)
    rows = (first + gl.arange(0, FACTS.block_m, gl.SliceLayout(0, of_scores))).to(FACTS.index)
    own = rows[None, :], columns[:, None]
    if bias is not None:
        bias += shift
    added = added_to(own, bias, strides[3], span, FACTS)
    logarithms = load_logarithms(logsumexp, rows, strides[5][2], span[0], True)
    products = gl.load(delta + rows, mask=rows < span[0], other=0.0)
    excess = None
    if excesses is not None:
        excess = gl.load(excesses + rows, mask=rows < span[0], other=0.0)[None, :]
    loaded = _load_queries((query, grad_out), strides, following, span[0], FACTS)
    scores = start_main_product(ks, transposed(qs), warpgroup_mma_wait(SMALL_PRODUCTS, deps=(scores,)))
    grads = start_main_product(vs, transposed(gs), warpgroup_mma_wait(1, deps=(grads,)))
    scores = scaled(warpgroup_mma_wait(1, deps=(scores,)), added, factor)
    probabilities = masked(_probabilities(scores, logarithms[None, :], excess), own, span, MASKED, FACTS)
    weights = in_registers(probabilities, of_values)
    more = start_small_products(weights, gs, of_values)
    grads = warpgroup_mma_wait(SMALL_PRODUCTS, deps=(grads,))
    grad_scores = masked(probabilities * (grads - products[None, :]), own, span, MASKED, FACTS)
    more = start_main_product(weights, gs, warpgroup_mma_wait(0, deps=(more,)))
    shares = in_registers(grad_scores, of_keys)
    of_value += wait(weights, more, 0)
    more = start_small_products(shares, qs, of_keys)
    more = start_main_product(shares, qs, warpgroup_mma_wait(0, deps=(more,)))
    of_key += wait(shares, more, 0)
    return of_key, of_value, loaded


@libentry()
@gluon.jit(do_not_specialize=["heads", "batch_heads", "group", "blocks", "queries", "keys", "diagonal"])
def attend_to_keys_in_parts(
    query,
    key,
    value,
    bias,
    grad_out,
    logsumexp,
    delta,
    excesses,
    grad_key,
    grad_value,
    query_starts,
    key_starts,
    strides,
    heads,
    batch_heads,
    group,
    blocks,
    queries,
    keys,
    diagonal,
    scale: tl.float64,
    FACTS: gl.constexpr,
):
    """As `backward.attend_to_keys`, without dropout; `heads` are those of the key."""
    wait_for_previous_launch()
    BLOCK_D: gl.constexpr = FACTS.block_d
    BLOCK_V: gl.constexpr = FACTS.block_v
    BLOCK_M: gl.constexpr = FACTS.block_m
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    of_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    ks = shared_parts(ROWS, BLOCK_D)
    vs = shared_parts(ROWS, BLOCK_V)
    qs = shared_parts(BLOCK_M, BLOCK_D)
    gs = shared_parts(BLOCK_M, BLOCK_V)
    _block, batch, shared = place(gl.program_id(0), blocks, heads, batch_heads, group)
    queries, keys, diagonal, first_query, first_key = sequence(
        query_starts, key_starts, batch, queries, keys, diagonal, FACTS
    )
    sizes = heads, batch_heads, group, blocks, queries, keys, diagonal
    row, _batch, _head, first, count, cut = queries_of_tile(sizes, ROWS, FACTS)
    # A block beyond a sequence that is shorter than the longest.
    count = gl.where(row < keys, count, 0)
    cut = gl.minimum(cut, count)
    key += batch * strides[1][0] + shared * strides[1][1] + first_key * strides[1][2]
    value += batch * strides[2][0] + shared * strides[2][1] + first_key * strides[2][2]
    grad_key += batch * strides[6][0] + shared * strides[6][1] + first_key * strides[6][2]
    grad_value += batch * strides[7][0] + shared * strides[7][1] + first_key * strides[7][2]
    store_parts(ks, load_rows(key, row, strides[1][2], keys, FACTS.head_size, ROWS, BLOCK_D, FACTS.index))
    store_parts(vs, load_rows(value, row, strides[2][2], keys, FACTS.value_size, ROWS, BLOCK_V, FACTS.index))
    factor = scale.to(gl.float32)
    of_key = gl.zeros((ROWS, BLOCK_D), gl.float32, of_keys)
    of_value = gl.zeros((ROWS, BLOCK_V), gl.float32, of_values)
    span = queries, keys, diagonal
    columns = (row + gl.arange(0, ROWS, gl.SliceLayout(1, of_scores))).to(FACTS.index)
    buffers = ks, vs, qs, gs
    for member in range(FACTS.ratio):
        head = shared * FACTS.ratio + member
        own_query = query + batch * strides[0][0] + head * strides[0][1] + first_query * strides[0][2]
        own_grad = grad_out + batch * strides[4][0] + head * strides[4][1] + first_query * strides[4][2]
        own_logarithms = logsumexp + batch * strides[5][0] + head * strides[5][1] + first_query * strides[5][3]
        place_of_sums = batch * strides[8][0] + head * strides[8][1] + first_query
        own_excesses = None
        if excesses is not None:
            own_excesses = excesses + place_of_sums
        operands = own_query, own_grad, own_logarithms, delta + place_of_sums
        shift = batch * strides[3][0] + head * strides[3][1]
        # A program of keys beyond its sequence has no blocks, of which the last would begin before the sequence.
        begin_at = gl.maximum(block_of_queries(0, first, count, queries, BLOCK_M), 0)
        loaded = _load_queries((own_query, own_grad), strides, begin_at, queries, FACTS)
        for i in range(0, cut):
            here = block_of_queries(i, first, count, queries, BLOCK_M)
            numbers = here, block_of_queries(i + 1, first, count, queries, BLOCK_M), factor
            totals = of_key, of_value
            of_key, of_value, loaded = _take_queries(
                totals,
                loaded,
                columns,
                operands,
                own_excesses,
                bias,
                shift,
                buffers,
                strides,
                numbers,
                span,
                True,
                FACTS,
            )
        for i in range(cut, count):
            here = block_of_queries(i, first, count, queries, BLOCK_M)
            numbers = here, block_of_queries(i + 1, first, count, queries, BLOCK_M), factor
            totals = of_key, of_value
            of_key, of_value, loaded = _take_queries(
                totals,
                loaded,
                columns,
                operands,
                own_excesses,
                bias,
                shift,
                buffers,
                strides,
                numbers,
                span,
                False,
                FACTS,
            )
    store_rows(grad_key, row, strides[6][2], keys, of_key * factor, FACTS.head_size, FACTS.index)
    store_rows(grad_value, row, strides[7][2], keys, of_value, FACTS.value_size, FACTS.index)


def takes(problem: Problem, grad_out: torch.Tensor, grads: tuple[torch.Tensor, ...]) -> bool:
    """Whether these are the kernels for a problem, on a device that has what they need."""
    return take(problem, (grad_out, *grads))


def attention_backward(
    problem: Problem,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_bias: torch.Tensor | None = None,
) -> None:
    """As `backward.attention_backward`, of a problem that these kernels take."""
    query, key, value, bias = problem.query, problem.key, problem.value, problem.bias
    delta = empty(query.shape[:3], torch.float32, query.device)
    excesses = empty(query.shape[:3], torch.float32, query.device) if problem.adds else None
    tensors = (grad_out, out, logsumexp, delta, *grads, *(() if grad_bias is None else (grad_bias,)))

    operands = [problem.strides(tensor) for tensor in (query, key, value)]
    read, sums = (*operands, problem.bias_strides, problem.strides(grad_out)), problem.strides(delta)
    logarithms = problem.logarithm_strides(logsumexp)
    numbers: dict[str, Any] = {"queries": problem.queries, "keys": problem.keys, "diagonal": problem.diagonal}
    numbers |= {"scale": problem.factor, "num_warps": 4} | compiler_options(True)
    blocks, batch_heads = -(-problem.queries // ROWS.value), problem.batch * query.shape[1]
    attend_to_queries_in_parts[(blocks * batch_heads,)](
        *(query, key, value, bias, grad_out, out, logsumexp, grads[0], grad_bias, delta, excesses, *problem.starts),
        strides=(
            *(*read, problem.strides(out), logarithms, problem.strides(grads[0])),
            *((0, 0, 0, 0) if grad_bias is None else grad_bias.stride(), sums),
        ),
        heads=query.shape[1],
        batch_heads=batch_heads,
        group=problem.group,
        blocks=blocks,
        FACTS=facts(problem, ROWS.value, table.IN_PARTS.BLOCK_N, tensors),
        # The rows of the excess are gone through in a branch that would take the registers of a third program.
        maxnreg=table.REGISTERS_OF_MORE if problem.adds and grad_bias is None else None,
        **numbers,
    )
    blocks, batch_heads = -(-problem.keys // ROWS.value), problem.batch * key.shape[1]
    if not problem.causal:
        most = table.registers_for_keys(blocks * batch_heads, devices.multiprocessors(query.device))
        numbers |= {} if most is None else {"maxnreg": most}
    attend_to_keys_in_parts[(blocks * batch_heads,)](
        *(query, key, value, bias, grad_out, logsumexp, delta, excesses, *grads[1:], *problem.starts),
        strides=(*read, logarithms, problem.strides(grads[1]), problem.strides(grads[2]), sums),
        heads=key.shape[1],
        batch_heads=batch_heads,
        group=1,
        blocks=blocks,
        FACTS=facts(problem, table.IN_PARTS.BLOCK_M, ROWS.value, tensors),
        **numbers,
    )
