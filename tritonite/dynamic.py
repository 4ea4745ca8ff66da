"""`pointwise_dynamic`: make a tensor operator of a scalar function."""

# Over 500 lines: one class, and the checks of the settings that only it has.

from __future__ import annotations

import collections
import functools
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch.autograd import forward_ad
from triton.runtime.jit import KernelInterface

from tritonite import devices
from tritonite.dtypes import Promotion
from tritonite.engine.pointwise.declare import Pointwise
from tritonite.errors import InvalidArgument, InvalidDeclaration, NoGradient, Unsupported
from tritonite.install import direct, library, override, python
from tritonite.language.source import enclosed, refused_names, result_counts, returns_nothing, without_enclosed
from tritonite.registry import Declaration, HostFunction, LibraryFormulas, Op
from tritonite.runtime.contract import empty_strided
from tritonite.runtime.locks import fork_safe_lock

PromotionMethod = tuple[Any, ...]


def pointwise_dynamic(
    function: Callable[..., Any] | None = None,
    *,
    num_inputs: int | None = None,
    is_tensor: Sequence[bool] | None = None,
    dtypes: Sequence[type | None] | None = None,
    num_outputs: int | None = None,
    output_dtypes: Sequence[torch.dtype | None] | None = None,
    promotion_methods: Sequence[PromotionMethod] | None = None,
) -> Any:
    """Make a tensor operator of a scalar function in Triton's language, decorated with `triton.jit` or not.

    Use it as a decorator, with or without arguments. The operator broadcasts its tensors to a common shape, promotes
    dtypes as PyTorch does, takes any strides, and accepts Python numbers in place of tensors. Keyword arguments
    `out0=`, `out1=`, ... pass tensors to write the results to. float16 and bfloat16 values reach the function as
    float32 (see `Promotion`).

    The operator is registered with PyTorch, so torch.compile, fake tensors and vmap work.
    `PointwiseFunction.gradient` gives it a gradient. Copies and pickles refer to it by name.

    Args:
        function: the scalar function. It takes a value for each parameter and returns a value or a tuple of values.
        num_inputs: the number of parameters; checked when given.
        is_tensor: for each parameter, True for a tensor, False for a Python number. Default: all are tensors.
        dtypes: for each parameter, the Python type (int, float, bool) of a number; None for a tensor.
        num_outputs: the number of values returned. Default: the number that the other arguments or the return
            statements show, else one.
        output_dtypes: for each output, a dtype that replaces the promoted one; None to keep that.
        promotion_methods: for each output, a tuple `(i, j, ..., kind)`. The parameters at these positions decide its
            dtype by the rule `kind`: "DEFAULT", "NO_OPMATH", "INT_TO_FLOAT", "ALWAYS_BOOL" or "BOOL_TO_LONG" (see
            `Promotion`). Default: all tensors, "DEFAULT".

    Returns:
        A PointwiseFunction, or a decorator that makes one if `function` is None.

    Raises:
        InvalidDeclaration: arguments contradict each other or the function, or the function reads an outer variable
            that Triton does not compile; outer numbers must be tl.constexpr.

    A call of the operator raises Unsupported for a tensor it cannot take, such as a DTensor, and InvalidArgument for a
    number of another type than declared. A backward pass without a gradient raises NoGradient.
    """
    settings: dict[str, Any] = {
        "num_inputs": num_inputs,
        "is_tensor": is_tensor,
        "number_types": dtypes,
        "num_outputs": num_outputs,
        "output_dtypes": output_dtypes,
        "promotion_methods": promotion_methods,
    }
    if function is None:
        return functools.partial(_make, **settings)
    return _make(function, **settings)


