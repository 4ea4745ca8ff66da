"""Update rules of torch.optim's optimisers, of Muon's two elementwise parts, and of Lion.

A formula is the update equation in torch.optim's documentation. Numbers that depend on the step and the options alone,
such as bias corrections, are arguments, so that the host computes them once in float64. A rule named `..._capturable`
computes them on the device, from step counts in device memory. A number `one_minus_beta` is 1 - beta,
because that difference of float32 numbers would lose digits.

Quotients and roots of float32 are approximations within 2 ulp. An update is added to a larger parameter, whose rounding
is coarser.

`weight_decay` is an L2 penalty; None leaves it out. `shrink` is 1 - lr * weight_decay, the factor of decoupled weight
decay; None leaves it out. With `maximize` the gradient is negated.
"""
# Over 500 lines: the rules of torch.optim, one after the other, over a few shared device functions.

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.language.math import divide, maximum_nan, minimum_nan, real_power, square_root
from tritonite.ops.fused_optimizers import bias_correction
from tritonite.optim.declare import rule


@triton.jit
def _gradient(param, grad, weight_decay, maximize: tl.constexpr):
    """Return the gradient to descend, with the L2 penalty's part."""
    if maximize:
        grad = -grad
    if weight_decay is not None:
        grad = grad + weight_decay * param
    return grad


@triton.jit
def _moments(grad, exp_avg, exp_avg_sq, one_minus_beta1, beta2, one_minus_beta2):
    """Return the exponential moving averages of the gradient and of its square."""
    exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg)
    return exp_avg, beta2 * exp_avg_sq + one_minus_beta2 * grad * grad


@triton.jit
def _sign(x):
    """Return -1, 0 or 1; nan for nan."""
    sign = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(x.dtype)
    return tl.where(x != x, x, sign)


@rule(
    state=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    numbers=("step_size", "root_of_correction2", "one_minus_beta1", "beta2", "one_minus_beta2", "eps")
    + ("weight_decay", "shrink"),
    flags=("maximize",),
)
def adam(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    step_size,
    root_of_correction2,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    weight_decay,
    shrink,
    maximize,
):
    """Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), and AMSGrad if `max_exp_avg_sq` is given.

    step_size is lr / (1 - beta1**step), root_of_correction2 the square root of 1 - beta2**step.
    """
    grad = _gradient(param, grad, weight_decay, maximize)
    if shrink is not None:
        param = param * shrink
    exp_avg, exp_avg_sq = _moments(grad, exp_avg, exp_avg_sq, one_minus_beta1, beta2, one_minus_beta2)
    second = exp_avg_sq
    if max_exp_avg_sq is not None:
        second = maximum_nan(max_exp_avg_sq, exp_avg_sq)
    denominator = divide(tl.sqrt(second), root_of_correction2) + eps
    param = param - step_size * (exp_avg / denominator)
    results = (param, exp_avg, exp_avg_sq)
    if max_exp_avg_sq is not None:
        results = results + (second,)
    return results


_adam = adam.formula


@rule(
    state=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    elements=("step",),
    numbers=("lr", "beta1", "beta2", "eps", "weight_decay"),
    flags=("decoupled", "maximize"),
    exact=("step", "lr", "beta1", "beta2", "weight_decay"),
)
def adam_capturable(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    step,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    decoupled,
    maximize,
):
    """Adam, AdamW and AMSGrad, with bias corrections from the number of earlier steps in device memory."""
    dtype: tl.constexpr = param.dtype
    step_size = lr.to(dtype) / bias_correction(beta1, step + 1, dtype)
    root_of_correction2 = tl.sqrt(bias_correction(beta2, step + 1, dtype))
    penalty, shrink = None, None
    if weight_decay is not None:
        if decoupled:
            shrink = (1 - lr * weight_decay).to(dtype)
        else:
            penalty = weight_decay.to(dtype)
    return _adam(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq,
        step_size,
        root_of_correction2,
        (1 - beta1).to(dtype),
        beta2.to(dtype),
        (1 - beta2).to(dtype),
        eps,
        penalty,
        shrink,
        maximize,
    )


