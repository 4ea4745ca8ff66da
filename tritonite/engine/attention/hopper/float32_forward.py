"""The forward pass of attention in float32 on Hopper: `forward`'s, with products that follow each other.

A program has four warps and 64 queries, whose parts stay in shared memory. Of the blocks of keys and values that it
goes through the next is on its way from memory, in registers, under the products of one.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from tritonite.engine.attention import table as table
from tritonite.engine.attention.hopper.descriptors import ROWS
from tritonite.engine.attention.hopper.float32_tiles import (
    added_to,
    facts,
    keys_of_rows,
    load_keys,
    load_rows,
    scaled,
    store_rows,
    take,
)
from tritonite.engine.attention.place import place, sequence
from tritonite.engine.attention.problem import Problem, compiler_options
from tritonite.engine.attention.scores import seen
from tritonite.engine.gemm.kernels.hopper_fp32 import (
    in_registers,
    shared_parts,
    start_main_product,
    start_small_products,
    store_parts,
    transposed,
    wait,
)
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@gluon.jit
def _take_keys(
    state, loaded, places, operands, buffers, strides, numbers, span, MASKED: gl.constexpr, FACTS: gl.constexpr
):
    """(Sums of values, the largest score, the sum of exponentials) of rows after a block of keys, and the next block.

    `numbers` are the first keys of the block and of the next, and what scores are multiplied by.
    """
    total, largest, denominator = state
    qs, ks, vs = buffers
    key, value, bias = operands
    first, following, factor = numbers
    of_scores: gl.constexpr = largest.type.layout.parent
    of_result: gl.constexpr = total.type.layout
    of_rows: gl.constexpr = gl.SliceLayout(1, of_result)
    store_parts(ks, loaded[0])
    store_parts(vs, loaded[1])
    fence_async_shared()
    scores = start_small_products(qs, transposed(ks), of_scores)
    columns = first + gl.arange(0, FACTS.block_n, gl.SliceLayout(0, of_scores))
    own = places[:, None], columns[None, :]
    added = added_to(own, bias, strides[4], span, FACTS)
    loaded = load_keys((key, value), strides, following, span[1], FACTS)
    scores = start_main_product(qs, transposed(ks), warpgroup_mma_wait(0, deps=(scores,)))
    scores = scaled(warpgroup_mma_wait(0, deps=(scores,)), added, factor)
    if MASKED:
        scores = gl.where(seen(own[0], own[1], span, FACTS.causal), scores, float("-inf"))
    most = gl.maximum(largest, gl.max(scores, 1))
    base = gl.where(most == float("-inf"), 0.0, most)
    exponentials = gl.exp(scores - base[:, None])
    kept = gl.exp(largest - base)
    weights = in_registers(exponentials, of_result)
    more = start_small_products(weights, vs, of_result)
    denominator = denominator * kept + gl.sum(exponentials, 1)
    total = total * gl.convert_layout(kept, of_rows)[:, None]
    more = start_main_product(weights, vs, warpgroup_mma_wait(0, deps=(more,)))
    return total + wait(weights, more, 0), most, denominator, loaded


@libentry()
@gluon.jit(do_not_specialize=["heads", "batch_heads", "group", "blocks", "queries", "keys", "diagonal", "padded"])
def attend_in_parts(
    query,
    key,
    value,
    bias,
    out,
    logsumexp,
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
    padded,
    scale: tl.float64,
    FACTS: gl.constexpr,
):
    """As `forward.attend`, without dropout."""
    wait_for_previous_launch()
    BLOCK_N: gl.constexpr = FACTS.block_n
    BLOCK_D: gl.constexpr = FACTS.block_d
    BLOCK_V: gl.constexpr = FACTS.block_v
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    of_result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    qs = shared_parts(ROWS, BLOCK_D)
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
    out += batch * strides[3][0] + head * strides[3][1] + first_query * strides[3][2]
    if bias is not None:
        bias += batch * strides[4][0] + head * strides[4][1]
    span = queries, keys, diagonal
    loaded = load_keys((key, value), strides, gl.maximum(count - 1, 0) * BLOCK_N, keys, FACTS)
    store_parts(qs, load_rows(query, first, strides[0][2], queries, FACTS.head_size, ROWS, BLOCK_D, FACTS.index))
    places = (first + gl.arange(0, ROWS, of_rows)).to(FACTS.index)
    factor = scale.to(gl.float32)
    total = gl.zeros((ROWS, BLOCK_V), gl.float32, of_result)
    largest = gl.full((ROWS,), float("-inf"), gl.float32, of_rows)
    denominator = gl.zeros((ROWS,), gl.float32, of_rows)
    operands, buffers = (key, value, bias), (qs, ks, vs)
    for i in range(0, cut):
        numbers = (count - 1 - i) * BLOCK_N, gl.maximum(count - 2 - i, 0) * BLOCK_N, factor
        state = total, largest, denominator
        total, largest, denominator, loaded = _take_keys(
            state, loaded, places, operands, buffers, strides, numbers, span, True, FACTS
        )
    for i in range(cut, count):
        numbers = (count - 1 - i) * BLOCK_N, gl.maximum(count - 2 - i, 0) * BLOCK_N, factor
        state = total, largest, denominator
        total, largest, denominator, loaded = _take_keys(
            state, loaded, places, operands, buffers, strides, numbers, span, False, FACTS
        )
    nothing = denominator == 0
    denominator = gl.where(nothing, 1.0, denominator)
    total = total / gl.convert_layout(denominator, gl.SliceLayout(1, of_result))[:, None]
    store_rows(out, first, strides[3][2], queries, total, FACTS.value_size, FACTS.index)
    if logsumexp is not None:
        logarithms = gl.where(nothing, float(FACTS.empty), largest + gl.log(denominator))
        logarithms = gl.where(places < queries, logarithms, float("inf"))
        logsumexp += batch * strides[5][0] + head * strides[5][1] + first_query * strides[5][3]
        gl.store(logsumexp + places * strides[5][2], logarithms, mask=places < gl.maximum(queries, padded))


def takes(problem: Problem, out: torch.Tensor) -> bool:
    """Whether this is the kernel for a problem, on a device that has what it needs."""
    return take(problem, (out,))


def attention(problem: Problem, out: torch.Tensor, logsumexp: torch.Tensor | None, empty: str = "inf") -> None:
    """As `forward.attention`, of a problem that this kernel `takes`."""
    operands = problem.query, problem.key, problem.value
    heads, blocks = problem.query.shape[1], -(-problem.queries // ROWS.value)
    attend_in_parts[(blocks * problem.batch * heads,)](
        *(*operands, problem.bias, out, logsumexp, *problem.starts),
        strides=(
            *[problem.strides(tensor) for tensor in (*operands, out)],
            *(problem.bias_strides, problem.logarithm_strides(logsumexp)),
        ),
        heads=heads,
        batch_heads=problem.batch * heads,
        group=problem.group,
        blocks=blocks,
        queries=problem.queries,
        keys=problem.keys,
        diagonal=problem.diagonal,
        padded=0 if logsumexp is None or (problem.packed and problem.packed.logarithms) else logsumexp.shape[2],
        scale=problem.factor,
        FACTS=facts(problem, ROWS.value, table.IN_PARTS.BLOCK_N, (out,), empty),
        num_warps=4,
        **compiler_options(True),
    )
