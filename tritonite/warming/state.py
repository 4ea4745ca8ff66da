"""`Preserved`: leaves everything that existed before a call as it was."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from tritonite import devices

# Bytes of the largest storage that is saved and restored.
_SMALL = 2**16
# Arguments that operators write although their schemas do not say so.
_STATISTICS = ("running_mean", "running_var")


class Preserved:
    """Runs operators so that memory from before the call keeps its contents, and restores other state at its end.

    - Small tensors are saved before they are written. Code may branch on their values, such as those of counters.
    - For large ones, in-place operators and `out=` forms are left out, which saves the memory of a copy.
    - An operator that writes a large tensor, and returns something new as well, runs on a copy.
    - `.grad` of leaves, states of optimizers and generators, and buffers of modules are restored by `restored`.
    """

    def __init__(self) -> None:
        # Storages made within the call.
        self._fresh: set[int] = set()
        # Storages from before the call and their contents, by address of the storage.
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._optimizers: dict[int, tuple[Any, dict[Any, tuple[Any, Any]]]] = {}

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch.ops.OpOverload with ATen's kernels."""
        leaves = pytree.tree_leaves((args, kwargs))
        self.see(leaves)
        written = _written(operator, args, kwargs)
        kept = [tensor for tensor in written if not self._may_write(tensor)]
        if not kept:
            results = operator(*args, **kwargs)
        elif _returns_written(operator):
            return _as_written(operator, args, kwargs)
        else:
            copies = {id(tensor): tensor.clone() for tensor in kept}
            results = operator(*_replaced(args, copies), **_replaced(kwargs, copies))
            results = _replaced(results, {id(copies[id(tensor)]): tensor for tensor in kept})
        # torch.tensor makes its tensors unseen, and passes them to this operator.
        lifted = operator.overloadpacket is torch.ops.aten.lift_fresh
        given = set() if lifted else {_storage(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        made = {_storage(leaf) for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)}
        self._fresh |= made - given
        return results

    def _may_write(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is from within the call, or its contents are saved."""
        key = _storage(tensor)
        if key in self._fresh or key in self._saved:
            return True
        if tensor.layout is not torch.strided or (storage := tensor.untyped_storage()).nbytes() > _SMALL:
            return False
        self._saved[key] = storage, storage.clone()
        return True

    def clear_written(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Fill the tensors from within the call that an operator would write with zeros, instead of running it."""
        self.see(pytree.tree_leaves((args, kwargs)))
        for tensor in _written(operator, args, kwargs):
            if _storage(tensor) in self._fresh:
                tensor.zero_()

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return zeros with the sizes, strides, dtype and device of a tensor without memory."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).zero_()
        self._fresh.add(_storage(made))
        return made

    def see(self, leaves: Sequence[Any]) -> None:
        """Note the gradients of leaves, and the states of generators, when an operator first gets them."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad and leaf.is_leaf and id(leaf) not in self._gradients:
                    self._gradients[id(leaf)] = leaf, leaf.grad
            elif isinstance(leaf, torch.Generator) and id(leaf) not in self._generators:
                self._generators[id(leaf)] = leaf, leaf.get_state()

    def _see_optimizer(self, optimizer: Any, *_: Any) -> None:
        """Note an optimizer's state before its first step of the call."""
        state = {parameter: (own, dict(own)) for parameter, own in optimizer.state.items()}
        self._optimizers.setdefault(id(optimizer), (optimizer, state))

    @contextlib.contextmanager
    def restored(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
        """Restore gradients, buffers, and states of optimizers and of generators at the end of the with block."""
        self.see([*_default_generators(), *pytree.tree_leaves((args, kwargs))])
        roots = _roots(function, args, kwargs)
        found = {id(each): each for root in roots if isinstance(root, torch.nn.Module) for each in root.modules()}
        modules = [(each, dict(each._parameters), dict(each._buffers)) for each in found.values()]
        optimizers = [each for each in roots if isinstance(each, torch.optim.Optimizer)]
        # A step that begins with zero_grad() drops gradients before any operator has seen them.
        self.see([parameter for _, parameters, _ in modules for parameter in parameters.values()])
        self.see([each for own in optimizers for group in own.param_groups for each in group["params"]])
        own, numpy_state = random.getstate(), np.random.get_state()
        hook = register_optimizer_step_pre_hook(self._see_optimizer)
        try:
            yield
        finally:
            hook.remove()
            random.setstate(own)
            np.random.set_state(numpy_state)
            for storage, contents in self._saved.values():
                storage.copy_(contents)
            for leaf, gradient in self._gradients.values():
                if leaf.grad is not gradient:
                    leaf.grad = gradient
            for generator, state in self._generators.values():
                generator.set_state(state)
            for module, parameters, buffers in modules:
                module._parameters.update(parameters)
                module._buffers.update(buffers)
            for optimizer, states in self._optimizers.values():
                optimizer.state.clear()
                for parameter, (values, before) in states.items():
                    values.clear()
                    values.update(before)
                    optimizer.state[parameter] = values


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        # Sparse tensors have no storage.
        return id(tensor)


def _named(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip([argument.name for argument in operator._schema.arguments], args, strict=False)) | kwargs


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes."""
    given = _named(operator, args, kwargs)
    names = [
        argument.name
        for argument in operator._schema.arguments
        if argument.name in _STATISTICS or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    leaves = pytree.tree_leaves([given.get(name) for name in names])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _returns_written(operator: Any) -> bool:
    """Return whether all results of an operator are arguments that it writes."""
    infos = [returned.alias_info for returned in operator._schema.returns]
    return operator._schema.is_mutable and all(info is not None and info.is_write for info in infos)


def _as_written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the written arguments, as the operator would."""
    schema, given = operator._schema, _named(operator, args, kwargs)
    if not schema.returns:
        return None
    written = [
        given[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return written[0] if len(schema.returns) == 1 else tuple(written[: len(schema.returns)])


def _replaced(values: Any, by: dict[int, Any]) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: by.get(id(tensor), tensor), values)


def _default_generators() -> list[torch.Generator]:
    found = [each for device in devices.present for each in device.runtime.initialized_generators(device)]
    return [torch.default_generator, *found]


def _roots(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    """Return the objects that a call reaches: the function, what it and its owner refer to, and the arguments."""
    owner = getattr(function, "__self__", None)
    roots = [function, owner, *getattr(owner, "__dict__", {}).values(), *pytree.tree_leaves((args, kwargs))]
    with contextlib.suppress(TypeError):
        captured = inspect.getclosurevars(function)
        roots += [*captured.nonlocals.values(), *captured.globals.values()]
    return roots
