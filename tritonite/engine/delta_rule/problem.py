"""Operands of the gated delta rule, the compile-time facts and run-time sizes of its kernels, and their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.devices.tables import Tables
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.runtime.contract import Number

# The longest query or key, which a program holds whole.
LARGEST_KEY = 256
# The least length of a dimension of the products, and of a chunk. Triton's warp-group products of 16 columns read
# beyond shared memory.
_LEAST, _LEAST_CHUNK = 32, 16


class Blocks(NamedTuple):
    """Value columns of a program, with the compiler's warps and stages."""

    columns: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class DeltaTable(NamedTuple):
    """Blocks of a kind of device.

    `chunk`: tokens of a chunk, a power of 2 from 16, for keys of up to `key_bytes` bytes; `chunk_fp32` for float32.
    Longer keys have fewer, so that a chunk's tiles fit in shared memory.
    `recurrent`: programs that update a state token by token.
    `prepare`: programs of a chunk's scores and inverted system; they have no value columns.
    `passes`: programs of a head's value columns that pass over the chunks, for 16-bit floats.
    `passes_fp32`: the same for float32.
    `gradients`: programs of a chunk's gradients for 16-bit floats; `gradients_fp32` for float32.
    `inverse`: precision of the products that invert the system of 16-bit floats.
    """

    chunk: int
    chunk_fp32: int
    key_bytes: int
    recurrent: Blocks
    prepare: Blocks
    passes: Blocks
    passes_fp32: Blocks
    gradients: Blocks
    gradients_fp32: Blocks
    inverse: str


_NVIDIA = DeltaTable(
    chunk=64,
    # Fewer rows than warp groups multiply, whose products of bfloat16 terms Triton 3.6 compiles wrong.
    chunk_fp32=32,
    key_bytes=256,
    recurrent=Blocks(32, 4, 1),
    prepare=Blocks(0, 4, 1),
    # Two warps, which use no warp-group products. Before those Triton 3.6 puts the proxy fence of an operand behind the
    # barrier, so that a pass may read a state that other warps have not yet published.
    passes=Blocks(32, 2, 1),
    passes_fp32=Blocks(32, 2, 1),
    gradients=Blocks(32, 8, 1),
    gradients_fp32=Blocks(32, 8, 1),
    inverse="tf32",
)
_AMD = _NVIDIA._replace(chunk=32, inverse="ieee")
TABLE: Tables[DeltaTable] = Tables(
    "delta_rule",
    {
        "nvidia": _NVIDIA,
        "none": _AMD,
        "amd": _AMD,
        "interpreter": _AMD._replace(chunk=64, chunk_fp32=64),
    },
)


def delta_table() -> DeltaTable:
    """Return the table of the current device."""
    return TABLE[devices.current.kind]


class Inputs(NamedTuple):
    """Operands of a call, in the host's code tensors and in kernels their addresses.

    query, key: (batch, tokens, key heads, key size), contiguous along the last dimension.
    value: (batch, tokens, heads, value size), contiguous along the last dimension.
    g, beta: (batch, tokens, heads), the logarithm of the decay and the rate of correction.
    initial: (batch, heads, key size, value size), the contiguous state before the first token, or None for zeros.
    """

    query: Any
    key: Any
    value: Any
    g: Any
    beta: Any
    initial: Any


class RowStrides(NamedTuple):
    """Strides of rows over batch, tokens and heads."""

    batch: Any
    token: Any
    head: Any


class InputStrides(NamedTuple):
    """Strides of the operands, and of `out`, the tensor that has a row for each token and head."""

    query: RowStrides
    key: RowStrides
    value: RowStrides
    g: RowStrides
    beta: RowStrides
    out: RowStrides


class DeltaSizes(NamedTuple):
    """Sizes of a model: heads of the values, heads that share a key, sizes of a key and of a value."""

    heads: Any
    ratio: Any
    key: Any
    value: Any


@dataclass(frozen=True)
class DeltaMeta:
    """Compile-time facts of the kernels.

    A chunk has `chunk` = 2 ** `levels` tokens. `block_k` is the key size rounded up to a power of 2, and `block_v` the
    value columns of a block. With `normalize`, queries and keys are divided by their lengths. `precision` is that of
    products, and `inverse` that of the products that invert a system.
    """

    index: Any
    chunk: int
    levels: int
    block_k: int
    block_v: int
    normalize: bool
    precision: str
    inverse: str


class Problem(NamedTuple):
    """A call: operands, the factor of queries, whether to normalise queries and keys, and the precision of products."""

    inputs: Inputs
    scale: float | Number
    normalize: bool
    precision: str

    @property
    def batch(self) -> int:
        return int(self.inputs.value.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.inputs.value.shape[1])

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        table = delta_table()
        size = power_of_2(self.sizes.key) * self.inputs.key.dtype.itemsize
        most = table.chunk * table.key_bytes // max(size, 1)
        return max(_LEAST_CHUNK, min(table.chunk_fp32 if self.single else table.chunk, most))

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.chunk)

    @property
    def sizes(self) -> DeltaSizes:
        heads, value = self.inputs.value.shape[2:]
        key_heads, key = self.inputs.key.shape[2:]
        return DeltaSizes(heads, heads // max(1, key_heads), key, value)

    @property
    def heads(self) -> int:
        """The number of states: batch times heads."""
        return self.batch * self.sizes.heads

    @property
    def single(self) -> bool:
        """True for float32 operands."""
        return bool(self.inputs.query.dtype is torch.float32)

    def strides(self, out: torch.Tensor) -> InputStrides:
        """Return the strides of the operands and of `out`, (batch, tokens, heads, columns)."""
        return InputStrides(*[RowStrides(*each.stride()[:3]) for each in (*self.inputs[:5], out)])

    def meta(self, blocks: Blocks, *others: torch.Tensor) -> DeltaMeta:
        """Return the compile-time facts of a kernel with `blocks`; offsets reach the elements of `others`, too."""
        table, sizes = delta_table(), self.sizes
        return DeltaMeta(
            index=offset_type(*[each for each in (*self.inputs, *others) if each is not None]),
            chunk=self.chunk,
            levels=self.chunk.bit_length() - 1,
            block_k=max(_LEAST, power_of_2(sizes.key)),
            block_v=max(_LEAST, min(blocks.columns, power_of_2(sizes.value))),
            normalize=self.normalize,
            precision=self.precision,
            inverse=self.precision if self.single else table.inverse,
        )
