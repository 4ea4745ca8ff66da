"""repeat_interleave: the number of each repeated element, by binary search in the cumulated repeats."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.engine.indexing.table import indexing_table
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import Size
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit(do_not_specialize=["n", "total"])
def _repeat(out, ends, n, total: tl.int64, BLOCK: tl.constexpr):
    """Write for each index of a block the first element whose repeats end behind that index."""
    wait_for_previous_launch()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int64)
    high = low + n
    steps = n
    while steps > 0:
        middle = (low + high) // 2
        before = tl.load(ends + middle, mask=low < high, other=0) <= index
        low = tl.where(before & (low < high), middle + 1, low)
        high = tl.where(before, high, middle)
        steps = steps // 2
    tl.store(out + index, low.to(out.dtype.element_ty), mask=index < total)


@libentry()
@triton.jit(do_not_specialize=["n", "size"])
def _check_repeats(repeats, ends, stride, n, size, BLOCK: tl.constexpr):
    """Check that no repeats of a block are negative, and that `size`, if it is known, is the sum of all.

    With a known size (0 or more) the checks are assertions, as in ATen's kernel. Otherwise negative repeats make the
    last of `ends` negative, which the host reads.
    """
    wait_for_previous_launch()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    repeat = tl.load(repeats + index.to(tl.int64) * stride, mask=index < n, other=0)
    if size >= 0:
        tl.device_assert(repeat >= 0, "repeats can not be negative")
        tl.device_assert(tl.load(ends + n - 1) == size, "Invalid input! In `repeat_interleave`, output_size is no sum")
    else:
        tl.atomic_min(ends + n - 1, -(1 << 62), mask=tl.min(repeat, 0) < 0)


def check_repeats(repeats: torch.Tensor, ends: torch.Tensor, size: int) -> None:
    """Check a vector of repeats, whose cumulative sum is `ends`, against a `size`, or -1 if it is not known."""
    n = repeats.numel()
    block = indexing_table().repeated
    _check_repeats[(-(-n // block),)](repeats, ends, repeats.stride(0), n, size, BLOCK=block, **ASSERTING)


def repeat(out: torch.Tensor, ends: torch.Tensor, total: int | Size) -> None:
    """Write for each of `total` indices the element that is repeated there; `ends` are the cumulated repeats.

    `total` is an int, or a `Size` that the host reads from the device.
    """
    block = indexing_table().repeated
    blocks = total.blocks(block) if isinstance(total, Size) else -(-total // block)
    _repeat[(blocks,)](out, ends, len(ends), total, BLOCK=block)
