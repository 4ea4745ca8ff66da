"""Cross entropy of logits: label smoothing, class weights, a cap on logits, z-loss, and scales of tokens.

The forward pass reads logits once and keeps the logsumexp of each row; the backward pass reads them once and writes
the gradient, if asked for over the logits. The engine is `engine.cross_entropy`.
"""

from __future__ import annotations

from typing import Any

import torch

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.cross_entropy.arguments import Classes, Statistics, Targets
from tritonite.engine.cross_entropy.launch import Loss, finish, make_statistics, read_rows, write_gradient
from tritonite.engine.iteration import common_device
from tritonite.errors import Decline, Unsupported
from tritonite.fused.check import check_device, check_floats, check_shape, share_memory
from tritonite.fused.reduction import REDUCTIONS
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    token_scale: torch.Tensor | None = None,
    inplace: bool = False,
    return_z_loss: bool = False,
    return_accuracy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the cross entropy of logits along the last dimension and target classes.

    With x = softcap * tanh(input / softcap), or x = input without a cap, and lse = log sum_j exp(x_j), a token's loss
    is the one of torch.nn.functional.cross_entropy, lse - x[target] without label smoothing and weights, plus
    z_loss * lse**2, times the token's scale. A mean divides the sum by the sum of the weights of the targets that are
    not ignored, whatever the token scales. If these weights add up to 0, the mean is nan, as torch's is.

    Logits are read once in the forward pass, and once in the backward pass, which writes the gradient. The loss is
    float32 for float16 and bfloat16 logits.

    Args:
        input: (..., V) of float16, bfloat16, float32 or float64, of any strides.
        target: int64, (...). A target that is neither a class nor `ignore_index` makes the loss and the gradients nan.
        weight: (V,) of input's dtype or float32, a weight for each class; None for 1.
        ignore_index: target of tokens without a loss and a gradient.
        reduction: "mean", "sum", or "none" for a loss for each token.
        label_smoothing: the probability, in [0, 1], that is spread over all classes.
        softcap: the limit of logits, more than 0; None for none.
        z_loss: factor of lse**2.
        token_scale: (...) of input's dtype or float32, factors of the tokens' losses, without a gradient; None for 1.
        inplace: whether the backward pass writes the gradient over the logits, so that it needs no memory. The logits
            are lost, and a second backward pass raises PyTorch's error. torch.compile decides this by itself.
        return_z_loss: whether to return the z-loss within the loss, too, without a gradient.
        return_accuracy: whether to return the share of tokens whose target has the largest logit, the first of equal
            ones; for "none", 1 or 0 for each token. Ignored tokens do not count.

    Returns the loss, or a tuple of the loss and what else is asked for, in the order of the arguments.

    Raises errors.Unsupported for other shapes or dtypes, for tensors on several devices, for weights and scales that
    require a gradient, and with `inplace`, for leaves and for logits that share memory.

    Source: Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision" (label smoothing);
    Chowdhery et al. 2022, "PaLM" (z-loss); Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    inplace = inplace and not torch.compiler.is_compiling()
    if inplace and input.requires_grad and input.is_leaf:
        reason = "input is a leaf that requires a gradient: inplace would overwrite it"
        raise Unsupported(name="tritonite::cross_entropy", reason=reason)
    loss, z, accuracy, *_ = torch.ops.tritonite.cross_entropy(
        *(input, target, weight, token_scale, ignore_index, reduction, label_smoothing, softcap, z_loss),
        *(inplace, return_z_loss, return_accuracy),
    )
    return chosen(loss, z, accuracy)


