"""Products of matrices in batches: two kernels, what they do with a product before they write it, and their choice.

A program multiplies tiles of rows and columns. Where the device copies tiles by itself (tensor descriptors), programs
stay and take tile after tile; for every other layout they load through pointers. Few tiles of a long inner dimension
are split along it, and a second launch adds the parts, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite import devices, tune
from tritonite.engine.pointwise import INT32_LIMIT, TRITON_DTYPES, power_of_2, span
from tritonite.engine.reduction import empty
from tritonite.launch import libentry
from tritonite.tune import Config, Problem

_ROWS, _COLUMNS = 1, 2
# Tensor cores multiply as many rows; fewer are added up one by one.
LEAST = tl.constexpr(16)


@triton.jit
def place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of a tile, in an order in which what GROUP_M rows of tiles read stays in a cache."""
    group = tile // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    rest = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + rest % height, rest // height


@triton.jit
def _varying(pointer, strides, rows, columns, row_mask, column_mask, KIND: tl.constexpr):
    """What varies along the rows (KIND 1), the columns (2), both (3) or neither (0), to broadcast to a tile."""
    if KIND == 0:
        value = tl.load(pointer)
    elif KIND == 1:
        value = tl.load(pointer + rows * strides[1], mask=row_mask, other=0)[:, None]
    elif KIND == 2:
        value = tl.load(pointer + columns * strides[2], mask=column_mask, other=0)[None, :]
    else:
        pointers = pointer + (rows * strides[1])[:, None] + (columns * strides[2])[None, :]
        value = tl.load(pointers, mask=row_mask[:, None] & column_mask[None, :], other=0)
    return value


@triton.jit
def finish(product, tile, ending, SCALED: tl.constexpr, KINDS: tl.constexpr, ACTIVATION: tl.constexpr):
    """ACTIVATION(alpha * product * scales + beta * addend), in the dtype of the product, as alpha and beta are.

    A `tile` is its batch, rows and columns, and which of them there are. `ending` is (addend, scales, strides, alpha,
    beta), where strides are (batch, row, column) of the scales and then of the addend, and KINDS what they vary along.
    Unless SCALED, alpha is 1.
    """
    batch, rows, columns, row_mask, column_mask = tile
    addend, scales, strides, alpha, beta = ending
    COUNT: tl.constexpr = len(scales)
    for i in tl.static_range(COUNT):
        pointer = scales[i] + batch * strides[i][0]
        product *= _varying(pointer, strides[i], rows, columns, row_mask, column_mask, KINDS[i])
    if SCALED:
        product *= alpha
    if addend is not None:
        pointer = addend + batch * strides[COUNT][0]
        added = _varying(pointer, strides[COUNT], rows, columns, row_mask, column_mask, KINDS[COUNT])
        product += beta * added.to(product.dtype)
    if ACTIVATION is not None:
        product = ACTIVATION(product)
    return product


@triton.jit
def _finish(product, tile, ending, SCALED: tl.constexpr, KINDS: tl.constexpr, ACTIVATION: tl.constexpr):
    """The same of numbers as the host gives them, in float64."""
    addend, scales, strides, alpha, beta = ending
    alpha, beta = tl.full((), alpha, product.dtype), tl.full((), beta, product.dtype)
    return finish(product, tile, (addend, scales, strides, alpha, beta), SCALED, KINDS, ACTIVATION)