def _make(
    function: Callable[..., Any],
    *,
    num_inputs: int | None,
    is_tensor: Sequence[bool] | None,
    number_types: Sequence[type | None] | None,
    num_outputs: int | None,
    output_dtypes: Sequence[torch.dtype | None] | None,
    promotion_methods: Sequence[PromotionMethod] | None,
) -> PointwiseFunction:
    """Check the settings of `pointwise_dynamic` against the function, and make the operator."""
    plain = scalar_function(function)
    name, parameters = plain.__name__, tuple(inspect.signature(plain).parameters)
    _check_settings(name, locals())
    for setting, given in (("num_inputs", num_inputs), ("is_tensor", is_tensor), ("dtypes", number_types)):
        count = given if isinstance(given, int) else len(given) if given is not None else len(parameters)
        if count != len(parameters):
            reason = f"{setting} is for {count} parameters, but the function has {len(parameters)}"
            raise InvalidDeclaration(name=name, reason=reason)
    outputs = _output_count(plain, num_outputs, output_dtypes, promotion_methods)
    tensors = (True,) * len(parameters)
    if is_tensor is not None:
        tensors = tuple(is_tensor)
    elif number_types is not None:
        tensors = tuple(kind is None for kind in number_types)
    if not any(tensors):
        raise InvalidDeclaration(name=name, reason="it has no tensor parameter")
    formula = compiled_formula(function)
    methods = promotion_methods if promotion_methods is not None else [()] * outputs
    return PointwiseFunction(
        formula,
        name,
        parameters,
        tensors,
        tuple([_promotion(name, method, tensors) for method in methods]),
        tuple(output_dtypes or [None] * outputs),
        tuple(number_types) if number_types is not None else (),
    )


def _output_count(
    plain: Callable[..., Any],
    num_outputs: int | None,
    output_dtypes: Sequence[torch.dtype | None] | None,
    promotion_methods: Sequence[PromotionMethod] | None,
) -> int:
    """Return the number of outputs. Raises InvalidDeclaration if settings and return statements disagree."""
    counts = {len(given) for given in (output_dtypes, promotion_methods) if given is not None}
    if num_outputs is not None:
        counts.add(num_outputs)
    if len(counts) > 1:
        reason = f"its arguments are for different numbers of outputs: {sorted(counts)}"
        raise InvalidDeclaration(name=plain.__name__, reason=reason)
    returned = result_counts(plain)
    if len(returned | counts) > 1:
        expected = f", but its arguments are for {counts.pop()}" if counts else ""
        reason = f"its return statements give {sorted(returned)} results{expected}"
        raise InvalidDeclaration(name=plain.__name__, reason=reason)
    return (counts or returned or {1}).pop()


def _refuse_outer_variables(plain: Callable[..., Any]) -> None:
    """Raise InvalidDeclaration if the function reads an outer variable that Triton does not compile."""
    for variable, value in refused_names(plain).items():
        advice = "make it a parameter, or a tl.constexpr outside"
        if isinstance(value, PointwiseFunction):
            advice = f"give its formula a name outside, {variable}.formula, and call that"
        reason = f"it reads the variable {variable} from outside, which Triton does not compile: {advice}"
        raise InvalidDeclaration(name=plain.__name__, reason=reason)


def _promotion(name: str, method: PromotionMethod, tensors: tuple[bool, ...]) -> tuple[tuple[int, ...], Promotion]:
    """Return the positions and the rule of an item of `promotion_methods`; () stands for all tensors, "DEFAULT"."""
    *positions, kind = method if method else ("DEFAULT",)
    if isinstance(kind, str):
        if kind.upper() not in Promotion.__members__:
            raise InvalidDeclaration(name=name, reason=f"no promotion is called {kind!r}")
        kind = Promotion[kind.upper()]
    if any(not 0 <= position < len(tensors) for position in positions):
        reason = f"promotion {method} names a position outside its {len(tensors)} parameters"
        raise InvalidDeclaration(name=name, reason=reason)
    return tuple(positions) or tuple(i for i, tensor in enumerate(tensors) if tensor), kind


