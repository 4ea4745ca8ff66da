"""Draws of norms, convolutions, gated activations, rotary embeddings and quantisation."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonite import devices
from tritonite.dtypes import opmath
from tritonite.fused.activations import ACTIVATIONS
from tritonite.testing.compositions import layers
from tritonite.testing.fuzz.fused.drawing import Drawer, FusedCall, draws

_CASTINGS = ("llama", "gemma", "none")


def _rows(drawer: Drawer) -> tuple[tuple[int, ...], int]:
    """Draw leading dimensions and a width; few rows if they are long."""
    leading, width = drawer.leading(), drawer.width()
    return (leading if width < 500 else (2,)), width


def _slack(given: dict[str, Any]) -> float:
    """Return the tolerance of a norm: a sum with a residual is rounded before the backward pass reads it.

    The gradient of a short row is a difference of rounded numbers.
    """
    if "residual" not in given:
        return 0.0
    return 16.0 if given["x"].shape[-1] < 16 else 4.0


def _epsilon(drawer: Drawer, width: int) -> float:
    """Draw an epsilon; a large one for short rows, whose variance may be roundoff."""
    return drawer.choice((1e-2, 1e-3) if width < 16 else (1e-2, 1e-5, 1e-6))


@draws("rms_norm", "skip_rms_norm", "add_rms_norm_", "rms_norm_quantize")
def _rms_norm(drawer: Drawer, name: str) -> FusedCall:
    leading, width = _rows(drawer)
    quantized, in_place, skips = name == "rms_norm_quantize", name == "add_rms_norm_", name == "skip_rms_norm"
    dtype = drawer.dtype(double=not quantized)
    grad = 0.0 if quantized or in_place else 0.8
    shape = (*leading, width)
    given: dict[str, Any] = {"x": drawer.normal(shape, dtype, grad, overlap=not in_place)}
    weighted = drawer.chance(0.75)
    given["weight"] = drawer.normal((width,), drawer.parameter_dtype(dtype), grad) if weighted else None
    given["eps"] = _epsilon(drawer, width)
    if skips or in_place or drawer.chance(0.4):
        given["residual"] = drawer.normal(shape, dtype, grad, overlap=not in_place)
    if not skips:
        given |= {"offset": drawer.choice((0.0, 1.0, 0.5)), "casting": drawer.choice(_CASTINGS)}
    if quantized:
        return FusedCall(name, given | _wanted(drawer), layers.rms_norm_quantize, slack=1.0)
    if in_place:
        return FusedCall(name, given, layers.rms_norm, ("x", "residual"))
    reference: Any = layers.rms_norm
    if drawer.chance(0.05):
        # None is the epsilon of the compute dtype, which float64 would change.
        given["eps"] = None
        reference = functools.partial(_with_epsilon, torch.finfo(opmath(dtype)).eps)
    return FusedCall(name, given, reference, slack=_slack(given))


def _with_epsilon(epsilon: float, x: torch.Tensor, weight: Any = None, eps: Any = None, **given: Any) -> Any:
    return layers.rms_norm(x, weight, epsilon, **given)


@draws("layer_norm", "skip_layer_norm")
def _layer_norm(drawer: Drawer, name: str) -> FusedCall:
    leading, width = _rows(drawer)
    dtype, shape = drawer.dtype(double=True), (*leading, width)
    given: dict[str, Any] = {"x": drawer.normal(shape, dtype, 0.8)}
    for parameter in ("weight", "bias"):
        if drawer.chance(0.7):
            given[parameter] = drawer.normal((width,), drawer.parameter_dtype(dtype), 0.8)
    given["eps"] = _epsilon(drawer, width)
    if name == "skip_layer_norm" or drawer.chance(0.4):
        given["residual"] = drawer.normal(shape, dtype, 0.8)
        alike = width <= 2 or (given["x"].stride(-1) == 0 and given["residual"].stride(-1) == 0)
        if alike and dtype.itemsize == 2:
            # Two normalised elements are 1 and -1, equal ones 0: gradients are roundings of the saved sum, amplified.
            given = {each: x.detach() if isinstance(x, torch.Tensor) else x for each, x in given.items()}
    return FusedCall(name, given, layers.layer_norm, slack=_slack(given))


@draws("gated_rms_norm")
def _gated_rms_norm(drawer: Drawer, name: str) -> FusedCall:
    leading, width = _rows(drawer)
    dtype, shape = drawer.dtype(double=True), (*leading, width)
    given: dict[str, Any] = {each: drawer.normal(shape, dtype, 0.8) for each in ("x", "gate")}
    if drawer.chance(0.7):
        given["weight"] = drawer.normal((width,), drawer.parameter_dtype(dtype), 0.8)
    return FusedCall(name, given | {"eps": _epsilon(drawer, width)}, layers.gated_rms_norm)


@draws("silu_and_mul", "swiglu", "gelu_and_mul", "geglu", "relu_and_mul", "reglu")
def _gated(drawer: Drawer, name: str) -> FusedCall:
    leading, width = _rows(drawer)
    dtype = drawer.dtype(double=True)
    given: dict[str, Any] = {}
    if drawer.chance(0.5):
        given["x"] = drawer.normal((*leading, 2 * width), dtype, 0.8)
    else:
        given |= {each: drawer.normal((*leading, width), dtype, 0.8) for each in ("x", "y")}
    if name in ("gelu_and_mul", "geglu"):
        return FusedCall(name, given | {"approximate": drawer.choice(("none", "tanh"))}, layers.gelu_and_mul)
    reference = layers.relu_and_mul if name in ("relu_and_mul", "reglu") else layers.silu_and_mul
    return FusedCall(name, given, reference)


@draws("rotary_embedding", "rotary_embedding_", "multimodal_rotary_embedding")
def _rotary(drawer: Drawer, name: str) -> FusedCall:
    in_place, planes = name == "rotary_embedding_", name == "multimodal_rotary_embedding"
    positions = drawer.leading(1)
    size, dtype = drawer.choice((2, 3, 7, 8, 16, 20, 64, 65, 128)), drawer.dtype(double=True)
    pairs = size // 2 if drawer.chance(0.6) else drawer.randrange(size // 2 + 1)
    grad = 0.0 if in_place else 0.8

    def heads() -> torch.Tensor:
        shape = (*positions, drawer.choice((1, 1, 2, 3, 5, 0)), size)
        return drawer.normal(shape, dtype, grad, overlap=not in_place)

    key = heads() if drawer.chance(0.7) else None
    # Angles broadcast to the leading dimensions, of which they may have fewer.
    own = [each if drawer.chance(0.7) else 1 for each in positions[drawer.randrange(len(positions)) : -1]]
    shape = (*([3] if planes else []), *own, positions[-1], pairs)
    angles_dtype = drawer.dtype(double=True)
    angles = [drawer.laid((6 * drawer.fractions(shape)).to(angles_dtype)) for _ in range(2)]
    given: dict[str, Any] = {"query": heads(), "key": key, "cos": angles[0], "sin": angles[1]}
    given["interleaved"] = drawer.chance(0.5)
    if not planes:
        written = () if not in_place else ("query",) if key is None else ("query", "key")
        reference = _rotary_in_place if in_place else layers.rotary_embedding
        return FusedCall(name, given, reference, written)
    height = drawer.randrange(pairs + 1)
    width = drawer.randrange(pairs - height + 1)
    given |= {"sections": [pairs - height - width, height, width], "interleaved_sections": drawer.chance(0.5)}
    return FusedCall(name, given, layers.multimodal_rotary_embedding)


def _rotary_in_place(*operands: Any, **given: Any) -> Any:
    return [each for each in layers.rotary_embedding(*operands, **given) if each is not None]


def _wanted(drawer: Drawer) -> dict[str, Any]:
    """Draw what a quantising operator makes."""
    dtypes = [torch.int8, *[torch.float8_e4m3fn] * devices.has_float8(torch.device(drawer.device))]
    granularity = drawer.choice(("token", "block", "tensor"))
    scale = drawer.laid(0.01 + drawer.fractions((1,)) / 20) if granularity == "tensor" else None
    return {"dtype": drawer.choice(dtypes), "granularity": granularity, "scale": scale}


@draws("quantize")
def _quantize(drawer: Drawer, name: str) -> FusedCall:
    leading, width = _rows(drawer)
    given = {"x": drawer.normal((*leading, width), drawer.dtype())}
    return FusedCall(name, given | _wanted(drawer), layers.quantize)


@draws("swiglu_quantize")
def _swiglu_quantize(drawer: Drawer, name: str) -> FusedCall:
    call = _gated(drawer, "swiglu").map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x)
    given = {each: value.float() if value.dtype is torch.float64 else value for each, value in call.arguments.items()}
    # The largest activation of a row is rounded before it is a scale.
    return FusedCall(name, given | _wanted(drawer), layers.swiglu_quantize, slack=1.0)


@draws("conv_bias_act")
def _convolution(drawer: Drawer, name: str) -> FusedCall:
    dims, groups, dtype = drawer.choice((1, 2, 2, 3)), drawer.choice((1, 1, 1, 2, 4)), drawer.dtype(double=True)
    depthwise, transposed = groups > 1 and drawer.chance(0.5), drawer.chance(0.25)
    channels, columns = (groups * (1 if depthwise else drawer.choice((1, 2, 3, 8, 17))) for _ in range(2))
    sizes = [drawer.choice((1, 2, 3, 5, 8, 9)) for _ in range(dims)]

    def numbers(choices: tuple[int, ...]) -> Any:
        each = [drawer.choice(choices) for _ in range(dims)]
        return each[0] if drawer.chance(0.3) else each

    steps = {"stride": numbers((1, 1, 2, 3)), "padding": numbers((0, 0, 1, 2)), "dilation": numbers((1, 1, 2))}
    shape = (channels, columns // groups) if transposed else (columns, channels // groups)
    # In 16 bits ATen's CPU kernel leaves gradients by taps that meet no element of the input undefined.
    grad = 0.0 if drawer.device == "cpu" and dtype.itemsize == 2 else 0.8
    # Rounding to 16 bits changes derivatives that jump at 3 or 6, and those by results near 1.
    inexact = ("relu6", "hardswish", "sigmoid", "tanh") if dtype.itemsize == 2 else ()
    given: dict[str, Any] = {
        "input": drawer.normal((*drawer.choice(((), (1,), (2,), (2, 2), (0,))), channels, *sizes), dtype, 0.8),
        "weight": drawer.normal((*shape, *[drawer.choice((1, 1, 2, 3)) for _ in range(dims)]), dtype, grad),
        "activation": drawer.choice([None, *(each for each in ACTIVATIONS if each not in inexact)]),
        "groups": groups,
        **steps,
        "transposed": transposed,
    }
    if drawer.chance(0.6):
        given["bias"] = drawer.normal((columns,), drawer.parameter_dtype(dtype), 0.8)
    try:
        shape = _shape_of_convolution(given)
    except RuntimeError:
        # Nothing is left of the result.
        given |= {"padding": 0 if transposed else 2, "dilation": 1}
        shape = _shape_of_convolution(given)
    if drawer.chance(0.4):
        given["residual"] = drawer.normal(shape, dtype, 0.8)
    return FusedCall(name, given, layers.conv_bias_act, contiguous=False, slack=4.0)


def _shape_of_convolution(given: dict[str, Any]) -> torch.Size:
    """Return the shape of a convolution's result. ATen raises RuntimeError if a size is below 1, of images only."""
    on_meta = {
        each: value.detach().double().to("meta") if torch.is_tensor(value) else value for each, value in given.items()
    }
    x, dims = on_meta["input"], given["weight"].dim() - 2
    leading = x.shape[: -dims - 1]
    on_meta["input"] = x.new_empty(1, *x.shape[-dims - 1 :])
    own = layers.conv_bias_act(**on_meta).shape[1:]
    if 0 in own:
        raise RuntimeError("a size of 0, which ATen accepts on the meta device alone")
    return torch.Size((*leading, *own))
