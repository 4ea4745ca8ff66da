"""Paged caches: attention over them, and writing to them.

A cache is (pages, rows of a page, heads, elements). A sequence's block table lists its pages in order. Attention reads
the page of each run of keys (`DecodeMeta.run`) two blocks ahead of the keys. A program finds its sequence from the
starts of tokens, and splits that sequence's own length: the host knows neither, and waits for nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.attention import table
from tritonite.engine.attention.decode import Cut, launch_splits, most_blocks
from tritonite.engine.attention.decode_keys import DecodeMeta, DecodeTensors
from tritonite.engine.attention.problem import LEAST_PADDED, dot_precision, padded_sizes
from tritonite.engine.attention.prologue import ForwardStrides, HeadStrides
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import Number, settings
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry

# The largest finite float8_e4m3fn.
_FLOAT8_MAX = tl.constexpr(448.0)


class Paged(NamedTuple):
    """Attention of the last tokens of sequences over paged caches; the last token of a sequence sees all of its keys.

    query: (tokens, heads, elements).
    key, value: caches; their pages are sequences without a block table.
    pages: the block table, (sequences, pages), or None.
    lengths: keys of each sequence.
    starts: the first token of each sequence and the end of the last, or None where each has one token.
    scales: factors of keys and of values, per head or for all, or None.
    softcap, window: soft cap of scores, and keys that a query sees; None for no cap and for all keys.
    shared: a value is the first elements of its key, and both caches begin at one address.
    sinks: (heads,), contiguous: a score of each head's rows that has no value; None for no sinks.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pages: torch.Tensor | None
    lengths: torch.Tensor
    starts: torch.Tensor | None
    scales: tuple[torch.Tensor, torch.Tensor] | None
    scale: float | Number
    softcap: float | None
    window: int | None
    precision: str
    shared: bool = False
    sinks: torch.Tensor | None = None


