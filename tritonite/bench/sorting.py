"""Benchmark cases of sorting and searching: rows of many lengths, top-k of logits, sets of elements.

Elements are drawn from a wide range, so that few are equal, except for operators that count or deduplicate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import tritonite

Shape = tuple[int, ...]
# Arguments by name, made when the case runs.
Given = dict[str, Callable[[], Any]]

# Rows that fit one program, rows of a vocabulary, and one row of millions.
_ROWS = ((65_536, 64), (4096, 1024), (64, 128_256), (1, 2**24))
_FLAT = ((2**16,), (2**24,))
SHAPES: dict[str, tuple[Shape, ...]] = dict.fromkeys(("sort", "topk", "kthvalue", "median", "nanmedian"), _ROWS)
SHAPES["mode"] = _ROWS[:2]
SHAPES |= dict.fromkeys(
    ("isin", "searchsorted", "bucketize", "histc", "bincount", "_unique", "_unique2", "unique_consecutive"), _FLAT
)
SHAPES |= dict.fromkeys(("unique_dim", "unique_dim_consecutive"), ((2**16, 16),))
# Operators that ATen has on CPUs only.
ONLY_ON_CPUS = {"histogram", "_histogramdd_from_bin_cts"}


def _drawn(dtype: torch.dtype, *shape: int, different: int = 0) -> torch.Tensor:
    """Return normal floats, or uniform integers below `different` (2**30 if 0)."""
    generator = torch.Generator(tritonite.device).manual_seed(0)
    if different or not dtype.is_floating_point:
        return torch.randint(different or 2**30, shape, generator=generator, device=tritonite.device).to(dtype)
    return torch.randn(shape, generator=generator, device=tritonite.device).to(dtype)


def given(packet: str, shape: Shape, dtype: torch.dtype) -> Given:
    """Return arguments, by name, in place of those of test samples, whose sizes differ."""
    few = min(64, shape[-1])

    def ordered() -> torch.Tensor:
        return _drawn(dtype, 4096).sort().values

    def repeated() -> torch.Tensor:
        return _drawn(dtype, *shape, different=100 if dtype.itemsize > 1 else 2)

    made: dict[str, Given] = {
        "sort": {"self": lambda: _drawn(dtype, *shape), "stable": lambda: True},
        "topk": {"self": lambda: _drawn(dtype, *shape), "k": lambda: few},
        "kthvalue": {"self": lambda: _drawn(dtype, *shape), "k": lambda: few},
        "isin": {"elements": lambda: _drawn(dtype, *shape), "test_elements": ordered},
        "searchsorted": {"sorted_sequence": ordered, "self": lambda: _drawn(dtype, *shape)},
        "bucketize": {"self": lambda: _drawn(dtype, *shape), "boundaries": ordered},
        "histc": {"self": lambda: _drawn(dtype, *shape), "bins": lambda: 100},
        "bincount": {"self": lambda: _drawn(torch.int64, math.prod(shape), different=1000), "weights": lambda: None},
    }
    made |= {name: {"self": lambda: _drawn(dtype, *shape)} for name in ("median", "nanmedian")}
    sets = ("mode", "_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive")
    made |= {name: {"self": repeated} for name in sets}
    return made.get(packet, {})
