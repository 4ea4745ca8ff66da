"""Sums of products of three tensors, and linear combinations of slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tritonite.registry import Op
from tritonite.testing.samples import facts
from tritonite.testing.samples.matmul import terms_of_products

PACKETS = ("_trilinear", "_compute_linear_combination")
facts.terms(*PACKETS)(terms_of_products)
facts.CANCELLING |= set(PACKETS)
facts.ZERO_SIGN_OF_ROUNDOFF |= set(PACKETS)


@facts.layouts("_trilinear")
def _bilinear(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield the operands of bilinear layers, and of other sums of products."""
    yield "bilinear", [make(5, 3), make(4, 3, 6), make(5, 6)]
    yield "bilinear transposed", [make(3, 5).t(), make(6, 4, 3).permute(1, 2, 0), make(6, 5).t()]
    yield "one row", [make(1, 3), make(4, 3, 6), make(1, 6)]


@facts.arguments("_trilinear")
def _trilinear(tensors: facts.Tensors) -> dict[str, Any] | None:
    if len(tensors) == 3 and tensors[1].dim() == 3:
        given = dict(zip(("i1", "i2", "i3"), tensors, strict=True))
        return given | {"expand1": [1, 3], "expand2": [0], "expand3": [1, 2], "sumdim": [2, 3], "unroll_dim": 1}
    x = tensors[0]
    if not 2 <= x.dim() <= 4 or not x.numel():
        return None
    # A product element by element, summed over the last dimension.
    lists: dict[str, Any] = {"expand1": [], "expand2": [], "expand3": [], "sumdim": [x.dim() - 1], "unroll_dim": 0}
    return {"i1": x, "i2": x.flip(0), "i3": x} | lists


@facts.arguments("_compute_linear_combination")
def _combination(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    if not x.dim() or not x.numel():
        return None
    flat = x.flatten()
    return {"input": x, "coefficients": flat.repeat(2 * len(x))[: 2 * len(x)].view(2, len(x))}
