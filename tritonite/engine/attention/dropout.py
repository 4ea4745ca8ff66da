"""Which elements of the softmax dropout keeps: ATen's on CUDA, by its own mapping of elements to random numbers.

Flash attention (FlashAttention 2: dropout.h, philox.cuh) has one draw of Philox with 7 rounds for each lane of a warp
and each block of 16 rows and 32 columns, whose 16 bytes are those of a lane's elements in products of 16x8. The counter
begins at the offset plus 32 for each head, and a lane's number is added to it; the block's row and column are the
subsequence. Efficient attention (mem_eff_attention/kernel_forward.h) numbers the elements of all heads in order, and
takes the words of one subsequence in that order. No kernel of cuDNN's tells of its mapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.language.random import interleave4, uniform_of, words
from tritonite.runtime.symbols import Drawn, Number

# The rounds of flash attention's Philox, its block of rows and columns, and the lanes of it.
_ROUNDS = tl.constexpr(7)
_ROWS, _COLUMNS = tl.constexpr(16), tl.constexpr(32)
LANES = 32
_LANES = tl.constexpr(LANES)


class Dropout(NamedTuple):
    """Elements are dropped with probability `p`, by the numbers of flash attention's `lanes` or of all elements.

    The generator is `advanced` by a forward pass, which writes seed and offset to `memory`, two of int64, if there is
    any. A gradient takes them from there, or else has them as numbers, the `state`.
    """

    p: float | Number
    lanes: bool
    advanced: int = 0
    memory: torch.Tensor | None = None
    state: Sequence[int | Drawn | Any] = (0, 0)


@triton.jit
def _share_kept(p):
    """In float32 as ATen's, but with room for what follows."""
    return (1.0 - tl.full((), p, tl.float64).to(tl.float32)).to(tl.float64)


@triton.jit
def gain(p):
    """What elements that are kept are multiplied by."""
    return (1.0 / _share_kept(p)).to(tl.float32)


@triton.jit
def drawn_for(seed, offset, memory, p, head, queries, keys, FACTS: tl.constexpr):
    """(seed, where the numbers of a head begin, threshold, `gain`), of heads that are counted over all batches."""
    # In the interpreter numbers have no type of their own.
    seed, offset = seed.to(tl.int64), offset.to(tl.int64)
    if memory is not None:
        seed, offset = tl.load(memory), tl.load(memory + 1)
    if FACTS.dropout == "lanes":
        begin = offset + head * _LANES
        threshold = tl.floor(_share_kept(p) * 255.0).to(tl.uint8)
    else:
        begin = offset + head * queries * keys
        threshold = tl.full((), p, tl.float64).to(tl.float32)
    return seed, begin, threshold, gain(p)


@triton.jit
def kept_tile(drawn, first_row, first_column, keys, FACTS: tl.constexpr):
    """Which elements are kept of a tile of FACTS.block_m rows and FACTS.block_n columns."""
    if FACTS.dropout == "lanes":
        result = _by_lanes(drawn, first_row, first_column, FACTS.block_m, FACTS.block_n)
    else:
        result = _by_elements(drawn, first_row, first_column, keys, FACTS.block_m, FACTS.block_n, FACTS.aligned)
    return result


@triton.jit
def _by_lanes(drawn, first_row, first_column, M: tl.constexpr, N: tl.constexpr):
    """A lane has two columns next to each other in each eight of them, and two rows at a distance of eight.

    Triton's products have them so, too: in this order of dimensions no draw has to change lanes.
    """
    seed, begin, threshold, _ = drawn
    BLOCKS_M: tl.constexpr = M // _ROWS
    BLOCKS_N: tl.constexpr = N // _COLUMNS
    block, row, pair = tl.arange(0, BLOCKS_N)[:, None, None], tl.arange(0, M // 2)[None, :, None], tl.arange(0, 4)
    counter = begin + (row % 8 * 4 + pair[None, None, :])
    block_row, block_column = row // 8 + first_row // _ROWS, block + first_column // _COLUMNS
    place = tl.broadcast_to((block_column.to(tl.int64) << 32) + block_row, (BLOCKS_N, M // 2, 4))
    a, b, c, d = words(seed, counter, place, _ROUNDS)
    # Behind the draws: which sixteen and which eight of the block's columns, which eight of its rows, which column.
    tile = tl.reshape(
        _join4(
            _bytes(a, b, c, d, 0),
            _bytes(a, b, c, d, 8),
            _bytes(a, b, c, d, 16),
            _bytes(a, b, c, d, 24),
        ),
        (BLOCKS_N, BLOCKS_M, 8, 4, 2, 2, 2, 2),
    )
    return tl.reshape(tl.permute(tile, (1, 6, 2, 0, 4, 5, 3, 7)), (M, N)) <= threshold


@triton.jit
def _join4(a, b, c, d):
    """Four tensors along two new dimensions at the end."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _bytes(a, b, c, d, SHIFT: tl.constexpr):
    """The bytes at SHIFT of four words."""
    return _join4(
        (a >> SHIFT).to(tl.uint8), (b >> SHIFT).to(tl.uint8), (c >> SHIFT).to(tl.uint8), (d >> SHIFT).to(tl.uint8)
    )


@triton.jit
def _by_elements(drawn, first_row, first_column, keys, M: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr):
    """Four elements next to each other have the words of a draw, where rows are ALIGNED, or else those of two draws."""
    seed, begin, threshold, _ = drawn
    row = (first_row + tl.arange(0, M)).to(tl.int64)
    number = (begin + row * keys)[:, None] + (first_column + tl.arange(0, N // 4) * 4)[None, :]
    a, b, c, d = words(seed, number >> 2, tl.zeros((M, N // 4), tl.int64))
    if not ALIGNED:
        e, f, g, _ = words(seed, (number >> 2) + 1, tl.zeros((M, N // 4), tl.int64))
        odd, late = (number & 1) != 0, (number & 2) != 0
        a, b, c = tl.where(late, c, a), tl.where(late, d, b), tl.where(late, e, c)
        d, e = tl.where(late, f, d), tl.where(late, g, e)
        a, b, c, d = tl.where(odd, b, a), tl.where(odd, c, b), tl.where(odd, d, c), tl.where(odd, e, d)
    return interleave4(
        uniform_of(a) > threshold, uniform_of(b) > threshold, uniform_of(c) > threshold, uniform_of(d) > threshold
    )
