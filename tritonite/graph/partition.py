"""The partition of a joint graph: what the backward pass reads from memory, and what it computes again."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from tritonite.graph.operators import is_view


def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph by PyTorch's min-cut partitioner. Returns (forward graph, backward graph).

    The partitioner would compute pointwise operators again, because other backends fuse them into their consumers. Here
    each is a launch, so only views are computed again, and what checkpointing asks for.
    """
    for node in joint.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload) and not _costs_nothing(node):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    return min_cut_rematerialization_partition(joint, inputs, **options)


def _costs_nothing(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return is_view(node.target) or not isinstance(value, torch.Tensor)
