"""Norms and norms of sums to `tritonite::rms_norm` and `tritonite::layer_norm`.

A root mean square norm is written out, as in transformers' models and as ATen decomposes `rms_norm` on a CPU. On a GPU
`rms_norm` stays one operator, `aten::_fused_rms_norm`. It has a kernel of its own, as a layer norm has, and both are
only replaced together with the sum that they read. Statistics of rows that a backward pass reads are results, too.
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
_RSTD = Call((aten.rsqrt.default,), (add(_MEAN, Capture("eps", is_number)),), name="rstd")
_NORMED = mul(_X, _RSTD)
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
    # Conversions of x may have other readers, and the gradient reads rstd.
    wide, rstd = match.get("wide"), match["rstd"]
    used_inside(match.nodes, [each for each in (node, wide, rstd) if each is not None])
    results = [rstd, node] if any(user not in match.nodes for user in rstd.users) else [node]

    def replaced(call: fx.Node) -> dict[fx.Node, fx.Node]:
        made = {node: like(rewriter.item(call, 0), node)}
        return made if results == [node] else {**made, rstd: _column(rewriter, call, 2, rstd)}

    terms = _terms(x)
    if terms is not None:
        try:
            rewriter.at(x, (*terms, weight))
            call = rewriter.call(torch.ops.tritonite.rms_norm.default, *terms, weight, eps, offset, casting)
            return {**replaced(call), x: like(rewriter.item(call, 1), x)}
        except NotReplaced:
            pass
    rewriter.at(results[0], (x, weight))
    return replaced(rewriter.call(torch.ops.tritonite.rms_norm.default, x, None, weight, eps, offset, casting))


def _column(rewriter: Rewriter, call: fx.Node, i: int, old: fx.Node) -> fx.Node:
    """Return the item of a call with an element per row as a column, in the place of an old node."""
    return like(rewriter.call(aten.unsqueeze.default, rewriter.item(call, i), -1), old)


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
    if terms is None or value is None or len(shape) != 1:
        return None
    if not (eps is None or is_number(eps)) or value.dtype not in FLOATS:
        return None
    rewriter.at(x, (*terms, weight))
    call = rewriter.call(torch.ops.tritonite.rms_norm.default, *terms, weight, eps, 0.0, "gemma")
    return {**_items(rewriter, node, call), x: like(rewriter.item(call, 1), x)}


def _items(rewriter: Rewriter, node: fx.Node, call: fx.Node) -> dict[fx.Node, fx.Node]:
    """Return the new node of each item of ATen's norm: the normalised sum, or a statistic as a column."""
    normalized = rewriter.item(call, 0)
    return {
        user: _column(rewriter, call, user.args[1] + 1, user) if user.args[1] else like(normalized, user)  # type: ignore[operator]
        for user in node.users
    }


def layer_norm(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace a layer norm of a sum of two tensors. The sum is normalised before it is rounded."""
    if not is_call(node, aten.native_layer_norm.default):
        return None
    x, shape, weight, bias, eps = arguments_of(node)
    terms = _terms(x)
    if terms is None or len(shape) != 1:  # type: ignore[arg-type]
        return None
    rewriter.at(x, (*terms, weight, bias))  # type: ignore[arg-type]
    call = rewriter.call(torch.ops.tritonite.layer_norm.default, *terms, weight, bias, eps)
    return {**_items(rewriter, node, call), x: like(rewriter.item(call, 1), x)}  # type: ignore[dict-item]
