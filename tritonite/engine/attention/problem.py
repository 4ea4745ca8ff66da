"""A call of attention: its operands, and the compile-time facts of its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.engine.attention import table
from tritonite.engine.attention.dropout import Dropout
from tritonite.engine.attention.prologue import ForwardStrides, HeadStrides, Tensors
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.runtime.symbols import Number

# The least padded size of a head. Triton's warp-group products of 16 columns read beyond shared memory, and two warp
# groups that share 16 columns compute wrong ones.
LEAST_PADDED = 32
# Up to this padded size a head and a value have the same. Beside heads of 64, Triton compiles a wrong product with 32
# columns of 16-bit values whose rows are not aligned.
_ALIKE = 64


@dataclass(frozen=True, kw_only=True)
class AttentionMeta:
    """Compile-time facts of an attention kernel.

    causal: query i sees the keys up to i + diagonal.
    last: the diagonal is such that a packed sequence's last query sees all of its keys.
    precision: of products, Triton's `input_precision` or "bf16x6".
    natural: exponentials are base e (float32, where a product with log2(e) would add an error), not base 2.
    nats: scores are in nats (float32, and with an additive bias), not in base 2.
    index: dtype of offsets.
    ratio: query heads per key and value head.
    head_size, value_size: elements of a query or key, and of a value.
    block_d, block_v: powers of two that hold head_size and value_size.
    block_m, block_n: queries and keys of a tile.
    empty: logsumexp of a query that sees no key, "0" or "inf".
    bias_of_keys: the bias is the same for all queries.
    dropout: "", or the mapping of elements to random numbers, "lanes" or "elements".
    aligned: by "elements", rows begin with the first number of a draw.
    windowed: a query sees the last `window` keys up to its diagonal only; kernels that read it are causal.
    capped: scores have a soft cap.
    """

    causal: bool
    last: bool
    precision: str
    natural: bool = False
    nats: bool = False
    index: Any
    ratio: int
    head_size: int
    value_size: int
    block_d: int
    block_v: int
    block_m: int
    block_n: int
    empty: str = "inf"
    bias_of_keys: bool = False
    dropout: str = ""
    aligned: bool = False
    windowed: bool = False
    capped: bool = False


class Packed(NamedTuple):
    """Sequences of several lengths, concatenated.

    query_starts, key_starts: int32, (sequences + 1,): the first row of each sequence, and the end of the last.
    queries, keys: upper bounds of a sequence's lengths.
    last: with causal attention, the last query of a sequence sees all of its keys; otherwise the first query sees the
        first key only.
    logarithms: logsumexp is concatenated too; otherwise it has a row for each sequence.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    queries: int
    keys: int
    last: bool
    logarithms: bool


def compiler_options(natural: bool) -> dict[str, Any]:
    """Return a kernel's compiler options. Base-2 exponentials flush subnormal results to 0."""
    return devices.current.options | ({} if natural else devices.current.flushing)


