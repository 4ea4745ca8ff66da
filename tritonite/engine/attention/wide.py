"""Attention of heads that are too wide for a tile: products, and the softmax of some queries' scores at a time.

Forward: a product writes float32 scores of a part of the queries, `normalize_scores` their softmax in the operands'
dtype, and a product with the values the result. Backward: the scores and dp = grad_out v^T are computed again,
`differentiate_scores` writes the probabilities p and ds = p (dp - delta), and products give dq, dk and dv.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.attention.problem import Problem
from tritonite.engine.attention.scores import finite_max
from tritonite.engine.attention.table import LARGEST_HEAD, WIDE_BLOCK, WIDE_SCORES
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.work import NO_EPILOGUE, Epilogue, Sums
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class WideMeta:
    """Compile-time facts of a kernel that reads rows of scores.

    causal: row i of a part sees the keys up to i + offset.
    bias: "added" to scores, a "mask" that is false for hidden keys, or "".
    empty: logsumexp of a query that sees no key, "0" or "inf".
    index: dtype of offsets.
    block: keys that a program reads at a time.
    """

    causal: bool
    bias: str
    empty: str
    index: Any
    block: int


class RowStrides(NamedTuple):
    """Strides of a tensor of (batch, rows, elements), or of (batch, rows)."""

    batch: int
    row: int
    element: int = 1


class Part(NamedTuple):
    """A head, and slices of the batch and of the queries, whose scores lie in memory at a time."""

    head: int
    batch: slice
    rows: slice

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return (batch, rows, elements) of a tensor of the queries' shape."""
        return tensor[self.batch, self.head, self.rows]


