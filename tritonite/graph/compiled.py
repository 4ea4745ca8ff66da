"""A compiled graph: its calls, and a bounded number of plans by shape."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from tritonite import devices
from tritonite.errors import Decline
from tritonite.graph import native
from tritonite.graph.ahead import Ahead
from tritonite.graph.execute import execute
from tritonite.graph.interpret import interpret
from tritonite.graph.lowered import Lowered, lower
from tritonite.graph.operators import scope
from tritonite.graph.plan import GraphPlan
from tritonite.graph.recording import record_graph
from tritonite.install import direct
from tritonite.install.override import native_dispatcher
from tritonite.runtime import compilation, contract, stats
from tritonite.runtime.launch import active_hooks
from tritonite.runtime.locks import brief
from tritonite.runtime.opaque import opaque

DEFAULT_SHAPES = 64
_CUSTOM_OPERATORS = "_AnalyzeCustomOpInputOutputMode"


class Kept(NamedTuple):
    """A plan that can run.

    Args:
        plan: the plan.
        native: the plan as an object of the native dispatcher, or None.
        calls: the number of calls of each overload.
        settings, facts: the bits of the settings, and the facts about inputs that the plan depends on.
    """

    plan: GraphPlan
    native: Any
    calls: Counter[str]
    settings: int
    facts: Hashable

    @staticmethod
    def of(plan: GraphPlan, inputs: int, settings: int, facts: Hashable) -> Kept:
        """Return a plan for `inputs` inputs and constants that can run."""
        calls = Counter(note.operator for note in plan.notes if not note.view and not note.reason)
        for overload in calls:
            # In a process that has loaded the plan, nothing has counted a call of the overload yet.
            stats.counts_of(overload)
        return Kept(plan, native.compiled(plan, inputs), calls, settings, facts)

    def run(self, given: list[Any]) -> list[Any] | None:
        """Run the plan on inputs and constants. Returns None if a kernel refuses the data."""
        written = [given[i] for i in self.plan.written]
        try:
            outputs = execute(self.plan, given) if self.native is None else self.native.run(given)
        except Decline:
            outputs = None
        if outputs is None:
            return None
        for tensor in written:
            increment_version(tensor)
        stats.count_replays(self.calls)
        found: list[Any] = outputs
        return found


class CompiledGraph:
    """A graph of ATen's operators that runs as one plan for each shape.

    A call takes a list of inputs, which it empties, and returns a list of outputs. Without a plan for the inputs' shape
    the call is recorded. A graph that no plan can describe is interpreted, for the reason in `reason`.
    """

    def __init__(
        self, module: fx.GraphModule, selected: frozenset[str], shapes: int = DEFAULT_SHAPES, kind: str = "recorded"
    ) -> None:
        # Tells AOTAutograd that a call takes a list; Dynamo copies attributes of the instance only.
        self._boxed_call = True
        self.lowered: Lowered = lower(module, selected)
        self.kind, self.reason = kind, ""
        # Why the graph is not captured as a CUDA graph, though it was to be.
        self.uncaptured = ""
        self._selected = selected
        self.replayed = self.recorded = self.interpreted = 0
        self._shapes = shapes
        self._plans: OrderedDict[Hashable, Kept | str] = OrderedDict()
        if not self.reason and not devices.current.interpreted and native_dispatcher() is None:
            self.reason = "the native dispatcher is not in use"

    @property
    def plans(self) -> list[GraphPlan]:
        """The plans that are kept, the one used last at the end."""
        return [kept.plan for kept in self.kept]

    @property
    def kept(self) -> list[Kept]:
        """The plans that are kept, with what runs them and what they depend on."""
        with brief:
            return [kept for kept in self._plans.values() if isinstance(kept, Kept)]

    @property
    def reasons(self) -> list[str]:
        """Why the graph, or a shape of it, has no plan."""
        with brief:
            found = {plan for plan in self._plans.values() if isinstance(plan, str)}
        return [self.reason] if self.reason else sorted(found)

    @opaque
    def __call__(self, inputs: list[Any]) -> list[Any]:
        with torch.no_grad():
            if torch._C._len_torch_dispatch_stack():
                if not self._may_leave(_get_current_dispatch_mode_stack()):
                    return self._dispatch(inputs)
                with _disable_current_modes():
                    return self(inputs)
            if not direct.in_memory(inputs):
                return self._dispatch(inputs)
            with contract.under(contract.settings()):
                return self._run(inputs)

    def _may_leave(self, modes: list[Any]) -> bool:
        """Return whether no dispatch mode has anything to do: AOTAutograd checks custom operators in a first call."""
        return not self.lowered.has_custom and {type(mode).__name__ for mode in modes} == {_CUSTOM_OPERATORS}

    def _dispatch(self, inputs: list[Any]) -> list[Any]:
        """Run the calls through PyTorch's dispatcher, for dispatch modes and for tensors without memory."""
        self.interpreted += 1
        with scope(self._selected, contract.settings()):
            return interpret(self.lowered, inputs, overloads=True)

    def _run(self, inputs: list[Any]) -> list[Any]:
        capturing = contract.is_capturing()
        if self.reason or _is_watched():
            return self._interpret(inputs)
        key = (contract.settings().bits, native.key(inputs) or facts_about(inputs))
        with brief:
            kept = self._plans.get(key)
            if kept is not None:
                self._plans.move_to_end(key)
        if isinstance(kept, str) or (capturing and (kept is None or kept.plan.draws)):
            return self._interpret(inputs)
        return self._record(key, inputs) if kept is None else self._replay(kept, inputs)

    def _record(self, key: Hashable, inputs: list[Any]) -> list[Any]:
        settings, facts = contract.settings().bits, facts_about(inputs)
        device = _device(inputs)
        ahead = None if devices.current.interpreted else Ahead(self.lowered, inputs, device).beside
        with compilation.ahead_of(ahead):
            outputs, plan = record_graph(self.lowered, inputs, device)
        kept: Kept | str
        if isinstance(plan, GraphPlan):
            kept = Kept.of(plan, self.lowered.inputs + len(self.lowered.constants), settings, facts)
        else:
            kept = plan
        dropped = None
        with brief:
            self.recorded += 1
            self._plans[key] = kept
            if len(self._plans) > self._shapes:
                _, dropped = self._plans.popitem(last=False)
        del dropped
        return outputs

    def _interpret(self, inputs: list[Any]) -> list[Any]:
        self.interpreted += 1
        return interpret(self.lowered, inputs)

    def _replay(self, kept: Kept, inputs: list[Any]) -> list[Any]:
        given = [*inputs, *self.lowered.constants.values()]
        # A kernel's assertion may fail in the interpreter. The calls are then made again, for ATen's error.
        again = (list(inputs), torch.get_rng_state()) if devices.current.interpreted else None
        inputs.clear()
        outputs = kept.run(given)
        if outputs is None:
            assert again is not None
            torch.set_rng_state(again[1])
            return self._interpret(again[0])
        self.replayed += 1
        return outputs


