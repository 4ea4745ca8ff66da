"""Operators that ATen does not have, for the layers of a transformer.

They run on tensors of the device, record gradients, and are known to torch.compile as `torch.ops.tritonite.*`.
"""

from tritonite import registry
from tritonite.fused.gated import gelu_and_mul, silu_and_mul
from tritonite.fused.grouped import grouped_linear
from tritonite.fused.moe import moe, moe_align, moe_experts, permute, unpermute
from tritonite.fused.norm import add_rms_norm_, layer_norm, rms_norm, skip_layer_norm, skip_rms_norm
from tritonite.fused.paged import paged_attention, reshape_and_cache
from tritonite.fused.rotary import rotary_embedding, rotary_embedding_
from tritonite.fused.router import load_balancing_loss, route, router_z_loss, topk_softmax
from tritonite.install import library

library.register(registry.declarations)

__all__ = [
    "add_rms_norm_",
    "gelu_and_mul",
    "grouped_linear",
    "layer_norm",
    "load_balancing_loss",
    "moe",
    "moe_align",
    "moe_experts",
    "paged_attention",
    "permute",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_",
    "route",
    "router_z_loss",
    "silu_and_mul",
    "skip_layer_norm",
    "skip_rms_norm",
    "topk_softmax",
    "unpermute",
]
