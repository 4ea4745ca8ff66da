"""Rotary position embedding of query and key.

A pair (a, b) becomes (a cos - b sin, b cos + a sin) (Su et al. 2021). Its gradient is rotated back, by -sin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritonite.dtypes import FLOATS
from tritonite.engine.rotary import rotate
from tritonite.errors import Decline, Unsupported
from tritonite.fused.check import check_device, check_floats, check_shape, share_memory
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty

# The coordinates of a position in images and videos: time, height and width.
_PLANES = 3


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate pairs of elements of every head of query and key by the angles of their positions, in one launch.

    With R pairs, pair i of a head has the elements i and i + R, or if `interleaved`, 2 i and 2 i + 1. Elements from 2 R
    on pass through. fp16 and bf16 are computed in float32 and rounded once. The gradient is the same operator, rotating
    back; cos and sin have none.

    Args:
        query: (..., sequence, heads, head size) of float16, bfloat16, float32 or float64, of any strides.
        key: query's shape except the number of heads, and query's dtype; or None.
        cos: (sequence, R), or (..., sequence, R) with leading dimensions that broadcast to those of query; any
            floating-point dtype, with 2 R at most the head size.
        sin: the shape and dtype of cos.
        interleaved: whether the elements of a pair are contiguous (as in GPT-J) or have a stride of R (as in GPT-NeoX).

    Returns the rotated query and key, contiguous and with their shapes and dtypes; None for a key that is None.

    Raises errors.Unsupported for other shapes or dtypes, for tensors on several devices, and for cos or sin that
    require a gradient.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    turned: tuple[torch.Tensor, torch.Tensor | None] = torch.ops.tritonite.rotary_embedding(
        query, key, cos, sin, interleaved
    )
    return turned


def rotary_embedding_(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """Rotate query and key in place, as `rotary_embedding` does. Elements that pass through are not touched.

    The arguments are those of `rotary_embedding`. Query and key may be views of one tensor, such as slices of a QKV
    product, but must share no elements.

    Raises errors.Unsupported as `rotary_embedding` does, for a query or key whose elements share memory, and, while
    gradients are recorded, for arguments that require one.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    torch.ops.tritonite.rotary_embedding_(query, key, cos, sin, interleaved)


def multimodal_rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sections: Sequence[int],
    interleaved: bool = False,
    interleaved_sections: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate pairs as `rotary_embedding` does, by angles of a position's time, height or width, in one launch.

    Pair i turns by cos[p, ..., i] and sin[p, ..., i]. The first sections[0] pairs have p = 0, the next sections[1]
    pairs p = 1, and the last p = 2, as in Qwen2-VL. With `interleaved_sections`, as in Qwen3-VL, pair i has p = i % 3
    if i < 3 * sections[p], else p = 0. The kernel reads the angles where they are. The gradient is the same operator,
    rotating back; cos and sin have none.

    Args:
        query: (..., sequence, heads, head size) of float16, bfloat16, float32 or float64, of any strides.
        key: query's shape except the number of heads, and query's dtype; or None.
        cos: (3, sequence, R), or (3, ..., sequence, R) with dimensions after the first that broadcast to those of
            query; any floating-point dtype, with 2 R at most the head size.
        sin: the shape and dtype of cos.
        sections: pairs that turn by time, height and width; their sum is R.
        interleaved: whether the elements of a pair are contiguous or have a stride of R.
        interleaved_sections: whether pairs turn by time, height and width in turn.

    Returns the rotated query and key, contiguous and with their shapes and dtypes; None for a key that is None.

    Raises errors.Unsupported for other shapes or dtypes, for tensors on several devices, and for cos or sin that
    require a gradient.

    Source: Wang et al. 2024, "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution".
    """
    turned: tuple[torch.Tensor, torch.Tensor | None] = torch.ops.tritonite.multimodal_rotary_embedding(
        query, key, cos, sin, sections, interleaved, interleaved_sections
    )
    return turned


def _check(query: torch.Tensor, key: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Decline arguments that the operators do not serve."""
    check_floats(query=query, cos=cos)
    if query.dim() < 3:
        raise Decline(f"query has the shape {tuple(query.shape)}: it must be (..., sequence, heads, head size)")
    if key is not None:
        heads = key.shape[-2] if key.dim() > 1 else 0
        check_shape("key", key, (*query.shape[:-2], heads, query.shape[-1]), "that of query except the number of heads")
        if key.dtype is not query.dtype:
            raise Decline(f"key is {key.dtype} and query {query.dtype}: give both one dtype")
        check_device("key", key, "query", query)
    check_shape("sin", sin, cos.shape, "the shape of cos")
    if sin.dtype is not cos.dtype:
        raise Decline(f"sin is {sin.dtype} and cos {cos.dtype}: give both one dtype")
    positions = tuple(query.shape[:-2])
    own = tuple(cos.shape[:-1])
    fits = 2 <= cos.dim() < query.dim() and own[-1] == positions[-1]
    if not fits or any(
        size not in (1, wanted) for size, wanted in zip(own, positions[len(positions) - len(own) :], strict=True)
    ):
        raise Decline(
            f"cos has the shape {tuple(cos.shape)}: it must be (sequence, pairs), or broadcast to {positions}"
        )
    if 2 * cos.shape[-1] > query.shape[-1]:
        raise Decline(
            f"cos has {cos.shape[-1]} pairs: a head of {query.shape[-1]} elements has at most {query.shape[-1] // 2}"
        )
    check_device("cos", cos, "query", query)
    check_device("sin", sin, "query", query)


