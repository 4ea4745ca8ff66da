"""A tensor operator made of a scalar formula: from a call's arguments to its results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from tritonite import devices, dtypes
from tritonite.engine.iteration import (
    INT32_LIMIT,
    broadcast_shape,
    collapse,
    common_device,
    contiguous_strides,
    expand_strides,
    never_overlaps_itself,
    output_strides,
    span,
    strides_after_conversion,
)
from tritonite.engine.pointwise import overlap
from tritonite.engine.pointwise.gathered import (
    Gathered,
    as_tuple,
    check_gathered,
    is_aligned,
    one_along,
    strides_in_step,
)
from tritonite.engine.pointwise.overlap import Extent
from tritonite.engine.pointwise.promotion import (
    Argument,
    ComponentsKind,
    ConstantKind,
    Kind,
    TensorKind,
    Typed,
    types_of,
)
from tritonite.engine.pointwise.specialize import IterationSpace, specialize
from tritonite.errors import Decline
from tritonite.runtime import contract
from tritonite.runtime.contract import empty_strided
from tritonite.runtime.launch import Launch, Specialization
from tritonite.runtime.locks import brief
from tritonite.runtime.symbols import Limits, number_type

_ITERATIONS_PER_OPERATOR = 1024


class Laid(Protocol):
    """The metadata of a tensor that decide the strides of a result."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def stride(self) -> Sequence[int]: ...


