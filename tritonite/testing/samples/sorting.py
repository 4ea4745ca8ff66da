"""Sorting, and elements by their rank: of several equals ATen takes any, so that what indices point at is compared."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices, dtypes
from tritonite.engine.sorting.keys import as_integers
from tritonite.testing.samples import facts

# Which of equal zeros has a rank is ATen's choice.
facts.ZERO_SIGN_OF_ROUNDOFF |= {"topk", "kthvalue", "median", "nanmedian", "mode"}


@facts.arguments("sort")
def _stable(tensors: facts.Tensors) -> dict[str, Any]:
    return {"stable": True}


@facts.arguments("topk", "kthvalue")
def _few(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Along the last dimension, in order, which all of ATen's kernels have alike."""
    x = tensors[0]
    return {"k": min(3, x.shape[-1] if x.dim() else 1), "sorted": True}


def _pointed_at(x: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
    """The elements that indices point at, of which there are as many dimensions or one less."""
    if not x.dim() or not x.numel():
        return x.expand(indices.shape) if not x.dim() else indices
    if x.dtype in dtypes.UNSIGNED:
        x = as_integers(x)
    whole = indices if indices.dim() == x.dim() else indices.unsqueeze(dim)
    return x.gather(dim, whole.clamp(0, x.shape[dim] - 1)).reshape(indices.shape)


@facts.arguments("median", "nanmedian")
def _without_signed_nan(tensors: facts.Tensors) -> dict[str, Any]:
    """ATen's medians of whole tensors on GPUs are by a sort by digits."""
    return {"self": facts.without_signed_nan(tensors[0])}


@facts.drawn("sort", "msort", "argsort", "topk", "kthvalue")
def _without_signs(arguments: dict[str, Any]) -> dict[str, Any]:
    """ATen's kernels for GPUs sort by bits: a nan with a sign, as conversions from bfloat16 give one, comes first.

    Unless a sort is stable, zeros of both signs come in any order. On a CPU other ranks are compared without that sign.
    """
    x, on_cpu = arguments["self"], devices.current.type == "cpu"
    if x.dtype not in dtypes.FLOATS or (on_cpu and "descending" not in arguments):
        return arguments
    nans = x.isnan() & x.signbit() & (not on_cpu)
    zeros = (x == 0) & x.signbit() & (arguments.get("stable") is not True)
    if not (nans | zeros).any():
        return arguments
    return arguments | {"self": x.masked_fill(nans, float("nan")).masked_fill(zeros, 0.0)}


@facts.drawn("mode")
def _without_nan(arguments: dict[str, Any]) -> dict[str, Any]:
    """ATen's kernel for CPUs leaves nan where it meets it, and takes the first of elements that are there as often."""
    x = arguments["self"]
    if devices.current.type != "cpu" or x.dtype not in dtypes.FLOATS or not x.isnan().any():
        return arguments
    return arguments | {"self": x.nan_to_num(1.0, float("inf"), -float("inf"))}


@facts.drawn("median", "nanmedian")
def _apart(arguments: dict[str, Any]) -> dict[str, Any]:
    """ATen's kernel for CPUs gives other elements of a tensor that repeats along the dimension."""
    x = arguments["self"]
    return _without_signs(arguments | {"self": x.contiguous()} if 0 in x.stride() else arguments)


@facts.chosen("kthvalue")
def _of_kthvalue(
    self: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False, *, results: list[torch.Tensor], **_: Any
) -> list[torch.Tensor]:
    return _of_one(self, dim, keepdim, results=results)


@facts.chosen("mode")
def _of_mode(
    self: torch.Tensor, dim: int = -1, keepdim: bool = False, *, results: list[torch.Tensor], **_: Any
) -> list[torch.Tensor]:
    """Of several that are as frequent ATen takes the smallest on CPUs, and any on GPUs: how many there are of it."""
    values, pointed, indices = _of_one(self, dim, keepdim, results=results)
    if self.device.type == "cpu" or not self.dim() or not self.numel():
        return [values, pointed, indices]
    whole = values if keepdim else values.unsqueeze(dim)
    count = ((self == whole) | ((self != self) & (whole != whole))).sum(dim, keepdim=keepdim)
    return [torch.empty_like(values, dtype=torch.int64).copy_(count), (pointed != values) & (values == values), indices]


@facts.chosen("median", "nanmedian")
def _of_one(
    self: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, results: list[torch.Tensor], **_: Any
) -> list[torch.Tensor]:
    """Values, what indices point at, and the indices' dtype, shape and layout."""
    if len(results) < 2:
        return results
    values, indices = results
    return [values, _pointed_at(self, indices, -1 if dim is None else dim), torch.zeros_like(indices)]


@facts.chosen("topk")
def _of_topk(
    self: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    results: list[torch.Tensor],
    **_: Any,
) -> list[torch.Tensor]:
    """The same; in order where ATen has none."""
    values, indices = results
    pointed = _pointed_at(self, indices, dim)
    if not sorted:
        values, pointed = (x.sort(dim).values if x.dim() else x for x in (values, pointed))
    return [values, pointed, torch.zeros_like(indices)]


@facts.chosen("sort")
def _of_sort(
    self: torch.Tensor,
    dim: int = -1,
    descending: bool = False,
    stable: bool | None = None,
    *,
    results: list[torch.Tensor],
    **_: Any,
) -> list[torch.Tensor]:
    """The same, unless the order of equals was asked for. `msort` gives the values alone, `argsort` the indices."""
    *values, indices = results
    if stable or (not values and not _are_places(indices, dim)):
        return results
    return [*values, _pointed_at(self, indices, dim), torch.zeros_like(indices)]


def _are_places(x: torch.Tensor, dim: int) -> bool:
    """Whether each place along a dimension stands there once."""
    if x.dtype is not torch.int64 or not x.dim():
        return False
    return torch.equal(
        x.movedim(dim, -1).sort(-1).values, torch.arange(x.shape[dim], device=x.device).expand_as(x.movedim(dim, -1))
    )


facts.may_decline(
    ("median", "nanmedian", "median.out", "nanmedian.out"),
    ("empty",),
    "the median of no integers, which would be nan",
    "no rule says what integer becomes of ATen's nan",
    dtypes=dtypes.INTS,
)
facts.may_decline(
    ("msort",),
    ("out=",),
    "sort.values*: output has another shape or dtype",
    "ATen hands on indices that it has not sized yet",
)
