"""What is measured of sorting and searching: rows of many lengths, logits of which some are taken, sets of elements.

Elements are drawn, so that few are equal, but where they are counted or there once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import tritonite

Shape = tuple[int, ...]
# Of a case's arguments what is made when it runs.
Given = dict[str, Callable[[], Any]]

# Rows that a program holds, those of a vocabulary, and one of millions.
_ROWS = ((65_536, 64), (4096, 1024), (64, 128_256), (1, 2**24))
_FLAT = ((2**16,), (2**24,))
SHAPES: dict[str, tuple[Shape, ...]] = dict.fromkeys(("sort", "topk", "kthvalue", "median", "nanmedian"), _ROWS)
SHAPES["mode"] = _ROWS[:2]
SHAPES |= dict.fromkeys(
    ("isin", "searchsorted", "bucketize", "histc", "bincount", "_unique", "_unique2", "unique_consecutive"), _FLAT
)
SHAPES |= dict.fromkeys(("unique_dim", "unique_dim_consecutive"), ((2**16, 16),))
# Of the device's operators those that ATen has on CPUs alone.
ONLY_ON_CPUS = {"histogram", "_histogramdd_from_bin_cts"}


def _drawn(dtype: torch.dtype, *shape: int, different: int = 0) -> torch.Tensor:
    """Normal floats, or integers of so many different ones."""
    generator = torch.Generator(tritonite.device).manual_seed(0)
    if different or not dtype.is_floating_point:
        return torch.randint(different or 2**30, shape, generator=generator, device=tritonite.device).to(dtype)
    return torch.randn(shape, generator=generator, device=tritonite.device).to(dtype)


def given(packet: str, shape: Shape, dtype: torch.dtype) -> Given:
    """The arguments of a case that samples have in another size."""
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
