"""Whole graphs: `torch.compile(model, backend="tritonite")` runs a model's graphs as recorded plans.

- backend.py, options.py: from Dynamo by AOTAutograd to compiled graphs, forward and backward
- record.py: a function as compiled graphs by make_fx, without Dynamo and guards
- partition.py: what the backward pass computes again
- passes/, patterns/: changes of a graph before it is lowered; expressions that become fused operators
- fused.py: parts that passes have fused, with the separate operators that they replace
- effects.py: which calls must keep their order
- program.py, fused_call.py: the operators of several pointwise formulas, and of a call with these before and after it
- lowered.py, operators.py: a graph as a list of calls; what runs each
- compiled.py: a compiled graph, with a plan for each shape
- recording.py, memory.py: the calls run once, their plans joined, and memory shared in an arena
- plan.py, execute.py, native.py: a graph's plan, its execution in Python, and in the native dispatcher
- cudagraphs.py: capture by PyTorch's CUDA graph trees
- explain.py: plans as text
- interpret.py: calls one after another, where there is no plan
"""

from __future__ import annotations

from torch._dynamo.backends import registry

from tritonite.graph.backend import backend
from tritonite.graph.record import record

__all__ = ["backend", "record"]

# Installed packages announce the backend by an entry point. A source checkout does not.
if "tritonite" not in registry.list_backends(exclude_tags=()):
    registry.register_backend(backend, name="tritonite")
