"""The functions that run a graph's calls: Tritonite's kernels, whatever is enabled, or ATen's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from tritonite import registry
from tritonite.errors import Decline, Unsupported
from tritonite.install import direct, library
from tritonite.install.override import native_dispatcher, use_gems
from tritonite.registry import Op
from tritonite.registry.schema import in_schema_order
from tritonite.runtime import contract, stats

# Namespaces whose operators call no operator that a user sees, and whose results are as their schemas say.
KNOWN = frozenset(("aten", "prims", "tritonite", "tritonite_dynamic", "tritonite_optim", "_c10d_functional"))


class Served:
    """A call of an overload that has a kernel. A call that the kernel declines goes to ATen."""

    def __init__(self, op: Op, target: OpOverload) -> None:
        self.op, self.target = op, target
        self._counts = stats.counts_of(op.overload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self.op(*args, **kwargs)
        except Decline as decline:
            return self.declined(decline, args, kwargs)
        self._counts.count_launch()
        if self.op.written:
            direct.increment_versions(self.op, args, kwargs)
        return result

    def declined(self, decline: Decline, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count a decline, and return ATen's result. Raises Unsupported for an operator outside ATen."""
        self._counts.count_decline(decline.reason)
        if self.op.declaration.library is not None:
            raise Unsupported(name=self.op.overload, reason=decline.reason) from None
        return self.target(*args, **kwargs)


class NativelyServed(Served):
    """A call of an overload that has a kernel, by the native dispatcher, which replays a plan of the call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dispatcher = native_dispatcher()
        assert dispatcher is not None
        return dispatcher.call(self.op.overload, in_schema_order(self.op.schema, args, kwargs))


class Scoped:
    """A call of a user's operator or of a higher-order operator, which calls ATen's operators itself.

    These run as Triton kernels, too, as they do when Tritonite is enabled.
    """

    def __init__(self, target: Callable[..., Any], selected: frozenset[str]) -> None:
        self.target, self._selected = target, selected

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with scope(self._selected, contract.settings()):
            return self.target(*args, **kwargs)


@functools.lru_cache(maxsize=64)
def scope(selected: frozenset[str], settings: contract.Settings) -> use_gems:
    """Return a scope in which the overloads of `selected` run as Triton kernels."""
    chosen: use_gems = use_gems(selected, faster_only=settings.faster_only, invariant=settings.invariant)
    return chosen


def function_of(target: Any, selected: frozenset[str]) -> Callable[..., Any]:
    """Return the function that runs a node's target.

    An overload outside ATen, or in `selected`, runs Tritonite's kernel. Every other target runs itself.
    """
    if isinstance(target, HigherOrderOperator):
        return Scoped(target, selected)
    if not isinstance(target, OpOverload):
        return target
    if target.namespace not in KNOWN:
        return Scoped(target, selected)
    qualified = target.name()
    op = library.registered().get(qualified)
    if op is None and (name := qualified.removeprefix("aten::")) in selected:
        op = registry.overloads()[name]
    if op is None:
        return target
    return Served(op, target) if native_dispatcher() is None else NativelyServed(op, target)


def is_view(target: Any) -> bool:
    """Return whether a target makes a view of its argument and computes nothing."""
    return isinstance(target, OpOverload) and (target.is_view or target is torch.ops.aten._unsafe_view.default)
