"""Declarations of operators, and the table of ATen overloads that follows from them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton

from tritonite import devices, dtypes
from tritonite.dtypes import Promotion
from tritonite.engine.pointwise.declare import Pointwise
from tritonite.errors import Decline, InvalidDeclaration, did_you_mean
from tritonite.registry.schema import (
    enumeration,
    has_kernel,
    has_lazy_bits,
    has_names,
    is_out,
    most_dimensions,
    outgrows_storage,
    packet_names,
    python_name,
    raise_if_outgrown,
    schemas,
    takes_numbers,
)
from tritonite.registry.slower import slower_dtypes
from tritonite.runtime.contract import Size, Symbol, decline_if_slower, run_host, settings, under, value_of


class HostFunction(Protocol):
    """What an overload runs: its values without outputs in the declaration's order, and the outputs given, if any.

    It returns what the overload does, one item for each of the schema's returns: tensors, lists of them, numbers, None.
    It raises Decline, before it has written anything, where ATen must serve the call.
    """

    def __call__(self, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> Sequence[Any]: ...


@dataclass(frozen=True)
class LibraryFormulas:
    """What torch.library wants of an operator that ATen does not have.

    `schema` is in PyTorch's language, `fake` gives tensors like the results without computing them, or raises Decline
    where the host function would. `save` and `gradient` are torch.library.register_autograd's `setup_context` and
    `backward`; None where it has no gradient. The `leading` arguments may have any more dimensions before their others,
    and results have them then, too; where they are `broadcast`, those of fewer dimensions need none.
    """

    schema: str
    fake: Callable[..., Any]
    save: Callable[..., None] | None = None
    gradient: Callable[..., Any] | None = None
    leading: tuple[str, ...] = ()
    broadcast: bool = False


@dataclass(frozen=True)
class Declaration:
    """One declared operator: the packets it serves, its argument names, and the host function that runs it.

    A pointwise formula's host function is written by the catalog. `accepts` are dtypes, `promotion` says how arguments
    decide the result's, `method` where a formula is from, `kernels` are the pointwise ones that are launched.

    Of a call's numbers a plan knows the type alone, but the value of those that are `pinned`, on which the host
    function branches, and whether those of `pinned_zero_or_one` are 0 or 1. Unless it takes `lazy_bits`, calls with
    tensors that are conjugated or negated when they are read go to ATen. ATen has the overloads that are `cuda_only`
    on CUDA alone. A host function is `watched` for what it calls of ATen, unless it calls nothing. With `tensors_only`
    it is not called with numbers in the places of tensors. `library` is set of operators outside ATen, in the namespace
    `tritonite`.
    """

    packets: tuple[str, ...]
    arguments: tuple[str, ...]
    optional: frozenset[str]
    host: HostFunction
    family: str
    kernels: tuple[Pointwise, ...]
    accepts: tuple[torch.dtype, ...]
    promotion: str
    method: str
    pinned: frozenset[str] = frozenset()
    pinned_zero_or_one: frozenset[str] = frozenset()
    lazy_bits: bool = False
    cuda_only: frozenset[str] = frozenset()
    watched: bool = True
    tensors_only: bool = False
    library: LibraryFormulas | None = None

    def serves(self, schema: torch.FunctionSchema) -> bool:
        """Whether the schema's arguments, outputs aside, are this declaration's."""
        names = {argument.name for argument in schema.arguments if not is_out(argument)}
        return names <= set(self.arguments) and set(self.arguments) - names <= self.optional


# ATen's iterators take 64 dimensions, of which some formulas add one. Its GPU kernels of some families take 24.
_MOST_DIMENSIONS, _FEW_DIMENSIONS = 63, 24
_OF_FEW_DIMENSIONS = frozenset(
    ("indexing", "rearrangement", "sampling", "scan", "scatter", "searching", "sets", "sorting")
)

declarations: list[Declaration] = []
excluded: dict[str, str] = {}


def exclude(overload: str, reason: str) -> None:
    """Leave an overload to ATen for good; `reason` says why Triton cannot serve it."""
    excluded[overload] = reason


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


def _roles(
    packets: Sequence[str], parameters: Sequence[str], own: Sequence[str], cast: Sequence[str], static: Sequence[str]
) -> dict[str, str]:
    """The role of each parameter of a formula, from the types it has in the packets' schemas."""
    types: dict[str, set[str]] = {}
    for packet in packets:
        for _, schema in schemas(packet):
            for argument in schema.arguments:
                types.setdefault(argument.name, set()).add(str(argument.type))
    roles = {}
    for name in parameters:
        kinds = types.get(name, set())
        if name in own:
            roles[name] = "own"
        elif name in cast:
            roles[name] = "cast"
        elif kinds & {"Tensor", "Optional[Tensor]"}:
            roles[name] = "promoted"
        elif name in static or kinds & {"bool", "str", "Optional[str]"}:
            roles[name] = "static"
        else:
            roles[name] = "cast"
    return roles


