"""Resampling of sequences, images and volumes."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.samples import facts
from tritonite.testing.tolerances import ATOL

# Sizes of an input and an output, and factors that give them.
_INPUTS, _OUTPUTS, _FACTORS = (3, 5, 4), (7, 3, 5), (2.34, 0.62, 1.3)


def _filled(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of this shape with a tensor's elements, repeated, in its memory format."""
    flat = tensor.reshape(-1)
    count = torch.Size(shape).numel()
    filled = flat[torch.arange(count, device=tensor.device) % flat.numel()].reshape(shape)
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    if channels_last is not None and not tensor.is_contiguous():
        filled = filled.to(memory_format=channels_last)
    return filled


def _resampling(dimensions: int) -> Any:
    def arguments(tensors: facts.Tensors) -> dict[str, Any] | None:
        x = tensors[0]
        if not x.numel():
            return None
        inputs, outputs = [2, 3, *_INPUTS[-dimensions:]], list(_OUTPUTS[-dimensions:])
        source = _filled(x, tuple(inputs))
        # ATen adds nan for an infinite gradient at a tap whose weight is 0, and Tritonite leaves out such taps.
        grad = torch.where(torch.isfinite(grad := _filled(x, (2, 3, *outputs))), grad, 0.5)
        return {
            "self": source,
            "input": source,
            "grad_output": grad,
            "output_size": outputs,
            "input_size": inputs,
            "align_corners": False,
            "scale_factors": None,
            "scales": _FACTORS[-1],
            **dict(zip(("scales_w", "scales_h", "scales_d"), _FACTORS[::-1], strict=True)),
        }

    return arguments


_NAMES = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    2: (
        *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"),
        *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    ),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
}
for _dimensions, _each in _NAMES.items():
    for _name in _each:
        facts.arguments(_name, f"{_name}_backward")(_resampling(_dimensions))

_ANTIALIASED = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
# Resampling by sums of several products, whose weights may have either sign.
_WEIGHTED = [f"{name}{way}" for name in ("upsample_bicubic2d", *_ANTIALIASED) for way in ("", "_backward")]
facts.ZERO_SIGN_OF_ROUNDOFF.update(_WEIGHTED)


@facts.terms(*_WEIGHTED)
def _weighted_terms(sums: facts.Sums) -> float:
    """Return a multiple of the number of taps, or what a rounded coordinate changes by their weights."""
    largest = max(size for x in sums.tensors for size in (1, *x.shape[2:]))
    return max(64.0, (4 * largest * 2**-24 / ATOL[torch.float32]) ** 2)


@facts.terms(
    *(f"{name}{size}d_backward" for name in ("upsample_nearest", "_upsample_nearest_exact") for size in (1, 2, 3))
)
def _summed_terms(sums: facts.Sums) -> float:
    """Return the terms of sums that may be the roundoff of gradients that cancel."""
    finite = sums.tensors[0][sums.tensors[0].isfinite()]
    return sums.per_element() * max(1.0, float(finite.abs().max()) if finite.numel() else 1.0) ** 2


_LINEAR = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")


def _taps(sums: facts.Sums, outputs: float) -> float:
    """Return the products of an element over `outputs` outputs, each times what a rounded coordinate changes a weight.

    An output has two taps in each dimension. Operands have their median size.
    """
    largest = max(size for x in sums.tensors for size in (1, *x.shape[2:]))
    rounded = max(1.0, 2 * largest * 2**-24 / ATOL[torch.float32])
    size = max(1.0, *(float(x.double().abs().nanmedian()) for x in sums.tensors if x.is_floating_point()))
    return 2.0 ** (sums.result.dim() - 2) * outputs * (rounded * min(size, 1e30)) ** 2


@facts.terms(*_LINEAR)
def _taps_of_an_output(sums: facts.Sums) -> float:
    return _taps(sums, 1.0)


@facts.terms(*(f"{name}_backward" for name in _LINEAR))
def _taps_of_an_input(sums: facts.Sums) -> float:
    return _taps(sums, sums.per_element())


_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}


@facts.drawn(*(f"{name}{way}" for names in _NAMES.values() for name in names for way in ("", "_backward")))
def _consistent(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return scales that give the output's size, or None: for others ATen's GPU kernels read beyond the input."""
    source = next((arguments[name] for name in ("self", "input") if name in arguments), None)
    output = arguments["output_size"]
    if output is None or not isinstance(source, torch.Tensor | None):
        return arguments
    sizes = arguments["input_size"] if source is None else source.shape
    if len(sizes) != len(output) + 2 or len(output) not in _SCALES:
        return arguments
    each = zip(_SCALES[len(output)], sizes[2:], output, strict=True)
    return arguments | {
        name: None for name, size, wanted in each if name in arguments and not _gives(arguments[name], size, wanted)
    }


def _gives(scale: Any, size: int, wanted: int) -> bool:
    """Return whether a scale, which the fuzzer may draw as any number, gives the wanted size."""
    return isinstance(scale, float) and 0 < scale < 2.0**31 and int(size * scale) == wanted


@facts.drawn(*_ANTIALIASED)
def _several_columns(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return an output of at least two columns: ATen's CPU kernel repeats the first row of a single column."""
    return arguments | {
        "output_size": [*arguments["output_size"][:1], *(max(2, n) for n in arguments["output_size"][1:])]
    }


@facts.drawn(*(f"{name}_backward" for name in (*_LINEAR, "upsample_bicubic2d", *_ANTIALIASED)))
def _not_infinite(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a gradient that is not infinite: where an input is several taps of an output, ATen adds up its products.

    The product of infinity and a weight of 0 is nan. Tritonite adds up the weights.
    """
    grad = arguments["grad_output"]
    infinite = facts.real(grad) and bool(grad.isinf().any())
    return arguments | {"grad_output": grad.masked_fill(grad.isinf(), 0.5) if infinite else grad}


@facts.drawn(*_LINEAR, "upsample_bicubic2d")
def _finite(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return finite inputs: where a size stays, ATen's CPU kernels multiply an infinite element by a weight of 0."""
    given = {name: arguments[name] for name in ("self", "input") if name in arguments}
    return arguments | {name: torch.where(torch.isfinite(x), x, 0.5) for name, x in given.items() if facts.real(x)}
