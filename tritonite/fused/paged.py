"""Paged attention and writes to paged caches: checks and declarations; the kernels are `engine.attention.paged`'s.

Keys and values of a sequence lie in blocks of a cache that a block table lists, so that no sequence needs memory for
more than its tokens (Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention").
"""

from __future__ import annotations

import math

import torch

from tritonite import devices
from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.attention.paged import Paged, attend_to_pages, write_to_pages
from tritonite.engine.iteration import INT32_LIMIT, common_device
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_shape, check_sinks, share_memory
from tritonite.ops.matmul import precision_of
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty

_FLOAT8 = torch.float8_e4m3fn
_LARGEST_HEAD = 256


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend tokens of sequences to keys and values in paged caches: softmax(scale * query @ key.mT) @ value.

    The tokens of a call are the last ones of their sequences, and their keys and values are in the caches already. A
    token sees all keys of its sequence up to its own. A sequence may have one token, as in decoding, or a chunk of its
    prompt, in any mixture. No length is read on the host, so a CUDA graph serves every call that fits its block table.
    Products are in query's dtype with float32 sums.

    Args:
        query: (tokens, heads, head_size) of float16, bfloat16 or float32; head_size is at most 256.
        key_cache: (num_blocks, block_size, num_kv_heads, head_size) of query's dtype or float8_e4m3fn; num_kv_heads
            divides heads. The last dimension of query and caches must be contiguous; other strides are free.
        value_cache: the same, where the head size may differ.
        block_table: int32, (num_seqs, max_blocks): the blocks of each sequence in order. Entries behind a sequence's
            last block, and before its window, are not read.
        lengths: int32, (num_seqs,): keys of each sequence, this call's tokens included.
        cu_seqlens: int32, (num_seqs + 1,): the first token of each sequence in query, and the end of the last; tokens
            behind it get 0. None if each sequence has one token.
        key_scale: float32, one element or (num_kv_heads,): the factor from the cache's numbers to keys. None for 1.
        value_scale: the same for values; given if key_scale is.
        scale: factor of scores; None for 1 / sqrt(head_size).
        softcap: scores become softcap * tanh(score / softcap); None or 0 for no cap.
        window: keys that a token sees, its own included; None for all.
        sinks: (heads,) of query's dtype or float32: logits that add to the softmax's denominator alone. None for none.

    Returns a contiguous (tokens, heads, value head size) tensor of query's dtype; 0 for tokens that see no key.

    Raises errors.Unsupported for other shapes or dtypes, for tensors on several devices, for float8 caches on devices
    without float8_e4m3fn, and if a gradient is required. Blocks that the caches do not have, and lengths that exceed
    the block table, stop the program, as an index out of range does.

    Source: Kwon et al. 2023; Dao et al. 2023, "Flash-Decoding for long-context inference"; Xiao et al. 2023, "Efficient
    Streaming Language Models with Attention Sinks".
    """
    result: torch.Tensor = torch.ops.tritonite.paged_attention(
        *(query, key_cache, value_cache, block_table, lengths, cu_seqlens, key_scale, value_scale),
        *(scale, softcap, window, sinks),
    )
    return result


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Write keys and values of tokens to their slots in paged caches, in one launch.

    Slot s is row s % block_size of block s // block_size. If tokens share a slot, any one of them is written.

    Args:
        key: (tokens, num_kv_heads, head_size) of float16, bfloat16 or float32, with any strides.
        value: the same, of key's dtype; the head size may differ.
        key_cache: (num_blocks, block_size, num_kv_heads, head_size) of key's dtype or float8_e4m3fn, with any strides.
        value_cache: the same for value, of key_cache's dtype.
        slot_mapping: int32 or int64, (tokens,), or shorter, for the first tokens only. Tokens with slot -1 are skipped.
        key_scale: float32, one element or (num_kv_heads,): keys are divided by it, and clamped to 448 for float8. None
            for 1.
        value_scale: the same for values; given if key_scale is.

    Raises errors.Unsupported for other shapes or dtypes, for tensors on several devices, for caches whose elements
    overlap, for float8 caches on devices without float8_e4m3fn, and, while gradients are recorded, for arguments that
    require one. Slots that the caches do not have stop the program, as an index out of range does.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
    """
    torch.ops.tritonite.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


