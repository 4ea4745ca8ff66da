"""Attention over a cache of latents: checks and declaration; the kernels are `engine.attention`'s.

A token's cache row is its latent and its rotary key (DeepSeek-AI 2024). With the projections from latents absorbed into
query and output, all heads share the rows as keys, and the latents as values.
"""

from __future__ import annotations

import torch

from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.attention.paged import Paged, attend_to_pages
from tritonite.engine.iteration import INT32_LIMIT, common_device
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_shape
from tritonite.fused.paged import check_index
from tritonite.ops.matmul import precision_of
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty

_LARGEST_VALUE, _LARGEST_REST = 512, 128


def mla_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    *,
    lengths: torch.Tensor,
    scale: float,
    page_table: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    value_size: int = 512,
    return_logsumexp: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend tokens of sequences to a cache of latents: softmax(scale * query @ rows.mT) @ rows[..., :value_size].

    This is DeepSeek's multi-head latent attention in its absorbed form. Every head has the same keys, the cache's rows,
    and the same values, the first elements of the rows. A program reads a block of rows once, for both products. The
    tokens of a call are the last ones of their sequences, and their rows are in the cache already. A token sees all
    rows of its sequence up to its own. Keys are split over programs, and a second launch combines the splits. No length
    is read on the host. Products are in query's dtype with float32 sums.

    Args:
        query: (tokens, heads, value_size + rope_size) of float16, bfloat16 or float32: a query absorbed into the
            latents' space, then its rotary elements. The last dimension of query and cache must be contiguous; other
            strides are free.
        cache: of query's dtype: (pages, page_size, value_size + rope_size) with `page_table`, else a sequence a row,
            (num_seqs, room, value_size + rope_size).
        lengths: int32, (num_seqs,): rows of each sequence, this call's tokens included.
        scale: the factor of scores. It belongs to heads before absorption: 1 / sqrt(128 + 64) in DeepSeek-V2.
        page_table: int32, (num_seqs, max_pages): the pages of each sequence in order. Entries behind a sequence's last
            page are not read.
        cu_seqlens: int32, (num_seqs + 1,): the first token of each sequence in query, and the end of the last; tokens
            behind it get 0. None if each sequence has one token.
        value_size: elements of a latent, 1 to 512; up to 128 elements may follow them.
        return_logsumexp: whether to return the logsumexp of scores as well.

    Returns a contiguous (tokens, heads, value_size) tensor of query's dtype; 0 for tokens that see no row. With
    `return_logsumexp` also float32 (tokens, heads), the natural logarithm; -inf for tokens that see no row.

    Raises errors.Unsupported for other shapes or dtypes, for tensors on several devices, and for a gradient. Pages that
    the cache does not have, and lengths that exceed the room, stop the program, as an index out of range does.

    Source: DeepSeek-AI 2024, "DeepSeek-V2"; Dao et al. 2023, "Flash-Decoding for long-context inference".
    """
    out, logsumexp = torch.ops.tritonite.mla_decode(query, cache, page_table, lengths, cu_seqlens, scale, value_size)
    return (out, logsumexp) if return_logsumexp else out


def _check(
    query: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor | None,
    lengths: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    value_size: int,
) -> None:
    if query.dtype not in SINGLE_FLOATS:
        raise Decline(f"query is {query.dtype}: it may be float16, bfloat16 or float32")
    if query.dim() != 3:
        raise Decline(f"query has the shape {tuple(query.shape)}: it must be (tokens, heads, elements)")
    size = query.shape[2]
    if not 0 < value_size <= min(size, _LARGEST_VALUE) or size - value_size > _LARGEST_REST:
        raise Decline(
            f"value_size is {value_size} of {size} elements: it may be 1 to {_LARGEST_VALUE}, with at most "
            f"{_LARGEST_REST} elements behind a value"
        )
    if cache.dim() != 3 or cache.shape[2] != size or not cache.shape[1]:
        raise Decline(f"cache has the shape {tuple(cache.shape)}: it must be (pages, rows of a page, {size}), as query")
    if cache.dtype is not query.dtype:
        raise Decline(f"cache is {cache.dtype} and query {query.dtype}: give both one dtype")
    check_device("cache", cache, "query", query)
    for name, tensor in (("query", query), ("cache", cache)):
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise Decline(f"the last dimension of {name} is not contiguous: make it contiguous")
    sequences, most = cache.shape[0], 1
    if page_table is not None:
        check_index("page_table", page_table, 2, "(sequences, pages)", query, "query")
        sequences, most = page_table.shape
    check_index("lengths", lengths, 1, "(sequences,)", query, "query")
    check_shape("lengths", lengths, (sequences,), "one for each sequence of the cache")
    if cu_seqlens is not None:
        check_index("cu_seqlens", cu_seqlens, 1, "(sequences + 1,)", query, "query")
        check_shape("cu_seqlens", cu_seqlens, (sequences + 1,), "one more than sequences")
    elif query.shape[0] != sequences:
        raise Decline(f"query has {query.shape[0]} tokens for {sequences} sequences: give cu_seqlens, or a token each")
    if most * cache.shape[1] >= INT32_LIMIT or query.shape[0] * query.shape[1] >= INT32_LIMIT:
        raise Decline(
            f"the cache has room for {most * cache.shape[1]} rows a sequence and query has "
            f"{query.shape[0] * query.shape[1]} rows: both must be below {INT32_LIMIT}"
        )


def _fake(query, cache, page_table, lengths, cu_seqlens, scale, value_size=512):
    _check(query, cache, page_table, lengths, cu_seqlens, value_size)
    return query.new_empty((*query.shape[:2], value_size)), query.new_empty(query.shape[:2], dtype=torch.float32)


@library_operator(
    "mla_decode(Tensor query, Tensor cache, Tensor? page_table, Tensor lengths, Tensor? cu_seqlens, float scale, "
    "int value_size=512) -> (Tensor, Tensor)",
    fake=_fake,
    accepts=SINGLE_FLOATS,
    pin=("value_size",),
)
def mla_decode_host(query, cache, page_table, lengths, cu_seqlens, scale, value_size=512):
    """Attention of all heads over one cache of latents, by splits of its rows: DeepSeek-AI 2024."""
    _check(query, cache, page_table, lengths, cu_seqlens, value_size)
    common_device([each for each in (query, cache, page_table, lengths, cu_seqlens) if each is not None], ())
    out = empty((*query.shape[:2], value_size), query.dtype, query.device)
    logsumexp = empty(query.shape[:2], torch.float32, query.device)
    rows = cache.unsqueeze(2)
    work = Paged(
        *(query, rows, rows[..., :value_size], page_table, lengths, cu_seqlens, None, scale, None, None),
        precision_of(query.dtype),
        shared=True,
    )
    attend_to_pages(work, out, logsumexp)
    return out, logsumexp
