"""`fuse`: give an optimizer of torch.optim a step that is one launch a dtype and device."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch

from tritonite import devices
from tritonite.errors import Unsupported, UnsupportedOptimizer
from tritonite.optim.tensors import ORDINARY, Counts, Tensors
from tritonite.optim.updates import CLASSES, Served, served
from tritonite.runtime.opaque import opaque
from tritonite.runtime.sharding import is_sharded

# Attributes of an optimizer: those that `fuse` replaced, None for one that the optimizer did not have.
_REPLACED = "_tritonite_replaced"
# `Counts` of an optimizer's groups.
_COUNTS = "_tritonite_counts"


def fuse(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make an optimizer's `step` one launch for each dtype and device of a parameter group.

    The optimizer stays what it is: its class, state_dict, param groups, hooks and learning rate schedulers work as
    before. Results equal those of `foreach=False` within the resolution of the dtype. Shards of DTensors are updated
    in place. Tensors that no kernel serves, such as sparse gradients, take the optimizer's own step.

    Args:
        optimizer: an Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, Muon, NAdam, RAdam, RMSprop, Rprop or SGD of
            torch.optim, or an instance of a subclass with the same `step`.

    Returns the optimizer.

    Raises UnsupportedOptimizer for another optimizer, and for `differentiable`.
    """
    if served(optimizer) is None:
        name = type(optimizer).__name__
        raise UnsupportedOptimizer(name=name, reason=_reason(optimizer), served=", ".join(CLASSES))
    if any(group.get("differentiable") for group in optimizer.param_groups):
        reason = "differentiable=True needs a step that autograd records"
        raise UnsupportedOptimizer(name=type(optimizer).__name__, reason=reason, served=", ".join(CLASSES))
    if _REPLACED not in vars(optimizer):
        # GradScaler then unscales gradients before the step, and skips the step after an overflow.
        own = {"step": types.MethodType(_hooked_step, optimizer), "_step_supports_amp_scaling": False}
        setattr(optimizer, _REPLACED, {name: vars(optimizer).get(name) for name in own})
        vars(optimizer).update(own)
    return optimizer


def unfuse(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give an optimizer its own step back. Returns the optimizer."""
    vars(optimizer).pop(_COUNTS, None)
    for name, value in vars(optimizer).pop(_REPLACED, {}).items():
        if value is None:
            vars(optimizer).pop(name, None)
        else:
            setattr(optimizer, name, value)
    return optimizer


def _reason(optimizer: torch.optim.Optimizer) -> str:
    """Return why no rule computes an optimizer's step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "L-BFGS evaluates the loss several times in a step"
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "sparse gradients have another layout in every step"
    return "no rule computes its step"


@opaque
def _step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Take a step of the optimizer. `closure` evaluates the model again and returns the loss, which is returned."""
    # What a learning rate scheduler's wrapper of `step` would set.
    self._opt_called = True  # type: ignore[attr-defined]
    if "capturable" in self.defaults:
        name = "_accelerator_graph_capture_health_check"
        # Earlier versions of torch have the other name.
        getattr(self, name if hasattr(self, name) else "_cuda_graph_capture_health_check")()
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    how = served(self)
    assert how is not None
    with torch.no_grad():
        for index, group in enumerate(self.param_groups):
            _step_group(self, index, group, how)
    return loss


def _step_group(optimizer: Any, index: int, group: dict[str, Any], how: Served) -> None:
    """Take a step of parameter group `index`, by the optimizer's own step where no kernel serves the tensors."""
    pairs = [(param, grad) for param in group["params"] if (grad := param.grad) is not None]
    if not pairs:
        return
    params, grads = [param for param, _ in pairs], [grad for _, grad in pairs]
    on = [param.device for param in params]
    if not _is_served(optimizer, how, group, params, grads, set(on)):
        _own_step(optimizer, how, group, params)
        return
    states: list[dict[str, Any]]
    if how.creates_state or group["momentum"]:
        state = optimizer.state
        states = [state[param] for param in params]
    else:
        # SGD without momentum has no state, and a look-up would create an empty one.
        states = [{} for _ in params]
    if how.creates_state and not all(states):
        # The method takes the group and lists to fill. Dynamo wraps it.
        optimizer._init_group(group, *[[] for _ in list(signature(optimizer._init_group).parameters)[1:]])
    kinds = list(map(how.kind, states)) if how.kind is not None else [None] * len(params)
    members: dict[Any, Any] = {}
    if len(set(on)) == len(set(kinds)) == 1:
        members[on[0], kinds[0]] = range(len(params))
    else:
        for i, each in enumerate(zip(on, kinds, strict=True)):
            members.setdefault(each, []).append(i)
    for each, indices in members.items():
        counts = vars(optimizer).setdefault(_COUNTS, {}).setdefault((index, *each), Counts())
        for part in [indices] if how.most_elements is None else _parts(params, indices, how.most_elements):
            own = Tensors(group, [params[i] for i in part], [grads[i] for i in part], [states[i] for i in part], counts)
            try:
                how.update(own)
            except Unsupported:
                _own_step(optimizer, how, group, own.originals)


def _parts(params: Sequence[torch.Tensor], indices: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield indices of parameters that have up to `most` elements together, or of one larger parameter.

    Parameters of one shape follow each other.
    """
    part: list[int] = []
    elements = 0
    for i in sorted(indices, key=lambda i: tuple(params[i].shape)):
        if part and elements + params[i].numel() > most:
            yield part
            part, elements = [], 0
        part.append(i)
        elements += params[i].numel()
    yield part


def _is_served(
    optimizer: Any,
    how: Served,
    group: dict[str, Any],
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    on: set[torch.device],
) -> bool:
    """Return whether kernels may serve the group: dense tensors on the device, and options that rules have."""
    if group.get("differentiable") or any(device.type != devices.current.type for device in on):
        return False
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return False
    if group.get("capturable") and any(isinstance(beta, torch.Tensor) for beta in group.get("betas", ())):
        # torch leaves these tensors on the device.
        return False
    strided = torch.strided
    if not all([grad.layout is strided for grad in grads]):
        return False
    if {*map(type, params), *map(type, grads)} <= ORDINARY:
        return True
    pairs = zip(params, grads, strict=True)
    return how.elementwise and all([(type(x) in ORDINARY and type(y) in ORDINARY) or _alike(x, y) for x, y in pairs])


def _alike(param: Any, grad: Any) -> bool:
    """Return whether a parameter and its gradient are DTensors of the same shards."""
    if not is_sharded(param) or not is_sharded(grad) or param.device_mesh != grad.device_mesh:
        return False
    return param.placements == grad.placements and not any(place.is_partial() for place in param.placements)


def _own_step(
    optimizer: torch.optim.Optimizer, how: Served, group: dict[str, Any], params: Sequence[torch.Tensor]
) -> None:
    """Take the class's own step for some parameters of a group."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": list(params)}]
    try:
        how.own_step(optimizer)
    finally:
        optimizer.param_groups = groups


_hooked_step = torch.optim.Optimizer.profile_hook_step(_step)
# A scheduler that finds this mark does not wrap the step.
_hooked_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
