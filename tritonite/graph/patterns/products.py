"""Activations of products with a bias to `aten::_addmm_activation`, which has them in its epilogue.

ATen's operator has relu, and one form of gelu: by tanh on a GPU, the exact one on a CPU. The product is not rounded
before the activation. A product may have been made of more than two dimensions by views.
"""

from __future__ import annotations

from torch import fx

from tritonite import devices
from tritonite.graph.patterns.matching import Call, Capture, Either, aten, is_call, is_tensor, matches, tensor
from tritonite.graph.patterns.rewrite import NotReplaced, Rewriter, like, used_inside

_PRODUCT = Call(
    (aten.addmm.default,),
    (Capture("bias", is_tensor), Capture("a", is_tensor), Capture("b", is_tensor)),
    name="product",
)
_VIEWED = Either((Call((aten.view.default, aten._unsafe_view.default), (_PRODUCT, Capture("shape"))), _PRODUCT))
_RELU = Call((aten.relu.default,), (_VIEWED,))


def _gelu() -> Call:
    return Call((aten.gelu.default,), (_VIEWED, "none" if devices.current.aten == "cpu" else "tanh"))


def addmm_activation(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace relu or gelu of a product with a bias."""
    if not is_call(node, aten.relu.default, aten.gelu.default):
        return None
    for pattern, use_gelu in ((_RELU, False), (_gelu(), True)):
        for match in matches(pattern, node):
            used_inside(match.nodes, [node])
            bias, a = tensor(match["bias"]), tensor(match["a"])
            assert bias is not None and a is not None
            # ATen's epilogue takes a bias that is a vector, and applies no activation without an inner dimension.
            if bias.dim() != 1 or not bias.dtype.is_floating_point or (isinstance(a.shape[1], int) and not a.shape[1]):
                raise NotReplaced
            rewriter.at(node, [value for name, value in match.values.items() if name != "product"])
            new = rewriter.call(
                aten._addmm_activation.default, match["bias"], match["a"], match["b"], use_gelu=use_gelu
            )
            shape = match.get("shape")
            return {node: like(new if shape is None else rewriter.call(aten.view.default, new, shape), node)}
    return None
