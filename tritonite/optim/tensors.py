"""`Tensors`: parameters of a group that take a step together, with their gradients, states and numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritonite.runtime.sharding import is_sharded

ORDINARY = {torch.Tensor, torch.nn.Parameter}


class Tensors:
    """Parameters of one group that take a step together.

    Attributes:
        options: the group: its numbers and flags.
        params, grads: the parameters, and their gradients, as `plain` returns them.
        on_device: whether the step counts stay on the device, as with `capturable` and `fused`.
        counts: what earlier steps know of the numbers in the states.
    """

    def __init__(
        self,
        options: dict[str, Any],
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
        counts: Counts,
    ) -> None:
        self.options, self._counts = options, counts
        self.originals, self.states = params, states
        self._plain = set(map(type, params)) <= ORDINARY and not any([param.is_complex() for param in params])
        self.params, self.grads = self.plain(params), self.plain(grads)
        self.on_device = bool(options.get("capturable") or options.get("fused"))

    def plain(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors: the local shards of DTensors, and complex tensors viewed as real ones."""
        if self._plain:
            return list(tensors)
        local = [x.to_local() if is_sharded(x) else x for x in tensors]  # type: ignore[attr-defined]
        return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in local]

    def state(self, name: str, given: bool = True) -> list[torch.Tensor] | None:
        """Return the tensor `name` of each parameter's state; None unless `given`."""
        return self.plain([state[name] for state in self.states]) if given else None

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
        counts = self.on_host("step").values()
        table = {count: numbers(count + 1) for count in dict.fromkeys(counts)}
        return together([table[count] for count in counts] if len(table) > 1 else list(table.values()))

    def advance(self) -> None:
        """Add 1 to the step counts."""
        steps = self.steps()
        if steps[0].device.type == "cpu":
            self.on_host("step").add(1)
        else:
            torch._foreach_add_(steps, 1)

    def on_host(self, name: str) -> HostNumbers:
        """Return the numbers `name` of the states, tensors of one element on the CPU."""
        return self._counts.column(self.states, name)


class HostNumbers:
    """Tensors of one element. If `joined`, copies of them, which are the elements of one vector."""

    def __init__(self, tensors: Sequence[torch.Tensor], joined: bool) -> None:
        self.joined, self.uses = joined, 1
        self.vector = torch.stack(list(tensors)) if joined else torch.empty(0)
        self.tensors = list(self.vector.unbind()) if joined else list(tensors)

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the tensors."""
        return len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))

    def values(self) -> list[float]:
        """Return the numbers."""
        return self.vector.tolist() if self.joined else values_of(self.tensors)

    def add(self, number: float) -> None:
        """Add a number to each."""
        if self.joined:
            self.vector += number
        else:
            # A number would become a tensor for each tensor.
            torch._foreach_add_(self.tensors, torch.full((), number, dtype=self.tensors[0].dtype))

    def assign(self, numbers: torch.Tensor) -> None:
        """Store the elements of a vector."""
        if self.joined:
            self.vector.copy_(numbers)
        else:
            torch._foreach_copy_(self.tensors, list(numbers.unbind()))


class Counts:
    """Numbers of a group's states on the CPU, such as step counts.

    Adding to a tensor for each number would take longer than a step's launches. Numbers of parameters that take steps
    together therefore become elements of one vector.
    """

    def __init__(self) -> None:
        self._columns: dict[str, HostNumbers] = {}

    def column(self, states: Sequence[dict[str, Any]], name: str) -> HostNumbers:
        """Return the numbers `name` of these states."""
        tensors = [state[name] for state in states]
        known = self._columns.get(name)
        if known is not None and known.are(tensors):
            known.uses += 1
            # Within one step the numbers are used twice at most.
            if known.joined or known.uses < 3 or not _joinable(tensors):
                return known
            known = HostNumbers(tensors, True)
            for state, element in zip(states, known.tensors, strict=True):
                state[name] = element
        else:
            known = HostNumbers(tensors, False)
        self._columns[name] = known
        return known


def _joinable(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors may become elements of one vector: different 0-d tensors of one dtype on the CPU."""
    if len({id(x) for x in tensors}) < len(tensors):
        return False
    first = tensors[0].dtype
    return all([type(x) is torch.Tensor and not x.dim() and x.dtype is first and x.is_cpu for x in tensors])


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
