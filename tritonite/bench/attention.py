"""Benchmark cases of attention: head shapes of models, and calls of each ATen operator with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import tritonite
from tritonite.testing.samples import Sample

Make = Callable[..., torch.Tensor]
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"


class Heads(NamedTuple):
    """Sizes of an attention call.

    Query is (batch, heads, queries or length, head_dim); key and value are (batch, kv_heads, length, head_dim).
    `queries` is None for as many queries as keys; in decoding it is the number of last positions.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool = False
    queries: int | None = None

    def __str__(self) -> str:
        """Return the label of a case, such as "4x32/8x4096x128 causal"."""
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        decoding = "" if self.queries is None else f" {self.queries} of"
        return f"{self.batch}x{heads}x{self.length}x{self.head_dim}{' causal' if self.causal else ''}{decoding}"

    @property
    def flops(self) -> int | None:
        """Flops of the forward pass's two products, halved if causal; None in decoding, which is memory-bound."""
        if self.queries is not None:
            return None
        return 4 * self.batch * self.heads * self.length**2 * self.head_dim // (2 if self.causal else 1)

    def operands(self, make: Make) -> list[torch.Tensor]:
        """Return query, key and value."""
        query = make(self.batch, self.heads, self.queries or self.length, self.head_dim)
        return [query, *(make(self.batch, self.kv_heads, self.length, self.head_dim) for _ in range(2))]


# 16-bit floats: prompts of language models, long ones, head sizes 64 and 256, grouped heads; short encoder sequences.
SIXTEEN_BIT = (
    Heads(4, 32, 32, 4096, 128),
    Heads(4, 32, 32, 4096, 128, True),
    Heads(2, 32, 32, 16_384, 128, True),
    Heads(4, 32, 32, 4096, 64),
    Heads(4, 32, 32, 4096, 64, True),
    Heads(4, 16, 16, 4096, 256, True),
    Heads(4, 32, 8, 4096, 128, True),
    Heads(32, 16, 16, 512, 64),
    Heads(16, 12, 12, 1024, 64, True),
    Heads(1, 32, 8, 512, 64, True),
)
# Decoding one token of one or many sequences, with and without grouped heads; the last is speculative decoding.
DECODING = (
    Heads(1, 32, 8, 8192, 128, queries=1),
    Heads(16, 32, 8, 8192, 128, queries=1),
    Heads(64, 32, 8, 2048, 128, queries=1),
    Heads(8, 32, 32, 4096, 128, queries=1),
    Heads(1, 32, 8, 131_072, 128, queries=1),
    Heads(16, 32, 8, 8192, 128, queries=8),
)
# float32: Whisper's encoder and BERT.
FLOAT32 = (Heads(1, 12, 12, 1500, 64), Heads(4, 12, 12, 128, 64))
SMALL, INTERPRETED = Heads(1, 2, 2, 64, 64), Heads(1, 2, 2, 24, 16, True)
FEW = Heads(1, 4, 4, 300, 16, queries=1)


def _positional(packet: str, causal: bool, bias: torch.Tensor | None) -> tuple[Any, ...]:
    """Return the arguments of a forward operator after query, key and value."""
    return (0.0, causal) if "flash" in packet else (bias, True, 0.0, causal)


def forward(packet: str, heads: Heads, make: Make, biased: bool = False) -> Sample:
    """Return a call of a forward operator."""
    bias = make(heads.batch, 1, heads.queries or heads.length, heads.length) if biased else None
    bias = None if bias is None else bias.expand(-1, heads.heads, -1, -1)
    return Sample(str(heads), (*heads.operands(make), *_positional(packet, heads.causal, bias)), {})


def backward(packet: str, heads: Heads, make: Make, biased: bool = False) -> Sample:
    """Return a call of the gradient of forward operator `packet`, on the results of ATen's forward if it has one."""
    sample = forward(packet, heads, make, biased)
    query, key, value, *rest = sample.args
    op = tritonite.overloads()[packet]
    out, logsumexp, *others = (getattr(torch.ops.aten, packet) if op.has_place else op)(*sample.args)
    grad = torch.empty_like(out).copy_(make(*out.shape))
    first = (grad, query, key, value)
    if packet == EFFICIENT:
        own = (*first, rest[0], out, logsumexp, *others, 0.0, [True, True, True, False], heads.causal)
    elif "cudnn" in packet:
        own = (*first, out, logsumexp, *others[4:6], rest[0], *others[:4], 0.0, heads.causal)
    elif packet.endswith("cpu"):
        own = (*first, out, logsumexp, 0.0, heads.causal)
    else:
        own = (*first, out, logsumexp, *others[:4], 0.0, heads.causal, *others[4:6])
    return Sample(sample.label, own, {})


