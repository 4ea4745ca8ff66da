"""Convolutions of layers with a bias, a residual and an activation in their last step, and their gradients.

Let z = convolution + bias + residual and y = f(z). The gradient by z and by the residual is g f'(z), from y where f'
follows from it, otherwise from z, which the forward pass then stores beside y. The gradients by input, weight and bias
are those of the convolution (`aten::convolution_backward`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tritonite.dtypes import FLOATS
from tritonite.engine.convolution import launch
from tritonite.engine.convolution.epilogue import Epilogue
from tritonite.engine.convolution.problem import Geometry
from tritonite.engine.iteration import common_device, same_strides
from tritonite.errors import Decline
from tritonite.fused.activations import ACTIVATIONS, check_activation, function_of, run_gradient
from tritonite.fused.check import check_device, check_floats, check_shape
from tritonite.ops.convolution.call import precision
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty

aten = torch.ops.aten


def conv_bias_act(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return activation(convolution(input, weight) + bias + residual) in one launch.

    The convolution has the weight's number of spatial dimensions, 1 to 3, and the arguments of torch.nn.functional's
    `conv1d` to `conv3d`, or with `transposed` of `conv_transpose1d` to `conv_transpose3d`. 16-bit floats are added up
    in float32 and rounded once, after the activation. float32 is multiplied with the precision that
    torch.backends.cudnn.conv has.

    The backward pass multiplies the gradient by the activation's derivative in one launch, then computes ATen's
    gradients of a convolution. It reads the result for "relu", "relu6", "sigmoid" and "tanh"; for the other activations
    the forward pass also stores their operand, while gradients are recorded.

    Args:
        input: (..., channels, *sizes) of float16, bfloat16, float32 or float64, of any strides.
        weight: (columns, channels / groups, *kernel), or transposed (channels, columns / groups, *kernel), of input's
            dtype.
        bias: (columns,) of input's dtype or float32, or None.
        activation: None, "relu", "relu6", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh" (gelu by its approximation
            with tanh) or "hardswish".
        stride, padding, dilation: a number, or one for each spatial dimension.
        groups: groups of channels.
        transposed: whether to compute the transposed convolution.
        output_padding: sizes to add to the result of a transposed convolution, below stride or dilation.
        residual: None, or a tensor of the result's shape and input's dtype.

    Returns a tensor (..., columns, *result sizes) of input's dtype. Its channels are contiguous if those of the input
    or the weight are, as in channels-last tensors; otherwise it is contiguous.

    Raises errors.Unsupported for other shapes, dtypes and activations, for a kernel larger than the padded input, and
    for tensors on several devices.

    Source: Chetlur et al. 2014, "cuDNN: Efficient Primitives for Deep Learning".
    """
    dims = max(1, weight.dim() - 2)
    steps = [
        [value] * dims if isinstance(value, int) else list(value)
        for value in (stride, padding, dilation, output_padding)
    ]
    needs_operand = activation in ACTIVATIONS and not ACTIVATIONS[activation].of_result
    tensors = (input, weight, bias, residual)
    recorded = torch.is_grad_enabled() and any([each is not None and each.requires_grad for each in tensors])
    result: torch.Tensor = torch.ops.tritonite.conv_bias_act(
        *(input, weight, bias, residual, activation),
        *(*steps[:3], transposed, steps[3], groups, needs_operand and recorded),
    )[0]
    return result


def _three(numbers: Sequence[int], value: int) -> tuple[int, int, int]:
    """Return three numbers, the first of which are `value` if fewer are given."""
    first, second, third = (*[value] * (3 - len(numbers)), *numbers)
    return first, second, third


