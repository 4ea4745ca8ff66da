"""Reductions of consecutive segments."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

facts.CHOICES["reduce"] = (*facts.CHOICES["reduce"], "max", "min")
facts.may_decline(
    ("segment_reduce*", "_segment_reduce.lengths"),
    ("*",),
    "*lengths whose sum the host checks*",
    "the host waits for the sum of lengths and raises ATen's error if it does not match",
)


def _bounds(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the bounds of four segments along a dimension. The second is empty, and the last may be."""
    size = x.shape[axis]
    ends = torch.tensor([0, size // 2, size // 2, size // 2 + size // 3, size], device=x.device)
    return ends.expand(*x.shape[:axis], 5).contiguous()


@facts.arguments("segment_reduce")
def _segments(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return offsets, or lengths for an odd last size, along the second dimension or the only one."""
    x = tensors[0]
    if not x.dim() or not x.numel():
        return None
    axis = min(1, x.dim() - 1)
    bounds = _bounds(x, axis)
    given: dict[str, Any] = {"indices": None, "axis": axis, "initial": None if x.shape[0] % 2 else 1.5}
    if x.shape[-1] % 2:
        return given | {"offsets": None, "lengths": bounds.diff(dim=-1).to(torch.int32)}
    return given | {"offsets": bounds, "lengths": None}


@facts.arguments("_segment_reduce_backward")
def _gradients(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return a gradient, and results that are elements of the data."""
    given = _segments(tensors)
    if given is None:
        return None
    x, axis = tensors[0], given["axis"]
    rows = torch.arange(4, device=x.device) % x.shape[axis]
    del given["indices"]
    return given | {"grad": tensors[1].expand(x.shape).index_select(axis, rows), "output": x.index_select(axis, rows)}


@facts.drawn("segment_reduce", "_segment_reduce_backward")
def _within_the_data(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit segments to the data, beyond which ATen would read."""
    data, axis = arguments["data"], arguments["axis"]
    if not isinstance(data, torch.Tensor) or not -data.dim() <= axis < data.dim():
        return arguments | {"lengths": None, "offsets": None}
    size, before = data.shape[axis], data.shape[: axis % data.dim()]
    # ATen reads lengths or offsets for every row before the axis.
    given = arguments["lengths"], arguments["offsets"]
    lengths, offsets = (x if isinstance(x, torch.Tensor) and x.shape[:-1] == before else None for x in given)
    arguments = arguments | {"lengths": lengths, "offsets": offsets}
    if isinstance(lengths, torch.Tensor) and lengths.dim() and lengths.numel():
        whole = facts.real(lengths) and not lengths.is_floating_point()
        most = size // lengths.shape[-1]
        arguments = arguments | {"lengths": lengths.clamp(0, most) if whole else None}
    if isinstance(offsets, torch.Tensor) and offsets.dim() and offsets.numel():
        whole = facts.real(offsets) and not offsets.is_floating_point()
        # Decreasing offsets stop the program on a GPU; ATen refuses them on a CPU.
        bounds = offsets.clamp(0, size) if whole else None
        if bounds is not None and data.device.type != "cpu":
            bounds = bounds.sort(-1).values
        arguments = arguments | {"offsets": bounds}
    return arguments