@rule(
    state=("exp_avg", "exp_avg_sq"),
    numbers=("grad_step_size", "exp_avg_step_size", "correction2", "one_minus_beta1", "beta2", "one_minus_beta2")
    + ("eps", "weight_decay", "shrink"),
    flags=("maximize",),
)
def nadam(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    grad_step_size,
    exp_avg_step_size,
    correction2,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    weight_decay,
    shrink,
    maximize,
):
    """NAdam (Dozat 2016).

    With mu_t the momentum of step t and P_t the product of mu_1 to mu_t, grad_step_size is lr (1 - mu_t) / (1 - P_t),
    exp_avg_step_size is lr mu_(t+1) / (1 - P_(t+1)), and correction2 is 1 - beta2**t.
    """
    grad = _gradient(param, grad, weight_decay, maximize)
    if shrink is not None:
        param = param * shrink
    exp_avg, exp_avg_sq = _moments(grad, exp_avg, exp_avg_sq, one_minus_beta1, beta2, one_minus_beta2)
    denominator = tl.sqrt(divide(exp_avg_sq, correction2)) + eps
    update = (grad_step_size * grad + exp_avg_step_size * exp_avg) / denominator
    return param - update, exp_avg, exp_avg_sq


_nadam = nadam.formula


@triton.jit
def _nadam_momentum(step, beta1, momentum_decay):
    """Return NAdam's momentum of a step."""
    return beta1 * (1 - 0.5 * real_power(tl.full(step.shape, 0.96, tl.float64), step * momentum_decay))


@rule(
    state=("exp_avg", "exp_avg_sq"),
    elements=("step", "mu_product"),
    numbers=("lr", "beta1", "beta2", "eps", "weight_decay", "momentum_decay"),
    flags=("decoupled", "maximize"),
    exact=("step", "mu_product", "lr", "beta1", "beta2", "weight_decay", "momentum_decay"),
)
def nadam_capturable(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    step,
    mu_product,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    momentum_decay,
    decoupled,
    maximize,
):
    """NAdam, with the number of earlier steps and the product of their momenta in device memory."""
    dtype: tl.constexpr = param.dtype
    mu = _nadam_momentum(step + 1, beta1, momentum_decay)
    mu_next = _nadam_momentum(step + 2, beta1, momentum_decay)
    product = mu_product * mu
    penalty, shrink = None, None
    if weight_decay is not None:
        if decoupled:
            shrink = (1 - lr * weight_decay).to(dtype)
        else:
            penalty = weight_decay.to(dtype)
    return _nadam(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        (lr * (1 - mu) / (1 - product)).to(dtype),
        (lr * mu_next / (1 - product * mu_next)).to(dtype),
        bias_correction(beta2, step + 1, dtype),
        (1 - beta1).to(dtype),
        beta2.to(dtype),
        (1 - beta2).to(dtype),
        eps,
        penalty,
        shrink,
        maximize,
    )


@rule(numbers=("beta1", "momentum_decay"), exact=("mu_product", "step", "beta1", "momentum_decay"))
def nadam_product(mu_product, step, beta1, momentum_decay):
    """Product of NAdam's momenta up to `step`."""
    return mu_product * _nadam_momentum(step, beta1, momentum_decay)


@rule(
    state=("exp_avg", "exp_avg_sq"),
    numbers=("step_size", "rectification", "one_minus_beta1", "beta2", "one_minus_beta2", "eps")
    + ("weight_decay", "shrink"),
    flags=("maximize",),
)
def radam(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    step_size,
    rectification,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    weight_decay,
    shrink,
    maximize,
):
    """RAdam (Liu et al. 2020).

    step_size is lr / (1 - beta1**step). `rectification` is r_t times the square root of 1 - beta2**step, or 0 for a
    step without an adaptive learning rate.
    """
    grad = _gradient(param, grad, weight_decay, maximize)
    if shrink is not None:
        param = param * shrink
    exp_avg, exp_avg_sq = _moments(grad, exp_avg, exp_avg_sq, one_minus_beta1, beta2, one_minus_beta2)
    adaptive = rectification / (tl.sqrt(exp_avg_sq) + eps)
    update = step_size * exp_avg * tl.where(rectification > 0, adaptive, 1.0)
    return param - update, exp_avg, exp_avg_sq


_radam = radam.formula


@rule(
    state=("exp_avg", "exp_avg_sq"),
    elements=("step",),
    numbers=("lr", "beta1", "beta2", "eps", "weight_decay"),
    flags=("decoupled", "maximize"),
    exact=("step", "lr", "beta1", "beta2", "weight_decay"),
)
def radam_capturable(param, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, decoupled, maximize):
    """RAdam, with the number of earlier steps in device memory."""
    dtype: tl.constexpr = param.dtype
    power = real_power(beta2, step + 1)
    limit = 2 / (1 - beta2) - 1
    length = limit - 2 * (step + 1) * power / (1 - power)
    ratio = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
    adaptive = length > 5
    rectification = tl.where(adaptive, square_root(tl.where(adaptive, ratio, 0.0) * (1 - power)), 0.0)
    penalty, shrink = None, None
    if weight_decay is not None:
        if decoupled:
            shrink = (1 - lr * weight_decay).to(dtype)
        else:
            penalty = weight_decay.to(dtype)
    return _radam(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        lr.to(dtype) / bias_correction(beta1, step + 1, dtype),
        rectification.to(dtype),
        (1 - beta1).to(dtype),
        beta2.to(dtype),
        (1 - beta2).to(dtype),
        eps,
        penalty,
        shrink,
        maximize,
    )


