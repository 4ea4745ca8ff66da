"""Arguments that an operator or a function of torch's takes: what its family draws, and what OpInfo has."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tritonite import devices
from tritonite.catalog import overloads
from tritonite.testing import opinfo, verify
from tritonite.testing.samples import samples

_MOST = 8
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments_for(name: str, dtype: torch.dtype | None = None) -> Iterator[Arguments]:
    """Yield positional and keyword arguments of an overload of the catalog, or of a function that OpInfo knows.

    Tensors have `dtype`; by default float32, or another that the function takes.
    """
    yield from itertools.islice(_of_overload(name, dtype), _MOST)
    yield from itertools.islice(_of_function(name, dtype), _MOST)


def _of_overload(name: str, dtype: torch.dtype | None) -> Iterator[Arguments]:
    """Yield the samples of an overload's family that ATen takes, with destinations."""
    op = overloads().get(name)
    if op is None:
        return
    for kind in [dtype] if dtype else [torch.float32, *op.declaration.accepts]:
        for sample in samples(op, kind, devices.current.type):
            answer = verify.by_aten(op, sample)
            if answer is not None:
                outs = answer[0] if isinstance(answer[0], tuple) else answer[:1]
                yield sample.args, sample.kwargs | dict(zip(op.out_names, outs, strict=False))


def _of_function(name: str, dtype: torch.dtype | None) -> Iterator[Arguments]:
    """Yield the samples of the entries of OpInfo for a function."""
    for info in opinfo.entries(name.partition(".")[0]):
        kinds = [dtype] if dtype else sorted(info.supported_dtypes(devices.current.type), key=_preference)
        for kind in kinds:
            # Some samples need what is not installed, or a device that is not there.
            with contextlib.suppress(Exception):
                found = opinfo.sample_inputs(info, kind, requires_grad=False, full=False)
                yield from (((each.input, *each.args), each.kwargs) for each in found)


def _preference(dtype: torch.dtype) -> int:
    order = (torch.float32, torch.int64, torch.bool, torch.complex64)
    return order.index(dtype) if dtype in order else len(order)
