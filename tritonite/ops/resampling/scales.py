"""Numbers of a resampling: sizes and scales of each dimension, and the outputs that a gradient looks at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tritonite.dtypes import FLOATS
from tritonite.engine.movement import result, strides_in
from tritonite.errors import Decline


class Resampling(NamedTuple):
    """Sizes along the resampled dimensions, and the input's size per output element there."""

    sizes: tuple[int, ...]
    outputs: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(range(2, 2 + len(self.sizes)))

    @property
    def padded_scales(self) -> tuple[float, ...]:
        """The scales, and 1 for dimensions that three would have in addition."""
        return (*self.scales, 1.0, 1.0)[:3]

    @property
    def inverses(self) -> tuple[float, ...]:
        """The inverse scales; 0 for a scale of 0, where every output reads the first element."""
        return tuple([1 / scale if scale else 0.0 for scale in self.scales])

    def along(self, d: int) -> Resampling:
        """Return the resampling of one of the dimensions."""
        return Resampling(self.sizes[d : d + 1], self.outputs[d : d + 1], self.scales[d : d + 1])

    def copies(self) -> bool:
        """Return whether all sizes stay."""
        return self.sizes == self.outputs

    def counts(self, reach: float, width: float, shift: float) -> tuple[int, ...]:
        """Return the number of outputs that a gradient looks at in each dimension.

        An input element contributes to the outputs whose coordinates lie in a range of `width` from its index + `reach`
        on; the last element also contributes to all beyond. Output o has the coordinate (o + shift) * scale.
        """
        found = []
        for size, outputs, inverse in zip(self.sizes, self.outputs, self.inverses, strict=True):
            extent = width * inverse
            covered = math.ceil(extent - 1e-9 * max(extent, 1.0)) if math.isfinite(extent) else outputs
            first = (size - 1 + reach) * inverse - shift
            beyond = outputs - math.floor(first) if 0 < first < outputs else 0 if first >= outputs else outputs
            found.append(max(1, min(max(covered, beyond), outputs)))
        return tuple(found)


def sampled_scale(size: int, output: int, corners: bool, given: float | None) -> float:
    """Return the input's size per output element, as ATen's `area_pixel_compute_scale` does."""
    if corners:
        return (size - 1) / (output - 1) if output > 1 else 0.0
    return 1 / given if given is not None and given > 0 else size / output


def check_sizes(input_size: Sequence[int], output_size: Sequence[int], dimensions: int) -> None:
    """Decline sizes for which ATen raises: a wrong rank, or a dimension other than the batch without elements."""
    if len(output_size) != dimensions or len(input_size) != dimensions + 2:
        raise Decline(f"output size {list(output_size)} for {list(input_size)}; {dimensions} dimensions are resampled")
    if any(n < 1 for n in (*input_size[1:], *output_size)):
        raise Decline(f"output size {list(output_size)} for {list(input_size)}; only the batch may be empty")


def check_gradient(grad_output: torch.Tensor, output_size: Sequence[int], input_size: Sequence[int]) -> None:
    """Decline a gradient of another shape than the output, or of another dtype than floats."""
    if grad_output.dtype not in FLOATS or list(grad_output.shape) != [*input_size[:2], *output_size]:
        raise Decline(f"a gradient of {grad_output.dtype} and shape {list(grad_output.shape)} for {list(output_size)}")


def output_like(source: torch.Tensor, shape: Sequence[int], outs: Sequence[torch.Tensor], keep: bool) -> torch.Tensor:
    """Return the output of a resampling, in the memory format that ATen suggests for the source if `keep`."""
    suggested = torch._prims_common.suggest_memory_format(source) if keep else torch.contiguous_format
    return result((source,), shape, source.dtype, outs, strides_in(shape, suggested))


def scaled_size(
    input_size: Sequence[int], output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> list[int]:
    """Return the output size that `.vec` overloads name by a size or by factors. Raises Decline unless one is given."""
    if (output_size is None) == (scale_factors is None):
        raise Decline("not exactly one of output_size and scale_factors")
    if output_size is not None:
        return list(output_size)
    assert scale_factors is not None
    if len(scale_factors) != len(input_size) - 2:
        raise Decline(f"{len(scale_factors)} scale factors for an input of {len(input_size)} dimensions")
    return [int(size * factor) for size, factor in zip(input_size[2:], scale_factors, strict=True)]
