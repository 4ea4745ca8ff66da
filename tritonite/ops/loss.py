"""Pointwise losses and their gradients, and the gradient of dropout.

A loss is one formula. A pointwise kernel applies it for reduction "none", and a `Reduction` with the formula as leaf
gives the mean or sum. Gradients take the reduction as a factor: 1, or 1 / number of elements for a mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.iteration import broadcast_shape, in_memory_format, output_strides
from tritonite.engine.outputs import outputs, share_storage
from tritonite.engine.pointwise.declare import Pointwise
from tritonite.engine.rows.declare import Reduction, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import log_and_log1m, maximum_nan, multiply_add, true_divide
from tritonite.ops import aten
from tritonite.ops.aten import ON_CPU
from tritonite.ops.reduction.sums import added_to_zero, check_floats, over_count
from tritonite.registry import operator, pointwise, scalar_kernel
from tritonite.runtime.contract import empty, empty_strided

NONE, MEAN, SUM = 0, 1, 2


@triton.jit
def _mean_with_number(state, count, number):
    return over_count(state, count)


@triton.jit
def _sum_with_number(state, count, number):
    return added_to_zero(state, count)


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss formula as a pointwise kernel, and as reductions to its mean and sum.

    `reductions` is keyed by the positions of the operands that are not None, and by MEAN or SUM.
    """

    kernel: Pointwise
    reductions: dict[tuple[tuple[int, ...], int], Reduction]

    @classmethod
    def of(
        cls,
        kernel: Pointwise,
        leaves: dict[tuple[int, ...], Any],
        parametric: bool = False,
        asserting: bool = False,
        projects: dict[int, Any] | None = None,
    ) -> "Loss":
        """Make a loss. `leaves` are the formula as functions of the operands at the given positions.

        With `parametric` the formula takes a number, too. `projects`, by MEAN and SUM, replace the usual ones.
        """
        mean, total = (_mean_with_number, _sum_with_number) if parametric else (over_count, added_to_zero)
        projects = projects or {MEAN: mean, SUM: total}
        return cls(
            kernel,
            {
                (given, reduction): Reduction(
                    (0,), leaf, add_states, project, parametric=parametric, asserting=asserting
                )
                for given, leaf in leaves.items()
                for reduction, project in projects.items()
            },
        )

    def run(
        self,
        operands: Sequence[torch.Tensor | None],
        reduction: int,
        outs: Sequence[torch.Tensor],
        numbers: Sequence[float] = (),
    ) -> Sequence[torch.Tensor]:
        """Compute the loss of each element, or the mean or sum of all, in the first operand's dtype."""
        if reduction not in (NONE, MEAN, SUM):
            raise Decline(f"reduction {reduction}; 0, 1 and 2 are served")
        check_floats(*operands)
        if reduction == NONE:
            return self.kernel.run((*operands, *numbers), outs)
        given = tuple([i for i, operand in enumerate(operands) if operand is not None])
        tensors = [operand for operand in operands if operand is not None]
        shape = broadcast_shape([tensor.shape for tensor in tensors])
        tensors = [tensor if tensor.shape == shape else tensor.expand(shape) for tensor in tensors]
        dtype = tensors[0].dtype
        chosen = self.reductions[given, reduction]
        return reduced(chosen, tensors, None, False, (dtype,), outs, opmath(dtype), numbers=numbers)


def _check_operands(
    operands: Sequence[torch.Tensor | None], shape: Sequence[int], reduction: int, outs: Sequence[torch.Tensor]
) -> None:
    """Decline operands for which ATen raises: ATen computes in steps, and each step writes the output."""
    tensors = [operand for operand in operands if operand is not None]
    check_floats(*tensors)
    if broadcast_shape([tensor.shape for tensor in tensors]) != tuple(shape):
        raise Decline(f"an operand that does not broadcast to {tuple(shape)}")
    if outs:
        outputs(tensors, [shape if reduction == NONE else ()], [tensors[0].dtype], outs)


def _output_like(like: torch.Tensor, number: bool = False) -> tuple[torch.Tensor]:
    """Allocate an output with the strides of ATen's result of one operand, and of a number if `number`."""
    strides = output_strides(tuple(like.shape), [(like.shape, like.stride())], number)
    return (empty_strided(like.shape, strides, like.dtype, like.device),)


@scalar_kernel(accepts=FLOATS)
def _mse(self, target):
    return (self - target) * (self - target)


_mse_loss = Loss.of(_mse, {(0, 1): _mse.formula})


