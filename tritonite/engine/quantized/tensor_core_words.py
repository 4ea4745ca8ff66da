"""4-bit weights in the order in which tensor cores read them: ATen's packed format for CUDA.

A weight (N, K) is an int32 tensor (N / 8, K / (16 * inner), 32, inner / 2), for 2, 4 or 8 `inner` tiles of 16 along K.
A word has eight numbers of one row, out of 32 neighbours along K: word j of a row has numbers of block j // 4. Bits
4 s to 4 s + 3 of the word are the number at index 2 * (j % 4 + 4 * (s % 4)) + s // 4 of its block. In the tensor the
word is at lane 4 * (row % 8) + j % 4 of its tile. A number q stands for (q - 8) * scale + zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.engine.iteration import offset_type
from tritonite.engine.quantized.kernels import block_of, own_tile, slice_of_k, write
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry

_PACKED_WORDS = 1024


@triton.jit
def _load_words(weight, tile, first, end, row_words, BLOCKS: tl.constexpr, WORDS: tl.constexpr):
    """Load the words of a tile's rows from block `first` along K on: (rows, BLOCKS, 4), 0 from block `end` on."""
    row, lane = tile.rows[:, None, None], tl.arange(0, 4)[None, None, :]
    block = first + tl.arange(0, BLOCKS)[None, :, None]
    at = (row // 8 * (row_words // (4 * WORDS)) + block // WORDS) * 32 + 4 * (row % 8) + lane
    return tl.load(weight + at * WORDS + block % WORDS, mask=tile.row_mask[:, None, None] & (block < end), other=0)


@triton.jit
def _number(words, scale, zero, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the number at bits SHIFT to SHIFT + 3 of each word, dequantised.

    It becomes the end of the mantissa of 2**23. Conversion instructions have a quarter of the rate.
    """
    bits = ((words >> SHIFT) & 0xF) | 0x4B000000
    return tl.fma(bits.to(tl.float32, bitcast=True) - 8388616.0, scale, zero).to(DTYPE)


@triton.jit
def _neighbours(words, scale, zero, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    return tl.join(_number(words, scale, zero, SHIFT, DTYPE), _number(words, scale, zero, SHIFT + 16, DTYPE))


@triton.jit
def _dequantised(words, scale, zero, DTYPE: tl.constexpr):
    """Return the numbers of (rows, blocks, 4) words, dequantised, as (rows, K) in their order along K.

    `scale` and `zero` have the words' shape.
    """
    first = tl.join(_neighbours(words, scale, zero, 0, DTYPE), _neighbours(words, scale, zero, 8, DTYPE))
    second = tl.join(_neighbours(words, scale, zero, 4, DTYPE), _neighbours(words, scale, zero, 12, DTYPE))
    # (row, block, lane, half of a word, byte, nibble) to (row, block, byte, nibble, lane, half).
    numbers = tl.permute(tl.join(first, second), (0, 1, 4, 5, 2, 3))
    return tl.reshape(numbers, (words.shape[0], words.shape[1] * 32))


@triton.jit
def _of_words(pairs, BLOCKS: tl.constexpr):
    """Return the scales and the zeros of (rows, groups) pairs for the four words of each of BLOCKS blocks."""
    ROWS: tl.constexpr = pairs.shape[0]
    GROUPS: tl.constexpr = pairs.shape[1]
    spread = tl.broadcast_to(pairs[:, :, None], (ROWS, GROUPS, BLOCKS // GROUPS))
    spread = tl.broadcast_to(tl.reshape(spread, (ROWS, BLOCKS))[:, :, None], (ROWS, BLOCKS, 4))
    # A bfloat16 is the upper half of a float32.
    return (spread << 16).to(tl.float32, bitcast=True), (spread & -65536).to(tl.float32, bitcast=True)


@libentry()
@triton.jit(do_not_specialize=["N", "steps"])
def multiply_words(weight, x, out, pairs, strides, added, M, N, K, steps, META: tl.constexpr):
    """Multiply a tile of a packed weight (M, K) by x (N, K) transposed.

    The words of a lane have the numbers that tensor cores read from its registers. A dequantised number is rounded
    once, to bfloat16.

    Args:
        pairs: int32, (K / META.group_k, M), contiguous: a scale in the lower half, a zero in the upper, both bfloat16.
        strides: `WordStrides`.
        added: `EpilogueOperands`.
        steps: blocks of K in a slice of split-K.
        META: `WordMeta`.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_K: tl.constexpr = META.block_k
    BLOCKS: tl.constexpr = BLOCK_K // 32
    GROUPS: tl.constexpr = META.groups
    tile = own_tile(M, N, META)
    begin, end = slice_of_k(K, steps, BLOCK_K, META.index)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(begin, end, BLOCK_K):
        words = _load_words(weight, tile, k // 32, end // 32, K // 8, BLOCKS, META.words)
        group = k // META.group_k + tl.arange(0, GROUPS)
        own = pairs + group[None, :] * M + tile.rows[:, None]
        inside = tile.row_mask[:, None] & (group[None, :] * META.group_k < end)
        scale, zero = _of_words(tl.load(own, mask=inside, other=0), BLOCKS)
        inner = k + tl.arange(0, BLOCK_K)
        y = block_of(x, tile.columns, tile.column_mask, inner, end, strides.x, META.even_k)
        total = tl.dot(_dequantised(words, scale, zero, y.dtype), tl.trans(y), total, out_dtype=tl.float32)
    write(total, out, tile, strides.out, added, META)


@libentry()
@triton.jit(do_not_specialize=["N", "count"])
def pack_words(
    weight, packed, row_stride, column_stride, N, row_words, count, WORDS: tl.constexpr, INDEX: tl.constexpr
):
    """Write some of `count` words of a weight (N, K / 2), whose high nibbles are the numbers at even indices.

    Rows from N on, which fill the last tile, are zeros.
    """
    wait_for_previous_launch()
    BLOCK: tl.constexpr = 1024
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    word, lane, tile = at % WORDS, at // WORDS % 32, at // (32 * WORDS)
    tiles = row_words // (4 * WORDS)
    row = tile // tiles * 8 + lane // 4
    first = (tile % tiles * WORDS + word) * 16 + lane % 4
    bytes_of_row = weight + row * tl.full((), row_stride, INDEX)
    packed_word = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(4):
        own = bytes_of_row + (first + 4 * i) * tl.full((), column_stride, INDEX)
        pair = tl.load(own, mask=(at < count) & (row < N), other=0).to(tl.int32)
        packed_word |= ((pair >> 4) << (4 * i)) | ((pair & 0xF) << (16 + 4 * i))
    tl.store(packed + at, packed_word, mask=at < count)


def pack(weight: torch.Tensor, packed: torch.Tensor) -> None:
    """Write the words of a weight, uint8 (N, K / 2), into a contiguous int32 tensor of the packed shape."""
    count, (N, half) = packed.numel(), weight.shape
    if not count:
        return
    pack_words[(-(-count // _PACKED_WORDS),)](
        *(weight, packed, *weight.stride(), N, half // 4, count),
        WORDS=packed.shape[3],
        INDEX=offset_type(weight, packed),
        num_warps=4,
    )
