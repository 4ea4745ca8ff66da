"""Flips, rolls, rotations and shuffles, which move every element once."""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch._prims_common import suggest_memory_format

from tritonite.dtypes import ALL, COMPLEX, MOVED
from tritonite.engine.iteration import has_channels_last
from tritonite.engine.movement import check_conversion, move, result, strides_like, through, words
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.errors import Decline
from tritonite.language.indices import read_at
from tritonite.ops import aten
from tritonite.registry import operator as any_operator
from tritonite.registry import scalar_kernel

operator = functools.partial(any_operator, tensors_only=True)
_COMMON = (*ALL, *COMPLEX)


@scalar_kernel(pointer=("source",), integers=("sizes",), index=("at",))
def _flipped(source, sizes, at):
    """Read each dimension from its end."""
    indices = ()
    for d in tl.static_range(len(at)):
        indices = indices + (sizes[d] - 1 - at[d],)
    return read_at(source, indices, at[0] >= 0, 0)


@scalar_kernel(pointer=("source",), integers=("shifts", "sizes"), index=("at",))
def _rolled(source, shifts, sizes, at):
    """Read at the index minus the shift, modulo the size; shifts are in [0, size)."""
    indices = ()
    for d in tl.static_range(len(at)):
        index = at[d] - shifts[d]
        indices = indices + (tl.where(index < 0, index + sizes[d], index),)
    return read_at(source, indices, at[0] >= 0, 0)


def _gather(kernel, source, out, dims, *integers):
    """Launch a kernel that reads `source` at computed indices of `dims`; `integers` have a value for each dimension."""
    kernel.run((Gathered(words(source), dims), *integers, dims), (words(out),))


def _check_common(dtype):
    """Decline rare dtypes: which of them ATen takes differs from device to device."""
    if dtype not in _COMMON:
        raise Decline(f"dtype {dtype}")


@operator("flip", accepts=_COMMON)
def flip(self, dims, outs=()):
    _check_common(self.dtype)
    rank = max(self.dim(), 1)
    if any(not -rank <= d < rank for d in dims) or len({d % rank for d in dims}) < len(dims):
        raise Decline(f"dimensions {list(dims)} of {self.dim()}")
    out = result((self,), self.shape, self.dtype, outs, strides_like(self, None))
    turned = tuple(sorted(d % rank for d in dims if self.dim() and self.shape[d] > 1))
    if turned:
        _gather(_flipped, self, out, turned, tuple([self.shape[d] for d in turned]))
    else:
        move(self, out)
    return (out,)


@operator("roll", accepts=_COMMON)
def roll(self, shifts, dims, outs=()):
    """Roll along `dims`, or along all elements of a contiguous tensor if there are no dims."""
    _check_common(self.dtype)
    # ATen's CPU result is a concatenation, which keeps the memory format.
    channels_last = not self.is_contiguous() and suggest_memory_format(self) != torch.contiguous_format
    if aten.on_cpu() and not outs and channels_last:
        raise Decline("channels-last input")
    if not dims:
        if len(shifts) != 1:
            raise Decline(f"{len(shifts)} shifts without dimensions; 1 is served")
        flat = self.reshape(-1) if self.is_contiguous() else None
        if flat is None or outs or not self.numel():
            raise Decline("a roll without dimensions of a tensor that is empty or not contiguous, or with out=")
        out = result((self,), self.shape, self.dtype)
        _gather(_rolled, flat, out.view(-1), (0,), (shifts[0] % flat.numel(),), (flat.numel(),))
        return (out,)
    rank = self.dim()
    if len(shifts) != len(dims) or any(not -rank <= d < rank for d in dims):
        raise Decline(f"{len(shifts)} shifts along dimensions {list(dims)} of {rank}")
    out = result((self,), self.shape, self.dtype, outs)
    if not self.numel():
        return (out,)
    total = dict.fromkeys(sorted({d % rank for d in dims}), 0)
    for d, shift in zip(dims, shifts, strict=True):
        total[d % rank] = (total[d % rank] + shift) % self.shape[d]
    moved = tuple([d for d, shift in total.items() if shift])
    if moved:
        sizes = tuple([self.shape[d] for d in moved])
        _gather(_rolled, self, out, moved, tuple([total[d] for d in moved]), sizes)
    else:
        move(self, out)
    return (out,)