class Steps(NamedTuple):
    """Steps of filters over an input: the arguments of a convolution besides its tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @property
    def geometry(self) -> Geometry:
        """Return the geometry in three dimensions."""
        return Geometry(_three(self.stride, 1), _three(self.padding, 0), _three(self.dilation, 1), self.groups)


def _check_steps(steps: Steps, dims: int) -> None:
    least = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
    for name, value in least.items():
        given = list(getattr(steps, name))
        if len(given) != dims or min(given) < value:
            raise Decline(f"{name} is {given}: it must have {dims} numbers of at least {value}")
    if steps.groups < 1:
        raise Decline(f"groups is {steps.groups}: it must be at least 1")
    if not steps.transposed and any(steps.output_padding):
        raise Decline(f"output_padding is {list(steps.output_padding)}: only a transposed convolution has it")
    each = zip(steps.output_padding, steps.stride, steps.dilation, strict=True)
    if any(more >= max(s, d) for more, s, d in each):
        raise Decline(f"output_padding is {list(steps.output_padding)}: it must be below stride or dilation")


def _result_shape(
    input: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any, activation: str | None, steps: Steps
) -> tuple[int, ...]:
    """Return the result's shape; decline arguments that are not served."""
    check_floats(input=input)
    check_activation(activation)
    dims = weight.dim() - 2
    if not 1 <= dims <= 3:
        raise Decline(f"weight has {weight.dim()} dimensions: it must have 3 to 5")
    _check_steps(steps, dims)
    if input.dim() <= dims:
        raise Decline(f"input has the shape {tuple(input.shape)}: it must be (..., channels) and {dims} sizes")
    for name, each in (("weight", weight), ("bias", bias), ("residual", residual)):
        if each is None:
            continue
        if each.dtype is not input.dtype and (name != "bias" or each.dtype is not torch.float32):
            raise Decline(f"{name} is {each.dtype} and input {input.dtype}: give both one dtype")
        check_device(name, each, "input", input)
    channels, sizes, groups = input.shape[-dims - 1], input.shape[-dims:], steps.groups
    own, other = weight.shape[:2]
    if own % groups or channels != (own if steps.transposed else other * groups):
        raise Decline(f"input has {channels} channels and weight the shape {tuple(weight.shape)}, in {groups} groups")
    if 0 in weight.shape or 0 in sizes:
        raise Decline(
            f"input and weight have the shapes {tuple(input.shape)} and {tuple(weight.shape)}: only leading "
            "dimensions may be 0"
        )
    columns = other * groups if steps.transposed else own
    each = zip(sizes, weight.shape[2:], steps.stride, steps.padding, steps.dilation, steps.output_padding, strict=True)
    if steps.transposed:
        found = [(size - 1) * s - 2 * p + d * (k - 1) + more + 1 for size, k, s, p, d, more in each]
    else:
        found = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d, _ in each]
    if min(found) < 1:
        raise Decline(
            f"input and weight have the shapes {tuple(input.shape)} and {tuple(weight.shape)}: with the padding "
            f"{list(steps.padding)} the result has a size below 1"
        )
    shape = (*input.shape[: -dims - 1], columns, *found)
    if bias is not None:
        check_shape("bias", bias, (columns,), "an element for each column of weight")
    if residual is not None:
        check_shape("residual", residual, shape, "that of the result")
    return shape


def _channels_last(tensor: torch.Tensor, dims: int) -> bool:
    """Return whether channels are contiguous; a contiguous tensor of sizes 1 does not count."""
    return tensor.stride(-dims - 1) == 1 and not tensor.is_contiguous()


def _result_like(
    input: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], make: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """Return an empty result by `make`, with contiguous channels if input or weight have them."""
    dims = weight.dim() - 2
    if not (_channels_last(input, dims) or _channels_last(weight, dims)):
        return make(shape)
    batch, columns, sizes = shape[: -dims - 1], shape[-dims - 1], shape[-dims:]
    return make((*batch, *sizes, columns)).movedim(-1, -dims - 1)


