"""What is measured of indexing: tables of models, and how many of their rows or elements an index tells of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tritonite
from tritonite.testing.samples import Sample

Shape = tuple[int, ...]
# Of a case's arguments what is made when it runs.
Given = dict[str, Callable[[], Any]]

_TABLES = ((32_000, 4096), (128_256, 4096))
# The places that many rows or elements are added to.
_DIFFERENT = 100
_SQUARE = ((4096, 4096),)
SHAPES: dict[str, tuple[Shape, ...]] = dict.fromkeys(
    ("gather", "take", "index", "scatter", "scatter_add", "nonzero", "masked_select", "masked_scatter"), _SQUARE
)
SHAPES |= dict.fromkeys(("embedding", "index_select", "index_add", "index_copy", "index_put"), _TABLES)
# A permutation of 16,384 tokens, as experts get them.
SHAPES["index_select"] += ((16_384, 4096),)
SHAPES["embedding_dense_backward"] = ((16_384, 4096),)
SHAPES["repeat_interleave"] = ((2**20,),)
# Whose index fits one dimension.
FAMILIES = {"embedding", "indexing", "scatter"}
# What is read of a table are as many elements as there are of the result.
GATHERED = {"embedding", "gather", "index", "_unsafe_index", "index_select", "take"}


def _ids(size: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator(tritonite.device).manual_seed(0)
    return torch.randint(size, shape, generator=generator, device=tritonite.device)


def _distinct(size: int, count: int) -> torch.Tensor:
    generator = torch.Generator(tritonite.device).manual_seed(0)
    return torch.randperm(size, generator=generator, device=tritonite.device)[:count]


def _rows(shape: Shape) -> int:
    return min(shape[0], 16_384)


def _values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return _ids(7, *shape).to(dtype)


def given(packet: str, shape: Shape, dtype: torch.dtype) -> Given:
    """The arguments of a case that samples have in another size."""
    rows = _rows(shape)
    columns = shape[-1]

    def source() -> torch.Tensor:
        return _values(dtype, rows, columns)

    made: dict[str, Given] = {
        "embedding": {"indices": lambda: _ids(shape[0], rows)},
        "embedding_dense_backward": {
            "indices": lambda: _ids(32_000, *shape[:-1]),
            "num_weights": lambda: 32_000,
            "padding_idx": lambda: -1,
        },
        "index_select": {"dim": lambda: 0, "index": lambda: _ids(shape[0], rows)},
        "gather": {"dim": lambda: 1, "index": lambda: _ids(columns, *shape)},
        "take": {"index": lambda: _ids(shape[0] * columns, *shape)},
        "index": {"indices": lambda: [_ids(shape[0], *shape), _ids(columns, *shape)]},
        "index_add": {"dim": lambda: 0, "index": lambda: _ids(shape[0], rows), "source": source},
        "index_copy": {"dim": lambda: 0, "index": lambda: _distinct(shape[0], rows), "source": source},
        "index_put": {
            "indices": lambda: [_ids(shape[0], rows)],
            "values": source,
            "accumulate": lambda: True,
        },
        "index_reduce": {"reduce": lambda: "amax"},
        "scatter": {
            "dim": lambda: 1,
            "index": lambda: _distinct(columns, columns).expand(shape),
            "src": lambda: _values(dtype, *shape),
        },
        "scatter_add": {
            "dim": lambda: 1,
            "index": lambda: _ids(columns, *shape),
            "src": lambda: _values(dtype, *shape),
        },
        "repeat_interleave": {"repeats": lambda: _ids(5, torch.Size(shape).numel())},
        "nonzero": {"self": lambda: _ids(2, *shape).to(dtype)},
    }
    return made.get(packet, {})


def repeated(rows: int, different: int) -> Given:
    """The gradient of an embedding of which few or many rows have been asked for."""
    return {
        "indices": lambda: _ids(different, rows),
        "num_weights": lambda: 128_256,
        "padding_idx": lambda: -1,
    }


def _addends(make: Callable[..., torch.Tensor], rows: int, added: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros, and ones to add: sums that half types hold, whatever the order."""
    zeros = make(rows, 4096).zero_()
    return zeros, _ids(2, added, 4096).to(zeros.dtype)


def added_rows(make: Callable[..., torch.Tensor]) -> Sample:
    x, source = _addends(make, 32_000, 16_384)
    return Sample("", (x, 0, _ids(_DIFFERENT, 16_384), source), {})


def put_rows(make: Callable[..., torch.Tensor]) -> Sample:
    x, values = _addends(make, 32_000, 16_384)
    return Sample("", (x, [_ids(_DIFFERENT, 16_384)], values, True), {})


def scattered(make: Callable[..., torch.Tensor]) -> Sample:
    x, source = _addends(make, 4096, 4096)
    return Sample("", (x, 1, _ids(_DIFFERENT, 4096, 4096), source), {})


COLUMNS: Given = {"index": lambda: _ids(4096, 4096)}
ROWS: Given = {"indices": lambda: [_ids(32_000, 16_384)]}
