"""Random calls of an overload: from its schema alone, or from a sample with some arguments changed."""

# Over 500 lines: one class, whose methods draw an argument each.

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tritonite import devices
from tritonite.install.override import native_dispatcher
from tritonite.registry import Op
from tritonite.registry.names import overload_named
from tritonite.registry.schema import is_out, schemas
from tritonite.testing.samples import DRAWN, at_boundaries, samples
from tritonite.testing.samples.facts import LISTS, NAN_UNDEFINED, OPTIONS
from tritonite.testing.samples.matmul import shapes_of

_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
_RARE_DTYPES = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32)
_SIZES = (0, 1, 1, 2, 3, 3, 4, 5, 7, 16, 17, 33)
# Tensors of a list.
_LENGTHS = (0, 1, 1, 2, 2, 3, 3, 5, 5, 12, 40)
# Elements of a tensor.
_MAX_ELEMENTS = 2048
# Sizes and factors of products: empty, single rows and columns, and partial tiles.
_PRODUCT_SIZES, _PRODUCT_FACTORS = (0, 1, 15, 63, 64), (0, 1, 0.5)
# Probability that a call has operands at which its formula changes (`boundaries`).
_AT_BOUNDARIES = 0.4
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -7.0, 1e-3, float("inf"), -float("inf"), float("nan"), 1e-30, 3e38, 1e300)
_NUMBERS = (*_FLOATS, 0, 1, -1, 2, 3, 7, -128, 300, 2**31, -(2**31) - 1, 2**53 + 1, 2**62, -(2**63), 2**63 - 1, 2**63)
_FORMATS = (torch.preserve_format, torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
# Values of enumerations, which are ints to PyTorch's dispatcher. For ints that name no dtype ATen reads beyond a table.
_DTYPE_NUMBERS = (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 15)
_FORMAT_NUMBERS, _LAYOUT_NUMBERS, _NAMELESS = (0, 1, 2, 3), (0,), (-1, 100)
_OTHERS = (True, False, 1j, 2.5 + 0j)
_INTEGERS = (0, 1, -1, 2, 3, -2, -3, 4, 5, -5, 7, 64, -100, 2**31, 2**40)
_WORDS = ("none", "tanh", "floor", "trunc", "", "x", "Tanh", "mean")
# Families whose operands must fit each other, so that sizes of 0 and 1 come from samples: probability of such a size.
_FITTING = {"linalg": 0.35, "fft": 0.35, "quantized_weight": 0.35, "scaled_products": 0.35}
# Families whose sums may overflow or not, by the order of the elements.
SUMS = ("batch_norm", "cross", "distance", "matmul", "normalization", "reduction", "scan", "scatter", "softmax")
# Prefixes of operators whose kernels in ATen do not check shapes, and read or write beyond operands.
_UNCHECKED = (
    "_batch_norm",
    "_cholesky_solve",
    "_cum",
    "_embedding_bag",
    "_logcumsumexp",
    "_native_batch",
    "_segment_reduce_backward",
    "_weight_norm",
    "batch_norm",
    "lu_unpack",
    "native_batch",
    "nll_loss2d",
    "tril.out",
    "triu.out",
)
# Operators among these whose kernels on a CPU use strides, so that only shapes have to match.
_STRIDED = (
    *("_batch_norm_with_update", "_batch_norm_with_update_functional", "_cummax_helper", "_cummin_helper"),
    *("_logcumsumexp", "_logcumsumexp.out", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("native_batch_norm", "nll_loss2d_backward", "nll_loss2d_forward", "tril.out", "triu.out"),
)
# Overloads whose kernels in ATen write beyond outputs that are too small.
_UNRESIZED = ("rrelu_with_noise.out",)
# Overloads for which ATen on a GPU puts another tensor in the place of an output if it calls cuDNN, and then frees
# memory that is in use. cuDNN needs a weight.
_REPLACED = ("_batch_norm_with_update.out",)
# Overloads whose CPU kernels in ATen repeat the first row in an output whose rows are one element apart.
_ROWS_REPEATED = ("_upsample_bicubic2d_aa.out", "_upsample_bilinear2d_aa.out")
# Overloads whose GPU kernels in ATen write to other places of outputs that are not contiguous.
_MISPLACED = ("mode.values", "upsample_nearest1d.out", "_upsample_nearest_exact1d.out")


class Call(NamedTuple):
    """A call of an overload: arguments by the schema's names, in its order, outputs included."""

    op: Op
    arguments: dict[str, Any]

    def map(self, function: Callable[[Any], Any]) -> Call:
        """Return the call with `function` applied to every argument and to the items of lists."""
        made = {
            name: [function(item) for item in value] if isinstance(value, (list, tuple)) else function(value)
            for name, value in self.arguments.items()
        }
        return Call(self.op, made)

    @property
    def function(self) -> Callable[..., Any]:
        return overload_named(self.op.overload)

    def run(self) -> Any:
        """Make the call with its arguments, not with copies."""
        keywords = {name: self.arguments[name] for name in self.op.keywords if name in self.arguments}
        return self.function(*[value for name, value in self.arguments.items() if name not in keywords], **keywords)

    def __str__(self) -> str:
        shown = [f"{name}={_shown(value)}" for name, value in self.arguments.items()]
        return f"{self.op.overload}({', '.join(shown)})"


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    words = [f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"]
    if not value.is_contiguous():
        words.append(f"strides {value.stride()}")
    if value.storage_offset():
        words.append(f"offset {value.storage_offset()}")
    if value.device.type != devices.current.type:
        words.append(str(value.device))
    words += ["conjugate"] * value.is_conj() + ["negative"] * value.is_neg()
    if 0 < value.numel() <= 4 and value.dtype in _DTYPES:
        words.append(str(value.tolist()))
    return " ".join(words)


@functools.lru_cache(maxsize=256)
def _samples(overload: str, dtype: torch.dtype) -> tuple[Any, ...]:
    from tritonite.registry import overloads

    op = overloads()[overload]
    try:
        found = tuple(samples(op, dtype, devices.current.type))
        return tuple([x for x in found if not (op.family in SUMS and x.label.startswith("extreme"))])
    except (NotImplementedError, RuntimeError):
        # Its family has no samples in this dtype.
        return ()


class Drawer:
    """A generator of one call, which overload, seed and number determine."""

    def __init__(self, op: Op, seed: int, number: int) -> None:
        self.op = op
        self.random = random.Random(f"{seed}/{op.overload}/{number}")
        # A separate stream, so that other draws do not depend on it.
        self.boundaries = random.Random(f"{seed}/{op.overload}/{number}/boundaries")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(60))
        accepted = [dtype for dtype in _DTYPES if dtype in op.declaration.accepts] or list(_DTYPES)
        rare = [dtype for dtype in _RARE_DTYPES if dtype in op.declaration.accepts]
        self.dtype = self._pick(rare if rare and self._chance(0.2) else accepted)
        self.dtype = self.dtype if self._chance(0.8) else self._any_dtype()
        self.shape = self._shape()
        self.device = devices.current.type

    def draw(self) -> Call:
        """Return the call."""
        self.unchecked = self.op.overload.startswith(_UNCHECKED)
        call = self._product() if self.op.family == "matmul" and self._chance(0.3) else None
        # Lists of other families have numbers alone.
        of_tensors = any(str(argument.type) == "List[Tensor]" for argument in self.op.schema.arguments)
        if self.op.family in LISTS and of_tensors and self._chance(0.7):
            call = self._lists()
        if call is None and (self.unchecked or self._chance(0.5)):
            call = self._from_sample()
        if call is None:
            call = Call(self.op, {a.name: self._argument(a) for a in self.op.schema.arguments if not is_out(a)})
        if not self.unchecked and self.boundaries.random() < _AT_BOUNDARIES:
            call = self._at_boundaries(call)
        call = self._answered(call)
        if not self.unchecked and self._chance(0.02):
            call = call.map(functools.partial(_deepened, self._pick((24, 26, 65))))
        if self.op.out_names:
            call = Call(self.op, {**call.arguments, **self._outs(call)})
        if self.device != "cpu" and self.op.overload in _REPLACED:
            call = Call(self.op, {**call.arguments, "weight": None})
        return call

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def _pick(self, choices: Any) -> Any:
        return self.random.choice(choices)

    def _any_dtype(self) -> torch.dtype:
        return self._pick(_RARE_DTYPES if self._chance(0.05) else _DTYPES)

    def _shape(self) -> tuple[int, ...]:
        rank = self._pick((0, 1, 1, 2, 2, 2, 3, 3, 4, 5))
        while True:
            shape = tuple(self._pick(_SIZES) for _ in range(rank))
            if math.prod(shape) <= _MAX_ELEMENTS:
                return shape

    def _other_shape(self) -> tuple[int, ...]:
        """Return the call's shape, a shape that broadcasts to it, or any shape."""
        way = self.random.random()
        if way < 0.5:
            return self.shape
        if way < 0.85:
            kept = self.shape[self.random.randrange(len(self.shape) + 1) :]
            return tuple(1 if self._chance(0.3) else size for size in kept)
        return self._shape()

    def _values(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=self.generator).bool()
        wide = torch.randn(shape, generator=self.generator, dtype=torch.float64) * self._pick((1, 1, 3, 100))
        if dtype.is_floating_point or dtype.is_complex:
            extremes = [x for x in _FLOATS if not (self.op.family in SUMS and 1e30 < abs(x) < math.inf)]
            if wide.numel() and self._chance(0.3):
                for _ in range(self.random.randint(1, 4)):
                    wide.view(-1)[self.random.randrange(wide.numel())] = self._pick(extremes)
            if dtype.is_complex:
                # PyTorch flips no tensor of more than 64 dimensions.
                return torch.complex(wide, wide.flatten().flip(0).view(shape)).to(dtype)
            return wide.to(dtype)
        info = torch.iinfo(dtype)
        whole = wide.mul(3).round().clamp(max(info.min, -(2**62)), min(info.max, 2**62)).to(torch.int64)
        if whole.numel() and self._chance(0.2):
            extreme = self._pick((info.min, min(info.max, 2**63 - 1), 0))
            whole.view(-1)[self.random.randrange(whole.numel())] = extreme
        return whole.to(dtype)

    def _tensor(self, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = self._other_shape() if shape is None else shape
        if dtype is None:
            dtype = self.dtype if self._chance(0.75) else self._any_dtype()
        if not shape and self._chance(0.2):
            return self._values((), dtype)
        return self._laid_out(self._values(shape, dtype).to(self.device))

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same elements in another layout, or as they are."""
        way = self.random.random()
        rank = tensor.dim()
        # Gaps along many dimensions would multiply to more memory than there is.
        if way < 0.5 or rank > 8:
            return tensor
        if way < 0.65 and rank > 1:
            order = self.random.sample(range(rank), rank)
            inverse = [order.index(d) for d in range(rank)]
            return tensor.permute(order).contiguous().permute(inverse)
        if way < 0.75 and rank in (4, 5):
            kind = torch.channels_last if rank == 4 else torch.channels_last_3d
            return tensor.contiguous(memory_format=kind)
        if way < 0.85 and rank:
            d = self.random.randrange(rank)
            if tensor.shape[d]:
                return tensor.select(d, 0).unsqueeze(d).expand(tensor.shape)
        if way < 0.97:
            # A view with gaps and an offset.
            steps = [self._pick((1, 1, 2)) for _ in range(rank)]
            sizes = [size * step + self._pick((0, 1)) for size, step in zip(tensor.shape, steps, strict=True)]
            room = self._values((math.prod(sizes) + 3,), tensor.dtype).to(tensor.device)
            start = self._pick((0, 1, 3))
            view = room[start : start + math.prod(sizes)].view(sizes)
            slices = tuple(slice(0, n * step, step) for n, step in zip(tensor.shape, steps, strict=True))
            return view[slices].copy_(tensor)
        if tensor.is_complex():
            return tensor.conj()
        return torch._neg_view(tensor) if tensor.is_floating_point() and tensor.dtype in _DTYPES else tensor

    def _number(self) -> Any:
        if self._chance(0.4 if self.op.family not in SUMS else 0.9):
            return self._pick((1, 2, 0.5, 1.0, -1.5, 3))
        return self._pick(_OTHERS if self._chance(0.15) else _NUMBERS)

    def _enumeration(self, known: tuple[int, ...]) -> int:
        """Return an int for an enumeration, also an invalid one if no kernel in Python receives it."""
        return self._pick((*known, *_NAMELESS) if native_dispatcher() is not None else known)

    def _dim(self) -> int:
        rank = max(1, len(self.shape))
        return self.random.randrange(-rank, rank) if self._chance(0.85) else self._pick(_INTEGERS)

    def _argument(self, argument: Any) -> Any:
        """Return a value for an argument of the schema."""
        kind, name = str(argument.type), argument.name
        if kind.startswith("Optional") and self._chance(0.3):
            return None
        kind = kind.removeprefix("Optional[").rstrip("]") + ("]" if "List" in kind else "")
        if kind == "Tensor":
            if self._chance(0.04) and name != "self":
                return self._number()
            return self._tensor()
        if kind == "number":
            return self._number()
        if kind == "float":
            number = self._number()
            number = number if isinstance(number, complex) else float(number)
            # A negative eps may cancel a variance, and leave roundoff.
            return abs(number) if name == "eps" else number
        if kind == "bool":
            return self._chance(0.5)
        if kind == "str":
            return self._pick(_WORDS)
        if kind == "int" and name.endswith("dtype"):
            return self._any_dtype() if self._chance(0.95) else self._pick(_DTYPE_NUMBERS)
        if name == "memory_format":
            return self._pick(_FORMATS) if self._chance(0.9) else self._enumeration(_FORMAT_NUMBERS)
        if name == "layout":
            if self._chance(0.9):
                return torch.strided
            return torch.sparse_coo if self._chance(0.5) else self._enumeration(_LAYOUT_NUMBERS)
        if kind == "Device":
            return torch.device(self.device)
        if kind == "int":
            few = (0, 1, 2, 3, 4)
            return self._dim() if name.startswith("dim") else self._pick(few if self._chance(0.7) else _INTEGERS)
        if kind == "List[int]":
            count = self._pick((0, 1, 1, 2, 3))
            sizes = list(self.shape[-count:])
            if sizes and self._chance(0.1):
                sizes[self.random.randrange(len(sizes))] = self._pick((-1, -3, 0))
            return [self._dim() for _ in range(count)] if name.startswith("dim") else sizes
        if kind == "List[bool]":
            return [self._chance(0.7) for _ in range(self._pick((3, 3, 3, 2)))]
        if kind == "List[Tensor]":
            return [self._tensor() for _ in range(self._pick((0, 1, 2, 3)))]
        if kind == "List[Optional[Tensor]":
            return [None if self._chance(0.3) else self._tensor() for _ in range(self._pick((1, 1, 2, 3)))]
        if kind == "List[float]":
            return [float(self._pick((0.0, 1.0, -1.5, 3.0))) for _ in range(self._pick((0, 2, 4)))]
        if kind == "List[number]":
            return [self._number() for _ in range(self._pick((0, 1, 2, 3)))]
        if kind == "Generator":
            return torch.Generator(self.device).manual_seed(self.random.randrange(2**32))
        raise NotImplementedError(f"{self.op.overload}: an argument of type {kind}")

    def _product(self) -> Call | None:
        """Return a product of operands that match, many of them empty, with factors that may be 0."""
        batches, sizes = self._pick((0, 1, 1, 3)), [self._pick(_PRODUCT_SIZES) for _ in range(3)]
        shapes = shapes_of(self.op.packet, batches, *sizes)
        if not shapes:
            return None
        arguments = {}
        for argument in self.op.schema.arguments:
            if is_out(argument):
                continue
            if argument.name in shapes:
                arguments[argument.name] = self._tensor(shapes[argument.name], self.dtype)
            elif argument.name in ("alpha", "beta"):
                arguments[argument.name] = self._pick(_PRODUCT_FACTORS)
            else:
                arguments[argument.name] = self._argument(argument)
        return Call(self.op, arguments)

    def _lists(self) -> Call:
        """Return a call whose lists have one length, and at each index one shape and one dtype, but for a few."""
        count = self._pick(_LENGTHS)
        # Many tensors are small, so that a call takes little time.
        shapes = [self._shape() if count < 12 else (self._pick(_SIZES),) for _ in range(count)]
        dtypes = [self.dtype if self._chance(0.8) else self._any_dtype() for _ in range(count)]
        odd = self._pick((0, 0, 0.1))
        arguments: dict[str, Any] = {}
        for argument in self.op.schema.arguments:
            kind, name = str(argument.type), argument.name
            if is_out(argument):
                continue
            if kind == "List[Tensor]":
                arguments[name] = [
                    self._tensor(
                        None if self._chance(odd) else shape, self._any_dtype() if self._chance(odd) else dtype
                    )
                    for shape, dtype in zip(shapes, dtypes, strict=True)
                ]
            elif kind == "List[number]":
                alike = self._pick((float, int, None))
                drawn = [self._number() if alike is None else alike(self._pick((0, 1, 2, 3, -1.5))) for _ in shapes]
                arguments[name] = drawn
            elif kind == "Tensor" and name == "scalars":
                arguments[name] = self._values((count,), dtypes[0] if dtypes else self.dtype)
            elif kind == "Tensor" and self._chance(0.9):
                arguments[name] = self._tensor((), self.dtype)
            else:
                arguments[name] = self._argument(argument)
        lists = [value for value in arguments.values() if isinstance(value, list)]
        if lists and self._chance(0.05):
            self._pick(lists)[:] = self._pick(lists)[1:]
        held = [x for x in lists if x and isinstance(x[0], torch.Tensor)]
        if held and self._chance(0.15):
            self._share_memory(self._pick(held), self._pick(held))
        return Call(self.op, arguments)

    def _share_memory(self, source: list[torch.Tensor], destination: list[torch.Tensor]) -> None:
        """Put a tensor of a list, or a view of it without an element, to any index of a list."""
        x = self._pick(source)
        if x.dim() and x.numel() and self._chance(0.5):
            x = x[1:] if self._chance(0.5) else x[:-1]
        destination[self.random.randrange(len(destination))] = x

    def _from_sample(self) -> Call | None:
        """Return a sample of the family with some arguments changed."""
        found = _samples(self.op.overload, self.dtype if self.dtype in _DTYPES else torch.float32)
        if not found and self.unchecked:
            found = _samples(self.op.overload, torch.float32)
        if not found:
            return None
        sample = self._pick(found)
        arguments = sample.named(self.op)
        if self.dtype not in _DTYPES:
            arguments = Call(self.op, arguments).map(self._converted).arguments
        # ATen's backward formulas do not check indices against the smaller size.
        checks = not self.unchecked and "_backward" not in self.op.overload
        if checks and (sizes := sizes_of(arguments)) and self._chance(_FITTING.get(self.op.family, 0.1)):
            arguments = with_size(arguments, self._pick(sizes), self._pick((0, 0, 1)))
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        if tensors:
            self.shape = tuple(tensors[0].shape)
        schema = {a.name: a for a in self.op.schema.arguments}
        for _ in range(self._pick((0, 1, 1, 2, 3))):
            name = self._pick(list(arguments))
            arguments[name] = self._changed(schema[name], arguments[name])
        return Call(self.op, arguments)

    def _converted(self, value: Any) -> Any:
        """Convert a sample's float32 tensors to a dtype that samples do not have."""
        floats = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        return value.to(self.dtype) if floats else value

    def _changed(self, argument: Any, value: Any) -> Any:
        if isinstance(value, list) and any(torch.is_tensor(x) for x in value) and self._chance(0.8):
            return self._changed_list(value)
        if self.unchecked and argument.name == "offsets" and isinstance(value, torch.Tensor) and value.numel():
            return self._offsets(value)
        if self.unchecked:
            # Running statistics are written, although the schema does not say so.
            written = argument.name.startswith("running_") or (argument.alias_info and argument.alias_info.is_write)
            if isinstance(value, torch.Tensor) and self.device == "cpu" and not written:
                return self._laid_out(value) if self.op.overload in _STRIDED else value
            return self._argument(argument) if _is_number(argument) else value
        if not isinstance(value, torch.Tensor) or self._chance(0.2):
            return self._argument(argument)
        return self._changed_tensor(value)

    def _changed_list(self, value: list[Any]) -> list[Any]:
        """Return a list with one tensor changed. Indices may be None."""
        i = self.random.choice([i for i, x in enumerate(value) if torch.is_tensor(x)])
        return [*value[:i], self._changed_tensor(value[i]), *value[i + 1 :]]

    def _changed_tensor(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor in another layout or dtype, with other elements, without elements, or of another shape."""
        way = self.random.random()
        if way < 0.45:
            return self._laid_out(value)
        if way < 0.65:
            return self._laid_out(value.resolve_neg().to(self._any_dtype()))
        if way < 0.8:
            return self._tensor(tuple(value.shape), value.dtype)
        if way < 0.9 and value.dim():
            return value.narrow(self.random.randrange(value.dim()), 0, 0)
        return self._tensor(None, value.dtype)

    def _offsets(self, value: torch.Tensor) -> torch.Tensor:
        """Return as many offsets up to the same maximum, sorted or not, from 0 or later."""
        drawn = [self.random.randint(0, int(value.max())) for _ in range(value.numel())]
        drawn = sorted(drawn) if self._chance(0.6) else drawn
        if self._chance(0.6):
            drawn[0] = 0
        return torch.tensor(drawn, device=value.device).to(value.dtype).view(value.shape)

    def _at_boundaries(self, call: Call) -> Call:
        """Return the call with operands at which its formula changes, in random layouts."""
        found = at_boundaries(self.op.packet, self.boundaries, call.arguments)
        changed = [name for name, value in found.items() if value is not call.arguments[name]]
        tensors = {name: self._laid_out(found[name]) for name in changed if isinstance(found[name], torch.Tensor)}
        return Call(self.op, found | tensors)

    def _answered(self, call: Call) -> Call:
        """Return the call, with arguments replaced for which ATen has no defined result."""
        arguments = dict(call.arguments)
        if self.device == "cpu" and self.op.packet in NAN_UNDEFINED:
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype in _DTYPES:
                    arguments[name] = value.nan_to_num(1.0, math.inf, -math.inf)
                elif isinstance(value, float) and math.isnan(value):
                    arguments[name] = 1.0
        answered = DRAWN.get(self.op.packet)
        if answered is not None:
            # Overloads of one operator may lack some of the arguments that are replaced.
            arguments = {name: value for name, value in answered(arguments).items() if name in arguments}
        return Call(self.op, arguments)

    def _outs(self, call: Call) -> dict[str, Any]:
        """Return outputs: like ATen's results, empty, of other shapes or dtypes, or views of an argument."""
        tensors = [value for value in call.arguments.values() if isinstance(value, torch.Tensor)]
        results = functional_results(call) or ()
        # Decided once for all outputs, because several rarely fit by chance.
        fitting, contiguous = self._chance(0.5), self._chance(0.5)
        outs = {}
        for i, name in enumerate(self.op.out_names):
            like = self._pick(tensors) if tensors else torch.empty(0, device=self.device)
            if isinstance(outcome := results[i] if i < len(results) else None, list):
                # As many tensors as results, or one less.
                kept = outcome if self._chance(0.9) else outcome[:-1]
                outs[name] = [self._tensor(tuple(x.shape), x.dtype) for x in kept]
                if outs[name] and self.op.family in LISTS and self._chance(0.3):
                    first = next(value for value in call.arguments.values() if isinstance(value, list))
                    outs[name] = self._changed_list(outs[name]) if self._chance(0.5) else list(first)
                continue
            if "List" in str(next(a for a in self.op.schema.arguments if a.name == name).type):
                outs[name] = []
                continue
            shape, dtype = tuple(self.shape), self.dtype
            # A number among the arguments may ask for too many elements.
            known = i < len(results) and results[i] is not None and results[i].numel() <= 2**24
            if known and fitting:
                made = self._values(tuple(results[i].shape), results[i].dtype).to(self.device)
                outs[name] = made if self.unchecked or contiguous else self._laid_out(made)
                continue
            if known and self._chance(0.8):
                shape, dtype = tuple(results[i].shape), results[i].dtype
            dtype = dtype if self.unchecked or self._chance(0.75) else self._any_dtype()
            way = self.random.random()
            if self.op.overload in _UNRESIZED:
                outs[name] = self._tensor(tuple(like.shape), like.dtype).to(self.device)
            elif self.op.family == "batch_norm" and known and way < 0.5:
                outs[name] = self._tensor(tuple(results[i].shape), results[i].dtype)
            elif way < 0.25 or self.unchecked:
                outs[name] = torch.empty(0, dtype=dtype, device=self.device)
            elif way < 0.75:
                outs[name] = self._tensor(shape, dtype)
            elif way < 0.85:
                outs[name] = self._tensor(None, dtype)
            elif way < 0.9 or not like.dim() or not like.numel():
                outs[name] = like
            else:
                # A view of an argument without its last or its first element.
                outs[name] = like[:-1] if self._chance(0.5) else like[1:]
        if self.device == "cpu" and self.op.overload in _ROWS_REPEATED:
            outs = {name: _with_rows(x) for name, x in outs.items()}
        if self.device != "cpu" and self.op.overload in _MISPLACED:
            outs = {name: x.contiguous() if isinstance(x, torch.Tensor) else x for name, x in outs.items()}
        return outs


def _with_rows(out: Any) -> Any:
    """Return images whose rows are one element apart in a contiguous layout, or an output as it is."""
    apart = isinstance(out, torch.Tensor) and out.dim() == 4 and out.stride(2) == 1
    return out.contiguous() if apart else out


def sizes_of(arguments: dict[str, Any]) -> list[int]:
    """Return the sizes above 1 of a call's tensors, in ascending order."""
    tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    return sorted({size for x in tensors for size in x.shape if size > 1})


def with_size(arguments: dict[str, Any], size: int, made: int) -> dict[str, Any]:
    """Narrow every dimension of `size` to `made` elements, and replace equal items of lists."""

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for dim, extent in enumerate(value.shape):
                if extent == size:
                    value = value.narrow(dim, 0, made)
            return value
        if isinstance(value, (list, tuple)):
            return [made if type(item) is int and item == size else cut(item) for item in value]
        return value

    return {name: cut(value) for name, value in arguments.items()}


def _deepened(rank: int, value: Any) -> Any:
    """Add leading dimensions of size 1 until a tensor has `rank`. Scalars and other values stay as they are."""
    if not isinstance(value, torch.Tensor) or not 0 < value.dim() < rank:
        return value
    missing = rank - value.dim()
    return value.as_strided((*[1] * missing, *value.shape), (*[0] * missing, *value.stride()), value.storage_offset())


def _is_number(argument: Any) -> bool:
    return str(argument.type) in ("number", "float", "bool")


def _typed(schema: Any) -> list[tuple[str, str]]:
    """Return the names and types of a schema's arguments, without outputs and the options of a factory."""
    arguments = [argument for argument in schema.arguments if not is_out(argument)]
    return [(each.name, str(each.type)) for each in arguments if not (each.kwarg_only and each.name in OPTIONS)]


def functional_results(call: Call) -> tuple[Any, ...] | None:
    """Return the results of ATen's functional overload for the arguments, or None if it refuses them or is missing."""
    given = _typed(call.op.schema)
    for name, schema in schemas(call.op.overload.partition(".")[0]):
        if _typed(schema) != given or any(map(is_out, schema.arguments)):
            continue
        own = call
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
            own = call.map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value)
        keywords = {a.name: own.arguments[a.name] for a in schema.arguments if a.kwarg_only and a.name in own.arguments}
        if any(argument.name == "device" for argument in schema.arguments):
            keywords["device"] = devices.current.type
        try:
            positional = [value for key, value in own.arguments.items() if key not in keywords]
            found = overload_named(name)(*positional, **keywords)
        except Exception:  # noqa: BLE001 - ATen refuses arguments by any exception
            return None
        found = found if isinstance(found, tuple) else (found,)
        # Without elements some kernels of ATen's make results of negative sizes.
        return None if any(isinstance(x, torch.Tensor) and min(x.shape, default=0) < 0 for x in found) else found
    return None


def draw(op: Op, seed: int, number: int) -> Call:
    """Return the call of an overload that a seed and a number determine."""
    return Drawer(op, seed, number).draw()
