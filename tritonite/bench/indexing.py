"""Benchmark cases of indexing: embedding tables of models, and indices into their rows or elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tritonite
from tritonite.testing.samples import Sample

Shape = tuple[int, ...]
# Arguments by name, made when the case runs.
Given = dict[str, Callable[[], Any]]

_TABLES = ((32_000, 4096), (128_256, 4096))
# Number of distinct indices where many rows or elements are added to few.
_DISTINCT = 100
_SQUARE = ((4096, 4096),)
SHAPES: dict[str, tuple[Shape, ...]] = dict.fromkeys(
    ("gather", "take", "index", "scatter", "scatter_add", "nonzero", "masked_select", "masked_scatter"), _SQUARE
)
SHAPES |= dict.fromkeys(("embedding", "index_select", "index_add", "index_copy", "index_put"), _TABLES)
# A permutation of 16,384 tokens, as in a mixture of experts.
SHAPES["index_select"] += ((16_384, 4096),)
SHAPES["embedding_dense_backward"] = ((16_384, 4096),)
SHAPES["repeat_interleave"] = ((2**20,),)
# Families whose index fits one dimension only.
FAMILIES = {"embedding", "indexing", "scatter"}
# Operators that read as many elements of their first argument as the result has.
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
    """Return arguments, by name, in place of those of test samples, whose sizes differ."""
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
    """Return arguments of an embedding's gradient in which `rows` tokens have `different` distinct indices."""
    return {
        "indices": lambda: _ids(different, rows),
        "num_weights": lambda: 128_256,
        "padding_idx": lambda: -1,
    }


def _addends(make: Callable[..., torch.Tensor], rows: int, added: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zeros (rows, 4096), and zeros and ones (added, 4096) whose sums fp16 and bf16 hold in any order."""
    zeros = make(rows, 4096).zero_()
    return zeros, _ids(2, added, 4096).to(zeros.dtype)


def added_rows(make: Callable[..., torch.Tensor]) -> Sample:
    x, source = _addends(make, 32_000, 16_384)
    return Sample("", (x, 0, _ids(_DISTINCT, 16_384), source), {})


def put_rows(make: Callable[..., torch.Tensor]) -> Sample:
    x, values = _addends(make, 32_000, 16_384)
    return Sample("", (x, [_ids(_DISTINCT, 16_384)], values, True), {})


def scattered(make: Callable[..., torch.Tensor]) -> Sample:
    x, source = _addends(make, 4096, 4096)
    return Sample("", (x, 1, _ids(_DISTINCT, 4096, 4096), source), {})


COLUMNS: Given = {"index": lambda: _ids(4096, 4096)}
ROWS: Given = {"indices": lambda: [_ids(32_000, 16_384)]}
