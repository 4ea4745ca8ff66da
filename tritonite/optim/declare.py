"""`rule`: make an optimiser's update of a scalar formula. A step of all parameters is one launch a dtype."""

from __future__ import annotations

import collections
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritonite import devices
from tritonite.dtypes import FLOATS, Promotion
from tritonite.dynamic import Overload, compiled_formula, registered_overload, scalar_function
from tritonite.engine.lists.elementwise import Elements, Numbers, apply
from tritonite.engine.pointwise.declare import Pointwise
from tritonite.errors import InvalidDeclaration, Unsupported
from tritonite.install import direct
from tritonite.registry import Declaration, HostFunction, LibraryFormulas
from tritonite.runtime.locks import fork_safe_lock

_NAMESPACE = "tritonite_optim"
_BUILT_IN = "tritonite.optim.rules"
_lock = fork_safe_lock()
_names: collections.Counter[str] = collections.Counter()


def rule(
    function: Callable[..., Any] | None = None,
    *,
    state: Sequence[str] = (),
    numbers: Sequence[str] = (),
    elements: Sequence[str] = (),
    flags: Sequence[str] = (),
    exact: Sequence[str] = (),
) -> Any:
    """Make an update rule of a scalar function in Triton's language. Use it as a decorator.

        @tritonite.optim.rule(state=("momentum",), numbers=("lr", "beta"))
        def signed_momentum(param, grad, momentum, lr, beta):
            momentum = beta * momentum + (1 - beta) * grad
            return param - lr * tl.where(momentum > 0, 1.0, -1.0), momentum

    The function's first two parameters are an element of the parameter and of its gradient, under any names. It returns
    the new element of the parameter, followed by those of each state. float16 and bfloat16 elements reach the function
    as float32, and numbers as float32, or as float64 for float64 parameters. A state or number that is not given is
    None, and a state that is None is not returned.

    Args:
        function: the scalar function, decorated with `triton.jit` or not.
        state: parameters that are elements of tensors of the parameter's shape, which the rule updates.
        numbers: parameters that are numbers. A new value needs no new compilation.
        elements: parameters that are read from a tensor of one element for each tensor, such as a step count.
        flags: parameters that are True or False when the rule is compiled.
        exact: elements and numbers that reach the function in float64.

    Returns a `Rule`. Raises InvalidDeclaration for names that are not the function's, or for a function that Triton
    cannot compile.
    """
    settings: dict[str, Any] = {
        "state": state,
        "numbers": numbers,
        "elements": elements,
        "flags": flags,
        "exact": exact,
    }
    for setting, names in settings.items():
        if isinstance(names, str):
            raise InvalidDeclaration(name="rule", reason=f"{setting} is {names!r}, not a tuple of names")
    if function is None:
        return functools.partial(Rule, **settings)
    return Rule(function, **settings)


