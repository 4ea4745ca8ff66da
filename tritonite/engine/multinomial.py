"""Samples of categories with replacement, as ATen draws them: rows of weights are normalized, and then searched.

`check_weights` asserts that weights are valid, `normalized` divides rows by their sums in ATen's order of addition, and
`sample_rows` searches the cumulative sums for uniform random numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import INT32_LIMIT, power_of_2
from tritonite.errors import Decline
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.random import uniform
from tritonite.language.reduce import exact_log2
from tritonite.runtime.contract import empty, random_state
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

# Threads of ATen's blocks, the most rows of its grid, and the offset by which a row advances the generator.
_ATEN_BLOCK = 128
_ATEN_ROWS = 65535
_ADVANCE = 4
# Lanes that add up a row, equal to ATen's threads.
_LANES = 1024
_BLOCK = 512
_CHECKED = 2048


@libentry()
@triton.jit(do_not_specialize=["n"])
def _check_weights(weights, row_step, step, n, BLOCK: tl.constexpr):
    """Assert that the weights of a row are finite, not negative and not all 0."""
    wait_for_previous_launch()
    row = weights + tl.program_id(0).to(tl.int64) * row_step
    found = tl.zeros((BLOCK,), tl.int1)
    for begin in range(0, n, BLOCK):
        column = begin + tl.arange(0, BLOCK).to(tl.int64)
        weight = tl.load(row + column * step, mask=column < n, other=0)
        tl.device_assert((weight >= 0) & (weight < float("inf")), "a weight that is negative or not finite")
        found = found | (weight > 0)
    tl.device_assert(tl.max(found.to(tl.int32), axis=0) > 0, "weights that are all 0")


def check_weights(weights: torch.Tensor) -> None:
    """Stop the program if a row has weights for which ATen raises."""
    rows, n = weights.shape
    block = min(power_of_2(n), _CHECKED)
    _check_weights[(rows,)](weights, *weights.stride(), n, BLOCK=block, **ASSERTING)


@triton.jit
def _sum_pairwise(x):
    """Return the sum of each row of a block of shape (rows, 2**k), adding its two halves in every step."""
    ROWS: tl.constexpr = x.shape[0]
    LENGTH: tl.constexpr = x.shape[1]
    for i in tl.static_range(exact_log2(LENGTH)):
        left, right = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, LENGTH // 2 ** (i + 1))), (0, 2, 1)))
        x = left + right
    return tl.reshape(x, (ROWS,))


@libentry()
@triton.jit(do_not_specialize=["n"])
def _normalize(out, weights, row_step, step, n, BLOCK: tl.constexpr, WARP: tl.constexpr):
    """Divide a row by its sum, in the order of ATen's additions.

    A lane adds every BLOCK-th weight, then each warp is summed by halves, and then the sums of the warps are.
    """
    wait_for_previous_launch()
    row = weights + tl.program_id(0).to(tl.int64) * row_step
    lane = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.zeros((BLOCK,), weights.dtype.element_ty)
    for begin in range(0, n, BLOCK):
        total += tl.load(row + (begin + lane) * step, mask=begin + lane < n, other=0)
    warps = _sum_pairwise(tl.reshape(total, (BLOCK // WARP, WARP)))
    total = tl.broadcast_to(_sum_pairwise(tl.reshape(warps, (1, BLOCK // WARP))), (BLOCK,))
    for begin in range(0, n, BLOCK):
        column = begin + lane
        weight = tl.load(row + column * step, mask=column < n, other=0)
        tl.store(out + tl.program_id(0).to(tl.int64) * n + column, true_divide(weight, total), mask=column < n)


def normalized(weights: torch.Tensor) -> torch.Tensor:
    """Return rows of weights divided by their sums, contiguous."""
    rows, n = weights.shape
    result = empty((rows, n), weights.dtype, weights.device)
    warp = devices.warp_size()
    block = min(max(power_of_2(n), warp), _LANES)
    _normalize[(rows,)](result, weights, *weights.stride(), n, BLOCK=block, WARP=warp)
    return result


@libentry()
@triton.jit(do_not_specialize=["n", "samples", "blocks", "width", "height", "steps", "seed", "offset"])
def _sample(
    out,
    weights,
    sums,
    n,
    samples,
    blocks,
    width,
    height,
    steps,
    seed: tl.int64,
    offset: tl.int64,
    BLOCK: tl.constexpr,
):
    """Write the categories of a block of a row's samples, by binary search of uniform numbers in the cumulative sums.

    ATen's grid has `height` rows of `width` threads.
    """
    wait_for_previous_launch()
    row = (tl.program_id(0) // blocks).to(tl.int64)
    sample = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = sample < samples
    counter = (offset.to(tl.int64) >> 2) + row // height
    drawn = uniform(seed.to(tl.int64), counter, row % height * width + sample)[0]
    sums += row * n
    weights += row * n
    tl.device_assert(tl.load(sums + n - 1) > 0, "weights whose sum is 0")
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + n
    for _ in range(steps):
        middle = low + (high - low) // 2
        searching = mask & (low < high)
        below = tl.load(sums + middle, mask=searching, other=0) < drawn.to(sums.dtype.element_ty)
        high = tl.where(searching & (below == 0), middle, high)
        low = tl.where(searching & below, middle + 1, low)
    low = tl.minimum(low, n - 1)
    # Step back to a category whose weight is not 0.
    empty = mask & (low >= 1)
    while tl.max(empty.to(tl.int32), axis=0) > 0:
        empty = empty & (low >= 1) & (tl.load(weights + low, mask=empty, other=1) == 0)
        low -= empty.to(tl.int32)
    tl.store(out + row * samples + sample, low.to(tl.int64), mask=mask)


def sample_rows(
    weights: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, generator: torch.Generator | None
) -> None:
    """Write categories with replacement to a contiguous `out`, as ATen's kernel draws them.

    `weights` are normalized rows and `sums` their cumulative sums.
    """
    rows, n = weights.shape
    samples = out.shape[-1]
    width, height = -(-samples // _ATEN_BLOCK) * _ATEN_BLOCK, min(rows, _ATEN_ROWS)
    if width * height >= INT32_LIMIT:
        raise Decline(f"{samples} samples of {rows} rows, more than ATen's 32-bit thread numbers")
    block = min(power_of_2(samples), _BLOCK)
    blocks = -(-samples // block)
    state = random_state(out.device, -(-rows // height) * _ADVANCE, generator)
    _sample[(rows * blocks,)](
        *(out, weights, sums, n, samples, blocks, width, height, n.bit_length(), *state), BLOCK=block, **ASSERTING
    )
