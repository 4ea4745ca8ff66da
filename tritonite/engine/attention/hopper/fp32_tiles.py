"""Shared parts of Hopper's float32 kernels: which calls they serve, loads, stores, biases.

`engine.gemm.kernels.hopper_fp32` multiplies. A tile that several products read is split into bfloat16 terms once, in
shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tritonite import devices
from tritonite.engine.attention.hopper.backward_dq import query_tile
from tritonite.engine.attention.hopper.descriptors import ROWS
from tritonite.engine.attention.problem import Problem, dot_precision
from tritonite.engine.attention.prologue import locate_queries
from tritonite.engine.attention.scores import add_bias, load_bias, visible_scores

# Smallest and largest block_d and block_v.
LEAST, _MOST = 32, 64


@gluon.jit
def locate_rows(sizes, tensors, META: gl.constexpr):
    """Return (`Head`, `Extent`, first query, blocks of keys, how many of the first ones need a mask) of a program.

    No blocks are left where a packed sequence has no such queries.
    """
    here, extent = locate_queries(sizes, tensors, META)
    first, count, masked = query_tile(here.block, extent, ROWS, META)
    count = gl.where(first < extent.queries, count, 0)
    return here, extent, first, count, gl.minimum(masked, count)


@gluon.jit
def load_rows(pointer, first, stride, count, COUNT: gl.constexpr, OF_VALUES: gl.constexpr, META: gl.constexpr):
    """Load COUNT rows of a head's elements, or OF_VALUES, as a tile of padded columns; rows from `count` on are 0."""
    SIZE: gl.constexpr = META.value_size if OF_VALUES else META.head_size
    BLOCK: gl.constexpr = META.block_v if OF_VALUES else META.block_d
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BLOCK, BLOCK // 4], [4, 1], [1, 0])
    rows = first + gl.arange(0, COUNT, gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    mask = (rows < count)[:, None]
    if SIZE < BLOCK:
        mask = mask & (columns < SIZE)[None, :]
    return gl.load(pointer + (rows.to(META.index) * stride)[:, None] + columns[None, :], mask=mask, other=0.0)


@gluon.jit
def load_keys(pointers, strides, first, keys, META: gl.constexpr):
    """Load a block of keys and of values."""
    k = load_rows(pointers.key, first, strides.key.row, keys, META.block_n, False, META)
    return k, load_rows(pointers.value, first, strides.value.row, keys, META.block_n, True, META)


@gluon.jit
def store_rows(pointer, first, stride, count, tile, SIZE: gl.constexpr, INDEX: gl.constexpr):
    """Store the rows of a tile below `count`; the tile's first row is `first`."""
    rows = first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, tile.type.layout))
    columns = gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))
    mask = (rows < count)[:, None] & (columns < SIZE)[None, :]
    gl.store(pointer + (rows.to(INDEX) * stride)[:, None] + columns[None, :], tile, mask=mask)


@gluon.jit
def zero_hidden(tile, rows, columns, extent, MASKED: gl.constexpr, META: gl.constexpr):
    """Set a tile to 0 where its score is hidden, if MASKED."""
    if MASKED:
        tile = gl.where(visible_scores(rows, columns, extent, META.causal), tile, 0.0)
    return tile


@gluon.jit
def load_bias_tile(rows, columns, bias, strides, extent, META: gl.constexpr):
    """Load a tile of a bias in the layout of scores, or return None for None.

    The lanes of a warp load whole 32-byte sectors, whichever dimension of scores is the queries.
    """
    exists = visible_scores(rows, columns, extent, False)
    return load_bias(bias, strides, rows, columns, extent.keys, exists, META.bias_of_keys)


@gluon.jit
def to_scores(products, bias_tile, factor):
    """Scale products of queries and keys, and add a tile of a bias unless it is None."""
    products *= factor
    if bias_tile is not None:
        products = add_bias(products, bias_tile)
    return products


def serves_operands(problem: Problem, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the float32 kernels serve a problem whose other operands and results are `tensors`."""
    query = problem.query
    every = query, problem.key, problem.value, *tensors
    return (
        query.dtype is torch.float32
        and devices.has_wgmma(query.device)
        and dot_precision(problem.precision, query) == "bf16x6"
        and problem.dropout is None
        and problem.plain
        and problem.size <= _MOST
        and all([tensor.numel() > 0 and (tensor.stride(3) == 1 or tensor.shape[3] == 1) for tensor in every])
    )
