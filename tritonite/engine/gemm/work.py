"""A product to compute as the kernels take it: operands, result, epilogue, and how its sums are added up."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.gemm import operands
from tritonite.engine.gemm.kernels.arguments import EpilogueOperands, MatrixStrides
from tritonite.engine.gemm.problem import Problem, vector_bytes
from tritonite.engine.gemm.table import Config
from tritonite.engine.iteration import offset_type
from tritonite.engine.pointwise.embedded import ResultProgram
from tritonite.runtime.contract import Number, fusion, settings
from tritonite.runtime.symbols import zero_or_one

# Bits of an epilogue tensor's KIND: the dimensions that it varies along.
_ROWS, _COLUMNS = 1, 2


class Epilogue(NamedTuple):
    """Operations on the product before it is stored: activation(alpha * product * scales + beta * addend)."""

    # Tensors of any strides that broadcast to the result's shape; the addend may be the result itself.
    addend: torch.Tensor | None = None
    scales: tuple[torch.Tensor, ...] = ()
    alpha: float | Number = 1.0
    beta: float | Number = 0.0
    # A `triton.jit` function of a block in the accumulator's dtype.
    activation: Any = None
    # A pointwise program of all that and of further tensors, which are like the addend.
    program: ResultProgram | None = None
    more: tuple[torch.Tensor, ...] = ()

    def expanded(self, shape: torch.Size) -> Epilogue:
        """Return the epilogue with its tensors expanded to the result's shape, and with float factors."""
        addend = None if self.addend is None else self.addend.expand(shape)
        alpha, beta = [number if isinstance(number, Number) else float(number) for number in (self.alpha, self.beta)]
        scales, more = [tuple([tensor.expand(shape) for tensor in each]) for each in (self.scales, self.more)]
        return Epilogue(addend, scales, alpha, beta, self.activation, self.program, more)

    def transposed(self) -> Epilogue:
        addend = None if self.addend is None else self.addend.mT
        scales, more = [tuple([tensor.mT for tensor in each]) for each in (self.scales, self.more)]
        return self._replace(addend=addend, scales=scales, more=more)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self.scales, *(() if self.addend is None else (self.addend,)), *self.more)

    def addend_for_tma(self, out: torch.Tensor) -> torch.Tensor | None:
        """Return the addend if TMA can copy its tiles like those of `out`, as one batch if all batches share it.

        regressions: gemm_addend_by_tma
        """
        addend = self.addend
        if addend is None or addend.dtype is not out.dtype:
            return None
        addend = addend[:1] if addend.stride(0) == 0 else addend
        same_order = operands.is_column_major(addend) == operands.is_column_major(out)
        return addend if same_order and operands.has_descriptor(addend) else None

    @property
    def suits_warp_specialized(self) -> bool:
        """True if the warp-specialised kernel can apply this epilogue."""
        return self.activation is None and self.program is None

    @property
    def bytes(self) -> int:
        """Epilogue bytes read per output element. In invariant mode broadcast tensors count, too.

        There a tensor's strides must not decide anything, because a single row has the stride 0 as well.
        """
        every = settings().invariant
        return sum(
            tensor.dtype.itemsize
            for tensor, strides in zip(self.tensors, self.strides, strict=True)
            if every or 0 not in strides[1:]
        )

    def shared_bytes(self, config: Config) -> int:
        """Return the bytes of shared memory per element of a stored subtile, in addition to the result's.

        Tensors loaded an element at a time are in flight for both subtiles of a split store. Specialised warps load
        epilogue tensors in the accumulator's layout, without shared memory.
        """
        if config.warp_specialize:
            return 0
        one_by_one = any(vector_bytes(tensor, tensor.stride(2) == 1) < 16 for tensor in self.tensors)
        return self.bytes * (2 if config.split_store and one_by_one else 1)

    @property
    def strides(self) -> tuple[MatrixStrides, ...]:
        """Strides of the epilogue tensors, 0 for dimensions of size 1."""
        dimensions = [zip(tensor.shape, tensor.stride(), strict=True) for tensor in self.tensors]
        return tuple([MatrixStrides(*[0 if size == 1 else stride for size, stride in each]) for each in dimensions])

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of the kernels' `EpilogueMeta`."""
        kinds = tuple([_ROWS * (row != 0) + _COLUMNS * (column != 0) for _, row, column in self.strides])
        return {"scaled": zero_or_one(self.alpha) != 1, "kinds": kinds, "program": self.program}

    @property
    def operands(self) -> EpilogueOperands:
        """Tensors and strides as the kernels read them."""
        return EpilogueOperands(self.addend, self.scales, self.strides, self.more)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the Triton kernels."""
        return {"added": self.operands, "alpha": self.alpha, "beta": self.beta, "ACTIVATION": self.activation}


NO_EPILOGUE = Epilogue()


class Sums(NamedTuple):
    """Sums of a product: their precision, and what they run over."""

    # Of float32 operands: "ieee" for full precision, by whatever method is fastest, or "tf32".
    precision: str = "ieee"
    # Whether to add sums over blocks of K in float32; tensor cores add float8 products less precisely.
    blockwise: bool = False
    # Whether to add the products of all batches.
    summed: bool = False
    # int32, (batches,): where along K the group of each of the result's batches ends. a and b have one batch then.
    ends: torch.Tensor | None = None

    @property
    def whole(self) -> bool:
        """True unless a result is of a group, or of all batches."""
        return self.ends is None and not self.summed


PLAIN_SUMS = Sums()


class Work(NamedTuple):
    """A product to compute: (batches, M, K) times (batches, K, N)."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    epilogue: Epilogue = NO_EPILOGUE
    sums: Sums = PLAIN_SUMS
    # Whether a, and b, are copies padded with zeros.
    padded: tuple[bool, bool] = (False, False)
    # Whether other tiles, in other kernels, must give the same bits.
    same_bits: bool = False
    # The stride between a tile's columns, once it has been decided; None lets `problem` decide. Partial products of
    # split-K must not decide it anew, because they take more memory than the result.
    column_stride: int | None = None

    def transposed(self) -> Work:
        """Return the product of the transposed operands in reverse order, whose result is the transpose."""
        a, b, out = self.b.mT, self.a.mT, self.out.mT
        epilogue, padded = self.epilogue.transposed(), self.padded[::-1]
        return self._replace(a=a, b=b, out=out, epilogue=epilogue, padded=padded, column_stride=0)

    @property
    def terms(self) -> int:
        """Batches of a and b that are added to one result."""
        return self.a.shape[0] if self.sums.summed else 1

    @property
    def is_single(self) -> bool:
        """True if each result is the product of one pair of matrices."""
        return self.terms == 1 and self.sums.ends is None

    @property
    def options(self) -> dict[str, Any]:
        """Compile options of all kernels of this product."""
        return fusion() if self.same_bits else {}

    @property
    def problem(self) -> Problem:
        problem = Problem.of(self.a, self.b, self.out)
        if self.column_stride:
            problem = problem._replace(column_stride=self.column_stride, b_vector=16)
        elif self.column_stride is None and not any(self.padded) and self.is_single:
            problem = operands.with_column_stride(problem)
        vectors = problem.a_vector, problem.b_vector
        a_vector, b_vector = [16 if padded else own for padded, own in zip(self.padded, vectors, strict=True)]
        added = not self.same_bits and self.epilogue.bytes > 0
        by_tma = added and not self.epilogue.scales and self.epilogue.addend_for_tma(self.out) is not None
        problem = problem._replace(added=added, added_by_tma=by_tma)
        return problem._replace(blockwise=self.sums.blockwise, a_vector=a_vector, b_vector=b_vector)

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator(self.a.dtype)

    @property
    def in_place(self) -> bool:
        """True if the addend shares the result's memory, so that tiles must not overlap."""
        addend = self.epilogue.addend
        return addend is not None and addend.untyped_storage().data_ptr() == self.out.untyped_storage().data_ptr()

    @property
    def exact(self) -> bool:
        """True for float32 operands of full precision, on a device."""
        return self.sums.precision == "ieee" and self.a.dtype is torch.float32 and not devices.current.interpreted

    @property
    def suits_bf16x6(self) -> bool:
        """True if `multiply_bf16x6` can compute this product: a single one of exact float32, with linear epilogues."""
        return self.exact and self.is_single and self.epilogue.suits_warp_specialized

    @property
    def index(self) -> Any:
        """The dtype of element offsets."""
        return offset_type(self.a, self.b, self.out, *self.epilogue.tensors)

    def facts(self, config: Config) -> dict[str, Any]:
        """Return the fields of the kernels' `TileMeta`."""
        # Elements from 3.39e38 on are infinite in the first of three bfloat16 terms (Henry, Tang and Heinecke 2019).
        bf16x6 = config.bf16x6 and self.exact and devices.has_tma(self.a.device)
        # For larger tiles on sm_100 Triton (3.6 and 3.7) makes a kernel that ends the process, whatever its arguments.
        large = config.BLOCK_M > 128 or config.BLOCK_N > 64
        bf16x6 &= not (large and devices.architecture(self.a.device).startswith("sm_10"))
        return {
            "block_m": config.BLOCK_M,
            "block_n": config.BLOCK_N,
            "block_k": config.BLOCK_K,
            "group_m": config.GROUP_M,
            "accumulator": TRITON_DTYPES[self.accumulator],
            "index": self.index,
            "precision": "bf16x6" if bf16x6 else self.sums.precision,
            "imprecise": config.BLOCK_K if self.sums.blockwise else None,
        }

    def compile_options(self, config: Config) -> dict[str, Any]:
        """Return the compile options of a Triton kernel of this product, for a tile."""
        return {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **devices.current.options,
            **self.options,
        }


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of `dtype` are summed."""
    return {torch.float64: torch.float64, torch.int8: torch.int32}.get(dtype, torch.float32)
