"""Operators that ATen does not have, for the layers of a transformer.

They run on tensors of the device, record gradients, and are known to torch.compile as `torch.ops.tritonite.*`.
"""

from tritonite import registry
from tritonite.fused.delta_rule import (
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_,
)
from tritonite.fused.gated import gelu_and_mul, silu_and_mul
from tritonite.fused.gated_norm import gated_rms_norm
from tritonite.fused.norm import skip_layer_norm, skip_rms_norm
from tritonite.fused.paged import paged_attention, reshape_and_cache
from tritonite.fused.rotary import rotary_embedding, rotary_embedding_
from tritonite.fused.short_convolution import short_convolution, short_convolution_update
from tritonite.install import library

library.register(registry.declarations)

__all__ = [
    "chunk_gated_delta_rule",
    "gated_rms_norm",
    "gelu_and_mul",
    "paged_attention",
    "recurrent_gated_delta_rule",
    "recurrent_gated_delta_rule_",
    "reshape_and_cache",
    "rotary_embedding",
    "rotary_embedding_",
    "short_convolution",
    "short_convolution_update",
    "silu_and_mul",
    "skip_layer_norm",
    "skip_rms_norm",
]
