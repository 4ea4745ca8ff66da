"""Arguments that an operator or a function of torch's takes: what its family draws, and what OpInfo has."""

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

_MOST = 8
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _like(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=devices.current.type)


def _recurrent(gates: int, states: int) -> tuple[Any, ...]:
    """What ATen's recurrent networks take: 8 features of 5 steps, 16 hidden ones, one layer."""
    hidden = [_like(1, 3, 16) for _ in range(states)]
    weights = [_like(gates * 16, 8), _like(gates * 16, 16), _like(gates * 16), _like(gates * 16)]
    return _like(5, 3, 8), hidden if states > 1 else hidden[0], weights, True, 1, 0.0, False, False, False


def _cell(gates: int, states: int) -> tuple[Any, ...]:
    hidden = [_like(3, 16) for _ in range(states)]
    return _like(3, 8), hidden if states > 1 else hidden[0], _like(gates * 16, 8), _like(gates * 16, 16)


# Arguments by position of functions that neither a schema nor OpInfo tells of.
_OWN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "adaptive_max_pool1d_with_indices": lambda: (_like(2, 3, 16), 4),
    "adaptive_max_pool2d_with_indices": lambda: (_like(2, 3, 16, 16), 4),
    "adaptive_max_pool3d_with_indices": lambda: (_like(2, 3, 8, 8, 8), 4),
    "affine_grid": lambda: (_like(2, 2, 3), [2, 3, 16, 16]),
    "alpha_dropout_": lambda: (_like(64, 64), 0.5, True),
    "as_tensor": lambda: (_like(64),),
    "asarray": lambda: (_like(64),),
    "chain_matmul": lambda: (_like(4, 8), _like(8, 16)),
    "conv_tbc": lambda: (_like(16, 2, 3), _like(3, 3, 4), _like(4), 1),
    "detach": lambda: (_like(64),),
    "detach_": lambda: (_like(64),),
    "dropout_": lambda: (_like(64, 64), 0.5, True),
    "einsum": lambda: ("ij,jk->ik", _like(64, 64), _like(64, 64)),
    "feature_alpha_dropout_": lambda: (_like(2, 3, 16), 0.5, True),
    "feature_dropout_": lambda: (_like(2, 3, 16), 0.5, True),
    "fold": lambda: (_like(1, 12, 9), (4, 4), (2, 2)),
    "fractional_max_pool2d_with_indices": lambda: (_like(2, 3, 16, 16), 3, 8),
    "fractional_max_pool3d_with_indices": lambda: (_like(2, 3, 8, 8, 8), 2, 4),
    "grid_sampler": lambda: (_like(2, 3, 16, 16), _like(2, 8, 8, 2), 0, 0, False),
    "grouped_mm": lambda: (_like(2, 16, 32, dtype=torch.bfloat16), _like(2, 32, 16, dtype=torch.bfloat16)),
    "gru": lambda: _recurrent(3, 1),
    "gru_cell": lambda: _cell(3, 1),
    "is_nonzero": lambda: (_like(1),),
    "lp_pool2d": lambda: (_like(2, 3, 16, 16), 2.0, 2),
    "lp_pool3d": lambda: (_like(2, 3, 8, 8, 8), 2.0, 2),
    "lstm": lambda: _recurrent(4, 2),
    "lstm_cell": lambda: _cell(4, 2),
    "resize_as_": lambda: (_like(64), _like(8, 8)),
    "rnn_relu": lambda: _recurrent(1, 1),
    "rnn_tanh": lambda: _recurrent(1, 1),
    "upsample": lambda: (_like(2, 3, 16, 16), 32),
}


def arguments_for(name: str, dtype: torch.dtype | None = None) -> Iterator[Arguments]:
    """Yield positional and keyword arguments of an overload of the catalog, or of a function that OpInfo knows.

    Tensors have `dtype`; by default float32, or another that the function takes.
    """
    if name in _OWN:
        yield _OWN[name](), {}
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