@triton.jit
def _masked(score, bias, batch, row, key, strides, scale, visible, META: tl.constexpr):
    """Return scaled scores of a row, with the bias added, and -inf for the keys from `visible` on and hidden ones."""
    facts: tl.constexpr = META
    score = score * scale
    exists = key < visible
    if facts.bias != "":
        first = bias + batch.to(facts.index) * strides.batch + row.to(facts.index) * strides.row
        value = tl.load(first + key.to(facts.index) * strides.element, mask=exists, other=0)
        if facts.bias == "mask":
            exists = exists & (value != 0)
        else:
            score = score + value.to(tl.float32)
    return tl.where(exists, score, float("-inf"))


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_stored", "n_keys", "offset"])
def normalize_scores(
    probabilities,
    logsumexp,
    scores,
    bias,
    strides,
    bias_strides,
    scale: tl.float64,
    n_rows,
    n_stored,
    n_keys,
    offset,
    META: tl.constexpr,
):
    """Write the softmax of rows of scores, (batch, n_rows, n_keys), and the logarithms of their sums of exponentials.

    A program has a row. `logsumexp`, of the `strides` given, may be None, or has inf in the rows up to `n_stored`.
    """
    wait_for_previous_launch()
    facts: tl.constexpr = META
    factor = tl.full((), scale, tl.float64).to(tl.float32)
    batch, row = tl.program_id(0) // n_stored, tl.program_id(0) % n_stored
    lane = tl.arange(0, facts.block)
    if row < n_rows:
        visible = tl.minimum(n_keys, tl.maximum(row + offset + 1, 0)) if facts.causal else n_keys
        first = (batch.to(facts.index) * n_rows + row) * n_keys
        m, total = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
        for start in range(0, visible, facts.block):
            key = start + lane
            score = tl.load(scores + first + key, mask=key < visible, other=0)
            score = _masked(score, bias, batch, row, key, bias_strides, factor, visible, META)
            largest = tl.maximum(m, tl.max(score[None, :], 1))
            base = finite_max(largest)
            total = total * libdevice.exp(m - base) + tl.sum(libdevice.exp(score[None, :] - base[:, None]), 1)
            m = largest
        seen = total > 0
        base = tl.where(seen, m, 0.0)
        inverse = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), tl.where(total == 0, 0.0, total))
        for start in range(0, n_keys, facts.block):
            key = start + lane
            score = tl.load(scores + first + key, mask=key < visible, other=0)
            score = _masked(score, bias, batch, row, key, bias_strides, factor, visible, META)
            p = libdevice.exp(score - tl.broadcast_to(base, score.shape)) * tl.broadcast_to(inverse, score.shape)
            tl.store(probabilities + first + key, p, mask=key < n_keys)
        if logsumexp is not None:
            none: tl.constexpr = 0.0 if facts.empty == "0" else float("inf")
            value = tl.where(total == 0, none, m + libdevice.log(total))
            target = logsumexp + batch.to(facts.index) * strides.batch + row.to(facts.index) * strides.row
            tl.store(target + tl.arange(0, 1), value)
    elif logsumexp is not None:
        target = logsumexp + batch.to(facts.index) * strides.batch + row.to(facts.index) * strides.row
        tl.store(target, float("inf"))


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n_keys", "n_elements", "offset"])
def differentiate_scores(
    probabilities,
    by_scores,
    scores,
    by_probabilities,
    out,
    grad_out,
    logsumexp,
    bias,
    out_strides,
    grad_strides,
    strides,
    bias_strides,
    scale: tl.float64,
    n_rows,
    n_keys,
    n_elements,
    offset,
    META: tl.constexpr,
):
    """Write the probabilities of rows of scores, and the gradient by the products of queries and keys.

    A program has a row: p = exp(score - logsumexp), and p (dp - delta) times the scale, where dp is `by_probabilities`
    and delta the sum of out * grad_out over the row's `n_elements`.
    """
    wait_for_previous_launch()
    facts: tl.constexpr = META
    factor = tl.full((), scale, tl.float64).to(tl.float32)
    batch, row = tl.program_id(0) // n_rows, tl.program_id(0) % n_rows
    lane = tl.arange(0, facts.block)
    own, line = batch.to(facts.index), row.to(facts.index)
    delta = tl.zeros((1,), tl.float32)
    for start in range(0, n_elements, facts.block):
        element = start + lane
        x = tl.load(
            out + own * out_strides.batch + line * out_strides.row + element, mask=element < n_elements, other=0
        )
        grad = grad_out + own * grad_strides.batch + line * grad_strides.row + element
        grad = tl.load(grad, mask=element < n_elements, other=0)
        delta += tl.sum((x.to(tl.float32) * grad.to(tl.float32))[None, :], 1)
    logarithm = tl.load(logsumexp + own * strides.batch + line * strides.row)
    visible = tl.minimum(n_keys, tl.maximum(row + offset + 1, 0)) if facts.causal else n_keys
    first = (own * n_rows + row) * n_keys
    for start in range(0, n_keys, facts.block):
        key = start + lane
        score = tl.load(scores + first + key, mask=key < visible, other=0)
        score = _masked(score, bias, batch, row, key, bias_strides, factor, visible, META)
        p = libdevice.exp(score - logarithm)
        dp = tl.load(by_probabilities + first + key, mask=key < n_keys, other=0)
        tl.store(probabilities + first + key, p, mask=key < n_keys)
        ds = p * (dp - tl.broadcast_to(delta, dp.shape)) * factor
        tl.store(by_scores + first + key, ds, mask=key < n_keys)


def check(problem: Problem) -> None:
    """Decline what these kernels do not serve: packed sequences, dropout, windows, soft caps and sinks."""
    if problem.packed is not None or problem.dropout is not None or not problem.plain:
        given = "packed sequences, dropout, a window, a soft cap or sinks"
        raise Decline(f"{given} with heads of more than {LARGEST_HEAD} elements")