def _check_caches(
    name: str, own: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, value_size: int | None
) -> None:
    """Decline caches that do not fit `own`, (tokens, heads, head size), the argument `name`.

    `value_size` is the head size of value_cache, None for any.
    """
    if own.dtype not in SINGLE_FLOATS:
        raise Decline(f"{name} is {own.dtype}: it may be float16, bfloat16 or float32")
    if own.dim() != 3:
        raise Decline(f"{name} has the shape {tuple(own.shape)}: it must be (tokens, heads, head size)")
    if key_cache.dim() != 4 or key_cache.shape[3] != own.shape[2]:
        raise Decline(
            f"key_cache has the shape {tuple(key_cache.shape)}: it must be (blocks, block size, heads, "
            f"{own.shape[2]}), of {name}'s head size"
        )
    size = value_size if value_size is not None else value_cache.shape[-1] if value_cache.dim() else 0
    check_shape("value_cache", value_cache, (*key_cache.shape[:3], size), "key_cache's but for the head size")
    if key_cache.dtype not in (own.dtype, _FLOAT8):
        raise Decline(f"key_cache is {key_cache.dtype}: it may be {own.dtype}, as {name} is, or {_FLOAT8}")
    if value_cache.dtype is not key_cache.dtype:
        raise Decline(f"value_cache is {value_cache.dtype} and key_cache {key_cache.dtype}: give both one dtype")
    if not key_cache.shape[1] * key_cache.shape[2]:
        raise Decline(f"key_cache has the shape {tuple(key_cache.shape)}: blocks must have room for a token")
    if not 0 < own.shape[2] <= _LARGEST_HEAD or not 0 < size <= _LARGEST_HEAD:
        raise Decline(f"heads have {own.shape[2]} and {size} elements: they may have 1 to {_LARGEST_HEAD}")
    if key_cache.dtype is _FLOAT8 and not devices.has_float8(own.device):
        raise Decline("this device has no float8_e4m3fn: give caches of float16 or bfloat16")
    check_device("key_cache", key_cache, name, own)
    check_device("value_cache", value_cache, name, own)


def _check_scales(
    first: str, own: torch.Tensor, heads: int, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None
) -> None:
    if (key_scale is None) != (value_scale is None):
        raise Decline("key_scale and value_scale go together: give both, or neither")
    for name, each in (("key_scale", key_scale), ("value_scale", value_scale)):
        if each is not None:
            if each.dtype is not torch.float32:
                raise Decline(f"{name} is {each.dtype}: it must be torch.float32")
            if each.numel() != 1 and tuple(each.shape) != (heads,):
                raise Decline(f"{name} has the shape {tuple(each.shape)}: it must be one element, or ({heads},)")
            check_device(name, each, first, own)


