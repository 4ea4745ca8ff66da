"""Overloads with a kernel, and the checks of a call before the host function runs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritonite import devices
from tritonite.errors import Decline, InvalidDeclaration
from tritonite.registry import overrides
from tritonite.registry.declaration import Declaration, declarations, excluded
from tritonite.registry.schema import (
    default_of,
    enumeration,
    has_kernel,
    has_lazy_bits,
    has_names,
    is_out,
    most_dimensions,
    outgrows_storage,
    raise_if_outgrown,
    schemas,
    takes_numbers,
)
from tritonite.registry.slower import slower_dtypes
from tritonite.runtime.contract import decline_if_slower, run_host, settings, under
from tritonite.runtime.symbols import Size, SlotKind, Symbol, value_of

# ATen's iterators have at most 64 dimensions, and some formulas add one. GPU kernels of some families have 24.
_MOST_DIMENSIONS, _FEW_DIMENSIONS = 63, 24
_FAMILIES_OF_FEW_DIMENSIONS = frozenset(
    ("indexing", "rearrangement", "sampling", "scan", "scatter", "searching", "sets", "sorting")
)


@dataclass(frozen=True)
class Op:
    """An overload with a kernel. Call it with ATen's arguments; it raises Decline for calls that ATen must serve.

    Args:
        overload: the name for `enable()`, such as "add.Tensor".
        positions: for each argument of the declaration, its index among `names`, or None if the schema lacks it.
        names: the schema's arguments without out= arguments.
        defaults: their defaults, None for those without one.
        out_names: the out= arguments.
        inplace: whether the operator writes its first argument.
    """

    overload: str
    schema: torch.FunctionSchema
    declaration: Declaration
    positions: tuple[int | None, ...]
    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    out_names: tuple[str, ...]
    inplace: bool

    @property
    def family(self) -> str:
        return self.declaration.family

    @property
    def packet(self) -> str:
        """The operator's name without overload and without the underscore of in-place forms."""
        packet = self.overload.partition(".")[0]
        return packet if packet.endswith("__") else packet.removesuffix("_")

    @functools.cached_property
    def takes_tensors(self) -> tuple[bool, ...]:
        """For each argument of the schema, whether it is a tensor, an optional tensor or a list of tensors."""
        return tuple("Tensor" in str(argument.type) for argument in self.schema.arguments)

    @functools.cached_property
    def takes_lists(self) -> bool:
        """True if the first argument is a list of tensors."""
        return str(self.schema.arguments[0].type) == "List[Tensor]"

    @functools.cached_property
    def written(self) -> tuple[int, ...]:
        """Indices of the schema's arguments that the operator writes."""
        infos = [argument.alias_info for argument in self.schema.arguments]
        return tuple(i for i, info in enumerate(infos) if info is not None and info.is_write)

    @functools.cached_property
    def writes(self) -> bool:
        """True if the operator writes an argument, also running statistics that the schema does not mark."""
        return bool(self.written) or "running_mean" in self.names

    @functools.cached_property
    def versioned(self) -> tuple[int, ...]:
        """Indices of the written lists whose version counters ATen's kernel increments.

        For `_foreach_` operators PyTorch leaves that to the kernel. For tensors it increments them before the kernel.
        """
        return self.written if self.overload.startswith("_foreach_") else ()

    @functools.cached_property
    def slots(self) -> tuple[SlotKind, ...]:
        """For each argument of the schema, how much of a number in it a key holds."""
        declaration = self.declaration

        def kind(argument: Any) -> SlotKind:
            if not takes_numbers(argument) or argument.name in declaration.pinned:
                return SlotKind.PINNED
            if argument.name in declaration.read_on_host and argument.type.kind() == "TensorType":
                return SlotKind.READ_ON_HOST
            return SlotKind.ZERO_OR_ONE if argument.name in declaration.pinned_zero_or_one else SlotKind.TYPE_ONLY

        return tuple(map(kind, self.schema.arguments))

    @functools.cached_property
    def keywords(self) -> tuple[str, ...]:
        """Keyword-only arguments, which come last in the schema."""
        return tuple(argument.name for argument in self.schema.arguments if argument.kwarg_only)

    @functools.cached_property
    def positional(self) -> int:
        """Number of positional arguments."""
        return len(self.schema.arguments) - len(self.keywords)

    @functools.cached_property
    def host(self) -> Callable[..., Any]:
        """The host function: the declaration's, or one that asks the current device for a vendor's first."""
        return overrides.host_of(self.overload, self.declaration.host)

    @functools.cached_property
    def enumerations(self) -> tuple[tuple[int, str, type], ...]:
        """(index, name, class) of each argument of the schema that is a dtype, a layout or a memory format."""
        classes = ((i, argument.name, enumeration(argument)) for i, argument in enumerate(self.schema.arguments))
        return tuple((i, name, kind) for i, name, kind in classes if kind is not None)

    @functools.cached_property
    def may_see_lazy_bits(self) -> bool:
        """True if PyTorch may pass tensors with a lazy conjugation or negation, and the operator serves none."""
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return not self.declaration.lazy_bits and any(has(self.qualified, key) for key in ("Conjugate", "Negative"))

    @property
    def most_dimensions(self) -> int:
        """The most dimensions of a tensor that is served, as in ATen's GPU kernels of the family."""
        return _FEW_DIMENSIONS if self.family in _FAMILIES_OF_FEW_DIMENSIONS else _MOST_DIMENSIONS

    @functools.cached_property
    def slower_dtypes(self) -> frozenset[torch.dtype]:
        """Dtypes of the first tensor in which ATen is faster for every shape."""
        return slower_dtypes(devices.current.kind, self.packet)

    @property
    def has_place(self) -> bool:
        """True if ATen has a kernel to override on this device."""
        return self.overload not in self.declaration.cuda_only or devices.current.aten == "cuda"

    @property
    def verified(self) -> bool:
        """True if `enable()` selects the overload on this kind of device even without its name."""
        return devices.current.unverified.isdisjoint((self.family, self.packet))

    @property
    def qualified(self) -> str:
        """The name with its namespace, such as "aten::add.Tensor"."""
        return self.overload if "::" in self.overload else f"aten::{self.overload}"

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[torch.Tensor]]:
        """Return (values in the declaration's order, given outputs) for a call with ATen's arguments."""
        given = len(args)
        values = [*args, *self.defaults[given:]]
        outs: list[torch.Tensor] = []
        if kwargs:
            for i in range(given, len(self.names)):
                if self.names[i] in kwargs:
                    values[i] = kwargs[self.names[i]]
            outs = [kwargs[name] for name in self.out_names]
        elif self.inplace:
            outs = [values[0]]
        if self.inplace:
            outs = [values[0]]
        return [None if i is None else values[i] for i in self.positions], outs

    # Positional-only, because a schema may have an argument called self.
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        results = self.plain(self.results(args, kwargs))
        return results[0] if len(results) == 1 else results or None

    def plain(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """Replace data-dependent sizes among the results by numbers, or by bools if the schema says so."""
        if not any(type(result) is Size for result in results):
            return tuple(results)
        flags = [str(returned.type) == "bool" for returned in self.schema.returns]
        numbers = map(value_of, results)
        return tuple([bool(number) if flag else number for number, flag in zip(numbers, flags, strict=True)])

    def results(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Check the arguments, run the host function and return the sequence of its results."""
        self._refuse_unserved((*args, *kwargs.values()) if kwargs else args)
        for i, name, kind in self.enumerations:
            given = args[i] if i < len(args) else kwargs.get(name)
            if given is not None and type(given) is not kind:
                raise Decline(f"{name} is given as {type(given).__name__}, not as {kind.__name__}")
        if self.declaration.tensors_only:
            pairs = zip(args, self.takes_tensors, strict=False)
            if any(takes and isinstance(value, (Symbol, bool, int, float, complex)) for value, takes in pairs):
                raise Decline("a number for a tensor argument")
        if self.declaration.library is not None and settings().faster_only:
            # Without ATen behind it, nothing could be faster.
            with under(settings()._replace(faster_only=False)):
                bound = self.bind(args, kwargs)
                return run_host(self.host, *bound, self.writes, overload=self.overload)
        if self.slower_dtypes:
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            decline_if_slower(first is not None and first.dtype in self.slower_dtypes)
        bound = self.bind(args, kwargs)
        return run_host(self.host, *bound, self.writes, falls_back=True, overload=self.overload)

    def _refuse_unserved(self, values: Sequence[Any]) -> None:
        """Raise Decline for tensors that no kernel serves, or PyTorch's error for an operator outside ATen."""
        for value in values:
            if outgrows_storage(value):
                if self.declaration.library is not None:
                    raise_if_outgrown(value)
                raise Decline("a tensor that needs more memory than its storage has")
            if self.may_see_lazy_bits and has_lazy_bits(value):
                raise Decline("a tensor that is conjugated or negated when it is read")
            if (rank := most_dimensions(value)) > self.most_dimensions:
                raise Decline(f"a tensor of {rank} dimensions, where at most {self.most_dimensions} are served")
            if has_names(value):
                raise Decline("a tensor with named dimensions")


def overload_of(declaration: Declaration, name: str, schema: torch.FunctionSchema) -> Op:
    """Return the `Op` of a declaration for one of its overloads."""
    arguments = [argument for argument in schema.arguments if not is_out(argument)]
    names = tuple(argument.name for argument in arguments)
    return Op(
        overload=name,
        schema=schema,
        declaration=declaration,
        positions=tuple(names.index(n) if n in names else None for n in declaration.arguments),
        names=names,
        defaults=tuple(map(default_of, arguments)),
        out_names=tuple(argument.name for argument in schema.arguments if is_out(argument)),
        inplace=arguments[0].alias_info is not None and arguments[0].alias_info.is_write,
    )


@functools.lru_cache(maxsize=1)
def overloads() -> dict[str, Op]:
    """Return every overload with a kernel by name, those that ATen has on CUDA only included."""
    key = devices.current.aten_key
    table: dict[str, Op] = {}
    fitted: set[str] = set()
    unfitted: list[str] = []
    for declaration in declarations:
        if declaration.library is not None:
            continue
        known = [found for packet in declaration.packets for found in schemas(packet)]
        fitting = [(name, schema) for name, schema in known if declaration.serves(schema)]
        for name, schema in fitting:
            if name in excluded or name in table:
                continue
            if name in declaration.cuda_only or has_kernel(name, key):
                table[name] = overload_of(declaration, name, schema)
        fitted |= {name.partition(".")[0] for name, _ in fitting}
        unfitted += declaration.packets[:1] if known and not fitting else ()
    # An operator may be declared once for each name that releases of torch give an argument.
    for packet in unfitted:
        if packet not in fitted:
            raise InvalidDeclaration(name=packet, reason="no ATen overload has its arguments")
    for error in overrides.unknown(table):
        warnings.warn(str(error), stacklevel=2)
    return dict(sorted(table.items()))


def library_op(declaration: Declaration) -> Op:
    """Return the `Op` of an operator outside ATen, whose schema torch.library has."""
    (name,) = declaration.packets
    packet, _, overload = name.partition(".")
    return overload_of(declaration, name, torch._C._get_schema(packet, overload))
