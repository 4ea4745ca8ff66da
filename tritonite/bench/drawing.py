"""Drawing random benchmark cases: ranges of sizes, layouts, and the registry of families."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

import tritonite
from tritonite.bench.cases import Make, Shape
from tritonite.bench.fused import Pair
from tritonite.testing.samples import Sample


@dataclass(frozen=True)
class Sizes:
    """Ranges of drawn sizes: a pair is (least, largest), a longer tuple lists sizes of models."""

    # Elements of a pointwise result.
    elements: tuple[int, int]
    # Reductions: number of rows, their length, and most elements in all.
    rows: tuple[int, int]
    lengths: tuple[int, int]
    most: int
    # Layers: tokens of a batch, and features.
    tokens: tuple[int, int]
    widths: tuple[int, ...]
    # Attention: sequences of a batch, length of a sequence, heads, and head sizes.
    batches: tuple[int, int]
    positions: tuple[int, int]
    heads: tuple[int, ...]
    head_sizes: tuple[int, ...]
    # Images: channels, and the length of a side.
    channels: tuple[int, ...]
    sides: tuple[int, int]
    classes: tuple[int, ...]


OF_MODELS = Sizes(
    elements=(1000, 10**8),
    rows=(1, 65_536),
    lengths=(8, 262_144),
    most=2**28,
    tokens=(1, 8192),
    widths=(
        *(320, 384, 512, 576, 640, 768, 896, 960, 1024, 1152, 1280, 1408, 1536, 1600, 1920, 2048, 2304, 2560, 2816),
        *(3072, 3200, 3584, 4096, 4304, 4544, 4608, 4864, 5120, 5504, 5632, 6144, 6912, 7168, 8192, 8960, 9216),
        *(9728, 10_240, 11_008, 12_288, 13_824, 14_336),
    ),
    batches=(1, 32),
    positions=(1, 4096),
    heads=(1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 64),
    head_sizes=(64, 80, 96, 128),
    channels=(32, 64, 96, 128, 192, 256, 320, 512, 640, 960, 1024, 1280, 2048),
    sides=(4, 256),
    classes=(10, 100, 1000, 21_841, 30_522, 32_000, 50_257, 128_256, 151_936),
)
# For the interpreter, which needs milliseconds for every program.
TINY = Sizes(
    elements=(10, 600),
    rows=(1, 6),
    lengths=(2, 48),
    most=256,
    tokens=(1, 9),
    widths=(8, 16, 24),
    batches=(1, 2),
    positions=(2, 9),
    heads=(1, 2),
    head_sizes=(8, 16),
    channels=(4, 8),
    sides=(2, 5),
    classes=(5, 12),
)


class Source(Random):
    """Random numbers seeded by a text, and the ranges of sizes."""

    def __init__(self, text: str, sizes: Sizes = TINY if tritonite.backend.interpreted else OF_MODELS) -> None:
        super().__init__(text)
        self.sizes = sizes


@dataclass(frozen=True)
class Call:
    """A drawn call: `op` is the name in reports; the other fields are as in Case.

    With a `pair`, `overload` is the pair's name.
    """

    op: str
    overload: str
    operands: Callable[[Make], Sequence[torch.Tensor] | Sample]
    given: dict[str, Any] = field(default_factory=dict)
    flops: int | None = None
    pair: Pair | None = None


Draw = Callable[[Source], Call]
FAMILIES: dict[str, Draw] = {}


def family(name: str) -> Callable[[Draw], Draw]:
    """Register a function that draws the calls of a family."""

    def register(draw: Draw) -> Draw:
        FAMILIES[name] = draw
        return draw

    return register


def log_uniform(random: Source, bounds: tuple[int, int]) -> int:
    """Draw a size between two bounds, both included, uniform in its logarithm."""
    low, high = bounds
    return min(high, max(low, round(math.exp(random.uniform(math.log(low), math.log(high))))))


def named(random: Source, names: Sequence[str]) -> str:
    """Draw one of the names by rendezvous hashing, so that adding a name changes few draws."""
    draw = random.random()
    return max(names, key=lambda name: hashlib.blake2b(f"{draw} {name}".encode()).digest())


def split(random: Source, total: int, count: int) -> list[int]:
    """Draw `count` sizes whose product is about `total` and not larger."""
    sizes = []
    for left in range(count, 1, -1):
        size = min(total, max(1, round(total ** (random.uniform(0.4, 1.6) / left))))
        sizes.append(size)
        total //= size
    random.shuffle(sizes)
    return [*sizes, total][:count]


def width(random: Source) -> int:
    """Draw the width of a model's layer; once in eight times 1 to 7 less, so that alignment differs."""
    usual = random.choice(random.sizes.widths)
    return usual - random.randrange(1, 8) if random.random() < 0.125 else usual


