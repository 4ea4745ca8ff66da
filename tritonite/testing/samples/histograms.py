"""Histograms."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import dtypes
from tritonite.registry import Op
from tritonite.testing.samples import facts


@facts.arguments("histc")
def _bins(tensors: facts.Tensors) -> dict[str, Any]:
    """Return a range: the extrema, or fixed bounds for elements that are not finite."""
    x = tensors[0]
    finite = not x.is_floating_point() or bool(x.isfinite().all())
    return {"bins": 7, "min": 0 if finite else -2, "max": 0 if finite else 3}


@facts.arguments("bincount")
def _weighted(tensors: facts.Tensors) -> dict[str, Any]:
    """Return a vector of small integers, with the floats of the layout as weights."""
    x = tensors[0].flatten()
    if x.is_floating_point():
        return {"self": x.nan_to_num(0, 0, 0).abs().clamp(max=5).long(), "weights": x, "minlength": 3}
    return {"self": x.abs() if x.dtype.is_signed else x, "weights": None, "minlength": 3}


@facts.terms("bincount")
def _terms_of_weights(sums: facts.Sums) -> float:
    """Return the terms of one bin that has all weights: atomics add them in any order."""
    weights = [float(x.double().square().mean().nan_to_num(1, 1)) for x in sums.tensors if x.is_floating_point()]
    return sums.read * min(max(1.0, *weights), 16.0) if weights else 1.0


@facts.drawn("bincount")
def _few(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit integers and the number of bins to what fits in memory."""
    x = arguments["self"]
    few = {"self": x.clamp(-1, 1000)} if x.dtype in (torch.int32, torch.int64) else {}
    return arguments | few | {"minlength": min(arguments.get("minlength", 0), 1000)}


@facts.drawn("histc")
def _limited_bins(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit the number of bins to what fits in memory."""
    return arguments | {"bins": min(arguments.get("bins", 100), 5000)}


@facts.arguments("histogram")
def _histogram(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    if x.dtype not in dtypes.FULL_FLOATS:
        return None
    return {"range": [-2.0, 2.5], "weight": tensors[1].expand(x.shape) if tensors[1].isfinite().all() else None}


@facts.operands("histogram")
def _edges(op: Op, tensors: facts.Tensors, choice: Any) -> facts.Tensors | None:
    """Return the input and ascending edges."""
    x = tensors[0]
    return [x, x.nan_to_num(0, 9, -9).flatten()[:6].sort().values]


@facts.arguments("_histogramdd_from_bin_cts")
def _points(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return pairs of elements."""
    x = tensors[0].flatten()
    if x.numel() < 2 or x.dtype not in dtypes.FULL_FLOATS:
        return None
    return {"self": x[: x.numel() // 2 * 2].reshape(-1, 2), "bins": [3, 4], "range": [-2.0, 2, -1.0, 3], "weight": None}


@facts.drawn("histogram", "_histogramdd_from_bin_cts")
def _sorted_edges(arguments: dict[str, Any]) -> dict[str, Any]:
    """Sort edges, and limit the number of bins to what fits in memory."""
    bins = arguments["bins"]
    if isinstance(bins, torch.Tensor):
        return arguments | {"bins": bins.sort().values if bins.dim() and facts.real(bins) else bins}
    if isinstance(bins, complex):
        return arguments
    few = [min(count, 8) for count in bins] if isinstance(bins, (list, tuple)) else min(bins, 64)
    return arguments | {"bins": few}
