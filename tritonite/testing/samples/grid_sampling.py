"""Grid sampling."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices
from tritonite.testing.samples import facts

# Interpolations and paddings of dtypes other than float32, which has (0, 0): bilinear, with zeros around the image.
_MODES = {torch.float16: (2, 1), torch.bfloat16: (0, 2), torch.float64: (1, 1)}


def _sampling(rank: int) -> Any:
    sizes, points = (4, 5, 3)[:rank], (3, 2, 4)[:rank]

    def arguments(tensors: facts.Tensors) -> dict[str, Any] | None:
        """Return images with a tensor's elements, and a grid of values a little beyond [-1, 1]."""
        x = tensors[0]
        if not x.numel() or not x.is_floating_point():
            return None
        flat = x.reshape(-1)
        mode, padding = _MODES.get(x.dtype, (0, 0))

        def filled(*shape: int) -> torch.Tensor:
            count = torch.Size(shape).numel()
            return flat[torch.arange(count, device=x.device) % flat.numel()].reshape(shape)

        image = filled(2, 3, *sizes)
        if not x.is_contiguous():
            image = image.to(memory_format=torch.channels_last if rank == 2 else torch.channels_last_3d)
        grid = torch.linspace(-1.23, 1.21, 2 * rank * torch.Size(points).numel(), device=x.device)
        grid = grid.reshape(rank, 2, *points).movedim(0, -1).flip(2).to(x.dtype)
        return {
            "input": image,
            "self": image,
            "grid": grid if x.is_contiguous() else grid.contiguous(),
            "grad_output": filled(2, 3, *points),
            "interpolation_mode": mode if rank == 2 else mode % 2,
            "padding_mode": padding,
            "output_mask": [True, True],
        }

    return arguments


for _rank in (2, 3):
    facts.arguments(f"grid_sampler_{_rank}d", f"grid_sampler_{_rank}d_backward")(_sampling(_rank))
# The gradient of a grid value is a sum over pixels with both signs.
facts.CANCELLING |= {f"grid_sampler_{rank}d{way}" for rank in (2, 3) for way in ("", "_backward")}
# OpInfo's gradients are judged by the function's name, and ATen's CPU kernel adds up their products in another order.
facts.ZERO_SIGN_UNDEFINED.add("grid_sampler_3d")
facts.ZERO_SIGN_OF_ROUNDOFF |= {
    f"{name}_backward" for name in ("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler")
}
facts.arguments("cudnn_grid_sampler", "cudnn_grid_sampler_backward")(_sampling(2))
# Largest grid values, whose positions every dtype of computation represents, and largest factors of a gradient.
_LARGEST, _LARGEST_FACTOR = 1e30, 1e15


@facts.drawn("grid_sampler_2d", "grid_sampler_3d")
def _with_positions(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a grid without nan and infinities on a CPU, where ATen's kernels have several answers.

    A nan is the first pixel in two dimensions, and the last one or nan in three.
    """
    grid = arguments["grid"]
    if devices.current.aten != "cpu" or not facts.real(grid) or not grid.is_floating_point():
        return arguments
    lost = (grid.abs() < _LARGEST).logical_not()
    return arguments | {"grid": grid.masked_fill(lost, 0.5) if lost.any() else grid}


@facts.drawn("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def _without_overflow(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return such a grid, and factors whose products are finite: sums of others overflow or not by their order."""
    factors = {name: arguments[name] for name in ("grad_output", "input")}
    return _with_positions(arguments) | {name: _bounded(x) for name, x in factors.items()}


def _bounded(x: Any) -> Any:
    """Return a tensor with large elements, and infinities, replaced; nan stays."""
    if not facts.real(x) or not x.is_floating_point():
        return x
    large = x.abs() > _LARGEST_FACTOR
    return x.masked_fill(large, 2.0) if large.any() else x
