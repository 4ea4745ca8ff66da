"""Operators outside ATen, which have no samples here: how much roundoff their results have."""

from __future__ import annotations

from tritonite.testing.samples import facts
from tritonite.testing.samples.matmul import terms_of_products
from tritonite.testing.samples.normalization import terms_of_gradients

facts.TERMS["paged_attention"] = terms_of_products
# The largest value of a quantised row may have been rounded before.
facts.ROUNDED_TERMS |= {"moe", "paged_attention", "rms_norm_quantize", "swiglu_quantize"}
_BACKWARD = ("layer_norm_backward", "rms_norm_backward", "skip_layer_norm_backward", "skip_rms_norm_backward")
facts.terms(*_BACKWARD)(terms_of_gradients)
facts.terms("grouped_linear_backward_weight", "moe")(terms_of_products)
facts.CANCELLING |= {
    *("paged_attention", "layer_norm", "rms_norm", "skip_layer_norm", "skip_rms_norm", *_BACKWARD),
}