def tokens(random: Source) -> int:
    """Draw a number of tokens; half of the time a multiple of a power of two."""
    count = log_uniform(random, random.sizes.tokens)
    unit = 2 ** (max(1, count.bit_length() - random.randrange(1, 4)) - 1)
    return count // unit * unit if random.random() < 0.5 else count


def permuted(shape: Sequence[int], order: Sequence[int]) -> Callable[[Make], torch.Tensor]:
    """Return what makes a tensor of `shape` whose dimensions are laid out in memory in this order, slowest first."""
    base, inverse = [shape[i] for i in order], [list(order).index(i) for i in range(len(order))]
    return lambda make: make(*base).permute(inverse)


def sliced(shape: Sequence[int], begin: int, end: int, step: int = 1) -> Callable[[Make], torch.Tensor]:
    """Return what makes a slice of a wider tensor: `begin` and `end` elements lie before and after it in a row."""
    length = shape[-1] * step
    return lambda make: make(*shape[:-1], begin + length + end)[..., begin : begin + length : step]


def laid(random: Source, shape: Sequence[int], plain: float = 0.6) -> Callable[[Make], torch.Tensor]:
    """Draw a layout: contiguous with probability `plain`, else permuted or a slice of a wider tensor."""
    order = list(range(len(shape)))
    if len(shape) == 0 or random.random() < plain:
        return permuted(shape, order)
    kind = random.choice(("transposed", "permuted", "chunk", "sliced", "strided"))
    if kind == "transposed" and len(shape) > 1:
        return permuted(shape, [*order[:-2], order[-1], order[-2]])
    if kind == "permuted" and len(shape) > 1:
        random.shuffle(order)
        return permuted(shape, order)
    if kind == "chunk":
        # One of three chunks, as query, key and value of a joint projection.
        before = random.randrange(3)
        return sliced(shape, before * shape[-1], (2 - before) * shape[-1])
    return sliced(shape, 0, 0, 2) if kind == "strided" else sliced(shape, random.randrange(4), random.randrange(4))


def rows(random: Source, reduced: int | None = None) -> tuple[Shape, list[int]]:
    """Draw a shape of one to four dimensions and the dimensions to reduce, `reduced` of them if given."""
    sizes = random.sizes
    length = log_uniform(random, sizes.lengths)
    count = log_uniform(random, (sizes.rows[0], max(1, min(sizes.rows[1], sizes.most // length))))
    inner = reduced or random.choice((1, 1, 2, 3))
    outer = random.randrange(0 if reduced is None else 1, 5 - inner)
    shape: list[int | None] = [None] * (inner + outer)
    dims = sorted(random.sample(range(len(shape)), inner))
    own, others = iter(split(random, length, inner)), iter(split(random, count, outer))
    return tuple(next(own) if i in dims else next(others) for i in range(len(shape))), dims


def exactly(arguments: Callable[[Make], Sequence[Any]], **keywords: Any) -> Callable[[Make], Sample]:
    """Return what makes a whole call: positional arguments from `arguments`, and keywords."""
    return lambda make: Sample("", tuple(arguments(make)), keywords)
