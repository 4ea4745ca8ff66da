"""Pooling and its gradients, whose windows fit the images and whose indices are those of the windows' maxima."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from tritonite.registry import Op
from tritonite.testing.samples import facts

# Images of this many columns get large windows.
_LARGE = 20
# Arguments after the images of pooling with strided and with fractional windows.
_STRIDED = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
_FRACTIONAL = ("kernel_size", "output_size", "random_samples")
_VOLUMES = ("avg", "_adaptive_avg", "adaptive_max", "fractional_max")


def _images(x: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Return a tensor as images with channels, with a batch if it has enough dimensions."""
    if x.dim() in (rank + 1, rank + 2):
        return x
    if not x.numel():
        return x.new_empty(0, 2, *(4, 5, 6)[-rank:])
    if x.dim() == 2 and rank <= 2:
        return x[None] if rank == 1 else x[None, None]
    if x.numel() < 60:
        return None
    return x.flatten()[:60].reshape(1, 1, *(3, 4, 5)) if rank == 3 else x.flatten()[:60].reshape(1, 3, 4, 5)


def _like(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape, layout and dtype of x with the given values, repeated."""
    flat = values.to(x.device, x.dtype).flatten()
    if not x.numel():
        return torch.empty_like(x)
    index = torch.arange(x.numel(), device=x.device).reshape(x.shape) % flat.numel()
    return torch.empty_like(x).copy_(flat[index])


def _window(x: torch.Tensor, rank: int) -> dict[str, Any]:
    """Return numbers of strided windows: overlapping ones, or large ones that divide a large image."""
    if x.shape[-1] >= _LARGE:
        kernels = [5, 6] if rank == 2 else [1, 5, 6][-rank:]
        return {"kernel_size": kernels, "stride": [], "padding": [0] * rank, "dilation": [1] * rank, "ceil_mode": False}
    kernels, steps, pads = [2, 3, 2][-rank:], [1, 2, 1][-rank:], [1, 1, 0][-rank:]
    # Both roundings are tried, whatever the flag of a sample, because a gradient has the shape of the result.
    rounding = {"ceil_mode": x.dim() == rank + 2}
    return {"kernel_size": kernels, "stride": steps, "padding": pads, "dilation": [1] * rank, **rounding}


def _output_size(x: torch.Tensor, rank: int) -> list[int]:
    return [1] * rank if x.shape[-1] >= _LARGE else [2, 3, 7][-rank:]


def _compute(operator: Any, x: torch.Tensor, *arguments: Any) -> Any:
    """Return ATen's result, in float32 for dtypes that ATen's kernel lacks, or None where ATen raises."""
    for tried in (x, x.float()):
        try:
            return operator(tried, *arguments)
        except (NotImplementedError, RuntimeError):
            continue
    return None


def _average(rank: int, tensors: facts.Tensors) -> dict[str, Any] | None:
    x = _images(tensors[0], rank)
    if x is None:
        return None
    given = {"self": x, "divisor_override": 7 if x.dim() == rank + 1 else None, **_window(x, rank)}
    if rank > 1:
        names = ("kernel_size", "stride", "padding", "ceil_mode")
        out = _compute(getattr(torch.ops.aten, f"avg_pool{rank}d"), x, *(given[name] for name in names))
        given |= {} if out is None else {"grad_output": _like(out.to(x.dtype), tensors[-1])}
    return given


def _maximum(rank: int, tensors: facts.Tensors) -> dict[str, Any] | None:
    x = _images(tensors[0], rank)
    if x is None:
        return None
    given = {"self": x, **_window(x, rank)}
    operator = getattr(torch.ops.aten, f"max_pool{rank}d_with_indices")
    results = _compute(operator, x, *(given[name] for name in _STRIDED))
    return given | _of_results(x, results, tensors[-1])


def _of_results(x: torch.Tensor, results: Any, values: torch.Tensor) -> dict[str, Any]:
    """Return a gradient and the indices of a pooling call."""
    if results is None:
        return {}
    return {"grad_output": _like(results[0].to(x.dtype), values), "indices": results[1]}


def _adaptive_average(rank: int, tensors: facts.Tensors) -> dict[str, Any] | None:
    x = _images(tensors[0], rank)
    if x is None:
        return None
    size = _output_size(x, rank)
    grad = _like(x.new_empty((*x.shape[:-rank], *size)), tensors[-1])
    return {"self": x, "output_size": size, "grad_output": grad}


def _adaptive_maximum(rank: int, tensors: facts.Tensors) -> dict[str, Any] | None:
    x = _images(tensors[0], rank)
    if x is None:
        return None
    size = _output_size(x, rank)
    results = _compute(getattr(torch.ops.aten, f"adaptive_max_pool{rank}d"), x, size)
    return {"self": x, "output_size": size} | _of_results(x, results, tensors[-1])


def _fractional(rank: int, tensors: facts.Tensors) -> dict[str, Any] | None:
    x = _images(tensors[0], rank)
    if x is None:
        return None
    batch, channels = x.shape[:2] if x.dim() == rank + 2 else (1, x.shape[0])
    samples = _like(x.new_empty(batch, channels, rank), torch.tensor([0.25, 0.75, 0.0, 0.5, 0.125, 0.96875, 0.375]))
    given = {"self": x, "kernel_size": [2] * rank, "output_size": [1, 2, 2][-rank:], "random_samples": samples}
    operator = getattr(torch.ops.aten, f"fractional_max_pool{rank}d")
    return given | _of_results(x, _compute(operator, x, *(given[name] for name in _FRACTIONAL)), tensors[-1])


def _unpooled(rank: int, tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return values with indices of their own."""
    x = _images(tensors[0], rank)
    if x is None:
        return None
    plane = torch.arange(x.shape[-rank:].numel(), device=x.device).flip(0) * 2
    size = [2 * x.shape[-rank], *x.shape[1 - rank :]]
    indices = torch.empty_like(x, dtype=torch.int64).copy_(plane.reshape(x.shape[-rank:]))
    return {"self": x, "indices": indices, "output_size": size, "stride": [2] * rank, "padding": [0] * rank}


@facts.chosen("fractional_max_pool2d", "fractional_max_pool3d")
def _for_samples(
    self: torch.Tensor,
    kernel_size: Any,
    output_size: Any = None,
    random_samples: torch.Tensor | None = None,
    *,
    results: list[torch.Tensor],
    **_: Any,
) -> list[torch.Tensor]:
    """Return zeros for calls that draw samples of 16 bits, whose roundoff decides the positions of windows."""
    if random_samples is not None or self.dtype.itemsize > 2:
        return results
    return [torch.zeros_like(result) for result in results]


for _rank in (1, 2, 3):
    facts.arguments(f"avg_pool{_rank}d", f"avg_pool{_rank}d_backward")(functools.partial(_average, _rank))
    facts.arguments(f"max_pool{_rank}d_with_indices", f"max_pool{_rank}d_with_indices_backward")(
        functools.partial(_maximum, _rank)
    )
    facts.arguments(*(f"{prefix}adaptive_avg_pool{_rank}d{way}" for prefix in ("", "_") for way in ("", "_backward")))(
        functools.partial(_adaptive_average, _rank)
    )
    facts.arguments(f"fractional_max_pool{_rank}d", f"fractional_max_pool{_rank}d_backward")(
        functools.partial(_fractional, _rank)
    )
    facts.arguments(f"max_unpool{_rank}d")(functools.partial(_unpooled, _rank))
    facts.arguments(f"adaptive_max_pool{_rank}d", f"adaptive_max_pool{_rank}d_backward")(
        functools.partial(_adaptive_maximum, _rank)
    )


@facts.layouts(
    *(f"{name}_pool3d{way}" for name in _VOLUMES for way in ("", "_backward")),
    *("max_pool3d_with_indices", "max_pool3d_with_indices_backward", "max_unpool3d"),
)
def _volumes(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield batches of volumes, row-major and channels-last."""
    yield "volumes", [make(2, 2, 4, 5, 6)] * 2
    yield "channels_last_3d", [make(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)] * 2


def _chosen_by(rank: int, names: tuple[str, ...], forward: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the indices of the maxima, or any in the image where there are none.

    ATen adds gradients at any index, also at one outside the windows, and on a CPU outside the image. Of fewer indices
    than gradients of fractional pooling it reads beyond the last one, and for more images of gradients than of inputs
    it writes beyond the last image.
    """
    x, indices, grad = arguments["self"], arguments["indices"], arguments["grad_output"]
    if not all(isinstance(value, torch.Tensor) for value in (x, indices, grad)):
        return arguments
    if not facts.real(x) or x.dim() not in (rank + 1, rank + 2):
        return arguments
    if grad.dim() == x.dim() and grad.shape[:-rank] != x.shape[:-rank]:
        x = torch.zeros((*grad.shape[:-rank], *x.shape[-rank:]), dtype=x.dtype, device=x.device)
        arguments = arguments | {"self": x}
    given = {"output_size": list(grad.shape[-rank:])} | arguments
    if "random_samples" in names:
        batch, channels = x.shape[:2] if x.dim() == rank + 2 else (1, x.shape[0])
        given["random_samples"] = torch.full((batch, channels, rank), 0.5, device=x.device)
    results = _compute(getattr(torch.ops.aten, forward), x.float(), *(given[name] for name in names))
    if indices.dtype is not torch.int64:
        return arguments
    if results is not None and results[1].shape == indices.shape:
        return arguments | {"indices": results[1]}
    if "random_samples" in names and indices.shape != grad.shape:
        fits = results is not None and results[1].shape == grad.shape
        indices = results[1] if fits else torch.zeros_like(grad, dtype=torch.int64)
    return arguments | {"indices": facts.within(indices, 0, x.shape[-rank:].numel() - 1)}


for _rank in (2, 3):
    for _forward, _backward, _names in (
        (f"max_pool{_rank}d_with_indices", f"max_pool{_rank}d_with_indices_backward", _STRIDED),
        (f"adaptive_max_pool{_rank}d", f"adaptive_max_pool{_rank}d_backward", ("output_size",)),
        (f"fractional_max_pool{_rank}d", f"fractional_max_pool{_rank}d_backward", _FRACTIONAL),
    ):
        facts.drawn(_backward)(functools.partial(_chosen_by, _rank, _names, _forward))


# Under a negative divisor ATen's kernels for each memory format give 0 different signs.
facts.ZERO_SIGN_OF_ROUNDOFF |= {"avg_pool2d", "avg_pool3d"}


@facts.drawn(*(f"{name}{rank}d_backward" for name in ("avg_pool", "_adaptive_avg_pool") for rank in (2, 3)))
def _below_overflow(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return gradients whose sums do not overflow: ATen divides each term, and kernels divide the sum."""
    grad = arguments["grad_output"]
    if not facts.real(grad) or not grad.is_floating_point():
        return arguments
    most = torch.finfo(grad.dtype).max / 1024
    return arguments | {"grad_output": grad.where(grad.isinf(), grad.clamp(-most, most))}


def _whole_size(rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return an output size of `rank` numbers: on a GPU ATen reads beyond a shorter one."""
    size = arguments["output_size"]
    return arguments if len(size) >= rank else arguments | {"output_size": [*size, *[1] * (rank - len(size))]}


for _rank in (2, 3):
    facts.drawn(*(f"{prefix}adaptive_avg_pool{_rank}d" for prefix in ("", "_")))(functools.partial(_whole_size, _rank))


@facts.drawn("max_unpool2d", "max_unpool3d")
def _places(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return indices in the image, and equal values: which of several at one index remains is undefined."""
    x, indices, sizes = arguments["self"], arguments["indices"], arguments["output_size"]
    if not facts.real(x) or not facts.is_index(indices) or not x.numel():
        return arguments
    return arguments | {"indices": facts.within(indices, 0, math.prod(sizes) - 1), "self": torch.full_like(x, 2)}


def _by_rows(*args: Any, **kwargs: Any) -> Any:
    """Return ATen's gradient of row-major operands: its kernel for channels-last GPU tensors forgets the padding.

    pytorch issue 188344.
    """
    plain = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in args]
    return torch.ops.aten.avg_pool2d_backward(*plain, **kwargs)


facts.REFERENCES["avg_pool2d_backward"] = _by_rows

facts.may_decline(
    ("_adaptive_avg_pool2d.out", "_adaptive_avg_pool2d_backward.out"),
    ("channels_last",),
    "an output with strides *",
    "on a GPU ATen resizes an empty output to row-major strides, and its other kernels need those of a fresh result",
    device="cuda",
)
