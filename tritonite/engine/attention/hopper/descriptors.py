"""Shared parts of the warp-specialised kernels: which calls they serve, tensor descriptors, biases, waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as AnyLayout

from tritonite import devices
from tritonite.engine.attention import table
from tritonite.engine.attention.problem import Problem
from tritonite.engine.gemm.kernels.hopper import in_shared_memory, load
from tritonite.engine.iteration import power_of_2
from tritonite.language.shared_memory import new_blocks

LOG2E = gl.constexpr(1.4426950408889634)
# Rows of a warp group, which one wgmma multiplies.
ROWS = gl.constexpr(64)


class Buffers(NamedTuple):
    """Shared memory by tensor: what a program loads once, and rings of blocks by stage.

    grad: the gradient of out.
    p: probabilities that one consumer group hands to the other.
    """

    q: Any
    k: Any
    v: Any
    grad: Any = None
    bias: Any = None
    logsumexp: Any = None
    delta: Any = None
    excess: Any = None
    p: Any = None


class Barriers(NamedTuple):
    """Barriers of `Buffers`: `ready` when a block has arrived, `free` when consumers have used it.

    free: of all rings that queries come through.
    turns: of ping-pong.
    """

    q_ready: Any
    k_ready: Any
    v_ready: Any
    q_free: Any = None
    k_free: Any = None
    v_free: Any = None
    grad_ready: Any = None
    free: Any = None
    p_ready: Any = None
    p_free: Any = None
    turns: Any = None


@gluon.jit
def new_bias_blocks(bias, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Allocate shared memory for STAGES biases: a block for each of GROUPS consumer groups, or one row for all.

    Without a bias, return None.
    """
    biases = None
    if bias is not None:
        COPIES: gl.constexpr = GROUPS if bias.block_shape[2] == ROWS else 1
        biases = new_blocks(bias, STAGES * COPIES)
    return biases


@gluon.jit
def wait_for_block(buffers, ready, step, wanted):
    """Wait for the block that a ring holds at `step`, if it is `wanted`."""
    STAGES: gl.constexpr = buffers.shape[0]
    mbarrier.wait(ready.index(step % STAGES), step // STAGES % 2, pred=wanted)


@gluon.jit
def copy_bias(bias, biases, corner, ready, stage, STAGES: gl.constexpr, OF_KEYS: gl.constexpr):
    """Start to copy a bias at `corner` (batch, head, query, key): a block for each consumer group.

    With OF_KEYS the groups have successive keys, otherwise successive queries.
    """
    batch, head, row, column = corner
    COPIES: gl.constexpr = biases.shape[0] // STAGES
    # Broadcast dimensions have size 1 in the descriptor.
    batch, head = gl.minimum(batch, bias.shape[0] - 1), gl.minimum(head, bias.shape[1] - 1)
    row = gl.minimum(row, bias.shape[2] - 1)
    for i in gl.static_range(COPIES):
        first = [batch, head, row, column + i * ROWS] if OF_KEYS else [batch, head, row + i * ROWS, column]
        load(bias, first, ready, biases.index(stage * COPIES + i))


@gluon.jit
def scale_and_add_bias(scores, biases, step, which, factor, STAGES: gl.constexpr, OF_KEYS: gl.constexpr):
    """Return the scores in nats of consumer group `which`: products times `factor` plus the bias.

    Without a bias, return the products as they are.
    """
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
    """Reshape (rows, columns) to five dimensions, the fourth of which is the four threads that share a row.

    A thread has two of every eight columns. Reducing the other dimensions one after another makes a tree, whose
    operations wait for each other less often than those of a chain.
    """
    return x.reshape((x.shape[0], x.shape[1] // 32, 4, 4, 2))


@gluon.jit
def thread_sums(x):
    """Return each of the four threads' sum of its columns of a row, (rows, 4)."""
    return gl.sum(gl.sum(gl.sum(by_thread(x), 4), 2), 1)


def _fits_tma(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> bool:
    """Return whether TMA can address a tensor: contiguous elements, 16-byte alignment of pointer and other strides."""
    every = 16 // tensor.dtype.itemsize
    strides = [tensor.stride(d) for d in range(3) if (shape or tensor.shape)[d] > 1]
    aligned = tensor.data_ptr() % 16 == 0 and all(stride > 0 and stride % every == 0 for stride in strides)
    return tensor.numel() > 0 and (tensor.stride(3) == 1 or tensor.shape[3] == 1) and aligned


def _bias_shape(bias: torch.Tensor) -> list[int]:
    """Return a bias's shape with size 1 for broadcast dimensions, since TMA has no stride 0."""
    return [1 if bias.stride(d) == 0 else bias.shape[d] for d in range(3)] + [bias.shape[3]]


def _fits_bias(problem: Problem) -> bool:
    bias = problem.bias
    return bias is None or (bias.dtype is problem.query.dtype and _fits_tma(bias, _bias_shape(bias)))


def serves_operands(problem: Problem, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the warp-specialised kernels serve a problem whose operands and results are `tensors`."""
    query = problem.query
    return (
        devices.has_wgmma(query.device)
        and problem.packed is None
        and problem.dropout is None
        and problem.plain
        and query.dtype in (torch.float16, torch.bfloat16)
        and _fits_bias(problem)
        and all(map(_fits_tma, tensors))
        and max(block_sizes(problem)) in table.WARP_SPECIALIZED
    )


def _blocks(tensor: torch.Tensor, shape: Sequence[int], rows: int, columns: int) -> AnyLayout:
    """Return a descriptor of blocks of (1, 1, rows, columns), without a layout in shared memory."""
    every = 16 // tensor.dtype.itemsize
    # The stride of a dimension of size 1 may be anything, and TMA wants a multiple of 16 bytes.
    whole = -(-shape[3] // every) * every
    strides = [tensor.stride(d) if shape[d] > 1 else whole for d in range(3)]
    return AnyLayout(tensor, list(shape), [*strides, 1], [1, 1, rows, columns])


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a descriptor of blocks of (1, 1, rows, columns), swizzled for wgmma."""
    return in_shared_memory(_blocks(tensor, tensor.shape, rows, columns))


def bias_descriptor(bias: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a descriptor of blocks of a bias, of one row where the bias is the same for all queries."""
    shape = _bias_shape(bias)
    if shape[2] > 1:
        return in_shared_memory(_blocks(bias, shape, rows, columns))
    blocks = _blocks(bias, shape, 1, columns)
    layout = gl.NVMMASharedLayout(0, 8 * bias.dtype.itemsize, 4)
    return TensorDescriptor(bias, blocks.shape, blocks.strides, blocks.block_shape, layout)


def block_sizes(problem: Problem) -> tuple[int, int]:
    """Return block_d and block_v: powers of two that hold a head and a value, at least the smallest tile's."""
    least = min(table.WARP_SPECIALIZED)
    return max(least, power_of_2(problem.query.shape[3])), max(least, power_of_2(problem.value.shape[3]))