def compiled_formula(function: Any) -> Any:
    """Return the `triton.jit` function of a scalar function. Raises InvalidDeclaration if Triton cannot compile it."""
    plain = scalar_function(function)
    _refuse_outer_variables(plain)
    if devices.current.interpreted and enclosed(plain):
        return triton.jit(without_enclosed(plain))
    return function if isinstance(function, KernelInterface) else triton.jit(function)


def scalar_function(function: Any) -> Callable[..., Any]:
    """Return the Python function behind a formula. Raises InvalidDeclaration for anything that is not a function."""
    if not callable(function) and not isinstance(function, KernelInterface):
        raise InvalidDeclaration(name=repr(function), reason=f"it is a {type(function).__name__}, not a function")
    plain = getattr(function, "fn", function)
    name = getattr(plain, "__name__", repr(plain))
    if name == "<lambda>":
        raise InvalidDeclaration(name="a lambda", reason="Triton compiles only functions defined with def")
    if not inspect.isfunction(plain):
        reason = f"it is a {type(plain).__name__}; Triton compiles only functions defined with def"
        raise InvalidDeclaration(name=name, reason=reason)
    for parameter in inspect.signature(plain).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            reason = (
                f"its parameter {parameter} is {parameter.kind.description}; a formula has positional parameters only"
            )
            raise InvalidDeclaration(name=name, reason=reason)
    if returns_nothing(plain):
        raise InvalidDeclaration(name=name, reason="it returns nothing; a formula returns a value for each output")
    return plain


# For each setting that is a list: a test of an item, and a description of valid items.
_ITEMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "is_tensor": (lambda item: isinstance(item, bool), "True or False"),
    "number_types": (lambda item: item in (None, bool, int, float), "int, float, bool, or None for a tensor"),
    "output_dtypes": (lambda item: item is None or isinstance(item, torch.dtype), "a torch.dtype or None"),
    "promotion_methods": (
        lambda item: isinstance(item, (tuple, list)) and all(isinstance(each, int) for each in item[:-1]),
        "a tuple of positions and a promotion",
    ),
}


def _check_settings(name: str, settings: dict[str, Any]) -> None:
    """Raise InvalidDeclaration for a setting whose type `pointwise_dynamic` does not take."""
    for setting in ("num_inputs", "num_outputs"):
        given = settings[setting]
        if given is not None and (not isinstance(given, int) or isinstance(given, bool)):
            raise InvalidDeclaration(name=name, reason=f"{setting} is {given!r}, not an int")
    for setting, (fits, expected) in _ITEMS.items():
        given, public = settings[setting], setting.replace("number_types", "dtypes")
        if given is None:
            continue
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise InvalidDeclaration(name=name, reason=f"{public} is {given!r}, not a list")
        for i, item in enumerate(given):
            if not fits(item):
                raise InvalidDeclaration(name=name, reason=f"{public}[{i}] is {item!r}, not {expected}")


class Overload(NamedTuple):
    """One registered overload of an operator that is made of a scalar function.

    Attributes:
        registered: the overload in torch.ops.
        op: the registry's record of the overload.
        kernel: a function that bypasses the dispatcher; None with the native dispatcher.
    """

    registered: Any
    op: Op
    kernel: Callable[..., Any] | None


def registered_overload(declaration: Declaration) -> Overload:
    """Register the overload of a declaration with PyTorch, and return it."""
    library.register([declaration])
    (name,) = declaration.packets
    op = library.registered()[name]
    kernel = None if override.native_dispatcher() is not None else python.override(op, None, devices.default)
    return Overload(library.overload_of(name), op, kernel)


