"""Distances between rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tritonite import devices
from tritonite.dtypes import FULL_FLOATS
from tritonite.registry import Op
from tritonite.testing.samples import facts

_BACKWARD = ("_cdist_backward", "_pdist_backward")
PACKETS = ("_cdist_forward", "_pdist_forward", "_euclidean_dist", *_BACKWARD)
# The norm of a call is chosen by the number of its features.
_NORMS = (2.0, 0.0, 1.0, 3.5, math.inf, 1.5, 0.5)

facts.ZERO_SIGN_OF_ROUNDOFF.update(PACKETS)
# The largest difference depends on the order in which ATen's CPU kernel compares nan.
facts.NAN_UNDEFINED.update(PACKETS)


@facts.terms(*_BACKWARD)
def _slopes(sums: facts.Sums) -> float:
    """Return the number of roundings behind a gradient, five for each slope, times its mean square."""
    own = sums.result if sums.exact is None else sums.exact
    slopes = sums.tensors[-1].numel() * own.shape[-1] / max(1, own.numel())
    return max(1.0, 5 * slopes * float(own.double().square().mean().nan_to_num(1, 1)))


@facts.drawn("_pdist_forward", "_pdist_backward")
def _as_matrix(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a matrix of some rows: ATen ends the process for other tensors."""
    x = arguments["self"]
    if not isinstance(x, torch.Tensor) or (x.dim() == 2 and x.numel()):
        return _finite(arguments) if "pdist" in arguments else arguments
    return arguments | {"self": torch.ones(2, 3, dtype=x.dtype, device=x.device)}


@facts.drawn("_cdist_backward")
def _finite(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return finite matrices for the largest difference, of which ATen's kernel for CPUs takes inf - inf."""
    if devices.current.aten != "cpu" or arguments["p"] != math.inf:
        return arguments
    given = {name: arguments[name] for name in ("self", "x1", "x2") if name in arguments}
    return arguments | {name: x.nan_to_num(1.0, 1.0, -1.0) for name, x in given.items() if facts.real(x)}


@facts.layouts(*PACKETS)
def _features(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield matrices for each norm, and batches that broadcast, with enough rows for a product of matrices."""
    for features, p in enumerate(_NORMS, len(_NORMS)):
        yield f"p={p:g}", [make(5, features), make(5, features), make(5, features), make(5, features)]
    if op.packet not in ("_pdist_forward", "_pdist_backward"):
        yield "batches", [make(3, 1, 5, 8), make(2, 4, 8), make(1), make(1)]
        yield "many rows", [make(2, 29, 7), make(30, 7), make(1), make(1)]
    if op.packet != "_pdist_backward" or devices.current.aten == "cpu":
        # ATen's kernel for GPUs ends the process.
        yield "no features", [make(3, 0), make(4, 0), make(1), make(1)]


def _norm(x: torch.Tensor) -> float:
    return _NORMS[x.shape[-1] % len(_NORMS)]


def _like(x: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the shape of distances, with elements of x if it has any."""
    if not x.numel():
        return torch.ones_like(distances)
    return x.flatten().repeat(1 + distances.numel() // x.numel())[: distances.numel()].view(distances.shape)


@facts.arguments("_cdist_forward", "_cdist_backward", "_euclidean_dist")
def _two_matrices(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return matrices with rows of one length, a gradient, and the distances if ATen computes them in this dtype."""
    x1, x2 = (x if x.dim() > 1 else x.reshape(1, -1) for x in tensors[:2])
    if not x1.is_floating_point():
        return None
    if x1.shape[-1] != x2.shape[-1]:
        x2 = x1.roll(1, -1)
    given = {"x1": x1, "x2": x2, "p": _norm(x1), "compute_mode": None}
    if x1.dtype in FULL_FLOATS:
        distances = torch.ops.aten._cdist_forward(x1, x2, given["p"], 2)
        given |= {"cdist": distances, "grad": _like(x1, distances)}
    return given


@facts.arguments("_pdist_forward")
def _one_matrix(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return a matrix that is contiguous, as ATen requires."""
    x = tensors[0]
    if x.dtype not in FULL_FLOATS:
        return None
    x = x.contiguous().flatten(0, -2) if x.dim() > 1 else x.reshape(-1, 1)
    distances = torch.ops.aten._pdist_forward(x, _norm(x))
    return {"self": x, "p": _norm(x), "pdist": distances, "grad": _like(x, distances)}


@facts.arguments("_pdist_backward")
def _some_rows(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return a matrix with rows: ATen ends the process for one without."""
    given = _one_matrix(tensors)
    return given if given is not None and given["self"].shape[0] else None
