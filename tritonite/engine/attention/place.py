"""Which tile of attention a program takes, and of which sequence."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def by_length(number, blocks, batch_heads, group):
    """(block, batch and head as one) of a tile: the last block first, of as many heads as a cache has room for.

    In causal attention the last rows take longest, and begun first they leave the short ones to fill the end.
    """
    first = number // (group * blocks) * group
    rest = number - first * blocks
    count = tl.minimum(group, batch_heads - first)
    return blocks - 1 - rest // count, first + rest % count


@triton.jit
def place(number, blocks, heads, batch_heads, group):
    """(block, batch, head) of a tile, `by_length`."""
    block, own = by_length(number, blocks, batch_heads, group)
    return block, (own // heads).to(tl.int64), (own % heads).to(tl.int64)


@triton.jit
def sequence(query_starts, key_starts, batch, queries, keys, diagonal, FACTS: tl.constexpr):
    """(queries, keys, diagonal, first query, first key) of a sequence; packed ones differ."""
    first, first_key = batch * 0, batch * 0
    if query_starts is not None:
        first, first_key = tl.load(query_starts + batch).to(tl.int64), tl.load(key_starts + batch).to(tl.int64)
        queries = (tl.load(query_starts + batch + 1) - first).to(tl.int32)
        keys = (tl.load(key_starts + batch + 1) - first_key).to(tl.int32)
        diagonal = queries * 0
        if FACTS.last:
            diagonal = keys - queries
    return queries, keys, diagonal, first, first_key
