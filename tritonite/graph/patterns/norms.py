"""Norms and norms of sums to `tritonite::rms_norm` and `tritonite::layer_norm`, in graphs of inference.

A root mean square norm is written out, as in transformers' models and as ATen decomposes `rms_norm` on a CPU. On a GPU
`rms_norm` stays one operator, `aten::_fused_rms_norm`. It has a kernel of its own, as a layer norm has, and both are
only replaced together with the sum that they read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tritonite.dtypes import FLOATS
from tritonite.graph.patterns.matching import (
    Call,
    Capture,
    Converted,
    Either,
    Match,
    add,
    arguments_of,
    aten,
    is_call,
    is_number,
    is_tensor,
    matches,
    mul,
    tensor,
)
from tritonite.graph.patterns.rewrite import NotReplaced, Rewriter, like, same_shape, used_inside

_X = Converted(Capture("x", is_tensor), "wide")
_SQUARE = Either((Call((aten.pow.Tensor_Scalar,), (_X, 2)), mul(_X, _X)))
_MEAN = Call((aten.mean.dim,), (_SQUARE, Capture("dims"), True))
_NORMED = mul(_X, Call((aten.rsqrt.default,), (add(_MEAN, Capture("eps", is_number)),)))
_WEIGHT = Capture("weight", is_tensor)
# The product of the weight and the normalised x: rounded before the product, and rounded after it.
_PATTERNS = (
    (Converted(mul(add(Converted(_WEIGHT), 1), _NORMED), "result"), "gemma", 1.0),
    (mul(_WEIGHT, Converted(_NORMED, "rounded")), "llama", 0.0),
    (Converted(mul(_WEIGHT, _NORMED), "result"), "gemma", 0.0),
    (Converted(_NORMED, "result"), "gemma", 0.0),
)


def rms_norm(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace a root mean square norm, and the sum that it reads."""
    if not is_call(node, aten.mul.Tensor, aten._to_copy.default, torch.ops.prims.convert_element_type.default):
        return None
    for pattern, casting, offset in _PATTERNS:
        for match in matches(pattern, node):
            if _is_norm(match, casting):
                return _norm(rewriter, node, match, casting, offset)
    return None


def _is_norm(match: Match, casting: str) -> bool:
    """Return whether dtypes and dimensions are those of a norm of rows, computed in float32 at least."""
    x, weight = tensor(match["x"]), tensor(match.get("weight"))
    assert x is not None
    if x.dtype not in FLOATS or x.dim() < 1 or list(match["dims"]) not in ([-1], [x.dim() - 1]):
        return False
    wide = tensor(match.get("wide"))
    if x.dtype.itemsize == 2 and (wide is None or wide.dtype is not torch.float32):
        return False
    if x.dtype.itemsize > 2 and wide is not None:
        return False
    rounded = tensor(match.get("rounded"))
    if casting == "llama" and x.dtype.itemsize == 2 and (rounded is None or rounded.dtype is not x.dtype):
        return False
    return weight is None or same_shape(weight.shape, x.shape[-1:])


def _norm(rewriter: Rewriter, node: fx.Node, match: Match, casting: str, offset: float) -> dict[fx.Node, fx.Node]:
    x, weight, eps = match["x"], match.get("weight"), float(match["eps"])
    # Conversions of x may have other readers.
    wide = match.get("wide")
    used_inside(match.nodes, [node] if wide is None else [node, wide])
    terms = _terms(x)
    if terms is not None:
        try:
            rewriter.at(x, (*terms, weight))
            call = rewriter.call(torch.ops.tritonite.rms_norm.default, *terms, weight, eps, offset, casting)
            return {node: like(rewriter.item(call, 0), node), x: like(rewriter.item(call, 1), x)}
        except NotReplaced:
            pass
    rewriter.at(node, (x, weight))
    call = rewriter.call(torch.ops.tritonite.rms_norm.default, x, None, weight, eps, offset, casting)
    return {node: like(rewriter.item(call, 0), node)}


def _terms(x: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return the terms of a sum of two tensors of one shape and dtype, else None."""
    for match in matches(Call((aten.add.Tensor,), (Capture("a", is_tensor), Capture("b", is_tensor))), x):
        a, b = tensor(match["a"]), tensor(match["b"])
        assert a is not None and b is not None
        if a.dtype is b.dtype and same_shape(a.shape, b.shape):
            return match["a"], match["b"]
    return None


def rms_norm_of_sum(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace `aten::_fused_rms_norm` of a sum of two tensors. A norm alone has a kernel of its own."""
    if not is_call(node, aten._fused_rms_norm.default):
        return None
    x, shape, weight, eps = arguments_of(node)
    terms, value = _terms(x), tensor(x)
    # The other result is read by a backward pass.
    if terms is None or value is None or len(shape) != 1 or any(user.args[1] != 0 for user in node.users):
        return None
    if not (eps is None or is_number(eps)) or value.dtype not in FLOATS:
        return None
    rewriter.at(x, (*terms, weight))
    call = rewriter.call(torch.ops.tritonite.rms_norm.default, *terms, weight, eps, 0.0, "gemma")
    normalized = rewriter.item(call, 0)
    made = {user: like(normalized, user) for user in node.users}
    return {**made, x: like(rewriter.item(call, 1), x)}


def layer_norm(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace a layer norm of a sum of two tensors. The sum is normalised before it is rounded."""
    if not is_call(node, aten.native_layer_norm.default):
        return None
    x, shape, weight, bias, eps = arguments_of(node)
    terms = _terms(x)
    # The other results are read by a backward pass.
    if terms is None or len(shape) != 1 or any(user.args[1] != 0 for user in node.users):  # type: ignore[arg-type]
        return None
    rewriter.at(x, (*terms, weight, bias))  # type: ignore[arg-type]
    call = rewriter.call(torch.ops.tritonite.layer_norm.default, *terms, weight, bias, eps)
    normalized = rewriter.item(call, 0)
    made = {user: like(normalized, user) for user in node.users}
    return {**made, x: like(rewriter.item(call, 1), x)}  # type: ignore[dict-item]
