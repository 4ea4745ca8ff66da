"""Constants of a graph: their place before all calls, and fake tensors, whose dtypes and shapes other passes read."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor


def describe_constants(module: fx.GraphModule, selected: frozenset[str]) -> None:
    """Move constants before all calls, and give each that is a tensor a fake tensor, as all other nodes have one."""
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and node is not first:
            first.prepend(node)
    values = [node.meta.get("val") for node in module.graph.nodes]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        return
    for node in module.graph.nodes:
        if node.op != "get_attr" or "val" in node.meta or "." in node.target:
            continue
        value: Any = getattr(module, node.target, None)
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            with torch.no_grad():
                node.meta["val"] = mode.from_tensor(value.detach(), static_shapes=True)
