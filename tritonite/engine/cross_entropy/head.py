"""Cross entropy over a linear head, a chunk of tokens at a time, so that the logits never lie in memory as a whole.

A chunk's logits are input @ weight.mT + bias in the operands' dtype. Their gradient d replaces them in memory, and
gives d @ weight for the input, and d.mT @ input and the sums of d's columns, added up in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tritonite.engine.cross_entropy.arguments import Classes, Statistics, Targets
from tritonite.engine.cross_entropy.launch import (
    Loss,
    add_columns,
    buffer_for_logits,
    read_rows,
    replace_by_gradient,
    table,
    write_gradient,
)
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.work import NO_EPILOGUE, Epilogue, Sums
from tritonite.runtime.contract import empty, zeros


class Head(NamedTuple):
    """A linear head: input (N, H), weight (V, H), bias (V,) or None; the precision of products; tokens of a chunk."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    precision: str
    chunk: int

    def product(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue = NO_EPILOGUE) -> None:
        product(a[None], b[None], out[None], epilogue, Sums(self.precision))

    def logits(self, tokens: slice, out: torch.Tensor) -> None:
        """Write the logits of some tokens into `out`, (tokens, V)."""
        bias = NO_EPILOGUE if self.bias is None else Epilogue(self.bias, beta=1.0)
        self.product(self.input[tokens], self.weight.mT, out, bias)


class Gradients(NamedTuple):
    """Gradients by a head's operands, None for those not wanted; weight and bias in the accumulation dtype."""

    input: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def tokens_of_a_chunk(n_tokens: int) -> int:
    """Return how many tokens have their logits in memory at a time."""
    own = table()
    multiple = own.chunk_multiple
    share = -(-int(n_tokens * own.chunk_share) // multiple) * multiple
    return max(1, min(n_tokens, max(own.chunk_tokens, share)))


def make_gradients(head: Head, wanted: tuple[bool, bool, bool], accumulate: torch.dtype) -> Gradients:
    """Allocate the gradients wanted by input, weight and bias; without tokens those of weight and bias are 0."""
    input, weight = head.input, head.weight
    make = empty if input.shape[0] else zeros
    return Gradients(
        empty(input.shape, input.dtype, input.device) if wanted[0] else None,
        make(weight.shape, accumulate, input.device) if wanted[1] else None,
        make(weight.shape[:1], accumulate, input.device) if wanted[2] else None,
    )


def _chunks(
    head: Head, targets: Targets, statistics: Statistics
) -> Iterator[tuple[int, torch.Tensor, Targets, Statistics]]:
    """Yield the start of each chunk, its logits, its targets and its statistics. All logits share one buffer."""
    n_tokens = head.input.shape[0]
    if not n_tokens:
        return
    buffer = buffer_for_logits(head.chunk, head.weight.shape[0], head.input.dtype, head.input.device)
    for start in range(0, n_tokens, head.chunk):
        own = slice(start, min(start + head.chunk, n_tokens))
        logits = buffer[: own.stop - start]
        head.logits(own, logits)
        scale = None if targets.token_scale is None else targets.token_scale[own]
        rows = [None if each is None else each[own] for each in statistics]
        rows[3] = statistics.weight_sum
        yield start, logits, Targets(targets.target[own], targets.weight, scale), Statistics(*rows)


def propagate(head: Head, start: int, logits: torch.Tensor, gradients: Gradients) -> None:
    """Add what the gradient `logits` by a chunk's logits gives the gradients by input, weight and bias."""
    own = slice(start, start + logits.shape[0])
    if gradients.input is not None:
        head.product(logits, head.weight, gradients.input[own])
    if gradients.weight is not None:
        total = gradients.weight
        head.product(logits.mT, head.input[own], total, Epilogue(total, beta=1.0) if start else NO_EPILOGUE)
    if gradients.bias is not None:
        add_columns(logits, gradients.bias, accumulate=start > 0)


def read_head(head: Head, targets: Targets, statistics: Statistics, loss: Loss, classes: Classes) -> None:
    """Fill the statistics of all tokens' logits."""
    for _, logits, own_targets, own in _chunks(head, targets, statistics):
        read_rows(logits, own_targets, own, loss, classes, padded=True)


def read_head_with_gradients(
    head: Head, targets: Targets, statistics: Statistics, loss: Loss, gradients: Gradients
) -> None:
    """Fill the statistics of all tokens' logits, and the gradients of the losses' sum."""
    for start, logits, own_targets, own in _chunks(head, targets, statistics):
        replace_by_gradient(logits, own_targets, own, loss)
        propagate(head, start, logits, gradients)


def write_head_gradients(
    head: Head,
    grad: torch.Tensor,
    targets: Targets,
    statistics: Statistics,
    total: torch.Tensor | None,
    loss: Loss,
    classes: Classes,
    gradients: Gradients,
) -> None:
    """Fill the gradients from known statistics, with logits computed anew; `grad` as in `launch.write_gradient`."""
    for start, logits, own_targets, own in _chunks(head, targets, statistics):
        own_grad = grad[start : start + logits.shape[0]] if grad.dim() else grad
        write_gradient(own_grad, logits, logits, own_targets, own, total, loss, classes, padded=True)
        propagate(head, start, logits, gradients)
