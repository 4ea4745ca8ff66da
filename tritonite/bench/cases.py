"""The fixed benchmark cases: every operator with its family's shapes, and special calls of single operators."""

# Over 500 lines: a table of shapes, and the generator whose rules the table's comments explain.

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

import tritonite
from tritonite.bench import attention, indexing, random, sampling, sorting
from tritonite.bench.fused import PAIRS, Pair
from tritonite.registry import Op
from tritonite.testing.samples import Sample, calls, values

Make = Callable[..., torch.Tensor]
Shape = tuple[int, ...]

SMALL = (64, 64)
# Rows of one decoding step, activations of hidden sizes 4096 and 8192, logits of vocabularies of 32,000 and 128,256.
POINTWISE: tuple[Shape, ...] = (
    (1, 4096),
    (16, 8192),
    (16, 32_000),
    (16, 128_256),
    (4096, 4096),
    (4096, 8192),
    (8192, 8192),
)
# Small, square, many rows, long rows, one row, short rows.
ROWS: tuple[Shape, ...] = (SMALL, (4096, 4096), (65_536, 1024), (1024, 65_536), (1, 2**26), (2**20, 64))
# Shapes of families and operators; all others take POINTWISE.
SHAPES = dict.fromkeys(("normalization", "reduction", "scan", "softmax"), ROWS)
# Images of the first and of the last layers of a residual network, and rows.
SHAPES["batch_norm"] = (SMALL, (256, 64, 56, 56), (256, 512, 7, 7), (65_536, 1024))
SHAPES["sync_batch_norm"] = SHAPES["batch_norm"][1:]
SHAPES["loss"] = ((16, 128_256), *ROWS)
SHAPES["nll_loss"] = ((8192, 1000), (8192, 32_000), (4096, 128_256))
# (M, N, K): of layers, of long sums and of few tiles; and of one decoding step for up to 16 sequences.
PRODUCTS: tuple[Shape, ...] = (
    (512, 512, 512),
    (1024, 1024, 1024),
    (4096, 4096, 4096),
    (4096, 14_336, 4096),
    (8192, 8192, 1024),
    (2048, 2048, 8192),
    (8192, 8192, 8192),
)
DECODING = tuple(
    (rows, *sizes)
    for rows in (1, 2, 4, 8, 16)
    for sizes in ((4096, 4096), (14_336, 4096), (4096, 14_336), (128_256, 4096))
)
# Batches (B, M, N, K), matrix-vector products (M, K), and groups (G, M, N, K), which split M unevenly.
SHAPES["matmul"] = PRODUCTS[2:5]
SHAPES |= {"mm": PRODUCTS + DECODING, "_scaled_mm": (PRODUCTS[-1], *PRODUCTS[2:5])}
SHAPES |= dict.fromkeys(("bmm", "baddbmm"), ((16, 1024, 1024, 1024), (128, 2048, 2048, 128), (128, 2048, 128, 2048)))
SHAPES |= {"addbmm": ((16, 1024, 1024, 1024),), "_grouped_mm": ((64, 16_384, 4096, 4096), (64, 16_384, 1408, 2048))}
SHAPES |= dict.fromkeys(("mv", "addmv", "addr"), ((8192, 8192), (128_256, 4096)))
SHAPES |= dict.fromkeys(("dot", "vdot"), ((2**20,), (2**26,)))
# A matrix, and batches of small and of large ones for a program.
SHAPES["linalg"] = (SMALL, (1024, 32, 32), (64, 128, 128))
# (rows, width) of layers: hidden sizes 4096 and 2048, and the inner size of a feed-forward layer.
FUSED: tuple[Shape, ...] = ((8192, 4096), (4096, 14_336), (16_384, 2048))
# Copies: small ones, and larger than any cache.
SHAPES |= dict.fromkeys(("creation", "movement", "rearrangement"), (SMALL, (16, 8192), (8192, 8192)))
INTERPRETED: tuple[Shape, ...] = ((16, 64), (64, 256))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Operators of --quick: for each kind of arithmetic, layout and number of operands one that models run.
QUICK = (
    "add",
    "mul",
    "div",
    "exp",
    "gelu",
    "silu",
    "silu_backward",
    "where",
    "clamp",
    "eq",
    "pow",
    "sum",
    "_softmax",
    "vector add",
    "softmax",
)
QUICK_SHAPES = (SMALL, (16, 8192), (4096, 4096), (8192, 8192))


