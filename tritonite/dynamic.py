"""`pointwise_dynamic`: a scalar function becomes a tensor operator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.runtime.jit import KernelInterface

from tritonite.dispatch.call import empty_strided
from tritonite.dtypes import Promotion
from tritonite.engine.pointwise import Pointwise
from tritonite.errors import Decline, InvalidDeclaration, Unsupported

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
    """Make a tensor operator of a scalar function, written in Triton's language and decorated with `triton.jit` or not.

    Usable bare, with `()` or with arguments. The operator broadcasts, promotes, takes any strides, and accepts Python
    numbers for tensors. `out0=`, `out1=`, ... name destinations to write instead of allocating.

    Args:
        num_inputs: how many parameters the function has; checked when given.
        is_tensor: for each parameter, whether it is a tensor; the others are Python numbers. Default: all are.
        dtypes: for each parameter, the Python type (int, float, bool) of a number; None for a tensor.
        num_outputs: how many values the function returns. Default: one, or as many as the other arguments say.
        output_dtypes: for each output, a dtype that overrides the promotion; None to keep it.
        promotion_methods: for each output, `(i, j, ..., kind)`: the positions of the parameters that decide its dtype,
            and how: "DEFAULT", "NO_OPMATH", "INT_TO_FLOAT", "ALWAYS_BOOL" or "BOOL_TO_LONG" (see `Promotion`).
            Default: all tensors, "DEFAULT".

    Half-precision values reach the function as float32. Raises InvalidDeclaration for arguments that contradict each
    other, and the operator raises Unsupported for tensors it cannot take.
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
    if getattr(function, "__name__", "") == "<lambda>":
        raise InvalidDeclaration(name="a lambda", reason="Triton compiles functions written with def alone")
    formula = function if isinstance(function, KernelInterface) else triton.jit(function)
    plain = formula.fn
    name = plain.__name__
    parameters = tuple(inspect.signature(plain).parameters)
    for what, given in (("num_inputs", num_inputs), ("is_tensor", is_tensor), ("dtypes", number_types)):
        count = given if isinstance(given, int) else len(given) if given is not None else len(parameters)
        if count != len(parameters):
            raise InvalidDeclaration(name=name, reason=f"{what} says {count} parameters, it has {len(parameters)}")
    counts = {len(given) for given in (output_dtypes, promotion_methods) if given is not None}
    if num_outputs is not None:
        counts.add(num_outputs)
    if len(counts) > 1:
        raise InvalidDeclaration(name=name, reason=f"its arguments speak of {sorted(counts)} outputs")
    outputs = counts.pop() if counts else 1
    tensors = tuple(is_tensor) if is_tensor is not None else None
    if tensors is None:
        tensors = (
            tuple(kind is None for kind in number_types) if number_types is not None else (True,) * len(parameters)
        )
    if not any(tensors):
        raise InvalidDeclaration(name=name, reason="it has no tensor parameter")
    methods = []
    for method in promotion_methods if promotion_methods is not None else [()] * outputs:
        *positions, kind = method if method else ("DEFAULT",)
        if isinstance(kind, str):
            if kind.upper() not in Promotion.__members__:
                raise InvalidDeclaration(name=name, reason=f"no promotion is called {kind!r}")
            kind = Promotion[kind.upper()]
        if any(not 0 <= position < len(parameters) for position in positions):
            raise InvalidDeclaration(name=name, reason=f"promotion {method} names a parameter it does not have")
        methods.append((tuple(positions) or tuple(i for i, own in enumerate(tensors) if own), kind))
    return PointwiseFunction(
        formula, name, parameters, tensors, tuple(methods), tuple(output_dtypes or [None] * outputs)
    )


class PointwiseFunction:
    """What `pointwise_dynamic` makes. `formula` is the scalar function, for use inside other kernels."""

    def __init__(
        self,
        formula: Any,
        name: str,
        parameters: tuple[str, ...],
        tensors: tuple[bool, ...],
        methods: tuple[tuple[tuple[int, ...], Promotion], ...],
        output_dtypes: tuple[torch.dtype | None, ...],
    ) -> None:
        self.formula = formula
        self._tensors = tensors
        self._signature = inspect.signature(formula.fn)
        self._output_dtypes = output_dtypes
        self._kernel = Pointwise(
            name,
            formula,
            dict.fromkeys(parameters, "own"),
            output_dtypes=output_dtypes,
            methods=methods,
        )
        functools.update_wrapper(self, formula.fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator. Outputs are returned as one tensor, or a tuple where there are several."""
        count = len(self._output_dtypes)
        given = [kwargs.pop(f"out{i}", None) for i in range(count)]
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = tuple(bound.arguments.values())
        for value, tensor, parameter in zip(values, self._tensors, bound.arguments, strict=True):
            if isinstance(value, torch.Tensor) and not tensor:
                raise Unsupported(name=self._kernel.name, reason=f"{parameter} is declared a number, not a tensor")
        try:
            outs: Sequence[torch.Tensor] = ()
            if any(out is not None for out in given):
                fresh = self._kernel.iteration(values).fresh
                device = next(out.device for out in given if out is not None)
                outs = [
                    empty_strided(f.shape, f.strides, f.dtype, device) if out is None else out
                    for out, f in zip(given, fresh, strict=True)
                ]
            results = self._kernel.run(values, outs)
        except Decline as decline:
            raise Unsupported(name=self._kernel.name, reason=decline.reason) from None
        return results[0] if count == 1 else results
