"""Compilation ahead: when a graph's first run lacks a kernel, all that it will lack are compiled side by side."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from triton.runtime import driver

from tritonite import devices
from tritonite.errors import Decline, Unsupported
from tritonite.graph.interpret import run_calls
from tritonite.graph.lowered import Call, FusedCalls, Lowered
from tritonite.graph.operators import Scoped, Served, is_view
from tritonite.install.python import record_dry
from tritonite.registry.schema import in_schema_order
from tritonite.runtime import contract
from tritonite.runtime.compilation import Collector, Needed, collecting
from tritonite.runtime.hollow import hollow, is_hollow, without_elements

# Threads at most. The compiler is without Python's lock for most of the time, but not for all.
_MOST_THREADS = 8


class Ahead:
    """The calls of a graph that are to come, for `compilation.ahead_of`. It keeps the inputs' metadata alone."""

    def __init__(self, lowered: Lowered, inputs: Sequence[Any], device: torch.device) -> None:
        self._lowered, self._device, self._settings = lowered, device, contract.settings()
        self._inputs = [without_elements(each) if _is_on(each, device.type) else each for each in inputs]

    @contextlib.contextmanager
    def beside(self, key: str) -> Iterator[None]:
        """Compile the graph's kernels in threads while the with block compiles the one of this key."""
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS)) as pool:
            # In a thread of its own, because this one is in the middle of a call.
            for other, needed in pool.submit(self._needed).result().items():
                if other != key:
                    pool.submit(self._load, needed)
            yield

    def _needed(self) -> dict[str, Needed]:
        """Return the kernels that the graph's calls will need, by their keys, as far as a walk over them comes."""
        with devices.current.runtime.on(self._device):
            collector = Collector(driver.active.get_current_target())
            # What the walk does not reach is compiled when it is launched.
            with contextlib.suppress(Exception), contract.under(self._settings), collecting(collector), torch.no_grad():
                Walk(self._device).run(self._lowered, _hollow(self._inputs, self._device))
        return collector.needed

    def _load(self, needed: Needed) -> None:
        """Compile a kernel and load it. The launch that needs it raises its error."""
        with (
            contextlib.suppress(Exception),
            contract.serving(needed.overload),
            devices.current.runtime.on(self._device),
        ):
            needed.load()


class Walk:
    """A dry run of a graph: kernels are described and not launched, and tensors have no memory.

    Attributes:
        served: the overloads of the calls that kernels would serve.
    """

    def __init__(self, device: torch.device) -> None:
        self.served: list[str] = []
        self._device = device

    def run(self, lowered: Lowered, inputs: list[Any]) -> list[Any]:
        """Return the outputs. Raises whatever stops the walk, such as sizes that depend on data."""
        return run_calls(lowered, inputs, self._call)

    def _call(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        function = call.function
        if call.data_dependent or isinstance(function, Scoped):
            raise Unsupported(name=call.name, reason="what it does depends on data or is unknown")
        if isinstance(function, FusedCalls):
            try:
                return self.run(function.fused, list(args))
            except Unsupported:
                return self.run(function.separate, list(args))
        if isinstance(function, Served):
            try:
                return self._served(function, args, kwargs)
            except Decline as decline:
                if function.op.declaration.library is not None:
                    raise Unsupported(name=function.op.overload, reason=decline.reason) from None
        if is_view(call.target) or not isinstance(call.target, OpOverload):
            return call.target(*args, **kwargs)
        return self._by_aten(call.target, args, kwargs)

    def _served(self, function: Served, args: Any, kwargs: dict[str, Any]) -> Any:
        """Describe a call of an operator with a kernel. Raises Decline."""
        results, _ = record_dry(function.op, in_schema_order(function.op.schema, tuple(args), kwargs))
        if results is None:
            raise Unsupported(name=function.op.overload, reason="its results depend on data")
        self.served.append(function.op.overload)
        plain = function.op.plain(results)
        return plain[0] if len(plain) == 1 else plain or None

    def _by_aten(self, target: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return hollow results of a call that ATen serves, with the sizes of its results on meta tensors."""

        def without_memory(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("meta")
            return without_elements(value) if is_hollow(value) else value

        args, kwargs = pytree.tree_map(without_memory, (args, kwargs))
        return _hollow(target(*args, **kwargs), self._device)


def _is_on(value: Any, kind: str) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == kind and value.layout is torch.strided


def _hollow(values: Any, device: torch.device) -> Any:
    """Return values with hollow tensors on a device in the place of meta tensors."""

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "meta":
            return tensor
        return hollow(tuple(tensor.shape), tensor.stride(), tensor.dtype, device)

    return pytree.tree_map_only(torch.Tensor, on_device, values)