def attend_to_pages(work: Paged, out: torch.Tensor, logsumexp: torch.Tensor | None = None) -> None:
    """Write attention to `out`, (tokens, heads, value size); tokens behind the last sequence get 0.

    `logsumexp` is (tokens, heads) or None, and gets -inf for tokens without keys.
    """
    query, key, value = work.query, work.key, work.value
    (tokens, heads, head), (n_pages, page, kv_heads, size) = query.shape, value.shape
    sequences, most_pages = (n_pages, 1) if work.pages is None else work.pages.shape
    if not tokens * heads:
        return
    ratio, ragged = heads // kv_heads, work.starts is not None
    # The host knows only the number of all tokens, so a tile has room for the mean of a sequence.
    rows = -(-tokens // max(1, sequences)) * ratio if ragged else ratio
    rows = table.SMALLEST_TILE if settings().invariant else rows
    if work.shared:
        tile = table.latent_decoding(key.dtype.itemsize, rows, query.device)
    else:
        tile = table.decoding(key.dtype.itemsize, power_of_2(max(head, size)), rows, query.device)
    blocks = most_blocks(tokens * ratio, sequences, tile) if ragged else -(-ratio // tile.BLOCK_M)
    cut = Cut.choose(tile, blocks if ragged else blocks * sequences, kv_heads, page * most_pages, query.device)
    precision = dot_precision(work.precision, query)
    if work.shared:
        block_d, block_v = (max(LEAST_PADDED, power_of_2(each)) for each in (head - size, size))
    else:
        block_d, block_v = padded_sizes(head, size, precision)
    wide = any(span(each.shape, each.stride()) >= INT32_LIMIT for each in (key, value))
    meta = DecodeMeta(
        causal=ragged or work.window is not None,
        last=True,
        precision=precision,
        index=tl.int64 if wide else tl.int32,
        ratio=ratio,
        head_size=head,
        value_size=size,
        block_d=block_d,
        block_v=block_v,
        block_m=tile.BLOCK_M,
        block_n=tile.BLOCK_N,
        empty="-inf",
        page=0 if work.pages is None else page,
        shared=work.shared,
        windowed=work.window is not None,
        capped=work.softcap is not None,
        unmasked=tile.BLOCK_M >= table.UNMASKED_ROWS,
    )
    key_strides, value_strides = [
        HeadStrides(cache.stride(0), cache.stride(2), cache.stride(1)) for cache in (key, value)
    ]
    # With starts a token is counted from the first of all; otherwise it is the batch.
    query_strides, out_strides, logsumexp_strides = [
        HeadStrides(0, 0, 0)
        if own is None
        else HeadStrides(0, own.stride(1), own.stride(0))
        if ragged
        else HeadStrides(own.stride(0), own.stride(1), 0)
        for own in (query, out, logsumexp)
    ]
    strides = ForwardStrides(
        *(query_strides, key_strides, value_strides, out_strides, HeadStrides(0, 0, 0, 0), logsumexp_strides),
        pages=0 if work.pages is None else work.pages.stride(0),
        scales=_scale_strides(work.scales),
    )
    # A cache without pages has no room for a key.
    room = page * most_pages if n_pages else 0
    sizes = {"sequences": sequences, "tokens": tokens, "queries": 1, "keys": room, "diagonal": 0}
    sizes |= {"window": work.window or 0, "kv_heads": kv_heads}
    launch_splits(
        DecodeTensors(
            *(query, key, value, None, work.pages, work.lengths, work.starts, None, work.scales, out, logsumexp),
            sinks=work.sinks,
        ),
        *(strides, sizes, cut, meta),
        blocks=blocks,
        n_pages=max(1, n_pages),
        scale=work.scale,
        softcap=work.softcap or 0.0,
    )


def _scale_strides(scales: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[int, int]:
    """Return the strides of scales of keys and of values, 0 for a scale of all heads or None."""
    key, value = [each.stride(0) if each.numel() > 1 else 0 for each in scales] if scales else (0, 0)
    return key, value


class WriteStrides(NamedTuple):
    """Strides of a write: of source (token, head, element), cache (page, row, head, element) and scale (head)."""

    source: Any
    cache: Any
    scale: Any


@triton.jit
def _write_heads(source, cache, token, page, row, scale, heads, size, strides, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Copy a token's heads to a row of a page, divided by `scale` unless it is None. Page -1 is not written."""
    columns = tl.arange(0, SIZE).to(tl.int64)[None, :]
    # Outside the loop: in it Triton 3.6 forgets which strides of a tuple are 1.
    source += token * strides.source[0] + columns * strides.source[2]
    cache += page * strides.cache[0] + row * strides.cache[1] + columns * strides.cache[3]
    step, cache_step = strides.source[1], strides.cache[2]
    if scale is not None:
        scale_step = strides.scale
    for first in range(0, heads, HEADS):
        head = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        mask = (head < heads) & (columns < size) & (page >= 0)
        values = tl.load(source + head * step, mask=mask, other=0.0)
        if scale is not None:
            own = tl.load(scale + head * scale_step, mask=head < heads, other=1.0)
            values = tl.div_rn(values.to(tl.float32), tl.broadcast_to(own, values.shape))
        if cache.dtype.element_ty == tl.float8e4nv:
            values = values.to(tl.float32)
            values = tl.where(values > _FLOAT8_MAX, _FLOAT8_MAX, tl.where(values < -_FLOAT8_MAX, -_FLOAT8_MAX, values))
        tl.store(cache + head * cache_step, values.to(cache.dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n_slots", "page_size", "heads"])
def write_slots(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    scales,
    strides,
    n_slots,
    page_size,
    heads,
    sizes,
    HEADS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Write a token's key and value to its slot, unless that is negative.

    `strides` are the `WriteStrides` of keys, those of values, and the stride of slots. `sizes` are the elements of a
    key head and of a value head, SIZES powers of two that hold them.
    """
    wait_for_previous_launch()
    key_strides, value_strides = WriteStrides(*strides[0]), WriteStrides(*strides[1])
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * strides[2]).to(tl.int64)
    inside = (slot >= 0) & (slot < n_slots)
    tl.device_assert(inside | (slot < 0), "slot_mapping names a slot that the caches do not have")
    page = tl.where(inside, slot // page_size, -1)
    row = slot % page_size
    if scales is not None:
        _write_heads(key, key_cache, token, page, row, scales[0], heads, sizes[0], key_strides, HEADS, SIZES[0])
        _write_heads(value, value_cache, token, page, row, scales[1], heads, sizes[1], value_strides, HEADS, SIZES[1])
    else:
        _write_heads(key, key_cache, token, page, row, None, heads, sizes[0], key_strides, HEADS, SIZES[0])
        _write_heads(value, value_cache, token, page, row, None, heads, sizes[1], value_strides, HEADS, SIZES[1])


def write_to_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Write keys and values, (tokens, heads, elements), to slots of caches, one program for each token.

    Slot s is row s % (rows of a page) of page s // (rows of a page). `scales` divide keys and values.
    """
    tokens, (n_pages, page, heads, size), value_size = slots.shape[0], key_cache.shape, value.shape[2]
    if not tokens:
        return
    scale_strides = _scale_strides(scales)
    padded = power_of_2(size), power_of_2(value_size)
    write_slots[(tokens,)](
        *(key, value, key_cache, value_cache, slots, scales),
        strides=(
            (key.stride(), key_cache.stride(), scale_strides[0]),
            (value.stride(), value_cache.stride(), scale_strides[1]),
            slots.stride(0),
        ),
        n_slots=n_pages * page,
        page_size=page,
        heads=heads,
        sizes=(size, value_size),
        HEADS=max(1, min(power_of_2(heads), devices.current.row_elements // max(padded))),
        SIZES=padded,
        num_warps=4,
        **ASSERTING,
    )
