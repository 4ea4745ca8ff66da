"""Optimizers of this library: `Optimizer`, made of a rule, and `Muon`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from tritonite.errors import InvalidArgument, Unsupported
from tritonite.optim.declare import Rule
from tritonite.optim.fusing import fuse
from tritonite.optim.tensors import Counts, Tensors
from tritonite.runtime.opaque import opaque


class Optimizer(torch.optim.Optimizer):
    """An optimizer that updates parameters by a rule, in one launch a dtype and device.

        lion = tritonite.optim.rules.lion
        optimizer = Optimizer(model.parameters(), lion, lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.01)

    Args:
        params: parameters, or param groups, as any optimizer of torch.optim takes them. A group may have numbers of
            its own.
        rule: the rule, made by `tritonite.optim.rule`. A number named `step` is the number of the step, from 1 on.
        state_dtype: the dtype of the states; None for that of each parameter.
        defaults: the rule's numbers and flags. Flags are False by default.

    A state starts with zeros. Raises InvalidArgument for names that are not the rule's, and for missing numbers.
    """

    def __init__(self, params: Any, rule: Rule, *, state_dtype: torch.dtype | None = None, **defaults: Any) -> None:
        if not isinstance(rule, Rule):
            raise InvalidArgument(
                name="Optimizer", expected="a rule of tritonite.optim.rule", parameter="rule", given=repr(rule)
            )
        if rule.elements:
            expected = "a rule without elements"
            raise InvalidArgument(name="Optimizer", expected=expected, parameter="rule", given=repr(rule))
        numbers = set(rule.numbers) - {"step"}
        if not numbers <= set(defaults) <= numbers | set(rule.flags):
            expected = f"the numbers {', '.join(sorted(numbers)) or '(none)'}"
            given = ", ".join(sorted(defaults)) or "none"
            raise InvalidArgument(name=rule.__name__, expected=expected, parameter="defaults", given=given)
        self.rule, self.state_dtype = rule, state_dtype
        self._counts: dict[tuple[int, torch.device], Counts] = {}
        super().__init__(params, {**dict.fromkeys(rule.flags, False), **defaults})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rule": self.rule, "state_dtype": self.state_dtype, "_counts": {}}

    @opaque
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. `closure` evaluates the model again and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for index, group in enumerate(self.param_groups):
                by_device: dict[torch.device, list[torch.Tensor]] = {}
                for param in group["params"]:
                    if param.grad is not None:
                        by_device.setdefault(param.device, []).append(param)
                for device, params in by_device.items():
                    self._update(group, params, self._counts.setdefault((index, device), Counts()))
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], counts: Counts) -> None:
        """Update the parameters of a group on one device."""
        rule, states = self.rule, [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if param.grad.layout is not torch.strided:
                raise Unsupported(name=rule.operator, reason=f"a gradient of layout {param.grad.layout}")
            for name in rule.state:
                if name not in state:
                    dtype = self.state_dtype if not param.is_complex() else None
                    state[name] = torch.zeros_like(param, dtype=dtype)
            if "step" in rule.numbers and "step" not in state:
                state["step"] = torch.zeros(())
        own = Tensors(group, params, [param.grad for param in params], states, counts)
        arguments: dict[str, Any] = {name: own.number(name) for name in rule.numbers if name != "step"}
        arguments |= {name: group[name] for name in rule.flags}
        arguments |= {name: own.state(name) for name in rule.state}
        if "step" in rule.numbers:
            arguments |= own.by_step(lambda step: {"step": step})
        rule(own.params, own.grads, **arguments)
        if "step" in rule.numbers:
            own.advance()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Unlike torch's classes, the dtype of states stays `state_dtype` where it is given."""
        super().load_state_dict(state_dict)
        if self.state_dtype is None:
            return
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for index, param in zip(saved, params, strict=True):
            for name in self.rule.state:
                if name in state_dict["state"].get(index, ()):
                    value = state_dict["state"][index][name]
                    self.state[param][name] = value.to(device=param.device, dtype=self.state_dtype, copy=True)


class Muon(torch.optim.Muon):
    """torch.optim.Muon, with its arguments, state and results, in few launches.

    Momentum and update are one launch a dtype each. Matrices of one shape are orthogonalised together, by batched
    products.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """

    @functools.wraps(torch.optim.Muon.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        fuse(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        fuse(self)
