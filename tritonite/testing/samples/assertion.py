"""Assertions: a single element that is not 0."""

from __future__ import annotations

from typing import Any

from tritonite.testing.samples import facts


@facts.arguments("_assert_async", "_functional_assert_async")
def _nonzero(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return one element of any number of dimensions that is not 0."""
    x = tensors[0]
    if not x.numel():
        return None
    element = x.flatten()[:1].view([1] * x.dim())
    return {"self": element.masked_fill(element == 0, 1), "assert_msg": "an element is 0"}
