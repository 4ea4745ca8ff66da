"""Inputs with many ties and every special value, and their comparison."""

import torch


def values(dtype, *shape, device):
    """Return random values with many ties and every special value of the dtype."""
    x = torch.randn(shape) * 3
    if dtype.is_floating_point:
        flat = x.round_().view(-1)
        flat[::11], flat[1::13], flat[2::13], flat[3], flat[4] = float("nan"), -0.0, 0.0, float("inf"), -float("inf")
    elif not dtype.is_signed:
        x = x.abs()
    x = x.to(device, dtype)
    # Conversions to bfloat16 on CPUs make negative nans, which ATen's kernels for GPUs put first.
    return x.masked_fill_(x.isnan(), float("nan")) if dtype.is_floating_point else x


def identical(a, b):
    """Return whether all bits but those of nan are equal."""
    if not a.is_floating_point():
        return a.shape == b.shape and bool((a == b).all())
    same = (a == b) & (a.signbit() == b.signbit())
    return a.shape == b.shape and bool((same | (a.isnan() & b.isnan())).all())
