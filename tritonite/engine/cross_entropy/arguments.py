"""Run-time records and compile-time facts of the cross-entropy kernels, whose fields kernels read by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Targets(NamedTuple):
    """Contiguous operands beside the logits.

    Attributes:
        target: int64 class of each row.
        weight: weight of each class, or None for 1.
        token_scale: factor of each row's loss, or None for 1.
    """

    target: Any
    weight: Any
    token_scale: Any


class Statistics(NamedTuple):
    """Results of reading rows of logits, contiguous tensors in the compute dtype; None where not asked for.

    Attributes:
        lse: logsumexp of each row.
        target_logit: logit of each row's target: 0 for a class that the rows do not have, nan for one that none has.
        smooth: sum over classes of weight times logit, for label smoothing.
        weight_sum: one element, the sum of the rows' class weights, for label smoothing with class weights.
        best: int64 class of each row's largest logit, the first if several are equal.
        maximum: largest logit of each row.
    """

    lse: Any
    target_logit: Any
    smooth: Any = None
    weight_sum: Any = None
    best: Any = None
    maximum: Any = None


class Partial(NamedTuple):
    """Statistics of slices of rows, (rows, slices), which `combine_slices` combines; None where not asked for.

    Attributes:
        maximum: largest logit.
        total: sum of exponentials of logits less the largest.
        smooth, best: as in `Statistics`.
        weight_sum: (slices,), sums of class weights.
    """

    maximum: Any
    total: Any
    smooth: Any = None
    best: Any = None
    weight_sum: Any = None


class Rows(NamedTuple):
    """Layout of logits: sizes of the collapsed leading dimensions but the slowest, their strides, and the classes'."""

    shape: Any
    strides: Any
    column_stride: Any


class Classes(NamedTuple):
    """Classes of a call: those of a row, those of all shards, and the first class of this shard."""

    own: Any
    every: Any
    first: Any


class Results(NamedTuple):
    """Outputs of `finish_losses`: loss, z-loss or None, accuracy or None, total weight of targets or None."""

    loss: Any
    z_loss: Any
    accuracy: Any
    total: Any


@dataclass(frozen=True)
class LossMeta:
    """The compile-time parameters of the cross-entropy kernels.

    A block has `rows` rows of `columns` logits. `softcap`, `smoothing` and `z_loss` say which terms the loss has,
    `reduced` whether losses are summed, `mean` whether the sum or the gradient is divided by the total weight. With
    `padded`, rows have memory for a multiple of 16 classes, so that the last accesses are whole vectors.
    """

    index: Any
    compute: Any
    rows: int
    columns: int = 1
    softcap: bool = False
    smoothing: bool = False
    z_loss: bool = False
    reduced: bool = False
    mean: bool = False
    padded: bool = False