@rule(
    state=("exp_avg", "exp_inf"),
    numbers=("step_size", "one_minus_beta1", "beta2", "eps", "weight_decay"),
    flags=("maximize",),
)
def adamax(param, grad, exp_avg, exp_inf, step_size, one_minus_beta1, beta2, eps, weight_decay, maximize):
    """Adamax (Kingma and Ba 2015). step_size is lr / (1 - beta1**step)."""
    grad = _gradient(param, grad, weight_decay, maximize)
    exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg)
    exp_inf = maximum_nan(beta2 * exp_inf, tl.abs(grad) + eps)
    return param - step_size * (exp_avg / exp_inf), exp_avg, exp_inf


_adamax = adamax.formula


@rule(
    state=("exp_avg", "exp_inf"),
    elements=("step",),
    numbers=("lr", "beta1", "beta2", "eps", "weight_decay"),
    flags=("maximize",),
    exact=("step", "lr", "beta1"),
)
def adamax_capturable(param, grad, exp_avg, exp_inf, step, lr, beta1, beta2, eps, weight_decay, maximize):
    """Adamax, with the number of earlier steps in device memory."""
    dtype: tl.constexpr = param.dtype
    step_size = lr.to(dtype) / bias_correction(beta1, step + 1, dtype)
    one_minus_beta1 = (1 - beta1).to(dtype)
    return _adamax(param, grad, exp_avg, exp_inf, step_size, one_minus_beta1, beta2, eps, weight_decay, maximize)


@rule(
    state=("square_avg", "acc_delta"),
    numbers=("lr", "rho", "one_minus_rho", "eps", "weight_decay"),
    flags=("maximize",),
)
def adadelta(param, grad, square_avg, acc_delta, lr, rho, one_minus_rho, eps, weight_decay, maximize):
    """Adadelta (Zeiler 2012)."""
    grad = _gradient(param, grad, weight_decay, maximize)
    square_avg = rho * square_avg + one_minus_rho * grad * grad
    delta = tl.sqrt(acc_delta + eps) / tl.sqrt(square_avg + eps) * grad
    acc_delta = rho * acc_delta + one_minus_rho * delta * delta
    return param - lr * delta, square_avg, acc_delta


@rule(state=("sum",), numbers=("step_size", "eps", "weight_decay"), flags=("maximize",))
def adagrad(param, grad, sum, step_size, eps, weight_decay, maximize):
    """Adagrad (Duchi et al. 2011). step_size is lr / (1 + (step - 1) lr_decay)."""
    grad = _gradient(param, grad, weight_decay, maximize)
    total = sum + grad * grad
    return param - step_size * (grad / (tl.sqrt(total) + eps)), total


_adagrad = adagrad.formula


@rule(
    state=("sum",),
    elements=("step",),
    numbers=("lr", "lr_decay", "eps", "weight_decay"),
    flags=("maximize",),
    exact=("step", "lr", "lr_decay"),
)
def adagrad_capturable(param, grad, sum, step, lr, lr_decay, eps, weight_decay, maximize):
    """Adagrad, with the number of earlier steps in device memory."""
    step_size = (lr / (1 + step * lr_decay)).to(param.dtype)
    return _adagrad(param, grad, sum, step_size, eps, weight_decay, maximize)


@rule(
    state=("momentum_buffer",),
    numbers=("lr", "momentum", "one_minus_dampening", "weight_decay"),
    flags=("first", "nesterov", "maximize"),
)
def sgd(param, grad, momentum_buffer, lr, momentum, one_minus_dampening, weight_decay, first, nesterov, maximize):
    """Stochastic gradient descent, with momentum (Sutskever et al. 2013) if `momentum_buffer` is given.

    The `first` step with momentum stores the gradient to the buffer, whatever the buffer holds.
    """
    grad = _gradient(param, grad, weight_decay, maximize)
    if momentum_buffer is None:
        results = param - lr * grad
    else:
        if first:
            momentum_buffer = grad
        else:
            momentum_buffer = momentum * momentum_buffer + one_minus_dampening * grad
        if nesterov:
            grad = grad + momentum * momentum_buffer
        else:
            grad = momentum_buffer
        results = (param - lr * grad, momentum_buffer)
    return results


