"""Dropout of attention: the elements that ATen's CUDA kernels keep, by their mappings of elements to Philox draws.

Flash attention (FlashAttention 2: dropout.h, philox.cuh) draws with 7 rounds of Philox, once for each lane of a warp
and each tile of 16 rows and 32 columns. The draw's 16 bytes are for the 16 elements that the lane holds of 16x8
products. The counter is the offset, plus 32 per head, plus the lane; the subsequence is the tile's row and column.

Efficient attention (mem_eff_attention/kernel_forward.h) numbers the elements of all heads in order. Element i takes the
i-th 32-bit number of one subsequence.

cuDNN does not document its mapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.language.random import interleave4, uniform_of, words
from tritonite.runtime.symbols import Drawn, Number

# Flash attention's rounds of Philox, rows and columns of a tile that share a subsequence, and lanes of a warp.
_ROUNDS = tl.constexpr(7)
_ROWS, _COLUMNS = tl.constexpr(16), tl.constexpr(32)
LANES = 32
_LANES = tl.constexpr(LANES)


class Dropout(NamedTuple):
    """Dropout with probability `p`, by flash attention's mapping (`lanes`) or by efficient attention's.

    A forward pass advances the generator by `advanced` and writes seed and offset to `memory`, two int64, unless that
    is None. A backward pass reads seed and offset from `memory`, or from `state` where `memory` is None.
    """

    p: float | Number
    lanes: bool
    advanced: int = 0
    memory: torch.Tensor | None = None
    state: Sequence[int | Drawn | Any] = (0, 0)


class Draws(NamedTuple):
    """Random numbers of a head: Philox seed, first counter or element, threshold for keeping, scale of kept values."""

    seed: Any
    begin: Any
    threshold: Any
    gain: Any


@triton.jit
def _keep_probability(p):
    """Return 1 - p rounded to float32, as ATen has it, in float64."""
    return (1.0 - tl.full((), p, tl.float64).to(tl.float32)).to(tl.float64)


@triton.jit
def gain(p):
    """Return the float32 scale of kept elements, 1 / (1 - p)."""
    return (1.0 / _keep_probability(p)).to(tl.float32)


@triton.jit
def head_draws(seed, offset, memory, p, head, queries, keys, META: tl.constexpr):
    """Return the `Draws` of a head; `head` counts over all batches."""
    # In the interpreter Python integers have no dtype.
    seed, offset = seed.to(tl.int64), offset.to(tl.int64)
    if memory is not None:
        seed, offset = tl.load(memory), tl.load(memory + 1)
    if META.dropout == "lanes":
        begin = offset + head * _LANES
        threshold = tl.floor(_keep_probability(p) * 255.0).to(tl.uint8)
    else:
        begin = offset + head * queries * keys
        threshold = tl.full((), p, tl.float64).to(tl.float32)
    return Draws(seed, begin, threshold, gain(p))


@triton.jit
def keep_mask(draws, first_row, first_column, keys, META: tl.constexpr):
    """Return the mask of kept elements in a tile of META.block_m rows and META.block_n columns."""
    if META.dropout == "lanes":
        result = _keep_by_lanes(draws, first_row, first_column, META.block_m, META.block_n)
    else:
        result = _keep_by_elements(draws, first_row, first_column, keys, META.block_m, META.block_n, META.aligned)
    return result


@triton.jit
def _keep_by_lanes(draws, first_row, first_column, M: tl.constexpr, N: tl.constexpr):
    """Return the mask of kept elements by flash attention's mapping.

    A lane holds two adjacent columns of every eight, and two rows at distance eight. Triton lays tiles of products
    out alike, so with this order of dimensions no draw moves to another lane.
    """
    BLOCKS_M: tl.constexpr = M // _ROWS
    BLOCKS_N: tl.constexpr = N // _COLUMNS
    block, row, pair = tl.arange(0, BLOCKS_N)[:, None, None], tl.arange(0, M // 2)[None, :, None], tl.arange(0, 4)
    counter = draws.begin + (row % 8 * 4 + pair[None, None, :])
    block_row, block_column = row // 8 + first_row // _ROWS, block + first_column // _COLUMNS
    subsequence = tl.broadcast_to((block_column.to(tl.int64) << 32) + block_row, (BLOCKS_N, M // 2, 4))
    a, b, c, d = words(draws.seed, counter, subsequence, _ROUNDS)
    # The last four dimensions: columns by 16, columns by 8, rows by 8, column of a pair.
    tile = tl.reshape(
        _join4(_bytes(a, b, c, d, 0), _bytes(a, b, c, d, 8), _bytes(a, b, c, d, 16), _bytes(a, b, c, d, 24)),
        (BLOCKS_N, BLOCKS_M, 8, 4, 2, 2, 2, 2),
    )
    return tl.reshape(tl.permute(tile, (1, 6, 2, 0, 4, 5, 3, 7)), (M, N)) <= draws.threshold


@triton.jit
def _join4(a, b, c, d):
    """Stack four tensors along two new last dimensions."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _bytes(a, b, c, d, SHIFT: tl.constexpr):
    """Return the bytes at bit SHIFT of four 32-bit numbers, along two new last dimensions."""
    return _join4(
        (a >> SHIFT).to(tl.uint8), (b >> SHIFT).to(tl.uint8), (c >> SHIFT).to(tl.uint8), (d >> SHIFT).to(tl.uint8)
    )


@triton.jit
def _keep_by_elements(draws, first_row, first_column, keys, M: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the mask of kept elements by efficient attention's mapping.

    Four adjacent elements share a draw where rows are ALIGNED, that is, begin with a draw's first number. Otherwise
    they straddle two draws.
    """
    row = (first_row + tl.arange(0, M)).to(tl.int64)
    number = (draws.begin + row * keys)[:, None] + (first_column + tl.arange(0, N // 4) * 4)[None, :]
    a, b, c, d = words(draws.seed, number >> 2, tl.zeros((M, N // 4), tl.int64))
    if not ALIGNED:
        e, f, g, _ = words(draws.seed, (number >> 2) + 1, tl.zeros((M, N // 4), tl.int64))
        odd, late = (number & 1) != 0, (number & 2) != 0
        a, b, c = tl.where(late, c, a), tl.where(late, d, b), tl.where(late, e, c)
        d, e = tl.where(late, f, d), tl.where(late, g, e)
        a, b, c, d = tl.where(odd, b, a), tl.where(odd, c, b), tl.where(odd, d, c), tl.where(odd, e, d)
    return interleave4(
        uniform_of(a) > draws.threshold,
        uniform_of(b) > draws.threshold,
        uniform_of(c) > draws.threshold,
        uniform_of(d) > draws.threshold,
    )
