"""Writing at the places that index tensors tell, and combining with what is there.

An index out of range stops the program, as in ATen's kernels, and nothing is written there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import ALL, BITS, FLOATS, NUMBERS, UNSIGNED, WITH_COMPLEX, opmath
from tritonite.engine.indexing.places import (
    IN_RANGE,
    IN_RANGE_OF_BOTH_SIGNS,
    INDEX_DTYPES,
    Index,
    index_along,
    linear_index,
)
from tritonite.engine.indexing.segments import add_rows_at
from tritonite.engine.indexing.write import ADD, LARGEST, MULTIPLY, SMALLEST, widened, write_at
from tritonite.engine.iteration import broadcast_shape, expand_strides, output_strides
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.language.math import true_divide
from tritonite.ops.conditional import masked_fill_kernel
from tritonite.ops.creation import ascending
from tritonite.ops.indexing import Indexed, check_gathered, check_index, only_dimension, only_mask, without_dimension
from tritonite.registry import exclude, operator, scalar_kernel
from tritonite.runtime.contract import empty, empty_strided, limit, zeros
from tritonite.runtime.symbols import limits_of, number_type, zero_or_one

_ON_CPU = devices.current.type == "cpu"
_OPERATIONS = {"add": ADD, "sum": ADD, "mean": ADD, "multiply": MULTIPLY, "prod": MULTIPLY}
_OPERATIONS |= {"amax": LARGEST, "max": LARGEST, "amin": SMALLEST, "min": SMALLEST}


exclude("_unsafe_masked_index", "ATen makes it of clamp, _unsafe_index and masked_fill, which have kernels")
exclude("_unsafe_masked_index_put_accumulate", "ATen makes it of clamp, masked_fill and index_put, which have kernels")


def refuse_if_deterministic() -> None:
    """Decline where torch was asked for the same bits every time, which ATen has other kernels for, or an error."""
    if not _ON_CPU and torch.are_deterministic_algorithms_enabled():
        raise Decline("programs that write in no order, where deterministic algorithms are asked for")


def destination(
    self: torch.Tensor,
    others: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    accepts: Sequence[torch.dtype],
    like: bool = False,
    filled: bool = True,
) -> torch.Tensor:
    """What becomes of `self`: itself, or a copy of it in `outs`, or a fresh one, contiguous or laid out `like` it.

    Nothing is copied yet unless `filled`.
    """
    if outs or not like:
        (out,) = outputs((self, *others), [self.shape], [self.dtype], outs, in_place=[self], accepts=accepts)
    else:
        outputs((self, *others), [], [], (), accepts=accepts)
        layout = output_strides(tuple(self.shape), [(self.shape, self.stride())], False)
        out = empty_strided(self.shape, layout, self.dtype, self.device)
    if filled and out is not self and out.numel():
        out.copy_(self)
    return out


def check_number(self: torch.Tensor, number: Any) -> None:
    """Decline a number that ATen does not convert to the dtype of a tensor."""
    fraction = number_type(number) is float and not self.is_floating_point()
    if self.dtype not in ALL or fraction or number_type(number) is complex:
        raise Decline("a complex number, or one with a fraction for integers")
    limit(number, limits_of(self.dtype))


def _check_source(self: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
    """Decline a source that has no element for each of an index."""
    if source.dtype is not self.dtype:
        raise Decline("a source of another dtype")
    if not index.numel():
        return
    if max(source.dim(), 1) != max(index.dim(), 1):
        raise Decline("a source of another number of dimensions")
    if any(size > own for size, own in zip(index.shape or (1,), source.shape or (1,), strict=False)):
        raise Decline("an index that is longer than the source")


class Places(NamedTuple):
    """The elements of a tensor that an index tells of: the space of what is written, and how it counts along `dim`."""

    index: torch.Tensor
    dim: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of_parts(self) -> Places:
        """The same of a tensor whose complex elements are pairs of their parts."""
        return self._replace(shape=(*self.shape, 2), strides=(*self.strides, 0))

    def write(self, target: torch.Tensor, *values: Any, **how: Any) -> None:
        """`write_at` these places of a tensor."""
        indices = [index_along(self.index, self.strides, target, self.dim)]
        write_at(target, self.shape, without_dimension(target, self.dim, self.shape), indices, *values, **how)

    def add_in_order(self, target: torch.Tensor, source: torch.Tensor, row_dims: Sequence[int]) -> None:
        """Add a source to these places of a tensor, whose numbers an index tells in `row_dims`, in their order."""
        shape, rank = self.shape, len(self.shape)
        indices = [index_along(self.index, self.strides, target, self.dim)]
        steps = list(without_dimension(target, self.dim, shape))
        for d in row_dims:
            if d == self.dim or shape[d] == 1:
                continue
            # Which of the places has this coordinate is told by one more index.
            coordinates = empty((shape[d],), torch.int64, target.device)
            ascending.run((0, 1, 0, False), (coordinates,))
            along = tuple([int(k == d) for k in range(rank)])
            indices.append(Index(coordinates, along, target.shape[d], (target.stride(d),)))
            steps[d] = 0
        strides = _strides(source, self)
        add_rows_at(target, shape, row_dims, steps, indices, source, strides, message=IN_RANGE)


def _scattered(self, dim, index, source=None, in_order=False):
    """The places of an index that has an element for each, of which the source has one, too."""
    dim = check_gathered(self, dim, index)
    if not in_order:
        refuse_if_deterministic()
    if source is not None:
        _check_source(self, index, source)
    return Places(index, dim, tuple(index.shape), index.stride())


def _strides(source: torch.Tensor, places: Places) -> tuple[int, ...]:
    """A source's strides over places, of which it may have more, or one without dimensions."""
    return (*source.stride(), *[0] * len(places.shape))[: len(places.shape)]


