"""Products of matrices in batches: the kernel for a problem's layout, and its launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.gemm import cost_pointers, select
from tritonite.engine.gemm.kernels import hopper
from tritonite.engine.gemm.kernels.hopper_fp32 import multiply_in_parts
from tritonite.engine.gemm.kernels.portable import (
    copy_rows,
    multiply,
    multiply_groups,
    multiply_persistent,
    reduce_split_k,
    write_epilogue,
)
from tritonite.engine.gemm.problem import FEW, Problem, divisor, vector
from tritonite.engine.gemm.table import Config
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.runtime.contract import decline_if_slower, empty, empty_strided, fusion, prepare_blas, settings
from tritonite.runtime.symbols import Number, zero_or_one

_ROWS, _COLUMNS = 1, 2
# The elements that a program copies, and how many rows a first operand in columns has that is copied by rows.
_COPIED, _FEW_COPIED = 4096, 64


class _Epilogue(NamedTuple):
    """What becomes of a product: the arguments of `epilogue`, the tensors expanded to the result's shape."""

    addend: torch.Tensor | None
    scales: tuple[torch.Tensor, ...]
    alpha: float | Number
    beta: float | Number
    activation: Any

    def transposed(self) -> _Epilogue:
        addend = None if self.addend is None else self.addend.mT
        return self._replace(addend=addend, scales=tuple([scale.mT for scale in self.scales]))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.scales if self.addend is None else (*self.scales, self.addend)

    def for_descriptor(self, out: torch.Tensor) -> torch.Tensor | None:
        """The addend, of one batch where it is the same for all, if its tiles can be copied as those of `out` are."""
        addend = self.addend
        if addend is None or addend.dtype is not out.dtype:
            return None
        addend = addend[:1] if addend.stride(0) == 0 else addend
        return addend if _in_columns(addend) == _in_columns(out) and _has_descriptor(addend) else None

    @property
    def takes_specialized_warps(self) -> bool:
        """Whether groups of warps that divide the work may write the results."""
        return self.activation is None

    @property
    def bytes(self) -> int:
        """Of what is read beside every element of a product; of one row nobody knows what would be in others."""
        alike = settings().invariant
        return sum(
            tensor.dtype.itemsize
            for tensor, own in zip(self.tensors, self.strides, strict=True)
            if alike or 0 not in own[1:]
        )

    def beside(self, config: Config) -> int:
        """The bytes of shared memory for each element of what is written at a time, besides the element's own.

        Of what is loaded an element at a time both subtiles are on their way before the first is written. Where warps
        divide the work, what is added is loaded as tensor cores leave results, and goes by way of registers alone.
        """
        if config.warp_specialize:
            return 0
        one_by_one = any(vector(tensor, tensor.stride(2) == 1) < 16 for tensor in self.tensors)
        return self.bytes * (2 if config.split_store and one_by_one else 1)

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """Those of the tensors; along what there is one of nothing varies, whatever the tensor says."""
        return tuple(
            [
                tuple([0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
                for tensor in self.tensors
            ]
        )

    @property
    def arguments(self) -> dict[str, Any]:
        strides = self.strides
        kinds = tuple([_ROWS * (row != 0) + _COLUMNS * (column != 0) for _, row, column in strides])
        return {
            "addend": self.addend,
            "scales": self.scales,
            "epilogue_strides": strides,
            "alpha": self.alpha,
            "beta": self.beta,
            "SCALED": zero_or_one(self.alpha) != 1,
            "KINDS": kinds,
            "ACTIVATION": self.activation,
        }


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    alpha: float | Number = 1.0,
    addend: torch.Tensor | None = None,
    beta: float | Number = 0.0,
    scales: Sequence[torch.Tensor] = (),
    activation: Any = None,
    precision: str = "ieee",
    blockwise: bool = False,
    summed: bool = False,
    ends: torch.Tensor | None = None,
    config: Config | None = None,
    compared: bool = False,
) -> None:
    """Write activation(alpha * (a @ b) * scales + beta * addend) into `out`.

    Args:
        a: (batches, M, K), of any strides, as all. Neither a nor b is read where alpha is 0.
        b: (batches, K, N), of a's dtype.
        out: (batches, M, N), or (1, M, N) where the products of all batches are `summed`.
        addend: of a shape that broadcasts to out's; it may be `out` itself.
        scales: likewise, each multiplied with the product.
        activation: a function of `triton.jit`, of a block in the dtype accumulated in.
        precision: of float32 operands: "ieee", or what of it is the fastest, or "tf32", as `tl.dot` has them.
        blockwise: whether sums over blocks of K are added in float32; tensor cores add float8 products with less.
        ends: int32, where along K the part of each of out's batches ends, for a and b of one batch.
        config: the tiles to take; by default those that `choose` finds, by tuning, a model or a rule.
        compared: whether to decline, before anything is launched, what ATen is faster with.

    Sums are float32 for floating-point operands, float64 for float64 and int32 for int8; they are rounded once.

    Where `settings` ask for invariance, tiles are chosen of those that give a sum the same bits, or else the kernel,
    its tiles and split-K are of N, K, dtypes and b's layout alone.
    """
    if not out.numel():
        return
    prepare_blas(out.device)
    shape = out.shape
    added = None if addend is None else addend.expand(shape)
    alpha, beta = [number if isinstance(number, Number) else float(number) for number in (alpha, beta)]
    epilogue = _Epilogue(added, tuple([scale.expand(shape) for scale in scales]), alpha, beta, activation)
    if not a.shape[2] or not a.shape[0] or zero_or_one(alpha) == 0:
        _write_epilogue(epilogue._replace(alpha=1.0), out, _accumulator(a.dtype))
        return
    whole, invariant = ends is None and not summed, config is None and settings().invariant
    alike = invariant and whole and not blockwise and select.has_tiles_alike(a.dtype, out.device)
    fixed = invariant and not alike
    described = fixed and whole and _lie_for_descriptors(a, b, out)
    # The bits of halves are the same in either orientation, and of float32 they are not.
    if _is_transposed(out) and (not invariant or (alike and a.dtype.itemsize == 2)):
        a, b, out, epilogue = b.mT, a.mT, out.mT, epilogue.transposed()
    specialized = epilogue.takes_specialized_warps
    written, copied = out, (False, False, False)
    if described:
        a, b, written = _laid_alike(a, b, out)
    elif config is None and whole and not fixed:
        if compared and all(map(_has_descriptor, (a, b, out))):
            # To a bias BLAS adds the product; any other addend ATen copies to the result, which BLAS then adds to.
            bias = added is None or (added.stride(1) == 0 and zero_or_one(beta) == 1)
            first = () if bias else (out.numel() * out.dtype.itemsize,)
            decline_if_slower(select.aten_is_faster(Problem.of(a, b, out), out.device, specialized, first))
        copied = _worth_copies(a, b, out)
        if copied[0]:
            a = _copied(a, _is_copied_by_rows(a))
        if copied[1]:
            b = _copied(b)
        written = _padded(out) if copied[2] else out
    if ends is not None:
        a, b = a.expand(out.shape[0], -1, -1), b.expand(out.shape[0], -1, -1)
    terms = a.shape[0] if summed else 1
    work = _Work(a, b, written, epilogue, terms, ends, precision, blockwise, copied[:2], alike)
    if config is None:
        problem = work.problem.of_any_rows() if fixed else work.problem._replace(invariant=alike)
        descriptors = described if fixed else whole and all(map(_has_descriptor, (a, b, written)))
        config = select.choose(problem, out.device, descriptors, descriptors and specialized)
        config = select.fitting(config, problem, out.device, epilogue.beside(config) if config.splits == 1 else 0)
    _run_in_room(work, config if whole else config._replace(splits=1, descriptors=False))
    if copied[2]:
        _copy_rows(written, out)
    elif written is not out:
        out.copy_(written)


def _write_epilogue(epilogue: _Epilogue, out: torch.Tensor, accumulator: torch.dtype) -> None:
    """Write the result of a product whose sums have no terms, so that every kernel that multiplies has some."""
    if out.stride(2) != 1 == out.stride(1):
        out, epilogue = out.mT, epilogue.transposed()
    batches, M, N = out.shape
    columns = min(power_of_2(N), select.SPLIT_K_COLUMNS)
    rows = min(power_of_2(M), select.SPLIT_K_ELEMENTS // columns)
    write_epilogue[(batches * -(-M // rows) * -(-N // columns),)](
        out,
        strides=out.stride(),
        M=M,
        N=N,
        ACCUMULATOR=TRITON_DTYPES[accumulator],
        INDEX=offset_type(out, *epilogue.tensors),
        BLOCK_M=rows,
        BLOCK_N=columns,
        **epilogue.arguments,
    )


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of `dtype` are summed."""
    return {torch.float64: torch.float64, torch.int8: torch.int32}.get(dtype, torch.float32)


def _is_transposed(out: torch.Tensor) -> bool:
    """Whether the transpose of a result is computed: few columns are few rows of it, and what lies in columns rows."""
    M, N = out.shape[1:]
    few = min(M, N) <= FEW
    return (few and N < M) or (not few and out.stride(2) != 1 == out.stride(1))


def _lie_for_descriptors(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether all can have tensor descriptors once rows of a and of the result lie one after the other."""
    aligned = all(tensor.shape[2] * tensor.dtype.itemsize % 16 == 0 for tensor in (a, out))
    return aligned and _has_descriptor(b[:1])


def _laid_alike(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The three, or in their place copies and memory for a result, that lie as they do for any number of rows."""
    if a.stride(2) != 1 or not _has_descriptor(a):
        a = empty(a.shape, a.dtype, a.device).copy_(a)
    if not _has_descriptor(b):
        b = _padded(b).copy_(b)
    if out.stride(2) != 1 or not _has_descriptor(out):
        out = empty(out.shape, out.dtype, out.device)
    return a, b, out


def _worth_copies(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[bool, bool, bool]:
    """Which of the three a product is soonest there with copies of, or with a copy to, for all that copies take.

    Halves are multiplied by descriptors where all three can have them, as those of odd sizes cannot, and float32 by
    pointers, which load what does not begin at 16 bytes an element at a time.
    """
    problem, tensors, none = Problem.of(a, b, out), (a, b, out), (False, False, False)
    halves = problem.dtype.itemsize == 2
    if halves:
        can = not _has_descriptor(a), not _has_descriptor(b), not _has_descriptor(out)
        choices = [none, can]
    else:
        can = problem.a_vector < 16, problem.b_vector < 16, False
        choices = [none, (can[0], False, False), (False, can[1], False), can]
    if can == none or not (halves or a.dtype is torch.float32) or not devices.has_tma(out.device):
        return none
    if problem.K <= select.OUTER:
        return none

    def time(copied: tuple[bool, bool, bool]) -> float:
        if copied == none:
            return select.microseconds(_with_columns_apart(problem), out.device, False)
        vectors = problem.a_vector, problem.b_vector, problem.out_vector
        a_vector, b_vector, out_vector = [16 if copy else own for copy, own in zip(copied, vectors, strict=True)]
        a_pitch, b_pitch = (0 if copied[0] else problem.a_pitch), (0 if copied[1] else problem.b_pitch)
        laid = problem._replace(
            a_inner=problem.a_inner or (copied[0] and _is_copied_by_rows(a)),
            a_vector=a_vector,
            b_vector=b_vector,
            out_vector=out_vector,
            a_pitch=a_pitch,
            b_pitch=b_pitch,
        )
        sizes = [x.numel() * x.dtype.itemsize for x, copy in zip(tensors, copied, strict=True) if copy]
        return select.microseconds(laid, out.device, halves and copied == can) + cost_pointers.copying(sizes)

    return min(choices, key=time)


def _with_columns_apart(problem: Problem) -> Problem:
    """Of few rows alone, which must decide nothing where sums are to have the same bits beside any rows."""
    return problem if settings().invariant else problem.with_columns_apart()


def _is_copied_by_rows(a: torch.Tensor) -> bool:
    """Whether a copy of the first operand has rows one after the other, because few are soon copied however they lie.

    20 rows in columns by 4,096, K = 1,536, took 9.8 us with a copy in columns, and take 6.9 (H200).
    """
    return a.shape[0] * a.shape[1] <= _FEW_COPIED


def _copied(tensor: torch.Tensor, by_rows: bool = False) -> torch.Tensor:
    """A copy whose rows begin at 16 bytes, with zeros in between.

    Where elements lie along columns those do, unless it is to be `by_rows`.
    """
    copy = _padded(tensor, by_rows)
    _copy_rows(tensor, copy, max(copy.stride()[1:]))
    return copy


def _copy_rows(source: torch.Tensor, out: torch.Tensor, width: int | None = None) -> None:
    """Copy batches of matrices to others, whose rows have zeros behind them up to a `width`."""
    if out.stride(2) != 1 == out.stride(1):
        source, out = source.mT, out.mT
    batches, rows, columns = source.shape
    width = width or columns
    block = min(power_of_2(width), 512)
    height = max(1, min(power_of_2(batches * rows), _COPIED // block))
    most = 16 // source.dtype.itemsize
    aligned = [
        math.gcd(most, size, *(stride for dim, stride in zip((0, 1), x.stride()[:2], strict=True) if x.shape[dim] > 1))
        for x, size in ((source, columns), (out, width))
    ]
    copy_rows[(-(-batches * rows // height) * -(-width // block),)](
        *(source, out),
        source_strides=source.stride(),
        out_strides=out.stride(),
        batches=batches,
        rows=rows,
        columns=columns,
        width=width,
        INDEX=offset_type(source, out),
        ALIGNED=tuple(aligned),
        BLOCK_M=height,
        BLOCK_N=block,
    )


def _padded(tensor: torch.Tensor, by_rows: bool = False) -> torch.Tensor:
    """Memory for as many elements, whose rows begin at 16 bytes, or columns where elements lie along them.

    That of a tensor `by_rows` is in rows however its elements lie.
    """
    if not by_rows and tensor.stride(1) == 1 != tensor.stride(2):
        return _padded(tensor.mT).mT
    *rows, columns = tensor.shape
    return empty((*rows, _padded_width(columns, tensor.dtype)), tensor.dtype, tensor.device)[..., :columns]


def _padded_width(columns: int, dtype: torch.dtype) -> int:
    """The elements from one row to the next where each begins at 16 bytes."""
    every = 16 // dtype.itemsize
    return -(-columns // every) * every


class _Work(NamedTuple):
    """A product to compute: of the (batches, M, K) and (batches, K, N), of which `terms` make a result."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    epilogue: _Epilogue
    terms: int
    ends: torch.Tensor | None
    precision: str
    blockwise: bool
    # Which of a and b is a copy, with zeros where its rows or columns end.
    copied: tuple[bool, bool] = (False, False)
    # Whether other tiles, in kernels of their own, are to give the same bits.
    alike: bool = False
    # How far apart columns of a tile are, where that has been decided: not by partial products, which take more memory.
    columns_apart: int | None = None

    def transposed(self) -> _Work:
        """The same product of the transposed operands, in the other order, whose result is the transpose."""
        a, b, out = self.b.mT, self.a.mT, self.out.mT
        epilogue, copied = self.epilogue.transposed(), self.copied[::-1]
        return self._replace(a=a, b=b, out=out, epilogue=epilogue, copied=copied, columns_apart=0)

    @property
    def options(self) -> dict[str, Any]:
        """What the compilers of all its kernels are told."""
        return fusion() if self.alike else {}

    @property
    def problem(self) -> Problem:
        found = Problem.of(self.a, self.b, self.out)
        if self.columns_apart:
            found = found._replace(columns_apart=self.columns_apart, b_vector=16)
        elif self.columns_apart is None and not any(self.copied) and self.ends is None and self.terms == 1:
            found = _with_columns_apart(found)
        a, b = [16 if copy else own for copy, own in zip(self.copied, (found.a_vector, found.b_vector), strict=True)]
        added = not self.alike and self.epilogue.bytes > 0
        by_tma = added and not self.epilogue.scales and self.epilogue.for_descriptor(self.out) is not None
        found = found._replace(added=added, added_by_tma=by_tma)
        return found._replace(blockwise=self.blockwise, a_vector=a, b_vector=b)

    @property
    def accumulator(self) -> torch.dtype:
        return _accumulator(self.a.dtype)

    @property
    def in_place(self) -> bool:
        """Whether the addend is what is written, so that no two tiles may have the same elements."""
        addend = self.epilogue.addend
        return addend is not None and addend.untyped_storage().data_ptr() == self.out.untyped_storage().data_ptr()

    @property
    def exact(self) -> bool:
        """Whether it is of float32, all of whose bits count, on a device."""
        return self.precision == "ieee" and self.a.dtype is torch.float32 and not devices.current.interpreted

    @property
    def takes_parts(self) -> bool:
        """Whether it is one product of float32, all of whose bits count, which no activation follows."""
        return self.exact and self.terms == 1 and self.ends is None and self.epilogue.activation is None

    @property
    def index(self) -> Any:
        """The dtype of elements' offsets."""
        return offset_type(self.a, self.b, self.out, *self.epilogue.tensors)

    def constants(self, config: Config) -> dict[str, Any]:
        kinds: dict[str, Any] = {"ACCUMULATOR": TRITON_DTYPES[self.accumulator], "INDEX": self.index}
        # Henry, Tang and Heinecke 2019. Elements from 3.39e38 on are infinite in the first of the three parts.
        split = config.bf16x6 and self.exact and devices.has_tma(self.a.device)
        # Of larger tiles Triton (3.6 and 3.7) makes a kernel for sm_100 that ends the process, whatever it is given.
        large = config.BLOCK_M > 128 or config.BLOCK_N > 64
        split &= not (large and devices.architecture(self.a.device).startswith("sm_10"))
        kinds |= {"PRECISION": "bf16x6" if split else self.precision}
        kinds |= {"IMPRECISE": config.BLOCK_K if self.blockwise else None}
        return kinds | config.options | devices.current.options


def _run_in_room(work: _Work, config: Config) -> None:
    """Run with fewer stages than estimated to have room where a compiler wants more besides than is known here."""
    least = 2 if config.warp_specialize else 1
    while True:
        try:
            _run(work, config)
        except OutOfResources:
            if config.num_stages == least:
                raise
            config = config._replace(num_stages=config.num_stages - 1)
        else:
            return


def _run(work: _Work, config: Config) -> None:
    (batches, M, N), K = work.out.shape, work.a.shape[2]
    blocks = -(-K // config.BLOCK_K)
    steps = max(1, -(-blocks // config.splits))
    splits = max(1, -(-blocks // steps))
    problem = work.problem
    work, tiles = work._replace(columns_apart=problem.columns_apart), problem.tiles(config)
    if splits == 1:
        _multiply(work, config, batches, tiles, steps, splits)
        return
    shape = splits * batches, M, N
    # A descriptor wants every row to begin at 16 bytes, wherever the result's begin.
    width = _padded_width(N, work.accumulator) if config.descriptors else N
    partials = empty_strided(shape, (M * width, width, 1), work.accumulator, work.out.device)
    _multiply(work._replace(out=partials, epilogue=_NOTHING), config, batches, tiles, steps, splits)
    most, columns = power_of_2(splits), min(power_of_2(N), select.SPLIT_K_COLUMNS)
    rows = min(power_of_2(M), max(1, select.SPLIT_K_ELEMENTS // (most * columns)))
    reduce_split_k[(batches * -(-M // rows) * -(-N // columns),)](
        *(partials, work.out),
        strides=work.out.stride(),
        width=width,
        batches=batches,
        M=M,
        N=N,
        splits=splits,
        **work.epilogue.arguments,
        **work.options,
        INDEX=work.index,
        SPLITS=most,
        BLOCK_M=rows,
        BLOCK_N=columns,
    )


def _multiply(work: _Work, config: Config, batches: int, tiles: int, steps: int, splits: int) -> None:
    """Launch a kernel for `splits` parts of K, of `steps` blocks each, whose results are one after another.

    Each part is `batches` matrices, of so many tiles together.
    """
    if config.transposed:
        work = work.transposed()
    a, b, out = work.a, work.b, work.out
    if config.warp_specialize and config.BLOCK_N // 2 * out.dtype.itemsize < 32 and not _in_columns(out):
        # Shared memory's layouts have rows of 32 bytes at least, and those of a subtile are shorter.
        config = config._replace(warp_specialize=False, split_store=False)
    M, N = out.shape[1:]
    programs = min(splits * tiles, config.programs * devices.multiprocessors(out.device))
    sizes = {"batches": batches, "M": M, "N": N, "K": a.shape[2], "steps": steps}
    epilogue, constants = work.epilogue.arguments, work.constants(config)
    if config.descriptors:
        apart = work.in_place
        last = {
            "last_row": _last(M, config.BLOCK_M, apart),
            "last_column": _last(N, config.BLOCK_N + config.MORE_N, apart),
        }
    if config.descriptors and config.warp_specialize:
        groups = config.num_warps // 4
        rows = config.BLOCK_M // (1 if config.pingpong else groups)
        whole = not _in_columns(a) and power_of_2(config.BLOCK_M) == config.BLOCK_M
        more, transposed = config.MORE_N, _in_columns(out)
        threads = 128 * (groups + 1)
        half, added = config.BLOCK_N // 2, None if config.split_store else work.epilogue.for_descriptor(out)
        if added is not None:
            epilogue = work.epilogue._replace(addend=None).arguments

        def blocks(tensor: torch.Tensor | None, rows: int, columns: int) -> TensorDescriptor | None:
            none = tensor is None or columns == 0
            return None if none else hopper.in_shared_memory(_descriptor(tensor, rows, columns))

        hopper.multiply_warp_specialized[(programs,)](
            blocks(a, config.BLOCK_M if whole else rows, config.BLOCK_K),
            *(blocks(b, config.BLOCK_K, config.BLOCK_N), blocks(b, config.BLOCK_K, more)),
            *(blocks(out, rows, half), blocks(out, rows, more)),
            *(blocks(added, rows, half), blocks(added, rows, more)),
            splits=splits,
            programs=programs,
            INDEX=work.index,
            ORDER=(
                *(_in_columns(a), _in_columns(b), config.GROUP_M, groups, work.blockwise),
                *(transposed, more, config.pingpong, 0 if added is None else min(2, added.shape[0])),
            ),
            BUFFERS=1 if config.split_store else 2,
            STAGES=config.num_stages,
            num_warps=4,
            maxnreg=devices.current.registers // (threads * config.programs) if config.programs > 1 else None,
            **work.options,
            **sizes,
            **last,
            **epilogue,
        )
    elif config.descriptors:
        # A program's only tile is there sooner through pointers, if those store 16 bytes at a time; of many, a copy
        # leaves time for the next. 40 products of 173 columns took 10 us where each element was stored by itself.
        in_words = _padded_width(N, out.dtype) == N
        direct = (splits * tiles == programs and in_words) or _in_columns(out)
        width = config.BLOCK_N // (2 if config.split_store else 1)
        multiply_persistent[(programs,)](
            _descriptor(a, config.BLOCK_M, config.BLOCK_K),
            _descriptor(b, config.BLOCK_K, config.BLOCK_N),
            out if direct else _descriptor(out, config.BLOCK_M, width),
            out.stride() if direct else (),
            splits=splits,
            programs=programs,
            RESULT=TRITON_DTYPES[out.dtype],
            A_TRANSPOSED=_in_columns(a),
            B_TRANSPOSED=_in_columns(b),
            SPLIT=splits > 1,
            SPLIT_STORE=config.split_store,
            **work.options,
            **sizes,
            **last,
            **epilogue,
            **constants,
        )
    elif config.in_parts and work.takes_parts:
        threads = 32 * config.num_warps * config.programs
        multiply_in_parts[(tiles, splits)](
            *(a, b, out),
            strides=(a.stride(), b.stride(), out.stride()),
            SPLIT=splits > 1,
            ALIGNED=_alignment(a, b, out),
            INDEX=work.index,
            **{name: constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps")},
            **({"maxnreg": devices.current.registers // threads // 8 * 8} if threads > 256 else {}),
            **work.options,
            **sizes,
            **epilogue,
        )
    else:
        # Without a limit, addresses of elements that are loaded one at a time leave registers for fewer programs. Of
        # few rows a thread has sums for every element of b's block besides.
        problem = work.problem
        columns_apart = problem.columns_apart
        most = max(128, devices.current.registers // (32 * config.num_warps * config.programs))
        held = (config.BLOCK_M + 1) * config.BLOCK_K * config.BLOCK_N // (32 * config.num_warps)
        room = config.BLOCK_M >= FEW or (held <= 3 * most // 4 and problem.b_vector < 16)
        limited = most < 256 and room and devices.current.ptx
        registers = {"maxnreg": most} if limited else {}
        multiply[(tiles, splits)](
            *(a, b, out, work.ends),
            strides=(a.stride(), b.stride(), out.stride()),
            summed=work.terms,
            SPLIT=splits > 1,
            EVEN_K=a.shape[2] % config.BLOCK_K == 0 and work.ends is None,
            ALIGNED=_alignment(a, b, out),
            PADDED=tuple([16 // x.dtype.itemsize if copy else 1 for x, copy in zip((a, b), work.copied, strict=True)]),
            AHEAD=(problem.a_vector < 4 or (columns_apart > 0 and problem.a_inner), problem.b_vector < 4),
            APART=columns_apart,
            **registers,
            **work.options,
            **sizes,
            **epilogue,
            **constants,
        )


def _last(size: int, tile: int, apart: bool) -> int:
    """Where the last tile along so many rows, or columns, begins: a multiple of 16, as `begin_within` needs it.

    It begins so early that it ends with them, or less than 16 later, or else where the one before ends (`apart`).
    """
    return (-(-size // tile) - 1) * tile if apart else max(0, -(-(size - tile) // 16) * 16)


def grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, precision: str) -> None:
    """Write into `out`, (M, N), the rows of `a`, (M, K), times the matrix of `b`, (groups, K, N), of their group.

    Rows up to ends[0], of int32, are the first group's; those after the last end are not written. Operands lie as
    tensor descriptors need them.
    """
    groups, K, N = b.shape
    if not (out.numel() and groups):
        return
    prepare_blas(out.device)
    work = _Work(a.unsqueeze(0), b, out.unsqueeze(0), _NOTHING, 1, ends, precision, False)
    usual = work.problem._replace(batches=groups, M=-(-a.shape[0] // groups))
    if settings().invariant:
        usual = usual.of_any_rows()
    config = select.fitting(select.for_groups(usual, out.device), usual, out.device)
    # At most: each group may have two tiles that are not full.
    tiles = (-(-a.shape[0] // config.BLOCK_M) + 2 * groups) * -(-N // config.BLOCK_N)
    programs = min(tiles, devices.multiprocessors(out.device))
    multiply_groups[(programs,)](
        _descriptor(work.a, config.BLOCK_M, config.BLOCK_K),
        _descriptor(b, config.BLOCK_K, config.BLOCK_N),
        *(out, ends),
        out_strides=work.out.stride(),
        M=a.shape[0],
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


_NOTHING = _Epilogue(None, (), 1.0, 0.0, None)


def _alignment(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[int | bool, ...]:
    """`multiply`'s ALIGNED, for up to 16 bytes at a time. Only sizes along which elements lie matter.

    Of N and K that are multiples of 16 Triton knows by itself, and telling it would cost registers: 90 in place of 80
    for one row times 4096 x 128,256, and two programs on a multiprocessor in place of three.
    """
    inner = a.stride(2) == 1, b.stride(1) == 1, out.stride(2) == 1
    other = a.stride(1) == 1, b.stride(2) == 1, out.stride(1) == 1
    rows = inner[0], not inner[1], inner[2]
    most, most_out = 16 // a.dtype.itemsize, 16 // out.dtype.itemsize
    M, N, K = a.shape[1], b.shape[2], a.shape[2]
    every = [
        divisor(most_of, x, lies) if along or across else 1
        for x, most_of, lies, along, across in zip((a, b, out), (most, most, most_out), rows, inner, other, strict=True)
    ]
    known = [1 if size % 16 == 0 else math.gcd(most, size) for size in (N, K)]
    return (1 if inner[0] and inner[2] else math.gcd(most, M), *known, *every, *inner, not (inner[0] or other[0]))


def _in_columns(tensor: torch.Tensor) -> bool:
    """Whether elements lie along columns: not along rows, or rows have one element, whose stride says nothing."""
    return tensor.stride(2) != 1 or (tensor.shape[2] == 1 != tensor.shape[1] and tensor.stride(1) == 1)


def _has_descriptor(tensor: torch.Tensor) -> bool:
    """Whether a tensor descriptor can tell of it: elements next to each other, all else 16 bytes apart."""
    inner = 1 if _in_columns(tensor) else 2
    every = 16 // tensor.dtype.itemsize
    apart = [tensor.stride(d) for d in range(3) if d != inner and tensor.shape[d] > 1]
    aligned = tensor.data_ptr() % 16 == 0 and all(stride > 0 and stride % every == 0 for stride in apart)
    return tensor.numel() > 0 and tensor.stride(inner) == 1 and aligned


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of blocks of (1, rows, columns), or the other way round of a tensor that lies so."""
    if _in_columns(tensor):
        tensor, rows, columns = tensor.mT, columns, rows
    shape = tensor.shape
    # Where there is one of them, how far apart they are may be anything.
    row = tensor.stride(1) if shape[1] > 1 else _padded_width(shape[2], tensor.dtype)
    batch = tensor.stride(0) if shape[0] > 1 else shape[1] * row
    return TensorDescriptor(tensor, list(shape), [batch, row, 1], [1, rows, columns])
