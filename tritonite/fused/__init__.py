"""Operators that ATen does not have, for the layers of a transformer.

They run on tensors of the device, record gradients, and are known to torch.compile as `torch.ops.tritonite.*`.
"""

from tritonite import registry
from tritonite.fused.attention import attention
from tritonite.fused.convolution import conv_bias_act
from tritonite.fused.cross_entropy import cross_entropy
from tritonite.fused.delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule, recurrent_gated_delta_rule_
from tritonite.fused.distillation import jsd, kl_div, kl_divergence, tv_distance
from tritonite.fused.fp8_linear import fp8_linear
from tritonite.fused.gated import geglu, gelu_and_mul, reglu, relu_and_mul, silu_and_mul, swiglu
from tritonite.fused.gated_norm import gated_rms_norm
from tritonite.fused.grouped import grouped_linear
from tritonite.fused.grpo import GrpoMetrics, linear_grpo
from tritonite.fused.int4 import dequantize_int4, linear_int4, pack_int4
from tritonite.fused.latent import mla_decode
from tritonite.fused.linear_cross_entropy import linear_cross_entropy
from tritonite.fused.linear_distillation import linear_jsd
from tritonite.fused.moe import moe, moe_align, moe_experts, permute, unpermute
from tritonite.fused.norm import add_rms_norm_, layer_norm, rms_norm, skip_layer_norm, skip_rms_norm
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
from tritonite.fused.quantize import quantize, rms_norm_quantize, swiglu_quantize
from tritonite.fused.quantized import linear_fp8, linear_fp8_blocks, linear_int8
from tritonite.fused.rotary import multimodal_rotary_embedding, rotary_embedding, rotary_embedding_
from tritonite.fused.router import load_balancing_loss, route, router_z_loss, topk_softmax
from tritonite.fused.sampling import sample
from tritonite.fused.short_convolution import short_convolution, short_convolution_update
from tritonite.fused.token_log_probabilities import LinearHead
from tritonite.install import library

library.register(registry.declarations)

__all__ = [
    "GrpoMetrics",
    "KtoMetrics",
    "LinearHead",
    "PairMetrics",
    "add_rms_norm_",
    "attention",
    "chunk_gated_delta_rule",
    "conv_bias_act",
    "cross_entropy",
    "dequantize_int4",
    "fp8_linear",
    "gated_rms_norm",
    "geglu",
    "gelu_and_mul",
    "grouped_linear",
    "jsd",
    "kl_div",
    "kl_divergence",
    "layer_norm",
    "linear_cpo",
    "linear_cross_entropy",
    "linear_dpo",
    "linear_fp8",
    "linear_fp8_blocks",
    "linear_grpo",
    "linear_int4",
    "linear_int8",
    "linear_jsd",
    "linear_kto",
    "linear_orpo",
    "linear_simpo",
    "load_balancing_loss",
    "mla_decode",
    "moe",
    "moe_align",
    "moe_experts",
    "multimodal_rotary_embedding",
    "pack_int4",
    "paged_attention",
    "permute",
    "quantize",
    "recurrent_gated_delta_rule",
    "recurrent_gated_delta_rule_",
    "reglu",
    "relu_and_mul",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_quantize",
    "rotary_embedding",
    "rotary_embedding_",
    "route",
    "router_z_loss",
    "sample",
    "short_convolution",
    "short_convolution_update",
    "silu_and_mul",
    "skip_layer_norm",
    "skip_rms_norm",
    "swiglu",
    "swiglu_quantize",
    "topk_softmax",
    "tv_distance",
    "unpermute",
]
