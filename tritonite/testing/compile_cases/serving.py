"""Sampling of tokens, and decoding over caches of latents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tritonite.install import library
from tritonite.testing.compile_cases.cases import KINDS, TARGETS, Case, compile_cases, launches

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@compile_cases("sampling")
def sampling(full: bool) -> Iterator[Case]:
    """Sampling with no filter, each filter, and all of them, from numbers and from tensors of a number a row."""
    op = library.registered()["tritonite::sample"]
    none: tuple[Any, ...] = (None,) * 16
    every = (0.7, None, 50, None, 0.9, None, 0.01, None, 0.95, None, 1.1, None, 0.1, None, 0.1, None)
    for dtype, vocabulary in itertools.product(_DTYPES if full else _DTYPES[:1], (40, 128_256)):
        logits = torch.empty(4, vocabulary, dtype=dtype)
        row, counts = torch.empty(4), torch.empty(4, dtype=torch.int64)
        of_rows = (None, row, None, counts, *(None, row) * 6)
        history = torch.empty(4, 100, dtype=torch.int64)
        calls = {"plain": (*none, None, None, None, None, None, None, None)}
        for i in range(5 if full else 0):
            only = tuple([value if at // 2 == i else None for at, value in enumerate(every)])
            calls[f"filter {i}"] = (*only, None, 0, None, None, 0, None, None)
        calls["of all"] = (*every, history, 10, None, None, 0, None, None)
        calls["of rows"] = (*of_rows, history, None, counts, counts, None, counts, None)
        for name, arguments in calls.items():
            for specialization in launches(op, (logits, *arguments)):
                names = tuple(TARGETS) if full or name == "of all" else ("sm_90",)
                yield Case(f"sample {name} {dtype} of {vocabulary}", specialization, names)
        for specialization in launches(op, (logits.t().contiguous().t(), *calls["plain"])):
            yield Case(f"sample {dtype} of columns", specialization, ("sm_90",))


@compile_cases("mla")
def latents(full: bool) -> Iterator[Case]:
    """Decoding over latents, plain and in pages, of few heads and many, of one token a sequence and several."""
    op = library.registered()["tritonite::mla_decode"]
    lengths, starts = torch.empty(8, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
    table = torch.empty(8, 512, dtype=torch.int32)
    shapes = [(16, 512, 64, 64), (128, 512, 64, 16), (128, 512, 64, 0)]
    if full:
        shapes += [(32, 512, 64, 48), (5, 100, 20, 64), (64, 512, 0, 64)]
    for dtype, (heads, value, rest, page) in itertools.product(_DTYPES if full else _DTYPES[::2], shapes):
        cache = torch.empty(64 if page else 8, page or 8192, value + rest, dtype=dtype)
        pages = table if page else None
        for tokens, kind in itertools.product((8, 24), KINDS):
            if not full and tokens == 24 and heads == 16:
                continue
            query = torch.empty(tokens, heads, value + rest, dtype=dtype)
            arguments = (query, cache, pages, lengths, None if tokens == 8 else starts, 0.07, value)
            for specialization in launches(op, arguments, kind=kind):
                names = KINDS[kind] if full else KINDS[kind][:1]
                label = f"mla_decode {dtype} {tokens}x{heads}x{value}+{rest} in pages of {page}"
                yield Case(label, specialization, tuple(names), limits_shared_memory=True)
