"""searchsorted, bucketize, isin."""

import math

import torch

from tritonite.dtypes import NUMBERS, common_dtype, opmath
from tritonite.engine.indexing.indices import row_major
from tritonite.engine.movement import fill
from tritonite.engine.outputs import outputs
from tritonite.engine.searching.membership import FEW, TABLES, among_all, among_few, among_many
from tritonite.engine.searching.search import check_sorter, search
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.registry import operator
from tritonite.runtime.contract import empty, refuse_if_negative
from tritonite.runtime.symbols import number_type


def promoted(*values):
    """Return the dtype that tensors and numbers are compared in. Decline complex numbers."""
    if any(number_type(value) is complex for value in values):
        raise Decline("a complex number, which has no order")
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return common_dtype(
        tuple(tensor.dtype for tensor in tensors if tensor.dim()),
        tuple(tensor.dtype for tensor in tensors if not tensor.dim()),
        tuple(number_type(value) for value in values if not isinstance(value, torch.Tensor)),
        torch.get_default_dtype(),
    )


def as_tensor(number, dtype, device):
    """Return a 0-dim tensor of a number. Decline a number that the dtype cannot hold."""
    result = empty((), dtype, device)
    fill(result, number)
    return result


def _searched(bounds, values, out_int32, right, side, sorter, outs):
    if side is not None and (side not in ("left", "right") or (right and side == "left")):
        raise Decline(f"side {side!r} with right={right}: a side is 'left' or 'right', and 'left' contradicts right")
    number = not isinstance(values, torch.Tensor)
    inputs = [bounds, *([] if number else [values]), *([] if sorter is None else [sorter])]
    shape = () if number else values.shape
    (out,) = outputs(inputs, [shape], [torch.int32 if out_int32 else torch.int64], outs, accepts=NUMBERS)
    if not bounds.dim() or (bounds.dim() > 1 and tuple(bounds.shape[:-1]) != tuple(shape[:-1])):
        raise Decline(f"bounds of shape {tuple(bounds.shape)} for values of shape {tuple(shape)}")
    if bounds.dim() > 1 and len(shape) != bounds.dim():
        raise Decline(f"bounds of {bounds.dim()} dimensions for values of {len(shape)}")
    if sorter is not None and (sorter.dtype is not torch.int64 or sorter.shape != bounds.shape):
        raise Decline(f"a sorter of {sorter.dtype} and shape {tuple(sorter.shape)}, not of int64 and the bounds' shape")
    dtype = promoted(bounds, values)
    if not out.is_contiguous():
        raise Decline("an output that is not contiguous")
    if number:
        values = as_tensor(values, dtype, bounds.device)
    if sorter is not None:
        sorter = sorter.contiguous()
        if not sorter.numel():
            raise Decline("a sorter without elements")
        refuse_if_negative(check_sorter(sorter), "a sorter with an index out of range")
    search(values.to(dtype), bounds.to(dtype).contiguous(), sorter, side == "right" or bool(right), out)
    return (out,)


@operator("searchsorted", accepts=NUMBERS)
def searchsorted(sorted_sequence, self, out_int32=False, right=False, side=None, sorter=None, outs=()):
    """Search for each element with a binary search of its own."""
    return _searched(sorted_sequence, self, out_int32, right, side, sorter, outs)


@operator("bucketize", accepts=NUMBERS)
def bucketize(self, boundaries, out_int32=False, right=False, outs=()):
    if boundaries.dim() != 1:
        raise Decline(f"boundaries of {boundaries.dim()} dimensions, not 1")
    return _searched(boundaries, self, out_int32, right, None, None, outs)


def _sorted(elements, tests):
    """Return whether ATen sorts elements and tests together, instead of comparing each with each."""
    count = elements.numel() if isinstance(elements, torch.Tensor) else 1
    return isinstance(tests, torch.Tensor) and tests.numel() >= int(10 * count**0.145)


def _compared(elements, tests):
    """Return the dtype that elements are compared in.

    A number promotes like a tensor of float64 or int64, except where ATen's CPU kernel compares each with each.
    """
    if not isinstance(tests, torch.Tensor) or (aten.on_cpu() and not _sorted(elements, tests)):
        return promoted(elements, tests)
    if isinstance(elements, torch.Tensor):
        return torch.promote_types(elements.dtype, tests.dtype)
    return torch.promote_types(torch.float64 if number_type(elements) is float else torch.int64, tests.dtype)


def _rounds(integers, dtype):
    """Return whether a dtype is a float that does not have every number of an integer dtype."""
    if integers.is_floating_point or not dtype.is_floating_point:
        return False
    return torch.iinfo(integers).bits > 1 - math.log2(torch.finfo(dtype).eps)


def _isin(elements, tests, invert, outs):
    """Write whether elements are among tests: by comparisons, by a table of flags, or by a hash table."""
    given = [value for value in (elements, tests) if isinstance(value, torch.Tensor)]
    shape = elements.shape if isinstance(elements, torch.Tensor) else ()
    outs = outputs(given, [shape], [torch.bool], outs, accepts=NUMBERS)
    if any(number_type(value) in (bool, complex) for value in (elements, tests)):
        raise Decline("a bool, which ATen refuses, or a complex number")
    few = isinstance(tests, torch.Tensor) and tests.numel() and not _sorted(elements, tests)
    if few and len(row_major(tests.shape, [tests.stride()])[0]) > 1:
        raise Decline("a few tests whose strides are not those of a vector, for which ATen raises")
    dtype = _compared(elements, tests)
    if isinstance(elements, torch.Tensor) and _sorted(elements, tests) and _rounds(elements.dtype, dtype):
        raise Decline(f"{elements.dtype} elements in {dtype}, where ATen finds one that rounds to another of them")
    device = given[0].device
    (x, others) = (
        value if isinstance(value, torch.Tensor) else as_tensor(value, dtype, device) for value in (elements, tests)
    )
    (out,) = outs
    if not out.is_contiguous():
        raise Decline("an output that is not contiguous")
    if not out.numel():
        return outs
    compute = opmath(dtype)
    if others.numel() <= FEW:
        among_few(x.to(dtype), others.to(dtype).reshape(-1), invert, compute, out)
    elif dtype in TABLES:
        among_all(x.to(dtype), others.to(dtype), invert, out)
    else:
        among_many(x.to(dtype), others.to(dtype), invert, compute, out)
    return outs


@operator("isin", accepts=NUMBERS)
def isin(elements, test_elements, assume_unique=False, invert=False, outs=()):
    """Test each element. `assume_unique` saves no work here."""
    return _isin(elements, test_elements, invert, outs)


@operator("isin", accepts=NUMBERS)
def isin_number(elements, test_element, assume_unique=False, invert=False, outs=()):
    """Test each element against one number."""
    return _isin(elements, test_element, invert, outs)


@operator("isin", accepts=NUMBERS)
def number_isin(element, test_elements, assume_unique=False, invert=False, outs=()):
    """Test one number against all test elements."""
    return _isin(element, test_elements, invert, outs)
