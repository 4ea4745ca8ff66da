"""Block shapes of cross entropy for each kind of device, and the size of chunks of a head's logits."""

from __future__ import annotations

from typing import NamedTuple

from tritonite.devices.tables import Tables


class Block(NamedTuple):
    """A block of at most `elements` logits, and the warps of a program."""

    elements: int
    warps: int


class CrossEntropyTable(NamedTuple):
    """Block shapes of a kind of device. A program has one row, or several rows that are shorter than a block.

    Fields:
      `once`: blocks of rows that are read once, for the loss alone.
      `twice`: blocks of rows that are read twice, for the loss and for the gradient over the logits. One program runs
      on a multiprocessor, so that L2 keeps the rows in flight for the second reading.
      `twice_with_states`: the same with label smoothing or the class of the largest logit, whose states take registers.
      `saved_blocks`: fewest blocks that slices must save a program, so that rows are sliced although the slices'
      statistics take another launch to combine.
      `gradient`: blocks of a gradient from known statistics of rows.
      `rows`: rows of a block of the kernels that have a few numbers per row.
      `chunk_tokens`: fewest tokens of a chunk of a head's logits. Each chunk reads the head's weight twice, and reads
      and writes the weight's gradient once, so that smaller chunks are bound by memory.
      `chunk_share`: share of the tokens in a chunk where the share is more than `chunk_tokens`.
      `chunk_multiple`: divisor of the tokens of a chunk, for whole tiles of products.
    """

    once: Block
    twice: Block
    twice_with_states: Block
    saved_blocks: int
    gradient: Block
    rows: Block
    chunk_tokens: int
    chunk_share: float
    chunk_multiple: int


_NVIDIA = CrossEntropyTable(
    once=Block(4096, 8),
    twice=Block(16384, 32),
    twice_with_states=Block(8192, 32),
    saved_blocks=4,
    gradient=Block(4096, 8),
    rows=Block(2048, 8),
    chunk_tokens=1024,
    chunk_share=0.01,
    chunk_multiple=128,
)
_AMD = _NVIDIA._replace(twice=Block(8192, 16), twice_with_states=Block(4096, 16))

CROSS_ENTROPY: Tables[CrossEntropyTable] = Tables(
    "cross_entropy",
    {
        "nvidia": _NVIDIA,
        "none": _NVIDIA,
        "amd": _AMD,
        "interpreter": _NVIDIA,
    },
)
