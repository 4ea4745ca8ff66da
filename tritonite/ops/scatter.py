"""scatter, index_add, index_put and others: writes to the elements that index tensors select.

An index out of range stops the program, as in ATen's kernels, and nothing is written for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tritonite.dtypes import ALL, BITS, FLOATS, NUMBERS, UNSIGNED, WITH_COMPLEX, opmath
from tritonite.engine.indexing.indices import (
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
from tritonite.ops import aten
from tritonite.ops.conditional import masked_fill
from tritonite.ops.creation import ascending
from tritonite.ops.indexing import Indexed, check_gathered, check_index, only_dimension, only_mask, without_dimension
from tritonite.registry import exclude, operator, scalar_kernel
from tritonite.runtime.contract import empty, empty_strided, limit, zeros
from tritonite.runtime.symbols import limits_of, number_type, zero_or_one

_OPERATIONS = {"add": ADD, "sum": ADD, "mean": ADD, "multiply": MULTIPLY, "prod": MULTIPLY}
_OPERATIONS |= {"amax": LARGEST, "max": LARGEST, "amin": SMALLEST, "min": SMALLEST}


exclude("_unsafe_masked_index", "ATen makes it of clamp, _unsafe_index and masked_fill, which have kernels")
exclude("_unsafe_masked_index_put_accumulate", "ATen makes it of clamp, masked_fill and index_put, which have kernels")


def refuse_if_deterministic(
    reason: str = "a kernel that writes in no order, while deterministic algorithms are enabled",
) -> None:
    """Decline on a GPU if torch's deterministic algorithms are enabled, for which ATen has another kernel or raises."""
    if aten.on_gpu() and torch.are_deterministic_algorithms_enabled():
        raise Decline(reason)


def destination(
    self: torch.Tensor,
    others: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    accepts: Sequence[torch.dtype],
    like: bool = False,
    filled: bool = True,
) -> torch.Tensor:
    """Return the tensor that is written to: `self` in place, the output in `outs`, or a fresh one.

    A fresh one is contiguous, or has the layout of `self` with `like`. With `filled`, `self` is copied to it.
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
    """Decline a number that ATen does not convert to a tensor's dtype."""
    fraction = number_type(number) is float and not self.is_floating_point()
    if self.dtype not in ALL or fraction or number_type(number) is complex:
        raise Decline(f"dtype {self.dtype} with a {number_type(number).__name__}")
    limit(number, limits_of(self.dtype))