@operator("mse_loss", accepts=FLOATS, promotion="default")
def mse_loss(self, target, reduction, outs=()):
    return _mse_loss.run((self, target), reduction, outs)


@scalar_kernel(accepts=FLOATS, cast=("beta",))
def _smooth_l1(self, target, beta):
    distance = tl.abs(self - target)
    beta = tl.broadcast_to(beta.to(distance.dtype), distance.shape)
    inner = true_divide(0.5 * distance * distance, beta)
    return tl.where(distance < beta, inner, distance - 0.5 * beta)


_smooth_l1_loss = Loss.of(_smooth_l1, {(0, 1): _smooth_l1.formula}, parametric=True)


@operator("smooth_l1_loss", accepts=FLOATS, promotion="default", pin=("beta",))
def smooth_l1_loss(self, target, reduction, beta, outs=()):
    if not beta >= 0:
        raise Decline(f"beta is {beta}; it has to be at least 0")
    return _smooth_l1_loss.run((self, target), reduction, outs, (beta,))


@scalar_kernel(accepts=FLOATS, cast=("delta",))
def _huber(self, target, delta):
    distance = tl.abs(self - target)
    delta = delta.to(distance.dtype)
    return tl.where(distance < delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))


_huber_loss = Loss.of(_huber, {(0, 1): _huber.formula}, parametric=True)


@operator("huber_loss", accepts=FLOATS, promotion="default", pin=("delta",))
def huber_loss(self, target, reduction, delta, outs=()):
    if not delta > 0:
        raise Decline(f"delta is {delta}; it has to be above 0")
    if reduction == NONE and not outs and self.shape == target.shape:
        # ATen ignores the target's strides.
        outs = _output_like(self)
    return _huber_loss.run((self, target), reduction, outs, (delta,))


@scalar_kernel(accepts=FLOATS)
def _soft_margin(self, target):
    return libdevice.log1p(libdevice.exp(-self * target))


_soft_margin_loss = Loss.of(_soft_margin, {(0, 1): _soft_margin.formula})


@operator("soft_margin_loss", accepts=FLOATS)
def soft_margin_loss(self, target, reduction, outs=()):
    _check_operands((self, target), self.shape, reduction, outs)
    if reduction == NONE and not outs:
        outs = _output_like(self)
    return _soft_margin_loss.run((self, target), reduction, outs)


@triton.jit
def _unit_cross_entropy(self, target):
    """Cross entropy of a target in [0, 1]; nan for an input outside [0, 1]."""
    log, other_log = log_and_log1m(self)
    lowest = tl.full(log.shape, -100.0, log.dtype)
    return (target - 1.0) * maximum_nan(other_log, lowest) - target * maximum_nan(log, lowest)


@triton.jit
def _is_in_unit(target):
    """0 <= target <= 1 by one comparison: the sign of the product is exact."""
    return (target - 1.0) * target <= 0.0


@triton.jit
def _assert_in_unit(in_unit):
    # The text of ATen's two assertions, as one: an assertion synchronises the program.
    tl.device_assert(in_unit, "input_val >= zero && input_val <= one && target_val >= zero && target_val <= one")


@scalar_kernel(accepts=FLOATS, asserting=True)
def _cross_entropy(self, target, weight):
    loss = _unit_cross_entropy(self, target)
    # The loss of an input outside [0, 1] is nan, which saves the comparison of the input.
    _assert_in_unit((loss == loss) & _is_in_unit(target))
    if weight is not None:
        loss = loss * weight
    return loss


@triton.jit
def _cross_entropy_or_nan(self, target):
    # Losses are at least 0, so that without weights the sum is nan only if an element is: assert on the sum alone.
    return tl.where(_is_in_unit(target), _unit_cross_entropy(self, target), float("nan"))


@triton.jit
def _asserted_sum(state, count):
    _assert_in_unit(state == state)
    return added_to_zero(state, count)


@triton.jit
def _asserted_mean(state, count):
    return over_count(_asserted_sum(state, count), count)


_weighted_cross_entropy = Loss.of(_cross_entropy, {(0, 1, 2): _cross_entropy.formula}, asserting=True)
_unweighted_cross_entropy = Loss.of(
    _cross_entropy, {(0, 1): _cross_entropy_or_nan}, asserting=True, projects={MEAN: _asserted_mean, SUM: _asserted_sum}
)


