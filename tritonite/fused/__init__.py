"""Operators that ATen does not have, for the layers of a transformer.

They run on tensors of the device, record gradients, and are known to torch.compile as `torch.ops.tritonite.*`.
"""

from tritonite import registry
from tritonite.fused.cross_entropy import cross_entropy
from tritonite.fused.distillation import jsd, kl_div, kl_divergence, tv_distance
from tritonite.fused.gated import gelu_and_mul, silu_and_mul
from tritonite.fused.grpo import GrpoMetrics, linear_grpo
from tritonite.fused.linear_cross_entropy import linear_cross_entropy
from tritonite.fused.linear_distillation import linear_jsd
from tritonite.fused.norm import skip_layer_norm, skip_rms_norm
from tritonite.fused.paged import paged_attention, reshape_and_cache
from tritonite.fused.preference import (
    KtoMetrics,
    PairMetrics,
    linear_cpo,
    linear_dpo,
    linear_kto,
    linear_orpo,
    linear_simpo,
)
from tritonite.fused.rotary import rotary_embedding, rotary_embedding_
from tritonite.fused.token_log_probabilities import LinearHead
from tritonite.install import library

library.register(registry.declarations)

__all__ = [
    "GrpoMetrics",
    "KtoMetrics",
    "LinearHead",
    "PairMetrics",
    "cross_entropy",
    "gelu_and_mul",
    "jsd",
    "kl_div",
    "kl_divergence",
    "linear_cpo",
    "linear_cross_entropy",
    "linear_dpo",
    "linear_grpo",
    "linear_jsd",
    "linear_kto",
    "linear_orpo",
    "linear_simpo",
    "paged_attention",
    "reshape_and_cache",
    "rotary_embedding",
    "rotary_embedding_",
    "silu_and_mul",
    "skip_layer_norm",
    "skip_rms_norm",
    "tv_distance",
]
