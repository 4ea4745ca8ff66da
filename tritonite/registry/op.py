"""An overload with a kernel: which there are, and what a call of one checks before its host function runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritonite import devices
from tritonite.errors import Decline, InvalidDeclaration
from tritonite.registry.declaration import Declaration, declarations, excluded
from tritonite.registry.schema import (
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
from tritonite.runtime.symbols import Size, Symbol, value_of

# ATen's iterators take 64 dimensions, of which some formulas add one. Its GPU kernels of some families take 24.
_MOST_DIMENSIONS, _FEW_DIMENSIONS = 63, 24
_OF_FEW_DIMENSIONS = frozenset(
    ("indexing", "rearrangement", "sampling", "scan", "scatter", "searching", "sets", "sorting")
)


@dataclass(frozen=True)
class Op:
    """An ATen overload with a kernel behind it. Call it with ATen's arguments; it raises Decline where ATen must serve.

    `overload` is the name enable() knows it by, such as "add.Tensor"; `family` the module it is declared in.
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
        """The operator's name without overload, the same for its in-place form."""
        packet = self.overload.partition(".")[0]
        return packet if packet.endswith("__") else packet.removesuffix("_")

    @functools.cached_property
    def takes_tensors(self) -> tuple[bool, ...]:
        """For each argument of the schema whether it is a tensor, an optional one or a list of them."""
        return tuple("Tensor" in str(argument.type) for argument in self.schema.arguments)

    @functools.cached_property
    def written(self) -> tuple[int, ...]:
        """The arguments of the schema that the operator writes into."""
        infos = [argument.alias_info for argument in self.schema.arguments]
        return tuple(i for i, info in enumerate(infos) if info is not None and info.is_write)

    @functools.cached_property
    def writes(self) -> bool:
        """Whether it writes into any argument, running statistics included, of which not every schema tells."""
        return bool(self.written) or "running_mean" in self.names

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """For each argument of the schema what a recorded call knows of numbers that it is given.

        0 for their value, 1 for their type alone, 2 for whether they are 0 or 1, too.
        """
        pinned, partly = self.declaration.pinned, self.declaration.pinned_zero_or_one
        return tuple(
            int(takes_numbers(argument)) * (0 if argument.name in pinned else 2 if argument.name in partly else 1)
            for argument in self.schema.arguments
        )

    @functools.cached_property
    def keywords(self) -> tuple[str, ...]:
        """The arguments that are given by name, which come last in the schema."""
        return tuple(argument.name for argument in self.schema.arguments if argument.kwarg_only)

    @functools.cached_property
    def positional(self) -> int:
        """How many arguments come before those."""
        return len(self.schema.arguments) - len(self.keywords)

    @functools.cached_property
    def enumerations(self) -> tuple[tuple[int, str, type], ...]:
        """The place, name and class of each argument of the schema that is a dtype, a layout or a memory format."""
        classes = ((i, argument.name, enumeration(argument)) for i, argument in enumerate(self.schema.arguments))
        return tuple((i, name, kind) for i, name, kind in classes if kind is not None)

    @functools.cached_property
    def may_see_lazy_bits(self) -> bool:
        """Whether PyTorch hands it tensors that are conjugated or negated when they are read, and it takes none."""
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return not self.declaration.lazy_bits and any(has(self.qualified, key) for key in ("Conjugate", "Negative"))

    @property
    def most_dimensions(self) -> int:
        """The most dimensions of tensors that it takes; kernels of ATen's for GPUs take fewer in some families."""
        return _FEW_DIMENSIONS if self.family in _OF_FEW_DIMENSIONS else _MOST_DIMENSIONS

    @functools.cached_property
    def slower_dtypes(self) -> frozenset[torch.dtype]:
        """Those of a first tensor for which ATen is faster, whatever the shape."""
        return slower_dtypes(devices.current.kind, self.packet)

    @property
    def has_place(self) -> bool:
        """Whether ATen has a kernel on this device that it can take the place of."""
        return self.overload not in self.declaration.cuda_only or devices.current.dispatch_key == "CUDA"

    @property
    def verified(self) -> bool:
        """Whether it takes ATen's place on this kind of device without being named."""
        return devices.current.unverified.isdisjoint((self.family, self.packet))

    @property
    def qualified(self) -> str:
        """The name with its namespace, as the dispatcher knows it."""
        return self.overload if "::" in self.overload else f"aten::{self.overload}"

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[torch.Tensor]]:
        """(values in the declaration's order, outputs given) for a call with ATen's arguments."""
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

    # An argument of the schema's may be called self.
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        results = self.plain(self.results(args, kwargs))
        return results[0] if len(results) == 1 else results or None

    def plain(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """What a call returns to who made it: numbers where data decided them."""
        if not any(type(result) is Size for result in results):
            return tuple(results)
        flags = [str(returned.type) == "bool" for returned in self.schema.returns]
        numbers = map(value_of, results)
        return tuple([bool(number) if flag else number for number, flag in zip(numbers, flags, strict=True)])

    def results(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """What a call returns, as a sequence also where it is one tensor."""
        self._refuse_unserved((*args, *kwargs.values()) if kwargs else args)
        for i, name, kind in self.enumerations:
            given = args[i] if i < len(args) else kwargs.get(name)
            if given is not None and type(given) is not kind:
                raise Decline("a dtype, layout or memory format that is given as something else")
        if self.declaration.tensors_only:
            given = zip(args, self.takes_tensors, strict=False)
            if any(takes and isinstance(value, (Symbol, bool, int, float, complex)) for value, takes in given):
                raise Decline("a number for a tensor")
        if self.declaration.library is not None and settings().faster_only:
            # Behind it is nothing that could be faster.
            with under(settings()._replace(faster_only=False)):
                return run_host(self.declaration.host, *self.bind(args, kwargs), self.writes)
        if self.slower_dtypes:
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            decline_if_slower(first is not None and first.dtype in self.slower_dtypes)
        return run_host(self.declaration.host, *self.bind(args, kwargs), self.writes, falls_back=True)

    def _refuse_unserved(self, values: Sequence[Any]) -> None:
        """Raise Decline for tensors that no kernel serves, or PyTorch's error where no ATen kernel could serve them."""
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
    """What a declaration makes of an overload whose arguments are its own."""
    arguments = [argument for argument in schema.arguments if not is_out(argument)]
    names = tuple(argument.name for argument in arguments)
    return Op(
        overload=name,
        schema=schema,
        declaration=declaration,
        positions=tuple(names.index(n) if n in names else None for n in declaration.arguments),
        names=names,
        defaults=tuple(argument.default_value if argument.has_default_value() else None for argument in arguments),
        out_names=tuple(argument.name for argument in schema.arguments if is_out(argument)),
        inplace=arguments[0].alias_info is not None and arguments[0].alias_info.is_write,
    )


@functools.lru_cache(maxsize=1)
def overloads() -> dict[str, Op]:
    """Every overload that `enable()` would install, and those that ATen has on CUDA alone, by name."""
    key = devices.current.dispatch_key or "CPU"
    table: dict[str, Op] = {}
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
        if known and not fitting:
            raise InvalidDeclaration(name=declaration.packets[0], reason="no ATen overload has its arguments")
    return dict(sorted(table.items()))


def library_op(declaration: Declaration) -> Op:
    """The overload of an operator outside ATen, once torch.library has its schema."""
    (name,) = declaration.packets
    packet, _, overload = name.partition(".")
    return overload_of(declaration, name, torch._C._get_schema(packet, overload))
