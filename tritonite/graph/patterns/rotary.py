"""Rotary position embedding, as transformers' models write it, to `tritonite::rotary_embedding`.

`q * cos + rotate_half(q) * sin` becomes one call where the graph itself shows that the two halves of cos are equal:
where it concatenates the angles with themselves. Products and the sum are not rounded before the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tritonite.graph.patterns.matching import (
    Call,
    Capture,
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
from tritonite.graph.patterns.rewrite import NotReplaced, Rewriter, is_used_inside, like, same_shape

_Q = Capture("q", is_tensor)
_ANGLES = [Call((aten.unsqueeze.default,), (Capture(name, is_tensor), 1)) for name in ("cos", "sin")]
_TURNED = Call((aten.cat.default,), (Capture("halves"), Capture("dim")), name="turned")
_EMBEDDING = add(mul(_Q, _ANGLES[0]), mul(_TURNED, _ANGLES[1]))


@dataclass(frozen=True)
class _Embedding:
    """The embedding of one tensor (batch, heads, sequence, head size) by angles (batch, sequence, head size)."""

    result: fx.Node
    states: fx.Node
    cos: fx.Node
    sin: fx.Node
    angles: fx.Node

    def fits(self, other: _Embedding) -> bool:
        """Return whether one call can turn both tensors."""
        a, b = self.states.meta["val"], other.states.meta["val"]
        same = self.cos is other.cos and self.sin is other.sin and a.dtype is b.dtype
        return same and same_shape((a.shape[0], *a.shape[2:]), (b.shape[0], *b.shape[2:]))


def rotary_embedding(rewriter: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Replace the embeddings of a query and a key, or of one of them."""
    own = _embedding_of(node)
    if own is None:
        return None
    sums = [each for product in own.angles.users for each in product.users if each is not node]
    others = [other for other in map(_embedding_of, dict.fromkeys(sums)) if other is not None and own.fits(other)]
    for pair in (*[(other, own) for other in others], (own,)):
        try:
            return _replaced(rewriter, pair)
        except NotReplaced:
            continue
    return None


def _replaced(rewriter: Rewriter, pair: Sequence[_Embedding]) -> dict[fx.Node, fx.Node]:
    first = rewriter.first([own.result for own in pair])
    states, (cos, sin) = [own.states for own in pair], (pair[0].cos, pair[0].sin)
    rewriter.at(first, (*states, cos, sin))
    pairs = cos.meta["val"].shape[-1] // 2
    cos, sin = (rewriter.call(aten.slice.Tensor, each, 2, 0, pairs) for each in (cos, sin))
    rows = [_by_rows(rewriter, each) for each in states]
    call = rewriter.call(torch.ops.tritonite.rotary_embedding.default, *rows, *(None,) * (2 - len(rows)), cos, sin)
    return {
        own.result: like(rewriter.call(aten.transpose.int, rewriter.item(call, i), 1, 2), own.result)
        for i, own in enumerate(pair)
    }


def _by_rows(rewriter: Rewriter, states: fx.Node) -> Any:
    """Return (batch, sequence, heads, head size) of states whose heads come before the sequence."""
    if is_call(states, aten.transpose.int) and states.args[1:] == (1, 2):
        return states.args[0]
    return rewriter.call(aten.transpose.int, states, 1, 2)


def _embedding_of(node: fx.Node) -> _Embedding | None:
    """Return the embedding that a sum computes, or None."""
    if not is_call(node, aten.add.Tensor):
        return None
    for match in matches(_EMBEDDING, node):
        q, cos, sin = match["q"], match["cos"], match["sin"]
        inner = _rotated(match["halves"], q)
        value, angles = tensor(q), tensor(cos)
        assert value is not None and angles is not None
        if inner is None or value.dim() != 4 or match["dim"] not in (-1, 3) or angles.dim() != 3:
            continue
        if not (_repeats(cos) and _repeats(sin)) or value.shape[-1] != angles.shape[-1]:
            continue
        unsqueezed = [each for each in match.nodes if is_call(each, aten.unsqueeze.default)]
        if is_used_inside({*match.nodes, *inner}, [node, *unsqueezed]):
            return _Embedding(node, q, cos, sin, next(each for each in unsqueezed if each.args[0] is cos))
    return None


def _rotated(halves: Any, q: fx.Node) -> list[fx.Node] | None:
    """Return the nodes of the halves (-q2, q1) of a tensor (q1, q2), or None for other halves."""
    if not isinstance(halves, (list, tuple)) or len(halves) != 2 or not is_call(halves[0], aten.neg.default):
        return None
    size = q.meta["val"].shape[-1]
    second, first = halves[0].args[0], halves[1]
    if not isinstance(size, int) or size % 2 or not all(is_call(each, aten.slice.Tensor) for each in (first, second)):
        return None
    ends = [_range(each, q, size) for each in (first, second)]
    return [halves[0], first, second] if ends == [(0, size // 2), (size // 2, size)] else None


def _range(part: fx.Node, q: fx.Node, size: int) -> tuple[int, int] | None:
    """Return the start and the end of a slice of the last dimension, or None for another slice."""
    source, dim, start, end, step = arguments_of(part)
    if source is not q or dim not in (-1, 3) or step != 1 or not isinstance(start, int | None):
        return None
    return start or 0, size if end is None or (isinstance(end, int) and end >= size) else end  # type: ignore[return-value]


def _repeats(node: Any) -> bool:
    """Return whether both halves of the last dimension are equal.

    They are for pointwise functions of a concatenation of angles with themselves.
    """
    while isinstance(node, fx.Node):
        if is_call(node, aten.cat.default):
            parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
            rank = node.meta["val"].dim()
            return len(parts) == 2 and parts[0] is parts[1] and dim in (-1, rank - 1)  # type: ignore[arg-type]
        one = is_call(node, aten.cos.default, aten.sin.default, aten._to_copy.default)
        scaled = is_call(node, aten.mul.Tensor, aten.mul.Scalar) and is_number(node.args[1])
        if not one and not scaled:
            return False
        node = node.args[0]
    return False
