"""From a collapsed iteration space to the kernel that serves it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import INT32_LIMIT, power_of_2, span
from tritonite.engine.pointwise.blocks import block_size, choose_tile, inverse, is_contiguous_along
from tritonite.engine.pointwise.kernels import elementwise_flat, elementwise_tile
from tritonite.engine.pointwise.layout import VARIANTS, Layout, Operand
from tritonite.engine.pointwise.promotion import KernelTypes
from tritonite.runtime.launch import ASSERTING, Specialization
from tritonite.runtime.nested import flatten


class IterationSpace(NamedTuple):
    """A collapsed iteration space and its operands' strides, fastest dimension first; () for a number.

    `indices` are the strides of coordinates, which are not in memory.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    out_strides: tuple[tuple[int, ...], ...]
    indices: tuple[tuple[int, ...], ...] = ()

    def every(self) -> list[tuple[int, ...]]:
        """Return the strides of all outputs and operands in memory."""
        return [own for own in (*self.out_strides, *self.strides) if own]

    def reorder(self, order: Sequence[int]) -> IterationSpace:
        def pick(own: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(own[d] for d in order) if own else own

        strides, out_strides, indices = (tuple(map(pick, own)) for own in self[1:])
        return IterationSpace(pick(self.sizes), strides, out_strides, indices)

    def with_tile_second(self) -> IterationSpace:
        """Return the space with a dimension that some operand is contiguous along moved to dimension 1.

        The space is returned as it is if no operand is contiguous along a dimension after 1.
        """
        for d in range(2, len(self.sizes)):
            if self.sizes[0] >= 16 and any(is_contiguous_along(own, d) for own in self.every()):
                return self.reorder([0, d, *(e for e in range(1, len(self.sizes)) if e != d)])
        return self


def specialize(
    types: KernelTypes,
    space: IterationSpace,
    aligned: tuple[Sequence[bool], Sequence[bool]],
    units: tuple[tuple[int, tuple[bool, ...]], ...] = (),
    far: bool = False,
) -> Specialization:
    """Return the specialized kernel and grid for an iteration space.

    `aligned` says for each operand, then for each output, whether its address is a multiple of 16 bytes. `units` say
    for each gathered parameter which strides of its gathered dimensions are 1. `far` says that offsets along these take
    64 bits.
    """
    device = devices.current
    space = space.with_tile_second()
    sizes, strides, out_strides = space.sizes, space.strides, space.out_strides
    n = math.prod(sizes)
    every = space.every()
    wide = far or n >= INT32_LIMIT or any([span(sizes, own) >= INT32_LIMIT for own in every])
    tile = choose_tile(sizes, every, types.itemsize)
    sized: tuple[Any, ...]
    if tile is None:
        # Scalar loads: as many elements for 16-bit floats as for 32 bits, since more would only take registers.
        scalar_loads = len(sizes) > 1 or any([own[0] > 1 for own in every])
        block = block_size(n, device.flat_bytes // max(types.itemsize, 4 if scalar_loads else 2))
        block = min(block, power_of_2(n)) if device.interpreted else block
        vectorised = block > devices.warp_size() * device.num_warps
        mask = 0 if n % block == 0 else 1 if n % 16 == 0 or n < block * 4 or not vectorised else 2
        blocks = (("MASK", mask), ("BLOCK", block))
        inverses = tuple([inverse(size) for size in sizes[:-1]]) if n < INT32_LIMIT else ()
        masks, grid, sized = (True, False), -(-n // block), (sizes, inverses, n)
    else:
        rows, columns = tile.rows, tile.columns
        blocks = (("ROWS", rows), ("COLUMNS", columns))
        n_rows = n // sizes[0] if tile.linear else sizes[1]
        masks = (sizes[0] % columns != 0, n_rows % rows != 0)
        tiles: tuple[int, ...] = (-(-sizes[0] // columns), -(-n_rows // rows))
        divisors: tuple[int, ...] = (tiles[0], *sizes[1:-1])
        if not tile.linear:
            tiles = (*tiles, *sizes[2:])
            divisors = tiles[:-1]
        inverses, grid = tuple(map(inverse, divisors)), math.prod(tiles)
        sized = (sizes, inverses, (*tiles, n_rows) if tile.linear else tiles)
    # Only divisibility by 16 that permits vector accesses is told to the compiler, so that few kernels serve all
    # shapes.
    paths: list[tuple[int, ...]] = [
        (1 + which, i) for which in (0, 1) for i, holds in enumerate(aligned[which]) if holds
    ]
    if tile is None:
        paths += [(7,)] if n % 16 == 0 else []
    else:
        paths += [(5, 0)] if sizes[0] % 16 == 0 else []
        for which, owners in ((3, strides), (4, out_strides)):
            for i, own in enumerate(owners):
                if all(stride % 16 == 0 for stride in own if stride > 1):
                    paths += [(which, i, d) for d, stride in enumerate(own) if stride > 1]
    at_16_bytes = [
        holds
        for owners, all_aligned in zip((strides, out_strides), aligned, strict=True)
        for own, holds in zip(owners, all_aligned, strict=True)
        if own and own[0] == 1
    ]
    # A thread gets 16 bytes of the narrowest tensor. If a wider tensor takes scalar loads, neighbouring threads would
    # then read different cache lines.
    coalesced = len(sizes) == 1 and types.narrowest < types.itemsize and not all(at_16_bytes)
    strides += space.indices
    kinds, out_kinds = tuple([_kinds_of(own) for own in strides]), tuple([_kinds_of(own) for own in out_strides])
    linear = tile is not None and tile.linear
    variant = _variant(
        types, kinds, out_kinds, wide, len(inverses), blocks, masks, coalesced, tuple(paths), units, linear
    )
    return variant.over((strides, out_strides, *sized), grid)


@functools.lru_cache(maxsize=VARIANTS)
def _variant(
    types: KernelTypes,
    kinds: tuple[tuple[int, ...], ...],
    out_kinds: tuple[tuple[int, ...], ...],
    wide: bool,
    inverses: int,
    blocks: tuple[tuple[str, int], ...],
    masks: tuple[bool, bool],
    coalesced: bool,
    divisible: tuple[tuple[int, ...], ...],
    units: tuple[tuple[int, tuple[bool, ...]], ...],
    linear: bool,
) -> Specialization:
    """Return the kernel for every iteration space of a kind, whatever its sizes and run-time strides."""
    device = devices.current
    integer, index = ("i64", tl.int64) if wide else ("i32", tl.int32)
    flat = blocks[0][0] == "MASK"
    dims = (integer,) * len(out_kinds[0])
    signature: dict[str, Any] = {
        "fn": "constexpr",
        "operands": types.pointers[0],
        "outs": types.pointers[1],
        "strides": tuple(dims if own else () for own in kinds),
        "out_strides": tuple(dims for _ in out_kinds),
        "shape": dims,
        "inverses": (("i32", "i32"),) * inverses,
    }
    if flat:
        signature["n"] = integer
    else:
        signature["tiles"] = ("i32",) * (3 if linear else len(dims))
    layout = Layout(
        parameters=tuple(_with_kinds(own, i, kinds, dict(units)) for i, own in enumerate(types.parameters)),
        results=tuple(own._replace(kinds=out_kinds[own.position]) for own in types.results),
        column_mask=masks[0],
        row_mask=masks[1],
        flat=flat,
        linear=linear,
        coalesced=coalesced,
    )
    constants: dict[str, Any] = {"LAYOUT": layout, "INDEX": index, **dict(blocks)}
    signature |= dict.fromkeys(constants, "constexpr")
    names = list(signature)
    elements = blocks[1][1] * (1 if flat else blocks[0][1])
    return Specialization(
        kernel=elementwise_flat if flat else elementwise_tile,
        signature=signature,
        constants={(0,): types.formula} | {(names.index(name),): value for name, value in constants.items()},
        attributes={path: [["tt.divisibility", 16]] for path in divisible},
        leading=(types.formula,),
        trailing=tuple(constants.values()),
        options={"num_warps": device.num_warps * (2 if elements >= 4096 else 1), **device.options}
        | (ASSERTING if types.asserting else {}),
        types=tuple(flatten(tuple(signature.values()), tuple(signature.values()))),
    )


def _kinds_of(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple([stride if stride in (0, 1) else 2 for stride in strides])


def _with_kinds(
    own: Operand, parameter: int, kinds: tuple[tuple[int, ...], ...], units: dict[int, tuple[bool, ...]]
) -> Operand:
    """Return a parameter of the formula with the stride kinds of an iteration space."""
    if own.role == "index":
        return own._replace(component_kinds=tuple([kinds[component] for component in own.components]))
    if own.role == "pointer":
        own = own._replace(component_kinds=tuple([int(unit) for unit in units[parameter]]))
    return own if own.kinds is None else own._replace(kinds=kinds[own.position])
