"""The host functions of the norm engine: outputs, statistics, block choice, launches."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import as_matrix, offset_type, power_of_2
from tritonite.engine.norm.blocks import choose_blocks, choose_ring
from tritonite.engine.norm.kernels import add_partials, norm_backward, norm_forward
from tritonite.engine.norm.ring import norm_backward_by_ring
from tritonite.engine.rows.declare import Reduction
from tritonite.runtime.contract import empty, settings, zeros


def forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: Any,
    statistics_of: Reduction,
) -> list[torch.Tensor]:
    """Return the normalised sum, the sum, and the statistics of rows: rstd and, for a layer norm, the mean.

    `statistics_of` reduces x and residual to the statistics, the mean first. It runs for rows that registers do not
    hold, and its number of results says which norm this is. The statistics of empty rows are 0.
    """
    compute, n_columns = opmath(x.dtype), x.shape[-1]
    make = empty if x.numel() else zeros
    statistics = tuple([make(x.shape[:-1], compute, x.device) for _ in range(statistics_of.results)])
    outs = [empty(x.shape, x.dtype, x.device), empty(x.shape, x.dtype, x.device)]
    if not x.numel():
        return [*outs, *statistics]
    operands = (as_matrix(x), as_matrix(residual))
    flat = tuple([each.view(-1) for each in statistics])
    normalized, total = [as_matrix(out) for out in outs]
    parameters = tuple([each.contiguous() for each in (weight, bias) if each is not None])
    blocks = choose_blocks(total, 2, len(parameters), 0)
    if blocks.splits > 1:
        statistics_of.run(operands, (1,), flat[::-1], compute, (eps,))
    norm_forward[(blocks.programs, blocks.splits)](
        *(operands, parameters, normalized, total, flat),
        *(tuple([each.stride(0) for each in operands]), tuple([each.stride(1) for each in operands])),
        *(len(total), n_columns, eps),
        META=blocks.meta(
            index=offset_type(*operands, total),
            compute=TRITON_DTYPES[compute],
            weight=weight is not None,
            bias=bias is not None,
            given=blocks.splits > 1,
        ),
        **blocks.options,
    )
    return [*outs, *statistics]


def backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    statistics: tuple[torch.Tensor, ...],
    weight: torch.Tensor | None,
    like: tuple[torch.Tensor | None, ...],
    means_of: Reduction,
) -> list[torch.Tensor | None]:
    """Return the gradient by the sum, and one for each of `like`, a weight and a bias, that is not None.

    `statistics` are rstd and, for a layer norm, the mean. `means_of` reduces (grad, total, *statistics, weight) to the
    means that the gradient by the sum needs. It runs for rows that neither registers nor a ring hold.
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
        means_of.run(operands, (1,), means, compute)
    partials = empty((len(written), programs, n_columns), compute, total.device)
    strides = [tuple([each.stride(i) for each in grads]) for i in range(2)]
    by_weight, by_bias = [out is not None for out in (*outs, None)[:2]]
    index = offset_type(*grads, total)
    if ring is not None:
        norm_backward_by_ring[(programs,)](
            *(grads, total, statistics, weights, by_total, partials, strides[0], len(total), n_columns),
            META=ring.meta(index=index, weight=by_weight, bias=by_bias),
            **ring.options,
        )
    else:
        norm_backward[(programs, blocks.splits)](
            *(grads, total, statistics, weights, means, by_total, partials, *strides, len(total), n_columns),
            META=blocks.meta(index=index, compute=TRITON_DTYPES[compute], weight=by_weight, bias=by_bias),
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
