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
    gram: a symmetric tile has the products of columns, which count as orthogonal if their cosine times the norm of the
        smaller one is within the tolerance. The norm of the matrix of these columns is about 1.
    """

    tile: Any
    vectors: bool
    tolerance: float
    most_sweeps: int = 60
    gram: bool = False

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
    """Return (tangent, sine, cosine - 1) of the smaller angle that clears the product of a pair (Rutishauser, 1966).

    `own` and `other` are the diagonal elements of the pair, and `first` marks one of its sides. A cosine itself would
    be rounded to 1 for small angles, and the norms of columns would grow with the number of rotations.
    """
    clear = product == 0
    tau = true_divide(other - own, tl.where(clear, 1.0, 2 * product))
    size = tl.minimum(tl.abs(tau), 1e18)
    one = tl.full(size.shape, 1, size.dtype)
    tangent = true_divide(one, size + square_root(1 + size * size))
    tangent = tl.where((tau > 0) | ((tau == 0) & first), tangent, -tangent)
    tangent = tl.where(clear, 0.0, tangent)
    secant = square_root(1 + tangent * tangent)
    sine = true_divide(tangent, secant)
    return tangent, sine, -true_divide(sine * tangent, 1 + secant)


@triton.jit
def ordered(tangent, sine, cosm1, product, own, other, first, moves, tolerance: tl.constexpr):
    """Return (addend's factor of own column, that of the other, own diagonal element, change) of rotations of a pair.

    A column changes by the sum of own and other column times these factors. `cosm1` is the cosine minus 1. Where
    `moves`, the two columns change places if the second one would have the larger diagonal element, because
    Jacobi's methods converge faster if equal elements are neighbours (van Kempen, 1966). The sum is then added to the
    other column. Elements that differ by roundoff stay. A sweep with a `change` is not the last one, because some did
    not meet in it.
    """
    shift = tangent * product
    kept, given = own - shift, other + shift
    margin = 16 * tolerance * (tl.abs(kept) + tl.abs(given))
    change = moves & (tl.where(first, given - kept, kept - given) > margin)
    return tl.where(change, sine, cosm1), tl.where(change, cosm1, -sine), tl.where(change, given, kept), change


@triton.jit
def rotated_columns(tile, met, own, other, change):
    """Return the columns of a tile after rotations by factors of `ordered`, of shape (matrices, columns)."""
    others = tl.gather(tile, tl.broadcast_to(met[:, None, :], tile.shape), 2)
    return rotated(tile, others, own[:, None, :], other[:, None, :], change[:, None, :])


@triton.jit
def rotated_rows(tile, met, own, other, change):
    """Return the rows of a tile after rotations by factors of `ordered`, of shape (matrices, rows)."""
    others = tl.gather(tile, tl.broadcast_to(met[:, :, None], tile.shape), 1)
    return rotated(tile, others, own[:, :, None], other[:, :, None], change[:, :, None])


@triton.jit
def rotated(tile, others, own, other, change):
    """Return rows or columns after rotations with `others`, whom they met, by factors of `ordered`."""
    return tl.where(change, others, tile) + (own * tile + other * others)


@triton.jit
def rotated_pairs(tile, diagonal, basis, skew, met, meets, active, n, META: tl.constexpr):
    """Return (tile, diagonal, basis, skew) of symmetric matrices after a round, in which each column has an opponent.

    The tile has zeros in its diagonal, which is a vector of its own, so that roundoff of elements off the diagonal is
    relative to them alone. `met` are the opponents, (matrices, columns), and `meets` marks the elements of pairs.
    Matrices that are not `active`, (matrices, 1), stay as they are. `skew` becomes 1 for columns that a rotation
    changes, whose products exceed the tolerance.
    """
    facts: tl.constexpr = META
    line = tl.arange(0, tile.shape[2])[None, :]
    row, column = tl.arange(0, tile.shape[1])[None, :, None], tl.arange(0, tile.shape[2])[None, None, :]
    product = tl.sum(tl.where(meets, tile, 0.0), 1)
    product = tl.where(active, 0.5 * (product + tl.gather(product, met, 1)), 0.0)
    other = tl.gather(diagonal, met, 1)
    moves = active & (tl.maximum(line, met) < n)
    if facts.gram:
        squared: tl.constexpr = facts.tolerance * facts.tolerance
        larger = tl.maximum(diagonal, other)
        # The square of a norm that is roundoff may come out negative.
        skewed = product * product > squared * tl.maximum(larger, squared)
        # The order of columns that are roundoff does not settle.
        moves &= larger > 4096 * squared
    else:
        skewed = tl.abs(product) > facts.tolerance
    tangent, sine, cosm1 = rotation(product, diagonal, other, line < met)
    stay, cross, diagonal, change = ordered(
        tangent, sine, cosm1, product, diagonal, other, line < met, moves, facts.tolerance
    )
    skew = tl.maximum(skew, (skewed | change).to(tl.int32))
    tile = rotated_rows(rotated_columns(tile, met, stay, cross, change), met, stay, cross, change)
    tile = tl.where(meets | (row == column), 0.0, tile)
    if facts.vectors:
        basis = rotated_columns(basis, met, stay, cross, change)
    return tile, diagonal, basis, skew


@triton.jit
def power_of_2_below(x):
    """Return the largest power of two that is not above positive normal numbers, or the least normal number for 0."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FF0000000000000
        power = tl.maximum(bits, 0x0010000000000000).to(tl.float64, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7F800000
        power = tl.maximum(bits, 0x00800000).to(tl.float32, bitcast=True)
    return power


@triton.jit
def normalized(tile):
    """Return (tile, scale, finite): matrices whose largest element is in [1, 2), and powers of two that scaled them.

    A matrix with an infinite or nan element is not `finite`, and is returned as zeros.
    """
    finite = tl.sum(tl.sum((tile - tile != 0).to(tl.int32), 2), 1) == 0
    tile = tl.where(finite[:, None, None], tile, 0.0)
    largest = tl.max(tl.max(tl.abs(tile), 2), 1)
    scale = power_of_2_below(largest)
    return true_divide(tile, scale[:, None, None]), scale, finite


@triton.jit
def positions(key):
    """Return the position of each number of a vector in ascending order, the first of equals first."""
    line = tl.arange(0, key.shape[1])
    others, own = key[:, :, None], key[:, None, :]
    before = (others < own) | ((others == own) & (line[None, :, None] < line[None, None, :]))
    return tl.sum(before.to(tl.int32), 1)
