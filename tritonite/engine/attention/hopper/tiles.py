"""Device functions of the warp-specialised backward kernels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tritonite.engine.attention.hopper.descriptors import ROWS

# Consumer warp groups of a program.
GROUPS = gl.constexpr(2)


@gluon.jit
def as_operand(tile, DTYPE: gl.constexpr, acc):
    """Convert a tile to the first operand, in registers, of a product that is added to `acc`."""
    return gl.convert_layout(tile.to(DTYPE), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def matrix(buffers, i):
    """Return block i of a ring in shared memory as (rows, columns)."""
    return buffers.index(i).reshape((buffers.shape[3], buffers.shape[4]))


@gluon.jit
def opaque_index(i, step):
    """Return `i`, in a way that the compiler cannot prove constant over steps.

    A constant index would have the compiler keep the block's MMA descriptors in registers, which are scarce.
    """
    return i + step // 2**30


@gluon.jit
def start_product(a, b, layout: gl.constexpr):
    """Start a @ b.T of ROWS rows in shared memory and a block."""
    COLUMNS: gl.constexpr = b.shape[0]
    zeros = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)
