"""Elements of a block by thread: a tuple of EACH vectors, whose lane t is an element of thread t.

Kernels that rank elements with warp instructions have to know which thread holds which element. Triton gives lane t of
a vector of THREADS elements to thread t. So a tuple of such vectors is a layout that Triton does not change.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def index_in_block(k, THREADS: tl.constexpr, EACH: tl.constexpr):
    """Return the index in the block of every thread's k-th element.

    A warp has contiguous elements of the block, and the lanes of a warp load contiguous elements.
    """
    LANES: tl.constexpr = min(32, THREADS)
    thread = tl.arange(0, THREADS)
    return (thread // LANES * (LANES * EACH) + thread % LANES) + k * LANES


@triton.jit
def load_block(row, begin, step, n, THREADS: tl.constexpr, EACH: tl.constexpr):
    """Load the block of a row of n elements that starts at index `begin`: 64-bit elements as int64, others as int32.

    `step` is the stride along the row. Elements behind the row's end are 0.
    """
    found = ()
    for k in tl.static_range(EACH):
        index = begin + index_in_block(k, THREADS, EACH)
        value = tl.load(row + index * step, mask=index < n, other=0)
        found = found + (value if value.dtype.primitive_bitwidth == 64 else value.to(tl.int32),)
    return found
