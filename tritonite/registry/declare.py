"""Decorators that declare operators by a pointwise formula, by a host function, or outside ATen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from tritonite import dtypes
from tritonite.dtypes import Promotion
from tritonite.engine.lists.elementwise import Numbers, apply
from tritonite.engine.pointwise.declare import Pointwise
from tritonite.errors import Decline, InvalidDeclaration, did_you_mean
from tritonite.registry.declaration import Declaration, HostFunction, LibraryFormulas, declarations
from tritonite.registry.schema import (
    is_out,
    packet_names,
    python_name,
    schemas,
)
from tritonite.runtime import contract
from tritonite.runtime.interpreter import reading_on_host


def _roles(
    packets: Sequence[str], parameters: Sequence[str], own: Sequence[str], cast: Sequence[str], static: Sequence[str]
) -> dict[str, str]:
    """Return the role of each parameter of a formula, from its types in the packets' schemas."""
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
    **settings: Any,
) -> Callable[[Callable[..., Any]], Pointwise]:
    """Declare pointwise operators by a formula, a scalar function in Triton's language.

    The formula's parameters are ATen's argument names. The packets' functional, in-place and out= overloads
    follow, with tensors or numbers as operands, if ATen has a kernel of its own for them.

    Args:
        packets: ATen names without overload or trailing underscore, such as "add". Raises InvalidDeclaration for names
            that ATen lacks.
        promote: how the arguments decide the dtype computed in and the dtype of the result.
        accepts: promoted dtypes served; ATen serves (or refuses) the others.
        own: tensor arguments that take no part in promotion and keep their dtype, such as a mask.
        cast: arguments that take no part in promotion and are cast to the dtype computed in.
        output_dtypes: for each result, its dtype, or None for the promoted dtype.
        prepare: a host function from ATen's arguments (by name) to the formula's values, in order; may raise Decline.
        static: parameters of the formula that are compile-time constants and not ATen's.
        pin: numbers on whose value `prepare` branches, or with which it computes.
        settings: flags of `Pointwise`, off by default:

            - contiguous: fresh outputs are contiguous, whatever the layout of the arguments
            - one_dtype: tensors of several dtypes decline, because ATen refuses them or promotes in several steps
            - cpu_numbers: ATen takes a 0-d CPU tensor as a number, next to tensors on another device
            - casts: ATen writes bools to outputs of any dtype, and floats in place to a narrower dtype
            - truncates: ATen truncates a number that is cast to integers
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
            **settings,
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
                prepare=prepare,
                formula=kernel,
                **_arguments(prepare or formula),
            )
        )
        return kernel

    return declare


def _forms(packets: Sequence[str]) -> tuple[str, ...]:
    """Return the packets and in-place forms that ATen has. Raises InvalidDeclaration for a packet without either."""
    for packet in packets:
        if not schemas(packet) and not schemas(f"{packet}_"):
            hint = did_you_mean(packet, packet_names())
            raise InvalidDeclaration(name=packet, reason=f"ATen has no operator of this name{hint}")
    return tuple(name for packet in packets for name in (packet, f"{packet}_") if schemas(name))


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the fields `arguments` (parameter names as in schemas) and `optional` of a Declaration."""
    parameters = inspect.signature(function).parameters.items()
    named = {name[:-1] if name == python_name(name[:-1]) else name: p for name, p in parameters}
    optional = frozenset(name for name, p in named.items() if p.default is not inspect.Parameter.empty)
    return {"arguments": tuple(name for name in named if name != "outs"), "optional": optional}


