"""The steps of synchronised batch normalisation, and references for them, which ATen does not have on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite.registry import Op
from tritonite.testing.samples import facts

PACKETS = (
    "batch_norm_stats",
    "batch_norm_elemt",
    "batch_norm_gather_stats",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_backward_reduce",
    "batch_norm_backward_elemt",
)
facts.CANCELLING |= set(PACKETS)


@facts.layouts(*PACKETS)
def _images(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield sequences, images and volumes. The second tensor has the dtype of parameters: the input's or float32."""
    images = make(3, 5, 4, 6).to(memory_format=torch.channels_last)
    yield "sequences", [make(4, 3, 7)] * 2
    yield "channels_last_3d", [make(2, 3, 4, 2, 5).to(memory_format=torch.channels_last_3d)] * 2
    yield "channels_last one pixel", [make(6, 5, 1, 1).to(memory_format=torch.channels_last)] * 2
    yield "float32 parameters", [make(3, 5, 4, 6), make(1).float()]
    yield "float32 parameters channels_last", [images, make(1).float()]


@facts.arguments(*PACKETS)
def _steps(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return parameters and running statistics in the second tensor's dtype, and statistics of two processes."""
    x, parameters = tensors[0], tensors[1].dtype
    if x.dim() < 2 or not x.numel() or not x.is_floating_point():
        return None
    kept = torch.promote_types(x.dtype, torch.float32)
    weight = x.select(0, 0).reshape(x.shape[1], -1)[:, 0].to(parameters, copy=True)
    rows = [weight.to(kept), weight.flip(0).to(kept)]
    deviations = torch.stack(rows).nan_to_num(1.0, 1.0, 1.0).clamp(-4, 4).abs().add(0.5).reciprocal()
    given = {"input": x.flip(0), "grad_out": x, "weight": weight, "bias": weight.flip(0), "momentum": 0.25, "eps": 1e-3}
    given |= {"running_mean": weight.flip(0), "running_var": weight.double().abs().add(1).to(parameters)}
    given |= {"input_g": True, "weight_g": True, "bias_g": True, "sum_dy": rows[0], "sum_dy_xmu": rows[1]}
    given["counts"] = torch.tensor([12, 20], device=x.device).to(parameters)
    counts = torch.tensor([12, 20], device=x.device, dtype=torch.int32)
    # Operators share argument names. All but two have the statistics of one process.
    return given | {"mean": rows[0], "invstd": deviations[0], "count": counts}


@facts.drawn("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts")
def _without_cancellation(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a momentum up to 1, or a complex one: a larger one subtracts a multiple of the running value."""
    momentum = arguments["momentum"]
    # PyTorch refuses a complex one.
    return arguments if isinstance(momentum, complex) else arguments | {"momentum": min(max(float(momentum), 0.0), 1.0)}


@facts.arguments("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts")
def _gathered(tensors: facts.Tensors) -> dict[str, Any] | None:
    given = _steps(tensors)
    if given is None:
        return None
    invstd = torch.stack([given["invstd"], given["invstd"].flip(0)])
    return given | {"mean": torch.stack([given["mean"], given["sum_dy_xmu"]]), "invstd": invstd, "count": 12}


def _laid(x: torch.Tensor, *by_channel: torch.Tensor | None) -> list[Any]:
    shape = (1, -1, *[1] * (x.dim() - 2))
    return [each if each is None else each.view(shape) for each in by_channel]


def stats(input: torch.Tensor, eps: float) -> Any:
    dims = [d for d in range(input.dim()) if d != 1]
    variance, mean = torch.var_mean(input, dims, correction=0)
    return mean, (variance + eps).rsqrt()


def elemt(input: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, invstd: torch.Tensor, eps: float) -> Any:
    mean, invstd, weight, bias = _laid(input, mean, invstd, weight, bias)
    result = (input - mean) * invstd
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def gather_stats_with_counts(
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> Any:
    fraction = (counts / counts.sum()).to(mean.dtype)[:, None]
    own = invstd.reciprocal().square() - eps
    every = (mean * fraction).sum(0)
    variance = ((own + (mean - every).square()) * fraction).sum(0)
    if running_mean is not None:
        total = float(counts.sum())
        for running, moved in ((running_mean, every), (running_var, variance * (total / (total - 1)))):
            running.copy_((1 - momentum) * running + momentum * moved)
    return every, (variance + eps).rsqrt()


def gather_stats(
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    count: int,
) -> Any:
    counts = torch.full_like(mean[:, 0], count)
    return gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts)


def backward_reduce(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: Any,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> Any:
    dims = [d for d in range(input.dim()) if d != 1]
    total, product = grad_out.sum(dims), (grad_out * (input - _laid(input, mean)[0])).sum(dims)
    return total, product, product * invstd, total.clone()


def backward_elemt(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: Any,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    count: torch.Tensor,
) -> Any:
    mean, invstd, weight, sum_dy, sum_dy_xmu = _laid(input, mean, invstd, weight, sum_dy, sum_dy_xmu)
    fraction = 1 / count.sum().to(input.dtype)
    grad = (grad_out - sum_dy * fraction - (input - mean) * invstd.square() * sum_dy_xmu * fraction) * invstd
    return grad if weight is None else grad * weight


facts.REFERENCES |= {
    "batch_norm_stats": stats,
    "batch_norm_elemt": elemt,
    "batch_norm_gather_stats": gather_stats,
    "batch_norm_gather_stats_with_counts": gather_stats_with_counts,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elemt,
}
facts.may_decline(
    ("batch_norm_gather_stats", "batch_norm_gather_stats.out"),
    ("*",),
    "a count that ATen rounds to a 16-bit float",
    "ATen rounds the count to the dtype of running statistics, or of the input",
    dtypes=(torch.float16, torch.bfloat16),
    device="cuda",
)