@operator("binary_cross_entropy", accepts=FLOATS)
def binary_cross_entropy(self, target, weight, reduction, outs=()):
    """Binary cross entropy, with logarithms clamped to at least -100."""
    if self.shape != target.shape:
        raise Decline(f"target of shape {tuple(target.shape)} for an input of shape {tuple(self.shape)}")
    if outs and reduction != NONE:
        raise Decline("an output for a reduced loss, which ATen first uses in the input's shape")
    _check_operands((self, target, weight), self.shape, reduction, outs)
    if reduction == NONE and not outs:
        outs = _output_like(self)
    loss = _unweighted_cross_entropy if weight is None else _weighted_cross_entropy
    return loss.run((self, target, weight), reduction, outs)


@scalar_kernel(accepts=FLOATS)
def _logits_cross_entropy(self, target, weight, pos_weight):
    log_sigmoid = tl.where(self < 0.0, self, tl.zeros_like(self)) - libdevice.log1p(libdevice.exp(-tl.abs(self)))
    if pos_weight is not None:
        # ATen rounds both terms before the difference, so that equal terms cancel to 0.
        log_sigmoid = multiply_add(log_sigmoid, (pos_weight - 1.0) * target + 1.0, tl.zeros_like(self))
    loss = multiply_add(1.0 - target, self, tl.zeros_like(self)) - log_sigmoid
    if weight is not None:
        loss = loss * weight
    return loss


_logits_cross_entropy_formula = _logits_cross_entropy.formula


@triton.jit
def _plain_logits_cross_entropy(self, target):
    return _logits_cross_entropy_formula(self, target, None, None)


@triton.jit
def _weighted_logits_cross_entropy(self, target, weight):
    return _logits_cross_entropy_formula(self, target, weight, None)


@triton.jit
def _positive_logits_cross_entropy(self, target, pos_weight):
    return _logits_cross_entropy_formula(self, target, None, pos_weight)


_binary_cross_entropy_with_logits = Loss.of(
    _logits_cross_entropy,
    {
        (0, 1): _plain_logits_cross_entropy,
        (0, 1, 2): _weighted_logits_cross_entropy,
        (0, 1, 3): _positive_logits_cross_entropy,
        (0, 1, 2, 3): _logits_cross_entropy.formula,
    },
)


@operator("binary_cross_entropy_with_logits", accepts=FLOATS)
def binary_cross_entropy_with_logits(self, target, weight, pos_weight, reduction, outs=()):
    """Cross entropy of logits, which broadcast to the target's shape."""
    if pos_weight is not None and self.shape != target.shape:
        raise Decline(f"target of shape {tuple(target.shape)} for an input of shape {tuple(self.shape)}")
    _check_operands((self, target, weight, pos_weight), target.shape, reduction, outs)
    if reduction == NONE and not outs:
        outs = _output_like(target, number=True)
    return _binary_cross_entropy_with_logits.run((self, target, weight, pos_weight), reduction, outs)


def _mean_factor(tensor, reduction):
    if reduction not in (NONE, MEAN, SUM):
        raise Decline(f"reduction {reduction}; 0, 1 and 2 are served")
    return 1.0 / tensor.numel() if reduction == MEAN and tensor.numel() else 1.0


def _check_gradient(grad_output, self, *others):
    """Decline shapes that ATen's steps broadcast one after the other, with another result or an error."""
    if any(other is not None and other.shape != self.shape for other in others):
        raise Decline(f"an operand whose shape is not the input's {tuple(self.shape)}")
    if grad_output.dim() and grad_output.shape != self.shape:
        raise Decline(f"gradient of shape {tuple(grad_output.shape)} for an input of shape {tuple(self.shape)}")


def _with_factor(grad_output, self, target, reduction, *numbers, factor=1.0):
    if broadcast_shape((grad_output.shape, self.shape, target.shape)) != tuple(self.shape):
        raise Decline(f"operands that do not broadcast to the input's shape {tuple(self.shape)}")
    return grad_output, self, target, factor * _mean_factor(self, reduction), *numbers


def _not_negative(number):
    if isinstance(number, complex) or not number >= 0:
        raise Decline(f"a threshold of {number}; it has to be real and at least 0")
    return number


def _positive(number):
    if _not_negative(number) == 0:
        raise Decline("a threshold of 0, where CPUs and GPUs give zeros of different signs")
    return number


def _contiguous_with_factor(grad_output, self, target, reduction):
    if not (self.is_contiguous() and target.is_contiguous()) or (grad_output.dim() and not grad_output.is_contiguous()):
        raise Decline("operands that are not contiguous, for which each of ATen's steps chooses new strides")
    _check_gradient(grad_output, self, target)
    return _with_factor(grad_output, self, target, reduction)


