"""Example arguments of operators and of torch's functions: samples of their family, then those of OpInfo."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tritonite import devices
from tritonite.registry import overloads
from tritonite.testing import opinfo, verify
from tritonite.testing.samples import samples

# Calls from each source.
_LIMIT = 8
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=devices.current.type)


def _recurrent(gates: int, states: int) -> tuple[Any, ...]:
    """Return the arguments of a recurrent network: 5 steps of 8 features, 16 hidden features, one layer."""
    hidden = [_ones(1, 3, 16) for _ in range(states)]
    weights = [_ones(gates * 16, 8), _ones(gates * 16, 16), _ones(gates * 16), _ones(gates * 16)]
    return _ones(5, 3, 8), hidden if states > 1 else hidden[0], weights, True, 1, 0.0, False, False, False


def _cell(gates: int, states: int) -> tuple[Any, ...]:
    hidden = [_ones(3, 16) for _ in range(states)]
    return _ones(3, 8), hidden if states > 1 else hidden[0], _ones(gates * 16, 8), _ones(gates * 16, 16)


# Positional arguments of functions that have neither a schema with samples nor an OpInfo.
_OWN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "adaptive_max_pool1d_with_indices": lambda: (_ones(2, 3, 16), 4),
    "adaptive_max_pool2d_with_indices": lambda: (_ones(2, 3, 16, 16), 4),
    "adaptive_max_pool3d_with_indices": lambda: (_ones(2, 3, 8, 8, 8), 4),
    "affine_grid": lambda: (_ones(2, 2, 3), [2, 3, 16, 16]),
    "alpha_dropout_": lambda: (_ones(64, 64), 0.5, True),
    "as_tensor": lambda: (_ones(64),),
    "asarray": lambda: (_ones(64),),
    "chain_matmul": lambda: (_ones(4, 8), _ones(8, 16)),
    "conv_tbc": lambda: (_ones(16, 2, 3), _ones(3, 3, 4), _ones(4), 1),
    "detach": lambda: (_ones(64),),
    "detach_": lambda: (_ones(64),),
    "dropout_": lambda: (_ones(64, 64), 0.5, True),
    "einsum": lambda: ("ij,jk->ik", _ones(64, 64), _ones(64, 64)),
    "feature_alpha_dropout_": lambda: (_ones(2, 3, 16), 0.5, True),
    "feature_dropout_": lambda: (_ones(2, 3, 16), 0.5, True),
    "fold": lambda: (_ones(1, 12, 9), (4, 4), (2, 2)),
    "fractional_max_pool2d_with_indices": lambda: (_ones(2, 3, 16, 16), 3, 8),
    "fractional_max_pool3d_with_indices": lambda: (_ones(2, 3, 8, 8, 8), 2, 4),
    "grid_sampler": lambda: (_ones(2, 3, 16, 16), _ones(2, 8, 8, 2), 0, 0, False),
    "grouped_mm": lambda: (_ones(2, 16, 32, dtype=torch.bfloat16), _ones(2, 32, 16, dtype=torch.bfloat16)),
    "gru": lambda: _recurrent(3, 1),
    "gru_cell": lambda: _cell(3, 1),
    "is_nonzero": lambda: (_ones(1),),
    "lp_pool2d": lambda: (_ones(2, 3, 16, 16), 2.0, 2),
    "lp_pool3d": lambda: (_ones(2, 3, 8, 8, 8), 2.0, 2),
    "lstm": lambda: _recurrent(4, 2),
    "lstm_cell": lambda: _cell(4, 2),
    "resize_as_": lambda: (_ones(64), _ones(8, 8)),
    "rnn_relu": lambda: _recurrent(1, 1),
    "rnn_tanh": lambda: _recurrent(1, 1),
    "upsample": lambda: (_ones(2, 3, 16, 16), 32),
}


def arguments_for(name: str, dtype: torch.dtype | None = None) -> Iterator[Arguments]:
    """Yield positional and keyword arguments of an overload of the catalog, or of a function that OpInfo has.

    Tensors have `dtype`; by default float32 or another dtype that the function accepts.
    """
    if name in _OWN:
        yield _OWN[name](), {}
    yield from itertools.islice(_overload_arguments(name, dtype), _LIMIT)
    yield from itertools.islice(_opinfo_arguments(name, dtype), _LIMIT)


def _overload_arguments(name: str, dtype: torch.dtype | None) -> Iterator[Arguments]:
    """Yield the samples of an overload that ATen accepts, with outputs."""
    op = overloads().get(name)
    if op is None:
        return
    for kind in [dtype] if dtype else [torch.float32, *op.declaration.accepts]:
        for sample in samples(op, kind, devices.current.type):
            answer = verify.by_aten(op, sample)
            if answer is not None:
                outs = answer[0] if isinstance(answer[0], tuple) else answer[:1]
                yield sample.args, sample.kwargs | dict(zip(op.out_names, outs, strict=False))


def _opinfo_arguments(name: str, dtype: torch.dtype | None) -> Iterator[Arguments]:
    """Yield OpInfo's samples for a function."""
    for info in opinfo.entries(name.partition(".")[0]):
        kinds = [dtype] if dtype else sorted(info.supported_dtypes(devices.current.aten), key=_preference)
        for kind in kinds:
            # Some samples need a package or a device that is missing.
            with contextlib.suppress(Exception):
                found = opinfo.sample_inputs(info, kind, requires_grad=False, full=False)
                yield from (((each.input, *each.args), each.kwargs) for each in found)


def _preference(dtype: torch.dtype) -> int:
    order = (torch.float32, torch.int64, torch.bool, torch.complex64)
    return order.index(dtype) if dtype in order else len(order)
