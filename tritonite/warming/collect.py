"""A dispatch mode that notes the kernels of a call, while ATen computes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite import devices, registry
from tritonite.errors import Decline, Unsupported
from tritonite.install import direct, library
from tritonite.install.override import installed, select, use_gems
from tritonite.install.python import in_schema_order, record_dry
from tritonite.registry import Op
from tritonite.registry.schema import computes, decomposed, overload_name
from tritonite.runtime import contract
from tritonite.runtime.compilation import Collector, collecting
from tritonite.runtime.contract import Settings
from tritonite.runtime.hollow import is_hollow
from tritonite.runtime.opaque import OpaqueMode
from tritonite.warming.state import Preserved


class _Collecting(OpaqueMode):
    """Records each call that a kernel would serve dry, and has ATen compute it.

    An operator outside ATen, which ATen cannot compute, returns zeros.
    """

    def __init__(self, selected: frozenset[str], settings: Settings, into: Collector, preserved: Preserved) -> None:
        super().__init__()
        self.failed: dict[str, str] = {}
        self._selected, self._settings, self._into, self._preserved = selected, settings, into, preserved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = decomposed(func, devices.current.dispatch_key or "CPU", args, kwargs)
        if result is not NotImplemented:
            return result
        name = overload_name(func)
        outside = library.registered().get(name)
        if outside is not None and direct.in_memory((*args, *kwargs.values())):
            return self._without_running(outside, func, args, kwargs)
        op = registry.overloads().get(name) if name in self._selected and computes(func) else None
        if op is not None and direct.in_memory((*args, *kwargs.values())):
            try:
                self._record(op, args, kwargs)
            except Decline:
                pass
            except Exception as error:  # noqa: BLE001 - a call that ATen serves must not fail here
                self.failed[name] = f"{type(error).__name__}: {error}"
        return self._preserved.run(func, args, kwargs)

    def _record(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with contract.under(self._settings), collecting(self._into):
            return record_dry(op, in_schema_order(op, args, kwargs))[0]

    def _without_running(self, op: Op, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of an operator outside ATen, and return zeros for its new tensors."""
        try:
            results = self._record(op, args, kwargs)
        except Decline as decline:
            raise Unsupported(name=op.overload, reason=decline.reason) from None
        self._preserved.clear_written(operator, args, kwargs)
        plain = op.plain(results or ())
        made = pytree.tree_map_only(
            torch.Tensor, lambda each: self._preserved.zeros_like(each) if is_hollow(each) else each, plain
        )
        return made[0] if len(made) == 1 else made or None


def collect(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], into: Collector
) -> dict[str, str]:
    """Call a function, and note the kernels that its operators need. Returns errors of recordings by overload.

    The overrides in force decide which operators have kernels; if there are none, `enable()`'s default does. ATen
    computes the results, which are dropped. State is preserved as `Preserved` says.
    """
    selected, settings = installed() or select(), contract.settings()
    preserved = Preserved()
    mode = _Collecting(selected, settings, into, preserved)
    # No override runs, so that ATen computes and this process compiles nothing.
    aten = use_gems(include=()) if devices.current.dispatch_key else contextlib.nullcontext()
    with aten, preserved.restored(function, args, kwargs), mode:
        function(*args, **kwargs)
    return mode.failed
