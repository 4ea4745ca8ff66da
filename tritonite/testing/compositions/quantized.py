"""Compositions of linear layers of quantised operands."""

from __future__ import annotations

import torch


def linear(x, weight, x_scale, weight_scale, bias=None, *, out_dtype=None):
    """Return (x @ weight.T) times both scales, plus the bias."""
    x, weight = (each.to(x_scale.dtype) for each in (x, weight))
    out = (x @ weight.mT) * x_scale * (weight_scale.view(-1) if weight_scale.numel() > 1 else weight_scale.view(()))
    return out if bias is None else out + bias


def linear_blocks(x, weight, x_scale, weight_scale, *, bias=None, out_dtype=None, block=(128, 128)):
    """Return x @ weight.T of operands that are multiplied by the scales of their blocks before."""
    rows, columns = weight.shape
    own = x.to(x_scale.dtype) * x_scale.repeat_interleave(block[1], -1)[..., :columns]
    scales = weight_scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    out = own @ (weight.to(x_scale.dtype) * scales).mT
    return out if bias is None else out + bias


def dequantize_int4(weight, scales, zeros=None, *, group=128):
    """Return (numbers - zeros) * scales of packed 4-bit numbers, low nibbles first."""
    numbers = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).to(scales.dtype)
    columns = numbers.shape[1]
    spread = [None if x is None else x.repeat_interleave(group, 1)[:, :columns] for x in (scales, zeros)]
    return (numbers - (8 if spread[1] is None else spread[1])) * spread[0]


def linear_int4(x, weight, scales, zeros=None, bias=None, *, group=128):
    """Return x times the transposed dequantised weight, plus the bias."""
    out = x @ dequantize_int4(weight, scales, zeros, group=group).mT
    return out if bias is None else out + bias