def _first_line(function: Callable[..., Any]) -> str:
    """Return the first line of a docstring, which names the method unless it is the textbook's."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _prepared(kernel: Pointwise, prepare: Callable[..., Sequence[Any]] | None) -> HostFunction:
    """Return the host function of a formula."""
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
    """Make a pointwise kernel for a host function to launch. The kernel is no operator by itself.

    A parameter of the formula takes part in promotion unless one of the arguments names it, which is then its role.
    `settings` and the roles are those of `Pointwise`.
    """
    named = {"own": own, "cast": cast, "static": static, "exact": exact}
    named |= {"index": index, "integers": integers, "pointer": pointer}
    role_of = {name: role for role, names in named.items() for name in names}

    def declare(formula: Callable[..., Any]) -> Pointwise:
        roles = {name: role_of.get(name, "promoted") for name in inspect.signature(formula).parameters}
        return Pointwise(formula.__name__.lstrip("_"), triton.jit(formula), roles, **settings)

    return declare


PrepareLists = Callable[[Sequence[Any]], Callable[..., Sequence[Any]]]


def over_lists(
    *kernels: Pointwise, name: str = "", prepare: PrepareLists | None = None, launched: Pointwise | None = None
) -> None:
    """Declare `_foreach_<name>` for declared pointwise operators: each tensor of a list is computed by the formula.

    The arguments of each overload, by their order, are those of the formula or of its `prepare`. An overload without
    `alpha` has an alpha of 1.

    Args:
        name: the name of the list operator, by default the kernel's.
        prepare: a function from the arguments of a call over lists to the function that prepares those of each tensor,
            if it is not that of the pointwise operator.
        launched: the formula to launch, with the promotion of the pointwise operator's, if it is not that one.
    """
    for kernel in kernels:
        own = next(declaration for declaration in declarations if declaration.kernels == (kernel,))
        packets = _forms([f"_foreach_{name or kernel.name}"])
        kinds = {
            tuple((argument.name, str(argument.type)) for argument in schema.arguments if not is_out(argument))
            for packet in packets
            for _, schema in schemas(packet)
        }
        by_names: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
        for arguments in sorted(kinds):
            by_names.setdefault(tuple(n for n, _ in arguments), set()).add(tuple(kind for _, kind in arguments))
        for names, types in by_names.items():
            declarations.append(_lists_declaration(own, packets, names, types, prepare, launched or kernel))


def _lists_declaration(
    own: Declaration,
    packets: tuple[str, ...],
    arguments: tuple[str, ...],
    types: set[tuple[str, ...]],
    prepare: PrepareLists | None,
    kernel: Pointwise,
) -> Declaration:
    """Return the declaration of the overloads with these arguments, which have `types` in one of them each."""
    missing = (1,) if "alpha" in own.arguments and "alpha" not in arguments else ()
    # ATen reads a tensor named `scalars` as a list of numbers, any other as one number for all tensors.
    vectors = tuple(
        name == "scalars" and any(kinds[i] == "Tensor" for kinds in types) for i, name in enumerate(arguments)
    )

    def host(values: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
        given = [_in_list(value, vector) for value, vector in zip(values, vectors, strict=True)]
        _check_single(given)
        if outs and outs[0] is not values[0]:
            _check_outputs(outs[0], given)
        results = apply(kernel, [*given, *missing], outs, prepare(values) if prepare else own.prepare)
        return () if outs else results

    return Declaration(
        packets=packets,
        arguments=arguments,
        optional=frozenset(),
        host=host,
        family="foreach",
        kernels=(kernel,),
        accepts=own.accepts,
        promotion=own.promotion,
        method=own.method,
        read_on_host=frozenset(arguments) & {"scalars"},
        pinned=frozenset(name for name, pinned in zip(arguments, own.arguments, strict=False) if pinned in own.pinned),
        prepare=own.prepare,
    )


def _check_single(values: Sequence[Any]) -> None:
    """Decline a tensor for all tensors that is on another device: ATen reads it as a number, or raises."""
    for value in values:
        if isinstance(value, torch.Tensor) and values[0] and value.device != values[0][0].device:
            raise Decline(f"a tensor on {value.device} for all tensors on {values[0][0].device}")


def _in_list(value: Any, vector: bool) -> Any:
    """Return an argument of a list operator as `apply` takes it.

    Lists of numbers become `Numbers`, and so does a tensor that is a `vector` of numbers.
    """
    if isinstance(value, (list, tuple)):
        return value if all([isinstance(item, torch.Tensor) for item in value]) else Numbers(value)
    if not isinstance(value, torch.Tensor):
        return value
    if not vector:
        if value.dim():
            raise Decline(
                f"a tensor of shape {tuple(value.shape)} for all tensors; one element without dimensions is served"
            )
        return value
    if value.device.type != "cpu" or value.dim() != 1 or not value.is_contiguous() or value.is_complex():
        raise Decline(
            f"numbers in a tensor of {value.dtype} and shape {tuple(value.shape)} on {value.device}; "
            "a contiguous vector of real numbers on the CPU is served"
        )
    contract.unrepeatable("numbers in a tensor on the CPU")
    with reading_on_host():
        return Numbers(value.tolist())


def _check_outputs(outs: Sequence[torch.Tensor], values: Sequence[Any]) -> None:
    """Decline an output that is an argument, but of another dtype than the other tensors at its index.

    In place ATen converts a result to the dtype of its output; for a given output it does not.
    """
    lists = [value for value in values if isinstance(value, (list, tuple)) and not isinstance(value, Numbers)]
    for i, out in enumerate(outs):
        own = [value[i] for value in lists if i < len(value)]
        own += [value for value in values if isinstance(value, torch.Tensor)]
        if any([x is out for x in own]) and any([x.dtype is not out.dtype for x in own]):
            raise Decline(f"output of dtype {out.dtype}, which is an argument next to tensors of other dtypes")


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
    """Declare a host function as the implementation of every overload of the packets with its arguments.

    The function is called with ATen's arguments by position and `outs=`, the outputs to write, empty if it allocates
    them. It returns the sequence of results. For a call that ATen must serve, it raises Decline before it has written
    anything.

    Args:
        packets: ATen names without overload or trailing underscore, such as "mm".
        kernels: pointwise kernels that it launches. The first one gives the defaults of `accepts` and `promotion`.
        accepts: dtypes served.
        promotion: how the arguments decide the result's dtype, for tables.
        pin: numbers on whose value it branches. Other Scalars and floats arrive as symbols to hand on to kernels, so
            that one plan serves all values.
        pin_zero_or_one: numbers for which it calls `zero_or_one`.
        lazy_bits: tensors with a lazy conjugation or negation are served.
        cuda_only: overloads that ATen has on CUDA only. On other devices they are listed, compiled and called directly,
            but do not override ATen.
        tensors_only: a number for a tensor argument declines the call.
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
    undivided: Callable[..., bool] | None = None,
    pin: tuple[str, ...] = (),
    draws: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a host function as an operator outside ATen, `torch.ops.tritonite.<name>`.

    The function is called with the schema's arguments by position, and returns the sequence of results, which may be
    empty. No ATen kernel is behind the operator: if the function raises Decline, the call raises Unsupported with the
    reason.

    Args:
        schema: in PyTorch's schema language, such as "silu_and_mul(Tensor x, Tensor? y=None) -> Tensor".
        fake: returns tensors like the results for the same arguments, and declines the same shapes and dtypes.
        accepts: dtypes served.
        save: `setup_context(ctx, inputs, output)` of torch.library.register_autograd.
        gradient: `backward(ctx, *grads)` of torch.library.register_autograd, which calls operators only.
        leading: tensors that may have more dimensions in front, which all results then also have.
        undivided: for arguments by name, returns whether results depend on each leading tensor as a whole after all.
        pin: as in `operator`.
        draws: the function draws random numbers. torch.compile then keeps the order of its calls.
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
                library=LibraryFormulas(schema, fake, save, gradient, leading, draws=draws, undivided=undivided),
                **_arguments(function),
            )
        )
        return function

    return declare


def _family(function: Callable[..., Any]) -> str:
    module = function.__module__
    # A family may be a package of modules.
    return module.split(".")[2] if module.startswith("tritonite.ops.") else module.rpartition(".")[2]