class Fresh(NamedTuple):
    """The metadata of an output to allocate."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Iteration:
    """The prepared work of all calls of one kind: outputs to allocate, then a launch. Holds no tensors."""

    __slots__ = ("device", "extents", "fresh", "items", "launch", "limits", "operands", "specialization", "summary")

    def __init__(self) -> None:
        self.fresh: tuple[Fresh, ...] = ()
        self.device: torch.device
        self.launch: Launch | None = None
        self.specialization: Specialization | None = None
        self.operands: tuple[Argument, ...] = ()
        self.items: tuple[int, ...] = ()
        self.limits: tuple[tuple[int, Limits], ...] = ()
        self.extents: tuple[Extent, ...] = ()
        self.summary: dict[str, Any] = {}


class Pointwise:
    """A tensor operator made of a scalar formula.

    Args:
        formula: a `triton.jit` function from values to a value or a tuple of them. Values arrive in the dtype the
            promotion computes in, so fp16 and bf16 arrive as float32.
        parameters: the role of each parameter of the formula. None is always a compile-time constant.
            "promoted": a tensor or number that takes part in promotion.
            "cast": one that does not, and is cast to the compute dtype.
            "own": one that keeps its own dtype; fp16 and bf16 become float32.
            "exact": a number in float64, or in int64 if it and the outputs are integers.
            "static": a compile-time constant.
            "index": dimensions of the result, one or a tuple; arrives as the element's coordinate in each. Pinned.
            "integers": one number or a tuple; arrives in the type of coordinates. Pinned.
            "pointer": a `Gathered` operand.
        promote: how the promoted arguments decide the dtype of every output. Without promoted arguments, outputs have
            to be given, and each has its own dtype.
        accepts: the common dtypes it serves; ATen serves the others.
        output_dtypes: a dtype for each output that does not follow the promotion; None for one that does.
        methods: instead of `promote`, for each output, the positions of the arguments that decide its dtype, and how.
        contiguous: whether fresh outputs are contiguous, whatever the layout of the arguments.
        one_dtype: whether tensors of several dtypes are declined instead of promoted.
        cpu_numbers: whether a 0-d CPU tensor serves as a number for tensors on another device.
        casts: whether flags may be stored to an output of any dtype, and floats in place to a narrower dtype.
        truncates: whether a float may be cast to integers, losing its fraction.
        asserting: whether the formula has assertions, which stop the program.
    """

    def __init__(
        self,
        name: str,
        formula: Any,
        parameters: dict[str, str],
        *,
        promote: dtypes.Promotion = dtypes.Promotion.DEFAULT,
        accepts: tuple[torch.dtype, ...] = dtypes.ALL,
        output_dtypes: tuple[torch.dtype | None, ...] = (None,),
        methods: tuple[tuple[tuple[int, ...], dtypes.Promotion], ...] | None = None,
        contiguous: bool = False,
        one_dtype: bool = False,
        cpu_numbers: bool = False,
        casts: bool = False,
        truncates: bool = False,
        asserting: bool = False,
    ) -> None:
        self.name = name
        self.formula = formula
        self.parameters = parameters
        self.accepts = accepts
        self.output_dtypes = output_dtypes
        self.promote = promote
        self._contiguous = contiguous
        self.asserting, self.truncates = asserting, truncates
        self.one_dtype, self._cpu_numbers, self._casts = one_dtype, cpu_numbers, casts
        self._roles = tuple(parameters.values())
        self._gathered = not {"index", "pointer"}.isdisjoint(self._roles)
        deciding = tuple(i for i, role in enumerate(self._roles) if role == "promoted")
        self.methods = methods or ((deciding, promote),) * len(output_dtypes)
        self._iterations: dict[tuple[object, ...], Iteration | str] = {}

    def forget_iterations(self) -> None:
        """Drop what is prepared for earlier calls, so that the next call chooses its blocks anew."""
        self._iterations.clear()

    def run(self, values: Sequence[Any], outs: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
        """Return the outputs, written into `outs` where given. Raises Decline before anything is written."""
        iteration = self.iteration(values, outs)
        if iteration.items:
            values = self._with_numbers(values, iteration.items)
        for position, limits in iteration.limits:
            contract.limit(values[position], limits)
        if not outs:
            device = iteration.device
            outs = tuple([empty_strided(f.shape, f.strides, f.dtype, device) for f in iteration.fresh])
        elif iteration.extents:
            overlap.check(iteration.extents, values, outs)
        recorder = contract.recorder()
        if recorder is not None and recorder.dry:
            recorder.promotions.append(iteration.summary)
        if iteration.launch is not None:
            self._launch(iteration, values, outs)
        return tuple(outs)

    def iteration(self, values: Sequence[Any], outs: Sequence[torch.Tensor] = ()) -> Iteration:
        """Return the iteration for these arguments, cached for calls of this kind. Raises Decline."""
        if contract.recorder() is not None:
            # A recorder keeps plans of its own.
            return self._ready(values, outs)
        key: list[object] = [torch.get_default_dtype()]
        for value, role in zip(values, self._roles, strict=True):
            if type(value) is Gathered:
                key.append(value.dims)
                value = value.tensor
            if isinstance(value, torch.Tensor):
                key += (value.dtype, value.shape, value.stride(), value.data_ptr() & 15, value.device)
            elif role in ("static", "index", "integers") or value is None:
                key.append(value)
            else:
                key.append(type(value))
        for out in outs:
            key.append(any([out is value for value in values]))
            key += (out.dtype, out.shape, out.stride(), out.data_ptr() & 15, out.device)
        hashed = tuple(key)
        iteration = self._iterations.get(hashed)
        if iteration is None:
            try:
                iteration = self._ready(values, outs)
            except Decline as decline:
                if not decline.lasting:
                    raise
                iteration = decline.reason
            with brief:
                while len(self._iterations) >= _ITERATIONS_PER_OPERATOR:
                    self._iterations.pop(next(iter(self._iterations)))
                self._iterations[hashed] = iteration
        if isinstance(iteration, str):
            raise Decline(iteration)
        return iteration

    def _after_conversion(self, typed: Typed, strided: Mapping[int, Laid]) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Return shapes and strides of operands, as converted to the common dtype where they have another one."""
        integers = typed.common if self.promote is not dtypes.Promotion.INT_TO_FLOAT else typed.results[0]
        common = typed.common if typed.common.is_floating_point else integers
        return [
            (
                value.shape,
                value.stride()
                if value.dtype is common or self._roles[i] == "own"
                else strides_after_conversion(value.shape, value.stride()),
            )
            for i, value in strided.items()
        ]

    def check(self, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> None:
        """Raise Decline if `run` would for these arguments, but write and allocate nothing."""
        iteration = self.iteration(values, outs)
        for position, limits in iteration.limits:
            contract.limit(values[position], limits)
        if outs and iteration.extents:
            overlap.check(iteration.extents, values, outs)

    def check_dtypes(
        self, outs: Sequence[torch.Tensor], results: Sequence[torch.dtype], operands: Sequence[torch.Tensor]
    ) -> None:
        """Decline outputs of another dtype than the results, unless the operator casts."""
        for out, result in zip(outs, results, strict=True):
            # Only in place: into a wider output ATen computes in that dtype, and some overloads refuse any other.
            floats = result.is_floating_point and out.dtype.is_floating_point and any([out is x for x in operands])
            cast = self._casts and (floats or self.promote is dtypes.Promotion.ALWAYS_BOOL)
            if out.dtype not in dtypes.TRITON_NAMES or (out.dtype is not result and not cast):
                raise Decline(f"output is {out.dtype}, the result {result}")

    @staticmethod
    def _with_numbers(values: Sequence[Any], items: tuple[int, ...]) -> Sequence[Any]:
        """Return the values, with tensors that serve as numbers replaced by their numbers."""
        found = list(values)
        for i in items:
            found[i] = contract.number_in(found[i])
        return found

    @staticmethod
    def _launch(iteration: Iteration, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> None:
        assert iteration.launch is not None
        operands = []
        for position, how, component in iteration.operands:
            value = values[position]
            if how == "pointer":
                value = value.tensor
            elif how == "stride":
                value = value.tensor.stride(value.dims[component])
            elif how == "integer":
                value = value[component] if type(value) is tuple else value
            operands.append(int(value) if type(value) is bool else value)
        iteration.launch(operands, outs)

    def _ready(self, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> Iteration:
        iteration = self._make_iteration(values, outs)
        if iteration.specialization is not None:
            iteration.launch = Launch(iteration.specialization, iteration.device)
        return iteration

    def outputs(
        self, values: Sequence[Any], outs: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.device, tuple[Fresh, ...]]:
        """Return the device and the outputs to allocate, none if `outs` are given. Raises Decline as a call would.

        Only metadata of tensors is read, so they may be fake.
        """
        iteration, *_ = self._typed_iteration(values, outs)
        return iteration.device, iteration.fresh

    def _typed_iteration(
        self, values: Sequence[Any], outs: Sequence[torch.Tensor]
    ) -> tuple[Iteration, Typed, dict[int, torch.Tensor], tuple[int, ...], bool]:
        """Return the parts of a call that metadata decides.

        The tuple is: an iteration without its kernel, its types, the operands in memory by position, the result's
        shape, and whether all tensors are contiguous and of that shape.
        """
        iteration = Iteration()
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        gathered = [value.tensor for value in values if type(value) is Gathered]
        iteration.device, scalars = common_device((*tensors, *gathered), outs)
        if scalars and (not self._cpu_numbers or len(scalars) > 1 or len(scalars) == len(tensors)):
            raise Decline(f"{len(scalars)} of {len(tensors)} tensors on the CPU")
        kinds: list[Kind] = []
        strided: dict[int, torch.Tensor] = {}
        for i, (value, role) in enumerate(zip(values, self._roles, strict=True)):
            if isinstance(value, torch.Tensor):
                item = bool(scalars) and any([value is scalar for scalar in scalars])
                kinds.append(TensorKind(value.dtype, not value.dim(), item))
                if not item:
                    strided[i] = value
            elif type(value) is Gathered:
                kinds.append(ComponentsKind(value.tensor.dtype, len(value.dims), True))
            elif role in ("index", "integers"):
                is_tuple = type(value) is tuple
                kinds.append(ComponentsKind(None, len(value) if is_tuple else 1, is_tuple))
            elif role == "static" or value is None:
                kinds.append(ConstantKind(type(value), value))
            else:
                kinds.append(number_type(value))
        typed = self._types(tuple(kinds), tuple([out.dtype for out in outs]))
        iteration.operands, iteration.limits = typed.operands, typed.limits
        iteration.items = tuple([i for i, how, _ in typed.operands if how == "item"])
        every = [*strided.values(), *outs]
        shape = tuple(every[0].shape)
        row_major = contiguous_strides(shape)
        # The fast path of most calls: contiguous tensors of one shape. The general path gives the same iteration.
        plain = not scalars and all([value.shape == shape and value.stride() == row_major for value in every])
        if not plain:
            # Without plain operands the outputs have the shape of the result.
            shape = broadcast_shape([value.shape for value in tensors or outs])
        results = typed.results
        iteration.summary = {"common": typed.common, "compute": typed.compute, "results": results, "shape": shape}

        if outs:
            self.check_dtypes(outs, results, tensors)
            _check_outputs(outs, shape)
        else:
            if plain and (not typed.with_numbers or 1 not in shape):
                laid = (row_major,) * len(results)
            else:
                on_cpu = devices.current.aten == "cpu"
                laid = self._result_strides(typed, strided, shape, bool(scalars), on_cpu)
            iteration.fresh = tuple(
                [Fresh(shape, strides, dtype) for strides, dtype in zip(laid, results, strict=True)]
            )
        return iteration, typed, strided, shape, plain

    def _types(self, kinds: tuple[Kind, ...], out_dtypes: tuple[torch.dtype, ...]) -> Typed:
        """Return the dtypes of a call. Raises Decline for dtypes that are not served."""
        return types_of(self, kinds, out_dtypes, torch.get_default_dtype())

    def _result_strides(
        self, typed: Typed, strided: Mapping[int, Laid], shape: tuple[int, ...], has_scalars: bool, on_cpu: bool
    ) -> tuple[tuple[int, ...], ...]:
        """Return the strides that ATen gives each fresh output, for the operands in memory by position."""
        if self._contiguous:
            return (contiguous_strides(shape),) * len(typed.results)
        layout = [(value.shape, value.stride()) for value in strided.values()]
        if on_cpu:
            layout = self._after_conversion(typed, strided)
        return (output_strides(shape, layout, typed.with_numbers or has_scalars),) * len(typed.results)

    def _make_iteration(self, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> Iteration:
        iteration, typed, strided, shape, plain = self._typed_iteration(values, outs)
        if 0 in shape:
            return iteration
        gathered = {i: value for i, value in enumerate(values) if type(value) is Gathered}
        check_gathered(gathered.values(), shape)
        read = strided | {i: value.tensor for i, value in gathered.items()}
        iteration.extents = overlap.extents(outs, shape, list(read.items()), frozenset(gathered))

        out_strides = [out.stride() for out in outs] or [fresh.strides for fresh in iteration.fresh]
        indices = [d for i, role in enumerate(self._roles) if role == "index" for d in as_tuple(values[i])]
        plain = plain and all([own == contiguous_strides(shape) for own in out_strides])
        if plain and not self._gathered and math.prod(shape) > 1:
            flat = tuple([(1,) if how == "tensor" else () for _, how, _ in iteration.operands])
            space = IterationSpace((math.prod(shape),), flat, ((1,),) * len(out_strides))
        else:
            space = self._space(shape, out_strides, strided, gathered, indices, iteration.operands)
        aligned = (
            [is_aligned(values[i], how, component) for i, how, component in iteration.operands],
            [out.data_ptr() % 16 == 0 for out in outs] or [True] * len(typed.results),
        )
        far = any([span(x.shape, x.stride()) >= INT32_LIMIT for x in (value.tensor for value in gathered.values())])
        far = far or any(
            [abs(as_tuple(values[i])[k]) >= INT32_LIMIT for i, how, k in iteration.operands if how == "integer"]
        )
        units = tuple([(i, tuple([x.stride(d) == 1 for d in dims])) for i, (x, dims) in gathered.items()])
        iteration.specialization = specialize(typed.kernel, space, aligned, units, far)
        return iteration

    def _space(
        self,
        shape: tuple[int, ...],
        out_strides: Sequence[tuple[int, ...]],
        strided: dict[int, torch.Tensor],
        gathered: dict[int, Gathered],
        indices: Sequence[int],
        operands: Sequence[Argument],
    ) -> IterationSpace:
        """Return the collapsed iteration space.

        `strided` and `gathered` map positions to operands; `indices` are the dimensions of the coordinates.
        """
        in_strides = [expand_strides(value.shape, value.stride(), shape) for value in strided.values()]
        in_strides += [strides_in_step(own, shape) for own in gathered.values()]
        in_strides += [one_along(d, len(shape)) for d in indices]
        sizes, merged = collapse(shape, [list(own) for own in out_strides] + in_strides)
        every = [tuple(own) for own in merged]
        outer, inner = len(out_strides), len(every) - len(indices)
        of_value = dict(zip((*strided, *gathered), every[outer:inner], strict=True))
        return IterationSpace(
            tuple(sizes),
            tuple([of_value[i] if how in ("tensor", "pointer") else () for i, how, _ in operands]),
            # One element: a unit stride, so that a formula's block of values is stored as a masked block.
            ((1,),) * outer if math.prod(shape) == 1 and self._gathered else tuple(every[:outer]),
            tuple(every[inner:]),
        )


def _check_outputs(outs: Sequence[torch.Tensor], shape: tuple[int, ...]) -> None:
    """Decline outputs of another shape, and outputs that overlap themselves."""
    for out in outs:
        if tuple(out.shape) != shape:
            raise Decline(f"output has shape {tuple(out.shape)}, the result {shape}")
        if not never_overlaps_itself(shape, out.stride()):
            raise Decline("output overlaps itself")
