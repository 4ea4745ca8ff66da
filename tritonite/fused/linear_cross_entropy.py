"""Cross entropy over a linear head, without the logits of all tokens in memory; vocabulary shards in `sharded_head`.

For a mean or a sum, the forward pass computes the gradients, and the backward pass multiplies them by the loss's. For a
loss per token, the backward pass computes the logits anew. The engine is `engine.cross_entropy.head`.
"""

from __future__ import annotations

from typing import Any

import torch

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.cross_entropy.arguments import Classes, Statistics
from tritonite.engine.cross_entropy.head import (
    make_gradients,
    read_head,
    read_head_with_gradients,
    write_head_gradients,
)
from tritonite.engine.cross_entropy.launch import Loss, finish, make_statistics, scale
from tritonite.engine.iteration import common_device
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_shape
from tritonite.fused.cross_entropy import (
    check_numbers,
    chosen,
    fake_results,
    refuse_gradients,
    targets_of,
)
from tritonite.fused.linear_head import check_head, head_of
from tritonite.fused.sharded_head import Call, sharded_loss
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty

_library = torch.ops.tritonite


def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    class_weight: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    process_group: Any = None,
    accumulate_dtype: torch.dtype | None = torch.float32,
    chunk_tokens: int | None = None,
    return_z_loss: bool = False,
    return_accuracy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the cross entropy of the logits input @ weight.mT + bias and target classes, as `cross_entropy` does.

    Logits are computed for a chunk of tokens at a time. For "mean" and "sum" the forward pass also computes the
    gradients by the arguments that require one, with three products; a frozen weight has no buffer and no product. For
    "none", and with shards, the backward pass computes the logits anew, so that forward and backward have four
    products.

    Args:
        input: (..., H) of float16, bfloat16, float32 or float64, of any strides.
        weight: (V, H) of input's dtype, of any strides; with `process_group`, this process's V rows of the whole.
        target: int64, (...); with `process_group`, classes of all shards.
        bias: (V,) of input's dtype or float32, or None.
        ignore_index, reduction, label_smoothing, softcap, z_loss, token_scale: as in `cross_entropy`.
        class_weight: a weight for each class, (V,) or with `process_group` for the classes of all shards, of input's
            dtype or float32; None for 1.
        process_group: a group of torch.distributed whose processes have equal shards of the vocabulary, in the order of
            their ranks, and the same input and targets. None for a whole vocabulary.
        accumulate_dtype: the dtype in which chunks' gradients by weight and bias are added up: float32, input's dtype,
            or None for input's.
        chunk_tokens: tokens whose logits are in memory at a time; None for the choice of the device's table.
        return_z_loss: as in `cross_entropy`.
        return_accuracy: as in `cross_entropy`.

    Returns the loss in float32, or float64 for float64, or a tuple of the loss and what else is asked for.

    Raises errors.Unsupported for other shapes or dtypes, for tensors on several devices, and for weights of classes and
    scales of tokens that require a gradient.

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models"; Shoeybi et al. 2019,
    "Megatron-LM" (vocabulary shards); and as in `cross_entropy`.
    """
    accumulate = input.dtype if accumulate_dtype is None else accumulate_dtype
    numbers = ignore_index, reduction, label_smoothing, softcap, z_loss
    if process_group is not None:
        call = Call(
            *(target, class_weight, token_scale, numbers, (accumulate, chunk_tokens)),
            *(return_z_loss, return_accuracy, process_group),
        )
        return chosen(*sharded_loss(input, weight, bias, call))
    recording = torch.is_grad_enabled()
    wanted = [recording and each is not None and each.requires_grad for each in (input, weight, bias)]
    loss, z, accuracy, *_ = _library.linear_cross_entropy(
        *(input, weight, target, bias, class_weight, token_scale, *numbers, accumulate, chunk_tokens),
        *(return_z_loss, return_accuracy, *(each and reduction != "none" for each in wanted)),
    )
    return chosen(loss, z, accuracy)


def _check_chunks(input, accumulate_dtype, chunk_tokens):
    if accumulate_dtype not in (torch.float32, input.dtype) or accumulate_dtype.itemsize < input.dtype.itemsize:
        raise Decline(f"accumulate_dtype is {accumulate_dtype}: it may be {input.dtype}, as input is, or torch.float32")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise Decline(f"chunk_tokens is {chunk_tokens}: it must be at least 1")


def _accumulation(input, accumulate_dtype):
    """Return the dtype of sums over chunks, float64 for float64."""
    return torch.float64 if input.dtype is torch.float64 else accumulate_dtype


def _fake(*given):
    (input, weight, target, bias, class_weight, token_scale), numbers = given[:6], given[7:11]
    accumulate_dtype, chunk_tokens, return_z_loss, return_accuracy, *wanted = given[11:]
    check_head(input, weight, target, bias, class_weight, token_scale, weight.shape[0] if weight.dim() else 0)
    check_numbers(*numbers)
    reduction, label_smoothing = numbers[:2]
    accumulate = _accumulation(input, accumulate_dtype)
    _check_chunks(input, accumulate, chunk_tokens)
    loss, z, accuracy, total = fake_results(input, target.shape, reduction, return_z_loss, return_accuracy)
    rows = input.new_empty((target.numel(),), dtype=opmath(input.dtype))
    weighted = label_smoothing != 0 and class_weight is not None
    weight_sum = input.new_empty((1,), dtype=rows.dtype) if weighted else None
    by_input = input.new_empty(input.shape) if wanted[0] else None
    by_weight = weight.new_empty(weight.shape, dtype=accumulate) if wanted[1] else None
    by_bias = weight.new_empty(weight.shape[:1], dtype=accumulate) if wanted[2] else None
    return loss, z, accuracy, rows, total, weight_sum, by_input, by_weight, by_bias


def _save(ctx, inputs, output):
    (*tensors, class_weight, token_scale), ctx.numbers, ctx.chunks = inputs[:6], inputs[6:11], inputs[11:13]
    refuse_gradients("linear_cross_entropy", class_weight=class_weight, token_scale=token_scale)
    _, *others = output
    gradients = output[6:]
    ctx.given = any(each is not None for each in gradients)
    # With the gradients in memory, only target and the dtypes of weight and bias are needed from the operands.
    operands = (None, tensors[1], tensors[2], tensors[3], None, None, None) if ctx.given else (*inputs[:6], output[3])
    ctx.save_for_backward(*operands, output[4], output[5], *gradients)
    ctx.mark_non_differentiable(*[each for each in others if each is not None])
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad, *_):
    rest = [None] * 18
    if grad is None:
        return tuple(rest)
    input, weight, target, bias, class_weight, token_scale, lse, total, weight_sum, *gradients = ctx.saved_tensors
    if ctx.given:
        found = _library.linear_cross_entropy_scaled(grad, total, target, weight, bias, *gradients, ctx.numbers[0])
    else:
        found = _library.linear_cross_entropy_backward(
            *(grad, input, weight, target, bias, class_weight, token_scale, lse, total, weight_sum, 0, weight.shape[0]),
            *(*ctx.numbers, *ctx.chunks, *[ctx.needs_input_grad[i] for i in (0, 1, 3)]),
        )
    rest[0], rest[1], rest[3] = found
    return tuple(rest)


_NUMBERS = "int ignore_index, str reduction, float label_smoothing, float? softcap, float z_loss"
_CHUNKS = "ScalarType accumulate_dtype, int? chunk_tokens"
_WANTED = "bool input_wanted, bool weight_wanted, bool bias_wanted"
_PINNED = ("label_smoothing", "softcap", "z_loss", "chunk_tokens", "input_wanted", "weight_wanted", "bias_wanted")


@library_operator(
    "linear_cross_entropy(Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight,"
    f" Tensor? token_scale, {_NUMBERS}, {_CHUNKS}, bool return_z_loss, bool return_accuracy, {_WANTED})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    accepts=FLOATS,
    save=_save,
    gradient=_gradient,
    pin=(*_PINNED, "return_z_loss", "return_accuracy"),
)
def linear_cross_entropy_host(
    input,
    weight,
    target,
    bias,
    class_weight,
    token_scale,
    ignore_index,
    reduction,
    label_smoothing,
    softcap,
    z_loss,
    accumulate_dtype,
    chunk_tokens,
    return_z_loss,
    return_accuracy,
    input_wanted,
    weight_wanted,
    bias_wanted,
):
    """Return the loss over a linear head, its statistics, and gradients of the losses' sum; in chunks of tokens."""
    check_head(input, weight, target, bias, class_weight, token_scale, weight.shape[0] if weight.dim() else 0)
    check_numbers(reduction, label_smoothing, softcap, z_loss)
    accumulate = _accumulation(input, accumulate_dtype)
    _check_chunks(input, accumulate, chunk_tokens)
    common_device([each for each in (input, weight, target, bias, class_weight, token_scale) if each is not None], ())
    head, targets = head_of(input, weight, bias, chunk_tokens), targets_of(target, class_weight, token_scale)
    loss, n_classes = Loss(ignore_index, label_smoothing, softcap, z_loss), weight.shape[0]
    statistics = make_statistics(target.numel(), input, targets, loss, return_accuracy)
    gradients = make_gradients(head, (input_wanted, weight_wanted, bias_wanted), accumulate)
    if input_wanted or weight_wanted or bias_wanted:
        read_head_with_gradients(head, targets, statistics, loss, gradients)
    else:
        read_head(head, targets, statistics, loss, Classes(n_classes, n_classes, 0))
    results = finish(targets, statistics, tuple(target.shape), loss, reduction, n_classes, return_z_loss)
    by_input = None if gradients.input is None else gradients.input.view(input.shape)
    return (
        *(*results[:3], statistics.lse, results.total, statistics.weight_sum),
        *(by_input, gradients.weight, gradients.bias),
    )


