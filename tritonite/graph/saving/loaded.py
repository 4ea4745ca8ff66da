"""The function that `tritonite.load` returns."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.utils import _pytree as pytree

from tritonite.errors import NoSavedPlan
from tritonite.graph import native
from tritonite.graph.compiled import AMBIENT, Kept, facts_about
from tritonite.graph.plan import GraphPlan
from tritonite.graph.record import Kind, kind_of
from tritonite.install import direct
from tritonite.runtime import contract
from tritonite.runtime.opaque import opaque


class Served(NamedTuple):
    """A graph of a file: the kind of arguments that it serves, the structure of its results, constants and plans.

    `kind` and `results` are None for a compiled graph, which takes and returns a list.
    """

    kind: Kind | None
    results: Any
    constants: list[torch.Tensor]
    plans: tuple[Kept, ...]


class LoadedGraph:
    """A function that runs the plans of a file, and records, traces and compiles nothing.

    Attributes:
        constants: the tensors that the function refers to. A call may write them, as a norm its statistics.
        replayed: the number of calls.
    """

    def __init__(self, name: str, served: Sequence[Served], constants: list[torch.Tensor]) -> None:
        self.__name__ = name
        self.constants = constants
        self.replayed = 0
        self._served = {each.kind: each for each in served}
        # Plans by the native dispatcher's key of their inputs, after the first call with it.
        self._found: dict[Hashable, Kept] = {}

    @property
    def plans(self) -> list[GraphPlan]:
        """The plans of the file."""
        return [kept.plan for served in self._served.values() for kept in served.plans]

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plan for these arguments. Raises NoSavedPlan if the file has none."""
        if None in self._served:
            return self._run(self._served[None], list(args))
        kind, tensors = kind_of(args, kwargs)
        served = self._served.get(kind)
        if served is None:
            raise self._refused(f"given are {self._given(kind)}; the file serves {self._listed()}")
        return pytree.tree_unflatten(self._run(served, tensors), served.results)

    def _run(self, served: Served, inputs: list[Any]) -> list[Any]:
        if torch._C._len_torch_dispatch_stack() or not direct.in_memory(inputs):
            raise self._refused("it runs under a dispatch mode, or its tensors have no memory")
        with torch.no_grad(), torch._C._DisableAutocast():
            kept = self._kept(served, inputs)
            if kept.plan.draws and contract.is_capturing():
                raise self._refused("it draws random numbers while a CUDA graph is captured")
            outputs = kept.run([*inputs, *served.constants])
        if outputs is None:
            raise self._refused("a kernel refuses the data of a tensor, such as an index out of range")
        self.replayed += 1
        return outputs

    def _kept(self, served: Served, inputs: list[Any]) -> Kept:
        settings = contract.settings().bits
        own = native.key(inputs)
        key = id(served), settings, own
        found = None if own is None else self._found.get(key)
        if found is None:
            facts = facts_about(inputs)
            found = next((each for each in served.plans if (each.settings, each.facts) == (settings, facts)), None)
            if found is None:
                raise self._refused(_difference(served.plans, settings, facts))
            if own is not None:
                self._found[key] = found
        return found

    def _refused(self, reason: str) -> NoSavedPlan:
        return NoSavedPlan(name=self.__name__, reason=reason)

    def _given(self, kind: Kind | None) -> str:
        return "a list of inputs" if kind is None else str(kind)

    def _listed(self) -> str:
        return "; or ".join(self._given(kind) for kind in self._served)


def _difference(plans: Sequence[Kept], settings: int, facts: Any) -> str:
    """Return why none of some plans fits facts about inputs."""
    same_inputs: list[Any] = [kept for kept in plans if cast(Any, kept.facts)[1:] == facts[1:]]
    if not same_inputs:
        return "its inputs are aligned, share memory or are lazily conjugated otherwise than those saved"
    for kept in same_inputs:
        for name, saved, own in zip(AMBIENT, kept.facts[0], facts[0], strict=True):
            if saved != own:
                return f"{name} is {own} now, and was {saved} when it was saved"
    return "it was saved under other settings of tritonite.enable, such as invariant"