@operator("scatter", accepts=WITH_COMPLEX)
def scatter(self, dim, index, src, outs=()):
    places = _scattered(self, dim, index, src)
    out = destination(self, (index, src), outs, WITH_COMPLEX)
    places.write(out, src, _strides(src, places))
    return (out,)


@operator("scatter", accepts=ALL)
def scatter_value(self, dim, index, value, outs=()):
    places = _scattered(self, dim, index)
    check_number(self, value)
    out = destination(self, (index,), outs, ALL)
    places.write(out, number=value)
    return (out,)


def _operation(self: torch.Tensor, reduce: str, names: Sequence[str]) -> str:
    """Return the operation that a reduction's name stands for. Raises Decline for names that ATen refuses."""
    if reduce not in names:
        raise Decline("no such reduction")
    operation = _OPERATIONS[reduce]
    if self.dtype is torch.bool and self.device.type != "cpu" and operation != ADD:
        raise Decline("a reduction of bools that ATen refuses on GPUs")
    return operation


@operator("scatter", accepts=ALL)
def scatter_with(self, dim, index, src, reduce, outs=()):
    places = _scattered(self, dim, index, src)
    operation = _operation(self, reduce, ("add", "multiply"))
    out = destination(self, (index, src), outs, ALL, filled=False)
    places.write(out, src, _strides(src, places), operation=operation, start=self)
    return (out,)


@operator("scatter", accepts=ALL)
def scatter_value_with(self, dim, index, value, reduce, outs=()):
    places = _scattered(self, dim, index)
    operation = _operation(self, reduce, ("add", "multiply"))
    check_number(self, value)
    out = destination(self, (index,), outs, ALL, filled=False)
    places.write(out, number=value, operation=operation, start=self)
    return (out,)


def _add(out, start, source, places, row_dims):
    """Write `start` to `out`, with a source added at its places.

    It is added in no order, or in the order of the places where torch was asked for deterministic algorithms.
    """
    in_order = torch.are_deterministic_algorithms_enabled() and bool(places.shape)
    if in_order or out.is_complex():
        if start is not out and out.numel():
            out.copy_(start)
        start = None
    if out.is_complex():
        if not out.dim():
            # A tensor of parts has a dimension, along which no index counts.
            out, source, places = out.view(1), source.reshape(1), Places(places.index.reshape(1), 0, (1,), (1,))
            row_dims = (0,)
        out, source, places = torch.view_as_real(out), torch.view_as_real(source), places.of_parts()
    if in_order:
        places.add_in_order(out, source, row_dims)
    else:
        places.write(out, source, _strides(source, places), operation=ADD, start=start)


@operator("scatter_add", accepts=WITH_COMPLEX)
def scatter_add(self, dim, index, src, outs=()):
    places = _scattered(self, dim, index, src, in_order=True)
    _check_count(places, self)
    out = destination(self, (index, src), outs, WITH_COMPLEX, filled=False)
    _add(out, self, src, places, range(index.dim()))
    return (out,)


@scalar_kernel(own=("total", "count"), static=("included",))
def _mean(total, count, included):
    """Of integers the quotient is rounded down. Where nothing has been added, the total stays as it is."""
    count = tl.maximum(count + 1 if included else count, 1)
    if total.dtype.is_floating():
        return true_divide(total, count.to(total.dtype))
    wide, count = total.to(tl.int64), count.to(tl.int64)
    quotient = wide // count
    return tl.where((wide % count != 0) & (wide < 0), quotient - 1, quotient).to(total.dtype)


def _identity(dtype: torch.dtype, operation: str) -> Any:
    """The number that an operation leaves others as they are next to."""
    if operation in (ADD, MULTIPLY):
        return int(operation == MULTIPLY)
    if dtype.is_floating_point:
        return -float("inf") if operation == LARGEST else float("inf")
    limits = torch.iinfo(torch.uint8 if dtype is torch.bool else dtype)
    least, most = (0, 1) if dtype is torch.bool else (limits.min, limits.max)
    return least if operation == LARGEST else most