def check_index(name: str, tensor: torch.Tensor, dim: int, shape: str, own: torch.Tensor, first: str) -> None:
    if tensor.dtype is not torch.int32:
        raise Decline(f"{name} is {tensor.dtype}: it must be torch.int32")
    if tensor.dim() != dim:
        raise Decline(f"{name} has the shape {tuple(tensor.shape)}: it must be {shape}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise Decline(f"the last dimension of {name} is not contiguous: make it contiguous")
    check_device(name, tensor, first, own)


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    softcap: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    _check_caches("query", query, key_cache, value_cache, None)
    kv_heads, sequences = key_cache.shape[2], block_table.shape[0] if block_table.dim() else 0
    if query.shape[1] % kv_heads:
        raise Decline(f"key_cache has {kv_heads} heads, which must divide the query's {query.shape[1]}")
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise Decline(f"the head dimension of {name} is not contiguous: make it contiguous")
    check_index("block_table", block_table, 2, "(sequences, blocks)", query, "query")
    check_index("lengths", lengths, 1, "(sequences,)", query, "query")
    check_shape("lengths", lengths, (sequences,), "one for each row of block_table")
    if cu_seqlens is not None:
        check_index("cu_seqlens", cu_seqlens, 1, "(sequences + 1,)", query, "query")
        check_shape("cu_seqlens", cu_seqlens, (sequences + 1,), "one more than rows of block_table")
    elif query.shape[0] != sequences:
        raise Decline(
            f"query has {query.shape[0]} tokens and block_table {sequences} sequences: give cu_seqlens, or a token each"
        )
    _check_scales("query", query, kv_heads, key_scale, value_scale)
    if softcap is not None and not 0 <= softcap < math.inf:
        raise Decline(f"softcap is {softcap}: it may be None, or a finite number that is not negative")
    if window is not None and window < 1:
        raise Decline(f"window is {window}: a token sees one key at least; None is for all")
    if sinks is not None:
        check_sinks(sinks, query, query.shape[1])
    if block_table.shape[1] * key_cache.shape[1] >= INT32_LIMIT or query.shape[0] * query.shape[1] >= INT32_LIMIT:
        raise Decline(
            f"block_table has room for {block_table.shape[1] * key_cache.shape[1]} keys and query has "
            f"{query.shape[0] * query.shape[1]} rows: both must be below {INT32_LIMIT}"
        )


def _fake_attention(
    query,
    key_cache,
    value_cache,
    block_table,
    lengths,
    cu_seqlens=None,
    key_scale=None,
    value_scale=None,
    scale=None,
    softcap=None,
    window=None,
    sinks=None,
):
    _check(
        *(query, key_cache, value_cache, block_table, lengths, cu_seqlens, key_scale, value_scale),
        *(softcap, window, sinks),
    )
    return query.new_empty((*query.shape[:2], value_cache.shape[3]))


@library_operator(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor lengths, "
    "Tensor? cu_seqlens=None, Tensor? key_scale=None, Tensor? value_scale=None, float? scale=None, "
    "float? softcap=None, int? window=None, Tensor? sinks=None) -> Tensor",
    fake=_fake_attention,
    accepts=SINGLE_FLOATS,
    pin=("softcap", "window"),
)
def paged_attention_host(
    query,
    key_cache,
    value_cache,
    block_table,
    lengths,
    cu_seqlens=None,
    key_scale=None,
    value_scale=None,
    scale=None,
    softcap=None,
    window=None,
    sinks=None,
):
    """Attention of the last tokens of sequences over paged caches, by splits of the keys: Kwon et al. 2023."""
    _check(
        *(query, key_cache, value_cache, block_table, lengths, cu_seqlens, key_scale, value_scale),
        *(softcap, window, sinks),
    )
    common_device((query, key_cache, value_cache, block_table, lengths), ())
    out = empty((*query.shape[:2], value_cache.shape[3]), query.dtype, query.device)
    work = Paged(
        query,
        key_cache,
        value_cache,
        block_table,
        lengths,
        cu_seqlens,
        None if key_scale is None else (key_scale, value_scale),
        1 / math.sqrt(query.shape[2]) if scale is None else scale,
        softcap or None,
        window,
        precision_of(query.dtype),
        sinks=None if sinks is None else sinks.contiguous(),
    )
    attend_to_pages(work, out)
    return (out,)


def _check_write(key, value, key_cache, value_cache, slot_mapping, key_scale=None, value_scale=None):
    _check_caches("key", key, key_cache, value_cache, value.shape[2] if value.dim() == 3 else None)
    check_shape("key", key, (key.shape[0], key_cache.shape[2], key.shape[2]), "as many heads as key_cache")
    if value.dim() != 3:
        raise Decline(f"value has the shape {tuple(value.shape)}: it must be (tokens, heads, head size)")
    check_shape("value", value, (*key.shape[:2], value.shape[2]), "key's but for the head size")
    if value.dtype is not key.dtype:
        raise Decline(f"value is {value.dtype} and key {key.dtype}: give both one dtype")
    check_device("value", value, "key", key)
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise Decline(f"slot_mapping is {slot_mapping.dtype}: it may be torch.int32 or torch.int64")
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] > key.shape[0]:
        raise Decline(
            f"slot_mapping has the shape {tuple(slot_mapping.shape)}: it must be of one dimension, for {key.shape[0]} "
            "tokens or fewer"
        )
    check_device("slot_mapping", slot_mapping, "key", key)
    _check_scales("key", key, key_cache.shape[2], key_scale, value_scale)


@library_operator(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    "Tensor? key_scale=None, Tensor? value_scale=None) -> ()",
    fake=_check_write,
    accepts=SINGLE_FLOATS,
)
def reshape_and_cache_host(key, value, key_cache, value_cache, slot_mapping, key_scale=None, value_scale=None):
    """Keys and values of tokens, written to their slots of paged caches: Kwon et al. 2023."""
    _check_write(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    common_device((key, value, slot_mapping), (key_cache, value_cache))
    if share_memory(key_cache, value_cache):
        raise Decline("key_cache or value_cache has elements that share memory: make it contiguous")
    scales = None if key_scale is None else (key_scale, value_scale)
    write_to_pages(key, value, key_cache, value_cache, slot_mapping, scales)
    return ()
