"""Cross entropy over a linear head whose rows are divided among the processes of a group (Shoeybi et al. 2019).

Each process reads its own logits, in chunks of tokens, and keeps a few numbers per token. Collectives combine these
numbers: first the maximum of the processes' logsumexps, then the sums. In the backward pass each process computes its
logits anew, with the logsumexp of all, and the gradients by the input are added up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import distributed

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.cross_entropy.arguments import Classes, Statistics
from tritonite.engine.cross_entropy.head import read_head
from tritonite.engine.cross_entropy.launch import Loss, finish, make_statistics
from tritonite.engine.iteration import common_device
from tritonite.fused.cross_entropy import check_numbers, fake_results, refuse_gradients, targets_of
from tritonite.fused.linear_head import check_head, head_of
from tritonite.registry import library_operator

_library = torch.ops.tritonite


class Call(NamedTuple):
    """Arguments of a loss over shards that get no gradient, in the order of the operators' schemas."""

    target: torch.Tensor
    class_weight: torch.Tensor | None
    token_scale: torch.Tensor | None
    # ignore_index, reduction, label_smoothing, softcap and z_loss.
    numbers: tuple[Any, ...]
    # accumulate_dtype and chunk_tokens.
    chunks: tuple[Any, ...]
    return_z_loss: bool
    return_accuracy: bool
    process_group: Any


def sharded_loss(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the loss over all shards, z-loss and accuracy; None for results not asked for."""
    refuse_gradients("linear_cross_entropy", class_weight=call.class_weight, token_scale=call.token_scale)
    results: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = _Sharded.apply(input, weight, bias, call)
    return results


class _Sharded(torch.autograd.Function):
    """The loss over shards, whose collectives run between operators."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call) -> Any:
        ctx.call, group = call, call.process_group
        ctx.classes = weight.shape[0] * distributed.get_world_size(group)
        ctx.first = weight.shape[0] * distributed.get_rank(group)
        own = _library.linear_cross_entropy_shard(
            *(input, weight, call.target, bias, call.class_weight, ctx.first, ctx.classes),
            *(*call.numbers, *call.chunks[1:], call.return_accuracy),
        )
        lse, target_logit, smooth, weight_sum, best = combined(own, ctx.classes, group)
        loss, z, accuracy, total = _library.cross_entropy_of_statistics(
            *(call.target, call.class_weight, call.token_scale, lse, target_logit, smooth, weight_sum, best),
            *(ctx.classes, *call.numbers, call.return_z_loss),
        )
        tensors = call.target, bias, call.class_weight, call.token_scale
        ctx.save_for_backward(input, weight, *tensors, lse, total, weight_sum)
        ctx.mark_non_differentiable(*[each for each in (z, accuracy) if each is not None])
        ctx.set_materialize_grads(False)
        return loss, z, accuracy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> Any:
        if grad is None:
            return (None,) * 4
        found = _library.linear_cross_entropy_backward(
            *(grad, *ctx.saved_tensors, ctx.first, ctx.classes, *ctx.call.numbers, *ctx.call.chunks),
            *ctx.needs_input_grad[:3],
        )
        if found[0] is not None:
            distributed.all_reduce(found[0], group=ctx.call.process_group)
        return *found, None


def combined(own: Any, classes: int, group: Any) -> tuple[torch.Tensor | None, ...]:
    """Return (lse, target_logit, smooth, weight_sum, best) of all processes, from those and the maximum of one."""
    lse, target_logit, smooth, weight_sum, best, maximum = own
    if weight_sum is not None:
        distributed.all_reduce(weight_sum, group=group)
    largest = lse.clone()
    distributed.all_reduce(largest, distributed.ReduceOp.MAX, group)
    # Rows of -inf alone are not shifted: -inf - -inf would be nan.
    shift = torch.where(largest.isinf(), 0.0, largest)
    sums = torch.stack([(lse - shift).exp(), target_logit, *(() if smooth is None else (smooth,))])
    distributed.all_reduce(sums, group=group)
    if best is not None:
        largest = maximum.clone()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group)
        best = torch.where(maximum == largest, best, classes)
        distributed.all_reduce(best, distributed.ReduceOp.MIN, group)
    return shift + sums[0].log(), sums[1], None if smooth is None else sums[2], weight_sum, best