@operator("rot90", accepts=_COMMON)
def rot90(self, k, dims, outs=()):
    """Rotate by k quarter turns: a flip, a transposition, or both. Without a turn the result is a contiguous copy."""
    rank = self.dim()
    if rank < 2 or len(dims) != 2 or any(not -rank <= d < rank for d in dims) or (dims[0] - dims[1]) % rank == 0:
        raise Decline(f"dimensions {list(dims)} of {rank}; two different ones are served")
    _check_common(self.dtype)
    if outs and outs[0].dim() != rank:
        raise Decline(f"an output of {outs[0].dim()} dimensions, not {rank}")
    first, second = dims[0] % rank, dims[1] % rank
    k %= 4
    if k == 0 and not outs:
        copied = result((self,), self.shape, self.dtype)
        move(self, copied)
        return (copied,)
    turned = {0: (), 1: (second,), 2: (first, second), 3: (first,)}[k]
    (copied,) = flip(self, turned) if not outs else flip(self, turned, (_turned(outs[0], k, first, second),))
    return outs or (_turned(copied, k, first, second),)


def _turned(x, k, first, second):
    return x.transpose(first, second) if k % 2 else x


def _check_shuffled(self):
    """Decline dtypes that ATen's CPU kernels lack. On GPUs ATen copies views, in any dtype."""
    if aten.on_cpu() and self.dtype not in _COMMON:
        raise Decline(f"dtype {self.dtype} on a CPU")


@operator("pixel_shuffle", accepts=MOVED)
def pixel_shuffle(self, upscale_factor, outs=()):
    _check_shuffled(self)
    r = upscale_factor
    if self.dim() < 3 or r < 1 or not self.numel() or self.shape[-3] % (r * r) or has_channels_last(self):
        raise Decline(f"factor {r} for shape {list(self.shape)}, or a channels-last input")
    *batch, channels, height, width = self.shape
    out = result((self,), (*batch, channels // (r * r), height * r, width * r), self.dtype, outs)
    n = len(batch)
    source = self.unflatten(n, (channels // (r * r), r, r))
    move(source.permute(*range(n + 1), n + 3, n + 1, n + 4, n + 2), _view_squares(out, r))
    return (out,)


@operator("pixel_unshuffle", accepts=MOVED)
def pixel_unshuffle(self, downscale_factor, outs=()):
    _check_shuffled(self)
    r = downscale_factor
    if (
        self.dim() < 3
        or r < 1
        or not self.numel()
        or self.shape[-1] % r
        or self.shape[-2] % r
        or has_channels_last(self)
    ):
        raise Decline(f"factor {r} for shape {list(self.shape)}, or a channels-last input")
    *batch, channels, height, width = self.shape
    out = result((self,), (*batch, channels * r * r, height // r, width // r), self.dtype, outs)
    n = len(batch)
    written = out.unflatten(n, (channels, r, r))
    move(_view_squares(self, r), written.permute(*range(n + 1), n + 3, n + 1, n + 4, n + 2))
    return (out,)


def _view_squares(image, r):
    """View (..., height * r, width * r) as (..., height, r, width, r)."""
    return image.unflatten(-1, (-1, r)).unflatten(-3, (-1, r))


@operator("channel_shuffle", accepts=MOVED)
def channel_shuffle(self, groups, outs=()):
    _check_shuffled(self)
    if self.dim() < 3 or groups < 1 or not self.numel() or self.shape[1] % groups or has_channels_last(self):
        raise Decline(f"{groups} groups for shape {list(self.shape)}, or a channels-last input")
    if aten.on_gpu():
        if 1 in (groups, self.shape[1] // groups):
            raise Decline(
                f"{groups} groups of {self.shape[1]} channels: nothing moves, and ATen returns the tensor itself"
            )
        # ATen's GPU function raises for a tensor that cannot be viewed like this.
        through(self.view, self.shape[0], groups, self.shape[1] // groups, -1)
    check_conversion(self.dtype, self.dtype)
    out = result((self,), self.shape, self.dtype, outs)
    move(self.unflatten(1, (groups, -1)).transpose(1, 2), out.unflatten(1, (-1, groups)))
    return (out,)
