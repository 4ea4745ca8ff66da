"""The factors of a transform's length: radices of a program's stages, and both passes of a long transform."""

from __future__ import annotations

import functools

import torch

from tritonite.engine.fft.table import fft_table
from tritonite.errors import Decline

# The order of the stages. Few stages mean few exchanges through shared memory.
_RADICES = (8, 4, 2, 3, 5, 7)


def check_length(length: int, dtype: torch.dtype) -> None:
    """Decline a length that neither one pass nor two passes serve, for operands of a real dtype."""
    most = fft_table().longest_signal
    if length > most:
        raise Decline(f"transforms of length {length}; lengths up to {most} are served")
    passes(length, longest(dtype))


def longest(dtype: torch.dtype) -> int:
    """Return the length of the longest transform of a program, for operands of a real dtype."""
    return fft_table().longest * torch.float32.itemsize // dtype.itemsize


@functools.lru_cache(maxsize=1024)
def radices(length: int) -> tuple[int, ...]:
    """Return the radices of the stages, which multiply to `length`. Declines a length with a prime factor above 7."""
    if length < 1:
        raise Decline(f"transforms of length {length}; lengths from 1 are served")
    found, rest = [], length
    for radix in _RADICES:
        while rest % radix == 0:
            found.append(radix)
            rest //= radix
    if rest > 1:
        raise Decline(f"transforms of length {length}; lengths whose prime factors are 2, 3, 5 and 7 are served")
    return tuple(found or (1,))


@functools.lru_cache(maxsize=1024)
def passes(length: int, most: int) -> tuple[int, ...]:
    """Return the lengths of one pass, or of two whose product is `length`, each at most `most`.

    Of two passes the first is the longer one, by as little as possible. Declines a length that has no such factors.
    """
    every = radices(length)
    if length <= most:
        return (length,)
    products = {1}
    for radix in every:
        # A radix of 8 or 4 may be divided between both passes.
        products |= {product * factor for product in products for factor in (2, 4, radix) if radix % factor == 0}
    fitting = [first for first in products if first <= most and length <= first * first]
    if not fitting:
        raise Decline(f"transforms of length {length}; two passes of at most {most} elements are served")
    first = min(fitting)
    return first, length // first
