"""Cross products."""

from __future__ import annotations

from typing import Any

from tritonite.testing.samples import facts

# Its terms may cancel.
facts.ZERO_SIGN_OF_ROUNDOFF.add("linalg_cross")


@facts.arguments("linalg_cross")
def _vectors(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return vectors of three elements along the last dimension."""
    x, other = tensors[0], tensors[1].expand(tensors[0].shape)
    if not x.dim() or x.shape[-1] < 3:
        return None
    return {"self": x[..., :3], "other": other[..., -3:]}
