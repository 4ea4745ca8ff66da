"""What a product takes that loads through pointers, in microseconds, and what copies for descriptors take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tritonite import devices
from tritonite.engine.gemm import cost
from tritonite.engine.gemm.problem import FEW, Problem

# Microseconds that a warp takes of a multiprocessor for a load of one element a thread, where 16 bytes cannot be loaded
# at a time; loads of twice as many take 1.3 times as long.
LOAD, LONGER = 0.0018, 1.3
# And what a load takes besides where Triton (3.6) lays single elements of 4 bytes, which are to be split into bfloat16,
# out in shared memory across the order they come in: all 32 are in one bank when they are written and when they are
# read. It does so with the second operand of tensor cores.
CONFLICTS = 0.032
# What such a load along K takes besides where parts of float32 leave a thread registers for few of the second operand's
# elements: 11 products of 2,405 rows by 64, with K of 2,405, took 356 us with 32 for a thread, and take 196 with 16.
SCARCE = 0.0083
# What a block of few rows takes to arrive from memory, and from the L2 cache by the bytes of an element. Of 52 products
# of one row of halves in the cache, which the tiles were not fitted to, those chosen take 1.026 of the best one's time,
# and of 68 of up to 16 rows of float32 1.033.
WAITED, WAITED_IN_CACHE = 0.6, {2: 0.15, 4: 0.3}
# What a block takes to arrive from memory by tensor cores' tiles, which have as many on their way as stages but one.
# So one program alone on a multiprocessor takes longer than four of them suggest. 9 rows by 4,096, K = 5,120, take
# 28 us in 64 programs where b's columns are next to each other (cuBLAS 18). Of 2,176 times in memory seven are less.
ARRIVES = 0.8
# The bytes that a multiprocessor has from the L2 cache in a microsecond through pointers: 32 in a cycle, whatever its
# programs are. With this limit, chosen tiles for 60 products of 2 to 16 rows in the cache take 1.028 of the best one's
# time, and without it 1.041.
ARRIVING = 6e4
# What part of its registers a thread may load an operand's block to, in elements of less than 4 bytes, which nothing
# copies asynchronously. Of more the assembler waits for each by itself: 62 rows by 3,072 by 4,297 take 29 us in tiles
# of 64 by 64, two of them at a time, 48 with three of them, and 105 in tiles of 64 by 128.
HELD = 1 / 8
# Of a copy, besides what memory takes; and the bytes that a copy reads and writes in a microsecond.
COPY, COPIED = 1.3, 4e6


def loads(problem: Problem, tiles: Any) -> Any:
    """What loads of less than 16 bytes add to the microseconds of a block, for all programs of a multiprocessor.

    `tiles` are `model.records`.
    """
    size, swapped = problem.dtype.itemsize, tiles["transposed"] == 1
    first, second = [
        np.where(swapped, other, own)
        for own, other in ((problem.a_vector, problem.b_vector), (problem.b_vector, problem.a_vector))
    ]
    # What a warp would have to do, of either operand's block, in loads of one element.
    a, b = [
        np.where(vector < 16, tiles[name] * tiles["BLOCK_K"] / 32 * (LONGER / 2) ** np.log2(vector / size), 0)
        for name, vector in (("BLOCK_M", first), ("BLOCK_N", second))
    ]
    tensor_cores, in_parts = tiles["BLOCK_M"] >= FEW, tiles["in_parts"] == 1
    # There a thread loads 8 bytes of the first operand, or 4 where those do not lie along K, into the registers where
    # they are multiplied, which takes half as long (21 problems, H200), and the second is split before it is laid out.
    along = np.where(swapped, problem.b_inner, problem.a_inner)
    alone = tiles["BLOCK_M"] * tiles["BLOCK_K"] / 64
    a = np.where(in_parts, np.where(along & (first >= 8), 0, alone), a)
    conflicts = tensor_cores & (size == 4) & (second == 4) & ~in_parts
    # The few rows that are added up without tensor cores come while what they are multiplied with does.
    a = np.where(tensor_cores, a, 0)
    # Two threads for each of the block's rows load 32 elements each of the second operand, or more.
    scarce = in_parts & np.where(swapped, problem.a_inner, problem.b_inner)
    scarce &= tiles["BLOCK_N"] * tiles["BLOCK_K"] >= 64 * tiles["BLOCK_M"]
    # Conflicts are of single elements, of 4 bytes each.
    added = LOAD * (a + b) + np.where(conflicts, CONFLICTS * b, 0) + np.where(scarce, SCARCE * b, 0)
    return np.where(tiles["descriptors"] == 1, 0, tiles["programs"] * added)


def waiting(problem: Problem, tiles: Any, work: cost.Work, multiprocessors: int) -> Any:
    """The microseconds for which a multiprocessor waits at least for operands through pointers.

    Without stages a program waits for each of its blocks, however few others there are. Of more rows what all programs
    read from the cache counts; how long memory takes, the table says.
    """
    programs = -(-cost.count(problem, tiles) * work.splits // multiprocessors)
    sides = tiles["BLOCK_M"] + tiles["BLOCK_N"] + tiles["MORE_N"]
    read = programs * work.steps * sides * tiles["BLOCK_K"] * problem.dtype.itemsize
    in_flight = np.maximum(1, tiles["num_stages"] - 1)
    arriving, waited = work.rounds * work.steps * ARRIVES / in_flight, WAITED
    if problem.is_cached:
        arriving, waited = read / ARRIVING, WAITED_IN_CACHE[problem.dtype.itemsize]
    least = np.where(tiles["BLOCK_M"] < FEW, work.steps * waited, arriving)
    return np.where(tiles["descriptors"] == 1, 0.0, least)


def can_be_held(problem: Problem, tiles: Any) -> Any:
    """For which of `tiles`, which are `model.records`, a thread's elements of a block on their way have registers."""
    a, b = [
        tiles[name] * (vector < 4) for name, vector in (("BLOCK_M", problem.a_vector), ("BLOCK_N", problem.b_vector))
    ]
    threads = 32 * tiles["num_warps"]
    registers = np.minimum(256, devices.current.registers // (threads * tiles["programs"]))
    held = np.maximum(a, b) * tiles["BLOCK_K"] <= HELD * registers * threads
    return held | (tiles["BLOCK_M"] <= FEW) | (tiles["descriptors"] == 1)


def copying(sizes: Sequence[int]) -> float:
    """The microseconds of copies of so many bytes each; to the interpreter it is all the same how elements lie."""
    if devices.current.interpreted:
        return math.inf if sizes else 0.0
    return sum(COPY + 2 * size / COPIED for size in sizes)
