"""What attention is asked for in a call: its operands and what their layout makes of a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.engine.attention import table as table
from tritonite.engine.attention.dropout import Dropout
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.errors import Decline
from tritonite.runtime.symbols import Number

# Tensor cores take as many elements of a product's inner dimension at least. Beside a size of over _NARROW two groups
# of warps may share a result's columns, and Triton's products of 8 columns on Hopper are wrong or end the program.
_LEAST, _NARROW, _LEAST_SHARED = 16, 64, 32


@dataclass(frozen=True)
class Facts:
    """Everything that a kernel of attention is compiled for.

    `ratio` is how many heads of the query share one of key and value, `head_size` and `value_size` the elements of
    theirs, and `block_d` and `block_v` the powers of two that hold these. `block_m` queries and `block_n` keys are
    taken at a time. Exponentials are `natural` in float32, where the logarithm of e would cost an error of its own, and
    otherwise powers of two. Scores are in `nats` in float32, and where a bias of numbers is added to them. `empty` is
    the logarithm of the sum over no keys, "0" or "inf". With `last` the last query of a sequence sees all of its keys.
    A `bias_of_keys` is the same for all queries. With `dropout`, which is "" or by "lanes" or "elements", rows of the
    latter are `aligned` where they begin with the first word of a draw.
    """

    causal: bool
    last: bool
    precision: str
    natural: bool
    nats: bool
    index: Any
    ratio: int
    head_size: int
    value_size: int
    block_d: int
    block_v: int
    block_m: int
    block_n: int
    empty: str
    bias_of_keys: bool
    dropout: str
    aligned: bool


class Packed(NamedTuple):
    """Sequences of several lengths one after the other: where each begins and the last ends, and the longest.

    The starts are of int32, one more than there are sequences. Of causal attention the `last` query of a sequence sees
    all of its keys, or the first query the first key alone. `logarithms` of their sums lie one after the other too, or
    else a sequence's in a row of its own.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    queries: int
    keys: int
    last: bool
    logarithms: bool


def compiler_options(natural: bool) -> dict[str, Any]:
    """What the compiler of a kernel is told. Exponentials are 0 where they are subnormal, but `natural` ones."""
    return devices.current.options | ({} if natural else devices.current.flushing)


def products(precision: str, query: torch.Tensor) -> str:
    """How products are computed: as gemm has them, by parts of bfloat16 where tensor cores are fast."""
    exact = precision == "ieee" and query.dtype is torch.float32
    return "bf16x6" if exact and devices.has_tma(query.device) and not devices.current.interpreted else precision


class Problem(NamedTuple):
    """Attention over (batch, heads, rows, elements), whose elements are next to each other.

    The bias is None, or of (batch, heads, queries, keys): added to scores, or a mask of bools that is false where
    there is nothing to see. With `causal` the query i sees keys to i + `diagonal`. Rows of `packed` sequences are those
    of all, in a batch of 1, without a bias.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    scale: float | Number | None
    causal: bool
    diagonal: int
    precision: str
    packed: Packed | None = None
    dropout: Dropout | None = None

    @property
    def batch(self) -> int:
        return self.query.shape[0] if self.packed is None else self.packed.query_starts.shape[0] - 1

    @property
    def queries(self) -> int:
        """Those of a sequence, or of the longest."""
        return self.query.shape[2] if self.packed is None else self.packed.queries

    @property
    def keys(self) -> int:
        """Those of a sequence, or of the longest."""
        return self.key.shape[2] if self.packed is None else self.packed.keys

    @property
    def starts(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Where packed sequences of queries and of keys begin."""
        return (None, None) if self.packed is None else (self.packed.query_starts, self.packed.key_starts)

    def strides(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Those of an operand or a result: packed sequences are told apart by where they begin."""
        return tensor.stride() if self.packed is None else (0, *tensor.stride()[1:])

    def logarithm_strides(self, logsumexp: torch.Tensor | None) -> tuple[int, ...]:
        """Those of the batch, heads and rows, and of the place where a packed sequence begins."""
        if logsumexp is None:
            return 0, 0, 0, 0
        batch, head, row = logsumexp.stride()
        return (0, head, row, row) if self.packed is not None and self.packed.logarithms else (batch, head, row, 0)

    @property
    def size(self) -> int:
        """The power of two that holds a head and a value."""
        return power_of_2(max(self.query.shape[3], self.value.shape[3]))

    @property
    def tiles(self) -> table.Tiles:
        shared = devices.shared_memory(self.query.device)
        of, dropped = self.query.dtype.itemsize, self.dropout is not None
        return table.tiles(devices.current.kind, of, self.size, shared, self.bias is not None, dropped)

    @property
    def factor(self) -> float | Number:
        """What scores are multiplied by: the call's number, or one over the root of a head's elements."""
        return 1 / math.sqrt(max(1, self.query.shape[3])) if self.scale is None else self.scale

    @property
    def adds(self) -> bool:
        """Whether there is a bias of numbers, not a mask of bools."""
        return self.bias is not None and self.bias.dtype is not torch.bool

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
        index, least = offset_type(*given), _LEAST if max(head, value) <= _NARROW else _LEAST_SHARED
        blocks = [max(least, power_of_2(size)) for size in (head, value)]
        if max(blocks) > 2 * min(blocks) and not devices.current.interpreted:
            raise Decline("heads and values of sizes far apart, whose gradients were wrong on an H200")
        return Facts(
            causal=self.causal,
            last=self.packed is not None and self.packed.last,
            precision=products(self.precision, self.query),
            natural=self.query.dtype is torch.float32,
            nats=self.query.dtype is torch.float32 or self.adds,
            index=index,
            ratio=self.ratio,
            head_size=head,
            value_size=value,
            block_d=blocks[0],
            block_v=blocks[1],
            block_m=tile.BLOCK_M,
            block_n=tile.BLOCK_N,
            empty=empty,
            bias_of_keys=self.bias is not None and self.bias.stride(2) == 0,
            dropout="" if self.dropout is None else "lanes" if self.dropout.lanes else "elements",
            aligned=self.dropout is not None and self.keys % 4 == 0,
        )

    @property
    def bias_strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.bias is None else self.bias.stride()