def _check_source(self: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
    """Decline a source without an element for each index."""
    if source.dtype is not self.dtype:
        raise Decline(f"a source of {source.dtype} for {self.dtype}")
    if not index.numel():
        return
    if max(source.dim(), 1) != max(index.dim(), 1):
        raise Decline(f"a source of {source.dim()} dimensions for an index of {index.dim()}")
    if any(size > own for size, own in zip(index.shape or (1,), source.shape or (1,), strict=False)):
        raise Decline(f"an index of shape {tuple(index.shape)}, larger than a source of {tuple(source.shape)}")


class Updates(NamedTuple):
    """The updates of a scatter along one dimension: their `shape`, and the `index` with its `strides` over it."""

    index: torch.Tensor
    dim: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def as_real(self) -> Updates:
        """Return the updates of a complex tensor viewed as real, whose last dimension has both parts."""
        return self._replace(shape=(*self.shape, 2), strides=(*self.strides, 0))

    def write(self, target: torch.Tensor, *values: Any, **how: Any) -> None:
        """Apply the updates to a target with `write_at`."""
        indices = [index_along(self.index, self.strides, target, self.dim)]
        write_at(target, self.shape, without_dimension(target, self.dim, self.shape), indices, *values, **how)

    def add_in_order(self, target: torch.Tensor, source: torch.Tensor, row_dims: Sequence[int]) -> None:
        """Add a source to a target in order of the updates. The index depends on `row_dims` of the space."""
        shape, rank = self.shape, len(self.shape)
        indices = [index_along(self.index, self.strides, target, self.dim)]
        steps = list(without_dimension(target, self.dim, shape))
        for d in row_dims:
            if d == self.dim or shape[d] == 1:
                continue
            # Other row dimensions become indices of their own, whose values are the coordinates.
            coordinates = empty((shape[d],), torch.int64, target.device)
            ascending.run((0, 1, 0, False), (coordinates,))
            along = tuple([int(k == d) for k in range(rank)])
            indices.append(Index(coordinates, along, target.shape[d], (target.stride(d),)))
            steps[d] = 0
        strides = _strides(source, self)
        add_rows_at(target, shape, row_dims, steps, indices, source, strides, message=IN_RANGE)


def _scattered(self, dim, index, source=None, in_order=False):
    """Return the updates of an index, and of a source, that have an element for each update."""
    dim = check_gathered(self, dim, index)
    if not in_order:
        refuse_if_deterministic()
    if source is not None:
        _check_source(self, index, source)
    return Updates(index, dim, tuple(index.shape), index.stride())


def _strides(source: torch.Tensor, updates: Updates) -> tuple[int, ...]:
    """Return a source's strides over the updates; the source may be larger, or have no dimensions."""
    return (*source.stride(), *[0] * len(updates.shape))[: len(updates.shape)]


@operator("scatter", accepts=WITH_COMPLEX)
def scatter(self, dim, index, src, outs=()):
    updates = _scattered(self, dim, index, src)
    out = destination(self, (index, src), outs, WITH_COMPLEX)
    updates.write(out, src, _strides(src, updates))
    return (out,)


@operator("scatter", accepts=ALL)
def scatter_value(self, dim, index, value, outs=()):
    updates = _scattered(self, dim, index)
    check_number(self, value)
    out = destination(self, (index,), outs, ALL)
    updates.write(out, number=value)
    return (out,)


def _operation(self: torch.Tensor, reduce: str, names: Sequence[str]) -> str:
    """Return the operation that a reduction's name stands for. Raises Decline for names that ATen refuses."""
    if reduce not in names:
        raise Decline(f"reduction {reduce!r}, not one of {', '.join(names)}")
    operation = _OPERATIONS[reduce]
    if self.dtype is torch.bool and aten.on_gpu() and operation != ADD:
        raise Decline(f"reduction {reduce!r} of bools, for which ATen raises on GPUs")
    return operation


@operator("scatter", accepts=ALL)
def scatter_with(self, dim, index, src, reduce, outs=()):
    updates = _scattered(self, dim, index, src)
    operation = _operation(self, reduce, ("add", "multiply"))
    out = destination(self, (index, src), outs, ALL, filled=False)
    updates.write(out, src, _strides(src, updates), operation=operation, start=self)
    return (out,)


@operator("scatter", accepts=ALL)
def scatter_value_with(self, dim, index, value, reduce, outs=()):
    updates = _scattered(self, dim, index)
    operation = _operation(self, reduce, ("add", "multiply"))
    check_number(self, value)
    out = destination(self, (index,), outs, ALL, filled=False)
    updates.write(out, number=value, operation=operation, start=self)
    return (out,)


def _add(out, start, source, updates, row_dims):
    """Write `start` plus the updates of a source to `out`.

    They are added in no order, or in order if deterministic algorithms are enabled.
    """
    in_order = torch.are_deterministic_algorithms_enabled() and bool(updates.shape)
    if in_order or out.is_complex():
        if start is not out and out.numel():
            out.copy_(start)
        start = None
    if out.is_complex():
        if not out.dim():
            # Viewed as real, a 0-dim tensor has one dimension, which no index addresses; so it becomes a vector first.
            out, source, updates = out.view(1), source.reshape(1), Updates(updates.index.reshape(1), 0, (1,), (1,))
            row_dims = (0,)
        out, source, updates = torch.view_as_real(out), torch.view_as_real(source), updates.as_real()
    if in_order:
        updates.add_in_order(out, source, row_dims)
    else:
        updates.write(out, source, _strides(source, updates), operation=ADD, start=start)


@operator("scatter_add", accepts=WITH_COMPLEX)
def scatter_add(self, dim, index, src, outs=()):
    updates = _scattered(self, dim, index, src, in_order=True)
    _check_count(updates, self)
    out = destination(self, (index, src), outs, WITH_COMPLEX, filled=False)
    _add(out, self, src, updates, range(index.dim()))
    return (out,)


@scalar_kernel(own=("total", "count"), static=("included",))
def _mean(total, count, included):
    """Divide totals by counts, rounding quotients of integers down. A count of 0 leaves the total as it is."""
    count = tl.maximum(count + 1 if included else count, 1)
    if total.dtype.is_floating():
        return true_divide(total, count.to(total.dtype))
    wide, count = total.to(tl.int64), count.to(tl.int64)
    quotient = wide // count
    return tl.where((wide % count != 0) & (wide < 0), quotient - 1, quotient).to(total.dtype)


def _identity(dtype: torch.dtype, operation: str) -> Any:
    """Return the identity of an operation: the number that changes no other."""
    if operation in (ADD, MULTIPLY):
        return int(operation == MULTIPLY)
    if dtype.is_floating_point:
        return -float("inf") if operation == LARGEST else float("inf")
    limits = torch.iinfo(torch.uint8 if dtype is torch.bool else dtype)
    least, most = (0, 1) if dtype is torch.bool else (limits.min, limits.max)
    return least if operation == LARGEST else most


def _reduced(self, source, updates, reduce, include_self, outs, names, accepts):
    """Reduce the updates of a source, with the elements of `self` if `include_self`, to the outputs."""
    operation = _operation(self, reduce, names)
    if reduce == "mean" and self.dtype is torch.bool:
        raise Decline("a mean of bools")
    # A mean is rounded only after the division.
    wide = reduce == "mean" and opmath(self.dtype) is not self.dtype
    out = destination(self, (updates.index, source), outs, accepts, filled=not wide)
    total = widened(self, out) if wide else out
    if not include_self:
        updates.write(total, number=_identity(out.dtype, operation))
    updates.write(total, source, _strides(source, updates), operation=operation)
    if reduce == "mean" and out.numel():
        count = zeros(out.shape, torch.int32, out.device)
        updates.write(count, number=1, operation=ADD)
        _mean.run((total, count, include_self), (out,))
    return (out,)


@operator("scatter_reduce", accepts=ALL)
def scatter_reduce(self, dim, index, src, reduce, include_self=True, outs=()):
    updates = _scattered(self, dim, index, src)
    names = ("sum", "prod", "mean", "amax", "amin", "max", "min")
    return _reduced(self, src, updates, reduce, include_self, outs, names, ALL)


def _check_count(updates: Updates, target: torch.Tensor) -> None:
    """Decline, before anything is written, more updates or slots than `add_rows_at` serves."""
    if torch.are_deterministic_algorithms_enabled() and max(target.numel(), torch.Size(updates.shape).numel()) >= 2**30:
        raise Decline(f"{target.numel()} elements or {torch.Size(updates.shape).numel()} updates, more than 2^30 - 1")


def _along(self, dim, index, source=None, accepts=INDEX_DTYPES, in_order=False):
    """Return the updates of slices along `dim`, which a vector of indices selects; a source has a slice for each."""
    check_index(index, accepts)
    dim = only_dimension(dim, self.dim())
    if not in_order:
        refuse_if_deterministic()
    if index.dim() > 1:
        raise Decline(f"an index of shape {tuple(index.shape)}, not a vector")
    count = index.numel()
    if count and self.dim() and not self.shape[dim]:
        raise Decline(f"an index into dimension {dim}, which has size 0")
    shape = (*self.shape[:dim], count, *self.shape[dim + 1 :]) if self.dim() else ()
    if not self.dim() and count != 1:
        raise Decline(f"{count} indices into a tensor without dimensions")
    if source is not None and (source.dtype is not self.dtype or tuple(source.shape) != shape):
        raise Decline(f"a source of {source.dtype} and shape {tuple(source.shape)} for {self.dtype} and {shape}")
    strides = [0] * len(shape)
    if self.dim():
        strides[dim] = index.stride(0) if index.dim() else 0
    return Updates(index, dim, shape, tuple(strides))


@scalar_kernel(cast=("alpha",))
def _times(source, alpha):
    return source * alpha


@scalar_kernel(cast=("alpha",), output_dtypes=(None, None), accepts=FLOATS)
def _parts_times(real, imaginary, alpha):
    """Multiply by a complex number whose imaginary part is 0, as ATen does; 0 times infinity is nan."""
    return real * alpha - imaginary * 0.0, real * 0.0 + imaginary * alpha


def _scaled(source, alpha):
    """Return a contiguous product of a source and a number."""
    result = empty(source.shape, source.dtype, source.device)
    if source.is_complex():
        parts, whole = torch.view_as_real(result), torch.view_as_real(source)
        _parts_times.run((whole[..., 0], whole[..., 1], alpha), (parts[..., 0], parts[..., 1]))
    else:
        _times.run((source, alpha), (result,))
    return result


@operator("index_add", accepts=WITH_COMPLEX, pin_zero_or_one=("alpha",))
def index_add(self, dim, index, source, alpha=1, outs=()):
    updates = _along(self, dim, index, source, in_order=True)
    if not (self.is_floating_point() or self.is_complex()) and number_type(alpha) is float:
        raise Decline(f"a float alpha for {self.dtype}")
    if self.dtype is not torch.bool and number_type(alpha) is bool:
        raise Decline(f"a bool alpha for {self.dtype}")
    check_number(torch.view_as_real(self) if self.is_complex() else self, alpha)
    _check_count(updates, self)
    out = destination(self, (index, source), outs, WITH_COMPLEX, filled=False)
    in_order = torch.are_deterministic_algorithms_enabled()
    if not source.is_complex() and not in_order:
        updates.write(out, source, _strides(source, updates), alpha, ADD, start=self)
        return (out,)
    if source.numel() and (source.is_complex() or zero_or_one(alpha) != 1):
        source = _scaled(source, alpha)
    _add(out, self, source, updates, (updates.dim,))
    return (out,)


@operator("index_reduce", accepts=NUMBERS)
def index_reduce(self, dim, index, source, reduce, include_self=True, outs=()):
    """Reduce slices. Bools are not accepted, since ATen raises for most reductions of bools."""
    updates = _along(self, dim, index, source)
    return _reduced(self, source, updates, reduce, include_self, outs, ("prod", "mean", "amax", "amin"), NUMBERS)


@operator("index_copy", accepts=WITH_COMPLEX)
def index_copy(self, dim, index, source, outs=()):
    updates = _along(self, dim, index, source, (torch.int64,))
    out = destination(self, (index, source), outs, WITH_COMPLEX)
    updates.write(out, source, _strides(source, updates))
    return (out,)


@operator("index_fill", accepts=WITH_COMPLEX)
def index_fill(self, dim, index, value, outs=()):
    """Fill slices. A value in a tensor is read by the kernel, not by the host."""
    updates = _along(self, dim, index, None, (torch.int64,))
    if not isinstance(value, torch.Tensor):
        check_number(self, value)
        out = destination(self, (index,), outs, ALL, like=True)
        updates.write(out, number=value, wraps=True)
        return (out,)
    if value.dim() or value.dtype is not self.dtype:
        raise Decline(f"a value of {value.dtype} and {value.dim()} dimensions, not of {self.dtype} and 0")
    out = destination(self, (index, value), outs, WITH_COMPLEX, like=True)
    updates.write(out, value, (0,) * len(updates.shape), wraps=True)
    return (out,)


@operator("put", accepts=WITH_COMPLEX)
def put(self, index, source, accumulate=False, outs=()):
    check_index(index, (torch.int64,))
    if not accumulate and torch.are_deterministic_algorithms_enabled():
        raise Decline("deterministic algorithms, for which ATen raises on any device")
    refuse_if_deterministic()
    if source.dtype is not self.dtype or index.numel() != source.numel() or (index.numel() and not self.numel()):
        raise Decline(f"a source of {source.dtype} and {source.numel()} elements for {self.dtype} and {index.numel()}")
    accepts = ALL if accumulate else WITH_COMPLEX
    if source.shape != index.shape:
        if not (source.is_contiguous() and index.is_contiguous()):
            raise Decline("a source and an index of different shapes that are not contiguous")
        source, index = source.view(-1), index.view(-1)
    out = destination(self, (index, source), outs, accepts, like=True, filled=False)
    linear = linear_index(index, index.stride(), out)
    write_at(
        *(out, index.shape, (0,) * index.dim(), [linear], source, source.stride()),
        operation=ADD if accumulate else "",
        wraps=True,
        message=IN_RANGE_OF_BOTH_SIGNS,
        start=self,
    )
    return (out,)


def _filled_under(self, mask, values, accumulate, outs):
    """Write one value where a mask is set."""
    if accumulate or values.numel() != 1 or values.dim() > 1 or values.dtype is not self.dtype:
        raise Decline("a mask with several values, accumulation or another dtype")
    here = values.device == self.device
    out = destination(self, (mask, values) if here else (mask,), outs, ALL, like=True)
    over = mask[(..., *[None] * (self.dim() - mask.dim()))]
    return masked_fill.run((out, over, values.reshape(())), (out,))


# All dtypes but unsigned integers, for which ATen raises.
_PUT = tuple([dtype for dtype in BITS if dtype not in UNSIGNED])


@operator("index_put", "_unsafe_index_put", "_index_put_impl", accepts=_PUT)
def index_put(self, indices, values, accumulate=False, unsafe=False, outs=()):
    """Write or accumulate values. Sums are added up in order, as ATen's are."""
    mask = only_mask(self, indices)
    if mask is not None:
        return _filled_under(self, mask, values, accumulate, outs)
    if not accumulate:
        refuse_if_deterministic()
    indexed = Indexed(self, indices)
    if values.dtype is not self.dtype or values.dim() > len(indexed.shape):
        raise Decline(f"values of {values.dtype} and shape {tuple(values.shape)} for {self.dtype} and {indexed.shape}")
    if broadcast_shape([indexed.shape, values.shape]) != indexed.shape:
        raise Decline(f"values of shape {tuple(values.shape)}, which do not broadcast to {tuple(indexed.shape)}")
    accepts = WITH_COMPLEX if accumulate else _PUT
    out = destination(self, (values, *(i.tensor for i in indexed.indices)), outs, accepts, like=True)
    if out is not self:
        indexed = Indexed(out, indices)
    write: Any = functools.partial(add_rows_at, row_dims=indexed.row_dims) if accumulate else write_at
    shape, strides, selected = indexed.shape, indexed.strides, indexed.indices
    value_strides = expand_strides(values.shape, values.stride(), shape)
    if accumulate and out.is_complex():
        out_parts, values = torch.view_as_real(out), torch.view_as_real(values)
        shape, (strides, value_strides) = (*shape, 2), [(*[2 * s for s in own], 1) for own in (strides, value_strides)]
        selected = [i._replace(strides=(*i.strides, 0), steps=tuple([2 * step for step in i.steps])) for i in selected]
    write(
        target=out_parts if accumulate and out.is_complex() else out,
        shape=shape,
        target_strides=strides,
        indices=selected,
        values=values,
        value_strides=value_strides,
        wraps=True,
        message=IN_RANGE_OF_BOTH_SIGNS,
    )
    return (out,)