def pointwise(
    *packets: str,
    promote: Promotion = Promotion.DEFAULT,
    accepts: tuple[torch.dtype, ...] = dtypes.ALL,
    own: tuple[str, ...] = (),
    cast: tuple[str, ...] = (),
    output_dtypes: tuple[torch.dtype | None, ...] = (None,),
    prepare: Callable[..., Sequence[Any]] | None = None,
    static: tuple[str, ...] = (),
    pin: tuple[str, ...] = (),
    contiguous: bool = False,
    one_dtype: bool = False,
    cpu_numbers: bool = False,
    casts: bool = False,
    truncates: bool = False,
) -> Callable[[Callable[..., Any]], Pointwise]:
    """Declare pointwise operators by their formula, a scalar function in Triton's language.

    The formula's parameters are ATen's argument names. From it follow the functional, in-place and out= overloads of
    the packets, with tensors or numbers for operands, wherever ATen has a kernel of its own.

    Args:
        packets: ATen names without overload or trailing underscore, such as "add". Raises InvalidDeclaration for
            others.
        promote: how the arguments decide the dtype computed in and the dtype of the result.
        accepts: the common dtypes served; ATen serves (or refuses) the others.
        own: tensor arguments that take no part in promotion and keep their dtype, such as a mask.
        cast: arguments that take no part in promotion and are cast to the dtype computed in.
        output_dtypes: for each result, its dtype, or None for the promotion's.
        prepare: a host function from ATen's arguments (by name) to the formula's values, in order; may raise Decline.
        static: parameters of the formula that ATen does not have and that are compile-time constants.
        pin: numbers on whose value `prepare` branches, or with which it computes.
        contiguous: fresh outputs are contiguous, whatever the layout of the arguments.
        one_dtype: ATen refuses tensors of several dtypes, or each of its steps promotes them anew.
        cpu_numbers: ATen takes a 0-d tensor on the CPU for a number, beside tensors on another device.
        casts: ATen writes flags to outputs of any dtype, and floats in place to one of a narrower dtype.
        truncates: ATen cuts the fraction off a number that is cast to integers.
    """

    def declare(formula: Callable[..., Any]) -> Pointwise:
        every = _forms(packets)
        kernel_names = tuple(inspect.signature(formula).parameters)
        kernel = Pointwise(
            packets[0],
            triton.jit(formula),
            _roles(every, kernel_names, own, cast, static),
            promote=promote,
            accepts=accepts,
            output_dtypes=output_dtypes,
            contiguous=contiguous,
            one_dtype=one_dtype,
            cpu_numbers=cpu_numbers,
            casts=casts,
            truncates=truncates,
        )
        declarations.append(
            Declaration(
                packets=every,
                host=_prepared(kernel, prepare),
                family=_family(formula),
                kernels=(kernel,),
                accepts=accepts,
                promotion=promote.value,
                method=_first_line(formula),
                pinned=frozenset((*pin, *(name for name, role in kernel.parameters.items() if role == "static"))),
                watched=prepare is not None,
                **_arguments(prepare or formula),
            )
        )
        return kernel

    return declare


def _forms(packets: Sequence[str]) -> tuple[str, ...]:
    """The packets and their in-place forms, as far as ATen has them. Raises InvalidDeclaration where it has neither."""
    for packet in packets:
        if not schemas(packet) and not schemas(f"{packet}_"):
            hint = did_you_mean(packet, packet_names())
            raise InvalidDeclaration(name=packet, reason=f"ATen has no operator of this name{hint}")
    return tuple(name for packet in packets for name in (packet, f"{packet}_") if schemas(name))


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Their names in schemas, and those that are optional."""
    parameters = inspect.signature(function).parameters.items()
    named = {name[:-1] if name == python_name(name[:-1]) else name: p for name, p in parameters}
    optional = frozenset(name for name, p in named.items() if p.default is not inspect.Parameter.empty)
    return {"arguments": tuple(name for name in named if name != "outs"), "optional": optional}


def _first_line(function: Callable[..., Any]) -> str:
    """Of a docstring, which names the method where that is not the textbook's."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _prepared(kernel: Pointwise, prepare: Callable[..., Sequence[Any]] | None) -> HostFunction:
    """The host function of a formula."""
    if prepare is None:
        return kernel.run
    return lambda values, outs: kernel.run(prepare(*values), outs)


