"""Rotary position embedding: pairs of a head's elements, turned by an angle for each position, of query and key alike.

A pair (a, b) becomes (a cos - b sin, b cos + a sin) (Su et al. 2021); its gradient is turned back, by -sin.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import FLOATS, TRITON_DTYPES, opmath
from tritonite.engine.iteration import (
    collapse,
    common_device,
    expand_strides,
    never_overlaps_itself,
    offset_type,
    power_of_2,
)
from tritonite.engine.rows.kernels import strided_offset
from tritonite.errors import Decline, Unsupported
from tritonite.fused.check import check_device, check_floats, check_shape
from tritonite.language.order import wait_for_previous_launch
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn pairs of elements of every head of query and key by their positions' angles, in one launch.

    With R pairs, pair i of a head is its elements i and i + R, or, if `interleaved`, 2 i and 2 i + 1; elements from 2 R
    on are passed through. It is computed in float32 of half types and rounded once. The gradient is the same operator,
    turning back; cos and sin have none.

    Args:
        query: (..., sequence, heads, head size) of float16, bfloat16, float32 or float64, of any strides.
        key: of query's shape but for the number of heads, and of its dtype; or None.
        cos: (sequence, R), or (..., sequence, R) where the dimensions before broadcast to those of query; of any
            floating-point dtype, 2 R being at most the head size.
        sin: of cos' shape and dtype.
        interleaved: whether a pair's elements are next to each other (as in GPT-J), or R apart (as in GPT-NeoX).

    Returns what becomes of query and of key, contiguous and of their shapes and dtypes; None for a key that is None.

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
    """`rotary_embedding` written into query and key, of which what is passed through is not touched.

    The arguments are those of `rotary_embedding`. Query and key may be views of one tensor, such as a product's
    columns, but must share no elements.

    Raises errors.Unsupported as that does, for a query or key whose elements share memory, and, while gradients are
    recorded, for arguments that require one.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    torch.ops.tritonite.rotary_embedding_(query, key, cos, sin, interleaved)