@dataclass(frozen=True)
class Case:
    """A call to measure.

    Attributes:
        op, label, dtype: the operator without overload, a name for the shapes, and the dtype; they identify the case in
            every report.
        overload: the overload called.
        family: the operator's family.
        operands: makes the tensor arguments, or the whole call, from a function that makes a tensor of a shape.
        measure: "device", "graph" or "host".
        given: further arguments by name, or functions that make them.
        flops: floating-point operations; None for a memory-bound call.
        pair: a fused operator and ATen's composition; None for an operator of ATen.
        number: the number of a drawn case; None for a fixed case.
    """

    op: str
    overload: str
    family: str
    label: str
    dtype: torch.dtype
    operands: Callable[[Make], Sequence[torch.Tensor] | Sample]
    measure: str = "device"
    given: dict[str, Any] = field(default_factory=dict)
    flops: int | None = None
    pair: Pair | None = None
    number: int | None = None

    @property
    def packet(self) -> str:
        """Name by which the operator is overridden; "" for a fused operator."""
        return tritonite.overloads()[self.overload].packet if self.pair is None else ""

    @property
    def inplace(self) -> bool:
        """Return whether the call writes into its arguments."""
        return self.pair is None and bool(tritonite.overloads()[self.overload].written)

    def sample(self) -> Sample:
        """Make the call's arguments. Raises NotImplementedError if the operator does not take the dtype."""
        make = values(self.dtype, tritonite.device, torch.Generator(tritonite.device).manual_seed(0))
        made = self.operands(make)
        if isinstance(made, Sample):
            return made
        if self.pair is not None:
            return Sample(self.label, tuple(made), {})
        op = tritonite.overloads()[self.overload]
        sample = next(calls(op, self.label, list(made)), None)
        if sample is None:
            raise NotImplementedError(f"{self.op} takes no {self.dtype}")
        given = {name: value() if callable(value) else value for name, value in self.given.items()}
        positional = {name: i for i, name in enumerate(op.names) if i < len(sample.args)}
        given |= {"tensors": list(made)} if "tensors" in positional else {}
        args = [given.get(name, sample.args[i]) for name, i in positional.items()]
        keywords = {name: value for name, value in given.items() if name not in positional}
        return Sample(sample.label, tuple(args), {**sample.kwargs, **keywords})


@dataclass(frozen=True)
class Special:
    """A call that the shapes of its operator's family do not cover."""

    op: str
    label: str
    operands: Callable[[Make], Sequence[torch.Tensor] | Sample]
    given: dict[str, Any] = field(default_factory=dict)
    flops: int | None = None


SPECIAL: tuple[Special, ...] = (
    Special("add", "row broadcast", lambda make: (make(8192, 8192), make(8192))),
    Special("add", "column broadcast", lambda make: (make(8192, 8192), make(8192, 1))),
    Special("add", "transposed", lambda make: (make(8192, 8192), make(8192, 8192).t())),
    Special("add", "strided", lambda make: (make(8192, 8192), make(8192, 16_384)[:, ::2])),
    Special("add", "sliced", lambda make: (make(8192, 8192), make(8192, 16_384)[:, :8192])),
    Special("exp", "transposed", lambda make: (make(8192, 8192).t(),)),
    Special("gelu", "tanh", lambda make: (make(8192, 8192),), {"approximate": "tanh"}),
    Special("gelu_backward", "tanh", lambda make: (make(8192, 8192), make(8192, 8192)), {"approximate": "tanh"}),
    Special("pow", "positive bases", lambda make: (make(8192, 8192).abs_().add_(0.1), make(8192, 8192))),
)


