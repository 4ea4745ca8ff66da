"""Operators outside ATen, which have no samples here: how much roundoff their results have."""

from __future__ import annotations

from tritonite.testing.samples import facts
from tritonite.testing.samples.matmul import terms_of_products
from tritonite.testing.samples.normalization import terms_of_gradients

# Attention, and the benchmark's cases of it.
_ATTENTION = {
    "paged_attention",
    *(f"attention{case}{pass_}" for case in ("", "_window", "_softcap", "_sinks") for pass_ in ("", "_trained")),
    "attention_backward",
}
facts.terms(*_ATTENTION)(terms_of_products)
facts.ROUNDED_TERMS |= _ATTENTION
facts.CANCELLING |= _ATTENTION
facts.ZERO_SIGN_OF_ROUNDOFF |= {each for each in _ATTENTION if each.endswith(("_trained", "_backward"))}
facts.terms("skip_layer_norm_backward", "skip_rms_norm_backward")(terms_of_gradients)
facts.CANCELLING |= {
    *("skip_layer_norm", "skip_layer_norm_backward", "skip_rms_norm", "skip_rms_norm_backward"),
}
