"""Families of random benchmark cases: each draws calls like those of models."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tritonite
from tritonite.bench import attention
from tritonite.bench.cases import Make, Shape, representative
from tritonite.bench.drawing import (
    Call,
    Source,
    exactly,
    family,
    laid,
    log_uniform,
    named,
    permuted,
    rows,
    sliced,
    split,
    tokens,
    width,
)
from tritonite.registry import Op


def _matrix(random: Source, *shape: int) -> Callable[[Make], torch.Tensor]:
    """Draw a row-major or column-major matrix; once in eight times a slice of a wider one."""
    if random.random() < 0.125:
        return sliced(shape, 0, random.choice((1, 8, shape[-1])))
    order = list(range(len(shape)))
    return permuted(shape, order if random.random() < 0.5 else [*order[:-2], order[-1], order[-2]])


@family("products")
def _products(random: Source) -> Call:
    """Draw linear layers with and without a bias, products in all four layouts, and products of attention heads."""
    kind = random.choice(("linear", "linear", "mm", "addmm", "bmm", "baddbmm"))
    if kind in ("bmm", "baddbmm"):
        return _of_heads(random, kind)
    M, N, K = tokens(random), width(random), width(random)
    flops = 2 * M * N * K
    if kind == "linear":
        x = laid(random, (M, K), 0.85)
        if random.random() < 0.5:
            return Call("linear", "mm", exactly(lambda make: (x(make), make(N, K).t())), flops=flops)
        return Call("linear", "addmm", exactly(lambda make: (make(N), x(make), make(N, K).t())), flops=flops)
    a, b = _matrix(random, M, K), _matrix(random, K, N)
    if kind == "mm":
        return Call("mm", "mm", exactly(lambda make: (a(make), b(make))), flops=flops)
    added = random.choice(((N,), (M, N), (M, 1), (1,)))
    scales = random.choice(({}, {"beta": 0.5}, {"alpha": 2.0}, {"beta": 1.5, "alpha": 0.25}))
    return Call("addmm", "addmm", exactly(lambda make: (make(*added), a(make), b(make)), **scales), flops=flops)


def _of_heads(random: Source, kind: str) -> Call:
    """Draw a batched product of attention: scores q k^T, or probabilities times values; heads may be interleaved."""
    sizes = random.sizes
    M, N = (log_uniform(random, sizes.positions) for _ in range(2))
    D = random.choice(sizes.head_sizes)
    N = M if random.random() < 0.5 else N
    most = max(1, sizes.most // (4 * max(M * N, M * D, N * D)))
    B = min(most, log_uniform(random, sizes.batches) * random.choice(sizes.heads))
    interleaved = random.random() < 0.4

    def heads(length: int) -> Callable[[Make], torch.Tensor]:
        return permuted((B, length, D), (1, 0, 2) if interleaved else (0, 1, 2))

    flops = 2 * B * M * N * D
    if random.random() < 0.5:
        query, key, result = heads(M), heads(N), (M, N)

        def pair(make: Make) -> tuple[torch.Tensor, torch.Tensor]:
            return query(make), key(make).mT
    else:
        value, result = heads(N), (M, D)

        def pair(make: Make) -> tuple[torch.Tensor, torch.Tensor]:
            return make(B, M, N), value(make)

    if kind == "bmm":
        return Call("bmm", "bmm", exactly(pair), flops=flops)
    # A mask shared by all heads, a row of bias for each head, or a full addend.
    added = random.choice(((1, *result), (B, 1, result[1]), (B, *result)))
    scales = {"beta": random.choice((0.0, 1.0)), "alpha": random.choice((1.0, 0.125))}
    return Call("baddbmm", "baddbmm", exactly(lambda make: (make(*added), *pair(make)), **scales), flops=flops)


@family("attention")
def _attention(random: Source) -> Call:
    """Draw a forward call of the device's attention operators."""
    sizes = random.sizes
    name = random.choice(sorted(op.packet for op in tritonite.overloads().values() if _is_attention(op)))
    kv_heads, length = random.choice(sizes.heads), log_uniform(random, sizes.positions)
    ratio = 1 if name == attention.EFFICIENT else random.choice((1, 1, 2, 4))
    size, causal = random.choice(sizes.head_sizes), random.random() < 0.5
    most = max(1, sizes.most // (ratio * kv_heads * length * max(length, size)))
    batch = min(most, log_uniform(random, sizes.batches))
    heads = attention.Heads(batch, ratio * kv_heads, kv_heads, length, size, causal)
    return Call(name, name, lambda make: attention.forward(name, heads, make), flops=heads.flops)


def _is_attention(op: Op) -> bool:
    """Return whether an operator is a forward operator of attention on this kind of device."""
    return op.packet.startswith("_scaled_dot_product") and op.has_place and not op.packet.endswith("_backward")


# Families of pointwise operators.
_POINTWISE = (
    *("activation", "arithmetic", "bessel", "bitwise", "comparison", "conditional", "elementary", "gamma"),
    *("polynomial", "probability", "rounding"),
)
# Pointwise operators that models run most.
_USUAL = (
    *("add", "mul", "sub", "div", "gelu", "silu", "relu", "sigmoid", "tanh", "exp", "rsqrt", "sqrt", "pow", "where"),
    *("clamp", "masked_fill", "neg", "abs", "cos", "sin", "eq", "lt", "ge", "maximum", "minimum", "addcmul", "lerp"),
    *("reciprocal", "log", "softplus", "leaky_relu", "hardswish", "logical_and", "clamp_min"),
)
# Arguments that are often numbers, and an overload in place of a representative that reads a number from the device.
_NUMBERS = {"pow": ["exponent"], "clamp": ["min", "max"], "clamp_min": ["min"]}
_NUMBERS |= {name: ["other"] for name in ("add", "mul", "sub", "div", "eq", "lt", "ge")}
_OF_NUMBERS = {"masked_fill": "masked_fill.Scalar"}


@functools.lru_cache(maxsize=1)
def _pointwise_names() -> list[str]:
    """Return the functional pointwise operators with one tensor result, except glu, whose result has another shape."""
    ops = {op.packet: representative(op.packet) for op in tritonite.overloads().values() if op.family in _POINTWISE}
    return sorted(
        name
        for name, op in ops.items()
        if not (op.inplace or op.out_names or "backward" in name or name.startswith("_") or name == "glu")
        and op.schema.returns
        and str(op.schema.returns[0].type) == "Tensor"
    )


@family("pointwise")
def _pointwise(random: Source) -> Call:
    """Draw a pointwise call on broadcast operands in any layouts; half of the time of a usual operator."""
    name = named(random, _USUAL if random.random() < 0.5 else _pointwise_names())
    op = tritonite.overloads()[_OF_NUMBERS[name]] if name in _OF_NUMBERS else representative(name)
    shape = _shape(random, log_uniform(random, random.sizes.elements))
    layouts = [laid(random, shape)]
    for _ in range(max(1, sum(op.takes_tensors)) - 1):
        like = random.choice((shape, shape, shape, shape[-1:], (*shape[:-1], 1), (1,)))
        # Half of the operands of the same shape have the first one's layout.
        alike = like == shape and random.random() < 0.5
        layouts.append(layouts[0] if alike else laid(random, like))
    given: dict[str, Any] = {}
    if name in _NUMBERS and random.random() < 0.4:
        given = dict(zip(_NUMBERS[name], sorted(random.sample((0.5, 2.0, 3.0), len(_NUMBERS[name]))), strict=True))
        layouts = layouts[:1]
    return Call(name, op.overload, lambda make: [made(make) for made in layouts], given)


def _shape(random: Source, elements: int) -> Shape:
    """Draw a shape of one to four dimensions with about `elements` elements; often the last is a model's width."""
    dimensions = random.choice((1, 2, 2, 2, 3, 3, 4))
    last = width(random)
    if dimensions > 1 and last <= elements and random.random() < 0.5:
        return (*split(random, elements // last, dimensions - 1), last)
    return tuple(split(random, elements, dimensions))


_REDUCED = (
    *("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "std_mean", "prod"),
    *("any", "all", "logsumexp", "linalg_vector_norm", "count_nonzero", "nansum"),
)


@family("reductions")
def _reductions(random: Source) -> Call:
    """Draw a reduction over any dimensions."""
    name = named(random, _REDUCED)
    op = representative(name)
    several = "List" in next(str(argument.type) for argument in op.schema.arguments if argument.name == "dim")
    shape, dims = rows(random, None if several else 1)
    given: dict[str, Any] = {"dim": dims if several else dims[0]}
    if any(argument.name == "keepdim" for argument in op.schema.arguments):
        given["keepdim"] = random.random() < 0.5
    if name == "linalg_vector_norm":
        given["ord"] = random.choice((1, 2, 2, math.inf))
    return Call(name, op.overload, _rows_of(name, laid(random, shape, 0.7)), given)


def _rows_of(name: str, made: Callable[[Make], torch.Tensor]) -> Callable[[Make], Sequence[torch.Tensor]]:
    """Return what makes the operand; for products its signs, whose products stay in range."""
    return lambda make: [made(make).sign_() if "prod" in name else made(make)]


@family("softmax")
def _softmax(random: Source) -> Call:
    name = random.choice(("_softmax", "_log_softmax"))
    shape, (dim,) = rows(random, 1)
    x = laid(random, shape, 0.7)
    return Call(name.lstrip("_"), name, lambda make: [x(make)], {"dim": dim})


@family("scans")
def _scans(random: Source) -> Call:
    name = random.choice(("cumsum", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"))
    shape, (dim,) = rows(random, 1)
    return Call(name, representative(name).overload, _rows_of(name, laid(random, shape, 0.7)), {"dim": dim})


@dataclass(frozen=True)
class _Norm:
    """A norm's input and parameters.

    Attributes:
        shape: the input's shape.
        x: makes the input.
        affine: whether there are weight and bias.
        wide: parameters and statistics are float32, else the input's dtype.
    """

    shape: Shape
    x: Callable[[Make], torch.Tensor]
    affine: bool
    wide: bool = False

    def parameter(self, make: Make, size: int) -> torch.Tensor | None:
        return self.statistic(make, size) if self.affine else None

    def statistic(self, make: Make, size: int) -> torch.Tensor:
        return make(size).float() if self.wide else make(size)


def _layer(random: Source) -> _Norm:
    """Draw rows of a layer's width, or of any length."""
    sizes = random.sizes
    length = width(random) if random.random() < 0.7 else log_uniform(random, sizes.lengths)
    count = log_uniform(random, (1, max(1, min(sizes.rows[1], sizes.most // (4 * length)))))
    shape = (*split(random, count, random.choice((1, 2))), length)
    return _Norm(shape, laid(random, shape, 0.85), random.random() < 0.8)


def _image(random: Source, kind: str) -> _Norm:
    """Draw (N, C, H, W) images; for batch_norm also rows, channels_last images, and float32 parameters."""
    sizes = random.sizes
    C, side = random.choice(sizes.channels), log_uniform(random, sizes.sides)
    other = side if random.random() < 0.7 else log_uniform(random, sizes.sides)
    N = min(max(1, sizes.most // (4 * C * side * other)), log_uniform(random, (1, 256)))
    layout = random.choice(("image", "image", "image", "rows", "channels last")) if kind == "batch_norm" else "image"
    shape = (N * side * other, C) if layout == "rows" else (N, C, side, other)
    order = (0, 2, 3, 1) if layout == "channels last" else range(len(shape))
    wide = kind == "batch_norm" and random.random() < 0.5
    return _Norm(shape, permuted(shape, order), random.random() < 0.9, wide)


def _groups(random: Source, norm: _Norm) -> tuple[int, int, int, int]:
    """Return N, C, elements of a channel, and a drawn number of groups."""
    N, C = norm.shape[:2]
    groups = random.choice([groups for groups in (1, 8, 16, 32, 32, C) if C % groups == 0])
    return N, C, math.prod(norm.shape[2:]), groups


@family("norms")
def _norms(random: Source) -> Call:
    """Draw the forward pass of a norm."""
    kind = random.choice(("layer_norm", "layer_norm", "rms_norm", "rms_norm", "group_norm", "batch_norm"))
    if kind in ("layer_norm", "rms_norm"):
        layer, bias = _layer(random), random.random() < 0.8
        size = layer.shape[-1]

        def of_rows(make: Make) -> tuple[Any, ...]:
            x, weight = layer.x(make), layer.parameter(make, size)
            if kind == "rms_norm":
                return x, [size], weight, 1e-6
            return x, [size], weight, layer.parameter(make, size) if bias else None, 1e-5

        return Call(kind, "_fused_rms_norm" if kind == "rms_norm" else "native_layer_norm", exactly(of_rows))
    image, training = _image(random, kind), random.random() < 0.75
    sizes, C = _groups(random, image), image.shape[1]

    def of_channels(make: Make) -> tuple[Any, ...]:
        x, weight, bias = image.x(make), image.parameter(make, C), image.parameter(make, C)
        if kind == "group_norm":
            return x, weight, bias, *sizes, 1e-5
        mean, variance = image.statistic(make, C), image.statistic(make, C).abs_().add_(1)
        return x, weight, bias, mean, variance, training, 0.1, 1e-5

    return Call(kind, f"native_{kind}", exactly(of_channels))


_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss")


@family("losses")
def _losses(random: Source) -> Call:
    """Draw an elementwise loss or nll_loss, with any reduction."""
    name = random.choice((*_LOSSES, "nll_loss", "nll_loss"))
    reduction = random.choice((1, 1, 2, 0))
    if name != "nll_loss":
        shape = _shape(random, log_uniform(random, random.sizes.elements))
        x, target = laid(random, shape, 0.8), laid(random, shape, 0.9)
        return Call(name, name, lambda make: [x(make), target(make)], {"reduction": reduction})
    x, labels, _ = _classes(random)
    return Call(name, "nll_loss_forward", exactly(lambda make: (x(make), labels(make), None, reduction, -100)))


def _classes(random: Source) -> tuple[Callable[[Make], torch.Tensor], Callable[[Make], torch.Tensor], int]:
    """Draw what makes (rows, classes) and a label for each row, and the number of rows."""
    sizes = random.sizes
    classes = random.choice(sizes.classes)
    count = min(tokens(random), max(1, sizes.most // (2 * classes)))

    def labels(make: Make) -> torch.Tensor:
        return torch.arange(count, device=make(1).device) * 7 % classes

    return permuted((count, classes), (0, 1)), labels, count


# Activations whose gradients are drawn.
_ACTIVATIONS = (
    *("gelu", "silu", "threshold", "sigmoid", "tanh", "hardswish", "hardsigmoid", "leaky_relu", "elu", "softplus"),
    *("hardtanh", "logit", "hardshrink", "softshrink", "log_sigmoid"),
)
_GRADIENTS = (
    *("activation", "activation", "softmax", "log_softmax", "layer_norm", "layer_norm", "rms_norm", "group_norm"),
    *("batch_norm", "loss", "nll_loss"),
)


@family("gradients")
def _gradients(random: Source) -> Call:
    kind = random.choice(_GRADIENTS)
    if kind == "activation":
        return _of_activation(random)
    if kind in ("softmax", "log_softmax"):
        return _of_softmax(random, kind)
    if kind in ("layer_norm", "rms_norm"):
        return _of_layer(random, kind)
    if kind in ("group_norm", "batch_norm"):
        return _of_image(random, kind)
    if kind == "nll_loss":
        return _of_classes(random)
    return _of_loss(random)


def _of_activation(random: Source) -> Call:
    name = f"{named(random, _ACTIVATIONS)}_backward"
    shape = _shape(random, log_uniform(random, random.sizes.elements))
    x, grad = laid(random, shape, 0.8), laid(random, shape, 0.9)
    count = sum(representative(name).takes_tensors)
    return Call(name, representative(name).overload, lambda make: [grad(make), *(x(make) for _ in range(count - 1))])


def _of_softmax(random: Source, kind: str) -> Call:
    shape, (dim,) = rows(random, 1)
    order = list(range(len(shape)))
    if random.random() < 0.3:
        random.shuffle(order)
    made, function = permuted(shape, order), getattr(torch, kind)

    def arguments(make: Make) -> tuple[Any, ...]:
        x = made(make)
        return made(make), function(x, dim), dim, x.dtype

    return Call(f"{kind}_backward", f"_{kind}_backward_data", exactly(arguments))


def _of_layer(random: Source, kind: str) -> Call:
    layer = _layer(random)
    size = layer.shape[-1]

    def arguments(make: Make) -> tuple[Any, ...]:
        x, grad, weight, mask = layer.x(make), make(*layer.shape), layer.parameter(make, size), [True] * 3
        if kind == "layer_norm":
            _, mean, rstd = torch.native_layer_norm(x, [size], None, None, 1e-5)
            return grad, x, [size], mean, rstd, weight, weight, mask if layer.affine else [True, False, False]
        rstd = x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        return grad, x, [size], rstd, weight, [True, layer.affine]

    overload = "native_layer_norm_backward" if kind == "layer_norm" else "_fused_rms_norm_backward"
    return Call(f"{kind}_backward", overload, exactly(arguments))


def _of_image(random: Source, kind: str) -> Call:
    image = _image(random, kind)
    sizes, C = _groups(random, image), image.shape[1]

    def arguments(make: Make) -> tuple[Any, ...]:
        x, grad, weight, mask = image.x(make), image.x(make), image.parameter(make, C), [True] + [image.affine] * 2
        if kind == "group_norm":
            _, mean, rstd = torch.native_group_norm(x, None, None, *sizes, 1e-5)
            return grad, x, mean, rstd, weight, *sizes, mask
        running = image.statistic(make, C), image.statistic(make, C).abs_().add_(1)
        _, mean, rstd = torch.native_batch_norm(x, weight, weight, *running, True, 0.1, 1e-5)
        return grad, x, weight, *running, mean, rstd, True, 1e-5, mask

    return Call(f"{kind}_backward", f"native_{kind}_backward", exactly(arguments))


def _of_loss(random: Source) -> Call:
    name = f"{named(random, [name for name in _LOSSES if 'logits' not in name])}_backward"
    reduction = random.choice((1, 1, 2, 0))
    shape = _shape(random, log_uniform(random, random.sizes.elements))
    x, target = laid(random, shape, 0.9), laid(random, shape, 0.95)
    extra = (1.0,) if name.startswith(("huber", "smooth")) else ()

    def arguments(make: Make) -> tuple[Any, ...]:
        grad = make(*shape) if reduction == 0 else make(1)[0]
        return grad, x(make), target(make), reduction, *extra

    return Call(name, name, exactly(arguments))


def _of_classes(random: Source) -> Call:
    x, labels, count = _classes(random)
    reduction = random.choice((1, 1, 2, 0))

    def arguments(make: Make) -> tuple[Any, ...]:
        grad = make(count) if reduction == 0 else make(1)[0]
        total = torch.full_like(grad, count, dtype=grad.dtype) if reduction else grad.new_zeros(())
        return grad, x(make), labels(make), None, reduction, -100, total

    return Call("nll_loss_backward", "nll_loss_backward", exactly(arguments))
