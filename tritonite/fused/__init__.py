"""Operators that ATen does not have, for the layers of a transformer.

They run on tensors of the device, record gradients, and are known to torch.compile as `torch.ops.tritonite.*`.
"""

from tritonite import registry
from tritonite.fused.fp8_linear import fp8_linear
from tritonite.fused.gated import gelu_and_mul, silu_and_mul
from tritonite.fused.int4 import dequantize_int4, linear_int4, pack_int4
from tritonite.fused.norm import skip_layer_norm, skip_rms_norm
from tritonite.fused.paged import paged_attention, reshape_and_cache
from tritonite.fused.quantized import linear_fp8, linear_fp8_blocks, linear_int8
from tritonite.fused.rotary import rotary_embedding, rotary_embedding_
from tritonite.install import library

library.register(registry.declarations)

__all__ = [
    "dequantize_int4",
    "fp8_linear",
    "gelu_and_mul",
    "linear_fp8",
    "linear_fp8_blocks",
    "linear_int4",
    "linear_int8",
    "pack_int4",
    "paged_attention",
    "reshape_and_cache",
    "rotary_embedding",
    "rotary_embedding_",
    "silu_and_mul",
    "skip_layer_norm",
    "skip_rms_norm",
]