def padded_sizes(head: int, value: int, precision: str) -> tuple[int, int]:
    """Return the powers of two that hold a head and a value in a tile.

    They differ by a factor of 2 at most, and not at all with products by bfloat16 terms or up to 64 elements: Triton
    compiles wrong results and gradients for others, and accesses outside shared memory.
    """
    # Rows of one element are contiguous, and Triton orders their tile by rows. Beside a tile of 32 columns in the other
    # order, ptxas 12.8 takes the shared-memory address of a product from a kernel argument.
    least = _ALIKE if min(head, value) == 1 else LEAST_PADDED
    first, second = max(least, power_of_2(head)), max(least, power_of_2(value))
    ratio = 1 if precision == "bf16x6" or max(first, second) <= _ALIKE else 2
    return max(first, second // ratio), max(second, first // ratio)


def dot_precision(precision: str, query: torch.Tensor) -> str:
    """Return the precision of products: bf16x6 for exact float32 where bfloat16 tensor cores are fast."""
    exact = precision == "ieee" and query.dtype is torch.float32
    return "bf16x6" if exact and devices.has_tma(query.device) and not devices.current.interpreted else precision


class Problem(NamedTuple):
    """Attention over (batch, heads, rows, elements) operands whose elements are contiguous.

    bias: None, or (batch, heads, queries, keys): added to scores, or a bool mask that is false for hidden keys.
    causal, diagonal: query i sees the keys up to i + diagonal.
    packed: operands hold all sequences in a batch of 1, without a bias.
    window: with `causal`, query i sees the last `window` of the keys up to i + diagonal; None for all of these keys.
    softcap: scores become softcap * tanh(score / softcap) before a bias is added; None for no cap.
    sinks: (heads,), contiguous: a score of each head's rows that has no value; None for no sinks.

    Only the decoding kernels and those for all devices serve a window, a soft cap or sinks, none of them in packed
    sequences.
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
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Return whether there is no window, no soft cap and no sinks."""
        return self.window is None and self.softcap is None and self.sinks is None

    @property
    def batch(self) -> int:
        return self.query.shape[0] if self.packed is None else self.packed.query_starts.shape[0] - 1

    @property
    def queries(self) -> int:
        """Queries of a sequence, or of the longest packed one."""
        return self.query.shape[2] if self.packed is None else self.packed.queries

    @property
    def keys(self) -> int:
        """Keys of a sequence, or of the longest packed one."""
        return self.key.shape[2] if self.packed is None else self.packed.keys

    @property
    def starts(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """First rows of packed sequences in query and in key."""
        return (None, None) if self.packed is None else (self.packed.query_starts, self.packed.key_starts)

    @property
    def tensors(self) -> Tensors:
        """Tensors that every pass reads."""
        query_starts, key_starts = self.starts
        return Tensors(*self[:4], query_starts=query_starts, key_starts=key_starts, sinks=self.sinks)

    def strides(self, tensor: torch.Tensor | None) -> HeadStrides:
        """Return the strides of a tensor or of None, with batch stride 0 for packed sequences."""
        if tensor is None:
            return HeadStrides(0, 0, 0, 0)
        return HeadStrides(*(tensor.stride() if self.packed is None else (0, *tensor.stride()[1:])))

    def logsumexp_strides(self, logsumexp: torch.Tensor | None) -> HeadStrides:
        """Return the strides of logsumexp, or of None."""
        if logsumexp is None:
            return self.strides(None)
        batch, head, row = logsumexp.stride()
        packed = self.packed is not None and self.packed.logarithms
        return HeadStrides(0, head, row, row) if packed else HeadStrides(batch, head, row, 0)

    def forward_strides(self, out: torch.Tensor, logsumexp: torch.Tensor | None) -> ForwardStrides:
        """Return the strides of a forward kernel's tensors."""
        query, key, value, result, bias = map(self.strides, (*self[:3], out, self.bias))
        return ForwardStrides(query, key, value, result, bias, self.logsumexp_strides(logsumexp))

    @property
    def size(self) -> int:
        """The power of two that holds a head and a value."""
        return power_of_2(max(self.query.shape[3], self.value.shape[3]))

    @property
    def tiles(self) -> table.Tiles:
        shared_memory = devices.shared_memory(self.query.device)
        itemsize, dropped = self.query.dtype.itemsize, self.dropout is not None
        return table.tiles(devices.current.kind, itemsize, self.size, shared_memory, self.bias is not None, dropped)

    @property
    def query_blocks(self) -> int:
        """Blocks of queries in a head that backward_dq for all devices has."""
        return -(-self.queries // self.tiles.query.BLOCK_M)

    @property
    def factor(self) -> float | Number:
        """The factor of scores: the call's scale, or 1 / sqrt(head_size)."""
        return 1 / math.sqrt(max(1, self.query.shape[3])) if self.scale is None else self.scale

    @property
    def adds(self) -> bool:
        """Return whether the bias is added to scores, not a bool mask."""
        return self.bias is not None and self.bias.dtype is not torch.bool

    @property
    def group(self) -> int:
        """Query heads that programs take together: for causal attention those whose keys fit in L2."""
        if not self.causal:
            return 1
        size = self.keys * (self.query.shape[3] + self.value.shape[3]) * self.key.dtype.itemsize
        return max(1, table.CACHED // max(1, size)) * self.ratio

    @property
    def ratio(self) -> int:
        """Query heads per key and value head."""
        return self.query.shape[1] // max(1, self.key.shape[1])

    def meta(
        self, tile: table.Tile, *tensors: torch.Tensor | None, empty: str = "inf", least: int = 0
    ) -> AttentionMeta:
        """Return the facts of a kernel that also reads or writes `tensors`; `least` bounds block_d and block_v."""
        head, value = self.query.shape[3], self.value.shape[3]
        index = offset_type(*[each for each in (*self[:4], *tensors) if each is not None])
        precision = dot_precision(self.precision, self.query)
        blocks = padded_sizes(head, value, precision)
        return AttentionMeta(
            causal=self.causal,
            last=self.packed is not None and self.packed.last,
            precision=precision,
            natural=self.query.dtype is torch.float32,
            nats=self.query.dtype is torch.float32 or self.adds,
            index=index,
            ratio=self.ratio,
            head_size=head,
            value_size=value,
            block_d=max(least, blocks[0]),
            block_v=max(least, blocks[1]),
            block_m=tile.BLOCK_M,
            block_n=tile.BLOCK_N,
            empty=empty,
            bias_of_keys=self.bias is not None and self.bias.stride(2) == 0,
            dropout="" if self.dropout is None else "lanes" if self.dropout.lanes else "elements",
            aligned=self.dropout is not None and self.keys % 4 == 0,
            windowed=self.window is not None,
            capped=self.softcap is not None,
        )

    def padded_rows(self, logsumexp: torch.Tensor | None) -> int:
        """Return the rows of logsumexp that a kernel fills with inf behind the last query, 0 for none."""
        return 0 if logsumexp is None or (self.packed is not None and self.packed.logarithms) else logsumexp.shape[2]
