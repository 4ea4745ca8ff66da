"""Operators outside ATen: their schemas, kernels, fakes and gradients, in torch.library's namespace `tritonite`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import torch

from tritonite import catalog, devices
from tritonite.catalog import Declaration, Op
from tritonite.dispatch import override, python

_lock = threading.Lock()
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
    torch.library.register_fake(name, formulas.fake, lib=library)
    if formulas.gradient is not None:
        torch.library.register_autograd(name, formulas.gradient, setup_context=formulas.save, lib=library)
    key = devices.current.dispatch_key
    if key:
        dispatcher = override.native_dispatcher()
        if dispatcher is None:
            library.impl(name, python.override(op, None), key)
        else:
            override.declare_native(dispatcher, op)
            dispatcher.install(op.overload, False)
    return op
