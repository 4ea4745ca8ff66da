"""Batch normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite import devices
from tritonite.registry import Op
from tritonite.testing.samples import facts
from tritonite.testing.samples.normalization import terms_of_gradients

# In evaluation ATen returns statistics on GPUs, and empty tensors on CPUs.
facts.DEVICE_DEFINED |= {"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"}
# In evaluation ATen needs running statistics, and dereferences a null pointer without them.
facts.FLAGS |= dict.fromkeys(("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit.no_stats_out"), (True,))


PACKETS = (
    "native_batch_norm",
    "native_batch_norm_backward",
    "batch_norm_backward",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
    "batch_norm_update_stats",
)
facts.CANCELLING |= set(PACKETS)
facts.terms("native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward")(terms_of_gradients)


@facts.layouts(*PACKETS)
def _images(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield sequences, images and volumes. The second tensor has the dtype of parameters: the input's or float32."""
    images = make(3, 5, 4, 6).to(memory_format=torch.channels_last)
    yield "sequences", [make(4, 3, 7)] * 2
    yield "channels_last_3d", [make(2, 3, 4, 2, 5).to(memory_format=torch.channels_last_3d)] * 2
    yield "channels_last one channel", [make(3, 1, 4, 5).to(memory_format=torch.channels_last)] * 2
    yield "channels_last one pixel", [make(6, 5, 1, 1).to(memory_format=torch.channels_last)] * 2
    yield "float32 parameters", [make(3, 5, 4, 6), make(1).float()]
    yield "float32 parameters channels_last", [images, make(1).float()]
    if op.out_names:
        # For other layouts ATen's kernel for CPUs reads uninitialised means.
        return
    yield "sequences transposed", [make(4, 7, 3).transpose(1, 2)] * 2
    yield "permuted", [make(4, 2, 3, 5).permute(1, 2, 0, 3)] * 2
    yield "channels_last sliced", [make(2, 6, 4, 5).to(memory_format=torch.channels_last)[:, ::2]] * 2
    yield "float32 parameters transposed", [make(5, 9).t(), make(1).float()]


@facts.arguments(*PACKETS)
def _batch_norm(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return parameters and running statistics in the second tensor's dtype, and results of a forward pass."""
    x, parameters = tensors[0], tensors[1].dtype
    if x.dim() < 2 or not x.numel():
        # ATen divides by 0, or reads beyond the channels.
        return None
    weight = x.select(0, 0).reshape(x.shape[1], -1)[:, 0].to(parameters, copy=True)
    # An input that differs from the gradient: with equal elements a gradient is mere roundoff.
    varied = x.flip(0)
    given = {"input": varied, "weight": weight, "bias": weight.flip(0), "grad_out": x, "momentum": 0.25, "eps": 1e-5}
    variance = weight.double().abs().add(1).to(parameters)
    given |= {"running_mean": weight.flip(0), "running_var": variance, "output_mask": [True, True, True]}
    given |= {"exponential_average_factor": 0.25, "epsilon": 1e-5, "grad_output": x}
    size = 0
    if devices.current.aten == "cuda" and x.is_floating_point():
        size = torch._C._get_cudnn_batch_norm_reserve_space_size(x, True)
    given["reserve"] = given["reserveSpace"] = torch.zeros(size, dtype=torch.uint8, device=x.device)
    if x.is_floating_point():
        # Saved statistics equal the running ones, because ATen's gradient uses either, by layout.
        kept = parameters if x.device.type == "cpu" else torch.promote_types(x.dtype, torch.float32)
        mean, variance = given["running_mean"].to(kept), given["running_var"].to(kept)
        rstd = (variance.double() + 1e-5).rsqrt().to(kept)
        given |= {"save_mean": mean, "save_invstd": rstd, "save_var": rstd}
    return given


# References call ATen's own kernels. In float64 ATen would call cuDNN, which refuses operands with gaps and treats
# every gradient as one of training.


def _updated(input: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, *scales: float, **_: Any) -> Any:
    results = torch.native_batch_norm(input, weight, bias, mean, variance, True, *scales)
    return *results, torch.empty(0, dtype=torch.uint8, device=input.device)


def _updated_copies(input: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, *scales: float) -> Any:
    moved = mean.clone(), variance.clone()
    return *_updated(input, weight, bias, *moved, *scales), *moved


def _gradients(*arguments: Any) -> Any:
    """Return gradients by `native_batch_norm_backward`, which has all arguments but the last, cuDNN's reserve.

    They are computed on the CPU: ATen's kernel for channels-last tensors on GPUs rounds a reciprocal to float32.
    """
    device = arguments[0].device
    here = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, arguments[:-1])
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), torch.ops.aten.native_batch_norm_backward(*here))


facts.REFERENCES["_batch_norm_with_update"] = _updated
facts.REFERENCES["_batch_norm_with_update_functional"] = _updated_copies
facts.REFERENCES["batch_norm_backward"] = _gradients

facts.may_decline(
    ("_native_batch_norm_legit_functional",),
    ("* False",),
    "training is False*",
    "in evaluation ATen returns copies of the running statistics",
)
facts.may_decline(
    ("_batch_norm_with_update.out", "_native_batch_norm_legit.*out", "native_batch_norm.out"),
    ("channels_last*", "float32 parameters channels_last*"),
    "an output with strides *",
    "ATen's kernel for CPUs writes channels-last results in the input's order, whatever the output's layout",
    device="cpu",
)
facts.may_decline(
    (
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update",
        "_batch_norm_with_update_functional",
    ),
    ("float32 parameters transposed*",),
    "parameters of dtypes *",
    "ATen accepts float32 parameters for float64 in one kernel alone, for layouts that models do not have",
    dtypes=(torch.float64,),
    device="cuda",
)


@facts.drawn("native_batch_norm", "_native_batch_norm_legit")
def _by_some_statistics(arguments: dict[str, Any]) -> dict[str, Any]:
    """Set training where running statistics are missing: ATen would dereference a null pointer."""
    none = arguments.get("running_mean") is None or arguments.get("running_var") is None
    return arguments | {"training": True} if none else arguments


@facts.drawn("native_batch_norm_backward", "batch_norm_backward")
def _with_deviations(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit eps: for an infinite one ATen multiplies a sum by 0 and our kernel its terms, with zeros of either sign."""
    return arguments | {"eps": min(arguments["eps"], 1.0)}