def _check_planes(
    query: torch.Tensor, key: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, sections: Sequence[int]
) -> None:
    """Decline arguments that the operator of three planes of angles does not serve."""
    check_shape("sin", sin, cos.shape, "the shape of cos")
    if cos.dim() < 3 or cos.shape[0] != _PLANES:
        raise Decline(f"cos has the shape {tuple(cos.shape)}: it must be (3, ..., sequence, pairs)")
    if len(sections) != _PLANES or min(sections) < 0 or sum(sections) != cos.shape[-1]:
        raise Decline(f"sections are {list(sections)}: they must be 3 counts whose sum is {cos.shape[-1]}, cos's pairs")
    _check(query, key, cos[0], sin[0])


def _save(ctx, inputs, output):
    cos, sin, *ctx.style, ctx.inverse = inputs[2:]
    if cos.requires_grad or sin.requires_grad:
        reason = "cos and sin have no gradient: detach them"
        name = "multimodal_rotary_embedding" if len(ctx.style) > 1 else "rotary_embedding"
        raise Unsupported(name=f"tritonite::{name}", reason=reason)
    ctx.save_for_backward(cos, sin)
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad_query, grad_key):
    given = [grad for grad in (grad_query, grad_key) if grad is not None]
    turned = iter(())
    if given:
        cos, sin = ctx.saved_tensors
        first, second = (*given, None)[:2]
        library = torch.ops.tritonite
        rotate_back = library.multimodal_rotary_embedding if len(ctx.style) > 1 else library.rotary_embedding
        turned = iter(rotate_back(first, second, cos, sin, *ctx.style, not ctx.inverse))
    by_query, by_key = [None if grad is None else next(turned) for grad in (grad_query, grad_key)]
    return by_query, by_key, None, None, *[None for _ in ctx.style], None


def _fake(query, key, cos, sin, interleaved=False, inverse=False):
    _check(query, key, cos, sin)
    return query.new_empty(query.shape), None if key is None else key.new_empty(key.shape)


@library_operator(
    "rotary_embedding(Tensor query, Tensor? key, Tensor cos, Tensor sin, bool interleaved=False, bool inverse=False)"
    " -> (Tensor, Tensor)",
    fake=_fake,
    accepts=FLOATS,
    save=_save,
    gradient=_gradient,
    leading=("query", "key"),
    pin=("interleaved", "inverse"),
)
def rotary_embedding_host(query, key, cos, sin, interleaved=False, inverse=False):
    """Return query and key with pairs rotated by their positions' angles, or if `inverse`, back: Su et al. 2021."""
    _check(query, key, cos, sin)
    sources = (query,) if key is None else (query, key)
    outs = tuple([empty(each.shape, each.dtype, each.device) for each in sources])
    rotate(sources, outs, cos, sin, interleaved, inverse)
    return (*outs, None)[:2]


@library_operator(
    "rotary_embedding_(Tensor(a!) query, Tensor(b!)? key, Tensor cos, Tensor sin, bool interleaved=False) -> ()",
    fake=lambda query, key, cos, sin, interleaved=False: _check(query, key, cos, sin),
    accepts=FLOATS,
    pin=("interleaved",),
)
def rotary_embedding_in_place_host(query, key, cos, sin, interleaved=False):
    """Rotate query and key in place: Su et al. 2021."""
    _check(query, key, cos, sin)
    sources = (query,) if key is None else (query, key)
    if share_memory(*sources):
        raise Decline("query or key has elements that share memory: call rotary_embedding, or make it contiguous")
    rotate(sources, sources, cos, sin, interleaved, False)
    return ()


def _fake_planes(query, key, cos, sin, sections, interleaved=False, interleaved_sections=False, inverse=False):
    _check_planes(query, key, cos, sin, sections)
    return query.new_empty(query.shape), None if key is None else key.new_empty(key.shape)


@library_operator(
    "multimodal_rotary_embedding(Tensor query, Tensor? key, Tensor cos, Tensor sin, int[] sections,"
    " bool interleaved=False, bool interleaved_sections=False, bool inverse=False) -> (Tensor, Tensor)",
    fake=_fake_planes,
    accepts=FLOATS,
    save=_save,
    gradient=_gradient,
    leading=("query", "key"),
    pin=("sections", "interleaved", "interleaved_sections", "inverse"),
)
def multimodal_rotary_embedding_host(
    query, key, cos, sin, sections, interleaved=False, interleaved_sections=False, inverse=False
):
    """Return query and key with pairs rotated by angles of time, height and width, or if `inverse`, back: Qwen2-VL."""
    _check_planes(query, key, cos, sin, sections)
    sources = (query,) if key is None else (query, key)
    outs = tuple([empty(each.shape, each.dtype, each.device) for each in sources])
    rotate(sources, outs, cos, sin, interleaved, inverse, tuple(sections), interleaved_sections)
    return (*outs, None)[:2]
