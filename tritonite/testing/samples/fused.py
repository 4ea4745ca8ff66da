"""Operators outside ATen, which have no samples here: how much roundoff their results have."""

from __future__ import annotations

import torch

from tritonite.testing.samples import facts
from tritonite.testing.samples.convolution import terms_of_convolutions
from tritonite.testing.samples.matmul import terms_of_products
from tritonite.testing.samples.normalization import terms_of_gradients
from tritonite.testing.tolerances import ATOL

_NORMS_BACKWARD = ("layer_norm_backward", "rms_norm_backward", "skip_layer_norm_backward", "skip_rms_norm_backward")
# Attention, and the benchmark's cases of it.
_ATTENTION = {
    *("mla_decode", "paged_attention", "attention_backward"),
    *(f"attention{case}{pass_}" for case in ("", "_window", "_softcap", "_sinks") for pass_ in ("", "_trained")),
}
# The benchmark's cases of `conv_bias_act`.
_CONVOLUTIONS = {
    *("conv_bias_relu", "conv_bias_relu_residual", "conv_bias_silu", "conv_bias_relu6_depthwise"),
    *("conv_bias_act", "conv_bias_act_backward"),
}
_HEADS_AND_EXPERTS = {"linear_cross_entropy", "moe"}
_QUANTIZED = {"fp8_linear", "linear_fp8_blocks", "linear_int4", "linear_int8"}
_PRODUCTS = {*_ATTENTION, *_HEADS_AND_EXPERTS, *_QUANTIZED}
facts.terms(*_PRODUCTS, "grouped_linear_backward_weight")(terms_of_products)
# The largest value of a quantised row may have been rounded before. Tensor cores round sums of float8 products.
facts.ROUNDED_TERMS |= {*_PRODUCTS, "rms_norm_quantize", "swiglu_quantize"}
# Pairs of the benchmark that draw tokens.
facts.RANDOM |= {"sample", "sample_unfiltered"}
facts.terms(*_NORMS_BACKWARD, "gated_rms_norm_backward")(terms_of_gradients)
facts.terms(*_CONVOLUTIONS)(terms_of_convolutions)
facts.terms("short_convolution", "short_convolution_backward")(terms_of_gradients)
facts.CANCELLING |= {
    *("cross_entropy_backward", "linear_cross_entropy", *_ATTENTION),
    *("layer_norm", "rms_norm", "skip_layer_norm", "skip_rms_norm", *_NORMS_BACKWARD),
    *("chunk_gated_delta_rule", "gated_delta_rule_backward", "gated_rms_norm", "gated_rms_norm_backward"),
    *("short_convolution", "short_convolution_backward", *_CONVOLUTIONS),
}
facts.ZERO_SIGN_OF_ROUNDOFF |= {*_CONVOLUTIONS} | {
    each for each in _ATTENTION if each.endswith(("_trained", "_backward"))
}


@facts.terms("chunk_gated_delta_rule", "gated_delta_rule_backward")
def _terms_of_chunks(sums: facts.Sums) -> float:
    """Return the terms of results whose states and corrections are rounded: 8 units of the results' usual size."""
    own = sums.result if sums.exact is None else sums.exact
    eps = max(torch.finfo(x.dtype).eps for x in sums.tensors if x.is_floating_point())
    size = float(own.double().square().mean().nan_to_num(1, 1))
    return max(1.0, size * 64 * (eps / ATOL[torch.float32]) ** 2)