def scalar_kernel(
    *,
    own: tuple[str, ...] = (),
    cast: tuple[str, ...] = (),
    static: tuple[str, ...] = (),
    index: tuple[str, ...] = (),
    integers: tuple[str, ...] = (),
    pointer: tuple[str, ...] = (),
    exact: tuple[str, ...] = (),
    **settings: Any,
) -> Callable[[Callable[..., Any]], Pointwise]:
    """A pointwise kernel that is no operator by itself, for the host function of one.

    Parameters take part in promotion unless they are named in one of the first seven, which are their roles; the other
    settings are Pointwise's.
    """
    named = {"own": own, "cast": cast, "static": static, "exact": exact}
    named |= {"index": index, "integers": integers, "pointer": pointer}
    role_of = {name: role for role, names in named.items() for name in names}

    def declare(formula: Callable[..., Any]) -> Pointwise:
        roles = {name: role_of.get(name, "promoted") for name in inspect.signature(formula).parameters}
        return Pointwise(formula.__name__.lstrip("_"), triton.jit(formula), roles, **settings)

    return declare


def operator(
    *packets: str,
    kernels: tuple[Pointwise, ...] = (),
    accepts: tuple[torch.dtype, ...] = (),
    promotion: str = "",
    pin: tuple[str, ...] = (),
    pin_zero_or_one: tuple[str, ...] = (),
    lazy_bits: bool = False,
    cuda_only: tuple[str, ...] = (),
    tensors_only: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a host function as the implementation of every overload of the packets that has its arguments.

    It is called with ATen's arguments by position and `outs=`, the outputs to write (empty when it allocates them), and
    returns the sequence of results. It raises Decline before it has written anything where ATen must serve.

    Args:
        packets: ATen names without overload or trailing underscore, such as "mm".
        kernels: the pointwise ones it launches, the first of which says what it `accepts` and how it promotes, if
            nothing else does.
        pin: arguments on whose value, a number, it branches. Every other Scalar or float is a number that it may only
            hand on to kernels: one recorded call serves all values.
        pin_zero_or_one: such numbers of which it asks `zero_or_one`.
        lazy_bits: it takes tensors that are conjugated or negated when they are read.
        cuda_only: overloads that ATen has on CUDA alone. Elsewhere they are listed, compiled and may be called
            directly, and are not put in ATen's place.
        tensors_only: numbers in the place of tensors go to ATen.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        arguments = _arguments(function)
        every = _forms(packets)
        declarations.append(
            Declaration(
                packets=every,
                host=lambda values, outs: function(*values, outs=outs),
                family=_family(function),
                kernels=kernels,
                accepts=accepts or kernels[0].accepts,
                promotion=promotion or (kernels[0].promote.value if kernels else "own"),
                method=_first_line(function if not kernels else kernels[0].formula.fn),
                pinned=frozenset(pin),
                pinned_zero_or_one=frozenset(pin_zero_or_one),
                lazy_bits=lazy_bits,
                cuda_only=frozenset(cuda_only),
                tensors_only=tensors_only,
                **arguments,
            )
        )
        return function

    return declare


def library_operator(
    schema: str,
    *,
    fake: Callable[..., Any],
    accepts: tuple[torch.dtype, ...],
    save: Callable[..., None] | None = None,
    gradient: Callable[..., Any] | None = None,
    leading: tuple[str, ...] = (),
    pin: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a host function as an operator outside ATen, `torch.ops.tritonite.<name>`.

    There is nothing to fall back to: where the function raises Decline, a call raises Unsupported with its reason.
    It is called with the schema's arguments by position, and returns the sequence of results; of an operator that
    returns nothing, an empty one.

    Args:
        schema: in PyTorch's language, such as "silu_and_mul(Tensor x, Tensor? y=None) -> Tensor".
        fake: from the same arguments to tensors like the results, with nothing computed; it declines what the function
            does for shapes and dtypes.
        accepts: the dtypes it serves.
        save: `setup_context(ctx, inputs, output)` of torch.library.register_autograd.
        gradient: its `backward(ctx, *grads)`, which calls operators only.
        leading: tensors that may have any more dimensions before their others, which all results have then, too.
        pin: as in `operator`.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        declarations.append(
            Declaration(
                packets=(f"tritonite::{schema.partition('(')[0]}",),
                host=lambda values, outs: function(*values),
                family=_family(function),
                kernels=(),
                accepts=accepts,
                promotion="own",
                method=_first_line(function),
                pinned=frozenset(pin),
                library=LibraryFormulas(schema, fake, save, gradient, leading),
                **_arguments(function),
            )
        )
        return function

    return declare


def library_op(declaration: Declaration) -> Op:
    """The overload of an operator outside ATen, once torch.library has its schema."""
    (name,) = declaration.packets
    packet, _, overload = name.partition(".")
    return overload_of(declaration, name, torch._C._get_schema(packet, overload))


def _family(function: Callable[..., Any]) -> str:
    module = function.__module__
    # A family may be a package of modules.
    return module.split(".")[2] if module.startswith("tritonite.ops.") else module.rpartition(".")[2]
