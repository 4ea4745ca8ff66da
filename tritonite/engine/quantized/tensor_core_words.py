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
def _index_in_block(j, s):
    """Return the index along K of number s of a row's word j."""
    return 32 * (j // 4) + 2 * (j % 4 + 4 * (s % 4)) + s // 4


@triton.jit
def _word_offset(row, j, row_words, WORDS: tl.constexpr):
    """Return the offset of word j of a row of `row_words` words."""
    block, lane = j // 4, 4 * (row % 8) + j % 4
    tile = row // 8 * (row_words // (4 * WORDS)) + block // WORDS
    return (tile * 32 + lane) * WORDS + block % WORDS


@libentry()
@triton.jit(do_not_specialize=["N"])
def multiply_words(weight, x, out, scales_and_zeros, strides, added, M, N, K, steps, META: tl.constexpr):
    """Multiply a tile of a packed weight (M, K) by x (N, K) transposed.

    Numbers along K stay in the order of the words, in which x is read, because a sum has no order. A dequantised
    number is rounded once, to x's dtype.

    Args:
        scales_and_zeros: x's dtype, (K / META.group_k, M, 2).
        strides: `WordStrides`.
        added: `EpilogueOperands`.
        steps: blocks of K in a slice of split-K.
        META: `WordMeta`.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_K: tl.constexpr = META.block_k
    WORDS: tl.constexpr = META.words
    tile = own_tile(M, N, META)
    begin, end = slice_of_k(K, steps, BLOCK_K, META.index)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    q = tl.arange(0, BLOCK_K)
    order = _index_in_block(q // 8, q % 8)
    shifts = 4 * tl.arange(0, 8)[None, None, :]
    pairs = scales_and_zeros + tile.rows * strides.row
    for k in range(begin, end, BLOCK_K):
        j = k // 8 + tl.arange(0, BLOCK_K // 8)
        words = weight + _word_offset(tile.rows[:, None], j[None, :], K // 8, WORDS)
        packed = tl.load(words, mask=tile.row_mask[:, None] & (j < end // 8)[None, :], other=0)
        numbers = ((packed[:, :, None] >> shifts) & 0xF).to(tl.float32) - 8.0
        numbers = tl.reshape(numbers, (BLOCK_M, BLOCK_K))
        group = k // META.group_k * strides.group
        scale = tl.load(pairs + group, mask=tile.row_mask, other=0.0).to(tl.float32)
        zero = tl.load(pairs + group + strides.pair, mask=tile.row_mask, other=0.0).to(tl.float32)
        y = block_of(x, tile.columns, tile.column_mask, k + order, end, strides.x, META.even_k)
        a = tl.fma(
            numbers, tl.broadcast_to(scale[:, None], numbers.shape), tl.broadcast_to(zero[:, None], numbers.shape)
        )
        total = tl.dot(a.to(y.dtype), tl.trans(y), total, out_dtype=tl.float32)
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
