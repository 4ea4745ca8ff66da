"""Benchmark cases of lists of tensors: the parameters of models, and the steps of optimisers over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import tritonite
from tritonite.bench.cases import Make, Shape
from tritonite.bench.drawing import Call, Source, exactly, family, log_uniform, named, width

# Operators of one list and a number, of two lists, and of three lists and a number.
_UNARY = ("_foreach_sqrt", "_foreach_neg", "_foreach_reciprocal", "_foreach_exp", "_foreach_abs", "_foreach_zero_")
_BINARY = ("_foreach_add", "_foreach_add_", "_foreach_mul_", "_foreach_sub", "_foreach_div", "_foreach_maximum_")
_TERNARY = ("_foreach_addcmul_", "_foreach_addcdiv_", "_foreach_addcmul")
_REDUCTIONS = ("_foreach_norm",)
_OPTIMISERS = ("_fused_adamw_", "_fused_adam_", "_fused_sgd_")
# The most tensors of a drawn list.
_MOST_TENSORS = 400 if not tritonite.backend.interpreted else 4


def model_shapes(random: Source) -> list[Shape]:
    """Draw the shapes of a model's parameters: matrices, their biases and the vectors of norms, layer by layer."""
    # A call has up to five such lists.
    most = random.sizes.most // 8
    inner, outer = width(random), width(random)
    while 2 * inner * (inner + outer) > most:
        inner, outer = inner // 2, outer // 2
    layers: list[list[Shape]] = [
        [(outer, inner), (outer,)],
        [(inner, inner), (inner, inner), (outer, inner), (inner, outer), (inner,), (inner,)],
        [(inner,), (inner,), (inner,)],
        [(inner, 1, 3, 3), (inner,), (inner,)],
    ]
    layer = random.choice(layers)
    elements = sum(torch.Size(shape).numel() for shape in layer)
    return layer * log_uniform(random, (1, max(1, min(_MOST_TENSORS // len(layer), most // elements))))


def _lists(shapes: Sequence[Shape], count: int) -> Callable[[Make], list[list[torch.Tensor]]]:
    """Return what makes `count` lists of tensors of these shapes."""
    return lambda make: [[make(*shape) for shape in shapes] for _ in range(count)]


@family("lists")
def _call(random: Source) -> Call:
    """Draw a call of a list operator, or a step of a fused optimiser, over the parameters of a model."""
    kind = random.choice(("unary", "binary", "scalar", "ternary", "reduction", "optimiser", "optimiser"))
    shapes = model_shapes(random)
    if kind == "optimiser":
        return _step(random, shapes)
    if kind in ("unary", "reduction"):
        name = named(random, _UNARY if kind == "unary" else _REDUCTIONS)
        overload = name if name in tritonite.overloads() else f"{name}.Scalar"
        return Call(name, overload, exactly(_lists(shapes, 1)))
    if kind == "binary":
        name = named(random, _BINARY)
        return Call(name, f"{name}.List", exactly(_lists(shapes, 2)))
    if kind == "scalar":
        name = random.choice(("_foreach_mul_", "_foreach_add", "_foreach_lerp_"))
        lists = _lists(shapes, 2 if "lerp" in name else 1)
        return Call(name, f"{name}.Scalar", exactly(lambda make: [*lists(make), 0.9]))
    name, lists = named(random, _TERNARY), _lists(shapes, 3)
    if random.random() < 0.5:
        return Call(name, f"{name}.Scalar", exactly(lists, value=0.5))
    return Call(name, f"{name}.ScalarList", exactly(lambda make: [*lists(make), [0.5] * len(shapes)]))


def _step(random: Source, shapes: Sequence[Shape]) -> Call:
    """Draw a step of an optimiser. States are positive, as squares are."""
    name, maximize = named(random, _OPTIMISERS), random.random() < 0.25
    numbers: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "maximize": maximize}
    if name == "_fused_sgd_":
        numbers |= {"momentum": 0.9, "dampening": 0.0, "nesterov": random.random() < 0.5, "is_first_step": False}
        return Call(name, name, exactly(_lists(shapes, 3), **numbers))
    amsgrad = random.random() < 0.25
    numbers |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": amsgrad}

    def arguments(make: Make) -> list[Any]:
        parameters, gradients, averages, squares, largest = _lists(shapes, 5)(make)
        squares, largest = ([x.abs_() for x in own] for own in (squares, largest))
        steps = [make(1)[0].float().fill_(5.0) for _ in shapes]
        return [parameters, gradients, averages, squares, largest if amsgrad else [], steps]

    return Call(name, name, exactly(arguments, **numbers))
