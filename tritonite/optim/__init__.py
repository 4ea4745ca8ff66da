"""Optimisers whose step is one launch for each dtype and device of a parameter group.

- fuse, unfuse: give an optimizer of torch.optim such a step, and take it away
- rule, Optimizer: an optimizer made of a scalar formula
- clip_grad_norm_, clip_grad_value_: clipping of gradients in two passes over memory
- Muon: torch.optim.Muon with such a step, and products of all parameters of one shape in one batch
- rules: formulas of torch.optim's optimisers, and of Lion

A step of a fused AdamW:

1. `fusing.py` collects the parameters with gradients of a group, and has torch's class create missing states.
2. `updates.py` computes bias corrections and other numbers of the step in float64, and calls the rule of the class.
3. `declare.py`: a `Rule` is a scalar formula, and an operator over lists of tensors in PyTorch's dispatcher.
4. `engine/lists` evaluates the formula for all tensors of a dtype in one launch.
"""

from tritonite.optim import rules
from tritonite.optim.classes import Muon, Optimizer
from tritonite.optim.clip import clip_grad_norm_, clip_grad_value_
from tritonite.optim.declare import Rule, rule
from tritonite.optim.fusing import fuse, unfuse

__all__ = ["Muon", "Optimizer", "Rule", "clip_grad_norm_", "clip_grad_value_", "fuse", "rule", "rules", "unfuse"]