def _dtypes(weight, bias):
    """Return the dtypes of the gradients by input, weight and bias."""
    return weight.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype


def _like(tensor, dtype):
    return None if tensor is None else tensor.new_empty(tensor.shape, dtype=dtype)


@library_operator(
    "linear_cross_entropy_scaled(Tensor grad, Tensor? total, Tensor target, Tensor weight, Tensor? bias,"
    " Tensor? by_input, Tensor? by_weight, Tensor? by_bias, int ignore_index) -> (Tensor, Tensor, Tensor)",
    fake=lambda grad, total, target, weight, bias, *gradients: tuple(
        [_like(own, dtype) for own, dtype in zip(gradients[:3], _dtypes(weight, bias), strict=True)]
    ),
    accepts=FLOATS,
)
def linear_cross_entropy_scaled_host(grad, total, target, weight, bias, by_input, by_weight, by_bias, ignore_index):
    """Return gradients of the losses' sum times the loss's gradient, for a mean over the total weight."""
    outs, rows = [], (target.contiguous(), None, None)
    for own, own_target, dtype in zip((by_input, by_weight, by_bias), rows, _dtypes(weight, bias), strict=True):
        out = None
        if own is not None:
            out = empty(own.shape, dtype, own.device)
            scale(own.contiguous(), out, grad, total, None if total is None else own_target, ignore_index)
        outs.append(out)
    return outs