class Rule:
    """An optimiser's update, made by `rule`. Calls update lists of parameters and states in place.

    A call is an operator in PyTorch's dispatcher, with an overload for each combination of argument kinds, so that its
    plan is replayed as those of ATen's operators are.

    Attributes:
        formula: the scalar function as a `triton.jit` function, for use inside other rules.
        names: the function's parameters.
        state, numbers, elements, flags: names of the function's parameters, as given to `rule`.
        operator: the qualified name in PyTorch's dispatcher, "tritonite_optim::NAME".
    """

    __name__: str
    __qualname__: str

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        state: Sequence[str] = (),
        numbers: Sequence[str] = (),
        elements: Sequence[str] = (),
        flags: Sequence[str] = (),
        exact: Sequence[str] = (),
    ) -> None:
        plain = scalar_function(function)
        functools.update_wrapper(self, plain)
        self.state, self.numbers, self.elements, self.flags = map(tuple, (state, numbers, elements, flags))
        self.names = tuple(inspect.signature(plain).parameters)
        self._check(plain.__name__)
        self.formula = compiled_formula(function)
        roles = {**dict.fromkeys(self.names, "own"), **dict.fromkeys(flags, "static"), **dict.fromkeys(exact, "exact")}
        self._roles = {name: roles[name] for name in self.names}
        self._lists = frozenset((*self.names[:2], *state, *elements))
        self._kernels: dict[tuple[str, ...], Pointwise] = {}
        self._overloads: dict[tuple[str, ...], Overload] = {}
        module = "" if plain.__module__ == _BUILT_IN else f"{plain.__module__}_"
        own = re.sub(r"\W+", "_", f"{module}{plain.__qualname__}").strip("_")
        with _lock:
            _names[own] += 1
            self.operator = f"{_NAMESPACE}::{own}" + (f"_{_names[own]}" if _names[own] > 1 else "")

    def _check(self, name: str) -> None:
        """Raise InvalidDeclaration unless the function's parameters are those that the settings name."""
        declared = (*self.state, *self.elements, *self.numbers, *self.flags)
        if len(self.names) < 2:
            reason = f"it has {len(self.names)} parameters; a rule's first two are a parameter and its gradient"
            raise InvalidDeclaration(name=name, reason=reason)
        if len(set(declared)) < len(declared) or set(declared) != set(self.names[2:]):
            reason = (
                f"its parameters after the first two are {', '.join(self.names[2:]) or 'none'}, "
                f"but state, elements, numbers and flags name {', '.join(declared) or 'none'}"
            )
            raise InvalidDeclaration(name=name, reason=reason)

    def __call__(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], **arguments: Any) -> None:
        """Update parameters and states in place.

        Args:
            params: tensors to update. `grads` has a tensor of the same shape for each.
            arguments: lists of as many tensors for states, and of tensors with one element for `elements`. A number
                is a number, a tensor of one element on the device, or a list with a number for each parameter. States
                and numbers that are not given are None, flags False.

        Raises Unsupported for tensors that no kernel serves, before anything is written.
        """
        values: list[Any] = [list(params), list(grads)]
        values += [arguments.pop(name, None) for name in self.names[2:]]
        if arguments:
            raise TypeError(f"{self.operator} has no parameter {next(iter(arguments))!r}")
        if not values[0]:
            return
        on = values[0][0].device.type
        if on != devices.current.type:
            reason = f"parameters on {on}, where {devices.current.type} is served"
            raise Unsupported(name=self.operator, reason=reason)
        pattern = []
        for i, (name, value) in enumerate(zip(self.names, values, strict=True)):
            if name in self.flags:
                values[i] = bool(value)
                pattern.append("bool")
            elif value is None:
                pattern.append("Tensor?")
            elif isinstance(value, (list, tuple)):
                pattern.append("Tensor[]" if name in self._lists else "Scalar[]")
            else:
                pattern.append("Tensor" if isinstance(value, torch.Tensor) else "Scalar")
        overload = self._overloads.get(tuple(pattern)) or self._overload(tuple(pattern))
        # There is no gradient to record, and autograd's kernel would convert every argument for Python.
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            if overload.kernel is not None and direct.may_pass_by(*values):
                overload.kernel(*values)
            else:
                overload.registered(*values)
        direct.increment_versions(overload.op, tuple(values), {})

    def kernel(self, states: tuple[str, ...]) -> Pointwise:
        """Return the pointwise kernel that updates the parameter and these states."""
        if states not in self._kernels:
            written = [0, *map(self.names.index, states)]
            self._kernels[states] = Pointwise(
                self.__name__,
                self.formula,
                self._roles,
                accepts=FLOATS,
                output_dtypes=(None,) * len(written),
                # Each result has the dtype of the tensor that it replaces.
                methods=tuple([((i,), Promotion.DEFAULT) for i in written]),
            )
        return self._kernels[states]

    def __reduce__(self) -> str:
        # Pickled by name, as functions are; a copy is the object itself.
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<rule {self.operator}>"

    def _overload(self, pattern: tuple[str, ...]) -> Overload:
        """Return the overload for a pattern of argument types, registered on first use."""
        with _lock:
            if pattern not in self._overloads:
                self._overloads[pattern] = registered_overload(self.declaration(pattern))
        return self._overloads[pattern]

    def declaration(self, pattern: tuple[str, ...]) -> Declaration:
        """Return the declaration of an overload. `pattern` has the type of each parameter, as in a schema."""
        kinds = dict(zip(self.names, pattern, strict=True))
        states = tuple([name for name in self.state if kinds[name] == "Tensor[]"])
        kernel = self.kernel(states)
        arguments = []
        special: dict[str, list[str]] = {}
        for i, (name, kind) in enumerate(kinds.items()):
            written = i == 0 or name in states
            arguments.append(f"{f'Tensor({_alias(i)}!)[]' if written else kind} {name}")
            if kind == "Tensor?":
                special.setdefault("without", []).append(name)
            elif kind != "Scalar" and name in self.numbers:
                special.setdefault("tensor" if kind == "Tensor" else "lists", []).append(name)
        suffix = "_".join(["_".join((how, *names)) for how, names in special.items()])
        own = self.operator.partition("::")[2] + (f".{suffix}" if suffix else "")
        return Declaration(
            packets=(f"{_NAMESPACE}::{own}",),
            arguments=self.names,
            optional=frozenset(),
            host=self._host(kernel, states),
            family="optim",
            kernels=(kernel,),
            accepts=FLOATS,
            promotion="own",
            method="",
            watched=False,
            library=LibraryFormulas(f"{own}({', '.join(arguments)}) -> ()", _fake),
        )

    def _host(self, kernel: Pointwise, states: tuple[str, ...]) -> HostFunction:
        names, elements = self.names, frozenset(self.elements)
        lists = self._lists

        def host(values: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
            given = [
                Elements(value)
                if name in elements
                else Numbers(value)
                if isinstance(value, (list, tuple)) and name not in lists
                else value
                for name, value in zip(names, values, strict=True)
            ]
            apply(kernel, given, [value for name, value in zip(names, values, strict=True) if name in written])
            return ()

        written = frozenset((names[0], *states))
        return host


def _fake(*args: Any, **kwargs: Any) -> None:
    """Return the results of a call that writes into its arguments alone."""


def _alias(i: int) -> str:
    """Return the name of an alias set in a schema."""
    return chr(ord("a") + i)
