"""Bags of embeddings, one of which is empty; bags share rows."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts
from tritonite.testing.samples.indexing import matrix, spread

facts.DEVICE_DEFINED |= {"_embedding_bag", "_embedding_bag_forward_only"}


def _offsets(n: int, like: torch.Tensor, last: bool = False) -> torch.Tensor:
    return torch.tensor([0, n // 2, n // 2, *([n] if last else [])], device=like.device)


@facts.arguments("_embedding_bag", "_embedding_bag_forward_only")
def _bags(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return bags whose mode, padding and kind of offsets follow from the shape of the layout."""
    weight = matrix(tensors[0])
    if not weight.numel():
        return None
    n, kind = 11, weight.shape[0] % 6
    mode = (0, 2, 1, 0, 2, 0)[kind]
    indices = spread((n,), len(weight), weight)
    # On a GPU ATen leaves the last bag size uninitialised.
    last = kind in (1, 3) and weight.device.type == "cpu"
    given = {"weight": weight, "indices": indices, "offsets": _offsets(n, weight, last), "mode": mode, "sparse": False}
    factors = matrix(tensors[1]).flatten()[:1].expand(n).contiguous() if kind == 3 or kind == 0 else None
    padding = 2 if weight.shape[1] % 2 else -1
    return given | {"per_sample_weights": factors, "include_last_offset": last, "padding_idx": padding}


@facts.arguments("_embedding_bag_dense_backward")
def _gradient(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return a gradient for a table of 7 rows; the mode follows from the shape of the layout."""
    grad = matrix(tensors[0])[:3]
    if not grad.numel():
        return None
    n, kind = 11, matrix(tensors[0]).shape[0] % 6
    bags = torch.arange(n, device=grad.device) % len(grad)
    mode = (0, 2, 1, 0, 2, 0)[kind]
    return {
        "grad": grad,
        "indices": spread((n,), 6, grad, 3),
        "offset2bag": bags.sort().values,
        "bag_size": torch.bincount(bags, minlength=len(grad)),
        "maximum_indices": spread(tuple(grad.shape), 7, grad, 5),
        "num_weights": 7,
        "mode": mode,
        "per_sample_weights": matrix(tensors[1]).flatten()[:1].expand(n).contiguous() if kind == 0 else None,
        "padding_idx": -1 if mode == 2 else 3,
    }


@facts.arguments("_embedding_bag_per_sample_weights_backward")
def _gradient_of_factors(tensors: facts.Tensors) -> dict[str, Any] | None:
    weight = matrix(tensors[0])
    grad = matrix(tensors[1]).expand(weight.shape)[:3]
    if not weight.numel():
        return None
    indices, bags = spread((11,), len(weight), weight), torch.arange(11, device=weight.device) * len(grad) // 11
    given = {"grad": grad, "weight": weight, "indices": indices, "offset2bag": bags, "mode": 0}
    return given | {"offsets": torch.searchsorted(bags, torch.arange(len(grad), device=bags.device)), "padding_idx": 1}


def _bags_in_reach(arguments: dict[str, Any], offsets: torch.Tensor) -> torch.Tensor:
    """Limit offsets to the number of indices, and sort them where ATen has no defined result for decreasing ones.

    On a GPU ATen reads the first offset as 0, and stops the program for decreasing ones. On a CPU ATen refuses a first
    offset other than 0, and its fast kernel leaves bags after a decreasing offset uninitialised.
    """
    weight, indices = arguments["weight"], arguments["indices"]
    offsets = offsets.clamp(0, min(len(indices), 100) if indices.dim() else 0)
    if offsets.dim() != 1 or not offsets.numel():
        return offsets
    if weight.device.type != "cpu":
        return torch.cat((offsets[:1], offsets[1:].sort().values))
    fast = arguments["mode"] != 2 and arguments["padding_idx"] < 0 and weight.dtype is not torch.float64
    return offsets.sort().values if fast or not indices.numel() else offsets


@facts.drawn("_embedding_bag", "_embedding_bag_forward_only")
def _within_the_table(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return indices of rows of the table, and valid offsets: on a GPU ATen checks neither."""
    weight, indices, offsets = arguments["weight"], arguments["indices"], arguments["offsets"]
    if not (facts.real(indices) and facts.real(offsets) and isinstance(weight, torch.Tensor)):
        return arguments
    if weight.dim() and weight.shape[0] and not indices.is_floating_point() and not offsets.is_floating_point():
        indices = indices.clamp(0, min(weight.shape[0] - 1, 100))
        offsets = _bags_in_reach(arguments, offsets)
    last = arguments["include_last_offset"] and weight.device.type == "cpu"
    return arguments | {"indices": indices, "offsets": offsets, "include_last_offset": last}
