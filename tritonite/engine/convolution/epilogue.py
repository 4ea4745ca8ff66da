"""The end of convolutions: a residual, an activation, the sums before it for the gradient, and a pointwise program."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite.engine.fusing import epilogue_sharing
from tritonite.engine.iteration import same_strides
from tritonite.engine.pointwise.embedded import ResultProgram, evaluate_result_program
from tritonite.errors import Decline


class Epilogue(NamedTuple):
    """Operations on a convolution before it is stored: activation(convolution + bias + residual)."""

    # A `triton.jit` function of a block in the dtype of the sums, or None.
    activation: Any = None
    # Tensors of the shape and strides of the result, or None: an addend, and where to store the activation's operand.
    residual: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    # A pointwise program of all that, and its further operands: vectors with an element for each channel where
    # `channels` says so, otherwise tensors of the shape and strides of the result.
    program: ResultProgram | None = None
    more: tuple[torch.Tensor, ...] = ()
    channels: tuple[bool, ...] = ()


NO_EPILOGUE = Epilogue()


def with_program(out: torch.Tensor, epilogue: Epilogue) -> tuple[torch.Tensor, Epilogue]:
    """Return the result in memory, and the epilogue with the pointwise program that makes it, if one is fused.

    The result is (N, C, D, H, W). Declines operands of other layouts than the result's and the channels'.
    """
    fused = epilogue_sharing(out)
    if fused is None:
        return out, epilogue
    shape = fused.result.shape
    if len(fused.outs) > 1:
        raise Decline("several results of a program")
    (result,) = fused.outs
    more, channels = [], []
    for tensor in fused.tensors:
        own = tensor.expand(shape)
        vector = own.movedim(1, -1)[(0,) * (len(shape) - 1)]
        others = [own.stride(d) for d, size in enumerate(shape) if d != 1 and size > 1]
        channels.append(not same_strides(shape, own.stride(), result.stride()))
        if channels[-1] and (any(others) or (vector.stride(0) != 1 and shape[1] > 1)):
            raise Decline("an operand that has neither the layout of the convolution's result nor that of its channels")
        more.append(vector if channels[-1] else own)
    program = ResultProgram.of(fused.program, fused.result, fused.tensors, fused.numbers)
    while result.dim() < 5:
        result = result.unsqueeze(2)
    return result, epilogue._replace(program=program, more=tuple(more), channels=tuple(channels))


@triton.jit
def _after_program(total, more, offset, mask, channel, PROGRAM: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the result of a program for a block of the convolution and of further operands.

    `channel` has the block's channels and their mask.
    """
    values = ()
    for i in tl.static_range(len(more)):
        if CHANNELS[i]:
            values = values + (tl.load(more[i] + channel[0], mask=channel[1], other=0),)
        else:
            values = values + (tl.load(more[i] + offset, mask=mask, other=0),)
    return tl.broadcast_to(evaluate_result_program(PROGRAM, total, values)[0], total.shape)


@triton.jit
def apply_epilogue(
    total,
    residual,
    sums,
    offset,
    mask,
    ACTIVATION: tl.constexpr,
    more=None,
    channel=None,
    PROGRAM: tl.constexpr = None,
    CHANNELS: tl.constexpr = None,
):
    """Return ACTIVATION(total + residual) for a block, and store ACTIVATION's operand in `sums` at the same offsets.

    A PROGRAM makes the result of that, of `more` tensors of which CHANNELS are vectors, and of the block's `channel`.
    Kernels of Triton and of Gluon call this function.

    Args:
        total: a block of the convolution plus the bias.
        residual, sums: addresses of the tensors, or None.
        offset, mask: of the block's elements.
        ACTIVATION: a device function of a block, or None.
    """
    if residual is not None:
        total += tl.load(residual + offset, mask=mask, other=0.0).to(total.dtype)
    if sums is not None:
        tl.store(sums + offset, total.to(sums.dtype.element_ty), mask=mask)
    if ACTIVATION is not None:
        total = ACTIVATION(total)
    if PROGRAM is not None:
        total = _after_program(total, more, offset, mask, channel, PROGRAM, CHANNELS)
    return total


@triton.jit
def store_results(
    total,
    out,
    residual,
    sums,
    offset,
    mask,
    ACTIVATION: tl.constexpr,
    more=None,
    channel=None,
    PROGRAM: tl.constexpr = None,
    CHANNELS: tl.constexpr = None,
):
    """Store the result of `apply_epilogue` in `out`."""
    total = apply_epilogue(total, residual, sums, offset, mask, ACTIVATION, more, channel, PROGRAM, CHANNELS)
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=mask)
