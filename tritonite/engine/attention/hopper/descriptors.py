"""What the warp-specialised kernels of attention share: what they take, its tensor descriptors, and their waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as AnyLayout

from tritonite import devices
from tritonite.engine.attention import table as table
from tritonite.engine.attention.problem import Problem
from tritonite.engine.gemm.kernels.hopper import in_shared_memory, load
from tritonite.engine.iteration import power_of_2

LOG2E = gl.constexpr(1.4426950408889634)
# The rows of a group of four warps, whose tensor cores take as many.
ROWS = gl.constexpr(64)


@gluon.jit
def wait_for_block(buffers, ready, step, wanted):
    """Until the block of a ring that is taken as number `step` has come, where it is `wanted`."""
    STAGES: gl.constexpr = buffers.shape[0]
    mbarrier.wait(ready.index(step % STAGES), step // STAGES % 2, pred=wanted)


@gluon.jit
def copy_bias(bias, biases, place, ready, stage, STAGES: gl.constexpr, OF_KEYS: gl.constexpr):
    """Copy what is added to scores at `place`: a block for each group's rows, which are keys or else queries."""
    batch, head, row, column = place
    COPIES: gl.constexpr = biases.shape[0] // STAGES
    # Of what is broadcast there is one.
    batch, head = gl.minimum(batch, bias.shape[0] - 1), gl.minimum(head, bias.shape[1] - 1)
    row = gl.minimum(row, bias.shape[2] - 1)
    for i in gl.static_range(COPIES):
        first = [batch, head, row, column + i * ROWS] if OF_KEYS else [batch, head, row + i * ROWS, column]
        load(bias, first, ready, biases.index(stage * COPIES + i))


@gluon.jit
def biased(scores, biases, step, which, factor, STAGES: gl.constexpr, OF_KEYS: gl.constexpr):
    """Scores in nats of group `which` beside a bias, of products times `factor`; without a bias the products."""
    result = scores
    if biases is not None:
        COPIES: gl.constexpr = biases.shape[0] // STAGES
        bias = biases.index(step % STAGES * COPIES + which % COPIES).reshape((biases.shape[3], biases.shape[4]))
        if OF_KEYS:
            bias = bias.permute((1, 0))
        result = scores * factor + bias.load(scores.type.layout).to(gl.float32)
    return result


@gluon.jit
def by_thread(x):
    """(rows, columns) in five dimensions, of which the fourth is that of the four threads that have a row.

    A thread has two of every eight columns. To fold the others one after the other makes a tree, which waits for its
    operations less often than a row of them does.
    """
    return x.reshape((x.shape[0], x.shape[1] // 32, 4, 4, 2))


@gluon.jit
def thread_sums(x):
    """The sums of rows by thread, in four columns."""
    return gl.sum(gl.sum(gl.sum(by_thread(x), 4), 2), 1)


def _takes(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> bool:
    """Whether a descriptor can tell of a tensor: elements next to each other, all else 16 bytes apart."""
    every = 16 // tensor.dtype.itemsize
    apart = [tensor.stride(d) for d in range(3) if (shape or tensor.shape)[d] > 1]
    aligned = tensor.data_ptr() % 16 == 0 and all(stride > 0 and stride % every == 0 for stride in apart)
    return tensor.numel() > 0 and (tensor.stride(3) == 1 or tensor.shape[3] == 1) and aligned


def _bias_shape(bias: torch.Tensor) -> list[int]:
    """That of a bias without the dimensions that it is broadcast over: a descriptor has no strides of 0."""
    return [1 if bias.stride(d) == 0 else bias.shape[d] for d in range(3)] + [bias.shape[3]]


def _takes_bias(problem: Problem) -> bool:
    bias = problem.bias
    return bias is None or (bias.dtype is problem.query.dtype and _takes(bias, _bias_shape(bias)))


def take(problem: Problem, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take a problem whose operands and results are these, on a device that has what they need."""
    query = problem.query
    return (
        devices.has_wgmma(query.device)
        and problem.packed is None
        and problem.dropout is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and _takes_bias(problem)
        and all(map(_takes, tensors))
        and max(block_sizes(problem)) in table.WARP_SPECIALIZED
    )


def _blocks(tensor: torch.Tensor, shape: Sequence[int], rows: int, columns: int) -> AnyLayout:
    """Blocks of (1, 1, rows, columns)."""
    every = 16 // tensor.dtype.itemsize
    # Where there is one of them, how far apart they are may be anything.
    whole = -(-shape[3] // every) * every
    strides = [tensor.stride(d) if shape[d] > 1 else whole for d in range(3)]
    return AnyLayout(tensor, list(shape), [*strides, 1], [1, 1, rows, columns])


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of blocks of (1, 1, rows, columns), swizzled as tensor cores take them."""
    return in_shared_memory(_blocks(tensor, tensor.shape, rows, columns))


def bias_descriptor(bias: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of blocks of a bias of so many rows, or of one row where it is the same for all queries."""
    shape = _bias_shape(bias)
    if shape[2] > 1:
        return in_shared_memory(_blocks(bias, shape, rows, columns))
    blocks = _blocks(bias, shape, 1, columns)
    layout = gl.NVMMASharedLayout(0, 8 * bias.dtype.itemsize, 4)
    return TensorDescriptor(bias, blocks.shape, blocks.strides, blocks.block_shape, layout)


def block_sizes(problem: Problem) -> tuple[int, int]:
    """The powers of two that hold the elements of a head, and of a value's."""
    least = min(table.WARP_SPECIALIZED)
    return max(least, power_of_2(problem.query.shape[3])), max(least, power_of_2(problem.value.shape[3]))