def _is_watched() -> bool:
    """Return whether launches have to go through Triton, whose hooks a profiler listens to."""
    return active_hooks() != (None, None)


def _device(inputs: list[Any]) -> torch.device:
    """Return the device of the first input that is on a device of this kind, or the current one."""
    kind = devices.current.type
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.device.type == kind:
            return value.device
    return devices.current_device()


def facts_about(inputs: list[Any]) -> Hashable:
    """Return all facts about a call that the steps of its plan depend on."""
    words: list[Any] = [_ambient()]
    first: dict[int, int] = {}
    for i, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            words.append((type(value).__name__, value))
            continue
        if value.layout is not torch.strided:
            words.append((value.layout, value.dtype, value.device))
            continue
        address = value.data_ptr()
        shared = first.setdefault(address, i) if address else i
        bits = (address % 16 != 0, value.is_neg(), value.is_conj(), shared)
        words.append((value.dtype, value.device, value.shape, value.stride(), bits))
    return tuple(words)


def _ambient() -> tuple[Any, ...]:
    """Return torch's settings that results may depend on, in the order of `AMBIENT`."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.enabled,
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
    )


AMBIENT = (
    "the default dtype",
    "deterministic algorithms",
    "torch.utils.deterministic.fill_uninitialized_memory",
    "torch.backends.cudnn.enabled",
    "torch.backends.mkldnn.enabled",
    "torch.get_float32_matmul_precision()",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
)