def _slices(problem: Problem) -> tuple[list[slice], list[slice]]:
    """Return slices of the batch and of the queries, the scores of one of each of which fit in WIDE_SCORES elements."""
    batch, queries, keys = problem.batch, problem.queries, max(1, problem.keys)
    rows = max(1, min(queries, WIDE_SCORES // keys))
    own = max(1, WIDE_SCORES // (keys * max(1, queries)))
    return (
        [slice(start, min(start + own, batch)) for start in range(0, batch, own)],
        # A product without queries makes the gradients of keys and values 0.
        [slice(start, min(start + rows, queries)) for start in range(0, max(1, queries), rows)],
    )


def _strides(tensor: torch.Tensor | None) -> RowStrides:
    return RowStrides(0, 0, 0) if tensor is None else RowStrides(*tensor.stride())


def _meta(problem: Problem, empty_rows: str, *tensors: torch.Tensor | None) -> WideMeta:
    bias = "" if problem.bias is None else "added" if problem.adds else "mask"
    index = offset_type(*[each for each in (*tensors, problem.bias) if each is not None])
    return WideMeta(problem.causal, bias, empty_rows, index, min(WIDE_BLOCK, power_of_2(max(16, problem.keys))))


def _launch(problem: Problem) -> dict[str, Any]:
    return {"scale": problem.factor, "num_warps": 4, **devices.current.options}


def attention(problem: Problem, out: torch.Tensor, logsumexp: torch.Tensor | None, empty_rows: str) -> None:
    """Write `out`, (batch, heads, queries, elements), and logsumexp, (batch, heads, rows).

    The rows of logsumexp after the last query become inf.
    """
    check(problem)
    sums, (batches, queries) = Sums(problem.precision), _slices(problem)
    for head in range(problem.query.shape[1]):
        of_keys = head // problem.ratio
        for part in (Part(head, own, rows) for own in batches for rows in queries):
            query, key = part.of(problem.query), problem.key[part.batch, of_keys]
            shape = (*query.shape[:2], key.shape[1])
            scores = empty(shape, torch.float32, query.device)
            product(query, key.mT, scores, sums=sums)
            probabilities = empty(shape, query.dtype, query.device)
            stored, logarithms = shape[1], None
            if logsumexp is not None:
                if part.rows.stop == problem.queries:
                    stored = logsumexp.shape[2] - part.rows.start
                logarithms = logsumexp[part.batch, head, part.rows.start : part.rows.start + stored]
            bias = None if problem.bias is None else part.of(problem.bias)
            normalize_scores[(shape[0] * stored,)](
                *(probabilities, logarithms, scores, bias, _strides(logarithms), _strides(bias)),
                n_rows=shape[1],
                n_stored=stored,
                n_keys=shape[2],
                offset=part.rows.start + problem.diagonal,
                META=_meta(problem, empty_rows, scores, logarithms),
                **_launch(problem),
            )
            product(probabilities, problem.value[part.batch, of_keys], part.of(out), sums=sums)


def attention_backward(
    problem: Problem,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write the gradients by query, key and value; all are (batch, heads, rows, elements)."""
    check(problem)
    batches, queries = _slices(problem)
    ratio = problem.ratio
    for head in range(problem.key.shape[1]):
        for own in batches:
            parts = [Part(head * ratio + i, own, rows) for i in range(ratio) for rows in queries]
            written = [each[own, head] for each in grads[1:]]
            # Several parts are added up in float32.
            direct = len(parts) == 1 or written[0].dtype is torch.float32
            totals = written if direct else [empty(each.shape, torch.float32, each.device) for each in written]
            for i, part in enumerate(parts):
                _add_gradients(problem, part, (grad_out, out, logsumexp), part.of(grads[0]), totals, i > 0)
            if not direct:
                for each, total in zip(written, totals, strict=True):
                    each.copy_(total)


def _add_gradients(
    problem: Problem,
    part: Part,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dq: torch.Tensor,
    totals: list[torch.Tensor],
    accumulate: bool,
) -> None:
    """Write a part's gradient by the queries, and write or `accumulate` its terms of those by keys and values."""
    sums, of_keys = Sums(problem.precision), part.head // problem.ratio
    query, key, value = part.of(problem.query), problem.key[part.batch, of_keys], problem.value[part.batch, of_keys]
    grad_out, out, logsumexp = (part.of(each) for each in results)
    shape = (*query.shape[:2], key.shape[1])
    scores, dp = (empty(shape, torch.float32, query.device) for _ in range(2))
    product(query, key.mT, scores, sums=sums)
    product(grad_out, value.mT, dp, sums=sums)
    p, ds = (empty(shape, query.dtype, query.device) for _ in range(2))
    bias = None if problem.bias is None else part.of(problem.bias)
    if scores.numel():
        differentiate_scores[(shape[0] * shape[1],)](
            *(p, ds, scores, dp, out, grad_out, logsumexp, bias),
            *map(_strides, (out, grad_out, logsumexp, bias)),
            n_rows=shape[1],
            n_keys=shape[2],
            n_elements=out.shape[2],
            offset=part.rows.start + problem.diagonal,
            META=_meta(problem, "inf", scores, out, grad_out, logsumexp),
            **_launch(problem),
        )
    product(ds, key, dq, sums=sums)
    for total, left, right in zip(totals, (ds, p), (query, grad_out), strict=True):
        product(left.mT, right, total, Epilogue(total, beta=1.0) if accumulate else NO_EPILOGUE, sums)
