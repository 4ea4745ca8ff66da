"""Writing where index tensors tell: no place twice where the order decides what stays there."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.catalog import Op
from tritonite.testing.samples import facts
from tritonite.testing.samples.indexing import places

facts.CHOICES["reduce"] = ("sum", "prod", "mean", "amax", "amin", "add", "multiply")
# Which of several zeros is the largest depends on the order in which they come.
facts.ZERO_SIGN_OF_ROUNDOFF |= {"index_reduce", "scatter_reduce"}
# Whose index has the dimensions of what it writes to.
_OF_ELEMENTS = {"scatter", "scatter_add", "scatter_reduce"}


def _combines(op: Op) -> bool:
    """Whether several elements may come to one place."""
    return "reduce" in op.names or op.packet in ("index_add", "scatter_add")


@facts.operands("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill", "index_reduce")
def _along_the_last(op: Op, tensors: facts.Tensors, reduction: Any) -> facts.Tensors | None:
    """The tensor, places along its last dimension, and what to write there."""
    x = tensors[0]
    size = x.shape[-1] if x.dim() else 1
    if not size or (x.dim() and not x.numel()):
        return None
    kept = min(size, 5)
    if _combines(op) and x.dtype.itemsize == 2 and x.is_floating_point():
        # Sums are rounded after each addition, as those of ATen's kernels for GPUs are, and must not cancel.
        x, tensors = x.abs_(), [each.abs_() for each in tensors]
    index = places((kept,), min(size, 3) if _combines(op) else size, x, 2 if _combines(op) else 1)
    source = tensors[1].expand(x.shape)
    source = source[..., :kept] if x.dim() else source
    if op.packet in _OF_ELEMENTS:
        index = index.expand(*x.shape[:-1], kept) if x.dim() else index[0]
    if "value" in op.names:
        return [x, index, x.flatten()[0].clone()]
    return [x, index, source]


@facts.arguments("put")
def _put(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    count = min(4, x.numel())
    return {"index": places((count,), x.numel(), x, 1) - count // 2, "source": tensors[1].flatten()[:1].expand(count)}


@facts.arguments("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(tensors: facts.Tensors) -> dict[str, Any] | None:
    """The first dimension and the last, by indices that broadcast."""
    x = tensors[0]
    if not (x.dim() and x.numel()):
        return None
    last = places((min(4, x.shape[-1]), 1), x.shape[-1], x, 1) - x.shape[-1] // 2
    if x.dim() == 1:
        return {"indices": [last], "values": tensors[1].flatten()[:1]}
    first = places((min(3, x.shape[0]),), x.shape[0], x, 1)
    return {"indices": [first, *[None] * (x.dim() - 2), last], "values": tensors[1].flatten()[: len(first)][0]}


@facts.drawn("scatter_add", "scatter_reduce", "index_add", "index_reduce", "put")
def _few_digits(arguments: dict[str, Any]) -> dict[str, Any]:
    """Half types are added up in their own precision on GPUs, in more on CPUs: of small integers that is the same."""
    halves = (torch.float16, torch.bfloat16)
    return {
        name: value.abs().round().clamp(max=2) if isinstance(value, torch.Tensor) and value.dtype in halves else value
        for name, value in arguments.items()
    }


@facts.drawn("scatter")
def _one_value_for_a_place(arguments: dict[str, Any]) -> dict[str, Any]:
    """Which of several elements stays in a place is not defined: where places come twice all elements are equal."""
    drawn = _few_digits(arguments)
    index, source, dim = (drawn.get(name) for name in ("index", "src", "dim"))
    if "reduce" in drawn or not (isinstance(index, torch.Tensor) and isinstance(source, torch.Tensor)):
        return drawn
    if not (source.numel() and index.numel() and index.dim() and isinstance(dim, int) and abs(dim) < index.dim()):
        return drawn
    if bool(index.sort(dim).values.diff(dim=dim).eq(0).any()):
        drawn["src"] = source.flatten()[:1].expand(source.flatten().shape).reshape(source.shape)
    return drawn
