"""The part of its work that one of several processes does, as command lines give it."""

from __future__ import annotations

import re


def part_of(text: str) -> tuple[int, int]:
    """Return (index, parts) of "I/N": "0/4" is the first of four. Raise ValueError for anything else."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"{text} is not I/N, from 0/N to N-1/N")
    return int(match[1]), int(match[2])
