"""Operators over lists of tensors that compute each tensor by a pointwise formula, and copies of lists."""

from __future__ import annotations

import torch
import triton.language as tl

from tritonite.dtypes import MOVED, NUMBERS, TRITON_DTYPES
from tritonite.engine.iteration import is_dense, never_overlaps_itself, same_strides
from tritonite.engine.lists.elementwise import Numbers, apply
from tritonite.engine.movement import check_conversion, check_memory, convert, strides_like, words
from tritonite.errors import Decline
from tritonite.language.math import maximum_nan, minimum_nan
from tritonite.ops import arithmetic, aten, conditional, elementary, gamma, rounding
from tritonite.registry import operator, over_lists, scalar_kernel, schemas
from tritonite.runtime.contract import empty_strided
from tritonite.runtime.symbols import number_type

over_lists(arithmetic.add, arithmetic.sub, arithmetic.mul, arithmetic.div)


def _together(values):
    """Return whether ATen computes all tensors of the lists in one launch on a GPU, instead of one by one.

    Its formulas for lists then decide special cases. They serve dense tensors of one dtype of floats, whose shapes and
    strides are the same at each index.
    """
    lists = [value for value in values if isinstance(value, (list, tuple)) and value and torch.is_tensor(value[0])]
    tensors = [x for own in lists for x in own]
    if aten.on_cpu() or len({x.dtype for x in tensors}) != 1 or not tensors[0].is_floating_point():
        return False
    first = lists[0]
    return all(
        [
            (not x.numel() or is_dense(x.shape, x.stride()))
            and x.shape == like.shape
            and same_strides(x.shape, x.stride(), like.stride())
            for own in lists
            for x, like in zip(own, first, strict=False)
        ]
    )


def _powers(values):
    """Return the function that prepares the arguments of `pow` for each tensor.

    ATen's formula for lists takes no roots for an exponent of 0.5 or -0.5: pow(-inf, 0.5) is inf. Its powers of a
    number keep the strides of the exponents, and on a GPU the dtype of integers, whatever the number is.
    """
    if not isinstance(values[0], (list, tuple)) and not (aten.on_cpu() or values[1][0].is_floating_point()):
        base, exponents = number_type(values[0]), values[1][0].dtype
        if base is not int or exponents is torch.bool:
            raise Decline(f"powers of a number of type {base.__name__} with exponents of {exponents}")
    if not _together(values):
        return arithmetic.power_arguments

    def prepare(self, exponent):
        kept = isinstance(exponent, torch.Tensor) or exponent in (0.5, -0.5)
        return (self, exponent, None) if kept else arithmetic.power_arguments(self, exponent)

    return prepare


def _bounds(values):
    """Return the function that prepares a tensor and its bound, with whether ATen's formula for lists is followed."""
    together = _together(values)
    return lambda self, bound: (*conditional.one_bound(self, bound), together)


@scalar_kernel(static=("together",), accepts=NUMBERS)
def _larger(self, other, together):
    """The larger operand; of two equal ones, such as zeros of both signs, ATen's formula for lists takes the second."""
    if together:
        x, y = tl.broadcast(self, other)
        result = tl.where((x != x) | (x > y), x, y)
    else:
        result = maximum_nan(self, other)
    return result


@scalar_kernel(static=("together",), accepts=NUMBERS)
def _smaller(self, other, together):
    if together:
        x, y = tl.broadcast(self, other)
        result = tl.where((x != x) | (x < y), x, y)
    else:
        result = minimum_nan(self, other)
    return result


over_lists(arithmetic.pow, prepare=_powers)
over_lists(arithmetic.addcmul, arithmetic.addcdiv, arithmetic.lerp)
over_lists(arithmetic.abs, arithmetic.neg, arithmetic.reciprocal)
over_lists(rounding.ceil, rounding.floor, rounding.trunc, rounding.round, rounding.frac, rounding.sign)
over_lists(elementary.exp, elementary.expm1, elementary.log, elementary.log10, elementary.log1p, elementary.log2)
over_lists(elementary.sqrt, elementary.rsqrt, elementary.sigmoid, elementary.erf, elementary.erfc, gamma.lgamma)
over_lists(elementary.sin, elementary.cos, elementary.tan, elementary.asin, elementary.acos, elementary.atan)
over_lists(elementary.sinh, elementary.cosh, elementary.tanh)
for _name in ("clamp_min", "maximum"):
    over_lists(conditional.clamp_min, name=_name, prepare=_bounds, launched=_larger)
for _name in ("clamp_max", "minimum"):
    over_lists(conditional.clamp_max, name=_name, prepare=_bounds, launched=_smaller)
over_lists(conditional.zero)


def _copy_each(sources, destinations):
    """Copy each source to the destination at its index, in one launch for each pair of dtypes."""
    if len(sources) != len(destinations):
        raise Decline(f"lists of {len(sources)} and {len(destinations)} tensors")
    read, to, written = [], Numbers(), []
    for source, destination in zip(sources, destinations, strict=True):
        if source is destination:
            continue
        check_conversion(source.dtype, destination.dtype)
        if source.is_complex() != destination.is_complex():
            raise Decline(f"conversion from {source.dtype} to {destination.dtype} in a list")
        check_memory(source)
        if source.shape != destination.shape:
            source = _broadcast(source, destination.shape)
        if source.dtype is destination.dtype:
            # Bits are moved, because a conversion would change some of those of a nan.
            source, destination = words(source), words(destination)
        elif source.is_complex():
            source, destination = torch.view_as_real(source), torch.view_as_real(destination)
        read.append(source)
        written.append(destination)
        to.append(TRITON_DTYPES[destination.dtype])
    if read:
        apply(convert, (read, to), (written,))


def _broadcast(source, shape):
    try:
        return source.expand(shape)
    except RuntimeError:
        raise Decline(f"shape {tuple(source.shape)} does not broadcast to {tuple(shape)}") from None


def _destinations(like, strides, outs):
    """Return the given outputs, or allocate a tensor with these strides for each tensor of a list."""
    if not outs:
        each = zip(like, strides, strict=True)
        return [empty_strided(x.shape, own, x.dtype, x.device) for x, own in each]
    (given,) = outs
    if len(given) != len(like):
        raise Decline(f"{len(given)} outputs for {len(like)} tensors")
    for x, out in zip(like, given, strict=True):
        if out.device != x.device:
            raise Decline(f"an output on {out.device} for a tensor on {x.device}")
        if out.dtype is not x.dtype or out.shape != x.shape:
            raise Decline(
                f"output has shape {tuple(out.shape)} and dtype {out.dtype}, the result {tuple(x.shape)} and {x.dtype}"
            )
    return given


@operator("_foreach_copy", accepts=MOVED)
def _foreach_copy(self, src, non_blocking, outs=()):
    """Copy each source, in the dtype of the tensor at its index; fresh results have the strides of `self`."""
    if not outs and not all([never_overlaps_itself(x.shape, x.stride()) for x in self]):
        raise Decline("a tensor with strides that overlap")
    destinations = _destinations(self, [x.stride() for x in self], outs)
    _copy_each(src, destinations)
    return () if outs else (destinations,)


# Releases of torch before 2.13 lack it.
if schemas("_foreach_clone"):

    @operator("_foreach_clone", accepts=MOVED)
    def _foreach_clone(self, memory_format, outs=()):
        destinations = _destinations(self, [strides_like(x, memory_format) for x in self], outs)
        _copy_each(self, destinations)
        return () if outs else (destinations,)
