"""Estimated time of loads through pointers, and of padded copies for TMA, in microseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tritonite import devices
from tritonite.engine.gemm import cost
from tritonite.engine.gemm.problem import FEW, Problem
from tritonite.engine.gemm.table import FixedCosts


def loads(problem: Problem, tiles: Any, fixed: FixedCosts) -> Any:
    """Return what loads of less than 16 bytes add to the time of a block, for all programs of a multiprocessor.

    `tiles` are `cost.records`; the result is an array over them.
    """
    size, swapped = problem.dtype.itemsize, tiles["transposed"] == 1
    first, second = [
        np.where(swapped, other, own)
        for own, other in ((problem.a_vector, problem.b_vector), (problem.b_vector, problem.a_vector))
    ]
    lanes = devices.warp_size()
    # A warp's loads of either operand's block, in units of loads of one element a thread.
    a, b = [
        np.where(
            vector < 16, tiles[name] * tiles["BLOCK_K"] / lanes * (fixed.wider_load / 2) ** np.log2(vector / size), 0
        )
        for name, vector in (("BLOCK_M", first), ("BLOCK_N", second))
    ]
    tensor_cores, hopper_fp32 = tiles["BLOCK_M"] >= FEW, tiles["hopper_fp32"] == 1
    # There a thread loads 8 bytes of the first operand, or 4 if K is not contiguous, to the registers of its products.
    # Such a load takes half as long. The second operand is split into terms before it is laid out.
    along = np.where(swapped, problem.b_inner, problem.a_inner)
    alone = tiles["BLOCK_M"] * tiles["BLOCK_K"] / 64
    a = np.where(hopper_fp32, np.where(along & (first >= 8), 0, alone), a)
    conflicts = tensor_cores & (size == 4) & (second == 4) & ~hopper_fp32
    # Loads of few rows, without tensor cores, overlap those of the second operand.
    a = np.where(tensor_cores, a, 0)
    # Two threads for each row of a's block load at least 32 elements each of the second operand.
    few_registers = hopper_fp32 & np.where(swapped, problem.a_inner, problem.b_inner)
    few_registers &= tiles["BLOCK_N"] * tiles["BLOCK_K"] >= 64 * tiles["BLOCK_M"]
    added = fixed.load * (a + b) + np.where(conflicts, fixed.bank_conflicts * b, 0)
    added = added + np.where(few_registers, fixed.few_registers * b, 0)
    return np.where(tiles["descriptors"] == 1, 0, tiles["programs"] * added)


def waiting(problem: Problem, tiles: Any, work: cost.Work, multiprocessors: int, fixed: FixedCosts) -> Any:
    """Return the least time that a multiprocessor waits for operands through pointers.

    A program waits for the latency of each block, num_stages - 1 of which are in flight, however few programs there
    are. With more than few rows in the cache, the multiprocessor's L2 bandwidth counts instead.
    """
    programs = -(-cost.count(problem, tiles) * work.splits // multiprocessors)
    sides = tiles["BLOCK_M"] + tiles["BLOCK_N"] + tiles["MORE_N"]
    read = programs * work.steps * sides * tiles["BLOCK_K"] * problem.dtype.itemsize
    in_flight = np.maximum(1, tiles["num_stages"] - 1)
    arriving, few_rows = work.rounds * work.steps * fixed.block_latency / in_flight, fixed.few_rows_latency
    if problem.is_cached:
        arriving, few_rows = read / fixed.l2_bandwidth, fixed.few_rows_l2_latency(problem.dtype.itemsize)
    least = np.where(tiles["BLOCK_M"] < FEW, work.steps * few_rows, arriving)
    return np.where(tiles["descriptors"] == 1, 0.0, least)


def can_prefetch(problem: Problem, tiles: Any, fixed: FixedCosts) -> Any:
    """Return a mask of the tiles whose prefetched blocks of elements of less than 4 bytes fit in registers."""
    a, b = [
        tiles[name] * (vector < 4) for name, vector in (("BLOCK_M", problem.a_vector), ("BLOCK_N", problem.b_vector))
    ]
    threads = devices.warp_size() * tiles["num_warps"]
    registers = np.minimum(256, devices.current.registers // (threads * tiles["programs"]))
    held = np.maximum(a, b) * tiles["BLOCK_K"] <= fixed.prefetch_registers * registers * threads
    return held | (tiles["BLOCK_M"] <= FEW) | (tiles["descriptors"] == 1)


def copying(sizes: Sequence[int], fixed: FixedCosts) -> float:
    """Return the time of copies of `sizes` bytes each. The interpreter gains nothing by alignment, so never copies."""
    if devices.current.interpreted:
        return math.inf if sizes else 0.0
    return sum(fixed.copy + 2 * size / fixed.copy_bandwidth for size in sizes)
