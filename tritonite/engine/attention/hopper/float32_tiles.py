"""What attention's kernels of float32 on Hopper share: loading and storing tiles, masks, and what they take.

Products are `engine.gemm.hopper_parts`'. A tile that several of them read is cut into parts once, in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tritonite import devices
from tritonite.engine.attention import table as table
from tritonite.engine.attention.hopper.backward_dq import keys_of_tile
from tritonite.engine.attention.hopper.descriptors import ROWS
from tritonite.engine.attention.problem import Facts, Problem, products
from tritonite.engine.attention.scores import biased, load_bias, seen

# The smallest power of two that holds a head here, and the largest.
_LEAST, _MOST = 32, 64


@gluon.jit
def keys_of_rows(sizes, FACTS: gl.constexpr):
    """(First query, blocks of keys, how many of them some query does not see in whole) of a program.

    Of a block beyond a sequence that is shorter than the longest, and of a sequence without keys, there is none.
    """
    _, _, _, _, queries, _, _ = sizes
    first, _batch, _head, count, cut = keys_of_tile(sizes, ROWS, FACTS)
    count = gl.where(first < queries, count, 0)
    return first, count, gl.minimum(cut, count)


@gluon.jit
def load_rows(
    pointer,
    first,
    stride,
    count,
    SIZE: gl.constexpr,
    ROWS_OF: gl.constexpr,
    BLOCK: gl.constexpr,
    INDEX: gl.constexpr,
):
    """A tile of rows from `first` on, of SIZE elements next to each other in blocks of BLOCK; 0 from row `count` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BLOCK, BLOCK // 4], [4, 1], [1, 0])
    rows = first + gl.arange(0, ROWS_OF, gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    mask = (rows < count)[:, None]
    if SIZE < BLOCK:
        mask = mask & (columns < SIZE)[None, :]
    return gl.load(pointer + (rows.to(INDEX) * stride)[:, None] + columns[None, :], mask=mask, other=0.0)


@gluon.jit
def load_keys(operands, strides, first, keys, FACTS: gl.constexpr):
    """A block of keys, and of values."""
    key, value = operands
    k = load_rows(key, first, strides[1][2], keys, FACTS.head_size, FACTS.block_n, FACTS.block_d, FACTS.index)
    v = load_rows(value, first, strides[2][2], keys, FACTS.value_size, FACTS.block_n, FACTS.block_v, FACTS.index)
    return k, v


@gluon.jit
def store_rows(pointer, first, stride, count, tile, SIZE: gl.constexpr, INDEX: gl.constexpr):
    """Write a tile of rows from `first` on, but for those from `count` on."""
    rows = first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, tile.type.layout))
    columns = gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))
    mask = (rows < count)[:, None] & (columns < SIZE)[None, :]
    gl.store(pointer + (rows.to(INDEX) * stride)[:, None] + columns[None, :], tile, mask=mask)


@gluon.jit
def masked(tile, places, span, MASKED: gl.constexpr, FACTS: gl.constexpr):
    """A tile, 0 where MASKED has scores that are not seen; `places` are queries and keys."""
    if MASKED:
        tile = gl.where(seen(places[0], places[1], span, FACTS.causal), tile, 0.0)
    return tile


@gluon.jit
def added_to(places, bias, strides, span, FACTS: gl.constexpr):
    """A tile of a bias as the registers of scores have it, or None; `places` are queries and keys.

    Whichever way rows of scores lie, lanes of a warp load whole sectors of 32 bytes.
    """
    exists = seen(places[0], places[1], span, False)
    return load_bias(bias, strides, places[0], places[1], span, exists, FACTS.bias_of_keys)


@gluon.jit
def scaled(scores, added, factor):
    """Products of queries and keys as scores, beside a tile of a bias or a mask if there is one."""
    scores *= factor
    if added is not None:
        scores = biased(scores, added)
    return scores


def take(problem: Problem, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take a problem whose further operands and results are these."""
    query = problem.query
    every = query, problem.key, problem.value, *tensors
    return (
        query.dtype is torch.float32
        and devices.has_wgmma(query.device)
        and products(problem.precision, query) == "bf16x6"
        and problem.dropout is None
        and problem.size <= _MOST
        and all([tensor.numel() > 0 and (tensor.stride(3) == 1 or tensor.shape[3] == 1) for tensor in every])
    )


def facts(problem: Problem, queries: int, keys: int, tensors: Sequence[torch.Tensor], empty: str = "inf") -> Facts:
    """What a kernel is compiled for that takes so many at a time, and also reads and writes these tensors."""
    found = problem.facts(table.Tile(queries, keys), *tensors, empty=empty)
    return replace(found, block_d=max(_LEAST, found.block_d), block_v=max(_LEAST, found.block_v))