@pointwise(
    "mse_loss_backward",
    accepts=FLOATS,
    one_dtype=True,
    contiguous=True,
    prepare=lambda grad_output, self, target, reduction: _with_factor(grad_output, self, target, reduction, factor=2.0),
)
def mse_loss_backward(grad_output, self, target, factor):
    return factor * (self - target) * grad_output


@pointwise(
    "smooth_l1_loss_backward",
    accepts=FLOATS,
    one_dtype=True,
    contiguous=True,
    prepare=lambda grad_output, self, target, reduction, beta: _with_factor(
        grad_output, self, target, reduction, _not_negative(beta)
    ),
    pin=("beta",),
)
def smooth_l1_loss_backward(grad_output, self, target, factor, beta):
    """Gradient of `smooth_l1_loss`. With beta 0 ATen's CPU kernel takes the linear branch at 0, its GPU kernel not."""
    x = self - target
    inner = true_divide(factor * x * grad_output, beta)
    outer = tl.where(x < 0.0, -1.0 * factor, factor) * grad_output
    if ON_CPU:
        # ATen's vectorised CPU kernel divides first, which decides where extreme numbers overflow or underflow.
        inner = factor * true_divide(x, beta) * grad_output
        outer = tl.where(x == 0.0, -1.0 * factor * grad_output, outer)
        return tl.where(tl.abs(x) >= beta, outer, inner)
    return tl.where(tl.abs(x) > beta, outer, inner)


@pointwise(
    "huber_loss_backward",
    accepts=FLOATS,
    one_dtype=True,
    contiguous=True,
    prepare=lambda grad_output, self, target, reduction, delta: _with_factor(
        grad_output, self, target, reduction, _positive(delta)
    ),
    pin=("delta",),
)
def huber_loss_backward(grad_output, self, target, factor, delta):
    x = self - target
    outer = tl.where(x <= -1.0 * delta, -1.0 * factor, factor) * grad_output * delta
    return tl.where((x <= -1.0 * delta) | (x >= delta), outer, factor * x * grad_output)


def _decline_output_in(tensor, name, outs):
    """Decline an output that shares memory with `tensor`, which ATen reads after its first step has written."""
    if tensor is not None and any(share_storage(out, tensor) for out in outs):
        raise Decline(f"an output that shares memory with the {name}")


@scalar_kernel(accepts=FLOATS, cast=("factor",), one_dtype=True)
def _soft_margin_gradient(grad_output, self, target, factor):
    decay = libdevice.exp(-1.0 * target * self)
    return -1.0 * factor * target * true_divide(decay, decay + 1.0) * grad_output


@operator("soft_margin_loss_backward", kernels=(_soft_margin_gradient,))
def soft_margin_loss_backward(grad_output, self, target, reduction, outs=()):
    _decline_output_in(grad_output, "gradient", outs)
    return _soft_margin_gradient.run(_contiguous_with_factor(grad_output, self, target, reduction), outs)


@scalar_kernel(accepts=FLOATS, cast=("factor",), one_dtype=True)
def _cross_entropy_gradient(self, target, grad_output, weight, factor):
    variance = (1.0 - self) * self
    gradient = true_divide(grad_output * (self - target), tl.maximum(variance, 1e-12))
    if weight is not None:
        gradient = gradient * weight
    return gradient * factor


@operator("binary_cross_entropy_backward", kernels=(_cross_entropy_gradient,))
def binary_cross_entropy_backward(grad_output, self, target, weight=None, reduction=MEAN, outs=()):
    _check_gradient(grad_output, self, target, weight)
    _decline_output_in(weight, "weight", outs)
    return _cross_entropy_gradient.run((self, target, grad_output, weight, _mean_factor(self, reduction)), outs)


@scalar_kernel(accepts=FLOATS, own=("mask",), cast=("scale",))
def _kept_gradient(grad_output, mask, scale):
    return grad_output * mask.to(grad_output.dtype) * scale


@operator("native_dropout_backward", kernels=(_kept_gradient,))
def native_dropout_backward(grad_output, mask, scale, outs=()):
    """grad_output * mask * scale. On a GPU a gradient without a memory format has a contiguous result."""
    if mask.dtype is not torch.bool:
        raise Decline(f"mask of dtype {mask.dtype}; bool is served")
    if mask.shape != grad_output.shape and not grad_output.is_contiguous():
        raise Decline(f"mask of shape {tuple(mask.shape)} for a gradient of shape {tuple(grad_output.shape)}")
    if aten.on_gpu() and not outs and mask.shape == grad_output.shape and not in_memory_format(grad_output):
        outs = (empty(grad_output.shape, grad_output.dtype, grad_output.device),)
    return _kept_gradient.run((grad_output, mask, scale), outs)
