"""Where elements belong in what is sorted, and whether they are among others."""

import torch

from tritonite.dtypes import NUMBERS, common_dtype, opmath
from tritonite.engine.indexing.places import row_major
from tritonite.engine.movement import fill
from tritonite.engine.outputs import outputs
from tritonite.engine.searching.search import FEW, TABLES, among_all, among_few, among_many, check_sorter, search
from tritonite.errors import Decline
from tritonite.registry import operator
from tritonite.runtime.contract import empty, refuse_if_negative
from tritonite.runtime.symbols import number_type


def promoted(*values):
    """The dtype that tensors and numbers are compared in. Declines complex numbers."""
    if any(number_type(value) is complex for value in values):
        raise Decline("a complex number")
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return common_dtype(
        tuple(tensor.dtype for tensor in tensors if tensor.dim()),
        tuple(tensor.dtype for tensor in tensors if not tensor.dim()),
        tuple(number_type(value) for value in values if not isinstance(value, torch.Tensor)),
        torch.get_default_dtype(),
    )


def as_tensor(number, dtype, device):
    """A tensor without dimensions. Declines a number that the dtype does not hold."""
    result = empty((), dtype, device)
    fill(result, number)
    return result


def _searched(bounds, values, out_int32, right, side, sorter, outs):
    if side is not None and (side not in ("left", "right") or (right and side == "left")):
        raise Decline("a side that there is not, or two")
    number = not isinstance(values, torch.Tensor)
    inputs = [bounds, *([] if number else [values]), *([] if sorter is None else [sorter])]
    shape = () if number else values.shape
    (out,) = outputs(inputs, [shape], [torch.int32 if out_int32 else torch.int64], outs, accepts=NUMBERS)
    if not bounds.dim() or (bounds.dim() > 1 and tuple(bounds.shape[:-1]) != tuple(shape[:-1])):
        raise Decline("bounds of other rows")
    if bounds.dim() > 1 and len(shape) != bounds.dim():
        raise Decline("bounds of another number of dimensions")
    if sorter is not None and (sorter.dtype is not torch.int64 or sorter.shape != bounds.shape):
        raise Decline("a sorter of another shape or dtype")
    dtype = promoted(bounds, values)
    if not out.is_contiguous():
        raise Decline("an output that is not contiguous")
    if number:
        values = as_tensor(values, dtype, bounds.device)
    if sorter is not None:
        sorter = sorter.contiguous()
        if not sorter.numel():
            raise Decline("a sorter of no elements")
        refuse_if_negative(check_sorter(sorter), "a sorter that is out of range")
    search(values.to(dtype), bounds.to(dtype).contiguous(), sorter, side == "right" or bool(right), out)
    return (out,)


@operator("searchsorted", accepts=NUMBERS)
def searchsorted(sorted_sequence, self, out_int32=False, right=False, side=None, sorter=None, outs=()):
    """By binary search, each element for itself."""
    return _searched(sorted_sequence, self, out_int32, right, side, sorter, outs)


@operator("bucketize", accepts=NUMBERS)
def bucketize(self, boundaries, out_int32=False, right=False, outs=()):
    if boundaries.dim() != 1:
        raise Decline("boundaries that are no vector")
    return _searched(boundaries, self, out_int32, right, None, None, outs)


def _sorted(elements, tests):
    """Whether ATen sorts both together, and does not compare all with all."""
    count = elements.numel() if isinstance(elements, torch.Tensor) else 1
    return isinstance(tests, torch.Tensor) and tests.numel() >= int(10 * count**0.145)


def _compared(elements, tests):
    """The dtype that elements are compared in: a number counts for as much as a vector, but on a CPU among few."""
    if not isinstance(tests, torch.Tensor) or (tests.device.type == "cpu" and not _sorted(elements, tests)):
        return promoted(elements, tests)
    if isinstance(elements, torch.Tensor):
        return torch.promote_types(elements.dtype, tests.dtype)
    return torch.promote_types(torch.float64 if number_type(elements) is float else torch.int64, tests.dtype)


def _isin(elements, tests, invert, outs):
    """By comparisons, by a table of all elements that there are, or by one of the tests, hashed."""
    given = [value for value in (elements, tests) if isinstance(value, torch.Tensor)]
    shape = elements.shape if isinstance(elements, torch.Tensor) else ()
    outs = outputs(given, [shape], [torch.bool], outs, accepts=NUMBERS)
    if any(number_type(value) in (bool, complex) for value in (elements, tests)):
        raise Decline("a bool, which ATen refuses, or a complex number")
    few = isinstance(tests, torch.Tensor) and tests.numel() and not _sorted(elements, tests)
    if few and len(row_major(tests.shape, [tests.stride()])[0]) > 1:
        raise Decline("a few tests that are no vector unless copied, for which ATen raises")
    dtype = _compared(elements, tests)
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
    """Whether elements are among others. Nothing is gained by their being unique."""
    return _isin(elements, test_elements, invert, outs)


@operator("isin", accepts=NUMBERS)
def isin_number(elements, test_element, assume_unique=False, invert=False, outs=()):
    """Whether elements are a number."""
    return _isin(elements, test_element, invert, outs)


@operator("isin", accepts=NUMBERS)
def number_isin(element, test_elements, assume_unique=False, invert=False, outs=()):
    """Whether a number is among elements."""
    return _isin(element, test_elements, invert, outs)
