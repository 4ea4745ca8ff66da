"""Grid sampling."""

from __future__ import annotations

from typing import Any

import torch

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
facts.ZERO_SIGN_OF_ROUNDOFF.add("grid_sampler_3d_backward")
facts.arguments("cudnn_grid_sampler", "cudnn_grid_sampler_backward")(_sampling(2))
