"""Which tile of attention a program takes."""

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