def _images(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Return (..., channels, *sizes) as (N, channels, *sizes)."""
    shape = (math.prod(tensor.shape[: -dims - 1]), *tensor.shape[-dims - 1 :])
    return tensor.reshape(shape) if tensor.dim() != dims + 2 else tensor


def _volume(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Return (..., channels, *sizes) as (N, channels, depth, height, width)."""
    images = _images(tensor, dims)
    while images.dim() < 5:
        images = images.unsqueeze(2)
    return images


def _fake(input, weight, bias, residual, activation, *rest):
    *steps, keeps_operand = rest
    shape = _result_shape(input, weight, bias, residual, activation, Steps(*steps))
    out = _result_like(input, weight, shape, input.new_empty)
    return out, _result_like(input, weight, shape, input.new_empty) if keeps_operand else None


def _save(ctx, inputs, output):
    input, weight, bias, residual, ctx.activation, *steps, _ = inputs
    out, operand = output
    ctx.steps = Steps(*steps)
    saved = out if ctx.activation is not None and ACTIVATIONS[ctx.activation].of_result else operand
    # What computes the activation's operand again.
    again = (bias, residual) if ctx.activation is not None and saved is None else (None, None)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(input, weight, *again, saved)
    if operand is not None:
        ctx.mark_non_differentiable(operand)
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad, _):
    input, weight, bias, residual, saved = ctx.saved_tensors
    steps, needs = ctx.steps, ctx.needs_input_grad
    if grad is None:
        return (None,) * len(needs)
    if ctx.activation is not None:
        if saved is None:
            saved, _ = torch.ops.tritonite.conv_bias_act(input, weight, bias, residual, None, *steps, False)
        grad = torch.ops.tritonite.conv_bias_act_backward(grad, saved, ctx.activation)
    dims = weight.dim() - 2
    images, own = _images(grad, dims), ctx.bias_dtype in (None, input.dtype)
    mask = [needs[0], needs[1], needs[2] and own]
    by_input, by_weight, by_bias = None, None, None
    if any(mask):
        by_input, by_weight, by_bias = aten.convolution_backward(
            images, _images(input, dims), weight, [images.shape[1]], *steps, mask
        )
        by_input = None if by_input is None else by_input.reshape(input.shape)
    if needs[2] and not own:
        by_bias = images.sum((0, *range(2, images.dim())), dtype=ctx.bias_dtype)
    return by_input, by_weight, by_bias, grad if needs[3] else None, *(None,) * (len(needs) - 4)


@library_operator(
    "conv_bias_act(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, str? activation, int[] stride,"
    " int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups, bool keeps_operand)"
    " -> (Tensor, Tensor)",
    fake=_fake,
    accepts=FLOATS,
    save=_save,
    gradient=_gradient,
    leading=("input", "residual"),
    pin=("transposed", "groups", "keeps_operand"),
)
def conv_bias_act_host(
    input,
    weight,
    bias,
    residual,
    activation,
    stride,
    padding,
    dilation,
    transposed,
    output_padding,
    groups,
    keeps_operand,
):
    """Return activation(convolution + bias + residual), and the activation's operand if wanted: Chetlur et al. 2014."""
    steps = Steps(stride, padding, dilation, transposed, output_padding, groups)
    shape = _result_shape(input, weight, bias, residual, activation, steps)
    common_device([each for each in (input, weight, bias, residual) if each is not None], ())

    def make() -> torch.Tensor:
        return _result_like(input, weight, shape, lambda sizes: empty(sizes, input.dtype, input.device))

    dims = weight.dim() - 2
    out, operand = make(), make() if keeps_operand else None
    if residual is not None and not same_strides(shape, residual.stride(), out.stride()):
        residual = make().copy_(residual)
    residual, sums = [None if each is None else _volume(each, dims) for each in (residual, operand)]
    bias = bias if bias is None or bias.stride(0) == 1 else bias.contiguous()
    run = launch.convolve_transposed if transposed else launch.convolve
    run(
        *(_volume(input, dims), _volume(weight, dims), bias, _volume(out, dims), steps.geometry),
        precision(input.dtype),
        Epilogue(function_of(activation), residual, sums),
    )
    return out, operand


def _check_gradient(grad, saved, activation):
    check_floats(grad=grad)
    check_activation(activation)
    check_shape("grad", grad, saved.shape, "that of the result")
    if grad.dtype is not saved.dtype:
        raise Decline(f"grad is {grad.dtype} and the result {saved.dtype}: give both one dtype")
    check_device("grad", grad, "the result", saved)


def _fake_gradient(grad, saved, activation):
    _check_gradient(grad, saved, activation)
    return torch.empty_like(saved)


@library_operator(
    "conv_bias_act_backward(Tensor grad, Tensor saved, str activation) -> Tensor",
    fake=_fake_gradient,
    accepts=FLOATS,
    leading=("grad", "saved"),
)
def conv_bias_act_backward_host(grad, saved, activation):
    """Return grad times the activation's derivative, from its result or its operand."""
    _check_gradient(grad, saved, activation)
    out = torch.empty_like(saved)
    run_gradient(grad, saved, activation, out)
    return (out,)