def _reduced(self, source, places, reduce, include_self, outs, names, accepts):
    """What is at the places, combined with a source; of what was there before nothing without `include_self`."""
    operation = _operation(self, reduce, names)
    if reduce == "mean" and self.dtype is torch.bool:
        raise Decline("a mean of bools")
    # A mean divides the sum before that is rounded.
    wide = reduce == "mean" and opmath(self.dtype) is not self.dtype
    out = destination(self, (places.index, source), outs, accepts, filled=not wide)
    total = widened(self, out) if wide else out
    if not include_self:
        places.write(total, number=_identity(out.dtype, operation))
    places.write(total, source, _strides(source, places), operation=operation)
    if reduce == "mean" and out.numel():
        count = zeros(out.shape, torch.int32, out.device)
        places.write(count, number=1, operation=ADD)
        _mean.run((total, count, include_self), (out,))
    return (out,)


@operator("scatter_reduce", accepts=ALL)
def scatter_reduce(self, dim, index, src, reduce, include_self=True, outs=()):
    places = _scattered(self, dim, index, src)
    names = ("sum", "prod", "mean", "amax", "amin", "max", "min")
    return _reduced(self, src, places, reduce, include_self, outs, names, ALL)


def _check_count(places: Places, target: torch.Tensor) -> None:
    """Decline, before anything is written, more places than are added up in order."""
    if torch.are_deterministic_algorithms_enabled() and max(target.numel(), torch.Size(places.shape).numel()) >= 2**30:
        raise Decline("more places than are added up in order")


def _along(self, dim, index, source=None, accepts=INDEX_DTYPES, in_order=False):
    """The slices of a tensor that a vector of indices tells of, of which a source has one for each."""
    check_index(index, accepts)
    dim = only_dimension(dim, self.dim())
    if not in_order:
        refuse_if_deterministic()
    if index.dim() > 1:
        raise Decline("an index that is no vector")
    count = index.numel()
    if count and self.dim() and not self.shape[dim]:
        raise Decline("an index into no elements")
    shape = (*self.shape[:dim], count, *self.shape[dim + 1 :]) if self.dim() else ()
    if not self.dim() and count != 1:
        raise Decline("several indices into a tensor without dimensions")
    if source is not None and (source.dtype is not self.dtype or tuple(source.shape) != shape):
        raise Decline("a source of another shape or dtype")
    strides = [0] * len(shape)
    if self.dim():
        strides[dim] = index.stride(0) if index.dim() else 0
    return Places(index, dim, shape, tuple(strides))


@scalar_kernel(cast=("alpha",))
def _times(source, alpha):
    return source * alpha


@scalar_kernel(cast=("alpha",), output_dtypes=(None, None), accepts=FLOATS)
def _parts_times(real, imaginary, alpha):
    """ATen multiplies with a complex number, of which 0 times infinity is nan."""
    return real * alpha - imaginary * 0.0, real * 0.0 + imaginary * alpha


def _scaled(source, alpha):
    """A source times a number, contiguous."""
    result = empty(source.shape, source.dtype, source.device)
    if source.is_complex():
        parts, whole = torch.view_as_real(result), torch.view_as_real(source)
        _parts_times.run((whole[..., 0], whole[..., 1], alpha), (parts[..., 0], parts[..., 1]))
    else:
        _times.run((source, alpha), (result,))
    return result


@operator("index_add", accepts=WITH_COMPLEX, pin_zero_or_one=("alpha",))
def index_add(self, dim, index, source, alpha=1, outs=()):
    places = _along(self, dim, index, source, in_order=True)
    if not (self.is_floating_point() or self.is_complex()) and number_type(alpha) is float:
        raise Decline("a floating-point number for integers")
    if self.dtype is not torch.bool and number_type(alpha) is bool:
        raise Decline("a bool for numbers")
    check_number(torch.view_as_real(self) if self.is_complex() else self, alpha)
    _check_count(places, self)
    out = destination(self, (index, source), outs, WITH_COMPLEX, filled=False)
    in_order = torch.are_deterministic_algorithms_enabled()
    if not source.is_complex() and not in_order:
        places.write(out, source, _strides(source, places), alpha, ADD, start=self)
        return (out,)
    if source.numel() and (source.is_complex() or zero_or_one(alpha) != 1):
        source = _scaled(source, alpha)
    _add(out, self, source, places, (places.dim,))
    return (out,)


