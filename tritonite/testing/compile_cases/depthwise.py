"""Depthwise convolutions and their gradients: layouts, ranks, filters that are unrolled and that are looped over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tritonite.engine.convolution import depthwise
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, launches

# Sizes of the input, of the filter, filters a channel, stride.
_CONVOLUTIONS = (
    ((1, 28, 28), (1, 3, 3), 1, 1),
    ((1, 14, 14), (1, 7, 7), 1, 1),
    ((1, 28, 28), (1, 5, 5), 2, 2),
    ((1, 1, 100), (1, 1, 31), 1, 1),
    ((4, 9, 9), (3, 3, 3), 1, 2),
    ((1, 31, 31), (1, 31, 31), 1, 1),
    ((1, 1, 1), (1, 1, 1), 1, 1),
)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty([2 * size for size in tensor.shape])[tuple([slice(None, None, 2)] * tensor.dim())]


def _last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


@compile_cases("depthwise")
def convolutions(full: bool) -> Iterator[Case]:
    """Convolutions and gradients in every layout, also of one channel, whose strides of 1 Triton makes constants."""
    layouts: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (torch.Tensor.contiguous, _last, _strided)
    dtypes = ((torch.bfloat16, 96), (torch.float64, 1), (torch.float16, 5), (torch.float32, 96))[: None if full else 2]
    every = list(itertools.product(_CONVOLUTIONS, layouts, dtypes))
    # Every fifth combination has each convolution, layout and dtype.
    for (size, taps, multiplier, step), layout, (dtype, channels) in every if full else every[::5]:
        stride = [step if each > 1 else 1 for each in taps]
        padding = [each // 2 for each in taps]
        out = [(each - 1) // by + 1 for each, by in zip(size, stride, strict=True)]
        x = layout(torch.empty(2, channels, *size, dtype=dtype))
        weight = layout(torch.empty(channels * multiplier, 1, *taps, dtype=dtype))
        grad = layout(torch.empty(2, channels * multiplier, *out, dtype=dtype))
        window, bias = (stride, padding, (1, 1, 1)), weight[:, 0, 0, 0, 0].clone()
        calls: tuple[tuple[Callable[..., None], tuple[Any, ...]], ...] = (
            (depthwise.depthwise_forward, (x, weight, bias if channels > 1 else None, grad, *window)),
            (depthwise.depthwise_backward_input, (grad, weight, x, *window)),
            (depthwise.depthwise_backward_weight, (grad, x, weight, *window)),
        )
        for call, arguments in calls:
            label = f"{call.__name__} {dtype} of {channels} x {size}, {taps} taps, stride {step}"
            for specialization in launches(call, arguments):
                yield Case(label, specialization, (*TARGETS,) if full else ("sm_90", "gfx942"), True)
