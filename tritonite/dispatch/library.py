"""Operators outside ATen: their schemas, kernels, fakes and gradients, in torch.library's namespace `tritonite`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tritonite import catalog, devices
from tritonite.catalog import Declaration, Op
from tritonite.dispatch import override, python
from tritonite.errors import Decline, Unsupported
from tritonite.locks import fork_safe_lock

_lock = fork_safe_lock()
_registered: dict[str, Op] = {}


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    return torch.library.Library("tritonite", "DEF")


def register(declarations: Iterable[Declaration]) -> None:
    """Register those operators of `declarations` that are outside ATen and not registered yet."""
    with _lock:
        for declaration in declarations:
            if declaration.library is not None and declaration.packets[0] not in _registered:
                _registered[declaration.packets[0]] = _register(declaration)


def registered() -> dict[str, Op]:
    """The operators outside ATen that have been registered, by their names with the namespace."""
    return dict(_registered)


def _register(declaration: Declaration) -> Op:
    library, formulas, (name,) = _library(), declaration.library, declaration.packets
    assert formulas is not None
    library.define(formulas.schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = catalog.library_op(declaration)
    torch.library.register_fake(name, _refusing(name, formulas.fake), lib=library)
    if any(argument.alias_info is not None for argument in op.schema.arguments):
        library.impl(op.qualified.partition("::")[2], _without_gradient(name), "Autograd", with_keyset=True)
    else:
        # Without a formula, a gradient that is asked for raises an error that says so.
        torch.library.register_autograd(name, formulas.gradient, setup_context=formulas.save, lib=library)
        torch.library.register_vmap(name, _vmapped(op), lib=library)
    key = devices.current.dispatch_key
    if key:
        dispatcher = override.native_dispatcher()
        if dispatcher is None:
            library.impl(name, python.override(op, None), key)
        else:
            override.declare_native(dispatcher, op)
            dispatcher.install(op.overload, False)
            dispatcher.install_gate(op.overload)
    return op


def _packet(name: str) -> Any:
    namespace, _, own = name.partition("::")
    return getattr(getattr(torch.ops, namespace), own)


def _refusing(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake that raises what a call does where it declines."""

    @functools.wraps(fake)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fake(*args, **kwargs)
        except Decline as decline:
            raise Unsupported(name=name, reason=decline.reason) from None

    return call


def _without_gradient(name: str) -> Callable[..., Any]:
    """The kernel at the key of autograd of an operator that writes into its arguments."""

    def call(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            reason = "it writes into its arguments and has no gradient; take the functional form, or torch.no_grad()"
            raise Unsupported(name=name, reason=reason)
        with torch._C._AutoDispatchBelowAutograd():
            return _packet(name).default.redispatch(keys & torch._C._after_autograd_keyset, *args)

    return call


def _vmapped(op: Op) -> Callable[..., Any]:
    """The operator's rule for torch.vmap: one call where only its leading arguments differ, or else one for each."""
    formulas = op.declaration.library
    assert formulas is not None
    leading = formulas.leading

    def call(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        function, size = _packet(op.qualified), info.batch_size
        if all(dim is None or name in leading for name, dim in zip(op.names, in_dims, strict=False)):
            values = [
                arg
                if name not in leading or arg is None
                else arg.expand(size, *arg.shape)
                if dim is None
                else arg.movedim(dim, 0)
                for name, dim, arg in zip(op.names, in_dims, args, strict=False)
            ]
            results = function(*values)
        else:
            every = [
                function(*[arg if dim is None else arg.select(dim, i) for dim, arg in zip(in_dims, args, strict=True)])
                for i in range(size)
            ]
            several = isinstance(every[0], tuple)
            columns = zip(*every, strict=True) if several else [every]
            stacked = [None if column[0] is None else torch.stack(column) for column in map(tuple, columns)]
            results = tuple(stacked) if several else stacked[0]
        dims = tuple([None if each is None else 0 for each in results]) if isinstance(results, tuple) else 0
        return results, dims

    return call
