"""A dispatch mode that notes the kernels of a call, while ATen computes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite import devices, registry
from tritonite.errors import Decline, Unsupported
from tritonite.install import direct, library
from tritonite.install.override import installed, select, use_gems
from tritonite.install.python import record_dry
from tritonite.registry import Op
from tritonite.registry.schema import computes, decomposed, in_schema_order, overload_name
from tritonite.runtime import contract
from tritonite.runtime.compilation import Collector, collecting
from tritonite.runtime.contract import Settings
from tritonite.runtime.hollow import is_hollow
from tritonite.runtime.opaque import OpaqueMode
from tritonite.warming.state import Preserved

# Kernels are specialised for addresses that 16 bytes divide, and on some devices for storages below 2 GiB.
_ALIGNMENT, _LARGE = 16, 2**31


class _Collecting(OpaqueMode):
    """Records each call that a kernel would serve dry, and has ATen compute it.

    Of calls that need the same kernels, as those of a model's equal layers, one is recorded. An operator outside ATen,
    which ATen cannot compute, returns zeros.
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
        if op is not None and direct.in_memory((*args, *kwargs.values())) and self._is_new(name, args, kwargs):
            try:
                self._record(op, args, kwargs)
            except Decline:
                pass
            except Exception as error:  # noqa: BLE001 - a call that ATen serves must not fail here
                self.failed[name] = f"{type(error).__name__}: {error}"
        return self._preserved.run(func, args, kwargs)

    def _is_new(self, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether no recorded call of an overload needs the same kernels. From now on one does."""
        signature = _Signature()
        key = overload, self._settings.bits, signature.of(args), signature.of(sorted(kwargs.items()))
        is_new = not signature.is_complete or key not in self._into.recorded
        self._into.recorded.add(key)
        return is_new

    def _record(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with contract.under(self._settings), collecting(self._into):
            return record_dry(op, in_schema_order(op.schema, args, kwargs))[0]

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


class _Signature:
    """The facts that decide a call's kernels: its numbers, and of tensors layout, dtype, alignment and common storages.

    Attributes:
        is_complete: false if the contents of a tensor on the CPU may decide, too.
    """

    def __init__(self) -> None:
        self.is_complete = True
        # By storage, its number in the order of the call, and the address of the first tensor in it.
        self._storages: dict[int, tuple[int, int]] = {}

    def of(self, value: Any) -> Hashable:
        """Return the signature of an argument."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, (list, tuple)):
            return tuple([self.of(each) for each in value])
        # 1, 1.0 and True are equal.
        return type(value), value

    def _of_tensor(self, tensor: torch.Tensor) -> Hashable:
        if tensor.device.type == "cpu" and not devices.current.host_memory:
            self.is_complete = False
        storage = tensor.untyped_storage()
        address = tensor.data_ptr()
        number, first = self._storages.setdefault(storage._cdata, (len(self._storages), address))
        memory = address % _ALIGNMENT, storage.nbytes() >= _LARGE, number, address - first
        return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad, *memory


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
