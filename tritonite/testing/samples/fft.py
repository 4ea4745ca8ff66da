"""Fourier transforms: complex operands, dimensions in any order, halves of spectra."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tritonite.registry import Op
from tritonite.testing.samples import facts

PACKETS = ("_fft_c2c", "_fft_r2c", "_fft_c2r")
# Every element is a sum in an order of the library's own.
facts.ZERO_SIGN_OF_ROUNDOFF |= set(PACKETS)
facts.CANCELLING |= set(PACKETS)
_COMPLEX_OF = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@facts.terms(*PACKETS)
def _stages(sums: facts.Sums) -> float:
    """Return the number of roundings behind an element, a few for each stage, times the mean square of the results."""
    own = sums.result if sums.exact is None else sums.exact
    mean_square = float(own.abs().double().square().mean().nan_to_num(1, 1))
    return max(1.0, 4 * math.log2(2 * sums.read) * mean_square)


@facts.layouts(*PACKETS)
def _signals(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield signals of every radix and of several stages, along dimensions of several strides."""
    yield "all radices", [make(2, 420)]
    yield "powers of 2", [make(3, 128)]
    yield "batch fastest", [make(24, 5).t()]
    yield "volumes", [make(3, 5, 4, 6).transpose(0, 2)]
    yield "expanded", [make(1, 9).expand(4, 9)]


def _is_served(length: int) -> bool:
    """Return whether a length has no prime factor above 7."""
    return length > 0 and 210 ** length.bit_length() % length == 0


def _signal_lengths(size: int) -> list[int]:
    """Return the served lengths of real signals whose spectrum has a half of `size` elements."""
    return [length for length in (2 * size - 2, 2 * size - 1) if _is_served(length)]


def _extent(size: int, half: bool) -> int:
    """Return the largest extent up to `size` that is served, also as that of a `half` of a spectrum."""
    served = (n for n in range(size, 0, -1) if _is_served(n) and (_signal_lengths(n) or not half))
    return next(served, size)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Return numbers of order 1: whether a sum of infinities is infinite or nan depends on its order."""
    if x.is_complex():
        parts = torch.view_as_real(x.resolve_conj())
        return x if parts is (cut := _finite(parts)) else torch.view_as_complex(cut.contiguous())
    return x if bool((x.abs() <= 9).all()) else x.nan_to_num(1, 2, -2).clamp(-9, 9)


@facts.operands(*PACKETS)
def _served(op: Op, tensors: facts.Tensors, choice: Any) -> facts.Tensors | None:
    """Return finite complex or real numbers, cut to lengths that have no prime factor above 7."""
    x = tensors[0]
    kind = x.dtype if x.dtype in _COMPLEX_OF else None
    if kind is None or not x.dim():
        return None
    x = _finite(x[tuple(slice(_extent(size, op.packet == "_fft_c2r")) for size in x.shape)])
    return [x] if op.packet == "_fft_r2c" else [torch.complex(x, x.flip(-1))]


@facts.arguments(*PACKETS)
def _dimensions(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return dimensions and a normalisation that depend on the shape. The last dimension of a spectrum is a half."""
    shape = tensors[0].shape
    if not shape or tensors[0].dtype not in _COMPLEX_OF:
        return None
    rank = len(shape)
    dim = ([rank - 1], [rank - 1, 0], [*range(rank)])[sum(shape) % 3] if rank > 1 else [0]
    lengths = _signal_lengths(_extent(shape[dim[-1]], True)) or [1]
    last = lengths[sum(shape) % len(lengths)]
    return {"dim": dim, "normalization": sum(shape) % 4 % 3, "last_dim_size": last}


@facts.drawn(*PACKETS)
def _valid(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return dimensions and a length that the tensor has: ATen reads and writes beyond its memory for others."""
    x = arguments["self"]
    if not isinstance(x, torch.Tensor) or x.dtype not in (*_COMPLEX_OF, *_COMPLEX_OF.values()):
        return arguments
    x = _finite(x if x.dim() else x.reshape(1))
    dim = [*dict.fromkeys(int(d) % x.dim() for d in arguments["dim"] or [0])]
    valid = {"self": x, "dim": dim, "normalization": int(arguments["normalization"]) % 3}
    if "last_dim_size" in arguments:
        odd = int(arguments["last_dim_size"]) % 2
        valid["last_dim_size"] = max(1, 2 * (x.shape[dim[-1]] - 1) + odd)
    return arguments | valid


facts.may_decline(
    ("fft.hfft", "fft.hfft2", "fft.hfftn"),
    ("functional", "out="),
    "*: a tensor that is conjugated or negated when it is read",
    "PyTorch resolves the conjugate of the operand by a copy, which is ATen's",
)
facts.may_decline(
    ("fft.hfft", "fft.hfft2", "fft.hfftn", "fft.ifft", "fft.ihfft"),
    ("gradient",),
    (
        "*: dtype torch.complex*",
        "*: a tensor that is conjugated or negated when it is read",
        "*; lengths whose prime factors are 2, 3, 5 and 7 are served",
    ),
    "ATen copies and scales conjugates in PyTorch's formulas, and OpInfo's samples have lengths of 31",
)
facts.may_decline(
    tuple([f"fft.{kind}fft{dimensions}" for kind in ("", "h", "r", "i", "ih", "ir") for dimensions in ("", "2", "n")]),
    ("functional", "out=", "gradient"),
    ("*torch.complex32", "*: a tensor that is conjugated or negated when it is read"),
    "PyTorch scales, conjugates and converts complex numbers in half precision by operators of its own",
    dtypes=(torch.float16,),
    device="cuda",
)
