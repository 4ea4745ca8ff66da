"""Host functions of the causal depthwise convolution: block choice and launches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritonite import devices
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.engine.short_convolution.kernels import (
    add_partials,
    append_token,
    convolution_gradients,
    convolve_tokens,
)
from tritonite.engine.short_convolution.meta import (
    ConvolutionMeta,
    Operands,
    OperandStrides,
    Strides,
    convolution_table,
)
from tritonite.runtime.contract import empty

# The most taps; kernels are unrolled over pairs of them.
LARGEST_WIDTH = 16


class Convolution(NamedTuple):
    """Operands of a convolution, whose activation is SiLU if `silu`.

    x: (batch, channels, tokens). weight: (channels, width). bias: (channels,) or None. state: (batch, channels, tokens
    before the first) or None.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor | None
    silu: bool

    @property
    def operands(self) -> Operands:
        # A state without elements has nothing to read.
        state = self.state if self.state is not None and self.state.shape[2] else None
        return Operands(self.x, self.weight, self.bias, state)

    @property
    def strides(self) -> OperandStrides:
        return OperandStrides(
            Strides(*self.x.stride()),
            self.weight.stride(),
            0 if self.bias is None else self.bias.stride(0),
            Strides(*((0, 0, 0) if self.state is None else self.state.stride())),
        )

    def meta(self, *others: torch.Tensor) -> ConvolutionMeta:
        """Return the facts of a kernel over blocks of channels and tokens; offsets reach `others`, too."""
        table, (_, n_channels, n_tokens) = convolution_table(), self.x.shape
        along_channels = self.x.stride(1) == 1 and self.x.stride(2) != 1
        channels, tokens = table.along_channels if along_channels else table.along_tokens
        # A block that the tensor does not fill one way is longer the other way.
        size = channels * tokens
        least_channels, least_tokens = power_of_2(n_channels), power_of_2(n_tokens + self.weight.shape[1] - 1)
        channels, tokens = min(channels, least_channels), min(tokens, least_tokens)
        channels = min(size // tokens, max(channels, least_channels))
        tokens = min(size // channels, max(tokens, least_tokens))
        return ConvolutionMeta(
            index=offset_type(self.x, self.weight, *[each for each in (self.state, *others) if each is not None]),
            channels=channels,
            tokens=tokens,
            width=self.weight.shape[1],
            silu=self.silu,
        )


def convolve(work: Convolution, out: torch.Tensor) -> None:
    """Write the convolution to `out`, of x's shape."""
    (batch, channels, tokens), meta = work.x.shape, work.meta(out)
    blocks = -(-tokens // meta.tokens)
    grid = (batch * -(-channels // meta.channels) * blocks,)
    if all(grid):
        convolve_tokens[grid](
            *(work.operands, out, work.strides, Strides(*out.stride()), channels, tokens, blocks),
            META=meta,
            num_warps=convolution_table().num_warps,
        )


def gradients(
    work: Convolution,
    grad: torch.Tensor,
    by_x: torch.Tensor,
    by_weight: torch.Tensor,
    by_bias: torch.Tensor | None,
    by_state: torch.Tensor | None,
) -> None:
    """Write the gradients by x, weight, bias and state from that by the convolution; the last three are contiguous."""
    (batch, channels, tokens), width, meta = work.x.shape, work.weight.shape[1], work.meta(grad, by_x)
    operands, warps = work.operands, convolution_table().num_warps
    reach = tokens + (width - 1 if operands.state is not None else 0)
    blocks, channel_blocks = -(-reach // meta.tokens), -(-channels // meta.channels)
    programs = max(1, min(blocks * batch, -(-devices.current.programs // max(1, channel_blocks))))
    if not channels:
        return
    partials = empty((programs, width + 1, channels), torch.float32, work.x.device)
    convolution_gradients[(channel_blocks, programs)](
        *(operands, grad, by_x, by_state if operands.state is not None else None, partials),
        *(work.strides, Strides(*grad.stride()), Strides(*by_x.stride()), channels, tokens, blocks, batch),
        META=meta,
        num_warps=warps,
    )
    columns = min(256, power_of_2(channels))
    add_partials[(-(-channels // columns), width + 1)](
        *(partials, by_weight, by_bias, channels, programs),
        META=ConvolutionMeta(meta.index, 1, columns, width, False),
        num_warps=warps,
    )


def update(work: Convolution, out: torch.Tensor) -> None:
    """Write the convolution at x's one token to `out`, (batch, channels), and append the token to the state."""
    (batch, channels, _), state = work.x.shape, work.state
    assert state is not None
    length = max(1, power_of_2(state.shape[2]))
    block = max(1, min(power_of_2(channels), convolution_table().elements // length))
    meta = ConvolutionMeta(offset_type(work.x, work.weight, state), block, length, work.weight.shape[1], work.silu)
    grid = (batch * -(-channels // block),)
    if all(grid):
        append_token[grid](
            *(Operands(work.x, work.weight, work.bias, state), out, work.strides, channels, state.shape[2]),
            META=meta,
            num_warps=convolution_table().num_warps,
        )
