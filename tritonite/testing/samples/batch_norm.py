"""Batch normalisation."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts

# In evaluation ATen returns statistics on GPUs alone.
facts.DEVICE_DEFINED |= {"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"}
# Without statistics to take in evaluation ATen reads through a null pointer.
facts.FLAGS |= dict.fromkeys(("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit.no_stats_out"), (True,))


@facts.arguments(
    "native_batch_norm",
    "native_batch_norm_backward",
    "batch_norm_backward",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
)
def _batch_norm(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Weight, bias and running statistics for the second dimension, and what the forward pass hands on."""
    x = tensors[0]
    if x.dim() < 2 or not x.numel():
        # ATen divides by 0, or reads channels that there are not.
        return None
    weight = x.select(0, 0).reshape(x.shape[1], -1)[:, 0].clone()
    # Its rows differ from one another: of few like elements a gradient is but roundoff.
    varied = x.flip(0)
    given = {"input": varied, "weight": weight, "bias": weight.flip(0), "grad_out": x, "momentum": 0.25, "eps": 1e-5}
    variance = weight.double().abs().add(1).to(x.dtype)
    given |= {"running_mean": weight.flip(0), "running_var": variance, "output_mask": [True, True, True]}
    given["reserve"] = torch.empty(0, dtype=torch.uint8, device=x.device)
    if x.is_floating_point():
        # Of the same statistics, because which of them ATen's gradient by given ones takes depends on the layout.
        kept = x.dtype if x.device.type == "cpu" else torch.promote_types(x.dtype, torch.float32)
        mean, variance = given["running_mean"].to(kept), given["running_var"].to(kept)
        rstd = (variance.double() + 1e-5).rsqrt().to(kept)
        given |= {"save_mean": mean, "save_invstd": rstd, "save_var": rstd}
    return given


facts.may_decline(
    ("_batch_norm_*", "_native_batch_norm_*", "batch_norm_backward", "native_batch_norm*"),
    ("channels_last*",),
    "channels last",
    "its channels lie next to each other, for which ATen has kernels of their own",
)
facts.may_decline(
    ("_native_batch_norm_legit_functional",),
    ("* False",),
    "copies of the running statistics",
    "in evaluation ATen returns copies of what it was given",
)
facts.may_decline(
    ("_batch_norm_with_update*", "batch_norm_backward"),
    ("*",),
    "*cuDNN*",
    "ATen has cuDNN do it, which keeps for the gradient what only cuDNN reads",
    device="cuda",
)
facts.may_decline(
    ("batch_norm_backward", "native_batch_norm_backward*"),
    ("* False",),
    "statistics handed on twice*",
    "in evaluation which of them ATen takes depends on the layout",
    device="cuda",
)
