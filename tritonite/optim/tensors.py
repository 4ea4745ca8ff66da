"""`Tensors`: parameters of a group that take a step together, with their gradients, states and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Tensors:
    """Parameters of one group that take a step together.

    Attributes:
        options: the group: its numbers and flags.
        params, grads: the parameters, and their gradients. Complex tensors are viewed as real ones.
        on_device: whether the step counts stay on the device, as with `capturable` and `fused`.
    """

    def __init__(
        self,
        options: dict[str, Any],
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
    ) -> None:
        self.options = options
        self.originals, self.states = params, states
        self._complex = any([param.is_complex() for param in params])
        self.params, self.grads = self.real(params), self.real(grads)
        self.on_device = bool(options.get("capturable") or options.get("fused"))

    def real(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors, complex ones viewed as real."""
        if not self._complex:
            return list(tensors)
        return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors]

    def state(self, name: str, given: bool = True) -> list[torch.Tensor] | None:
        """Return the tensor `name` of each parameter's state; None unless `given`."""
        return self.real([state[name] for state in self.states]) if given else None

    def number(self, name: str) -> Any:
        """Return a number of the group; a tensor on the device stays there if the step counts do."""
        value = self.options[name]
        if isinstance(value, torch.Tensor) and self.on_device and value.device == self.params[0].device:
            return value
        return number(value)

    def weight_decay(self) -> float | None:
        """Return the weight decay, or None for 0."""
        return number(self.options["weight_decay"]) or None

    def decay(self, lr: float, decoupled: bool) -> dict[str, float | None]:
        """Return a rule's arguments `weight_decay` and `shrink`."""
        decay = self.weight_decay()
        if decay is None or not decoupled:
            return {"weight_decay": decay, "shrink": None}
        return {"weight_decay": None, "shrink": 1 - lr * decay}

    def steps(self) -> list[torch.Tensor]:
        """Return the step counts' tensors."""
        return [state["step"] for state in self.states]

    def by_step(self, numbers: Callable[[float], dict[str, float]]) -> dict[str, Any]:
        """Return the numbers of the step that each parameter takes: one for all parameters, or a list."""
        counts = values_of(self.steps())
        table = {count: numbers(count + 1) for count in dict.fromkeys(counts)}
        return together([table[count] for count in counts] if len(table) > 1 else list(table.values()))

    def advance(self) -> None:
        """Add 1 to the step counts."""
        steps = self.steps()
        # A number would become a tensor for each step count on the CPU.
        on_cpu = steps[0].device.type == "cpu"
        torch._foreach_add_(steps, torch.ones((), dtype=steps[0].dtype) if on_cpu else 1)


def together(each: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return a dict of lists of a list of dicts; of one dict, the dict."""
    if len(each) == 1:
        return dict(each[0])
    return {name: [own[name] for own in each] for name in each[0]}


def values_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the numbers in tensors of one element."""
    if all([x is tensors[0] for x in tensors]):
        return [tensors[0].item()] * len(tensors)
    values: list[float] = torch.stack(list(tensors)).tolist()
    return values


def number(value: Any) -> float:
    """Return a number, or that in a tensor of one element, as a float."""
    return float(value.item() if isinstance(value, torch.Tensor) else value)