@rule(
    state=("square_avg", "grad_avg", "momentum_buffer"),
    numbers=("lr", "decay", "one_minus_decay", "eps", "momentum", "weight_decay"),
    flags=("maximize",),
)
def rmsprop(
    param,
    grad,
    square_avg,
    grad_avg,
    momentum_buffer,
    lr,
    decay,
    one_minus_decay,
    eps,
    momentum,
    weight_decay,
    maximize,
):
    """RMSprop (Hinton 2012), centered (Graves 2013) if `grad_avg` is given, with momentum if its buffer is given.

    `decay` is torch's alpha.
    """
    grad = _gradient(param, grad, weight_decay, maximize)
    square_avg = decay * square_avg + one_minus_decay * grad * grad
    results = (square_avg,)
    variance = square_avg
    if grad_avg is not None:
        mean = grad_avg + one_minus_decay * (grad - grad_avg)
        variance = square_avg - mean * mean
        results = results + (mean,)
    update = grad / (tl.sqrt(variance) + eps)
    if momentum_buffer is not None:
        update = momentum * momentum_buffer + update
        results = results + (update,)
    return (param - lr * update,) + results


@rule(
    state=("ax",),
    elements=("eta", "mu"),
    numbers=("lambd", "weight_decay"),
    flags=("maximize",),
    exact=("eta", "lambd"),
)
def asgd(param, grad, ax, eta, mu, lambd, weight_decay, maximize):
    """Averaged stochastic gradient descent (Polyak and Juditsky 1992); eta is the step size."""
    grad = _gradient(param, grad, weight_decay, maximize)
    param = param * (1 - lambd * eta).to(param.dtype) - eta.to(param.dtype) * grad
    # At a weight of 1 the average may be infinite.
    return param, tl.where(mu == 1, param, ax + mu * (param - ax))


@rule(
    state=("mu",),
    numbers=("lr", "lambd", "power", "t0"),
    exact=("eta", "step", "lr", "lambd", "power", "t0"),
)
def asgd_rates(eta, step, mu, lr, lambd, power, t0):
    """Step size and average's weight that ASGD uses in the step after `step`. `power` is torch's alpha."""
    return lr / real_power(1 + lambd * lr * step, power), 1 / tl.maximum(step - t0, 1.0)


@rule(
    state=("prev", "step_size"),
    numbers=("eta_minus", "eta_plus", "least", "most"),
    flags=("maximize",),
)
def rprop(param, grad, prev, step_size, eta_minus, eta_plus, least, most, maximize):
    """Rprop (Riedmiller and Braun 1993), without the step back where the gradient's sign changes."""
    grad = _gradient(param, grad, None, maximize)
    product = grad * prev
    factor = tl.where(product > 0, eta_plus, tl.where(product < 0, eta_minus, tl.where(product == 0, 1.0, product)))
    step_size = minimum_nan(maximum_nan(step_size * factor, least), most)
    grad = tl.where(product < 0, 0.0, grad)
    return param - _sign(grad) * step_size, grad, step_size


@rule(state=("update",), numbers=("one_minus_momentum", "momentum"), flags=("nesterov",))
def muon_momentum(momentum_buffer, grad, update, one_minus_momentum, momentum, nesterov):
    """Momentum of Muon (Jordan et al. 2024). `update` is the matrix to orthogonalise."""
    momentum_buffer = momentum_buffer + one_minus_momentum * (grad - momentum_buffer)
    if nesterov:
        update = grad + momentum * (momentum_buffer - grad)
    else:
        update = momentum_buffer
    return momentum_buffer, update


@rule(numbers=("lr", "shrink"))
def muon_update(param, update, lr, shrink):
    """Step of Muon along an orthogonalised update, after decoupled weight decay by the factor `shrink`."""
    return param * shrink - lr * update


@rule(state=("exp_avg",), numbers=("lr", "beta1", "beta2", "weight_decay"))
def lion(param, grad, exp_avg, lr, beta1, beta2, weight_decay):
    """Lion (Chen et al. 2023)."""
    update = _sign(beta1 * exp_avg + (1 - beta1) * grad)
    param = param - lr * (update + weight_decay * param)
    return param, beta2 * exp_avg + (1 - beta2) * grad
