"""Convolutions with a residual and an activation to `tritonite::conv_bias_act`, which has both in its last step.

The result is rounded once, after the activation. A convolution alone has a kernel of its own, which adds the bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tritonite.graph.patterns.matching import (
    Call,
    Capture,
    Either,
    Match,
    add,
    aten,
    is_call,
    is_tensor,
    matches,
    tensor,
)
from tritonite.graph.patterns.rewrite import NotReplaced, Rewriter, like, same_shape, used_inside

_STEPS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
_CONVOLUTION = Call(
    (aten.convolution.default,),
    (
        Capture("input", is_tensor),
        Capture("weight", is_tensor),
        Capture("bias", lambda value: value is None or is_tensor(value)),
        *(Capture(name, lambda value: not isinstance(value, fx.Node)) for name in _STEPS),
    ),
    name="convolution",
)
_SUM = add(_CONVOLUTION, Capture("residual", is_tensor))
_OPERAND = Either((_SUM, _CONVOLUTION))
# The activation of each pattern, as `tritonite.fused.conv_bias_act` names it.
_PATTERNS: tuple[tuple[Any, str | None], ...] = (
    (Call((aten.relu.default,), (_OPERAND,)), "relu"),
    (Call((aten.hardtanh.default,), (_OPERAND, 0, 6)), "relu6"),
    (Call((aten.sigmoid.default,), (_OPERAND,)), "sigmoid"),
    (Call((aten.tanh.default,), (_OPERAND,)), "tanh"),
    (Call((aten.silu.default,), (_OPERAND,)), "silu"),
    (Call((aten.gelu.default,), (_OPERAND, "none")), "gelu"),
    (Call((aten.gelu.default,), (_OPERAND, "tanh")), "gelu_tanh"),
    (Call((aten.hardswish.default,), (_OPERAND,)), "hardswish"),
    (_SUM, None),
)
_LAST = tuple({overload for pattern, _ in _PATTERNS for overload in pattern.overloads})


def conv_bias_act(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace the activation of a convolution, or of a convolution and a residual, or the sum of these two."""
    if not is_call(node, *_LAST):
        return None
    for pattern, activation in _PATTERNS:
        for match in matches(pattern, node):
            try:
                return _replaced(rewriter, node, match, activation)
            except NotReplaced:
                continue
    return None


def _replaced(rewriter: Rewriter, node: fx.Node, match: Match, activation: str | None) -> dict[fx.Node, fx.Node]:
    own, residual = tensor(match["convolution"]), tensor(match.get("residual"))
    weight = tensor(match["weight"])
    assert own is not None and weight is not None
    if residual is not None and (residual.dtype is not own.dtype or not same_shape(residual.shape, own.shape)):
        raise NotReplaced
    used_inside(match.nodes, [node])
    tensors = [match["input"], match["weight"], match["bias"], match.get("residual")]
    rewriter.at(node, tensors)
    stride, padding, dilation, transposed, output_padding, groups = (match[name] for name in _STEPS)
    # ATen takes one number for all dimensions.
    each = [_for_each(numbers, weight.dim() - 2) for numbers in (stride, padding, dilation, output_padding)]
    call = rewriter.call(
        torch.ops.tritonite.conv_bias_act.default,
        *(*tensors, activation, *each[:3], transposed, each[3], groups, False),
    )
    return {node: like(rewriter.item(call, 0), node)}


def _for_each(numbers: Any, dims: int) -> list[int]:
    """Return a number for each dimension. Raises NotReplaced for numbers that change from call to call."""
    if any(not isinstance(number, int) for number in numbers):
        raise NotReplaced
    return list(numbers) * (dims if len(numbers) == 1 else 1)
