"""Operators that ATen does not have, for the layers of a transformer.

They run on tensors of the device, record gradients, and are known to torch.compile as `torch.ops.tritonite.*`.
"""

from tritonite import registry
from tritonite.fused.cross_entropy import cross_entropy
from tritonite.fused.fp8_linear import fp8_linear
from tritonite.fused.gated import geglu, gelu_and_mul, reglu, relu_and_mul, silu_and_mul, swiglu
from tritonite.fused.grouped import grouped_linear
from tritonite.fused.int4 import dequantize_int4, linear_int4, pack_int4
from tritonite.fused.linear_cross_entropy import linear_cross_entropy
from tritonite.fused.moe import moe, moe_align, moe_experts, permute, unpermute
from tritonite.fused.norm import add_rms_norm_, layer_norm, rms_norm, skip_layer_norm, skip_rms_norm
from tritonite.fused.paged import paged_attention, reshape_and_cache
from tritonite.fused.quantize import quantize, rms_norm_quantize, swiglu_quantize
from tritonite.fused.quantized import linear_fp8, linear_fp8_blocks, linear_int8
from tritonite.fused.rotary import multimodal_rotary_embedding, rotary_embedding, rotary_embedding_
from tritonite.fused.router import load_balancing_loss, route, router_z_loss, topk_softmax
from tritonite.install import library

library.register(registry.declarations)

__all__ = [
    "add_rms_norm_",
    "cross_entropy",
    "dequantize_int4",
    "fp8_linear",
    "geglu",
    "gelu_and_mul",
    "grouped_linear",
    "layer_norm",
    "linear_cross_entropy",
    "linear_fp8",
    "linear_fp8_blocks",
    "linear_int4",
    "linear_int8",
    "load_balancing_loss",
    "moe",
    "moe_align",
    "moe_experts",
    "multimodal_rotary_embedding",
    "pack_int4",
    "paged_attention",
    "permute",
    "quantize",
    "reglu",
    "relu_and_mul",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_quantize",
    "rotary_embedding",
    "rotary_embedding_",
    "route",
    "router_z_loss",
    "silu_and_mul",
    "skip_layer_norm",
    "skip_rms_norm",
    "swiglu",
    "swiglu_quantize",
    "topk_softmax",
    "unpermute",
]
