"""What attention is asked for in a call: its operands and what their layout makes of a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.dispatch.call import Number
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.tune import attention as table

# Tensor cores take as many elements of a product's inner dimension at least.
_LEAST = 16


@dataclass(frozen=True)
class Facts:
    """Everything that a kernel of attention is compiled for.

    `ratio` is how many heads of the query share one of key and value, `head_size` and `value_size` the elements of
    theirs, and `block_d` and `block_v` the powers of two that hold these. `block_m` queries and `block_n` keys are
    taken at a time. `empty` is the logarithm of the sum over no keys, "0" or "inf".
    """

    causal: bool
    precision: str
    index: Any
    ratio: int
    head_size: int
    value_size: int
    block_d: int
    block_v: int
    block_m: int
    block_n: int
    empty: str = "inf"


def products(precision: str, query: torch.Tensor) -> str:
    """How products are computed: as gemm has them, by parts of bfloat16 where tensor cores are fast."""
    exact = precision == "ieee" and query.dtype is torch.float32
    return "bf16x6" if exact and devices.has_tma(query.device) and not devices.current.interpreted else precision


class Problem(NamedTuple):
    """Attention over (batch, heads, rows, elements), whose elements are next to each other.

    The bias is None, or of (batch, heads, queries, keys): added to scores, or a mask of bools that is false where
    there is nothing to see. With `causal` the query i sees keys to i + `diagonal`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    scale: float | Number | None
    causal: bool
    diagonal: int
    precision: str

    @property
    def queries(self) -> int:
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        return self.key.shape[2]

    @property
    def tiles(self) -> table.Tiles:
        size = power_of_2(max(self.query.shape[3], self.value.shape[3]))
        shared = devices.shared_memory(self.query.device)
        return table.tiles(devices.current.kind, self.query.dtype.itemsize, size, shared)

    @property
    def factor(self) -> float | Number:
        """What scores are multiplied by: the call's number, or one over the root of a head's elements."""
        return 1 / math.sqrt(max(1, self.query.shape[3])) if self.scale is None else self.scale

    @property
    def group(self) -> int:
        """How many heads of the query are begun together: of causal attention as many as share a cache."""
        if not self.causal:
            return 1
        size = self.keys * (self.query.shape[3] + self.value.shape[3]) * self.key.dtype.itemsize
        return max(1, table.CACHED // max(1, size)) * self.ratio

    @property
    def ratio(self) -> int:
        """The heads of the query for each of key and value."""
        return self.query.shape[1] // max(1, self.key.shape[1])

    def facts(self, tile: table.Tile, *tensors: torch.Tensor, empty: str = "inf") -> Facts:
        """What a kernel is compiled for that also reads and writes these tensors."""
        head, value = self.query.shape[3], self.value.shape[3]
        given = (self.query, self.key, self.value, *tensors, *(() if self.bias is None else (self.bias,)))
        exact, index = products(self.precision, self.query), offset_type(*given)
        blocks = max(_LEAST, power_of_2(head)), max(_LEAST, power_of_2(value))
        return Facts(*(self.causal, exact, index, self.ratio, head, value, *blocks, tile.BLOCK_M, tile.BLOCK_N, empty))

    @property
    def bias_strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.bias is None else self.bias.stride()
