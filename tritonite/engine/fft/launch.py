"""Launches of Fourier transforms along one dimension: views of the operands, the table of roots, the passes."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.fft import kernels, plan
from tritonite.engine.fft.meta import FftMeta, Signal
from tritonite.engine.fft.table import fft_table
from tritonite.engine.iteration import collapse, offset_type, power_of_2
from tritonite.runtime.contract import empty, filling, fusion

_ROOTS_BLOCK = 1024
# More warps would leave fewer registers than a radix of 8 needs.
_MOST_WARPS = 16


class Components(NamedTuple):
    """Real and imaginary parts of a tensor, views of equal strides; a real tensor has no imaginary part."""

    re: torch.Tensor
    im: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, exchanged: bool = False) -> Components:
        """Return the parts of a tensor, `exchanged` for a backward transform."""
        if not tensor.is_complex():
            return cls(tensor, None)
        parts = torch.view_as_real(tensor).unbind(-1)
        return cls(*parts[::-1]) if exchanged else cls(*parts)


def transform(
    out: torch.Tensor, x: torch.Tensor, dim: int, length: int, *, forward: bool = True, scale: float = 1.0
) -> None:
    """Write the Fourier transform of `x` along `dim`, times `scale`. `plan.check_length` has to hold.

    A real `x` is transformed forward, and `out` may have the first half of the spectrum alone. For a real `out`, `x`
    has the first half of a spectrum, which is transformed backward. `length` is that of the whole signal.
    """
    hermitian = not out.is_complex()
    exchanged = not forward and not hermitian
    source, target = Components.of(x, exchanged), Components.of(out, exchanged)
    sizes = [size for d, size in enumerate(x.shape) if d != dim]
    strides = [[s for d, s in enumerate(each.re.stride()) if d != dim] for each in (target, source)]
    in_stride, out_stride = source.re.stride(dim), target.re.stride(dim)
    roots = _roots(length, source.re)
    lengths = plan.passes(length, plan.longest(source.re.dtype))
    if len(lengths) == 1:
        _launch(
            (target, source),
            (sizes, strides),
            Signal(out_stride, 1, 0, out.shape[dim]),
            Signal(in_stride, 1, 0, length),
            (length, length),
            roots,
            scale,
            hermitian,
        )
        return
    # Signal element i * second + n of transform n, then element i + second * n of transform n of what is between.
    first, second = lengths
    middle = Components.of(empty((*sizes, length), _complex(source.re.dtype), x.device))
    between = list(middle.re.stride())[:-1]
    _launch(
        (middle, source),
        (sizes, [between, strides[1]]),
        Signal(2, second, 1, length),
        Signal(in_stride, second, 1, length),
        (first, length),
        roots,
        1.0,
        hermitian,
    )
    _launch(
        (target, middle),
        (sizes, [strides[0], between]),
        Signal(out_stride, first, 1, out.shape[dim]),
        Signal(2, 1, second, length),
        (second, length),
        roots,
        scale,
        False,
    )


def _complex(dtype: torch.dtype) -> torch.dtype:
    return torch.complex64 if dtype is torch.float32 else torch.complex128


def _roots(length: int, like: torch.Tensor) -> torch.Tensor:
    """Return a table of cos and sin of 2 pi k / length, for k < length."""
    roots = empty((length, 2), like.dtype, like.device)
    kept = length <= fft_table().kept_roots
    with filling(roots) if kept else contextlib.nullcontext():
        kernels.write_roots[(-(-length // _ROOTS_BLOCK),)](roots, length, BLOCK=_ROOTS_BLOCK)
    return roots


def _launch(
    operands: tuple[Components, Components],
    layout: tuple[list[int], list[list[int]]],
    target: Signal,
    source: Signal,
    lengths: tuple[int, int],
    roots: torch.Tensor,
    scale: float,
    hermitian: bool,
) -> None:
    """Launch one pass from the second operand to the first.

    `layout` has the sizes of the signals' other dimensions, and the strides there of both operands. `lengths` are those
    of the pass and of the signal.
    """
    out, x = operands
    length, whole = lengths
    sizes, (out_strides, in_strides) = collapse(*layout)
    inner = whole // length
    transforms = torch.Size(layout[0]).numel() * inner
    factors = plan.radices(length)
    lanes = max([power_of_2(length // radix) * power_of_2(radix) for radix in factors])
    table = fft_table()
    batch = max(1, min(table.elements // lanes, power_of_2(transforms)))
    elements = source.stride * source.step
    neighbours = source.stride * source.inner_step if inner > 1 else in_strides[0]
    meta = FftMeta(
        length=length,
        radices=factors,
        batch=batch,
        batch_fastest=batch > 1 and 0 < neighbours < elements,
        hermitian=hermitian,
        twiddled=inner > 1 and target.inner_step == 1 and source.inner_step == 1,
        compute=TRITON_DTYPES[roots.dtype],
        index=offset_type(*[each.re for each in operands]),
    )
    warps = min(_MOST_WARPS, devices.warps(batch * lanes // table.elements_per_thread))
    kernels.transform[(-(-transforms // batch),)](
        *(*out, *x, roots, tuple(sizes[:-1]), tuple(out_strides), tuple(in_strides), target, source),
        *(transforms, inner, whole // length, scale),
        META=meta,
        num_warps=warps,
        **fusion(),
    )
