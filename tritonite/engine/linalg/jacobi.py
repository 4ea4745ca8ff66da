"""Device functions of Jacobi's methods: pairs of columns that are rotated at once, rotations, scales, positions.

A sweep is a tournament in which all columns meet in pairs, by the circle method (Brent and Luk, 1985): in each round
every column has one opponent. So a round is a gather of whole columns and a rotation of all elements. Each column
computes the rotation of its pair from its own side, and both sides find the same angle with opposite signs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite.language.math import square_root, true_divide


@dataclass(frozen=True)
class JacobiMeta:
    """Compile-time facts of kernels that rotate columns.

    tile: the matrices, rows and columns of a program, a `TileMeta`.
    vectors: vectors are computed, and not only values.
    tolerance: the largest cosine, relative to the norm, that no longer needs a sweep.
    most_sweeps: sweeps after which a matrix counts as one for which the method fails.
    """

    tile: Any
    vectors: bool
    tolerance: float
    most_sweeps: int = 60

    @classmethod
    def of(cls, tile: Any, vectors: bool, dtype: torch.dtype) -> JacobiMeta:
        """Return the facts for matrices of a dtype."""
        return cls(tile, vectors, 2 * torch.finfo(dtype).eps)


@triton.jit
def opponent(player, step, players):
    """Return whom each player meets in a round, of `players - 1` rounds. The number of players is even.

    Lanes beyond the players meet themselves.
    """
    last = players - 1
    met = (step + last - player) % last
    met = tl.where(met == player, last, met)
    met = tl.where(player == last, step * (players // 2) % last, met)
    return tl.where(player < players, met, player)


@triton.jit
def rotation(product, own, other, first):
    """Return (tangent, cosine) of the smaller angle that clears the product of a pair (Rutishauser, 1966).

    `own` and `other` are the diagonal elements of the pair, and `first` marks one of its sides.
    """
    clear = product == 0
    tau = true_divide(other - own, tl.where(clear, 1.0, 2 * product))
    size = tl.minimum(tl.abs(tau), 1e18)
    tangent = true_divide(tl.full(size.shape, 1, size.dtype), size + square_root(1 + size * size))
    tangent = tl.where((tau > 0) | ((tau == 0) & first), tangent, -tangent)
    tangent = tl.where(clear, 0.0, tangent)
    cosine = true_divide(tl.full(size.shape, 1, size.dtype), square_root(1 + tangent * tangent))
    return tangent, cosine


@triton.jit
def ordered(tangent, cosine, product, own, other, first, moves, tolerance: tl.constexpr):
    """Return (factor of own column, factor of the other, own diagonal element, change) of rotations of a pair.

    Where `moves`, the two columns change places if the second one would have the larger diagonal element, because
    Jacobi's methods converge faster if equal elements are neighbours (van Kempen, 1966).
    Elements that differ by roundoff stay. A sweep with a `change` is not the last one, because some did not meet in it.
    """
    shift = tangent * product
    sine = tangent * cosine
    kept, given = own - shift, other + shift
    margin = 16 * tolerance * (tl.abs(kept) + tl.abs(given))
    change = moves & (tl.where(first, given - kept, kept - given) > margin)
    return tl.where(change, sine, cosine), tl.where(change, cosine, -sine), tl.where(change, given, kept), change


@triton.jit
def rotated_columns(tile, met, own, other):
    """Return sums of the columns of a tile and of those they meet, by factors of shape (matrices, columns)."""
    others = tl.gather(tile, tl.broadcast_to(met[:, None, :], tile.shape), 2)
    return own[:, None, :] * tile + other[:, None, :] * others


@triton.jit
def rotated_rows(tile, met, own, other):
    """Return sums of the rows of a tile and of those they meet, by factors of shape (matrices, rows)."""
    others = tl.gather(tile, tl.broadcast_to(met[:, :, None], tile.shape), 1)
    return own[:, :, None] * tile + other[:, :, None] * others


@triton.jit
def normalized(tile):
    """Return (tile, scale, finite): matrices whose largest element is in [1, 2), and powers of two that scaled them.

    A matrix with an infinite or nan element is not `finite`, and is returned as zeros.
    """
    finite = tl.sum(tl.sum((tile - tile != 0).to(tl.int32), 2), 1) == 0
    tile = tl.where(finite[:, None, None], tile, 0.0)
    largest = tl.max(tl.max(tl.abs(tile), 2), 1)
    if tile.dtype == tl.float64:
        bits = largest.to(tl.int64, bitcast=True) & 0x7FF0000000000000
        scale = tl.maximum(bits, 0x0010000000000000).to(tl.float64, bitcast=True)
    else:
        bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
        scale = tl.maximum(bits, 0x00800000).to(tl.float32, bitcast=True)
    return true_divide(tile, scale[:, None, None]), scale, finite


@triton.jit
def positions(key):
    """Return the position of each number of a vector in ascending order, the first of equals first."""
    line = tl.arange(0, key.shape[1])
    others, own = key[:, :, None], key[:, None, :]
    before = (others < own) | ((others == own) & (line[None, :, None] < line[None, None, :]))
    return tl.sum(before.to(tl.int32), 1)
