"""Layer, group and RMS normalisation, and weight normalisation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tritonite.registry import Op
from tritonite.testing.samples import facts

# ATen's sums start with 0 on a GPU, and with the first element on a CPU.
facts.ZERO_SIGN_UNDEFINED.add("native_layer_norm_backward")
facts.ZERO_SIGN_OF_ROUNDOFF |= {"_weight_norm_interface_backward", "native_group_norm_backward"}


@facts.layouts("native_layer_norm", "native_layer_norm_backward")
def _rows(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield layouts. The second tensor has the dtype of parameters; float32 is accepted by ATen on CPUs alone."""
    yield "float32 parameters", [make(5, 3, 20), make(1).float()]
    yield "permuted", [make(2, 6, 4, 5).permute(0, 2, 3, 1)] * 2


@facts.layouts("native_group_norm", "native_group_norm_backward")
def _images(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield sequences, images and volumes. ATen's kernel for GPUs accepts contiguous ones in a single dtype alone."""
    images = make(3, 6, 4, 5).to(memory_format=torch.channels_last)
    yield "sequences", [make(4, 6, 7)] * 2
    yield "channels_last_3d", [make(2, 4, 4, 2, 5).to(memory_format=torch.channels_last_3d)] * 2
    yield "channels_last one channel", [make(3, 1, 4, 5).to(memory_format=torch.channels_last)] * 2
    yield "channels_last one pixel", [make(6, 16, 1, 1).to(memory_format=torch.channels_last)] * 2
    yield "float32 parameters", [make(3, 6, 4, 5), make(1).float()]
    yield "float32 parameters channels_last", [images, make(1).float()]


@facts.arguments("native_layer_norm", "native_layer_norm_backward")
def _layer_norm(tensors: facts.Tensors) -> dict[str, Any]:
    """Return parameters for the last dimension, and the statistics of a forward pass."""
    x, parameters = tensors[0], tensors[1].dtype
    size, weight = list(x.shape[-1:]), (x[(0,) * (x.dim() - 1)] if x.numel() else x).to(parameters)
    given = {"input": x.flip(0) if x.dim() else x, "normalized_shape": size, "weight": weight, "bias": weight}
    given |= {"grad_out": x, "output_mask": [True, True, True], "eps": 1e-5}
    if x.is_floating_point() and x.numel() and x.dim():
        statistics = torch.native_layer_norm(given["input"], size, None, None, 1e-5)[1:]
        kept = parameters if x.device.type == "cpu" else statistics[0].dtype
        given |= {name: value.to(kept) for name, value in zip(("mean", "rstd"), statistics, strict=True)}
    return given


@facts.arguments("native_group_norm", "native_group_norm_backward")
def _group_norm(tensors: facts.Tensors) -> dict[str, Any]:
    """Return parameters for the channels, in one group or two: gradients of smaller groups are mere roundoff."""
    x = tensors[0]
    if x.dim() < 2 or not x.numel():
        return {"N": 0, "C": 0, "HxW": 0, "group": 1, "output_mask": [True, True, True]}
    rows, channels = x.shape[:2]
    # ATen reads parameters as if they were contiguous.
    weight = x.select(0, 0).reshape(channels, -1)[:, 0].clone(memory_format=torch.contiguous_format)
    weight = weight.to(tensors[1].dtype)
    group = 2 if channels % 2 == 0 else 1
    sizes = (rows, channels, x.numel() // (rows * channels), group)
    given = dict(zip(("N", "C", "HxW", "group"), sizes, strict=True))
    given |= {"input": x.flip(0), "weight": weight, "bias": weight, "grad_out": x, "eps": 1e-5}
    if x.is_floating_point():
        # ATen accepts only contiguous inputs on a GPU.
        _, mean, rstd = torch.native_group_norm(given["input"].contiguous(), None, None, *sizes, 1e-5)
        mean, rstd = mean.to(weight.dtype), rstd.to(weight.dtype)
        given |= {"mean": mean, "rstd": rstd, "output_mask": [True, True, True]}
    return given


@facts.arguments("_fused_rms_norm", "_fused_rms_norm_backward")
def _rms_norm(tensors: facts.Tensors) -> dict[str, Any]:
    """Return the arguments of layer normalisation, with the reciprocal of the root mean square."""
    given = _layer_norm(tensors) | {"output_mask": [True, True]}
    x = given["input"]
    if x.is_floating_point() and x.numel() and x.dim():
        # Next to an infinite element ATen has 0 or nan, by the length of the row.
        x = given["input"] = torch.where(x.isinf(), 2.0, x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # ATen's gradient reads these as if they were contiguous.
        given["rstd"] = wide.square().mean(-1, keepdim=True).add(1e-5).rsqrt().contiguous()
        given["weight"] = given["weight"].contiguous()
    return given


def terms_of_gradients(sums: facts.Sums) -> float:
    """Return the terms of sums of gradients times elements of order 1, whose results have the size of weights, too."""
    count = sums.per_element()
    factors = (sums.tensors[0], sums.exact if count == 1 else None)
    sizes = [float(x.double().square().mean().nan_to_num(1, 1)) for x in factors if x is not None]
    return count * min(max(1.0, *sizes), 16.0)


facts.terms("native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm_backward")(terms_of_gradients)
facts.CANCELLING |= {
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
    *("_fused_rms_norm", "_fused_rms_norm_backward"),
}


@facts.terms("native_layer_norm", "native_group_norm")
def _terms_beneath_a_bias(sums: facts.Sums) -> float:
    """Return the terms of results from which a bias may take away all but the roundoff of their usual size."""
    if sums.exact is None or not sums.exact.isfinite().any():
        return sums.per_element()
    return sums.per_element() * max(1.0, float(sums.exact[sums.exact.isfinite()].abs().median())) ** 2


@facts.arguments("_weight_norm_interface", "_weight_norm_interface_backward")
def _weight_norm(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return a norm for each slice along the first dimension. ATen reads all tensors as if they were contiguous."""
    v = tensors[0].clone(memory_format=torch.contiguous_format)
    if not (v.dim() and v.numel() and v.is_floating_point()):
        # Without elements ATen's kernel for CPUs divides by 0.
        return None
    g = v.flatten(1)[:, 0].clone().reshape(-1, *[1] * (v.dim() - 1)) if v.dim() > 1 else v.clone()
    _, norms = torch.ops.aten._weight_norm_interface(v, g, 0)
    given = {"grad_w": v.flip(0), "saved_v": v, "saved_g": g, "saved_norms": norms}
    return {"v": v, "g": g, "dim": 0} | given


facts.may_decline(
    ("native_group_norm_backward*",),
    ("sliced",),
    "tensors that are neither contiguous*",
    "ATen copies a gradient with gaps",
)
facts.may_decline(
    ("native_group_norm_backward*",),
    ("*channels_last*",),
    "tensors that are neither contiguous*",
    "ATen's kernel for GPUs copies channels-last tensors",
    device="cuda",
)
facts.may_decline(
    ("native_group_norm_backward*",),
    ("empty",),
    "no elements*",
    "there are no groups without elements",
)


@facts.drawn("_fused_rms_norm", "_fused_rms_norm_backward", "native_group_norm_backward", "native_layer_norm_backward")
@facts.drawn("std_mean", "var_mean")
def _finite(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return finite operands: beside an infinite element ATen's result depends on the order of its sums."""
    return {
        name: value.nan_to_num(2.0, 2.0, 2.0) if facts.real(value) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def _without_infinities(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return arguments | {
        name: value.nan_to_num(math.nan, 2.0, 2.0)
        for name, value in arguments.items()
        if name in names and facts.real(value) and value.is_floating_point()
    }


@facts.drawn("native_layer_norm")
def _finite_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return rows without infinities: ATen's mean of a row is infinite or nan by the index of an infinite element."""
    return _without_infinities(arguments, "input")


@facts.drawn("native_group_norm")
def _finite_groups(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return groups and parameters without infinities: ATen distributes the weight over element and mean."""
    return _without_infinities(arguments, "input", "weight", "bias")
