"""Gradients of norms to `tritonite::rms_norm_backward` and `tritonite::layer_norm_backward`, in graphs of training.

The gradient of a root mean square norm is written out, as autograd differentiates the norm's operators. A layer norm,
and `rms_norm` on a GPU, have one operator for their gradients. It has a kernel of its own, and is only replaced
together with the addition of the gradient that comes by a residual connection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tritonite.dtypes import FLOATS, opmath
from tritonite.graph.patterns.matching import (
    Call,
    Capture,
    Converted,
    Either,
    Match,
    add,
    arguments_of,
    aten,
    conversion_source,
    is_call,
    is_tensor,
    matches,
    mul,
    tensor,
)
from tritonite.graph.patterns.rewrite import NotReplaced, Rewriter, like, same_shape, used_inside


def _is_vector(value: Any) -> bool:
    found = tensor(value)
    return found is not None and found.dim() == 1


_X, _RSTD = Converted(Capture("x", is_tensor), "wide"), Capture("rstd", is_tensor)
_GRAD, _WEIGHT = Capture("grad", is_tensor), Capture("weight", _is_vector)
# "inner", the gradient of the loss by the normalised x, and the weight's offset.
_INNER = (
    (Converted(mul(Converted(_GRAD), add(Converted(_WEIGHT), 1))), 1.0),
    (Converted(mul(Converted(_GRAD), Converted(_WEIGHT))), 0.0),
    (Converted(_GRAD), 0.0),
)
# x reaches the loss by rstd, too: d rstd / d mean = -rstd^3 / 2, and d mean / d x = 2 x / N.
_SUM = Call((aten.sum.dim_IntList,), (mul(Capture("inner", is_tensor), _X), Capture("dims"), True))
_BY_MEAN = mul(mul(_SUM, -0.5), Call((aten.pow.Tensor_Scalar,), (Capture("kept", is_tensor), 3)))
_BY_SQUARE = Call((aten.div.Scalar,), (Call((aten.expand.default,), (_BY_MEAN, Capture("shape"))), Capture("count")))
_BY_RSTD = mul(_BY_SQUARE, mul(Call((aten.pow.Tensor_Scalar,), (_X, 1)), 2))
_DIRECT = mul(Capture("inner", is_tensor), _RSTD)
# The gradient by x: the sum of both. Autograd adds a residual connection's gradient to the one that it computes first.
_OTHER = Capture("other", is_tensor)
_BY_X = (
    Converted(add(_DIRECT, _BY_RSTD)),
    add(add(_OTHER, _DIRECT), _BY_RSTD),
    add(add(_OTHER, _BY_RSTD), _DIRECT),
)
_BY_WEIGHT = Call(
    (aten.view.default,),
    (
        Call(
            (aten.sum.dim_IntList,),
            (mul(Converted(_GRAD), Converted(mul(_X, _RSTD))), Capture("leading"), True),
        ),
        Capture("vector"),
    ),
)


def rms_norm_backward(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace the gradients of a root mean square norm that are written out, by x and by the weight."""
    if not is_call(node, aten.add.Tensor, aten._to_copy.default, torch.ops.prims.convert_element_type.default):
        return None
    for match in matches(Either(_BY_X), node):
        for pattern, offset in _INNER:
            for inner in matches(pattern, match["inner"]):
                if _is_gradient(match, inner, node):
                    return _gradients(rewriter, node, match, inner, offset)
    return None


def _is_gradient(match: Match, inner: Match, node: fx.Node) -> bool:
    """Return whether dtypes and dimensions are those of the gradient of a norm of rows."""
    x, grad, rstd, by_x = (tensor(value) for value in (match["x"], inner["grad"], match["rstd"], node))
    assert x is not None and grad is not None and rstd is not None and by_x is not None
    if x.dtype not in FLOATS or x.dim() < 2 or list(match["dims"]) not in ([-1], [x.dim() - 1]):
        return False
    if grad.dtype is not x.dtype or by_x.dtype is not x.dtype or rstd.dtype is not opmath(x.dtype):
        return False
    if not same_shape(grad.shape, x.shape) or not same_shape(rstd.shape, (*x.shape[:-1], 1)):
        return False
    weight = tensor(inner.get("weight"))
    if weight is not None and not same_shape(weight.shape, x.shape[-1:]):
        return False
    # A symbolic count is a node of the graph.
    if type(match["count"]) is not int or not same_shape((match["count"],), x.shape[-1:]):
        return False
    return _source_of_detached(match["kept"]) is match["rstd"]


def _source_of_detached(value: Any) -> Any:
    """Return the value behind any number of calls of `detach`, by which autograd keeps a result for its gradient."""
    while is_call(value, aten.detach.default):
        value = value.args[0]
    return value


