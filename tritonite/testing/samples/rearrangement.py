"""Flips, rolls, pads, windows and shuffles."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonite.engine.iteration import has_channels_last
from tritonite.testing.samples import facts


@facts.arguments("roll")
def _rolled(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return dimensions and shifts, with contiguous images: on a CPU ATen's layout depends on slices of others."""
    given = _flipped(tensors)
    return given if given is None or not has_channels_last(tensors[0]) else given | {"self": tensors[0].contiguous()}


@facts.arguments("flip", "rot90")
def _flipped(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return the dimensions to flip: the first and the last of contiguous tensors, otherwise the last."""
    x = tensors[0]
    if not x.dim():
        return None
    dims = [-1] if x.dim() < 2 or not x.is_contiguous() else [0, -1]
    return {"self": x, "dims": dims, "shifts": [3, -1][: len(dims)], "k": 1}


@facts.arguments("constant_pad_nd")
def _pads(tensors: facts.Tensors) -> dict[str, Any]:
    """Return pads, one of which is negative."""
    pad = [2, 1, -1, 3][: 2 * tensors[0].dim()]
    value = True if tensors[0].dtype is torch.bool else 0 if tensors[0].is_complex() else 2
    return {"pad": pad, "value": value}


def _extending(dimensions: int) -> Any:
    def arguments(tensors: facts.Tensors) -> dict[str, Any] | None:
        # Devices differ in whether results of channels-last images are channels-last.
        x = tensors[0].contiguous()
        x = x.reshape(*[1] * (dimensions + 1 - x.dim()), *x.shape) if x.dim() <= dimensions else x
        x = x.flatten(0, x.dim() - dimensions - 2) if x.dim() > dimensions + 2 else x
        if not x.numel():
            return None
        padding = [min(n, size - 1) for size in x.shape[::-1][:dimensions] for n in (2, 1)]
        grown = [size + sum(padding[2 * i : 2 * i + 2]) for i, size in enumerate(x.shape[::-1][:dimensions])]
        grad = x.new_empty((*x.shape[:-dimensions], *grown[::-1]))
        flat = x.reshape(-1)
        grad.copy_(flat[torch.arange(grad.numel(), device=x.device) % flat.numel()].reshape(grad.shape))
        return {"self": x, "padding": padding, "grad_output": grad}

    return arguments


for _kind in ("reflection", "replication"):
    for _n in (1, 2, 3):
        facts.arguments(f"{_kind}_pad{_n}d", f"{_kind}_pad{_n}d_backward")(_extending(_n))


@facts.arguments("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def _image(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return an image of even sizes whose channels divide by 4."""
    x = tensors[0]
    if not x.dim() or not x.numel():
        return None
    image = torch.stack([x.reshape(-1)[: x.numel() // 4 * 4].reshape(-1, 2, 2)] * 4)[:, :64].movedim(0, 1)
    return {"self": image, "upscale_factor": 2, "downscale_factor": 2, "groups": 2}


_WINDOWS = {"kernel_size": [2, 3], "dilation": [1, 1], "padding": [1, 0], "stride": [2, 1]}


@facts.arguments("im2col")
def _windows(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return an image of four dimensions, at least four rows and five columns."""
    x = tensors[0]
    if x.dim() != 4 and x.numel() < 60:
        return None
    image = x if x.dim() == 4 else x.reshape(-1)[:60].reshape(1, 3, 4, 5)
    return {"self": image, **_WINDOWS}


@facts.arguments("col2im")
def _columns(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return two images of nine columns: two channels of six elements each."""
    x = tensors[0]
    if x.numel() < 100:
        return None
    few = x.reshape(-1)[torch.arange(216, device=x.device) % x.numel()]
    return {"self": few.reshape(2, 12, 9), "output_size": [4, 5], **_WINDOWS}


def _with_all_pads(count: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return enough pads: ATen reads beyond a shorter list."""
    padding = arguments["padding"]
    return arguments | {"padding": padding if len(padding) >= count else [1] * count}


for _rank in (1, 2, 3):
    for _name in (
        f"{_kind}_pad{_rank}d{_way}" for _kind in ("reflection", "replication") for _way in ("", "_backward")
    ):
        facts.drawn(_name)(functools.partial(_with_all_pads, 2 * _rank))
