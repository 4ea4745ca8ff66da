"""Patterns of ATen's operators, each a function beside the fused operator that it becomes.

They match in graphs after AOTAutograd and without decompositions, before the remaining pointwise operators become
programs. Most need intermediate values that nothing else reads, as in graphs of inference. A pattern checks shapes,
dtypes and strides by the fake tensors in `node.meta["val"]`, and the fused operator's own fake function decides what is
served. Results differ within the resolution of the dtype, where the fused operator rounds fewer intermediate values.

- norms.py: root mean square norms, and norms of sums
- norm_gradients.py: gradients of norms
- gated.py: products with an activation
- products.py: products with a bias and an activation
- convolution.py: convolutions with a bias, a residual and an activation
- rotary.py: rotary position embedding
- losses.py: cross entropy
- attention.py: attention written out
- matching.py, rewrite.py: expressions in graphs, and their replacement
"""

from __future__ import annotations

from torch import fx

import tritonite.fused  # noqa: F401 - registers its operators
from tritonite.graph.patterns.attention import attention_written_out
from tritonite.graph.patterns.convolution import conv_bias_act
from tritonite.graph.patterns.gated import gated_activation
from tritonite.graph.patterns.losses import cross_entropy
from tritonite.graph.patterns.norm_gradients import norm_backward_of_sum, rms_norm_backward
from tritonite.graph.patterns.norms import layer_norm, rms_norm, rms_norm_of_sum
from tritonite.graph.patterns.products import addmm_activation
from tritonite.graph.patterns.rewrite import Rewriter, Rule
from tritonite.graph.patterns.rotary import rotary_embedding

RULES: tuple[Rule, ...] = (
    attention_written_out,
    cross_entropy,
    rms_norm,
    rms_norm_of_sum,
    layer_norm,
    rms_norm_backward,
    norm_backward_of_sum,
    rotary_embedding,
    addmm_activation,
    conv_bias_act,
    gated_activation,
)
# Rules for a joint graph of both passes. The last nodes come first, so a gradient is replaced before its norm, whose
# intermediate values only the gradient reads. The separate graphs would keep these in memory.
JOINT_RULES: tuple[Rule, ...] = (rms_norm, rms_norm_backward)


def fuse_patterns(
    module: fx.GraphModule, selected: frozenset[str] | None = None, rules: tuple[Rule, ...] = RULES
) -> None:
    """Replace every match of a rule by its fused operator, if all operators that it replaces are in `selected`."""
    if Rewriter(module.graph, selected).apply(rules):
        module.recompile()
