"""Updates of torch.optim's classes: which tensors and numbers of a group each rule is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tritonite.errors import Unsupported
from tritonite.optim import rules
from tritonite.optim.muon import update_muon
from tritonite.optim.tensors import Tensors, number, together

# Matrices that Muon orthogonalises together take 256 MiB in bfloat16, and about three times that in an iteration.
_MOST_OF_MUON = 2**27


class Served(NamedTuple):
    """A class of torch.optim that rules compute.

    Attributes:
        own_step: the class's own step, without hooks and without a grad mode.
        update: takes a step. Raises Unsupported before anything is written.
        elementwise: whether an element's update depends on that element alone, so that shards are updated apart.
        creates_state: whether the class's `_init_group` creates the state.
        most_elements: elements of parameters that are updated together, where an update needs memory; None for all.
        kind: a function from a parameter's state to a value that is equal for parameters updated together; None if
            all are.
    """

    own_step: Callable[..., Any]
    update: Callable[[Tensors], None]
    elementwise: bool = True
    creates_state: bool = True
    most_elements: int | None = None
    kind: Callable[[dict[str, Any]], Any] | None = None


def _betas(own: Tensors) -> tuple[float, float]:
    beta1, beta2 = own.options["betas"]
    return number(beta1), number(beta2)


def _averages(beta1: float, beta2: float) -> dict[str, float]:
    return {"one_minus_beta1": 1 - beta1, "beta2": beta2, "one_minus_beta2": 1 - beta2}


def _adam(own: Tensors) -> None:
    options = own.options
    lr, (beta1, beta2), decoupled = own.number("lr"), _betas(own), options["decoupled_weight_decay"]
    arguments: dict[str, Any] = {
        "exp_avg": own.state("exp_avg"),
        "exp_avg_sq": own.state("exp_avg_sq"),
        "max_exp_avg_sq": own.state("max_exp_avg_sq", options["amsgrad"]),
        "eps": number(options["eps"]),
        "maximize": options["maximize"],
    }
    if own.on_device:
        arguments |= {"beta1": beta1, "beta2": beta2, "weight_decay": own.weight_decay(), "decoupled": decoupled}
        rules.adam_capturable(own.params, own.grads, step=own.steps(), lr=lr, **arguments)
    else:
        arguments |= own.by_step(
            lambda step: {"step_size": lr / (1 - beta1**step), "root_of_correction2": (1 - beta2**step) ** 0.5}
        )
        arguments |= _averages(beta1, beta2) | own.decay(lr, decoupled)
        rules.adam(own.params, own.grads, **arguments)
    own.advance()


def _nadam(own: Tensors) -> None:
    options = own.options
    lr, (beta1, beta2), decoupled = own.number("lr"), _betas(own), options["decoupled_weight_decay"]
    momentum_decay = number(options["momentum_decay"])
    arguments: dict[str, Any] = {
        "exp_avg": own.state("exp_avg"),
        "exp_avg_sq": own.state("exp_avg_sq"),
        "eps": number(options["eps"]),
        "maximize": options["maximize"],
    }
    if own.on_device:
        products = [state["mu_product"] for state in own.states]
        shared = {"beta1": beta1, "momentum_decay": momentum_decay}
        arguments |= {"beta2": beta2, "weight_decay": own.weight_decay(), "decoupled": decoupled, **shared}
        rules.nadam_capturable(own.params, own.grads, step=own.steps(), mu_product=products, lr=lr, **arguments)
        own.advance()
        rules.nadam_product(products, own.steps(), **shared)
        return

    def momentum(step: float) -> float:
        return beta1 * (1 - 0.5 * 0.96 ** (step * momentum_decay))

    counts, earlier = own.on_host("step").values(), own.on_host("mu_product")
    # The products are rounded to their dtype, as torch rounds them.
    rounded = torch.tensor(earlier.values(), dtype=earlier.tensors[0].dtype)
    rounded *= torch.tensor([momentum(count + 1) for count in counts], dtype=rounded.dtype)

    def numbers(step: float, product: float) -> dict[str, float]:
        mu, mu_next = momentum(step), momentum(step + 1)
        return {
            "grad_step_size": lr * (1 - mu) / (1 - product),
            "exp_avg_step_size": lr * mu_next / (1 - product * mu_next),
            "correction2": 1 - beta2**step,
        }

    pairs = list(zip(counts, rounded.tolist(), strict=True))
    table = {pair: numbers(pair[0] + 1, pair[1]) for pair in pairs}
    arguments |= together([table[pair] for pair in pairs] if len(table) > 1 else list(table.values()))
    rules.nadam(own.params, own.grads, **arguments, **_averages(beta1, beta2), **own.decay(lr, decoupled))
    own.advance()
    earlier.assign(rounded)


def _radam(own: Tensors) -> None:
    options = own.options
    lr, (beta1, beta2), decoupled = own.number("lr"), _betas(own), options["decoupled_weight_decay"]
    arguments: dict[str, Any] = {
        "exp_avg": own.state("exp_avg"),
        "exp_avg_sq": own.state("exp_avg_sq"),
        "eps": number(options["eps"]),
        "maximize": options["maximize"],
    }
    if own.on_device:
        arguments |= {"beta1": beta1, "beta2": beta2, "weight_decay": own.weight_decay(), "decoupled": decoupled}
        rules.radam_capturable(own.params, own.grads, step=own.steps(), lr=lr, **arguments)
        own.advance()
        return

    def numbers(step: float) -> dict[str, float]:
        correction2 = 1 - beta2**step
        limit = 2 / (1 - beta2) - 1
        length = limit - 2 * step * beta2**step / correction2
        rectification = 0.0
        if length > 5:
            ratio = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
            rectification = (ratio * correction2) ** 0.5
        return {"step_size": lr / (1 - beta1**step), "rectification": rectification}

    arguments |= own.by_step(numbers) | _averages(beta1, beta2) | own.decay(lr, decoupled)
    rules.radam(own.params, own.grads, **arguments)
    own.advance()


def _adamax(own: Tensors) -> None:
    options = own.options
    lr, (beta1, beta2) = own.number("lr"), _betas(own)
    arguments: dict[str, Any] = {
        "exp_avg": own.state("exp_avg"),
        "exp_inf": own.state("exp_inf"),
        "beta2": beta2,
        "eps": number(options["eps"]),
        "weight_decay": own.weight_decay(),
        "maximize": options["maximize"],
    }
    if own.on_device:
        rules.adamax_capturable(own.params, own.grads, step=own.steps(), lr=lr, beta1=beta1, **arguments)
    else:
        arguments |= own.by_step(lambda step: {"step_size": lr / (1 - beta1**step)})
        rules.adamax(own.params, own.grads, one_minus_beta1=1 - beta1, **arguments)
    own.advance()


def _adadelta(own: Tensors) -> None:
    options, rho = own.options, number(own.options["rho"])
    rules.adadelta(
        own.params,
        own.grads,
        square_avg=own.state("square_avg"),
        acc_delta=own.state("acc_delta"),
        lr=own.number("lr"),
        rho=rho,
        one_minus_rho=1 - rho,
        eps=number(options["eps"]),
        weight_decay=own.weight_decay(),
        maximize=options["maximize"],
    )
    own.advance()


def _adagrad(own: Tensors) -> None:
    options = own.options
    lr, lr_decay = own.number("lr"), number(options["lr_decay"])
    arguments: dict[str, Any] = {
        "sum": own.state("sum"),
        "eps": number(options["eps"]),
        "weight_decay": own.weight_decay(),
        "maximize": options["maximize"],
    }
    if own.on_device:
        rules.adagrad_capturable(own.params, own.grads, step=own.steps(), lr=lr, lr_decay=lr_decay, **arguments)
    else:
        arguments |= own.by_step(lambda step: {"step_size": lr / (1 + (step - 1) * lr_decay)})
        rules.adagrad(own.params, own.grads, **arguments)
    own.advance()


def _sgd(own: Tensors) -> None:
    options = own.options
    momentum = number(options["momentum"])
    arguments: dict[str, Any] = {
        "lr": own.number("lr"),
        "weight_decay": own.weight_decay(),
        "maximize": options["maximize"],
    }
    if not momentum:
        rules.sgd(own.params, own.grads, momentum=0.0, one_minus_dampening=1.0, **arguments)
        return
    buffers = [state.get("momentum_buffer") for state in own.states]
    first = _has_no_buffer(own.states[0])
    if first:
        buffers = [torch.empty_like(param.grad) for param in own.originals]
    rules.sgd(
        own.params,
        own.grads,
        momentum_buffer=own.plain(buffers),
        momentum=momentum,
        one_minus_dampening=1 - number(options["dampening"]),
        first=first,
        nesterov=options["nesterov"],
        **arguments,
    )
    for state, buffer in zip(own.states, buffers, strict=True):
        state["momentum_buffer"] = buffer


def _has_no_buffer(state: dict[str, Any]) -> bool:
    return state.get("momentum_buffer") is None


def _rmsprop(own: Tensors) -> None:
    options, decay = own.options, number(own.options["alpha"])
    momentum = number(options["momentum"])
    rules.rmsprop(
        own.params,
        own.grads,
        square_avg=own.state("square_avg"),
        grad_avg=own.state("grad_avg", options["centered"]),
        momentum_buffer=own.state("momentum_buffer", momentum > 0),
        lr=own.number("lr"),
        decay=decay,
        one_minus_decay=1 - decay,
        eps=number(options["eps"]),
        momentum=momentum,
        weight_decay=own.weight_decay(),
        maximize=options["maximize"],
    )
    own.advance()


def _asgd(own: Tensors) -> None:
    options, lambd = own.options, number(own.options["lambd"])
    etas, mus = [state["eta"] for state in own.states], [state["mu"] for state in own.states]
    rules.asgd(
        own.params,
        own.grads,
        ax=own.state("ax"),
        eta=etas,
        mu=mus,
        lambd=lambd,
        weight_decay=own.weight_decay(),
        maximize=options["maximize"],
    )
    own.advance()
    numbers = {"lr": own.number("lr"), "lambd": lambd, "power": number(options["alpha"]), "t0": number(options["t0"])}
    rules.asgd_rates(etas, own.steps(), mu=mus, **numbers)


def _rprop(own: Tensors) -> None:
    options = own.options
    (eta_minus, eta_plus), (least, most) = options["etas"], options["step_sizes"]
    rules.rprop(
        own.params,
        own.grads,
        prev=own.state("prev"),
        step_size=own.state("step_size"),
        eta_minus=number(eta_minus),
        eta_plus=number(eta_plus),
        least=number(least),
        most=number(most),
        maximize=options["maximize"],
    )
    own.advance()


def _muon(own: Tensors) -> None:
    options = own.options
    if not options["nesterov"] and any([state["momentum_buffer"].dtype is torch.bfloat16 for state in own.states]):
        # torch normalises such a buffer in place.
        raise Unsupported(name="tritonite::muon", reason="a bfloat16 momentum buffer without Nesterov momentum")
    update_muon(own)


def _plain_step(kind: type) -> Callable[..., Any]:
    """Return the `step` of a class without torch's wrappers: hooks, profile range, grad mode, and those of Dynamo."""
    step: Any = kind.step  # type: ignore[attr-defined]
    while hasattr(step, "__wrapped__") and step.__globals__["__name__"].startswith("torch."):
        step = step.__wrapped__
    plain: Callable[..., Any] = step
    return plain


_UPDATES: dict[type, Callable[[Tensors], None]] = {
    torch.optim.Adam: _adam,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
    torch.optim.Adamax: _adamax,
    torch.optim.Adadelta: _adadelta,
    torch.optim.Adagrad: _adagrad,
    torch.optim.SGD: _sgd,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.ASGD: _asgd,
    torch.optim.Rprop: _rprop,
    torch.optim.Muon: _muon,
}
# Names of the classes that `fuse` takes.
CLASSES = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


def served(optimizer: torch.optim.Optimizer) -> Served | None:
    """Return how an optimizer's step is computed; None if its class is not served, or has a step of its own."""
    for base, update in _UPDATES.items():
        own_step = _plain_step(base)
        if isinstance(optimizer, base) and _plain_step(type(optimizer)) is own_step:
            if base is torch.optim.SGD:
                return Served(own_step, update, creates_state=False, kind=_has_no_buffer)
            if base is torch.optim.Muon:
                return Served(own_step, update, elementwise=False, most_elements=_MOST_OF_MUON)
            return Served(own_step, update)
    return None
