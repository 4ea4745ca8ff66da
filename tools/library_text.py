"""The source text of Python's standard library as tokens: a text that every machine with Python has."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

# Words, single digits, spaces within a line, ends of lines with the indentation after them, and other characters.
PIECE = re.compile(r"[^\W\d]+|\d|[^\S\n]+|\n\s*|[^\w\s]")
BYTES = 256


def library_text(characters: int) -> str:
    """Return the first `characters` of the standard library's modules, in the order of their paths, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, length = [], 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(root).parts):
            continue
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        length += len(parts[-1])
        if length >= characters:
            break
    return "".join(parts)[:characters]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a text: 256 bytes, and after them the text's most frequent pieces."""

    ids: dict[str, int]

    @classmethod
    def of(cls, text: str, size: int) -> Vocabulary:
        """Return a vocabulary of at most `size` tokens. Pieces that are equally frequent are in alphabetical order."""
        counts = sorted(Counter(PIECE.findall(text)).items(), key=lambda each: (-each[1], each[0]))
        return cls({piece: BYTES + i for i, (piece, _) in enumerate(counts[: size - BYTES])})

    def encode(self, text: str) -> torch.Tensor:
        """Return the tokens of a text, int64. A piece outside the vocabulary becomes its bytes in UTF-8."""
        tokens: list[int] = []
        for piece in PIECE.findall(text):
            token = self.ids.get(piece)
            if token is None:
                tokens.extend(piece.encode("utf-8", errors="replace"))
            else:
                tokens.append(token)
        return torch.tensor(tokens)


def digest(tokens: torch.Tensor) -> str:
    """Return 12 digits that identify tokens, because versions of Python have other texts."""
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:12]
