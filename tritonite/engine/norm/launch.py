"""The host functions of the norm engine: outputs, statistics, block choice, launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import as_matrix, offset_type, power_of_2
from tritonite.engine.movement import move
from tritonite.engine.norm.blocks import choose_blocks, choose_ring
from tritonite.engine.norm.kernels import add_partials, norm_backward, norm_forward
from tritonite.engine.norm.ring import norm_backward_by_ring
from tritonite.engine.quantize import Quantization, most_of, quantize_tensor, quantized_outputs
from tritonite.engine.rows.declare import Reduction
from tritonite.language.quantize import BLOCK
from tritonite.runtime.contract import empty, settings, zeros


class NormKind(NamedTuple):
    """A norm's formula beyond its operands.

    `statistics_of` reduces the operands to the statistics of rows, the mean first. It runs for rows that registers do
    not hold, and its number of results says whether this is a layer norm. `offset`, `round_total` and
    `round_normalized` are those of `NormMeta`.
    """

    statistics_of: Reduction
    offset: float = 0.0
    round_total: bool = False
    round_normalized: bool = False


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: Any,
    kind: NormKind,
) -> list[torch.Tensor | None]:
    """Return the normalised sum, the sum, and the statistics of rows: rstd and, for a layer norm, the mean.

    Without a residual x is normalised, and None is returned for the sum. The statistics of empty rows are 0.
    """
    compute = opmath(x.dtype)
    make = empty if x.numel() else zeros
    statistics = tuple([make(x.shape[:-1], compute, x.device) for _ in range(kind.statistics_of.results)])
    operands = (x,) if residual is None else (x, residual)
    outs = tuple([empty(x.shape, x.dtype, x.device) for _ in operands])
    if x.numel():
        _normalize(operands, (weight, bias), outs, statistics, eps, kind)
    return [*(*outs, None)[:2], *statistics]


def forward_in_place(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: Any, kind: NormKind
) -> None:
    """Add x to `residual`, and write the normalised sum over x. Tensors that have no view as a matrix are copied."""
    if not x.numel():
        return
    try:
        operands = tuple([each.view(-1, each.shape[-1]) for each in (x, residual)])
    except RuntimeError:
        normalized, total, *_ = forward(x, residual, weight, None, eps, kind)
        move(normalized, x)
        move(total, residual)
        return
    _normalize(operands, (weight, None), operands, (), eps, kind, in_place=True)


def forward_quantized(
    operands: tuple[torch.Tensor, ...], weight: torch.Tensor | None, eps: Any, kind: NormKind, wanted: Quantization
) -> list[torch.Tensor | None]:
    """Return the quantised norm of the operands' sum, the scales, and the sum; None for a given scale or no sum.

    Rows that registers do not hold are normalised before they are quantised with a scale for each token, and all rows
    before they are quantised with a computed scale for the tensor.
    """
    x = operands[0]
    total = tuple([empty(each.shape, each.dtype, each.device) for each in operands[1:]])
    out, scales = quantized_outputs(x.shape, x, wanted)
    if x.numel():
        rows = as_matrix(x)
        splits = choose_blocks(rows, len(operands), weight is not None, 0).splits
        if wanted.reduces or (wanted.granularity == "token" and splits > 1):
            normalized = empty(x.shape, x.dtype, x.device)
            _normalize(operands, (weight, None), (normalized, *total), (), eps, kind)
            quantize_tensor((normalized,), out, scales, wanted)
        else:
            _normalize(operands, (weight, None), (out, *total), (), eps, kind, (wanted, scales))
    return [out, scales, *(*total, None)[:1]]


def _normalize(
    operands: tuple[torch.Tensor, ...],
    given: tuple[torch.Tensor | None, torch.Tensor | None],
    outs: tuple[torch.Tensor, ...],
    statistics: tuple[torch.Tensor, ...],
    eps: Any,
    kind: NormKind,
    quantization: tuple[Quantization, torch.Tensor | None] | None = None,
    in_place: bool = False,
) -> None:
    """Launch `norm_forward` on tensors with elements. `given` are the weight and the bias or None for either."""
    x = operands[0]
    compute, n_columns = opmath(x.dtype), x.shape[-1]
    operands = tuple([as_matrix(each) for each in operands])
    outs = tuple([each.view(-1, n_columns) for each in outs])
    parameters = tuple([each.contiguous() for each in given if each is not None])
    least = BLOCK.value if quantization is not None and quantization[0].granularity == "block" else 1
    blocks = choose_blocks(operands[0], len(operands), len(parameters), 0, least)
    if blocks.splits > 1:
        if not statistics:
            statistics = tuple([empty(x.shape[:-1], compute, x.device) for _ in range(kind.statistics_of.results)])
        flat = tuple([each.view(-1) for each in statistics])
        kind.statistics_of.run(operands, (1,), flat[::-1], compute, (eps,))
    fields: dict[str, Any] = {}
    scales: tuple[torch.Tensor, ...] = ()
    if quantization is not None:
        wanted, own = quantization
        fields = {"granularity": wanted.granularity, "most": most_of(wanted.dtype)}
        scales = tuple([each for each in (wanted.scale, own) if each is not None])
    norm_forward[(blocks.programs, blocks.splits)](
        *(operands, parameters, outs, scales, tuple([each.view(-1) for each in statistics])),
        *(tuple([each.stride(0) for each in operands]), tuple([each.stride(1) for each in operands])),
        *(len(operands[0]), n_columns, eps),
        META=blocks.meta(
            index=offset_type(*operands, *outs),
            compute=TRITON_DTYPES[compute],
            weight=given[0] is not None,
            bias=given[1] is not None,
            given=blocks.splits > 1,
            offset=kind.offset,
            layer=kind.statistics_of.results > 1,
            round_total=kind.round_total,
            round_normalized=kind.round_normalized,
            in_place=in_place,
            **fields,
        ),
        **blocks.options,
    )


def backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    statistics: tuple[torch.Tensor, ...],
    weight: torch.Tensor | None,
    like: tuple[torch.Tensor | None, ...],
    means_of: Reduction,
    offset: float = 0.0,
) -> list[torch.Tensor | None]:
    """Return the gradient by the sum, and one for each of `like`, a weight and a bias, that is not None.

    `statistics` are rstd and, for a layer norm, the mean. `means_of` reduces (grad, total, *statistics, weight) to the
    means that the gradient by the sum needs, with the number `offset` unless that is 0. It runs for rows that neither
    registers nor a ring hold. `offset` is added to the weight.
    """
    by_total = empty(total.shape, total.dtype, total.device)
    if not total.numel():
        return [by_total, *(None if each is None else zeros(each.shape, each.dtype, each.device) for each in like)]
    compute, n_columns = opmath(total.dtype), total.shape[-1]
    grads = tuple([as_matrix(each) for each in (grad, grad_total) if each is not None])
    total, statistics = as_matrix(total.contiguous()), tuple([each.contiguous().view(-1) for each in statistics])
    outs = [None if each is None else empty(each.shape, each.dtype, each.device) for each in like]
    written = tuple([out for out in outs if out is not None])
    weights = () if weight is None else (weight.contiguous(),)
    blocks, ring = choose_blocks(total, len(grads) + 1, len(weights), len(written)), None
    if blocks.splits > 1 and not settings().invariant:
        ring = choose_ring(grads, total, len(weights), len(written))
    programs = blocks.programs if ring is None else ring.programs
    means: tuple[torch.Tensor, ...] = ()
    if ring is None and blocks.splits > 1:
        operands = (grads[0], total, *(each[:, None].expand(total.shape) for each in reversed(statistics)))
        operands += () if weight is None else (weight.expand(total.shape),)
        means = tuple([empty((len(total),), compute, total.device) for _ in statistics])
        means_of.run(operands, (1,), means, compute, (offset,) if offset else ())
    partials = empty((len(written), programs, n_columns), compute, total.device)
    strides = [tuple([each.stride(i) for each in grads]) for i in range(2)]
    by_weight, by_bias = [out is not None for out in (*outs, None)[:2]]
    index = offset_type(*grads, total)
    if ring is not None:
        norm_backward_by_ring[(programs,)](
            *(grads, total, statistics, weights, by_total, partials, strides[0], len(total), n_columns),
            META=ring.meta(index=index, weight=by_weight, bias=by_bias, offset=offset),
            **ring.options,
        )
    else:
        norm_backward[(programs, blocks.splits)](
            *(grads, total, statistics, weights, means, by_total, partials, *strides, len(total), n_columns),
            META=blocks.meta(
                index=index, compute=TRITON_DTYPES[compute], weight=by_weight, bias=by_bias, offset=offset
            ),
            **blocks.options,
        )
    if written:
        # At least the 32 bytes that memory is read by.
        columns = min(power_of_2(n_columns), max(8, 2 * devices.current.row_elements // power_of_2(programs)))
        add_partials[(-(-n_columns // columns), len(written))](
            *(partials, written, programs, n_columns),
            PROGRAMS=power_of_2(programs),
            COLUMNS=columns,
            num_warps=8,
        )
    return [by_total, *outs]
