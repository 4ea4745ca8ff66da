"""The windows of a pooling call on the host: sizes, strides and padding, checked as ATen checks them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tritonite.engine.iteration import INT32_LIMIT
from tritonite.engine.windows import bounds
from tritonite.errors import Decline

# Taps up to which a loop is unrolled, so that all its loads are in flight at once. There is a compile for each size.
MAX_UNROLLED = 32


class Bounds(NamedTuple):
    """A kind of windows in `bounds` and the limits of a loop over a range of positions or windows.

    `taps` is the length of the longest range in each dimension; `unrolled` is the same if the loop is unrolled, else
    None.
    """

    kind: int
    taps: tuple[int, ...]
    unrolled: tuple[int, ...] | None


def unrolled_loop(taps: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the limits of a loop if it is short enough to be unrolled, else None."""
    return taps if math.prod(taps) <= MAX_UNROLLED else None


def _bounds(kind: int, taps: tuple[int, ...]) -> Bounds:
    return Bounds(kind, taps, unrolled_loop(taps))


class Windows(NamedTuple):
    """Windows over an image, a value for each dimension.

    An image of `sizes` has `counts` windows of `kernels` elements, `dilations` apart. They start `steps` apart, from
    `pads` before the image on. If `adaptive`, windows divide the image; `kernels` are the longest ones, and `steps`
    the whole part of their distance.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    kernels: tuple[int, ...]
    steps: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    adaptive: bool = False

    @property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the device functions of `bounds`, in their order."""
        return self[:6]

    @property
    def undilated(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers without dilations."""
        return (*self[:4], self.pads)

    @property
    def kind(self) -> int:
        """Return the kind of these windows in `bounds`."""
        if not self.adaptive:
            return int(bounds.STRIDED.value)
        longest = max(*self.sizes, *self.counts)
        return int((bounds.ADAPTIVE_64 if (longest + 1) * longest >= INT32_LIMIT else bounds.ADAPTIVE).value)

    def positions(self) -> Bounds:
        """Return the bounds of a loop over the elements of a window."""
        return _bounds(self.kind, self.kernels)

    def over(self) -> Bounds:
        """Return the bounds of a loop over the windows that cover a position."""
        if self.adaptive:
            return _bounds(self.kind, tuple(map(_longest, self.counts, self.sizes)))
        every = zip(self.counts, self.kernels, self.steps, self.dilations, strict=True)
        most = [min(count, -(-((kernel - 1) * spread + 1) // step)) for count, kernel, step, spread in every]
        return _bounds(self.kind, tuple(most))

    def area(self, padded: bool) -> int | None:
        """Return the elements of a window, with those in the padding if `padded`; None if windows differ."""
        for size, count, kernel, step, pad in zip(*self[:4], self.pads, strict=True):
            if self.adaptive:
                if size % count:
                    return None
            elif (pad and not padded) or (count - 1) * step - pad + kernel > size + pad:
                return None
        return math.prod(self.kernels)

    def partitions(self) -> bool:
        """Return whether windows of whole steps follow each other, from the first element on."""
        if self.adaptive:
            return self.area(False) is not None
        return (
            self.steps == self.kernels
            and set(self.dilations) == {1}
            and not any(self.pads)
            and self.area(False) is not None
        )


def _longest(size: int, count: int) -> int:
    """Return a bound of the elements in one of `count` adaptive windows of a dimension."""
    if not count:
        return 1
    if size % count == 0:
        return size // count
    return min(size, 1 if count % size == 0 else size // count + 2)


def expanded(numbers: Sequence[int], rank: int, name: str) -> tuple[int, ...]:
    """Return a number for each dimension, from one for all or one for each."""
    if len(numbers) not in (1, rank):
        raise Decline(f"{name} {list(numbers)}; 1 or {rank} numbers are served")
    return tuple(numbers) * (rank if len(numbers) == 1 else 1)


def strided(
    sizes: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Windows:
    """Return windows a stride apart. Declines where ATen raises.

    With `ceil_mode` a last window may reach beyond the image and its padding, if it starts before their end.
    """
    rank = len(sizes)
    kernels = expanded(kernel_size, rank, "kernel_size")
    steps = expanded(stride, rank, "stride") if len(stride) else kernels
    pads, spreads = expanded(padding, rank, "padding"), expanded(dilation, rank, "dilation")
    if min(*kernels, *steps, *spreads) < 1 or max(*kernels, *steps, *spreads, *pads, *sizes) >= INT32_LIMIT:
        raise Decline(f"kernel {list(kernels)}, stride {list(steps)}, dilation {list(spreads)}; 1 to 2**31 are served")
    if any(not 0 <= pad <= kernel // 2 for pad, kernel in zip(pads, kernels, strict=True)):
        raise Decline(f"padding {list(pads)} exceeds half of the kernel {list(kernels)}, without its dilation")
    counts = []
    for size, kernel, step, spread, pad in zip(sizes, kernels, steps, spreads, pads, strict=True):
        rounding = step - 1 if ceil_mode else 0
        count = (size + 2 * pad - spread * (kernel - 1) - 1 + rounding) // step + 1
        if ceil_mode and (count - 1) * step >= size + pad:
            count -= 1
        counts.append(count)
    if min(counts) < 1:
        raise Decline(f"a window of {list(kernels)} with dilation {list(spreads)} in an image of {list(sizes)}")
    return Windows(tuple(sizes), tuple(counts), kernels, steps, spreads, pads)


def adaptive(sizes: Sequence[int], counts: Sequence[int]) -> Windows:
    """Return `counts` adaptive windows. Window i has the positions from floor(i s / n) to ceil((i + 1) s / n)."""
    if len(counts) != len(sizes) or min(counts) < 0:
        raise Decline(f"output size {list(counts)} for an image of {list(sizes)}")
    kernels = tuple(map(_longest, sizes, counts))
    steps = tuple([size // max(count, 1) for size, count in zip(sizes, counts, strict=True)])
    ones, none = (1,) * len(sizes), (0,) * len(sizes)
    return Windows(tuple(sizes), tuple(counts), kernels, steps, ones, none, adaptive=True)


def fractional_over(sizes: tuple[int, ...], counts: tuple[int, ...], kernels: tuple[int, ...], margin: int) -> Bounds:
    """Return the bounds of the windows that may cover a position, in fractional pooling with any samples.

    Positions of windows may be rounded by up to `margin`, which device functions get as the padding.
    """
    every = zip(sizes, counts, kernels, strict=True)
    reaches = [(kernel + 1 + 2 * margin) * (count - 1) // max(size - kernel, 1) + 2 for size, count, kernel in every]
    return _bounds(int(bounds.FRACTIONAL.value), tuple(map(min, reaches, counts)))