def _fake_backward(*given):
    grad, input, weight, target, bias, class_weight, token_scale = given[:7]
    (classes, _, *numbers), wanted = given[11:17], given[19:]
    check_head(input, weight, target, bias, class_weight, token_scale, classes)
    _check_backward(grad, input, target, numbers[0])
    operands = zip(wanted, (input, weight, bias), strict=True)
    return tuple([own.new_empty(own.shape) if each else None for each, own in operands])


def _check_backward(grad, input, target, reduction):
    check_shape("grad", grad, target.shape if reduction == "none" else (), "that of the loss")
    if grad.dtype is not opmath(input.dtype):
        raise Decline(f"grad is {grad.dtype}: it must be {opmath(input.dtype)}, as the loss is")
    check_device("grad", grad, "input", input)


@library_operator(
    "linear_cross_entropy_backward(Tensor grad, Tensor input, Tensor weight, Tensor target, Tensor? bias,"
    " Tensor? class_weight, Tensor? token_scale, Tensor lse, Tensor? total, Tensor? weight_sum, int first,"
    f" int classes, {_NUMBERS}, {_CHUNKS}, {_WANTED}) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    accepts=FLOATS,
    pin=(*_PINNED, "first", "classes"),
)
def linear_cross_entropy_backward_host(
    grad,
    input,
    weight,
    target,
    bias,
    class_weight,
    token_scale,
    lse,
    total,
    weight_sum,
    first,
    classes,
    ignore_index,
    reduction,
    label_smoothing,
    softcap,
    z_loss,
    accumulate_dtype,
    chunk_tokens,
    input_wanted,
    weight_wanted,
    bias_wanted,
):
    """Return the gradients of linear_cross_entropy by input, weight and bias, with logits computed anew."""
    check_head(input, weight, target, bias, class_weight, token_scale, classes)
    _check_backward(grad, input, target, reduction)
    head, targets = head_of(input, weight, bias, chunk_tokens), targets_of(target, class_weight, token_scale)
    gradients = make_gradients(head, (input_wanted, weight_wanted, bias_wanted), _accumulation(input, accumulate_dtype))
    write_head_gradients(
        head,
        grad.contiguous().view(-1) if grad.dim() else grad,
        targets,
        Statistics(lse.contiguous(), None, weight_sum=weight_sum),
        total,
        Loss(ignore_index, label_smoothing, softcap, z_loss),
        Classes(weight.shape[0], classes, first),
        gradients,
    )
    outs = [None if gradients.input is None else gradients.input.view(input.shape)]
    for own, like in ((gradients.weight, weight), (gradients.bias, bias)):
        outs.append(own if own is None else own.to(like.dtype))
    return outs
