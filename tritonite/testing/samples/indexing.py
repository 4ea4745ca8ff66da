"""Reading at the indices in tensors."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices
from tritonite.testing.samples import facts


def spread(shape: tuple[int, ...], size: int, like: torch.Tensor, step: int = 7) -> torch.Tensor:
    """Return indices below `size` in steps, modulo `size`, on the device of `like`."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, device=like.device) * step % max(size, 1)).reshape(shape)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """Return a view of two dimensions: the last two, or as many with sizes of 1."""
    if x.dim() == 2:
        return x
    return x[None, None] if not x.dim() else x[None] if x.dim() == 1 else x[(0,) * (x.dim() - 2)]


@facts.arguments("index_select")
def _select(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    dim = max(0, x.dim() - 2)
    size = x.shape[dim] if x.dim() else 1
    return {"dim": dim, "index": spread((5 if x.dim() else 1,), size, x)} if size else None


@facts.arguments("gather")
def _gather(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    if not x.numel():
        return None
    return {"dim": 0, "index": spread((3, *x.shape[1:]) if x.dim() else (), x.shape[0] if x.dim() else 1, x)}


@facts.arguments("take")
def _take(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    return {"index": spread((4, 3), x.numel(), x) - x.numel() // 2} if x.numel() else None


@facts.arguments("index", "_unsafe_index")
def _index(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return indices of the first and the last dimension that broadcast; dimensions in between are kept."""
    x = tensors[0]
    if not (x.dim() and x.numel()):
        return None
    last = spread((4, 1), x.shape[-1], x, 3) - x.shape[-1] // 2
    if x.dim() == 1:
        return {"indices": [last]}
    return {"indices": [spread((3,), x.shape[0], x), *[None] * (x.dim() - 2), last]}


def _within_dimension(x: Any, index: Any, dim: Any, wraps: bool) -> Any:
    """Limit an index tensor to the size of a dimension, if the dimension is valid."""
    rank = max(x.dim(), 1) if isinstance(x, torch.Tensor) else 0
    if not (facts.is_index(index) and isinstance(dim, int) and -rank <= dim < rank):
        return index
    size = x.shape[dim] if x.dim() else 1
    return facts.within(index, -size if wraps else 0, size - 1)


def within(arguments: dict[str, Any], wraps: bool = False) -> dict[str, Any]:
    """Limit indices to valid ones on a GPU, where ATen stops the program for others or reads beyond the tensor."""
    x, index = arguments.get("self"), arguments.get("index")
    if devices.current.aten == "cpu" or not isinstance(x, torch.Tensor):
        return arguments
    if "dim" in arguments:
        return arguments | {"index": _within_dimension(x, index, arguments["dim"], wraps)}
    if "indices" in arguments:
        return within_each_dimension(arguments)
    return arguments | {"index": facts.within(index, -x.numel(), x.numel() - 1) if facts.is_index(index) else index}


def within_each_dimension(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit several index tensors to the sizes of their dimensions."""
    x, indices = arguments["self"], arguments["indices"]
    if not isinstance(x, torch.Tensor) or not all(index is None or facts.is_index(index) for index in indices):
        return arguments
    return arguments | {"indices": [_within_dimension(x, index, d, True) for d, index in enumerate(indices)]}


facts.drawn("index_select", "gather", "take", "index", "_unsafe_index")(within)