def _gradients(
    rewriter: Rewriter, node: fx.Node, match: Match, inner: Match, offset: float
) -> dict[fx.Node, fx.Node] | None:
    x, rstd, grad, weight = match["x"], match["rstd"], inner["grad"], inner.get("weight")
    # The forward pass reads the converted x, too.
    wide = match.get("wide")
    used_inside(match.nodes, [node] if wide is None else [node, wide])
    if not all(user in match.nodes for user in match["inner"].users):
        return None
    by_weight = None if weight is None else _gradient_of_weight(x, rstd, grad, weight)
    others = [] if by_weight is None else [by_weight]

    def replaced(result: fx.Node, grad_total: fx.Node | None) -> dict[fx.Node, fx.Node]:
        rewriter.at(rewriter.first((result, *others)), (grad, grad_total, x, rstd, weight))
        rows = rewriter.call(aten.squeeze.dim, rstd, -1)
        arguments = (grad, grad_total, x, rows, weight, by_weight is not None, offset)
        call = rewriter.call(torch.ops.tritonite.rms_norm_backward.default, *arguments)
        made = {result: like(rewriter.item(call, 0), result)}
        return made if by_weight is None else {**made, by_weight: like(rewriter.item(call, 1), by_weight)}

    other = match.get("other")
    return _with_residual(node, replaced) if other is None else replaced(node, other)


def _gradient_of_weight(x: fx.Node, rstd: fx.Node, grad: fx.Node, weight: fx.Node) -> fx.Node | None:
    """Return the node of the weight's gradient in the weight's dtype. None if nothing needs the gradient."""
    value, given = tensor(weight), tensor(x)
    assert value is not None and given is not None
    for source in (grad, *[user for user in grad.users if conversion_source(user) is grad]):
        products = [user for user in source.users if is_call(user, aten.mul.Tensor)]
        views = [view for product in products for total in product.users for view in total.users]
        for view in views:
            for match in matches(_BY_WEIGHT, view):
                if match["x"] is not x or match["rstd"] is not rstd or match["grad"] is not grad:
                    continue
                if list(match["leading"]) != list(range(given.dim() - 1)):
                    continue
                (first, *more) = view.users or (view,)
                converted = not more and conversion_source(first) is view
                found = first if converted else view
                if found.meta["val"].dtype is value.dtype:
                    return found
    return None


def _with_residual(node: fx.Node, replaced: Any) -> dict[fx.Node, fx.Node]:
    """Return `replaced(sum, gradient)` for the sum of a node and a gradient by a residual connection.

    Without such a sum, or if it cannot be replaced, return `replaced(node, None)`.
    """
    (total, *more) = node.users or (node,)
    if not more and is_call(total, aten.add.Tensor):
        for match in matches(add(Capture("own", lambda value: value is node), Capture("other", is_tensor)), total):
            try:
                return replaced(total, match["other"])
            except NotReplaced:
                break
    return replaced(node, None)


def norm_backward_of_sum(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace ATen's gradient of a layer norm or `rms_norm`, and the sum with a gradient by a residual connection."""
    if not is_call(node, aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default):
        return None
    grad, x, shape, *statistics, weight = arguments_of(node)[:-1]
    bias = None
    if node.target is aten.native_layer_norm_backward.default:
        *statistics, weight, bias = (*statistics, weight)
    value, items = tensor(x), {user.args[1]: user for user in node.users}
    if value is None or len(shape) != 1 or 0 not in items or len(items) < len(node.users):
        return None
    if any(each.meta["val"].dtype is not opmath(value.dtype) for each in statistics):
        return None
    wanted = arguments_of(node)[-1]

    def replaced(result: fx.Node, grad_total: fx.Node | None) -> dict[fx.Node, fx.Node]:
        if grad_total is None:
            raise NotReplaced
        olds = {**items, 0: result}
        rewriter.at(rewriter.first(olds.values()), (grad, grad_total, x, *statistics, weight, bias))
        rows = [rewriter.call(aten.squeeze.dim, each, -1) for each in statistics]
        if len(rows) == 1:
            arguments = (grad, grad_total, x, *rows, weight, wanted[1])
            call = rewriter.call(torch.ops.tritonite.rms_norm_backward.default, *arguments)
        else:
            arguments = (grad, grad_total, x, *rows, weight, bias, *wanted[1:])
            call = rewriter.call(torch.ops.tritonite.layer_norm_backward.default, *arguments)
        return {old: like(rewriter.item(call, i), old) for i, old in olds.items()}

    return _with_residual(items[0], replaced)
