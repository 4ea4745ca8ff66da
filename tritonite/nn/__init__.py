"""Modules of a transformer on Tritonite's fused operators, with the parameter names of the modules that they replace.

- norm.py: `RMSNorm`, `LayerNorm`
- gated.py: `GatedMLP`, and the table of its activations
- rotary.py: `RotaryEmbedding`
- loss.py: `LinearCrossEntropy`
- moe.py: `MoE`
- fp8.py: `FP8Linear`

A `state_dict` of torch.nn.RMSNorm, torch.nn.LayerNorm, or a Llama-like model's norm, MLP, or block of experts loads
into the module here. `tritonite.patch` gives the same operators to a model that exists already.
"""

from tritonite.nn.fp8 import FP8Linear
from tritonite.nn.gated import GatedMLP
from tritonite.nn.loss import LinearCrossEntropy
from tritonite.nn.moe import MoE
from tritonite.nn.norm import LayerNorm, RMSNorm
from tritonite.nn.rotary import RotaryEmbedding

__all__ = ["FP8Linear", "GatedMLP", "LayerNorm", "LinearCrossEntropy", "MoE", "RMSNorm", "RotaryEmbedding"]
