"""Writing where index tensors tell: no place twice where the order decides what stays there."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices
from tritonite.registry import Op
from tritonite.testing.samples import facts
from tritonite.testing.samples.indexing import of_each_dimension, places, within

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


@facts.drawn("scatter_add", "scatter_reduce", "index_add", "index_reduce")
def _of_one_sign(arguments: dict[str, Any]) -> dict[str, Any]:
    """Sums of 16-bit floats that do not cancel: kernels accumulate them in float32, ATen's for GPUs in 16 bits."""
    return {
        name: value.abs()
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        else value
        for name, value in within(arguments).items()
    }


def _written(arguments: dict[str, Any]) -> torch.Tensor:
    """How often each place is written, counted by ATen on a CPU."""

    def ones(like: torch.Tensor) -> torch.Tensor:
        return torch.ones(like.shape)

    count = torch.zeros(arguments["self"].shape)
    if "indices" in arguments:
        indices = [None if index is None else index.cpu() for index in arguments["indices"]]
        return torch.ops.aten.index_put(count, indices, torch.ones(()), True)
    index = arguments["index"].cpu()
    if "dim" not in arguments:
        return count.put(index, ones(index), True)
    if "src" in arguments:
        return count.scatter_add(arguments["dim"], index, ones(index))
    return count.index_add(arguments["dim"], index, ones(arguments["source"]))


@facts.drawn("index_fill")
def _from_either_end(arguments: dict[str, Any]) -> dict[str, Any]:
    return within(arguments, True)


@facts.drawn("scatter", "put", "index_put", "_unsafe_index_put", "_index_put_impl", "index_copy")
def _one_value_for_a_place(arguments: dict[str, Any]) -> dict[str, Any]:
    """Which of several elements stays in a place is not defined: where places come twice all elements are equal."""
    if arguments.get("unsafe"):
        # ATen does not look whether there are such places.
        arguments = of_each_dimension(arguments)
    adds = arguments.get("accumulate") or "reduce" in arguments
    drawn = _of_one_sign(arguments) if adds and "indices" not in arguments else within(arguments)
    name = next((name for name in ("src", "source", "values") if name in drawn), None)
    source = drawn[name] if name else None
    if adds or name is None or not isinstance(source, torch.Tensor) or not source.numel():
        return drawn
    try:
        several = bool((_written(drawn) > 1).any())
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError):
        # What is none of its arguments is refused, and what ATen refuses on a CPU it may take on a GPU.
        several = devices.current.type != "cpu"
    return drawn | {name: source.flatten()[:1].expand(source.numel()).reshape(source.shape)} if several else drawn