def _several(op: str, label: str, operands: Callable[[Make], Sequence[torch.Tensor]], **given: Any) -> Special:
    """Return a special call with further arguments that are not tensors."""
    return Special(op, label, operands, given)


def _label(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _row_major(M: int, N: int, K: int) -> Special:
    """Return a product whose operands are both row-major."""
    return Special("mm", f"{M}x{N}x{K} rows", lambda make: (make(M, K), make(K, N).mT), flops=2 * M * N * K)


def _of_shape(op: str, *shape: int) -> Special:
    """Return a case of an operator with one more shape."""
    return Special(op, _label(shape), lambda make: _alike(representative(op), shape)(make))


SPECIAL += tuple(_row_major(*shape) for shape in PRODUCTS)
SPECIAL += (
    _several("clone", "transposed", lambda make: (make(8192, 8192).t(),), memory_format=torch.contiguous_format),
    _several("clone", "to channels last", lambda make: (make(64, 256, 64, 64),), memory_format=torch.channels_last),
    _several(
        "clone",
        "from channels last",
        lambda make: (make(64, 256, 64, 64).to(memory_format=torch.channels_last),),
        memory_format=torch.contiguous_format,
    ),
    _several(
        "clone", "heads", lambda make: (make(8, 2048, 32, 128).transpose(1, 2),), memory_format=torch.contiguous_format
    ),
    _several("_to_copy", "to float32", lambda make: (make(8192, 8192),), dtype=torch.float32),
    _several("_to_copy", "to bfloat16", lambda make: (make(8192, 8192),), dtype=torch.bfloat16),
    _several("triu", "above the diagonal", lambda make: (make(8192, 8192),), diagonal=1),
    _several("flip", "rows", lambda make: (make(8192, 8192),), dims=[0]),
    _several("flip", "columns", lambda make: (make(8192, 8192),), dims=[1]),
    _several("roll", "rows", lambda make: (make(8192, 8192),), shifts=[1000], dims=[0]),
    _several("roll", "columns", lambda make: (make(8192, 8192),), shifts=[1000], dims=[1]),
    _several("repeat", "rows", lambda make: (make(2048, 8192),), repeats=[4, 1]),
    _several("repeat", "columns", lambda make: (make(8192, 2048),), repeats=[1, 4]),
    _several("constant_pad_nd", "images", lambda make: (make(64, 64, 112, 112),), pad=[1, 1, 1, 1], value=0),
    _several("arange", "64 Mi", lambda make: (make(1),), end=2**26, start=0, step=1),
)
# Concatenations of models: two tensors or many, a key cache and the keys of a step, the rotated half of a head.
SPECIAL += tuple(
    _several("cat", label, operands, dim=dim)
    for label, dim, operands in (
        ("2 along columns", 1, lambda make: [make(8192, 4096) for _ in range(2)]),
        ("2 along rows", 0, lambda make: [make(4096, 8192) for _ in range(2)]),
        ("64 along rows", 0, lambda make: [make(128, 8192) for _ in range(64)]),
        ("64 along columns", 1, lambda make: [make(8192, 128) for _ in range(64)]),
        # Pieces of rows that do not start at a multiple of 16 bytes.
        ("2 of odd widths", 1, lambda make: [make(8192, width) for width in (4095, 4097)]),
        ("64 of one odd width", 1, lambda make: [make(8192, 127) for _ in range(64)]),
        ("64 of odd widths", 1, lambda make: [make(8192, 128 + (-1) ** i) for i in range(64)]),
        ("cache and step", 2, lambda make: [make(16, 8, 4096, 128), make(16, 1, 8, 128).transpose(1, 2)]),
        ("rotary halves", 3, lambda make: make(8, 32, 2048, 128).chunk(2, -1)[::-1]),
    )
)
# Training logits of a language model, and rows whose length is a multiple of 8 but not of 16.
SPECIAL += tuple(_of_shape(op, 4096, 128_256) for op in ("_log_softmax", "_log_softmax_backward_data"))
SPECIAL += tuple(_of_shape(op, 16_384, 1000) for op in ("_softmax", "native_layer_norm", "sum", "cumsum"))
# channels_last images with float32 parameters, as autocast leaves them.
IMAGES = SHAPES["batch_norm"][1:3]


def _images(op: str, shape: Shape) -> Special:
    """Return a call of a batch normalisation operator on channels_last images."""
    return Special(
        *(op, f"{_label(shape)} channels_last"),
        lambda make: (make(*shape).to(memory_format=torch.channels_last), make(1).float()),
    )


SPECIAL += tuple(
    _images(f"{kind}_batch_norm{suffix}", shape)
    for kind, suffix, shape in itertools.product(("native", "cudnn"), ("", "_backward"), IMAGES)
)
# Tensors of operators whose operands do not all have the case's shape.
OPERANDS: dict[str, Callable[[Make, Shape], Sequence[torch.Tensor]]] = {}
OPERANDS |= random.OPERANDS | sampling.OPERANDS
for _name in ("nll_loss_forward", "nll_loss_backward"):
    OPERANDS[_name] = lambda make, shape: (make(*shape), make(1), make(1), make(shape[1]))
for _name in ("nll_loss2d_forward", "nll_loss2d_backward"):
    # One image: rows are classes, columns are pixels.
    OPERANDS[_name] = lambda make, shape: (make(*shape), make(1), make(1), make(shape[0]))
for _name in ("batch_norm_stats", "batch_norm_backward_elemt"):
    # Parameters are float32, as autocast leaves them.
    OPERANDS[_name] = lambda make, shape: (make(*shape), make(1).float())
for _name in ("mm", "addmm", "_addmm_activation", "_int_mm", "_scaled_mm"):
    # The second operand is transposed, as a layer's weights are.
    OPERANDS[_name] = lambda make, shape: (make(shape[0], shape[2]), make(shape[1], shape[2]))
for _name in ("bmm", "baddbmm", "addbmm"):
    OPERANDS[_name] = lambda make, shape: (make(*shape[:2], shape[3]), make(shape[0], *shape[2:]))
for _name in ("mv", "addmv"):
    OPERANDS[_name] = lambda make, shape: (make(*shape), make(1, shape[1]))
OPERANDS["addr"] = lambda make, shape: (make(shape[0], 1), make(shape[1], 1))
OPERANDS["_grouped_mm"] = lambda make, shape: (make(shape[1], shape[3]), make(shape[0], *shape[2:]))
for _name in ("prod", "cumprod"):
    # Products of signs stay in the range of the dtype.
    OPERANDS[_name] = lambda make, shape: (make(*shape).sign(),)
for _name in ("cudnn_batch_norm", "cudnn_batch_norm_backward"):
    OPERANDS[_name] = lambda make, shape: (make(*shape), make(1).float())
for _name in ("cat", "stack", "_stack", "_chunk_cat"):
    OPERANDS[_name] = lambda make, shape: [make(*shape) for _ in range(2)]
# Arguments as models give them, in place of those of test samples.
GIVEN = {"linalg_vector_norm": {"ord": 2}, "norm": {"p": 2}, "dist": {"p": 2}, "renorm": {"p": 2}}
for _name in (
    "native_batch_norm",
    "cudnn_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
):
    GIVEN[_name] = {"training": True}
GIVEN |= {"native_batch_norm_backward": {"train": True}, "batch_norm_backward": {"update": True}}
# Operators that ATen implements on CPUs only.
ONLY_ON_CPUS = {"_batch_norm_no_update", *sorting.ONLY_ON_CPUS}
# Index of an argument whose elements are not read, or one for each row only.
UNREAD = {"fill": 0, "zero": 0, "nll_loss_forward": 0, "nll_loss2d_forward": 0}
UNREAD |= dict.fromkeys(("full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros"), 0)
UNREAD |= {"nll_loss_backward": 1, "nll_loss2d_backward": 1} | random.UNREAD
# Operators whose result has a square matrix for each row.
SHAPES |= dict.fromkeys(("diag_embed", "diagonal_backward"), (SMALL, (16, 1024), (16, 4096)))
SHAPES |= indexing.SHAPES | random.SHAPES | sampling.SHAPES | sorting.SHAPES
# Gradients of an embedding of 16,384 tokens: many tokens for each row, few, or the same row for all.
SPECIAL += tuple(
    Special("embedding_dense_backward", f"{label} of 128256x4096", lambda make: (make(16_384, 4096),), given)
    for label, given in (
        ("many repeated", indexing.repeated(16_384, 100)),
        ("few repeated", indexing.repeated(16_384, 128_256)),
        ("one repeated", indexing.repeated(16_384, 1)),
    )
)
# Scattered sums with few distinct indices, each with many rows or elements.
SPECIAL += tuple(
    Special(op, f"{label} many repeated", operands)
    for op, label, operands in (
        ("index_add", "32000x4096", indexing.added_rows),
        ("index_put", "32000x4096", indexing.put_rows),
        ("scatter_add", "4096x4096", indexing.scattered),
    )
)
SPECIAL += tuple(
    Special(op, "8192x8192", lambda make: (make(8192, 8192),), indexing.given(op, (8192, 8192), torch.float32))
    for op in ("gather", "index")
)
SPECIAL += (
    Special("masked_select", "8192x8192", lambda make: _alike(representative("masked_select"), (8192, 8192))(make)),
    Special("index_select", "4096x4096 columns", lambda make: (make(4096, 4096),), {"dim": 1, **indexing.COLUMNS}),
    Special("index", "32000x4096 rows", lambda make: (make(32_000, 4096),), indexing.ROWS),
)
# Sides of square products, in bfloat16.
SQUARES = tuple(range(512, 8192 + 1, 512))
VECTOR_ADD = tuple(2**exponent for exponent in range(12, 28))
# Lengths of softmax rows; there are 4,096 rows.
SOFTMAX = (256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 10_240, 12_288, 12_672)
# The usual comparisons of kernel libraries: an overload, a dtype, and shapes that differ in the last size.
CLASSICS: dict[str, tuple[str, torch.dtype, list[Shape]]] = {
    "vector add": ("add.Tensor", torch.float32, [(n,) for n in VECTOR_ADD]),
    "softmax": ("_softmax", torch.float32, [(4096, n) for n in SOFTMAX]),
    "matmul": ("mm", torch.bfloat16, [(n, n, n) for n in SQUARES]),
}


def representative(packet: str) -> Op:
    """Return the overload that stands for an operator: functional if there is one, with the most tensors."""
    table = tritonite.overloads()
    return table[_representatives(tuple(table))[packet]]


@functools.lru_cache(maxsize=8)
def _representatives(overloads: tuple[str, ...]) -> dict[str, str]:
    """Return by operator the overload that stands for it."""
    ops = [tritonite.overloads()[name] for name in overloads]
    ops.sort(key=lambda op: (not op.out_names, not op.inplace, sum(op.takes_tensors), op.overload))
    # The last one of an operator is kept.
    return {op.packet: op.overload for op in ops}


def _alike(op: Op, shape: Shape) -> Callable[[Make], Sequence[torch.Tensor]]:
    """Return what makes the operator's tensors: as OPERANDS says, else one of `shape` for each that it reads."""
    if op.packet in OPERANDS:
        return lambda make: OPERANDS[op.packet](make, shape)
    count = max(1, sum(op.takes_tensors) - len(op.out_names))
    return lambda make: [make(*shape) for _ in range(count)]


def matches(patterns: Sequence[str] | None, name: str) -> bool:
    """Return whether one of the globs matches; None matches every name."""
    return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def cases(
    quick: bool = False, measures: Sequence[str] = ("device", "host"), ops: Sequence[str] | None = None
) -> Iterator[Case]:
    """Yield the fixed cases, operator by operator, in each dtype of DTYPES that the operator takes.

    Args:
        quick: fewer shapes, and fewer operators unless `ops` names them.
        measures: what to measure, of "device", "graph" and "host".
        ops: names or globs of operators; None for all.
    """
    interpreted = tritonite.backend.interpreted
    ops = QUICK if quick and ops is None else ops
    for packet in sorted({op.packet for op in tritonite.overloads().values()}):
        if not matches(ops, packet):
            continue
        op = representative(packet)
        if tritonite.backend.profiled and packet in ONLY_ON_CPUS:
            continue
        if op.out_names or not op.schema.returns or "Tensor" not in str(op.schema.returns[0].type):
            # It has no result tensor: a step of another operator, or one that waits for the device.
            continue
        # The family has an operator on projections, too, whose cases come from samples.
        if op.family == "attention" and "attention" in op.packet:
            yield from _attention_cases(op, quick, measures)
            continue
        shapes, small = _shapes(op)
        for dtype in dtypes_of(op):
            if "host" in measures and not interpreted:
                usual = _usual(packet, small, dtype)
                yield Case(packet, op.overload, op.family, _label(small), dtype, _alike(op, small), "host", usual)
            for measure in measures:
                if measure == "host":
                    continue
                for shape in shapes:
                    usual = _usual(packet, shape, dtype)
                    if not quick or shape in QUICK_SHAPES or interpreted:
                        label, operands = _label(shape), _alike(op, shape)
                        flops = _flops(op, shape)
                        yield Case(packet, op.overload, op.family, label, dtype, operands, measure, usual, flops)
                    for label, given in _other_dimensions(op, shape) if not quick else ():
                        label, given = f"{_label(shape)} {label}", usual | given
                        yield Case(packet, op.overload, op.family, label, dtype, _alike(op, shape), measure, given)
                for special in SPECIAL if not interpreted else ():
                    if special.op == packet:
                        of, given, flops = special.operands, special.given, special.flops
                        yield Case(packet, op.overload, op.family, special.label, dtype, of, measure, given, flops)
    yield from _fused_cases(quick, measures, ops)
    if "device" in measures and not interpreted:
        for name, (overload, dtype, every) in CLASSICS.items():
            if overload not in tritonite.overloads() or not matches(ops, name):
                continue
            op = tritonite.overloads()[overload]
            for shape in every[:: 3 if quick else 1]:
                label, flops = str(shape[-1]), _flops(op, shape)
                yield Case(name, overload, "classic", label, dtype, _alike(op, shape), flops=flops)


def chosen(
    quick: bool = False,
    measures: Sequence[str] = ("device", "host"),
    ops: Sequence[str] | None = None,
    families: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> list[Case]:
    """Return the fixed cases that match families, labels (both may be globs) and dtypes; None matches all.

    Every process of a machine gets the same cases in the same order.
    """
    return [
        case
        for case in cases(quick, measures, ops)
        if matches(families, case.family) and matches(labels, case.label) and (dtypes is None or case.dtype in dtypes)
    ]


def shard(which: Callable[[], Sequence[Case]], index: int, shards: int) -> list[Case]:
    """Return shard `index` of the cases that `which` returns: fixed cases by operator, drawn cases by number.

    An operator's cases stay together, because they share kernels, which one process compiles once.
    """
    operators: dict[str, int] = {}
    own = []
    for case in which():
        turn = operators.setdefault(case.op, len(operators)) if case.number is None else case.number
        if turn % shards == index:
            own.append(case)
    return own


def _attention_cases(op: Op, quick: bool, measures: Sequence[str]) -> Iterator[Case]:
    """Yield an attention operator's cases, whose operands have shapes of their own."""
    interpreted = tritonite.backend.interpreted
    for dtype, measure in itertools.product(dtypes_of(op), measures):
        if measure == "host" and interpreted:
            continue
        for label, operands, flops in attention.calls(op.packet, dtype, measure, quick, interpreted):
            yield Case(op.packet, op.overload, op.family, label, dtype, operands, measure, flops=flops)


def _fused_cases(quick: bool, measures: Sequence[str], ops: Sequence[str] | None) -> Iterator[Case]:
    """Yield the cases of fused operators and ATen's compositions."""
    interpreted = tritonite.backend.interpreted
    for (name, pair), dtype in itertools.product(PAIRS.items(), DTYPES):
        for measure in measures if matches(ops, name) and dtype in (pair.dtypes or DTYPES) else ():
            shapes, small, tiny = pair.shapes or (FUSED, SMALL, None)
            of_host = (small,) if not interpreted else ()
            of_device = shapes[:: 2 if quick else 1]
            if interpreted:
                of_device = INTERPRETED if tiny is None else (tiny,)
            for shape in of_host if measure == "host" else of_device:
                operands = functools.partial(_of_pair, pair, shape)
                yield Case(name, name, "fused", _label(shape), dtype, operands, measure, pair=pair)


def _of_pair(pair: Pair, shape: Shape, make: Make) -> Sequence[torch.Tensor]:
    return pair.operands(make, shape)


def _usual(packet: str, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Return arguments of a case by name, as models give them."""
    own = indexing.given(packet, shape, dtype) | random.given(packet, shape, dtype) | sampling.given(packet, shape)
    own |= sorting.given(packet, shape, dtype)
    return {**GIVEN.get(packet, {}), **own}


def _shapes(op: Op) -> tuple[tuple[Shape, ...], Shape]:
    """Return the operator's shapes, and a small shape for host time."""
    shapes = SHAPES.get(op.packet) or SHAPES.get(op.family, POINTWISE)
    small = tuple([64] * len(shapes[0])) if op.family == "matmul" else SMALL
    if not tritonite.backend.interpreted:
        return shapes, small
    return (small,) if op.family in ("linalg", "matmul") else INTERPRETED, small


def _flops(op: Op, shape: Shape) -> int | None:
    """Return the flops of a matrix product, else None; the groups of `_grouped_mm` together make one product."""
    if op.family != "matmul" or op.packet == "addr":
        return None
    return 2 * math.prod(shape[1:] if op.packet == "_grouped_mm" else shape)


def _other_dimensions(op: Op, shape: Shape) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (label, arguments) for an operator along the first dimension, and over all if it takes several."""
    kind = next((str(argument.type) for argument in op.schema.arguments if argument.name == "dim"), "")
    if op.family not in SHAPES or op.family in indexing.FAMILIES or not kind:
        return
    if shape[0] > 1:
        yield "dim 0", {"dim": [0] if "List" in kind else 0}
    # One shape is enough: a reduction over all dimensions only depends on the number of elements.
    several = op.family == "reduction" and ("List" in kind or kind.startswith("Optional"))
    if shape in (ROWS[1], INTERPRETED[0]) and several:
        yield "all", {"dim": list(range(len(shape))) if "List" in kind else None}


def dtypes_of(op: Op) -> list[torch.dtype]:
    """Return the DTYPES that an operator takes, or one other dtype if it takes none of them."""
    usual = [dtype for dtype in DTYPES if dtype in op.declaration.accepts]
    others = (torch.int32, torch.bool, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.complex64)
    return usual or [next(dtype for dtype in others if dtype in op.declaration.accepts)]


def bytes_moved(op: str, sample: Sample, results: Sequence[torch.Tensor | None]) -> int:
    """Return the bytes a call has to read and write: every element in memory once, broadcast elements once."""
    read = [value for i, value in enumerate(sample.args) if i != UNREAD.get(op)]
    if op in indexing.GATHERED:
        read[0] = results[0]
    values = pytree.tree_leaves([read, sample.kwargs, results])
    return sum(own_elements(value) * value.dtype.itemsize for value in values if isinstance(value, torch.Tensor))


def own_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements in memory, counting broadcast elements once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count