def _fake_shard(*given):
    input, weight, target, bias, class_weight, _, classes, _, *numbers, _, return_accuracy = given
    check_head(input, weight, target, bias, class_weight, None, classes)
    check_numbers(*numbers)
    rows = [input.new_empty((target.numel(),), dtype=opmath(input.dtype)) for _ in range(4)]
    smoothing = numbers[1] != 0
    return (
        *rows[:2],
        rows[2] if smoothing else None,
        rows[0].new_empty((1,)) if smoothing and class_weight is not None else None,
        target.new_empty((target.numel(),)) if return_accuracy else None,
        rows[3] if return_accuracy else None,
    )


_NUMBERS = "int ignore_index, str reduction, float label_smoothing, float? softcap, float z_loss"


@library_operator(
    "linear_cross_entropy_shard(Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight,"
    f" int first, int classes, {_NUMBERS}, int? chunk_tokens, bool return_accuracy)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_shard,
    accepts=FLOATS,
    pin=("first", "classes", "label_smoothing", "softcap", "z_loss", "chunk_tokens", "return_accuracy"),
)
def linear_cross_entropy_shard_host(
    input,
    weight,
    target,
    bias,
    class_weight,
    first,
    classes,
    ignore_index,
    reduction,
    label_smoothing,
    softcap,
    z_loss,
    chunk_tokens,
    return_accuracy,
):
    """Return logsumexp, target's logit, smoothing's sums, best class and largest logit of a shard: online softmax."""
    check_head(input, weight, target, bias, class_weight, None, classes)
    check_numbers(reduction, label_smoothing, softcap, z_loss)
    common_device([each for each in (input, weight, target, bias, class_weight) if each is not None], ())
    targets, loss = targets_of(target, class_weight, None), Loss(ignore_index, label_smoothing, softcap, z_loss)
    statistics = make_statistics(target.numel(), input, targets, loss, return_accuracy, return_accuracy)
    head = head_of(input, weight, bias, chunk_tokens)
    read_head(head, targets, statistics, loss, Classes(weight.shape[0], classes, first))
    return list(statistics)


def _fake_of_statistics(*given):
    target, lse, best, reduction, return_z_loss = given[0], given[3], given[7], given[10], given[14]
    return fake_results(lse, target.shape, reduction, return_z_loss, best is not None)


@library_operator(
    "cross_entropy_of_statistics(Tensor target, Tensor? class_weight, Tensor? token_scale, Tensor lse,"
    " Tensor target_logit, Tensor? smooth, Tensor? weight_sum, Tensor? best, int classes,"
    f" {_NUMBERS}, bool return_z_loss) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_of_statistics,
    accepts=(torch.int64,),
    pin=("classes", "label_smoothing", "softcap", "z_loss", "return_z_loss"),
)
def cross_entropy_of_statistics_host(
    target,
    class_weight,
    token_scale,
    lse,
    target_logit,
    smooth,
    weight_sum,
    best,
    classes,
    ignore_index,
    reduction,
    label_smoothing,
    softcap,
    z_loss,
    return_z_loss,
):
    """Return the loss, z-loss, accuracy and total weight of rows whose logits' statistics are known."""
    common_device([each for each in (target, class_weight, token_scale, lse, target_logit) if each is not None], ())
    statistics = Statistics(lse.contiguous(), target_logit.contiguous(), smooth, weight_sum, best)
    loss = Loss(ignore_index, label_smoothing, softcap, z_loss)
    targets = targets_of(target, class_weight, token_scale)
    return finish(targets, statistics, tuple(target.shape), loss, reduction, classes, return_z_loss)
