"""Operators outside ATen, which have no samples here: how much roundoff their results have."""

from __future__ import annotations

from tritonite.testing.samples import facts
from tritonite.testing.samples.matmul import terms_of_products
from tritonite.testing.samples.normalization import terms_of_gradients

for _name in ("mla_decode", "paged_attention"):
    facts.TERMS[_name] = terms_of_products
    facts.ROUNDED_TERMS.add(_name)
# Pairs of the benchmark that draw tokens.
facts.RANDOM |= {"sample", "sample_unfiltered"}
facts.terms("skip_layer_norm_backward", "skip_rms_norm_backward")(terms_of_gradients)
facts.CANCELLING |= {
    "mla_decode",
    *("paged_attention", "skip_layer_norm", "skip_layer_norm_backward", "skip_rms_norm", "skip_rms_norm_backward"),
}