@operator("index_reduce", accepts=NUMBERS)
def index_reduce(self, dim, index, source, reduce, include_self=True, outs=()):
    """ATen refuses bools on GPUs, and on CPUs most of the time."""
    places = _along(self, dim, index, source)
    return _reduced(self, source, places, reduce, include_self, outs, ("prod", "mean", "amax", "amin"), NUMBERS)


@operator("index_copy", accepts=WITH_COMPLEX)
def index_copy(self, dim, index, source, outs=()):
    places = _along(self, dim, index, source, (torch.int64,))
    out = destination(self, (index, source), outs, WITH_COMPLEX)
    places.write(out, source, _strides(source, places))
    return (out,)


@operator("index_fill", accepts=WITH_COMPLEX)
def index_fill(self, dim, index, value, outs=()):
    """A value in a tensor stays where it is."""
    places = _along(self, dim, index, None, (torch.int64,))
    if not isinstance(value, torch.Tensor):
        check_number(self, value)
        out = destination(self, (index,), outs, ALL, like=True)
        places.write(out, number=value, wraps=True)
        return (out,)
    if value.dim() or value.dtype is not self.dtype:
        raise Decline("a value of another dtype, or several")
    out = destination(self, (index, value), outs, WITH_COMPLEX, like=True)
    places.write(out, value, (0,) * len(places.shape), wraps=True)
    return (out,)


@operator("put", accepts=WITH_COMPLEX)
def put(self, index, source, accumulate=False, outs=()):
    check_index(index, (torch.int64,))
    if not accumulate and torch.are_deterministic_algorithms_enabled():
        raise Decline("deterministic algorithms, of which ATen has none on any device")
    refuse_if_deterministic()
    if source.dtype is not self.dtype or index.numel() != source.numel() or (index.numel() and not self.numel()):
        raise Decline("a source of another dtype or size")
    accepts = ALL if accumulate else WITH_COMPLEX
    if source.shape != index.shape:
        if not (source.is_contiguous() and index.is_contiguous()):
            raise Decline("a source of another shape than its index's")
        source, index = source.view(-1), index.view(-1)
    out = destination(self, (index, source), outs, accepts, like=True, filled=False)
    counted = linear_index(index, index.stride(), out)
    write_at(
        *(out, index.shape, (0,) * index.dim(), [counted], source, source.stride()),
        operation=ADD if accumulate else "",
        wraps=True,
        message=IN_RANGE_OF_BOTH_SIGNS,
        start=self,
    )
    return (out,)


def _filled_under(self, mask, values, accumulate, outs):
    """One value where a mask is set."""
    if accumulate or values.numel() != 1 or values.dim() > 1 or values.dtype is not self.dtype:
        raise Decline("several values under a mask")
    here = values.device == self.device
    out = destination(self, (mask, values) if here else (mask,), outs, ALL, like=True)
    over = mask[(..., *[None] * (self.dim() - mask.dim()))]
    return masked_fill_kernel.run((out, over, values.reshape(())), (out,))


# All but unsigned integers, which ATen refuses.
_PUT = tuple([dtype for dtype in BITS if dtype not in UNSIGNED])


@operator("index_put", "_unsafe_index_put", "_index_put_impl", accepts=_PUT)
def index_put(self, indices, values, accumulate=False, unsafe=False, outs=()):
    """Sums are added up in order, as ATen's are."""
    mask = only_mask(self, indices)
    if mask is not None:
        return _filled_under(self, mask, values, accumulate, outs)
    if not accumulate:
        refuse_if_deterministic()
    indexed = Indexed(self, indices)
    if values.dtype is not self.dtype or values.dim() > len(indexed.shape):
        raise Decline("values of another dtype, or of more dimensions")
    if broadcast_shape([indexed.shape, values.shape]) != indexed.shape:
        raise Decline("values that do not broadcast")
    accepts = WITH_COMPLEX if accumulate else _PUT
    out = destination(self, (values, *(i.tensor for i in indexed.indices)), outs, accepts, like=True)
    if out is not self:
        indexed = Indexed(out, indices)
    write: Any = functools.partial(add_rows_at, row_dims=indexed.row_dims) if accumulate else write_at
    shape, strides, places = indexed.shape, indexed.strides, indexed.indices
    value_strides = expand_strides(values.shape, values.stride(), shape)
    if accumulate and out.is_complex():
        out_parts, values = torch.view_as_real(out), torch.view_as_real(values)
        shape, (strides, value_strides) = (*shape, 2), [(*[2 * s for s in own], 1) for own in (strides, value_strides)]
        places = [i._replace(strides=(*i.strides, 0), steps=tuple([2 * step for step in i.steps])) for i in places]
    write(
        target=out_parts if accumulate and out.is_complex() else out,
        shape=shape,
        target_strides=strides,
        indices=places,
        values=values,
        value_strides=value_strides,
        wraps=True,
        message=IN_RANGE_OF_BOTH_SIGNS,
    )
    return (out,)
