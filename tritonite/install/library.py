"""Registration of operators outside ATen with torch.library: schema, kernel, fake function, gradient, vmap rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree

from tritonite import devices, registry
from tritonite.errors import Decline, Unsupported
from tritonite.install import direct, override, python
from tritonite.registry import Declaration, Op
from tritonite.runtime.hollow import without_elements
from tritonite.runtime.locks import fork_safe_lock
from tritonite.runtime.opaque import opaque

_lock = fork_safe_lock()
_registered: dict[str, Op] = {}


@functools.lru_cache(maxsize=8)
def _library(namespace: str) -> Any:
    return torch.library.Library(namespace, "DEF")


def register(declarations: Iterable[Declaration]) -> None:
    """Register the operators outside ATen among `declarations`, once each."""
    with _lock:
        for declaration in declarations:
            if declaration.library is not None and declaration.packets[0] not in _registered:
                _registered[declaration.packets[0]] = _register(declaration)


def overload_of(name: str) -> Any:
    """Return the torch.ops overload of an operator outside ATen, such as "tritonite::silu_and_mul"."""
    namespace, _, own = name.partition("::")
    packet, _, overload = own.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def registered() -> dict[str, Op]:
    """Return the registered operators outside ATen by qualified name."""
    return dict(_registered)


def _register(declaration: Declaration) -> Op:
    formulas, (name,) = declaration.library, declaration.packets
    namespace, _, own = name.partition("::")
    library = _library(namespace)
    assert formulas is not None
    drawing = (torch.Tag.nondeterministic_seeded,) if formulas.draws else ()
    library.define(formulas.schema, tags=(torch.Tag.pt2_compliant_tag, *drawing))
    op = registry.library_op(declaration)
    torch.library.register_fake(name, _refusing(name, formulas.fake), lib=library)
    if op.written:
        library.impl(own, _without_gradient(op), "Autograd", with_keyset=True)
    else:
        # With the formula None, torch raises an error for a gradient.
        torch.library.register_autograd(name, formulas.gradient, setup_context=formulas.save, lib=library)
        torch.library.register_vmap(name, _vmapped(op), lib=library)
    dispatcher = override.native_dispatcher() if devices.default.dispatch_key else None
    for device in devices.present:
        if not device.dispatch_key:
            continue
        if dispatcher is None or device is not devices.default:
            library.impl(own, python.override(op, None, device), device.dispatch_key)
        else:
            override.declare_native(dispatcher, op)
            dispatcher.install(op.overload, False)
            dispatcher.install_gate(op.overload)
    return op


def _refusing(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a fake function: Decline becomes Unsupported, as in a call, and meta tensors are served too."""

    @functools.wraps(fake)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if tensors and all(map(_is_meta, tensors)):
                return _on_meta(fake, args, kwargs)
            return fake(*args, **kwargs)
        except Decline as decline:
            raise Unsupported(name=name, reason=decline.reason) from None

    return call


def _is_meta(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an ordinary one on the meta device, not a fake tensor."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "meta"


def _on_meta(fake: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a fake function on meta tensors, replaced by fake tensors on the device. Returns meta tensors."""

    def fake_like(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=devices.current.type)

    with fake_tensor.FakeTensorMode():
        results = fake(*pytree.tree_map(fake_like, args), **pytree.tree_map(fake_like, kwargs))
    return pytree.tree_map_only(torch.Tensor, without_elements, results)


def _without_gradient(op: Op) -> Callable[..., Any]:
    """Return the autograd kernel of an operator that writes into its arguments, and so has no gradient."""
    name = op.overload

    @opaque
    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
            reason = "it writes into its arguments and has no gradient; use the functional form or torch.no_grad()"
            raise Unsupported(name=name, reason=reason)
        with torch._C._AutoDispatchBelowAutograd():
            result = overload_of(name).redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)
        direct.increment_versions(op, args, kwargs)
        return result

    return call


def _vmapped(op: Op) -> Callable[..., Any]:
    """Return the vmap rule: one call if only leading arguments are batched, else one for each batch element."""
    formulas = op.declaration.library
    assert formulas is not None
    leading = formulas.leading

    def call(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        # Lists of numbers come with a list of dims, all None.
        in_dims = tuple([None if isinstance(dim, (list, tuple)) and set(dim) <= {None} else dim for dim in in_dims])
        function, size = overload_of(op.qualified), info.batch_size
        pairs = list(zip(op.names, in_dims, args, strict=False))
        ranks = [arg.dim() - (dim is not None) for name, dim, arg in pairs if name in leading and _is_tensor(arg)]
        # A batch of 0-d tensors becomes 1-d, which promotes differently.
        promotes = formulas.broadcast and 0 in ranks and len({arg.dtype for arg in args if _is_tensor(arg)}) > 1
        divides = formulas.undivided is None or not formulas.undivided(**{name: arg for name, _, arg in pairs})
        if divides and not promotes and all(dim is None or name in leading for name, dim, _ in pairs):
            values = [
                arg
                if name not in leading or not _is_tensor(arg) or (dim is None and formulas.broadcast)
                else arg.expand(size, *arg.shape)
                if dim is None
                else _batched(arg.movedim(dim, 0), max(ranks) if formulas.broadcast else arg.dim() - 1)
                for name, dim, arg in pairs
            ]
            results = function(*values)
        else:
            calls = [
                function(*[arg if dim is None else arg.select(dim, i) for dim, arg in zip(in_dims, args, strict=True)])
                for i in range(size)
            ]
            several = isinstance(calls[0], tuple)
            columns = zip(*calls, strict=True) if several else [calls]
            stacked = [None if column[0] is None else torch.stack(column) for column in map(tuple, columns)]
            results = tuple(stacked) if several else stacked[0]
        dims = tuple([None if each is None else 0 for each in results]) if isinstance(results, tuple) else 0
        return results, dims

    return call


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _batched(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Insert dimensions of size 1 after the first, so that `rank` dimensions follow it."""
    return tensor[(slice(None),) + (None,) * (rank + 1 - tensor.dim())]
