"""Reading and writing where index tensors tell."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts


def places(shape: tuple[int, ...], size: int, like: torch.Tensor, step: int = 7) -> torch.Tensor:
    """Places from 0 to `size`, of which some come several times."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, device=like.device) * step % max(size, 1)).reshape(shape)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """A view of two dimensions."""
    if x.dim() == 2:
        return x
    return x[None, None] if not x.dim() else x[None] if x.dim() == 1 else x[(0,) * (x.dim() - 2)]


@facts.arguments("index_select")
def _select(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    dim = max(0, x.dim() - 2)
    size = x.shape[dim] if x.dim() else 1
    return {"dim": dim, "index": places((5 if x.dim() else 1,), size, x)} if size else None


@facts.arguments("gather")
def _gather(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    if not x.numel():
        return None
    return {"dim": 0, "index": places((3, *x.shape[1:]) if x.dim() else (), x.shape[0] if x.dim() else 1, x)}


@facts.arguments("take")
def _take(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    return {"index": places((4, 3), x.numel(), x) - x.numel() // 2} if x.numel() else None


@facts.arguments("index", "_unsafe_index")
def _index(tensors: facts.Tensors) -> dict[str, Any] | None:
    """The first dimension and the last, so that one in between is kept, by indices that broadcast."""
    x = tensors[0]
    if not (x.dim() and x.numel()):
        return None
    last = places((4, 1), x.shape[-1], x, 3) - x.shape[-1] // 2
    if x.dim() == 1:
        return {"indices": [last]}
    return {"indices": [places((3,), x.shape[0], x), *[None] * (x.dim() - 2), last]}


@facts.drawn("index_select")
def _not_negative(arguments: dict[str, Any]) -> dict[str, Any]:
    """On a GPU ATen does not look whether an index is negative, and reads what lies before the tensor."""
    index = arguments["index"]
    if not facts.real(index) or index.device.type == "cpu" or index.is_floating_point():
        return arguments
    return arguments | {"index": index.clamp(min=0)}