class PointwiseFunction:
    """An operator made by `pointwise_dynamic`, with an overload for each combination of argument kinds.

    An overload is registered with PyTorch on its first call, and stays registered, because compiled graphs call it by
    name.

    Attributes:
        formula: the scalar function as a `triton.jit` function, for use inside other kernels.
        operator: the qualified name in PyTorch's dispatcher, "tritonite_dynamic::NAME".
    """

    __name__: str
    __qualname__: str

    def __init__(
        self,
        formula: Any,
        name: str,
        parameters: tuple[str, ...],
        tensors: tuple[bool, ...],
        methods: tuple[tuple[tuple[int, ...], Promotion], ...],
        output_dtypes: tuple[torch.dtype | None, ...],
        number_types: tuple[type | None, ...] = (),
    ) -> None:
        functools.update_wrapper(self, formula.fn)
        self.formula = formula
        self._parameters = parameters
        self._tensors = tensors
        self._number_types = number_types
        self._signature = inspect.signature(formula.fn)
        self._out_names = tuple([f"out{i}" for i in range(len(output_dtypes))])
        self._kernel = Pointwise(
            name,
            formula,
            dict.fromkeys(parameters, "own"),
            output_dtypes=output_dtypes,
            methods=methods,
        )
        self._gradient: PointwiseFunction | None = None
        self._overloads: dict[tuple[str, ...], Overload] = {}
        self._call_it(f"{formula.fn.__module__}_{formula.fn.__qualname__}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator.

        Args:
            args: the parameters by position; `kwargs` has those by name, and `out0=`, `out1=`, ... as destinations.

        Returns:
            The result tensor, or a tuple of tensors if the function has several outputs. Outputs passed as `outN=` are
            returned themselves.

        Raises Unsupported for an argument that is no tensor or number, or for a tensor where a number is declared;
        InvalidArgument for a number of another type than declared, or an `outN=` that is no tensor.
        """
        outs = {name: kwargs.pop(name) for name in self._out_names if kwargs.get(name) is not None} if kwargs else {}
        values = args if not kwargs and len(args) == len(self._parameters) else self._bound(args, kwargs)
        if self._number_types or outs:
            self._check(values, outs)
        pattern = (
            *["Tensor" if isinstance(value, torch.Tensor) else _KINDS.get(type(value), "") for value in values],
            *outs,
        )
        if torch.compiler.is_dynamo_compiling():
            packet, name = _registered(self.operator, pattern)
            results = getattr(getattr(torch.ops.tritonite_dynamic, packet), name)(*values, **outs)
        else:
            overload = self._overloads.get(pattern) or self._overload(pattern, values)
            if overload.kernel is not None and direct.may_pass_by(*values, *outs.values()):
                results = overload.kernel(*values, **outs)
                direct.increment_versions(overload.op, values, outs)
            else:
                _refuse_unsupported_tensors(self.operator, (*values, *outs.values()))
                results = overload.registered(*values, **outs)
        if not outs:
            return results
        fresh = iter(results if isinstance(results, tuple) else (results,))
        every = tuple([outs[name] if name in outs else next(fresh) for name in self._out_names])
        return every[0] if len(every) == 1 else every

    def gradient(self, formula: Callable[..., Any]) -> PointwiseFunction:
        """Set the operator's gradient, as a decorator of a scalar function.

        The function's parameters are the gradient of each result, followed by the operator's parameters. The function
        returns a gradient for each tensor parameter.

            @pointwise_dynamic
            def product(x, y):
                return x * y


            @product.gradient
            def _(grad, x, y):
                return grad * y, grad * x

        Gradients are computed in the common dtype of all of these tensors. A tensor's gradient is summed over the
        dimensions that the tensor was broadcast in, and is cast to the tensor's dtype. Integer tensors get no gradient.

        Returns the gradients' operator, another PointwiseFunction, which may be given a gradient in turn. Raises
        InvalidDeclaration for a wrong number of parameters or results.
        """
        results, name = len(self._out_names), self._kernel.name
        every = (True,) * results + self._tensors
        count = len(inspect.signature(getattr(formula, "fn", formula)).parameters)
        if count != len(every):
            expected = f"{len(every)}: {results} gradients of results and its own {len(self._tensors)} parameters"
            reason = f"its gradient has {count} parameters, not {expected}"
            raise InvalidDeclaration(name=name, reason=reason)
        self._gradient = pointwise_dynamic(formula, is_tensor=every, num_outputs=sum(self._tensors))
        self._gradient._call_it(f"{self.operator.partition('::')[2]}_backward")
        return self._gradient

    def __reduce__(self) -> str:
        # Pickled by name, as functions are; a copy is the object itself.
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<pointwise_dynamic {self.operator}>"

    def _call_it(self, name: str) -> None:
        """Set the operator's name in the dispatcher, with a number appended if an earlier operator has that name."""
        own = re.sub(r"\W+", "_", name).strip("_")
        with _lock:
            _names[own] += 1
            self.operator = f"{_NAMESPACE}::{own}" + (f"_{_names[own]}" if _names[own] > 1 else "")
            _functions[self.operator] = self

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.operator}{self._signature}: {error}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def _check(self, values: Sequence[Any], outs: dict[str, Any]) -> None:
        """Raise InvalidArgument for a number of another type than declared, or a destination that is no tensor."""
        for parameter, kind, value in zip(self._parameters, self._number_types, values, strict=False):
            if kind is not None and not isinstance(value, (*_FITTING[kind], torch.Tensor)):
                given = f"{value!r} ({type(value).__name__})"
                raise InvalidArgument(
                    name=self.operator, expected=f"a number of type {kind.__name__}", parameter=parameter, given=given
                )
        for name, out in outs.items():
            if not isinstance(out, torch.Tensor):
                raise InvalidArgument(name=self.operator, expected="a tensor", parameter=name, given=repr(out))

    def _overload(self, pattern: tuple[str, ...], values: Sequence[Any] = ()) -> Overload:
        """Return the overload for a pattern of argument kinds ("Tensor", "Scalar", "None"), registered on first use.

        Raises Unsupported for a tensor where a number is declared, or an argument that is neither.
        """
        for i, (parameter, kind, tensor) in enumerate(zip(self._parameters, pattern, self._tensors, strict=False)):
            if kind == "Tensor" and not tensor:
                raise Unsupported(name=self.operator, reason=f"{parameter} is declared a number, not a tensor")
            if not kind:
                given = type(values[i]).__name__ if values else "value of another type"
                raise Unsupported(name=self.operator, reason=f"{parameter} is a {given}, not a tensor or a number")
        with _lock:
            if pattern not in self._overloads:
                self._overloads[pattern] = registered_overload(self._declaration(pattern))
        return self._overloads[pattern]

    def _declaration(self, pattern: tuple[str, ...]) -> Declaration:
        kinds, given = pattern[: len(self._parameters)], pattern[len(self._parameters) :]
        arguments, suffixes = [], []
        for name, kind, tensor in zip(self._parameters, kinds, self._tensors, strict=True):
            arguments.append(f"{'Tensor?' if kind == 'None' else kind} {name}")
            if kind == "None" or (kind == "Scalar" and tensor):
                suffixes.append(f"{kind}_{name}")
        outs = [f"Tensor({chr(ord('a') + i)}!) {name}" for i, name in enumerate(given)]
        fresh = ", ".join(["Tensor"] * (len(self._out_names) - len(given)))
        overload = "".join([f".{'_'.join((*suffixes, *given))}"] if suffixes or given else [])
        own = f"{self.operator.partition('::')[2]}{overload}"
        schema = f"{own}({', '.join([*arguments, *(['*'] if outs else []), *outs])}) -> ({fresh})"
        return Declaration(
            packets=(f"{_NAMESPACE}::{own}",),
            arguments=self._parameters,
            optional=frozenset(),
            host=self._host(given),
            family="dynamic",
            kernels=(self._kernel,),
            accepts=self._kernel.accepts,
            promotion="own",
            method="",
            watched=False,
            library=LibraryFormulas(
                schema, self._fake(given), self._save, self._backward, leading=self._parameters, broadcast=True
            ),
        )

    def _host(self, given: tuple[str, ...]) -> HostFunction:
        kernel, names = self._kernel, self._out_names

        def host(values: Sequence[Any], outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            every = outs
            if outs and len(outs) < len(names):
                device, fresh = kernel.outputs(values)
                remaining = iter(outs)
                every = [
                    next(remaining) if name in given else empty_strided(f.shape, f.strides, f.dtype, device)
                    for name, f in zip(names, fresh, strict=True)
                ]
            results = kernel.run(values, every)
            return [result for name, result in zip(names, results, strict=True) if name not in given]

        return host

    def _fake(self, given: tuple[str, ...]) -> Callable[..., Any]:
        kernel, names = self._kernel, self._out_names

        def fake(*args: Any, **outs: torch.Tensor) -> Any:
            values = [_EXAMPLES.get(type(value), value) for value in args]
            device, fresh = kernel.outputs(values)
            results = [torch.empty_strided(f.shape, f.strides, dtype=f.dtype, device=device) for f in fresh]
            if outs:
                kernel.outputs(values, [outs.get(name, result) for name, result in zip(names, results, strict=True)])
            own = tuple([result for name, result in zip(names, results, strict=True) if name not in given])
            return own[0] if len(own) == 1 else own or None

        return fake

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.gradient = self._gradient
        ctx.numbers = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        ctx.tensor_indices = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        if self._gradient is not None:
            ctx.save_for_backward(*[inputs[i] for i in ctx.tensor_indices])

    def _backward(self, ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.gradient is None:
            raise NoGradient(name=self.operator, function=self.__name__)
        values = list(ctx.numbers)
        for i, value in zip(ctx.tensor_indices, ctx.saved_tensors, strict=True):
            values[i] = value
        results = ctx.gradient(*grads, *values)
        remaining = iter(results if isinstance(results, tuple) else (results,))
        gradients: list[torch.Tensor | None] = []
        for value, tensor, needed in zip(values, self._tensors, ctx.needs_input_grad, strict=True):
            own = next(remaining) if tensor else None
            gradients.append(own.sum_to_size(value.shape).to(value.dtype) if needed and own is not None else None)
        return tuple(gradients)


_NAMESPACE = "tritonite_dynamic"
_lock = fork_safe_lock()
_names: collections.Counter[str] = collections.Counter()
_functions: weakref.WeakValueDictionary[str, PointwiseFunction] = weakref.WeakValueDictionary()
# An argument's type in the schema. PyTorch's compilers trace with symbolic numbers.
_KINDS = {
    **dict.fromkeys((bool, int, float, complex, torch.SymBool, torch.SymInt, torch.SymFloat), "Scalar"),
    type(None): "None",
}
# Types accepted for a number declared as a type: an int for a float, but no float for an int.
_FITTING: dict[type, tuple[type, ...]] = {
    bool: (bool, torch.SymBool),
    int: (int, torch.SymInt),
    float: (int, float, torch.SymInt, torch.SymFloat),
}
_EXAMPLES: dict[type, Any] = {torch.SymBool: True, torch.SymInt: 1, torch.SymFloat: 1.0}


def _registered(operator: str, pattern: tuple[str, ...]) -> tuple[str, str]:
    """Return the names of packet and overload in torch.ops for a pattern of argument kinds."""
    _, _, own = _functions[operator]._overload(pattern).op.overload.partition("::")
    packet, _, overload = own.partition(".")
    return packet, overload or "default"


# Has the effect of torch.compiler.assume_constant_result without importing Dynamo: Dynamo calls the function, and
# does not trace it.
_registered._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _refuse_unsupported_tensors(name: str, values: Sequence[Any]) -> None:
    """Raise Unsupported for a DTensor, or a tensor with a forward-mode tangent.

    The dispatcher would drop the tangent, and refuse a DTensor less clearly.
    """
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is not None and any(isinstance(value, sharded.DTensor) for value in values):
        raise Unsupported(name=name, reason="it has no sharding strategy for a DTensor; give it tensor.to_local()")
    if forward_ad._current_level < 0:
        return
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise Unsupported(name=name, reason="it has no gradient in forward mode; use backward mode")
