"""Random benchmark cases of products of quantised operands: float8 with scales, and packed weights of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import tritonite
from tritonite.bench.cases import Make
from tritonite.bench.drawing import Call, Source, exactly, family, log_uniform, named, tokens

# Tokens of a step of decoding.
_STEPS = (1, 64)
_EXPERTS = (4, 8, 16, 32)
_GROUPS = (32, 64, 128, 256)
# Words along K of a packed weight that a lane reads at once, and the numbers of a tile along K.
_WORDS, _TILE = 4, 128

Arguments = Callable[[Make], Sequence[Any]]


def _features(random: Source, unit: int) -> int:
    """Draw the width of a layer, rounded to a multiple of `unit`."""
    return max(1, random.choice(random.sizes.widths) // unit) * unit


def _float8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def _int4(random: Source, M: int, N: int, K: int) -> Arguments:
    group = random.choice(_GROUPS)

    def arguments(make: Make) -> Sequence[Any]:
        words = (make(N // 8, K // _TILE, 32, _WORDS).float() * 7e8).to(torch.int32)
        return make(M, K), words, group, make(K // group, N, 2)

    return arguments


def _int8(random: Source, M: int, N: int, K: int) -> Arguments:
    return lambda make: (make(M, K), (make(N, K) * 40).to(torch.int8), make(N))


def _scaled(random: Source, M: int, N: int, K: int) -> Arguments:
    by_row, fast = random.random() < 0.5, random.random() < 0.5

    def arguments(make: Make) -> Sequence[Any]:
        a, b = _float8(make(M, K)), _float8(make(N, K)).t()
        scale_a = torch.ones((M, 1) if by_row else (), device=a.device)
        scale_b = torch.ones((1, N) if by_row else (), device=a.device)
        return a, b, scale_a, scale_b, None, None, torch.bfloat16, fast

    return arguments


def _scaled_groups(random: Source, M: int, N: int, K: int) -> Arguments:
    experts = max(1, min(random.choice(_EXPERTS), random.sizes.most // (N * K)))
    ends = sorted(random.randrange(M + 1) for _ in range(experts - 1)) + [M]

    def arguments(make: Make) -> Sequence[Any]:
        a, b = _float8(make(M, K)), _float8(make(experts, N, K)).mT
        scales = torch.ones(M, device=a.device), torch.ones(experts, N, device=a.device)
        offsets = torch.tensor(ends, dtype=torch.int32, device=a.device)
        return a, b, *scales, offsets, None, None, torch.bfloat16, True

    return arguments


class _Product(NamedTuple):
    """A product of (M, K) and (K, N), and what draws its other arguments.

    units: numbers of which N and K are multiples.
    decodes: M is that of a step of decoding.
    """

    arguments: Callable[[Source, int, int, int], Arguments]
    units: tuple[int, int]
    decodes: bool


_PRODUCTS = {
    "_weight_int4pack_mm": _Product(_int4, (8, max(_GROUPS)), True),
    "_weight_int8pack_mm": _Product(_int8, (32, 32), True),
    "_scaled_mm": _Product(_scaled, (16, 16), False),
    "_scaled_grouped_mm": _Product(_scaled_groups, (16, 16), False),
}


@family("quantized")
def _quantized(random: Source) -> Call:
    """Draw a product of few rows and a packed weight, or of float8 matrices or groups of them."""
    overloads = tritonite.overloads()
    name = named(random, [name for name in _PRODUCTS if overloads[name].has_place])
    product = _PRODUCTS[name]
    M = min(log_uniform(random, _STEPS), random.sizes.tokens[1]) if product.decodes else tokens(random)
    N, K = (_features(random, unit) for unit in product.units)
    return Call(name, name, exactly(product.arguments(random, M, N, K)), flops=2 * M * N * K)
