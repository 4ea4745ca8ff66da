"""Language models that compute a loss from logits: in training they get the loss without the logits.

The class's forward runs unchanged, but on a stand-in for the model whose head returns `DeferredLogits`. So the shift of
labels, the number of items in a batch, auxiliary losses and the class of the output stay those of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tritonite import devices
from tritonite.patching.deferred import DeferredLogits, Head
from tritonite.patching.report import KeepError
from tritonite.patching.samples import RESOLUTION, check_alike, sampling, text_inputs

OPERATOR = "fused.linear_cross_entropy in training"


def looks_like_language_model(module: torch.nn.Module) -> bool:
    """Return whether a module's class has a forward with labels, and a head from hidden states to logits."""
    if not hasattr(type(module), "get_output_embeddings"):
        return False
    if "labels" not in inspect.signature(type(module).forward).parameters:
        return False
    return module.get_output_embeddings() is not None  # type: ignore[operator]


def head_name(module: torch.nn.Module) -> str:
    """Return the attribute that holds a model's head; raise KeepError unless it is a plain linear layer."""
    head = module.get_output_embeddings()  # type: ignore[operator]
    for name, child in module.named_children():
        if child is head:
            if not _is_plain(child):
                raise KeepError(f"its head {name!r} is not a plain linear layer, or has hooks")
            return name
    raise KeepError("its head is inside another module")


def _is_plain(head: torch.nn.Module) -> bool:
    """Return whether a head does nothing but multiply: no adapter, no hooks, a weight that is one plain tensor."""
    plain = type(head).forward is torch.nn.Linear.forward and "forward" not in vars(head)
    hooks = head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks
    if not plain or hooks:
        return False
    weight = head.weight
    return (
        type(weight) is torch.nn.Parameter and weight.dtype in RESOLUTION and weight.device.type == devices.current.type
    )


class _StandIn:
    """An object with all attributes of a model but its head."""

    def __init__(self, model: torch.nn.Module, name: str, head: Callable[..., Any]) -> None:
        # torch.compile of torch 2.11 does not trace changes of vars(self).
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_head", head)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # torch.compile makes an object of this class without a model.
        own = vars(self)
        return type(own["_model"]) if "_model" in own else _StandIn

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        return own["_head"] if name == own["_name"] else getattr(own["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_model"], name, value)


def loss_forward(module: torch.nn.Module, name: str, keep_logits: bool) -> Callable[..., Any]:
    """Return a forward that computes the loss without logits, in training, if labels are given.

    The output's logits are None, or if `keep_logits`, computed by the head after the loss. Tuples keep their length.
    """
    place = list(inspect.signature(type(module).forward).parameters).index("labels") - 1

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[place] if len(args) > place else kwargs.get("labels")
        head = getattr(self, name)
        if labels is None or not self.training or not _is_plain(head):
            return type(self).forward(self, *args, **kwargs)
        output = type(self).forward(_StandIn(self, name, Head(head)), *args, **kwargs)
        return _finished(output, keep_logits)

    return forward


def _finished(output: Any, keep_logits: bool) -> Any:
    """Return a model's output with its deferred logits computed or taken out."""

    def settled(value: Any) -> Any:
        if not isinstance(value, DeferredLogits):
            return value
        return value.tensor("the output") if keep_logits else None

    if isinstance(output, tuple):
        return tuple(settled(each) for each in output)
    return type(output)(**{name: settled(value) for name, value in output.items()})


def check_loss(module: torch.nn.Module, name: str, inputs: dict[str, Any] | None, with_gradients: bool) -> None:
    """Raise KeepError unless the loss without logits equals the model's, with its gradients, on sample inputs.

    Gradients are those by the hidden states and by the head, so that no other part of the model needs memory for its
    own.
    """
    head = getattr(module, name)
    hidden: list[torch.Tensor] = []

    def computing(states: torch.Tensor) -> torch.Tensor:
        hidden[:] = hidden or [states.detach().requires_grad_()]
        logits: torch.Tensor = head(hidden[0])
        return logits

    with sampling(module):
        inputs = text_inputs(module) if inputs is None else inputs
        if "labels" not in inputs:
            raise KeepError("`inputs` has no labels")

        def loss_of(head: Callable[..., Any]) -> torch.Tensor:
            output = type(module).forward(_StandIn(module, name, head), **inputs)
            loss = output[0] if isinstance(output, tuple) else output.loss
            if not isinstance(loss, torch.Tensor):
                raise KeepError("it returns no loss for labels")
            return loss

        loss_of(computing)
        deferred = Head(head, hidden[0])
        operands = [hidden[0], *head.parameters()]
        check_alike(lambda: loss_of(deferred), lambda: loss_of(computing), operands, with_gradients, slack=4.0)
    if deferred.reason:
        raise KeepError(f"its logits are needed for more than a loss: {deferred.reason}")
    if not deferred.losses:
        raise KeepError("its loss is not torch.nn.functional.cross_entropy of its logits")
