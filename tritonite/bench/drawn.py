"""Cases that nobody chose: operators, shapes, layouts and dtypes drawn from a seed, as a user's might be.

A case depends on its family, the seed and its number alone, so each can be measured again by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import tritonite
from tritonite.bench.cases import Case, dtypes_of, matches, own_elements
from tritonite.bench.drawing import FAMILIES, Source
from tritonite.testing.samples import Sample

# A family adds itself when it is imported.
importlib.import_module("tritonite.bench.families")
# A call that takes a GPU fewer seconds than this, by the bytes and the flops a second of a large one, is timed within a
# CUDA graph: about as long as the host needs to queue a call.
_SHORT = 10e-6
_BYTES_A_SECOND, _FLOPS_A_SECOND = 4e12, 4e14


def cases(
    count: int,
    seed: int,
    numbers: Sequence[int] | None = None,
    measures: Sequence[str] | None = None,
    ops: Sequence[str] | None = None,
    families: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> list[Case]:
    """The first `count` cases of each family, or those with these `numbers`, as far as they match the rest.

    A case is measured as `measures` say; None are "device" for a call that is long enough, or else "graph". In every
    process of a machine the cases are the same, in the same order.
    """
    return [
        case
        for name in FAMILIES
        if matches(families, name)
        for number in (range(count) if numbers is None else numbers)
        for case in _cases(name, seed, number, measures)
        if matches(ops, case.op) and matches(labels, case.label) and (dtypes is None or case.dtype in dtypes)
    ]


def _cases(name: str, seed: int, number: int, measures: Sequence[str] | None) -> Iterator[Case]:
    """One call in one dtype, by each measure."""
    random = Source(f"{seed} {name} {number}")
    call = FAMILIES[name](random)
    dtype = random.choice(dtypes_of(tritonite.overloads()[call.overload]))
    made = call.operands(lambda *shape: torch.empty(shape, dtype=dtype, device="meta"))
    arguments, keywords = (made.args, made.kwargs) if isinstance(made, Sample) else (made, {})
    leaves = pytree.tree_leaves(list(arguments))
    label = _label(leaves, keywords | call.given, dtype)
    for measure in measures or (_measure(leaves, call.flops),):
        yield Case(
            call.op, call.overload, name, label, dtype, call.operands, measure, call.given, call.flops, None, number
        )


def _measure(arguments: Sequence[Any], flops: int | None) -> str:
    """How the device's time of a call is found, by the least that the call may take."""
    sizes = [own_elements(each) * each.dtype.itemsize for each in arguments if isinstance(each, torch.Tensor)]
    # A result is about as large as the largest operand.
    moved = sum(sizes) + max(sizes)
    short = max(moved / _BYTES_A_SECOND, (flops or 0) / _FLOPS_A_SECOND) < _SHORT
    return "graph" if short and tritonite.device == "cuda" else "device"


def _label(arguments: Sequence[Any], given: dict[str, Any], dtype: torch.dtype) -> str:
    """All of a call's arguments, those by name behind the others."""
    found = [_described(value, dtype) for value in arguments if value is not None]
    return ", ".join([*found, *(f"{name}={value}" for name, value in given.items())])


def _described(value: Any, dtype: torch.dtype) -> str:
    """Of a tensor its shape, its strides where it is not contiguous, and its dtype where it is another."""
    if not isinstance(value, torch.Tensor):
        return str(value).removeprefix("torch.")
    words = ["x".join(map(str, value.shape)) or "0-d"]
    if not value.is_contiguous():
        words.append(f"by {'x'.join(map(str, value.stride()))}")
    if value.dtype is not dtype:
        words.append(str(value.dtype).removeprefix("torch."))
    return " ".join(words)
