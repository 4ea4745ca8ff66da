"""Dropout, and the gradient of `_fused_dropout`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS
from tritonite.engine.iteration import contiguous_strides, is_dense, may_overlap, suggests_channels_last
from tritonite.engine.movement import fill, move, result, strides_in, strides_like
from tritonite.engine.random import draw_elementwise, elementwise, vectors
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.random.draws import PROBABILITY, operator
from tritonite.ops.random.transforms import UNIFORM
from tritonite.registry import scalar_kernel
from tritonite.runtime.contract import empty_strided, limit, unrepeatable
from tritonite.runtime.symbols import zero_or_one


@triton.jit
def _kept(value, x, kept):
    """Return (result, mask) of dropout: elements kept with probability `kept`, and divided by it."""
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    kept = kept.to(x.dtype)
    scale = (1.0 / kept.to(tl.float64)).to(x.dtype)
    mask = value < kept
    return x * mask.to(x.dtype) * scale, mask


@triton.jit
def _dropout(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    return _kept(value, inputs[0], 1.0 - first)


@triton.jit
def _dropout_of_kept(value, inputs, first, second, low, span, DTYPE: tl.constexpr):
    return _kept(value, inputs[0], first)


_DROPOUT = UNIFORM._replace(transform=_dropout)
_DROPOUT_OF_KEPT = UNIFORM._replace(transform=_dropout_of_kept)


def _dropped(distribution, self, p, mask_dtype, generator, outs):
    """Drop elements. ATen's vectors, on which the numbers depend, have up to 16 bytes, and divide a dense tensor."""
    if self.dtype not in FLOATS:
        raise Decline(f"dtype {self.dtype}")
    strides, numel = strides_like(self, None), self.numel()
    given = outs or (None, None)
    found = [
        result((self,), self.shape, dtype, () if out is None else (out,), strides)
        for out, dtype in zip(given, (self.dtype, mask_dtype), strict=True)
    ]
    if outs and may_overlap(*found):
        raise Decline("a result and a mask that overlap")
    if not numel:
        return found
    vector = 16 // self.dtype.itemsize if is_dense(self.shape, self.stride()) else 1
    while numel % vector:
        vector //= 2
    if vector > 1 and self.data_ptr() % 16:
        unrepeatable("an address that is not a multiple of 16 decides the width of ATen's vectors")
        while self.data_ptr() % (vector * self.dtype.itemsize):
            vector //= 2
    # Vectors follow memory order; single elements follow the order of dimensions.
    order = vectors(numel, vector, self.device) if vector > 1 else elementwise(numel, 4, self.device)
    laid_out = strides if vector > 1 else contiguous_strides(self.shape)
    source = self if vector > 1 else self.contiguous()
    drawn = [
        out if tuple(out.stride()) == tuple(laid_out) else empty_strided(out.shape, laid_out, out.dtype, out.device)
        for out in found
    ]
    draw_elementwise(distribution, order, (source,), drawn, (p, 0.0), generator)
    for out, buffer in zip(found, drawn, strict=True):
        if out is not buffer:
            out.copy_(buffer)
    return found


@operator("native_dropout", accepts=FLOATS, pin_zero_or_one=("p",))
def native_dropout(input, p, train, outs=()):
    if aten.on_cpu() and not input.numel():
        raise Decline("no elements")
    limit(p, PROBABILITY)
    if train is not False and zero_or_one(p) != 1:
        return _dropped(_DROPOUT, input, p, torch.bool, None, outs)
    if input.dtype not in FLOATS:
        raise Decline(f"dtype {input.dtype}")
    strides = strides_like(input, None)
    kept = train is False
    out = result((input,), input.shape, input.dtype, outs[:1], strides)
    mask = result((input,), input.shape, torch.bool, outs[1:], strides)
    if kept:
        move(input, out)
    else:
        fill(out, 0)
    fill(mask, int(kept))
    return out, mask


@operator("_fused_dropout", accepts=FLOATS, cuda_only=("_fused_dropout", "_fused_dropout.out"))
def fused_dropout(self, p, generator=None, outs=()):
    """Drop elements; `p` is the probability to keep an element."""
    return _dropped(_DROPOUT_OF_KEPT, self, p, torch.uint8, generator, outs)


@scalar_kernel(accepts=FLOATS, own=("mask",), cast=("scale",))
def _scaled(self, mask, scale):
    return mask.to(self.dtype) * self * scale


@operator("_masked_scale", kernels=(_scaled,), cuda_only=("_masked_scale", "_masked_scale.out"))
def masked_scale(self, mask, scale, outs=()):
    """Return the gradient of `_fused_dropout`."""
    if mask.dtype is not torch.uint8 or mask.shape != self.shape:
        raise Decline(f"a mask of {mask.dtype} and shape {tuple(mask.shape)}, not of uint8 and {tuple(self.shape)}")
    if not outs:
        form = torch.channels_last if suggests_channels_last(self) else torch.contiguous_format
        form = torch.channels_last_3d if self.dim() == 5 and form is torch.channels_last else form
        outs = (result((self, mask), self.shape, self.dtype, (), strides_in(self.shape, form)),)
    return _scaled.run((self, mask, scale), outs)
