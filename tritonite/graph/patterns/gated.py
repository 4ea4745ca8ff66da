"""Products with an activation to `tritonite::silu_and_mul` and its kind, in graphs of inference.

The activation is not rounded before the product.
"""

from __future__ import annotations

import torch
from torch import fx

from tritonite.graph.patterns.matching import Call, Capture, aten, is_call, is_tensor, matches, mul, tensor
from tritonite.graph.patterns.rewrite import Rewriter, like, same_shape, used_inside

_X, _Y = Capture("x", is_tensor), Capture("y", is_tensor)
_SILU = mul(Call((aten.silu.default,), (_X,)), _Y)
_RELU = mul(Call((aten.relu.default,), (_X,)), _Y)
_GELU = mul(Call((aten.gelu.default,), (_X, Capture("approximate"))), _Y)


def gated_activation(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace activation(x) * y, for two tensors of one shape and dtype."""
    if not is_call(node, aten.mul.Tensor):
        return None
    operators = torch.ops.tritonite
    for pattern, operator in (
        (_SILU, operators.silu_and_mul.default),
        (_RELU, operators.relu_and_mul.default),
        (_GELU, operators.gelu_and_mul.default),
    ):
        for match in matches(pattern, node):
            x, y = tensor(match["x"]), tensor(match["y"])
            assert x is not None and y is not None
            if x.dtype is not y.dtype or not same_shape(x.shape, y.shape):
                continue
            used_inside(match.nodes, [node])
            rewriter.at(node, (match["x"], match["y"]))
            statics = () if match.get("approximate") is None else (match["approximate"],)
            return {node: like(rewriter.call(operator, match["x"], match["y"], *statics), node)}
    return None
