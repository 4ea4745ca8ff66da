"""Counting in bins."""

from __future__ import annotations

from typing import Any

from tritonite.testing.samples import facts


@facts.arguments("histc")
def _bins(tensors: facts.Tensors) -> dict[str, Any]:
    """Between the extrema where there are some."""
    x = tensors[0]
    finite = not x.is_floating_point() or bool(x.isfinite().all())
    return {"bins": 7, "min": 0 if finite else -2, "max": 0 if finite else 3}


@facts.arguments("bincount")
def _weighted(tensors: facts.Tensors) -> dict[str, Any]:
    """A vector of few integers, with weights where those are floats."""
    x = tensors[0].flatten()
    if x.is_floating_point():
        return {"self": x.nan_to_num(0, 0, 0).abs().clamp(max=5).long(), "weights": x, "minlength": 3}
    return {"self": x.abs() if x.dtype.is_signed else x, "weights": None, "minlength": 3}


@facts.drawn("bincount")
def _few(arguments: dict[str, Any]) -> dict[str, Any]:
    """Drawn integers of 64 bits ask for more memory than there is."""
    x = arguments["self"]
    return arguments | {"self": x.clamp(-1, 1000)} if facts.real(x) else arguments
