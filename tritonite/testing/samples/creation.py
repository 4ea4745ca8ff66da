"""Tensors made from numbers and from coordinates."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import registry
from tritonite.testing.samples import facts

facts.CHOICES["diagonal"] = (0, 1, -2)


@facts.arguments("full", "ones", "zeros", "new_full", "new_ones", "new_zeros")
def _shape(tensors: facts.Tensors) -> dict[str, Any]:
    """Return the shape and the dtype of the layout's tensor."""
    return {"size": list(tensors[0].shape), "dtype": tensors[0].dtype}


@facts.arguments("scalar_tensor", "eye", "fft_fftfreq", "fft_rfftfreq")
@facts.arguments("hann_window", "hamming_window", "bartlett_window", "blackman_window", "kaiser_window")
def _length(tensors: facts.Tensors) -> dict[str, Any]:
    """Return a number of points from the layout's elements: odd, even, 1 or 0."""
    n = tensors[0].numel() % 131
    given = {"window_length": n, "n": n, "m": 1 + n // 2, "d": 0.25, "dtype": tensors[0].dtype}
    return given | {"alpha": 0.5, "beta": 3.5}


@facts.arguments("tril_indices", "triu_indices")
def _rows_and_columns(tensors: facts.Tensors) -> dict[str, Any]:
    """Return wide and tall shapes, with diagonals on either side of the main one."""
    n = tensors[0].numel()
    return {"row": n % 23, "col": n % 17, "offset": n % 31 - 15, "dtype": torch.int32 if n % 2 else torch.int64}


@facts.arguments("affine_grid_generator")
def _images(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return sizes of images or volumes, one extent of which is 1."""
    x = tensors[0].flatten()
    if not x.numel():
        return None
    rank = 2 + x.numel() % 2
    theta = x[: rank * (rank + 1)].repeat(2 * rank * (rank + 1))[: 2 * rank * (rank + 1)].view(2, rank, rank + 1)
    return {"theta": theta, "size": [2, 3, 5, 1, 4][: rank + 2]}


@facts.arguments("arange", "range", "linspace", "logspace")
def _ends(tensors: facts.Tensors) -> dict[str, Any]:
    """Return ranges upwards and downwards, with integer and other steps."""
    n, dtype = tensors[0].numel() % 131, tensors[0].dtype
    if n % 2 or not dtype.is_floating_point:
        given: dict[str, Any] = {"start": 3, "end": 3 + n, "step": 2}
    else:
        given = {"start": 1.5, "end": 1.5 - n / 4, "step": -0.375}
    return given | {"steps": n, "base": 2.0, "dtype": dtype}


@facts.drawn(*{op.packet for op in registry.overloads().values() if op.family == "creation"})
def _limited(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit sizes to what fits in memory."""
    most = {"size": 64, "row": 64, "col": 64, "n": 300, "m": 300, "window_length": 3000, "steps": 3000}
    made = dict(arguments)
    for name in arguments.keys() & most.keys():
        value, limit = arguments[name], most[name]
        made[name] = [min(x, limit) for x in value] if isinstance(value, list) else min(value, limit)
    if "step" in made or "end" in made:
        for name in made.keys() & {"start", "end", "step"}:
            number = made[name]
            if isinstance(number, (int, float)) and abs(number) > 3000:
                made[name] = type(number)(7)
            if name == "step" and isinstance(number, float) and abs(number) < 1e-2:
                made[name] = 0.25
    if "window_length" in made:
        # The float64 reference is made by replacing the dtype, so that there has to be one.
        made["dtype"] = made.get("dtype") or torch.float32
        for name in made.keys() & {"alpha", "beta"}:
            made[name] = min(max(abs(made[name]), 0.25), 8.0)
    return made


@facts.drawn("logspace")
def _far_from_overflow(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit powers: next to the largest number, rounding of the steps decides whether they are finite."""
    limited = {name: arguments[name] for name in ("start", "end", "base") if _is_number(arguments[name])}
    return arguments | {name: min(max(value, -9), 9) for name, value in limited.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value


@facts.drawn("range")
def _whole_steps(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make steps at least 1: ATen divides by a step's integer part, and stops the program if this is 0."""
    step = arguments.get("step")
    return arguments | {"step": 1} if isinstance(step, (int, float)) and abs(step) < 1 else arguments
