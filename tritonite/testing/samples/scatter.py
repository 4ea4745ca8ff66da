"""Writing at the indices in tensors, without duplicate indices where the order of writes would matter."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices
from tritonite.registry import Op
from tritonite.testing.samples import facts
from tritonite.testing.samples.indexing import spread, within, within_each_dimension

facts.CHOICES["reduce"] = ("sum", "prod", "mean", "amax", "amin", "add", "multiply")
# The order of reductions decides which of several zeros is the extremum.
facts.ZERO_SIGN_OF_ROUNDOFF |= {"index_reduce", "scatter_reduce"}
# Operators whose index tensor has the dimensions of the target.
_OF_ELEMENTS = {"scatter", "scatter_add", "scatter_reduce"}


def _combines(op: Op) -> bool:
    """Return whether several elements may be combined at one index."""
    return "reduce" in op.names or op.packet in ("index_add", "scatter_add")


@facts.operands("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill", "index_reduce")
def _along_the_last(op: Op, tensors: facts.Tensors, reduction: Any) -> facts.Tensors | None:
    """Return the target, indices along its last dimension, and values to write."""
    x = tensors[0]
    size = x.shape[-1] if x.dim() else 1
    if not size or (x.dim() and not x.numel()):
        return None
    kept = min(size, 5)
    if _combines(op) and x.dtype.itemsize == 2 and x.is_floating_point():
        # ATen's kernels for GPUs round after each addition, so that sums must not cancel.
        x, tensors = x.abs_(), [each.abs_() for each in tensors]
    index = spread((kept,), min(size, 3) if _combines(op) else size, x, 2 if _combines(op) else 1)
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
    return {"index": spread((count,), x.numel(), x, 1) - count // 2, "source": tensors[1].flatten()[:1].expand(count)}


@facts.arguments("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return indices of the first and the last dimension that broadcast, and a value."""
    x = tensors[0]
    if not (x.dim() and x.numel()):
        return None
    last = spread((min(4, x.shape[-1]), 1), x.shape[-1], x, 1) - x.shape[-1] // 2
    if x.dim() == 1:
        return {"indices": [last], "values": tensors[1].flatten()[:1]}
    first = spread((min(3, x.shape[0]),), x.shape[0], x, 1)
    return {"indices": [first, *[None] * (x.dim() - 2), last], "values": tensors[1].flatten()[: len(first)][0]}


@facts.drawn("scatter_add", "scatter_reduce", "index_add", "index_reduce")
def _same_sign(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return 16-bit floats of one sign, whose sums do not cancel: ATen accumulates in 16 bits on a GPU."""
    return {
        name: value.abs()
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        else value
        for name, value in within(arguments).items()
    }


def _written(arguments: dict[str, Any]) -> torch.Tensor:
    """Return how often each element is written, counted by ATen on a CPU."""

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
def _equal_if_duplicate(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make all values equal if an index occurs twice: which of several writes remains is undefined."""
    if arguments.get("unsafe"):
        # ATen does not check these indices.
        arguments = within_each_dimension(arguments)
    adds = arguments.get("accumulate") or "reduce" in arguments
    drawn = _same_sign(arguments) if adds and "indices" not in arguments else within(arguments)
    name = next((name for name in ("src", "source", "values") if name in drawn), None)
    source = drawn[name] if name else None
    if adds or name is None or not isinstance(source, torch.Tensor) or not source.numel():
        return drawn
    try:
        several = bool((_written(drawn) > 1).any())
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError):
        # ATen refuses the arguments on a CPU, but may accept them on a GPU.
        several = devices.current.aten != "cpu"
    return drawn | {name: source.flatten()[:1].expand(source.numel()).reshape(source.shape)} if several else drawn
