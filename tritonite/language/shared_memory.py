"""Shared memory of warp-specialised kernels in Gluon: blocks of tensor descriptors, and barriers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def new_blocks(descriptor, COUNT: gl.constexpr):
    """Allocate shared memory for COUNT blocks of a descriptor."""
    return gl.allocate_shared_memory(descriptor.dtype, [COUNT] + descriptor.block_shape, descriptor.layout)


@gluon.jit
def new_barriers(COUNT: gl.constexpr):
    """Allocate shared memory for COUNT barriers."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def init_barriers(rings, arrivals):
    """Initialise rings of barriers, the first of which is the longest; `arrivals` end a phase of each ring.

    An arrival is a number or a name: Triton 3.7 refuses a field of a named tuple within a tuple.
    """
    LONGEST: gl.constexpr = rings[0].shape[0]
    for i in gl.static_range(LONGEST):
        for ring in gl.static_range(len(rings)):
            if i < rings[ring].shape[0]:
                mbarrier.init(rings[ring].index(i), count=arrivals[ring])
