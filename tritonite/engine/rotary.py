"""Rotary position embedding: rotates pairs of a head's elements by the angle of their position.

A pair (a, b) becomes (a cos - b sin, b cos + a sin) (Su et al. 2021). Its gradient is rotated back, by -sin. `rotate`
is the host function. The kernel `rotate_heads` loads the angles of a position once for all heads of query and key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import collapse, common_device, expand_strides, offset_type, power_of_2
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class _RotaryMeta:
    """The compile-time parameters of `rotate_heads`.

    A program handles `tokens` positions, and `heads[i]` heads of operand i at a time. `pairs` and `rest` are the pairs
    of a head and its elements that pass through, rounded up to powers of 2; `rest` is 0 if there are none. The elements
    of a pair are contiguous if `interleaved`. With `inverse`, pairs rotate back.

    With `sections`, angles have a plane for each coordinate of a position: time, height and width. `sections` are the
    pairs that turn by each of the planes: the first pairs by the first plane, and so on. If `interleaved_sections`,
    pairs turn by the planes in turn, as far as a plane's section reaches, and the others by the first plane.
    """

    index: Any
    compute: Any
    tokens: int
    heads: tuple[int, ...]
    pairs: int
    rest: int
    interleaved: bool
    inverse: bool
    sections: tuple[int, ...] = ()
    interleaved_sections: bool = False


@triton.jit
def _plane_of(pair, META: tl.constexpr):
    """Return the plane of angles that each pair turns by."""
    SECTIONS: tl.constexpr = META.sections
    plane = tl.zeros_like(pair)
    if META.interleaved_sections:
        COUNT: tl.constexpr = len(SECTIONS)
        for i in tl.static_range(1, COUNT):
            plane = tl.where((pair % COUNT == i) & (pair < COUNT * SECTIONS[i]), i, plane)
    else:
        end = 0
        for i in tl.static_range(len(SECTIONS) - 1):
            end += SECTIONS[i]
            plane += (pair >= end).to(plane.dtype)
    return plane


@triton.jit
def _rotate_heads_of(
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
    META: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate all heads of one tensor at these token offsets, HEADS at a time.

    `strides` and `out_strides` are those of (heads, elements).
    """
    token, out_token = tokens
    for first in range(0, heads, HEADS):
        head = (first + tl.arange(0, HEADS)).to(token.dtype)[None, :, None]
        mask = token_mask[:, None, None] & (head < heads)
        base = source + (token[:, None, None] + head * strides[0])
        out_base = out + (out_token[:, None, None] + head * out_strides[0])
        if META.interleaved:
            column = tl.arange(0, 2 * META.pairs).to(token.dtype)[None, None, :]
            both = mask & (column < 2 * pairs)
            block = tl.load(base + column * strides[1], mask=both, other=0).to(META.compute)
            a, b = tl.split(tl.reshape(block, (block.shape[0], HEADS, META.pairs, 2)))
            turned = tl.join(a * cosine - b * sine, b * cosine + a * sine)
            block = tl.reshape(turned, (block.shape[0], HEADS, 2 * META.pairs))
            tl.store(out_base + column * out_strides[1], block.to(out.dtype.element_ty), mask=both)
        else:
            column = tl.arange(0, META.pairs).to(token.dtype)[None, None, :]
            both = mask & (column < pairs)
            a = tl.load(base + column * strides[1], mask=both, other=0).to(META.compute)
            b = tl.load(base + (column + pairs) * strides[1], mask=both, other=0).to(META.compute)
            turned = (a * cosine - b * sine).to(out.dtype.element_ty)
            tl.store(out_base + column * out_strides[1], turned, mask=both)
            turned = (b * cosine + a * sine).to(out.dtype.element_ty)
            tl.store(out_base + (column + pairs) * out_strides[1], turned, mask=both)
        if META.rest > 0:
            column = tl.arange(0, META.rest).to(token.dtype)[None, None, :]
            both = mask & (column < rest)
            passed = tl.load(base + (column + 2 * pairs) * strides[1], mask=both, other=0)
            tl.store(out_base + (column + 2 * pairs) * out_strides[1], passed, mask=both)