def cudnn_rows(packet: str, heads: Heads, make: Make, biased: bool = False) -> Sample:
    """Return a call of `_cudnn_attention_forward` on a batch of sequences of one length, without their starts."""
    sample = forward(CUDNN, heads, make, biased)
    query, key, value, bias, *rest = sample.args
    return Sample(sample.label, (query, key, value, bias, None, None, query.shape[2], key.shape[2], *rest), {})


def _packed(packet: str, heads: Heads, make: Make) -> tuple[list[Any], dict[str, Any]]:
    """Return (query, key, value) and the further arguments of operators on packed sequences, all of one length."""
    operands = [make(heads.batch * each.shape[2], each.shape[1], heads.head_dim) for each in heads.operands(_shaped)]
    lengths = heads.queries or heads.length, heads.length
    first = torch.arange(heads.batch + 1, dtype=torch.int32, device=operands[0].device)
    starts = tuple(first * length for length in lengths)
    if "flash" in packet:
        return operands, {"starts": starts, "rest": (*lengths, 0.0, heads.causal)}
    operands = [each.unsqueeze(0) for each in operands]
    return operands, {"starts": starts, "rest": (*lengths, 0.0, int(heads.causal))}


def _shaped(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def packed_forward(packet: str, heads: Heads, make: Make, biased: bool = False) -> Sample:
    """Return a call of a forward operator on packed sequences."""
    operands, given = _packed(packet, heads, make)
    first = (*operands, *(() if "flash" in packet else (None,)), *given["starts"], *given["rest"])
    return Sample(str(heads), (*first, "flash" not in packet), {})


def packed_backward(packet: str, heads: Heads, make: Make, biased: bool = False) -> Sample:
    """Return a call of the gradient of packed forward operator `packet`, on the results of ATen's if it has one."""
    sample = packed_forward(packet, heads, make)
    op = tritonite.overloads()[packet]
    out, logsumexp, *others = (getattr(torch.ops.aten, packet) if op.has_place else op)(*sample.args)
    query, key, value, *rest = sample.args
    first = (torch.empty_like(out).copy_(make(*out.shape)), query, key, value)
    if "flash" in packet:
        return Sample(sample.label, (*first, out, logsumexp, *rest[:6], *others[:2]), {})
    bias, *rest = rest
    own = (*first, bias, out, *rest[:4], logsumexp, rest[4], *others[:2], rest[5], False)
    return Sample(sample.label, own, {})


def calls(
    packet: str, dtype: torch.dtype, measure: str, quick: bool, interpreted: bool
) -> Iterator[tuple[str, Callable[[Make], Sample], int | None]]:
    """Yield (label, call, flops) of an operator, forward or backward; decoding is forward only."""
    name = packet.removesuffix("_backward")
    make_call, times = (forward, 2) if name == packet else (backward, 5)
    if name.startswith("_cudnn_attention"):
        # Its gradient takes the arguments of _scaled_dot_product_cudnn_attention_backward.
        name, make_call = (packet, cudnn_rows) if name == packet else (CUDNN, backward)
    elif not name.startswith("_scaled_dot_product"):
        name = f"{name.removesuffix('_forward')}_forward"
        make_call, times = (packed_forward, 2) if name == packet else (packed_backward, 5)
    every: tuple[Heads, ...] = FLOAT32 if dtype is torch.float32 else SIXTEEN_BIT
    decoding: tuple[Heads, ...] = () if dtype is torch.float32 else DECODING
    if interpreted or measure == "host":
        every, decoding = (INTERPRETED if interpreted else SMALL,), (FEW,)
    chosen = every[:: 3 if quick else 1]
    for heads in (*chosen, *decoding[:: 3 if quick else 1]) if name == packet else chosen:
        if "efficient" in name and heads.heads != heads.kv_heads:
            continue
        for biased in (False, True) if name == EFFICIENT and not heads.causal and measure != "host" else (False,):

            def made(make: Make, heads: Heads = heads, biased: bool = biased) -> Sample:
                return make_call(name, heads, make, biased)

            flops = None if heads.flops is None else heads.flops * times // 2
            yield f"{heads}{' biased' if biased else ''}", made, flops
