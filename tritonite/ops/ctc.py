"""The loss of connectionist temporal classification, and its gradient."""

import torch

from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.ctc import launch
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.registry import exclude, operator

for _overload in ("_ctc_loss.Tensor", "_ctc_loss.Tensor_out", "_ctc_loss_backward.Tensor"):
    exclude(_overload, "the host reads the lengths, and calls the overload for lists")


def _check(log_probs, targets, input_lengths, target_lengths, blank):
    """Return the largest number of labels. Decline operands for which ATen raises."""
    if log_probs.dim() != 3 or log_probs.dtype not in FULL_FLOATS or not log_probs.numel():
        raise Decline(
            f"log_probs of {log_probs.dtype} and shape {tuple(log_probs.shape)}; 3 dimensions of float32 or "
            "float64 with elements are served"
        )
    steps, sequences, classes = log_probs.shape
    if len(input_lengths) != sequences or len(target_lengths) != sequences or not 0 <= blank < classes:
        raise Decline(
            f"{len(input_lengths)} and {len(target_lengths)} lengths for {sequences} sequences, or a blank "
            f"{blank} of {classes} classes"
        )
    if targets.dtype not in (torch.int32, torch.int64) or targets.dim() not in (1, 2):
        raise Decline(f"targets of {targets.dtype} and {targets.dim()} dimensions")
    longest = max(target_lengths)
    fits = targets.shape[0] == sequences and targets.shape[-1] >= longest
    if targets.dim() == 1:
        fits = targets.shape[0] == sum(target_lengths)
    if not fits or min(target_lengths) < 0 or min(input_lengths) < 0 or max(input_lengths) > steps:
        raise Decline(
            f"targets of shape {tuple(targets.shape)} for up to {longest} labels and {max(input_lengths)} of "
            f"{steps} steps"
        )
    return longest


@operator("_ctc_loss", accepts=FULL_FLOATS)
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False, outs=()):
    """Graves et al., "Connectionist temporal classification"."""
    longest = _check(log_probs, targets, input_lengths, target_lengths, blank)
    steps, sequences, _ = log_probs.shape
    shapes, dtypes = [(sequences,), (sequences, steps, 2 * longest + 1)], [log_probs.dtype] * 2
    losses, log_alpha = outs = outputs((log_probs, targets), shapes, dtypes, outs)
    if not (losses.is_contiguous() and log_alpha.is_contiguous()):
        raise Decline("an output that is not contiguous")
    launch.forward(losses, log_alpha, log_probs, targets, input_lengths, target_lengths, blank)
    return outs


@operator("_ctc_loss_backward", accepts=FULL_FLOATS)
def ctc_loss_backward(
    grad,
    log_probs,
    targets,
    input_lengths,
    target_lengths,
    neg_log_likelihood,
    log_alpha,
    blank,
    zero_infinity=False,
    outs=(),
):
    """The gradient by log-probabilities that are a log-softmax; ATen's sums per class may be in no fixed order."""
    longest = _check(log_probs, targets, input_lengths, target_lengths, blank)
    steps, sequences, _ = log_probs.shape
    others = (grad, neg_log_likelihood, log_alpha)
    if any(x.dtype is not log_probs.dtype for x in others) or any(x.shape != (sequences,) for x in others[:2]):
        raise Decline(
            f"gradient of {grad.dtype} and shape {tuple(grad.shape)} for {sequences} losses of {log_probs.dtype}"
        )
    if tuple(log_alpha.shape) != (sequences, steps, 2 * longest + 1) or not log_alpha.is_contiguous():
        raise Decline(f"log_alpha of shape {tuple(log_alpha.shape)}, not the contiguous one of these sequences")
    if not neg_log_likelihood.is_contiguous():
        raise Decline("losses that are not contiguous")
    (gradient,) = outs = outputs((log_probs, targets, *others), [log_probs.shape], [log_probs.dtype], outs)
    if not gradient.is_contiguous():
        raise Decline("a gradient that is not contiguous")
    launch.backward(
        *(gradient, grad, log_probs, targets, input_lengths, target_lengths, neg_log_likelihood, log_alpha, blank),
        zero_infinity,
    )
    return outs