@triton.jit
def _turn(
    source,
    out,
    heads,
    tokens,
    token_mask,
    cosine,
    sine,
    pairs,
    rest,
    strides,
    out_strides,
    COMPUTE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Turn the heads of one tensor at these tokens; `strides` are those of heads and of their elements."""
    token, out_token = tokens
    for first in range(0, heads, HEADS):
        head = (first + tl.arange(0, HEADS)).to(token.dtype)[None, :, None]
        mask = token_mask[:, None, None] & (head < heads)
        base = source + (token[:, None, None] + head * strides[0])
        out_base = out + (out_token[:, None, None] + head * out_strides[0])
        if INTERLEAVED:
            column = tl.arange(0, 2 * PAIRS).to(token.dtype)[None, None, :]
            both = mask & (column < 2 * pairs)
            block = tl.load(base + column * strides[1], mask=both, other=0).to(COMPUTE)
            a, b = tl.split(tl.reshape(block, (block.shape[0], HEADS, PAIRS, 2)))
            turned = tl.join(a * cosine - b * sine, b * cosine + a * sine)
            block = tl.reshape(turned, (block.shape[0], HEADS, 2 * PAIRS))
            tl.store(out_base + column * out_strides[1], block.to(out.dtype.element_ty), mask=both)
        else:
            column = tl.arange(0, PAIRS).to(token.dtype)[None, None, :]
            both = mask & (column < pairs)
            a = tl.load(base + column * strides[1], mask=both, other=0).to(COMPUTE)
            b = tl.load(base + (column + pairs) * strides[1], mask=both, other=0).to(COMPUTE)
            turned = (a * cosine - b * sine).to(out.dtype.element_ty)
            tl.store(out_base + column * out_strides[1], turned, mask=both)
            turned = (b * cosine + a * sine).to(out.dtype.element_ty)
            tl.store(out_base + (column + pairs) * out_strides[1], turned, mask=both)
        if REST > 0:
            column = tl.arange(0, REST).to(token.dtype)[None, None, :]
            both = mask & (column < rest)
            passed = tl.load(base + (column + 2 * pairs) * strides[1], mask=both, other=0)
            tl.store(out_base + (column + 2 * pairs) * out_strides[1], passed, mask=both)


@libentry()
@triton.jit
def rotate(
    sources,
    outs,
    heads,
    cos,
    sin,
    shape,
    token_strides,
    strides,
    n_tokens,
    pairs,
    rest,
    INDEX: tl.constexpr,
    COMPUTE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """A program turns all heads of TOKENS positions, HEADS of each source at a time, which may be the outs themselves.

    `token_strides` are those of the sources, of the outs, of cos and of sin, over the dimensions of `shape`; `strides`
    those of the heads and their elements, of each source and of each out, and of the pairs of cos and of sin.
    """
    wait_for_previous_launch()
    token = tl.program_id(0).to(INDEX) * TOKENS + tl.arange(0, TOKENS)
    token_mask = token < n_tokens
    pair = tl.arange(0, PAIRS).to(INDEX)
    mask = token_mask[:, None] & (pair < pairs)[None, :]
    offset = strided_offset(token, shape, token_strides[2][0])[:, None] + pair[None, :] * strides[2][0]
    cosine = tl.load(cos + offset, mask=mask, other=0).to(COMPUTE)[:, None, :]
    offset = strided_offset(token, shape, token_strides[2][1])[:, None] + pair[None, :] * strides[2][1]
    sine = tl.load(sin + offset, mask=mask, other=0).to(COMPUTE)[:, None, :]
    if INVERSE:
        sine = -sine
    for i in tl.static_range(len(sources)):
        starts = (
            strided_offset(token, shape, token_strides[0][i]),
            strided_offset(token, shape, token_strides[1][i]),
        )
        _turn(
            sources[i],
            outs[i],
            heads[i],
            starts,
            token_mask,
            cosine,
            sine,
            pairs,
            rest,
            strides[0][i],
            strides[1][i],
            COMPUTE,
            HEADS[i],
            PAIRS,
            REST,
            INTERLEAVED,
        )


def _check(query: torch.Tensor, key: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> None:
    check_floats(query=query, cos=cos)
    if query.dim() < 3:
        raise Decline(f"query has the shape {tuple(query.shape)}: it must be (..., sequence, heads, head size)")
    if key is not None:
        heads = key.shape[-2] if key.dim() > 1 else 0
        check_shape("key", key, (*query.shape[:-2], heads, query.shape[-1]), "query's but for the number of heads")
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
        raise Decline(f"cos is of {cos.shape[-1]} pairs: a head of {query.shape[-1]} elements has half as many at most")
    check_device("cos", cos, "query", query)
    check_device("sin", sin, "query", query)


def _rotate(
    sources: tuple[torch.Tensor, ...],
    outs: tuple[torch.Tensor, ...],
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    inverse: bool,
) -> None:
    """Write into `outs`, which may be the `sources` themselves."""
    common_device((*sources, cos, sin), outs)
    some = [i for i, source in enumerate(sources) if source.numel()]
    sources, outs = tuple([sources[i] for i in some]), tuple([outs[i] for i in some])
    if not sources:
        return
    positions, size, pairs = tuple(sources[0].shape[:-2]), sources[0].shape[-1], cos.shape[-1]
    every = [each.stride()[:-2] for each in (*sources, *outs)]
    every += [expand_strides(each.shape[:-1], each.stride()[:-1], positions) for each in (cos, sin)]
    sizes, strides = collapse(positions, every)
    over = [tuple(own) for own in strides]
    n = len(sources)
    in_place = all(source is out for source, out in zip(sources, outs, strict=True))
    # Of half types less at a time, so that more programs wait for memory.
    tile = devices.current.row_elements // (4 if sources[0].dtype.itemsize == 2 else 1)
    n_tokens = math.prod(positions)
    padded = power_of_2(pairs)
    heads = tuple([min(power_of_2(each.shape[-2]), max(1, tile // (2 * padded))) for each in sources])
    tokens = max(1, min(tile // (2 * padded * max(heads)), power_of_2(n_tokens)))
    rest = 0 if in_place else size - 2 * pairs
    rotate[(-(-n_tokens // tokens),)](
        *(sources, outs, tuple([each.shape[-2] for each in sources]), cos, sin, tuple(sizes[:-1])),
        (tuple(over[:n]), tuple(over[n : 2 * n]), tuple(over[2 * n :])),
        (
            tuple([each.stride()[-2:] for each in sources]),
            tuple([each.stride()[-2:] for each in outs]),
            (cos.stride(-1), sin.stride(-1)),
        ),
        *(n_tokens, pairs, rest),
        INDEX=offset_type(*sources, *outs, cos, sin),
        COMPUTE=TRITON_DTYPES[opmath(sources[0].dtype)],
        TOKENS=tokens,
        HEADS=heads,
        PAIRS=padded,
        REST=power_of_2(rest) if rest else 0,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        num_warps=4,
    )


def _save(ctx, inputs, output):
    cos, sin, ctx.interleaved, ctx.inverse = inputs[2:]
    if cos.requires_grad or sin.requires_grad:
        reason = "cos and sin have no gradient: detach them"
        raise Unsupported(name="tritonite::rotary_embedding", reason=reason)
    ctx.save_for_backward(cos, sin)
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad_query, grad_key):
    given = [grad for grad in (grad_query, grad_key) if grad is not None]
    turned = iter(())
    if given:
        cos, sin = ctx.saved_tensors
        first, second = (*given, None)[:2]
        turned = iter(torch.ops.tritonite.rotary_embedding(first, second, cos, sin, ctx.interleaved, not ctx.inverse))
    by_query, by_key = [None if grad is None else next(turned) for grad in (grad_query, grad_key)]
    return by_query, by_key, None, None, None, None


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
    """Pairs of elements turned by their positions' angles, or, if `inverse`, turned back: Su et al. 2021."""
    _check(query, key, cos, sin)
    sources = (query,) if key is None else (query, key)
    outs = tuple([empty(each.shape, each.dtype, each.device) for each in sources])
    _rotate(sources, outs, cos, sin, interleaved, inverse)
    return (*outs, None)[:2]


@library_operator(
    "rotary_embedding_(Tensor(a!) query, Tensor(b!)? key, Tensor cos, Tensor sin, bool interleaved=False) -> ()",
    fake=lambda query, key, cos, sin, interleaved=False: _check(query, key, cos, sin),
    accepts=FLOATS,
    pin=("interleaved",),
)
def rotary_embedding_in_place_host(query, key, cos, sin, interleaved=False):
    """The same, written into query and key."""
    _check(query, key, cos, sin)
    sources = (query,) if key is None else (query, key)
    if not all(never_overlaps_itself(each.shape, each.stride()) for each in sources):
        raise Decline("query or key has elements that share memory: take rotary_embedding, or make it contiguous")
    _rotate(sources, sources, cos, sin, interleaved, False)
    return ()
