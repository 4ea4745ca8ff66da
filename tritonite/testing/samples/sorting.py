"""Sorting and selection by rank. ATen chooses among equal elements, so that the elements at indices are compared."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices, dtypes
from tritonite.engine.sorting.keys import as_integers
from tritonite.testing.samples import facts

# ATen chooses either of two equal zeros for a rank.
facts.ZERO_SIGN_OF_ROUNDOFF |= {"topk", "kthvalue", "median", "nanmedian", "mode"}


@facts.arguments("sort")
def _stable(tensors: facts.Tensors) -> dict[str, Any]:
    return {"stable": True}


@facts.arguments("topk", "kthvalue")
def _few(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return how many to select along the last dimension, sorted."""
    x = tensors[0]
    return {"k": min(3, x.shape[-1] if x.dim() else 1), "sorted": True}


def _at_indices(x: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the elements at indices along a dimension, which the indices may lack."""
    if not x.dim() or not x.numel():
        return x.expand(indices.shape) if not x.dim() else indices
    if x.dtype in dtypes.UNSIGNED:
        x = as_integers(x)
    whole = indices if indices.dim() == x.dim() else indices.unsqueeze(dim)
    return x.gather(dim, whole.clamp(0, x.shape[dim] - 1)).reshape(indices.shape)


@facts.arguments("median", "nanmedian")
def _without_signed_nan(tensors: facts.Tensors) -> dict[str, Any]:
    """Return an input without negative nans: ATen's median of a whole tensor on a GPU is by a radix sort."""
    return {"self": facts.without_signed_nan(tensors[0])}


@facts.drawn("sort", "msort", "argsort", "topk", "kthvalue")
def _without_signs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make nans positive on a GPU, where ATen's radix sort puts negative ones first, and zeros positive.

    Zeros keep their sign in a stable sort. On a CPU selections by rank do not compare the sign of zeros.
    """
    x, on_cpu = arguments["self"], devices.current.aten == "cpu"
    if x.dtype not in dtypes.FLOATS or (on_cpu and "descending" not in arguments):
        return arguments
    nans = x.isnan() & x.signbit() & (not on_cpu)
    zeros = (x == 0) & x.signbit() & (arguments.get("stable") is not True)
    if not (nans | zeros).any():
        return arguments
    return arguments | {"self": x.masked_fill(nans, float("nan")).masked_fill(zeros, 0.0)}


@facts.drawn("mode")
def _without_nan(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace nan, which ATen's kernel for CPUs does not sort."""
    x = arguments["self"]
    if devices.current.aten != "cpu" or x.dtype not in dtypes.FLOATS or not x.isnan().any():
        return arguments
    return arguments | {"self": x.nan_to_num(1.0, float("inf"), -float("inf"))}


@facts.drawn("median", "nanmedian")
def _not_expanded(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a contiguous input instead of an expanded one, for which ATen's kernel for CPUs is wrong."""
    x = arguments["self"]
    return _without_signs(arguments | {"self": x.contiguous()} if 0 in x.stride() else arguments)


@facts.chosen("kthvalue")
def _kthvalue_results(
    self: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False, *, results: list[torch.Tensor], **_: Any
) -> list[torch.Tensor]:
    return _selected_results(self, dim, keepdim, results=results)


@facts.chosen("mode")
def _mode_results(
    self: torch.Tensor, dim: int = -1, keepdim: bool = False, *, results: list[torch.Tensor], **_: Any
) -> list[torch.Tensor]:
    """Replace the value on GPUs, where ATen chooses among equally frequent ones, by how often it occurs."""
    values, found, indices = _selected_results(self, dim, keepdim, results=results)
    if self.device.type == "cpu" or not self.dim() or not self.numel():
        return [values, found, indices]
    whole = values if keepdim else values.unsqueeze(dim)
    count = ((self == whole) | ((self != self) & (whole != whole))).sum(dim, keepdim=keepdim)
    return [torch.empty_like(values, dtype=torch.int64).copy_(count), (found != values) & (values == values), indices]


@facts.chosen("median", "nanmedian")
def _selected_results(
    self: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, results: list[torch.Tensor], **_: Any
) -> list[torch.Tensor]:
    """Return values, the elements at indices, and zeros in the dtype and layout of the indices."""
    if len(results) < 2:
        return results
    values, indices = results
    return [values, _at_indices(self, indices, -1 if dim is None else dim), torch.zeros_like(indices)]


@facts.chosen("topk")
def _topk_results(
    self: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    results: list[torch.Tensor],
    **_: Any,
) -> list[torch.Tensor]:
    """Return values, elements at indices, and zeros; sorted where no order was asked for."""
    values, indices = results
    found = _at_indices(self, indices, dim)
    if not sorted:
        values, found = (x.sort(dim).values if x.dim() else x for x in (values, found))
    return [values, found, torch.zeros_like(indices)]


@facts.chosen("sort")
def _sort_results(
    self: torch.Tensor,
    dim: int = -1,
    descending: bool = False,
    stable: bool | None = None,
    *,
    results: list[torch.Tensor],
    **_: Any,
) -> list[torch.Tensor]:
    """Replace indices unless the sort is stable. `msort` returns values alone, and `argsort` indices alone."""
    *values, indices = results
    if stable or (not values and not _is_permutation(indices, dim)):
        return results
    return [*values, _at_indices(self, indices, dim), torch.zeros_like(indices)]


def _is_permutation(x: torch.Tensor, dim: int) -> bool:
    """Return whether a tensor has every index along a dimension once."""
    if x.dtype is not torch.int64 or not x.dim():
        return False
    return torch.equal(
        x.movedim(dim, -1).sort(-1).values, torch.arange(x.shape[dim], device=x.device).expand_as(x.movedim(dim, -1))
    )


facts.may_decline(
    ("median", "nanmedian", "median.out", "nanmedian.out"),
    ("empty",),
    "the median of no integers, which would be nan",
    "the conversion of ATen's nan to an integer is undefined",
    dtypes=dtypes.INTS,
)
facts.may_decline(
    ("msort",),
    ("out=",),
    "sort.values*: output has another shape or dtype",
    "ATen passes on indices that it has not resized yet",
)
