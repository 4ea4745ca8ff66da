"""Gradients of filters by slices of the positions: memory for the slices' results, and their sum."""

from __future__ import annotations

import torch

from tritonite.engine.convolution.filters import add_slices
from tritonite.engine.convolution.meta import Axes
from tritonite.engine.convolution.problem import Problem, filter_strides
from tritonite.engine.convolution.table import table
from tritonite.engine.iteration import offset_type
from tritonite.runtime.contract import empty


def partial_gradients(out: torch.Tensor, problem: Problem, count: int) -> torch.Tensor:
    """Return memory for `count` slices of a gradient: (count, groups, depth, height, width, channels, columns)."""
    shape = (count, problem.groups, *out.shape[2:], problem.channels, problem.columns)
    return empty(shape, problem.accumulator, out.device)


def add(partials: torch.Tensor, out: torch.Tensor, problem: Problem, axes: Axes) -> None:
    """Write the sum of the slices to `out`, the gradient of all filters."""
    add_slices[(-(-out.numel() // table().added),)](
        *(partials, out, axes),
        strides=filter_strides(out, problem.groups * problem.merged),
        channels=problem.channels // problem.merged,
        columns=problem.columns // problem.merged,
        elements=out.numel(),
        slice_stride=partials[0].numel(),
        slices=partials.shape[0],
        MERGED=problem.merged,
        BLOCK=table().added,
        INDEX=offset_type(partials, out),
    )
