"""The compile-time parameters of the norm kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NormMeta:
    """The compile-time parameters of `norm_forward` and `norm_backward`.

    A program handles `rows` rows at a time, each in `chunks` chunks of `columns` elements; the first `whole` chunks
    need no mask. Loads are `stages` - 1 iterations ahead. If `packed`, 16-bit floats stay in pairs in registers. If
    `in_order`, reductions do not depend on the number of rows.

    With `given` the statistics of rows are operands of the forward pass. `weight` and `bias` say which parameters there
    are; in the backward pass, which of their gradients are computed. `offset` is added to the weight. `layer` says
    whether the forward pass is a layer norm. `round_total` and `round_normalized` say whether the sum is rounded to the
    operands' dtype before it is normalised, and the normalised sum before it is multiplied by the weight, which is then
    rounded as well. With `in_place` results are written over the operands.

    With a `granularity` the normalised values are quantised: with one scale for each "token", each "block" of a row, or
    the "tensor". `most` is the largest value of the quantised dtype.
    """

    index: Any
    compute: Any
    rows: int
    columns: int
    chunks: int
    whole: int
    stages: int
    packed: bool
    in_order: bool
    weight: bool = False
    bias: bool = False
    given: bool = False
    offset: float = 0.0
    layer: bool = False
    round_total: bool = False
    round_normalized: bool = False
    in_place: bool = False
    granularity: str = ""
    most: float = 0.0


@dataclass(frozen=True)
class RingMeta:
    """The compile-time parameters of `norm_backward_by_ring`.

    A row has `chunks` chunks, of which the first `whole` need no mask. The rings of the sum and of the gradient of the
    normalised sum have `ring` chunks each; the ring of the gradient of the sum has `late` chunks, 0 without it. The
    first `held` chunks of the weight stay in registers. `weight` and `bias` say which gradients of parameters are
    computed. `offset` is added to the weight.
    """

    index: Any
    weight: bool
    bias: bool
    chunks: int
    whole: int
    ring: int
    late: int
    held: int
    offset: float = 0.0
