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
from tritonite.engine.attention.problem import Problem
from tritonite.engine.gemm.hopper import in_shared_memory
from tritonite.engine.iteration import power_of_2
from tritonite.tune import attention as table

LOG2E = gl.constexpr(1.4426950408889634)
# The rows of a group of four warps, whose tensor cores take as many.
ROWS = gl.constexpr(64)


@gluon.jit
def wait_for_block(buffers, ready, step, wanted):
    """Until the block of a ring that is taken as number `step` has come, where it is `wanted`."""
    STAGES: gl.constexpr = buffers.shape[0]
    mbarrier.wait(ready.index(step % STAGES), step // STAGES % 2, pred=wanted)


def _takes(tensor: torch.Tensor) -> bool:
    """Whether a descriptor can tell of a tensor: elements next to each other, all else 16 bytes apart."""
    every = 16 // tensor.dtype.itemsize
    apart = [tensor.stride(d) for d in range(3) if tensor.shape[d] > 1]
    aligned = tensor.data_ptr() % 16 == 0 and all(stride > 0 and stride % every == 0 for stride in apart)
    return tensor.numel() > 0 and (tensor.stride(3) == 1 or tensor.shape[3] == 1) and aligned


def take(problem: Problem, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take a problem whose operands and results are these, on a device that has what they need."""
    query = problem.query
    return (
        devices.has_wgmma(query.device)
        and problem.bias is None
        and problem.packed is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and all(map(_takes, tensors))
        and max(block_sizes(problem)) in table.WARP_SPECIALIZED
    )


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of blocks of (1, 1, rows, columns), swizzled as tensor cores take them."""
    every, shape = 16 // tensor.dtype.itemsize, tensor.shape
    # Where there is one of them, how far apart they are may be anything.
    whole = -(-shape[3] // every) * every
    strides = [tensor.stride(d) if shape[d] > 1 else whole for d in range(3)]
    return in_shared_memory(AnyLayout(tensor, list(shape), [*strides, 1], [1, 1, rows, columns]))


def block_sizes(problem: Problem) -> tuple[int, int]:
    """The powers of two that hold the elements of a head, and of a value's."""
    least = min(table.WARP_SPECIALIZED)
    return max(least, power_of_2(problem.query.shape[3])), max(least, power_of_2(problem.value.shape[3]))
