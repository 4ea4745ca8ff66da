"""Random benchmark cases: operators, shapes, layouts and dtypes drawn from a seed.

A case depends only on its family, the seed and its number, so that each can be measured again alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import tritonite
from tritonite.bench.cases import DTYPES, Case, dtypes_of, matches, own_elements
from tritonite.bench.drawing import FAMILIES, Source
from tritonite.testing.samples import Sample

# Families register when the module is imported.
for _name in ("families", "convolution", "windows", "linear_algebra", "lists", "quantized", "fused_family"):
    importlib.import_module(f"tritonite.bench.{_name}")
# A call of fewer seconds than this is timed within a CUDA graph, because the host needs about as long to queue a call.
# The duration is estimated from the rates of a large GPU.
_SHORT = 10e-6
# The most tensors of a list that a label names one by one.
_MOST_LISTED = 64
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
    """Return the first `count` cases of each family, or those with `numbers`, that match the other arguments.

    Without `measures` a case is measured as "device", or as "graph" if it is short. Every process of a machine gets the
    same cases in the same order.
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
    """Draw a call and its dtype, and yield a case for each measure."""
    random = Source(f"{seed} {name} {number}")
    call = FAMILIES[name](random)
    pair = call.pair
    served = dtypes_of(tritonite.overloads()[call.overload]) if pair is None else pair.dtypes or DTYPES
    dtype = random.choice(served)
    made = call.operands(lambda *shape: torch.empty(shape, dtype=dtype, device="meta"))
    arguments, keywords = (made.args, made.kwargs) if isinstance(made, Sample) else (made, {})
    leaves = pytree.tree_leaves(list(arguments))
    label = _label(arguments, keywords | call.given, dtype)
    for measure in measures or (_measure(leaves, call.flops),):
        yield Case(
            *(call.op, call.overload, name, label, dtype, call.operands, measure, call.given, call.flops, pair, number)
        )


def _measure(arguments: Sequence[Any], flops: int | None) -> str:
    """Return "graph" for a call that is short on a large GPU, else "device"."""
    sizes = [own_elements(each) * each.dtype.itemsize for each in arguments if isinstance(each, torch.Tensor)]
    # The result counts as large as the largest operand.
    moved = sum(sizes) + max(sizes)
    short = max(moved / _BYTES_A_SECOND, (flops or 0) / _FLOPS_A_SECOND) < _SHORT
    return "graph" if short and tritonite.backend.profiled else "device"


def _label(arguments: Sequence[Any], given: dict[str, Any], dtype: torch.dtype) -> str:
    """Describe a call's arguments, positional ones first."""
    positional = [_described(value, dtype) for value in _summarised(arguments) if value is not None]
    return ", ".join([*positional, *(f"{name}={value}" for name, value in given.items())])


def _summarised(arguments: Sequence[Any]) -> list[Any]:
    """Flatten the arguments, and replace lists of many tensors by a text."""
    found: list[Any] = []
    for value in arguments:
        tensors = value if isinstance(value, list) and all(isinstance(each, torch.Tensor) for each in value) else []
        if len(tensors) > _MOST_LISTED:
            found.append(f"{len(tensors)} tensors of {sum(each.numel() for each in tensors)} elements")
        else:
            found += pytree.tree_leaves(value)
    return found


def _described(value: Any, dtype: torch.dtype) -> str:
    """Describe a value; a tensor by shape, strides unless contiguous, and dtype unless the case's."""
    if not isinstance(value, torch.Tensor):
        return str(value).removeprefix("torch.")
    words = ["x".join(map(str, value.shape)) or "0-d"]
    if not value.is_contiguous():
        words.append(f"by {'x'.join(map(str, value.stride()))}")
    if value.dtype is not dtype:
        words.append(str(value.dtype).removeprefix("torch."))
    return " ".join(words)