@libentry()
@triton.jit
def rotate_heads(
    sources,
    outs,
    heads,
    cos,
    sin,
    shape,
    source_token_strides,
    out_token_strides,
    angle_token_strides,
    source_strides,
    out_strides,
    angle_strides,
    plane_strides,
    n_tokens,
    pairs,
    rest,
    META: tl.constexpr,
):
    """Rotate all heads of META.tokens positions; the outputs may be the sources themselves.

    The token strides are those over the dimensions of `shape`, the collapsed positions without the slowest. The other
    strides are those of (heads, elements) of the sources and outputs, and of the pairs. Angle strides are those of cos
    and sin, and plane strides, if META has sections, those of their first dimension.
    """
    wait_for_previous_launch()
    token = tl.program_id(0).to(META.index) * META.tokens + tl.arange(0, META.tokens)
    token_mask = token < n_tokens
    pair = tl.arange(0, META.pairs).to(META.index)
    mask = token_mask[:, None] & (pair < pairs)[None, :]
    columns = (pair * angle_strides[0], pair * angle_strides[1])
    if len(META.sections) > 0:
        plane = _plane_of(pair, META)
        columns = (columns[0] + plane * plane_strides[0], columns[1] + plane * plane_strides[1])
    offset = strided_offset(token, shape, angle_token_strides[0])[:, None] + columns[0][None, :]
    cosine = tl.load(cos + offset, mask=mask, other=0).to(META.compute)[:, None, :]
    offset = strided_offset(token, shape, angle_token_strides[1])[:, None] + columns[1][None, :]
    sine = tl.load(sin + offset, mask=mask, other=0).to(META.compute)[:, None, :]
    if META.inverse:
        sine = -sine
    for i in tl.static_range(len(sources)):
        starts = (
            strided_offset(token, shape, source_token_strides[i]),
            strided_offset(token, shape, out_token_strides[i]),
        )
        _rotate_heads_of(
            *(sources[i], outs[i], heads[i], starts, token_mask, cosine, sine, pairs, rest),
            *(source_strides[i], out_strides[i], META, META.heads[i]),
        )


def rotate(
    sources: tuple[torch.Tensor, ...],
    outs: tuple[torch.Tensor, ...],
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    inverse: bool,
    sections: tuple[int, ...] = (),
    interleaved_sections: bool = False,
) -> None:
    """Rotate the heads of `sources` into `outs`, which may be the sources themselves. All have the same positions.

    With `sections`, cos and sin have a first dimension of planes, and `_RotaryMeta` says which pairs turn by which.
    """
    common_device((*sources, cos, sin), outs)
    some = [i for i, source in enumerate(sources) if source.numel()]
    sources, outs = tuple([sources[i] for i in some]), tuple([outs[i] for i in some])
    if not sources:
        return
    positions, size, pairs = tuple(sources[0].shape[:-2]), sources[0].shape[-1], cos.shape[-1]
    every = [each.stride()[:-2] for each in (*sources, *outs)]
    own = int(bool(sections))
    every += [expand_strides(each.shape[own:-1], each.stride()[own:-1], positions) for each in (cos, sin)]
    sizes, strides = collapse(positions, every)
    over = [tuple(own) for own in strides]
    n = len(sources)
    in_place = all(source is out for source, out in zip(sources, outs, strict=True))
    # 16-bit floats get smaller tiles, so that more programs have loads in flight.
    tile = devices.current.row_elements // (4 if sources[0].dtype.itemsize == 2 else 1)
    n_tokens = math.prod(positions)
    padded = power_of_2(pairs)
    heads = tuple([min(power_of_2(each.shape[-2]), max(1, tile // (2 * padded))) for each in sources])
    tokens = max(1, min(tile // (2 * padded * max(heads)), power_of_2(n_tokens)))
    rest = 0 if in_place else size - 2 * pairs
    rotate_heads[(-(-n_tokens // tokens),)](
        *(sources, outs, tuple([each.shape[-2] for each in sources]), cos, sin, tuple(sizes[:-1])),
        *(tuple(over[:n]), tuple(over[n : 2 * n]), tuple(over[2 * n :])),
        *(tuple([each.stride()[-2:] for each in tensors]) for tensors in (sources, outs)),
        *((cos.stride(-1), sin.stride(-1)), (cos.stride(0), sin.stride(0)) if sections else ()),
        *(n_tokens, pairs, rest),
        META=_RotaryMeta(
            index=offset_type(*sources, *outs, cos, sin),
            compute=TRITON_DTYPES[opmath(sources[0].dtype)],
            tokens=tokens,
            heads=heads,
            pairs=padded,
            rest=power_of_2(rest) if rest else 0,
            interleaved=interleaved,
            inverse=inverse,
            sections=sections,
            interleaved_sections=interleaved_sections,
        ),
        num_warps=4,
    )
