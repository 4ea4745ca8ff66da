"""`tritonite explain`: find arguments that ATen takes, and describe the call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated

import torch
import typer

import tritonite
from tritonite.cli.common import app, console, dtypes_named
from tritonite.errors import TritoniteError
from tritonite.install.override import select, unknown
from tritonite.registry import names, overloads
from tritonite.registry.schema import default_of
from tritonite.report.explain import overload_named

# Most combinations of guessed arguments to try.
_MOST_ATTEMPTS = 64
# Shapes of tensors to try without --shape.
_SHAPES = ["64,64", "2,3,16,16", "2,3,8,8,8", "2,16,16", "64", "3,3", "4,1"]


@app.command()
def explain(
    operator: Annotated[
        str, typer.Argument(help="a function, overload or glob, such as softmax, add.Tensor or tritonite::silu_and_mul")
    ],
    shape: Annotated[
        list[str] | None,
        typer.Option(help="shape of each tensor argument, such as 64,64; the last one also serves further tensors"),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="dtype of each tensor argument, such as float16; the last one also serves further tensors"),
    ] = None,
) -> None:
    """Describe a call: path, promotion, kernels and launches, or why ATen serves it."""
    dtypes = dtypes_named(dtype) if dtype else None
    name = operator if operator.startswith("tritonite::") else names.spelled(operator)
    chosen = sorted({overloads()[each].packet for each in select(name)}) if names.is_glob(name) else [name]
    refusals = dict[str, str]()
    for each in chosen:
        text = _explained(each, shape, dtypes, refusals)
        if text:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    if len(refusals) == len(chosen):
        refusal = next(iter(refusals.values()))
        message = (
            f"ATen refuses these arguments: {refusal}"
            if refusal
            else "no valid arguments were found; give --shape and --dtype"
        )
        console.print(message, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2)


def _explained(
    name: str, shape: list[str] | None, dtypes: list[torch.dtype] | None, refusals: dict[str, str]
) -> str | None:
    """Explain a call with the first arguments that ATen accepts.

    If ATen accepts none, add its error to `refusals` and return None.
    """
    attempts = _calls(name, functools.partial(_tensors, shape or _SHAPES[:1], dtypes or [torch.float32]))
    if not shape:
        attempts = itertools.chain(attempts, _fitting(name, dtypes))
    refused = ""
    for args, kwargs in attempts:
        try:
            return tritonite.explain(name, *args, **kwargs)
        except TritoniteError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, AttributeError) as refusal:
            refused = refused or str(refusal)
    refusals[name] = refused
    return None


def _fitting(name: str, dtypes: list[torch.dtype] | None) -> Iterator[tuple[Sequence[object], dict[str, object]]]:
    """Yield further arguments for an operator: those of the tests, then tensors of other shapes."""
    from tritonite.testing.arguments import arguments_for

    for kind in dtypes or [None]:
        yield from arguments_for(name, kind)
    for shape in _SHAPES[1:]:
        yield from _calls(name, functools.partial(_tensors, [shape], dtypes or [torch.float32]))


def _tensors(shapes: list[str], dtypes: list[torch.dtype]) -> Iterator[torch.Tensor]:
    """Yield a call's tensors endlessly; the last shape and dtype repeat."""
    pairs = zip(*(itertools.chain(each, itertools.repeat(each[-1])) for each in (shapes, dtypes)), strict=True)
    return itertools.starmap(_tensor, pairs)


def _calls(
    operator: str, tensors: Callable[[], Iterator[torch.Tensor]]
) -> Iterator[tuple[Sequence[object], dict[str, object]]]:
    """Yield (args, kwargs) to try: one pair for an overload, several for a function."""
    if "::" in operator or operator in overloads():
        yield _call(overload_named(operator), tensors())
        return
    function = names.function_named(operator)
    if function is None:
        raise unknown(operator)
    for _, parameters in names.candidate_calls(function):
        given = _given(parameters, tensors())
        yield from ((values, {}) for values in itertools.islice(itertools.product(*given), _MOST_ATTEMPTS))


def _given(parameters: Iterable[Sequence[object]], tensors: Iterator[torch.Tensor]) -> list[list[object]]:
    """Return the values to try for each parameter: a tensor if it takes one, the tensor's last size for sizes."""
    given, sizes = list[list[object]](), list[int]()
    for values in parameters:
        others = [value for value in values if not names.is_like(value)]
        if len(others) < len(values):
            others.append(tensor := next(tensors))
            sizes = sizes or list(tensor.shape[-1:])
        given.append([sizes, *others] if [1] in others and sizes else others)
    return given


def _call(op: tritonite.Op, tensors: Iterator[torch.Tensor]) -> tuple[list[object], dict[str, object]]:
    """Return (args, kwargs) for an overload: tensors, the schema's defaults, or guesses."""
    args, kwargs, dtype = list[object](), dict[str, object](), torch.float32
    for argument in op.schema.arguments:
        value: object
        if str(argument.type) in ("Tensor", "Optional[Tensor]"):
            value = tensor = next(tensors)
            dtype = tensor.dtype
        elif argument.has_default_value():
            value = default_of(argument)
        else:
            value = _guess(str(argument.real_type), dtype)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _guess(kind: str, dtype: torch.dtype) -> object:
    """Return a value for a schema type that is no tensor."""
    if kind.startswith("Optional"):
        return None
    return {"bool": False, "ScalarType": dtype}.get(kind, [1] if kind.startswith("List") else 1)


def _tensor(shape: str, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor, so that a large one needs no physical memory on a CPU."""
    try:
        size = [int(number) for number in shape.split(",") if number]
    except ValueError:
        raise typer.BadParameter(
            f"{shape!r} is not a list of integers separated by commas, such as 64,64", param_hint="--shape"
        ) from None
    try:
        return torch.empty(size, dtype=dtype, device=tritonite.device)
    except RuntimeError as error:
        raise typer.BadParameter(f"cannot allocate a tensor of shape {size} and {dtype}: {error}") from None
