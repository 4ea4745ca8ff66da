"""Compile-time facts of the short convolution's kernels, and their blocks for each kind of device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables


class ConvolutionTable(NamedTuple):
    """Blocks of a kind of device: channels and tokens of a program.

    `along_tokens` is for contiguous tokens, `along_channels` for contiguous channels. `elements` is the size of a block
    of states that one token updates.
    """

    along_tokens: tuple[int, int] = (4, 256)
    along_channels: tuple[int, int] = (64, 16)
    elements: int = 1024
    num_warps: int = 4


TABLE: Tables[ConvolutionTable] = Tables("short_convolution", dict.fromkeys(devices.KINDS, ConvolutionTable()))


def convolution_table() -> ConvolutionTable:
    """Return the table of the current device."""
    return TABLE[devices.current.kind]


class Strides(NamedTuple):
    """Strides over batch, channels and tokens."""

    batch: Any
    channel: Any
    token: Any


class Operands(NamedTuple):
    """Addresses of the operands in a kernel; bias and state may be None.

    x: (batch, channels, tokens). weight: (channels, width). bias: (channels,). state: (batch, channels, tokens before
    the first).
    """

    x: Any
    weight: Any
    bias: Any
    state: Any


class OperandStrides(NamedTuple):
    """Strides of the operands: of the weight over channels and taps, of the bias over channels."""

    x: Strides
    weight: Any
    bias: Any
    state: Strides


@dataclass(frozen=True)
class ConvolutionMeta:
    """Compile-time facts of the kernels.

    A block has `channels` and `tokens`; in an update, tokens of the state. `width` is the number of taps. The
    activation is SiLU if `silu`, otherwise none.
    """

    index: Any
    channels: int
    tokens: int
    width: int
    silu: bool
