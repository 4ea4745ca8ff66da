"""The compile-time parameters of the kernels of divergences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Kullback-Leibler divergences KL(p || q) and KL(q || p), the generalized Jensen-Shannon divergence, total variation.
FORWARD, REVERSE, JSD, TV = "forward", "reverse", "jsd", "tv"
# KL(p || q) of log q and p, or of log q and log p, given in place of logits.
TARGET, LOG_TARGET = "target", "log_target"
KINDS = (FORWARD, REVERSE, JSD, TV, TARGET, LOG_TARGET)


@dataclass(frozen=True)
class DivergenceMeta:
    """The compile-time parameters of `divergence_forward` and `divergence_backward`.

    A program handles `rows` rows in blocks of `columns` elements; with `held` one block is a whole row. `normalized`
    says that operands are log-probabilities or probabilities, not logits. `tempered` says that the temperature is not
    1, so that the cross entropy has a log-sum-exp of its own.
    """

    kind: str
    normalized: bool
    index: Any
    compute: Any
    rows: int
    columns: int
    held: bool = False
    tempered: bool = False