@triton.jit
def _store(total, out, strides, tile):
    """Write a tile, as `finish` has it; `strides` are the result's (batch, row, column)."""
    batch, rows, columns, row_mask, column_mask = tile
    pointers = out + batch * strides[0] + (rows * strides[1])[:, None] + (columns * strides[2])[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _add_rows(sums, a, stride, first, M, mask, y, EVEN_K: tl.constexpr):
    """The sums of as many rows of `a` from the `first` on, `stride` apart, with their products with a block of b."""
    more = ()
    for i in tl.static_range(len(sums)):
        here = first + i < M
        x = tl.load(a + (first + i) * stride, mask=here if EVEN_K else here & mask, other=0.0)
        more = more + (sums[i] + x[:, None].to(y.dtype) * y,)  # type: ignore[assignment]
    return more


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "steps"])
def multiply(
    a,
    b,
    out,
    ends,
    addend,
    scales,
    strides,
    finish_strides,
    batches,
    M,
    N,
    K,
    steps,
    summed,
    alpha: tl.float64,
    beta: tl.float64,
    SCALED: tl.constexpr,
    KINDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INDEX: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """A program multiplies a tile of a batch over `steps` blocks of K, which with SPLIT is a part of all.

    `strides` are a's (batch, row, inner), b's (batch, inner, column) and the result's (batch, row, column); of a sum of
    products, the batch's are those of its terms. With `ends`, which tell where it ends, each batch has a part of K.
    Tiles of less than LEAST rows add them up along K one by one, without tensor cores.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)
    row, column = place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    rows = row.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column.to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = rows < M, columns < N
    begin = tl.program_id(1).to(INDEX) * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, K)
    if ends is not None:
        begin = tl.load(ends + batch - 1, mask=batch > 0, other=0).to(INDEX)
        end = tl.load(ends + batch).to(INDEX)
    total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    sums = ()
    for _ in tl.static_range(BLOCK_M if BLOCK_M < LEAST else 0):
        sums = sums + (tl.zeros((BLOCK_K, BLOCK_N), ACCUMULATOR),)  # type: ignore[assignment]
    for term in range(summed):
        a_batch = a + (batch + term) * strides[0][0]
        b_columns = b + (batch + term) * strides[1][0] + (columns * strides[1][2])[None, :]
        for k in range(begin, end, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K)
            a_mask, b_mask = row_mask[:, None], column_mask[None, :]
            if not EVEN_K:
                a_mask &= (inner < end)[None, :]
                b_mask &= (inner < end)[:, None]
            y = tl.load(b_columns + (inner * strides[1][1])[:, None], mask=b_mask, other=0.0)
            a_inner = a_batch + inner * strides[0][2]
            if BLOCK_M < LEAST:
                first = row.to(INDEX) * BLOCK_M
                sums = _add_rows(sums, a_inner, strides[0][1], first, M, inner < end, y.to(ACCUMULATOR), EVEN_K)
            else:
                x = tl.load(a_inner[None, :] + (rows * strides[0][1])[:, None], mask=a_mask, other=0.0)
                total = tl.dot(x, y, total, PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACCUMULATOR)
    if BLOCK_M < LEAST:
        for i in tl.static_range(BLOCK_M):
            own = (tl.arange(0, BLOCK_M) == i)[:, None]
            total = tl.where(own, tl.sum(sums[i], axis=0)[None, :], total)
    if SPLIT:
        batch += tl.program_id(1).to(INDEX) * batches
    tile = (batch, rows, columns, row_mask, column_mask)
    if not SPLIT:
        total = _finish(total, tile, (addend, scales, finish_strides, alpha, beta), SCALED, KINDS, ACTIVATION)
    _store(total, out, strides[2], tile)


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "splits"])
def add_parts(
    parts,
    out,
    addend,
    scales,
    strides,
    finish_strides,
    batches,
    M,
    N,
    splits,
    alpha: tl.float64,
    beta: tl.float64,
    SCALED: tl.constexpr,
    KINDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The result from the `splits` parts of every product, which lie one after the other."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)
    row, column = place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, 1)
    rows = row.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column.to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = rows < M, columns < N
    mask = row_mask[:, None] & column_mask[None, :]
    pointers = parts + (batch * M + rows)[:, None] * N + columns[None, :]
    apart = batches.to(INDEX) * M * N
    total = tl.load(pointers, mask=mask, other=0)
    for split in range(1, splits):
        total += tl.load(pointers + split * apart, mask=mask, other=0)
    tile = (batch, rows, columns, row_mask, column_mask)
    total = _finish(total, tile, (addend, scales, finish_strides, alpha, beta), SCALED, KINDS, ACTIVATION)
    _store(total, out, strides, tile)


@triton.jit
def _copy_tile(descriptor, batch, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        tile = descriptor.load([batch, column, row]).reshape(COLUMNS, ROWS).T
    else:
        tile = descriptor.load([batch, row, column]).reshape(ROWS, COLUMNS)
    return tile


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "K", "steps", "splits", "programs"])
def multiply_tiles(
    a,
    b,
    out,
    out_strides,
    addend,
    scales,
    finish_strides,
    batches,
    M,
    N,
    K,
    steps,
    splits,
    programs,
    alpha: tl.float64,
    beta: tl.float64,
    SCALED: tl.constexpr,
    KINDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    RESULT: tl.constexpr,
    INDEX: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    SPLIT: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Each of `programs` multiplies every so many-th tile; operands are tensor descriptors of 3 dimensions.

    As in Triton's tutorial on persistent matrix multiplication. So is the result, unless it has `out_strides`. With
    SPLIT each of `splits` parts of K, of `steps` blocks, is a result. With HALVES a tile is written in two, by way of
    half the shared memory.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), splits * batches * tiles_m * tiles_n, programs, flatten=True):
        written = tile // (tiles_m * tiles_n)
        batch, first, last = written % batches, 0, tl.cdiv(K, BLOCK_K)
        if SPLIT:
            first = written // batches * steps
            last = tl.minimum(first + steps, last)
        row, column = place(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row, column = row * BLOCK_M, column * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
        for step in range(first, last):
            x = _copy_tile(a, batch, row, step * BLOCK_K, BLOCK_M, BLOCK_K, A_TRANSPOSED)
            y = _copy_tile(b, batch, step * BLOCK_K, column, BLOCK_K, BLOCK_N, B_TRANSPOSED)
            total = tl.dot(x, y, total, PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACCUMULATOR)
        parts = (total,)
        if HALVES:
            parts = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        WIDTH: tl.constexpr = BLOCK_N // len(parts)
        rows = row.to(INDEX) + tl.arange(0, BLOCK_M)
        for i in tl.static_range(len(parts)):
            columns = column.to(INDEX) + i * WIDTH + tl.arange(0, WIDTH)
            result = parts[i]
            if not SPLIT:
                own = (batch.to(INDEX), rows, columns, rows < M, columns < N)
                result = _finish(result, own, (addend, scales, finish_strides, alpha, beta), SCALED, KINDS, ACTIVATION)
            if len(out_strides) > 0:
                _store(result, out, out_strides, (written.to(INDEX), rows, columns, rows < M, columns < N))
            else:
                out.store([written, row, column + i * WIDTH], result.to(RESULT).reshape(1, BLOCK_M, WIDTH))


@triton.jit
def _tiles_of_groups(ends, GROUPS: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr, MULTIPLE: tl.constexpr):
    """For each group the first row and the end, and its first tile and the count; tiles start at a MULTIPLE."""
    lane = tl.arange(0, LANES)
    end = tl.load(ends + lane, mask=lane < GROUPS, other=0)
    begin = tl.load(ends + lane - 1, mask=(lane > 0) & (lane < GROUPS), other=0)
    tiles = tl.where(begin < end, tl.cdiv(end - begin // MULTIPLE * MULTIPLE, BLOCK_M), 0)
    return begin, end, tl.cumsum(tiles, axis=0) - tiles, tiles


@libentry()
@triton.jit(do_not_specialize=["programs"])
def multiply_groups(
    a,
    b,
    out,
    ends,
    out_strides,
    N,
    K,
    programs,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INDEX: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    MULTIPLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """As `multiply_tiles`, where the rows of `a` are in groups, which have a matrix of `b` each and end at `ends`."""
    begin, end, first, tiles = _tiles_of_groups(ends, GROUPS, LANES, BLOCK_M, MULTIPLE)
    tiles_m, tiles_n = tl.sum(tiles, axis=0), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=True):
        row, column = place(tile, tiles_m, tiles_n, GROUP_M)
        own = (first <= row) & (row < first + tiles)
        group = tl.sum(tl.where(own, tl.arange(0, LANES), 0), axis=0)
        group_begin, group_end = tl.sum(tl.where(own, begin, 0), axis=0), tl.sum(tl.where(own, end, 0), axis=0)
        row -= tl.sum(tl.where(own, first, 0), axis=0)
        row, column = group_begin // MULTIPLE * MULTIPLE + row * BLOCK_M, column * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
        for step in range(tl.cdiv(K, BLOCK_K)):
            x = _copy_tile(a, 0, row, step * BLOCK_K, BLOCK_M, BLOCK_K, A_TRANSPOSED)
            y = _copy_tile(b, group, step * BLOCK_K, column, BLOCK_K, BLOCK_N, B_TRANSPOSED)
            total = tl.dot(x, y, total, PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACCUMULATOR)
        rows = row.to(INDEX) + tl.arange(0, BLOCK_M)
        columns = column.to(INDEX) + tl.arange(0, BLOCK_N)
        row_mask = (group_begin <= rows) & (rows < group_end)
        _store(total, out, out_strides, (0, rows, columns, row_mask, columns < N))


class _Finish(NamedTuple):
    """What becomes of a product: the arguments of `finish`, the tensors expanded to the result's shape."""

    addend: torch.Tensor | None
    scales: tuple[torch.Tensor, ...]
    alpha: float
    beta: float
    activation: Any

    def transposed(self) -> _Finish:
        addend = None if self.addend is None else self.addend.mT
        return self._replace(addend=addend, scales=tuple([scale.mT for scale in self.scales]))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.scales if self.addend is None else (*self.scales, self.addend)

    @property
    def bytes(self) -> int:
        """Of what is read beside every element of a product."""
        return sum(tensor.dtype.itemsize for tensor in self.tensors if 0 not in tensor.stride()[1:])

    @property
    def arguments(self) -> dict[str, Any]:
        strides = tuple([tensor.stride() for tensor in self.tensors])
        kinds = tuple([_ROWS * (row != 0) + _COLUMNS * (column != 0) for _, row, column in strides])
        return {
            "addend": self.addend,
            "scales": self.scales,
            "finish_strides": strides,
            "alpha": self.alpha,
            "beta": self.beta,
            "SCALED": self.alpha != 1,
            "KINDS": kinds,
            "ACTIVATION": self.activation,
        }


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    alpha: float = 1.0,
    addend: torch.Tensor | None = None,
    beta: float = 0.0,
    scales: Sequence[torch.Tensor] = (),
    activation: Any = None,
    precision: str = "ieee",
    blockwise: bool = False,
    summed: bool = False,
    ends: torch.Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Write activation(alpha * (a @ b) * scales + beta * addend) into `out`.

    Args:
        a: (batches, M, K), of any strides, as all.
        b: (batches, K, N), of a's dtype.
        out: (batches, M, N), or (1, M, N) where the products of all batches are `summed`.
        addend: of a shape that broadcasts to out's; it may be `out` itself.
        scales: likewise, each multiplied with the product.
        activation: a function of `triton.jit`, of a block in the dtype accumulated in.
        precision: of float32 operands: "ieee", or what of it is the fastest, or "tf32", as `tl.dot` has them.
        blockwise: whether sums over blocks of K are added in float32; tensor cores add float8 products with less.
        ends: int32, where along K the part of each of out's batches ends, for a and b of one batch.
        config: the tiles to take; by default those that tuning or a rule chooses.

    Sums are float32 for floating-point operands, float64 for float64 and int32 for int8; they are rounded once.
    """
    if not out.numel():
        return
    shape = out.shape
    added = None if addend is None else addend.expand(shape)
    ending = _Finish(added, tuple([scale.expand(shape) for scale in scales]), float(alpha), float(beta), activation)
    few = min(shape[1:]) <= tune.FEW
    if (few and shape[2] < shape[1]) or (not few and out.stride(2) != 1 == out.stride(1)):
        # Few columns of a result are few rows of its transpose, which is also what lies in rows.
        a, b, out, ending = b.mT, a.mT, out.mT, ending.transposed()
    if ends is not None:
        a, b = a.expand(out.shape[0], -1, -1), b.expand(out.shape[0], -1, -1)
    work = _Work(a, b, out, ending, a.shape[0] if summed else 1, ends, precision, blockwise)
    whole = ends is None and not summed
    if config is None:
        described = whole and all(map(_describable, (a, b, out)))
        # Of a long product, what is added to every element is there sooner where all warps wait for it.
        divided = described and activation is None and (a.shape[2] < tune.SHORT or not ending.bytes)
        config = tune.choose(work.problem, out.device, described, divided)
        config = tune.fitting(config, work.problem, out.device, ending.bytes if config.splits == 1 else 0)
    _run(work, config if whole else config._replace(splits=1, descriptors=False))


class _Work(NamedTuple):
    """A product to compute: of the (batches, M, K) and (batches, K, N), of which `terms` make a result."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    ending: _Finish
    terms: int
    ends: torch.Tensor | None
    precision: str
    blockwise: bool

    @property
    def problem(self) -> Problem:
        a, b = self.a, self.b
        batches, M, N = self.out.shape
        inner = a.stride(2) == 1, b.stride(1) == 1
        return Problem(batches, M, N, a.shape[2], a.dtype, self.out.dtype, *inner, self.blockwise)

    @property
    def accumulator(self) -> torch.dtype:
        return {torch.float64: torch.float64, torch.int8: torch.int32}.get(self.a.dtype, torch.float32)

    @property
    def index(self) -> Any:
        """The dtype of elements' offsets."""
        tensors = (self.a, self.b, self.out, *self.ending.tensors)
        wide = any(span(tensor.shape, tensor.stride()) >= INT32_LIMIT for tensor in tensors)
        return tl.int64 if wide else tl.int32

    def constants(self, config: Config) -> dict[str, Any]:
        kinds: dict[str, Any] = {"ACCUMULATOR": TRITON_DTYPES[self.accumulator], "INDEX": self.index}
        exact = self.precision == "ieee" and self.a.dtype is torch.float32
        # Henry, Tang and Heinecke 2019. Elements from 3.39e38 on are infinite in the first of the three parts.
        parts = config.parts and exact and tune.copies_tiles(self.a.device) and not devices.current.interpreted
        kinds |= {"PRECISION": "bf16x6" if parts else self.precision}
        kinds |= {"IMPRECISE": config.BLOCK_K if self.blockwise else None}
        return kinds | config.options | devices.current.options


def _run(work: _Work, config: Config) -> None:
    if config.warp_specialize and config.descriptors and work.ending.activation is None:
        _run_specialized(work, config)
        return
    a, b, out = work.a, work.b, work.out
    (batches, M, N), K, constants = out.shape, a.shape[2], work.constants(config)
    blocks = -(-K // config.BLOCK_K)
    steps = max(1, -(-blocks // config.splits))
    splits = max(1, -(-blocks // steps))
    parts = out if splits == 1 else empty((splits * batches, M, N), work.accumulator, out.device)
    ending = (work.ending if splits == 1 else _NOTHING).arguments
    tiles = work.problem.tiles(config)
    sizes = {"batches": batches, "M": M, "N": N, "K": K, "steps": steps, "SPLIT": splits > 1}
    if config.descriptors:
        programs = min(splits * tiles, config.programs * tune.multiprocessors(out.device))
        # A program's only tile is there sooner through pointers; of many, a copy leaves time for the next.
        direct = splits * tiles == programs
        width = config.BLOCK_N // (2 if config.halves else 1)
        multiply_tiles[(programs,)](
            _descriptor(a, config.BLOCK_M, config.BLOCK_K),
            _descriptor(b, config.BLOCK_K, config.BLOCK_N),
            parts if direct else _descriptor(parts, config.BLOCK_M, width),
            parts.stride() if direct else (),
            splits=splits,
            programs=programs,
            RESULT=TRITON_DTYPES[parts.dtype],
            A_TRANSPOSED=a.stride(2) != 1,
            B_TRANSPOSED=b.stride(2) != 1,
            HALVES=config.halves,
            **sizes,
            **ending,
            **constants,
        )
    else:
        multiply[(tiles, splits)](
            *(a, b, parts, work.ends),
            strides=(a.stride(), b.stride(), parts.stride()),
            summed=work.terms,
            EVEN_K=K % config.BLOCK_K == 0 and work.ends is None,
            **sizes,
            **ending,
            **constants,
        )
    if splits > 1:
        rows, columns = min(power_of_2(M), tune.PARTS[0]), tune.PARTS[1]
        add_parts[(batches * -(-M // rows) * -(-N // columns),)](
            *(parts, out),
            strides=out.stride(),
            batches=batches,
            M=M,
            N=N,
            splits=splits,
            **work.ending.arguments,
            INDEX=constants["INDEX"],
            BLOCK_M=rows,
            BLOCK_N=columns,
        )


def _run_specialized(work: _Work, config: Config) -> None:
    # It takes functions of this module, which would not be there yet.
    from tritonite.engine import hopper

    groups, (batches, M, N) = config.num_warps // 4, work.out.shape
    programs = min(work.problem.tiles(config), tune.multiprocessors(work.out.device))
    rows, whole = config.BLOCK_M // groups, work.a.stride(2) == 1 and power_of_2(config.BLOCK_M) == config.BLOCK_M
    hopper.multiply_by_groups[(programs,)](
        hopper.in_shared_memory(_descriptor(work.a, config.BLOCK_M if whole else rows, config.BLOCK_K)),
        hopper.in_shared_memory(_descriptor(work.b, config.BLOCK_K, config.BLOCK_N)),
        hopper.in_shared_memory(_descriptor(work.out, rows, config.BLOCK_N // 2)),
        *(batches, M, N, work.a.shape[2], programs),
        INDEX=work.index,
        ORDER=(work.a.stride(2) != 1, work.b.stride(2) != 1, config.GROUP_M, groups, work.blockwise),
        BUFFERS=1 if config.halves else 2,
        STAGES=config.num_stages,
        num_warps=4,
        **work.ending.arguments,
    )


def grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, precision: str) -> None:
    """Write into `out`, (M, N), the rows of `a`, (M, K), times the matrix of `b`, (groups, K, N), of their group.

    Rows up to ends[0], of int32, are the first group's; those after the last end are not written. Operands lie as
    tensor descriptors need them.
    """
    groups, K, N = b.shape
    if not (out.numel() and groups):
        return
    work = _Work(a.unsqueeze(0), b, out.unsqueeze(0), _NOTHING, 1, ends, precision, False)
    usual = work.problem._replace(batches=groups, M=-(-a.shape[0] // groups))
    config = tune.fitting(tune.choose_described(usual, out.device), usual, out.device)
    # At most: each group may have two tiles that are not full.
    tiles = (-(-a.shape[0] // config.BLOCK_M) + 2 * groups) * -(-N // config.BLOCK_N)
    programs = min(tiles, tune.multiprocessors(out.device))
    multiply_groups[(programs,)](
        _descriptor(work.a, config.BLOCK_M, config.BLOCK_K),
        _descriptor(b, config.BLOCK_K, config.BLOCK_N),
        *(out, ends),
        out_strides=work.out.stride(),
        N=N,
        K=K,
        programs=programs,
        A_TRANSPOSED=a.stride(1) != 1,
        B_TRANSPOSED=b.stride(2) != 1,
        GROUPS=groups,
        LANES=power_of_2(groups),
        # What starts a copy of contiguous elements starts at 16 bytes.
        MULTIPLE=1 if a.stride(1) == 1 else 16 // a.dtype.itemsize,
        **work.constants(config),
    )


_NOTHING = _Finish(None, (), 1.0, 0.0, None)


def _describable(tensor: torch.Tensor) -> bool:
    """Whether a tensor descriptor can tell of it: elements next to each other, all else 16 bytes apart."""
    inner = 2 if tensor.stride(2) == 1 else 1
    every = 16 // tensor.dtype.itemsize
    apart = [tensor.stride(d) for d in range(3) if d != inner and tensor.shape[d] > 1]
    aligned = tensor.data_ptr() % 16 == 0 and all(stride > 0 and stride % every == 0 for stride in apart)
    return tensor.numel() > 0 and tensor.stride(inner) == 1 and aligned


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of blocks of (1, rows, columns), or the other way round of a tensor that lies so."""
    if tensor.stride(2) != 1:
        tensor, rows, columns = tensor.mT, columns, rows
    shape, every = tensor.shape, 16 // tensor.dtype.itemsize
    # Where there is one of them, how far apart they are may be anything.
    row = tensor.stride(1) if shape[1] > 1 else -(-shape[2] // every) * every
    batch = tensor.stride(0) if shape[0] > 1 else shape[1] * row
    return TensorDescriptor(tensor, list(shape), [batch, row, 1], [1, rows, columns])
