"""Fourier transforms of complex numbers, of real numbers, and to real numbers."""

import math

import torch

from tritonite.dtypes import COMPLEX
from tritonite.engine.fft import launch, plan
from tritonite.engine.fft.strides import by_stride, library_strides
from tritonite.engine.fft.table import aten_is_faster
from tritonite.engine.iteration import contiguous_strides
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.registry import operator
from tritonite.runtime.contract import decline_if_slower, empty

_REAL = (torch.float32, torch.float64)
_COMPLEX_OF = dict(zip(_REAL, COMPLEX, strict=True))
_REAL_OF = dict(zip(COMPLEX, _REAL, strict=True))
# The dimensions of one call of cuFFT.
_CUFFT_DIMS = 3


def _check(self, dim, normalization, accepts, last=None):
    """Return the length of the signal in each dimension of `dim`. `last` is that of the last one, if self has half."""
    if self.dtype not in accepts:
        raise Decline(f"dtype {self.dtype}; {', '.join(map(str, accepts))} are served")
    if not dim or len(set(dim)) < len(dim) or not all(0 <= d < self.dim() for d in dim):
        raise Decline(f"dim {list(dim)} for a tensor of {self.dim()} dimensions; distinct ones from 0 are served")
    if normalization not in (0, 1, 2):
        raise Decline(f"normalization {normalization}; 0, 1 and 2 are served")
    if not self.numel():
        raise Decline("a tensor without elements, which ATen's libraries refuse")
    lengths = [self.shape[d] for d in dim]
    if last is not None:
        if last < 1 or self.shape[dim[-1]] != last // 2 + 1:
            raise Decline(f"{self.shape[dim[-1]]} elements of a spectrum for a signal of {last}")
        lengths[-1] = last
    real = _REAL_OF.get(self.dtype, self.dtype)
    for length in lengths:
        plan.check_length(length, real)
    decline_if_slower(aten_is_faster(lengths, last is not None and real is torch.float32))
    return lengths


def _scale(normalization, lengths):
    """Return the factor of the results: 1, or divided by the square root of the signal's size, or by the size."""
    return (1.0, 1 / math.sqrt(math.prod(lengths)), 1 / math.prod(lengths))[normalization]


def _c2c_strides(self, strides, dim):
    """Return the strides of ATen's transform of complex numbers, for an operand of the shape of self."""
    most = len(dim) if aten.on_cpu() else _CUFFT_DIMS
    rest = list(dim)
    while rest:
        rest = by_stride(rest, strides)
        strides = library_strides(self.shape, strides, rest[-most:], self.shape)
        rest = rest[:-most]
    return strides


def _fits_cufft(dim):
    """Return whether ATen transforms all dimensions by one call of cuFFT, if one side is real."""
    return len(dim) <= _CUFFT_DIMS and tuple(dim[:2]) != (0, 1)


def _r2c_strides(self, dim, shape, onesided):
    """Return the strides of ATen's transform of real numbers, whose results have `shape`."""
    if aten.on_cpu():
        return library_strides(self.shape, self.stride(), [*by_stride(dim[:-1], self.stride()), dim[-1]], shape)
    if _fits_cufft(dim):
        return library_strides(self.shape, self.stride(), dim, shape)
    if not onesided:
        return contiguous_strides(shape)
    strides = library_strides(self.shape, self.stride(), dim[-1:], shape)
    rest = list(dim[:-1])
    while rest:
        rest = by_stride(rest, strides)
        strides = library_strides(shape, strides, rest[-_CUFFT_DIMS:], shape)
        rest = rest[:-_CUFFT_DIMS]
    return strides


def _c2r_strides(self, dim, shape):
    """Return the strides of ATen's transform to real numbers, whose results have `shape`."""
    if not aten.on_cpu() and (_fits_cufft(dim) or len(dim) == 1):
        return library_strides(self.shape, contiguous_strides(self.shape), dim if _fits_cufft(dim) else dim[-1:], shape)
    return library_strides(self.shape, _c2c_strides(self, self.stride(), dim[:-1]), dim[-1:], shape)


def _chain(source, dims, lengths, out, forward, scale=1.0):
    """Transform complex numbers along one dimension after another, the last result in `out`.

    No transform is written over its operand, because a program may read what another one has written.
    """
    spare = empty(out.shape, out.dtype, out.device) if len(dims) > 1 else out
    for i, (d, length) in enumerate(zip(dims, lengths, strict=True)):
        target = out if (len(dims) - i) % 2 else spare
        launch.transform(target, source, d, length, forward=forward, scale=scale if i == len(dims) - 1 else 1.0)
        source = target


@operator("_fft_c2c", accepts=COMPLEX, pin=("normalization",))
def _fft_c2c(self, dim, normalization, forward, outs=()):
    """Stockham's algorithm (Cochran et al. 1967), in two passes for long signals (Bailey 1990)."""
    lengths = _check(self, dim, normalization, COMPLEX)
    strides = _c2c_strides(self, self.stride(), dim)
    (out,) = outs = outputs((self,), [self.shape], [self.dtype], outs, strides=strides, accepts=COMPLEX)
    _chain(self, dim[::-1], lengths[::-1], out, forward, _scale(normalization, lengths))
    return outs


@operator("_fft_r2c", accepts=_REAL, pin=("normalization",))
def _fft_r2c(self, dim, normalization, onesided, outs=()):
    """Stockham's algorithm (Cochran et al. 1967), in two passes for long signals (Bailey 1990)."""
    lengths = _check(self, dim, normalization, _REAL)
    shape = list(self.shape)
    if onesided:
        shape[dim[-1]] = lengths[-1] // 2 + 1
    strides = _r2c_strides(self, dim, shape, onesided)
    (out,) = outs = outputs((self,), [shape], [_COMPLEX_OF[self.dtype]], outs, strides=strides)
    scale = _scale(normalization, lengths)
    if len(dim) == 1:
        launch.transform(out, self, dim[0], lengths[0], scale=scale)
        return outs
    spectrum = empty(shape, out.dtype, out.device)
    launch.transform(spectrum, self, dim[-1], lengths[-1])
    _chain(spectrum, dim[-2::-1], lengths[-2::-1], out, True, scale)
    return outs


@operator("_fft_c2r", accepts=COMPLEX, pin=("normalization", "last_dim_size"))
def _fft_c2r(self, dim, normalization, last_dim_size, outs=()):
    """Stockham's algorithm (Cochran et al. 1967), in two passes for long signals (Bailey 1990)."""
    lengths = _check(self, dim, normalization, COMPLEX, last_dim_size)
    if last_dim_size == 1 and len(dim) > 1 and aten.on_gpu() and _fits_cufft(dim):
        # cuFFT drops the dimension, and takes the one before for half of a spectrum.
        raise Decline("a signal of one element in the last of several dimensions, of which cuFFT reads half a spectrum")
    shape = list(self.shape)
    shape[dim[-1]] = last_dim_size
    strides = _c2r_strides(self, dim, shape)
    (out,) = outs = outputs((self,), [shape], [_REAL_OF[self.dtype]], outs, strides=strides, accepts=COMPLEX)
    spectrum = self
    if len(dim) > 1:
        spectrum = empty(self.shape, self.dtype, self.device)
        _chain(self, dim[-2::-1], lengths[-2::-1], spectrum, False)
    launch.transform(out, spectrum, dim[-1], last_dim_size, scale=_scale(normalization, lengths))
    return outs
