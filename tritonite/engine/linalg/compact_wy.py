"""QR factorisations of matrices larger than a tile, and products with their reflectors, by products of matrices.

A product of reflectors H = 1 - tau v v^T is Q = 1 - V T V^T. The columns of V are the reflectors, and T is a small
upper triangular matrix (Schreiber and Van Loan 1989). A program factors a panel of a few columns. The reflectors of a
panel change the other columns of their block. The reflectors of a whole block change all columns after the block.

All tensors are (matrices, rows, columns). Reflectors are stored below the diagonal of `packed`.
"""

from __future__ import annotations

import torch

from tritonite.engine.gemm.product import product
from tritonite.engine.linalg import launch, triangles
from tritonite.engine.linalg.blocked import subtract
from tritonite.engine.linalg.table import linalg_table, panel_columns
from tritonite.runtime.contract import empty


def factor(packed: torch.Tensor, taus: torch.Tensor) -> None:
    """Replace matrices by R over the reflectors of Q, and write the reflectors' factors."""
    n_rows, n_columns = packed.shape[1:]
    block, step, least = linalg_table().block, panel_columns(n_rows, packed.dtype), min(n_rows, n_columns)
    for start in range(0, least, block):
        stop = min(start + block, least)
        for k in range(start, stop, step):
            end = min(k + step, stop)
            panel, factors = packed[:, k:, k:end], taus[:, k:end]
            own = empty(panel.shape, packed.dtype, packed.device)
            launch.qr(own, factors, None, panel)
            panel.copy_(own)
            if end < stop:
                _multiply(packed[:, k:, end:stop], panel, factors, True)
        if stop < n_columns:
            _multiply(packed[:, start:, stop:], packed[:, start:, start:stop], taus[:, start:stop], True)


def reflect(x: torch.Tensor, packed: torch.Tensor, taus: torch.Tensor, transposed: bool) -> None:
    """Replace C by Q C, or by Q^T C."""
    for start, stop in _blocks(taus) if transposed else reversed(_blocks(taus)):
        _multiply(x[:, start:], packed[:, start:, start:stop], taus[:, start:stop], transposed)


def form(q: torch.Tensor, packed: torch.Tensor, taus: torch.Tensor) -> None:
    """Write the leading columns of Q.

    Before a block of reflectors is applied, its rows of earlier columns are 0, and stay so.
    """
    triangles.identity(q)
    for start, stop in reversed(_blocks(taus)):
        _multiply(q[:, start:, start:], packed[:, start:, start:stop], taus[:, start:stop], False)


def _blocks(taus: torch.Tensor) -> list[tuple[int, int]]:
    """Return the first reflector of each block, and the one after its last."""
    count, step = taus.shape[1], linalg_table().block
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def _multiply(x: torch.Tensor, packed: torch.Tensor, taus: torch.Tensor, transposed: bool) -> None:
    """Replace C by Q C, or by Q^T C = C - V T^T (V^T C), for the reflectors of one block."""
    (count, _, size), n_columns = packed.shape, x.shape[2]
    if not x.numel():
        return
    v = empty(packed.shape, x.dtype, x.device)
    triangles.unit_lower(v, packed)
    gram, t = (empty((count, size, size), x.dtype, x.device) for _ in range(2))
    product(v.mT, v, gram)
    launch.triangular_factor(t, gram, taus)
    inner, scaled = (empty((count, size, n_columns), x.dtype, x.device) for _ in range(2))
    product(v.mT, x, inner)
    product(t.mT if transposed else t, inner, scaled)
    subtract(x, x, v, scaled)
