"""Tiles of the backward pass as tensor cores take them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tritonite.engine.attention.hopper.descriptors import ROWS

# The groups of four warps that multiply.
GROUPS = gl.constexpr(2)


@gluon.jit
def in_halves(tile, DTYPE: gl.constexpr, total):
    """A tile as the first operand of a product that is added to `total`, in registers."""
    return gl.convert_layout(tile.to(DTYPE), gl.DotOperandLayout(0, total.type.layout, 2))


@gluon.jit
def matrix(buffers, i):
    """A block in shared memory, of rows and columns."""
    return buffers.index(i).reshape((buffers.shape[3], buffers.shape[4]))


@gluon.jit
def again(i, step):
    """The same number at every step, which the compiler does not see.

    Else it would keep what tensor cores are told of a block in registers, of which there are not enough.
    """
    return i + step // 2**30


@gluon.jit
def products(a, b, layout: gl.constexpr):
    """Start the products of rows and all rows of another matrix."""
    COLUMNS: gl.constexpr = b.shape[0]
    nothing = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    return warpgroup_mma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)
