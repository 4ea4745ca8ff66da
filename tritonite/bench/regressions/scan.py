"""Regression cases of scans (`engine.scan`)."""

from __future__ import annotations

import torch

from tritonite import devices
from tritonite.bench.regressions.cases import drawn, regression
from tritonite.engine import scan
from tritonite.engine.rows.blocks import RowBlocks, cut
from tritonite.engine.rows.space import RowSpace
from tritonite.engine.rows.table import ROWS

_blocks = scan._blocks


def _half_as_wide(space: RowSpace, inner: bool) -> RowBlocks:
    """Return blocks of half as many rows, which read half as many contiguous elements."""
    found = _blocks(space, inner)
    scarcity = ROWS[devices.current.kind].scarcity
    return cut(space, found.rows // 2, 2 * found.columns, found.warps, scarcity=scarcity, least=4)


regression(
    "logcumsumexp_wide_columns",
    "logcumsumexp",
    lambda: (drawn(65536, 1024, dtype=torch.float16), 0),
    {"engine.scan._blocks": _half_as_wide},
    597 / 381,
)
