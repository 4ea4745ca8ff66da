"""The operators that ATen is faster in, by the kind of device and the dtype of an operator's first tensor.

They stand in slower.json, which `tools/slower_operators.py` writes from the benchmark's results: those of which no
large case has the speed that it would need. Of a kind of device one has been measured, of NVIDIA's an H200; that its
figures tell of the others is assumed.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

PATH = Path(__file__).with_name("slower.json")


@functools.lru_cache(maxsize=1)
def table() -> dict[str, dict[str, list[str]]]:
    """The names of dtypes, by the kind of device whose results they are from, and by operator."""
    found: dict[str, dict[str, list[str]]] = json.loads(PATH.read_text())
    return found


def slower_dtypes(kind: str, packet: str) -> frozenset[torch.dtype]:
    """The dtypes in which ATen is faster on a kind of device."""
    return frozenset(getattr(torch, name) for name in table().get(kind, {}).get(packet, ()))