def chosen(loss: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the loss, or a tuple of the loss and the other results that are not None."""
    given = tuple([other for other in others if other is not None])
    return (loss, *given) if given else loss


def check_targets(
    name: str,
    logits: torch.Tensor,
    n_classes: int,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    weight_name: str = "weight",
) -> None:
    """Decline targets, class weights and token scales that do not fit `logits`, the argument `name`, (..., size)."""
    check_floats(**{name: logits})
    if not logits.dim():
        raise Decline(f"{name} has no dimension: its last dimension must be that of classes or features")
    if not n_classes:
        raise Decline("there are 0 classes: a loss needs at least 1")
    if target.dtype is not torch.int64:
        raise Decline(f"target is {target.dtype}: it must be torch.int64")
    check_shape("target", target, logits.shape[:-1], f"that of {name} without its last dimension")
    check_device("target", target, name, logits)
    for other, shape, given in ((weight_name, (n_classes,), weight), ("token_scale", target.shape, token_scale)):
        if given is not None:
            check_shape(other, given, shape, "an element per class" if other == weight_name else "that of target")
            if given.dtype not in (logits.dtype, torch.float32):
                raise Decline(f"{other} is {given.dtype}: it may be {logits.dtype}, as {name} is, or torch.float32")
            check_device(other, given, name, logits)


def check_numbers(reduction: str, label_smoothing: float, softcap: float | None, z_loss: float) -> None:
    """Decline numbers of a loss out of range."""
    if reduction not in REDUCTIONS:
        raise Decline(f'reduction is {reduction!r}: it may be "none", "mean" or "sum"')
    if not 0 <= label_smoothing <= 1:
        raise Decline(f"label_smoothing is {label_smoothing}: it may be from 0 to 1")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise Decline(f"softcap is {softcap}: it may be None, or a finite number above 0")
    if not 0 <= z_loss < float("inf"):
        raise Decline(f"z_loss is {z_loss}: it may be 0, or a finite number above 0")


def targets_of(target: torch.Tensor, weight: torch.Tensor | None, token_scale: torch.Tensor | None) -> Targets:
    """Return contiguous operands beside the logits, with one dimension."""
    return Targets(*[None if each is None else each.contiguous().view(-1) for each in (target, weight, token_scale)])


def refuse_gradients(name: str, **operands: torch.Tensor | None) -> None:
    """Raise Unsupported for operands that require a gradient, which they do not get."""
    for own, operand in operands.items():
        if operand is not None and operand.requires_grad:
            raise Unsupported(name=f"tritonite::{name}", reason=f"{own} has no gradient: detach it")


def fake_results(logits: torch.Tensor, shape: Any, reduction: str, return_z_loss: bool, return_accuracy: bool) -> Any:
    """Return tensors like the loss, z-loss, accuracy and total weight; None for those not asked for."""
    compute = opmath(logits.dtype)
    shape = shape if reduction == "none" else ()
    like = [logits.new_empty(shape, dtype=compute) for _ in range(3)]
    total = logits.new_empty((1,), dtype=compute) if reduction == "mean" else None
    return like[0], like[1] if return_z_loss else None, like[2] if return_accuracy else None, total


def _check(input, target, weight, token_scale, reduction, label_smoothing, softcap, z_loss):
    check_targets("input", input, input.shape[-1] if input.dim() else 0, target, weight, token_scale)
    check_numbers(reduction, label_smoothing, softcap, z_loss)


def _check_inplace(input):
    if share_memory(input):
        raise Decline("input has elements that share memory: make it contiguous, or call without inplace")


def _fake(
    input,
    target,
    weight,
    token_scale,
    ignore_index,
    reduction,
    label_smoothing,
    softcap,
    z_loss,
    inplace,
    return_z_loss,
    return_accuracy,
):
    _check(input, target, weight, token_scale, reduction, label_smoothing, softcap, z_loss)
    rows = input.new_empty((target.numel(),), dtype=opmath(input.dtype))
    weighted = label_smoothing != 0 and weight is not None
    results = fake_results(input, target.shape, reduction, return_z_loss, return_accuracy)
    return *results[:3], rows, results[3], input.new_empty((1,), dtype=rows.dtype) if weighted else None


def _save(ctx, inputs, output):
    input, target, weight, token_scale, *ctx.numbers, ctx.inplace = inputs[:10]
    refuse_gradients("cross_entropy", weight=weight, token_scale=token_scale)
    _, *others = output
    ctx.save_for_backward(input, target, weight, token_scale, *others[2:])
    ctx.mark_non_differentiable(*[each for each in others if each is not None])
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad, *_):
    rest = (None,) * 11
    if grad is None:
        return None, *rest
    input, *saved = ctx.saved_tensors
    if not ctx.inplace:
        return torch.ops.tritonite.cross_entropy_backward(grad, input, *saved, *ctx.numbers), *rest
    logits = input.detach()
    torch.ops.tritonite.cross_entropy_backward_(grad, logits, *saved, *ctx.numbers)
    return logits, *rest


@library_operator(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight, Tensor? token_scale, int ignore_index, str reduction,"
    " float label_smoothing, float? softcap, float z_loss, bool inplace, bool return_z_loss, bool return_accuracy)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    accepts=FLOATS,
    save=_save,
    gradient=_gradient,
    pin=("label_smoothing", "softcap", "z_loss", "inplace", "return_z_loss", "return_accuracy"),
)
def cross_entropy_host(
    input,
    target,
    weight,
    token_scale,
    ignore_index,
    reduction,
    label_smoothing,
    softcap,
    z_loss,
    inplace,
    return_z_loss,
    return_accuracy,
):
    """Return the loss, its z-loss and accuracy, and logsumexp, total weight, sum of weights: online softmax."""
    _check(input, target, weight, token_scale, reduction, label_smoothing, softcap, z_loss)
    common_device([each for each in (input, target, weight, token_scale) if each is not None], ())
    if inplace:
        _check_inplace(input)
    targets, loss = targets_of(target, weight, token_scale), Loss(ignore_index, label_smoothing, softcap, z_loss)
    statistics = make_statistics(target.numel(), input, targets, loss, return_accuracy)
    classes = input.shape[-1]
    read_rows(input, targets, statistics, loss, Classes(classes, classes, 0))
    results = finish(targets, statistics, tuple(target.shape), loss, reduction, classes, return_z_loss)
    return *results[:3], statistics.lse, results.total, statistics.weight_sum


_BACKWARD = (
    " Tensor target, Tensor? weight, Tensor? token_scale, Tensor lse, Tensor? total, Tensor? weight_sum,"
    " int ignore_index, str reduction, float label_smoothing, float? softcap, float z_loss)"
)
_PINNED = ("label_smoothing", "softcap", "z_loss")


def _check_backward(grad, input, target, reduction):
    check_shape("grad", grad, target.shape if reduction == "none" else (), "that of the loss")
    if grad.dtype is not opmath(input.dtype):
        raise Decline(f"grad is {grad.dtype}: it must be {opmath(input.dtype)}, as the loss is")
    check_device("grad", grad, "input", input)


def _differentiate(out, given):
    """Write the gradient by logits to `out`; `given` are the arguments of `cross_entropy_backward`."""
    grad, input, target, weight, token_scale, lse, total, weight_sum, *numbers = given
    ignore_index, reduction, label_smoothing, softcap, z_loss = numbers
    _check(input, target, weight, token_scale, reduction, label_smoothing, softcap, z_loss)
    _check_backward(grad, input, target, reduction)
    common_device([each for each in given[:8] if each is not None], ())
    write_gradient(
        *(grad.contiguous(), input, out, targets_of(target, weight, token_scale)),
        *(Statistics(lse.contiguous(), None, weight_sum=weight_sum), total),
        *(Loss(ignore_index, label_smoothing, softcap, z_loss), Classes(input.shape[-1], input.shape[-1], 0)),
    )


def _fake_backward(*given):
    grad, input, target, weight, token_scale, *_ = given
    reduction, label_smoothing, softcap, z_loss = given[-4:]
    _check(input, target, weight, token_scale, reduction, label_smoothing, softcap, z_loss)
    _check_backward(grad, input, target, reduction)
    return input.new_empty(input.shape)


def _fake_backward_in_place(*given):
    _fake_backward(*given)


@library_operator(
    f"cross_entropy_backward(Tensor grad, Tensor input,{_BACKWARD} -> Tensor",
    fake=_fake_backward,
    accepts=FLOATS,
    pin=_PINNED,
)
def cross_entropy_backward_host(
    grad,
    input,
    target,
    weight,
    token_scale,
    lse,
    total,
    weight_sum,
    ignore_index,
    reduction,
    label_smoothing,
    softcap,
    z_loss,
):
    """Return the gradient of cross_entropy by its logits, which are read once."""
    out = empty(input.shape, input.dtype, input.device)
    numbers = ignore_index, reduction, label_smoothing, softcap, z_loss
    _differentiate(out, (grad, input, target, weight, token_scale, lse, total, weight_sum, *numbers))
    return (out,)


@library_operator(
    f"cross_entropy_backward_(Tensor grad, Tensor(a!) input,{_BACKWARD} -> ()",
    fake=_fake_backward_in_place,
    accepts=FLOATS,
    pin=_PINNED,
)
def cross_entropy_backward_in_place_host(
    grad,
    input,
    target,
    weight,
    token_scale,
    lse,
    total,
    weight_sum,
    ignore_index,
    reduction,
    label_smoothing,
    softcap,
    z_loss,
):
    """Write the gradient of cross_entropy by its logits over the logits."""
    _check_inplace(input)
    numbers = ignore_index, reduction, label_smoothing, softcap, z_loss
    _differentiate(input, (grad, input, target, weight, token_scale, lse, total, weight_sum, *numbers))
    return ()
