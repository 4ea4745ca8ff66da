"""Attention written out, softmax(query @ key.mT * scale + mask) @ value, to `tritonite::attention`.

Scores and probabilities are then never in memory, and probabilities are rounded by tiles. Heads of key and value that
are repeated for several heads of the query are read once. A row whose mask is -inf for all keys becomes 0, where the
softmax gives nan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tritonite.graph.patterns.matching import (
    Call,
    Capture,
    Converted,
    Either,
    Match,
    add,
    aten,
    is_call,
    is_number,
    is_tensor,
    matches,
    mul,
    tensor,
)
from tritonite.graph.patterns.rewrite import NotReplaced, Rewriter, like, same_shape, used_inside

_VIEWS = (aten.view.default, aten._unsafe_view.default)


def _view(pattern: Any) -> Call:
    return Call(_VIEWS, (pattern, Capture("shape", lambda value: not is_number(value))))


_PRODUCT = Call((aten.bmm.default,), (Capture("q", is_tensor), Capture("k", is_tensor)), name="product")
_SCORES = Call(_VIEWS, (_PRODUCT, Capture("scores shape")), name="viewed")
_SCALED = Either(
    (
        mul(_SCORES, Capture("scale", is_number)),
        Call((aten.div.Tensor, aten.div.Scalar), (_SCORES, Capture("divisor", is_number))),
        _SCORES,
    )
)
_MASKED = Either((add(_SCALED, Capture("mask", is_tensor)), _SCALED))
_SOFTMAX = Converted(
    Call((aten._softmax.default,), (Converted(_MASKED), Capture("dim"), Capture("to float32")), name="softmax")
)
_OUT = Call(_VIEWS, (Call((aten.bmm.default,), (Capture("p", is_tensor), Capture("v", is_tensor))), Capture("shape")))


def attention_written_out(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace attention of operands (batch, heads, rows, head size)."""
    if not is_call(node, *_VIEWS):
        return None
    for outer in matches(_OUT, node):
        probabilities, inner = _unbatched(outer["p"])
        for match in matches(_SOFTMAX, probabilities):
            if match["dim"] in (-1, 3):
                return _replaced(rewriter, node, match, [*outer.nodes, *inner, *match.nodes], outer["v"])
    return None


def _replaced(
    rewriter: Rewriter, node: fx.Node, match: Match, nodes: list[fx.Node], value: fx.Node
) -> dict[fx.Node, fx.Node]:
    q, k, v = (_unbatched(each)[0] for each in (match["q"], match["k"], value))
    used_inside(nodes, [node])
    key = k.args[0] if is_call(k, aten.transpose.int) and {d % 4 for d in k.args[1:]} == {2, 3} else None  # type: ignore[operator]
    scale = match.get("scale")
    if scale is None:
        scale = 1.0 if match.get("divisor") is None else 1.0 / match["divisor"]
    mask = match.get("mask")
    rewriter.at(node, (q, k, v, mask))
    key = rewriter.call(aten.transpose.int, k, 2, 3) if key is None else key
    shared = _unrepeated(key), _unrepeated(v)
    if shared[0] is not None and shared[1] is not None:
        key, v = shared
    call = rewriter.call(torch.ops.tritonite.attention.default, q, key, v, scale=float(scale), attn_mask=mask)
    out = rewriter.item(call, 0)
    for user in node.users:
        # Models copy the result to this very order of memory.
        if is_call(user, aten.transpose.int) and user.args[1:] == (1, 2) and len(node.users) == 1:
            copies = [each for each in user.users if is_call(each, aten.clone.default)]
            if len(copies) == len(user.users) == 1:
                rows = rewriter.call(aten.transpose.int, out, 1, 2)
                return {copies[0]: like(rows, copies[0])}
    return {node: like(rewriter.call(aten.clone.default, out, memory_format=torch.contiguous_format), node)}


def _unrepeated(node: Any) -> fx.Node | None:
    """Return the tensor of which each head is repeated for several heads of the query, or None."""
    if not is_call(node, *_VIEWS):
        return None
    source = node.args[0].args[0] if is_call(node.args[0], aten.clone.default) else node.args[0]
    if not is_call(source, aten.expand.default) or not is_call(source.args[0], aten.unsqueeze.default):
        return None
    heads, dim = source.args[0].args
    before, after, repeated = heads.meta["val"].shape, node.meta["val"].shape, source.meta["val"].shape
    kept = same_shape((before[0], *before[2:]), (after[0], *after[2:])) and len(before) == len(after) == 4
    return heads if dim == 2 and kept and same_shape(before, (*repeated[:2], *repeated[3:])) else None


def _unbatched(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the tensor of four dimensions that an operand of `bmm` is a view or a copy of, and the nodes between."""
    between: list[fx.Node] = []
    batched = tensor(node)
    current: Any = node
    while is_call(current, *_VIEWS, aten.expand.default, aten.clone.default):
        source, own = tensor(current.args[0]), tensor(current)
        if source is None or own is None or batched is None or not same_shape(source.shape[-2:], batched.shape[-2:]):
            break
        if own.dim() == 4 and not same_shape(source.shape, own.shape):
            break
        between.append(current)
        current = current.args[0]
    if tensor(current) is None or current.meta["val"].dim() != 4:
        raise NotReplaced
    return current, between
