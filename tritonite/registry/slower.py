"""Operators in which ATen is faster, by kind of device and by dtype of the first tensor.

`tools/slower_operators.py` writes slower.json from the benchmark's results: an operator and dtype is listed if none of
its large cases is fast enough. One device of a kind is measured, and its results are assumed for the others.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

PATH = Path(__file__).with_name("slower.json")


@functools.lru_cache(maxsize=1)
def table() -> dict[str, dict[str, list[str]]]:
    """Return names of dtypes by kind of device, then by operator."""
    found: dict[str, dict[str, list[str]]] = json.loads(PATH.read_text())
    return found


def slower_dtypes(kind: str, packet: str) -> frozenset[torch.dtype]:
    """Return the dtypes in which ATen's operator is faster on a kind of device."""
    return frozenset(getattr(torch, name) for name in table().get(kind, {}).get(packet, ()))
