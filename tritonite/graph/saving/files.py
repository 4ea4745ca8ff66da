"""`save` and `load`: recorded graphs as files that hold plans, binaries and tensors, and no code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tritonite import devices
from tritonite.errors import InvalidArtifact, MismatchedGraph, UnsavableGraph
from tritonite.graph.compiled import CompiledGraph, Kept
from tritonite.graph.record import Kind, Recorded
from tritonite.graph.saving.binaries import loader
from tritonite.graph.saving.loaded import LoadedGraph, Served
from tritonite.graph.saving.steps import calls_by_key, devices_of, hashes, plan_as_json, plan_of
from tritonite.graph.saving.structure import tree_as_json, tree_of
from tritonite.graph.saving.tensors import Constants, constants_of
from tritonite.graph.saving.values import decoded, device_of, encoded
from tritonite.install.override import native_dispatcher
from tritonite.runtime import artifact

_FORMAT = 2
_MEMBER = "graphs.json"
# The facts of an artifact that decide whether this process can run its plans. Binaries need no compiler.
_FACTS = ("tritonite", "torch", "triton", "kind", "device", "capability")
# Bytes of tensors by value. An artifact is limited to a little more.
_MOST_BYTES = 2**32 - 2**28
_ADVICE = "call it once with each shape before saving"
_AGAIN = "record and save them again here"
_COMPILED = "Dynamo finds its graphs, and a file has no Python. Save tritonite.record(function), or {}"


def save(
    function: Recorded | CompiledGraph, path: str | os.PathLike[str], module: torch.nn.Module | None = None
) -> int:
    """Write the plans of a recorded function to a file, which `tritonite.load` reads.

    The file has a plan for each kind of arguments that the function was called with: the launches with their binaries,
    the calls of ATen by the names of operators, and the structure of arguments and results. It has no code.

    Tensors that the function refers to, such as parameters, are saved by value, so that the file stands alone. Those of
    `module` are saved by name: the file is small, and `load` binds the tensors of the module that it is given.

    Args:
        function: what `tritonite.record` returned, or a compiled graph, whose loaded function takes the graph's inputs.
        path: the file, which is replaced at once.
        module: the module whose parameters and buffers are saved by name; default: all tensors are saved by value.

    Returns:
        The number of plans.

    Raises:
        UnsavableGraph: a part of a plan has no name, or there is no plan.
        UnusableFile: the file cannot be written.
    """
    kinds = list(_kinds(function))
    name = getattr(function, "__name__", "the graph")
    constants, described, plans = Constants(module), [], []
    for kind, graph, results in kinds:
        if graph.reasons:
            raise UnsavableGraph(name=name, reason=f"it has no plan: {graph.reasons[0]}")
        numbers = [constants.number(tensor, f"{name}: constant {i}") for i, tensor in graph.lowered.constants.items()]
        plans += graph.plans
        described.append(
            {
                "kind": None if kind is None else _kind_as_json(kind),
                "results": None if results is None else tree_as_json(results),
                "constants": numbers,
                "plans": [_plan_as_json(kept) for kept in graph.kept],
            }
        )
    if not plans:
        raise UnsavableGraph(name=name, reason=f"it has no plan; {_ADVICE}")
    if constants.size > _MOST_BYTES:
        reason = f"its tensors have {constants.size} bytes, and a file holds {_MOST_BYTES}; give save their module"
        raise UnsavableGraph(name=name, reason=reason)
    tensors, members = constants.written()
    contents = {"format": _FORMAT, "name": name, "tensors": tensors, "kinds": described}
    needed = None
    if not any(map(calls_by_key, plans)):
        needed = {key for plan in plans for key in hashes(plan)}
    artifact.write(path, {_MEMBER: json.dumps(contents).encode(), **members}, needed)
    return len(plans)


def load(path: str | os.PathLike[str], module: torch.nn.Module | None = None) -> LoadedGraph:
    """Return the function of a file that `tritonite.save` has written.

    The function takes the arguments that the recorded one took. It compiles, traces and records nothing: a call with
    other shapes, dtypes, strides or values than those saved raises NoSavedPlan. Load only files that you trust: a GPU
    binary can do what a kernel can.

    Args:
        path: the file.
        module: the module with the tensors that are saved by name.

    Raises:
        InvalidArtifact: the file is damaged, or no file of graphs.
        MismatchedGraph: the file comes from another device, or from other versions of Tritonite, torch or Triton, or
            `module` has not the tensors that it needs.
    """
    found = artifact.read(path)
    try:
        contents = json.loads(found.entries[_MEMBER])
    except (KeyError, ValueError):
        raise InvalidArtifact(path=path, reason="it holds no graphs; tritonite.load_kernels loads kernels") from None
    if contents.get("format") != _FORMAT:
        raise InvalidArtifact(path=path, reason=f"the format of its graphs is {contents.get('format')}, not {_FORMAT}")
    check(found.facts, path)
    device = device_of(devices.current.type)
    try:
        constants = constants_of(contents["tensors"], found.entries, module, device)
    except ValueError as error:
        raise MismatchedGraph(path=path, reason=error) from None
    try:
        owner_of = loader(found.kernels, device)
        served = [_served(each, constants, owner_of) for each in contents["kinds"]]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InvalidArtifact(path=path, reason=f"a plan in it cannot be read ({error})") from error
    if found.kernels and any(calls_by_key(kept.plan) for each in served for kept in each.plans):
        # Such calls look for their kernels in Triton's disk cache.
        artifact.install(found)
    return LoadedGraph(contents["name"], served, constants)


def check(facts: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Raise MismatchedGraph unless this process can run plans of a process with these facts."""
    found = artifact.difference(facts, _FACTS)
    if found is not None:
        reason = f"its graphs are for {found.what} {found.theirs}, and this process has {found.ours}; {_AGAIN}"
        raise MismatchedGraph(path=path, reason=reason)
    if not devices.current.interpreted and native_dispatcher() is None:
        raise MismatchedGraph(path=path, reason="a GPU's plans need the native dispatcher, which is not in use")


def _kinds(function: Any) -> Iterator[tuple[Kind | None, CompiledGraph, Any]]:
    """Yield (kind of arguments, graph, structure of the results). Raises UnsavableGraph for other functions."""
    if isinstance(function, Recorded):
        yield from ((kind, traced.graph, traced.structure) for kind, traced in function.traced)
    elif isinstance(function, CompiledGraph):
        yield None, function, None
    else:
        name = getattr(function, "__name__", type(function).__name__)
        if hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod"):
            graphs = "one of tritonite.graph.backend.graphs"
            raise UnsavableGraph(name=f"{name}, a function of torch.compile,", reason=_COMPILED.format(graphs))
        raise UnsavableGraph(name=name, reason="saved is what tritonite.record returned")


def _kind_as_json(kind: Kind) -> dict[str, Any]:
    return {
        "arguments": tree_as_json(kind.structure),
        "leaves": [encoded(leaf) for leaf in kind.leaves],
        "grad": kind.grad,
        "autocast": encoded(kind.autocast),
    }


def _plan_as_json(kept: Kept) -> dict[str, Any]:
    if len(found := {device for device in devices_of(kept.plan) if device.type != "cpu"}) > 1:
        raise UnsavableGraph(name="the plan", reason=f"it runs on {sorted(map(str, found))}, not on one device")
    return {"settings": kept.settings, "facts": encoded(kept.facts), "plan": plan_as_json(kept.plan)}


def _served(described: dict[str, Any], constants: list[torch.Tensor], owner_of: Callable[[str], Any]) -> Served:
    kind = described["kind"]
    if kind is not None:
        leaves = tuple([decoded(leaf) for leaf in kind["leaves"]])
        kind = Kind(tree_of(kind["arguments"]), leaves, kind["grad"], decoded(kind["autocast"]))
    own = [constants[number] for number in described["constants"]]
    plans = []
    for each in described["plans"]:
        plan = plan_of(each["plan"], owner_of)
        tensors = _inputs(each["facts"])
        plans.append(Kept.of(plan, tensors + len(own), each["settings"], decoded(each["facts"])))
    results = None if described["results"] is None else tree_of(described["results"])
    return Served(kind, results, own, tuple(plans))


def _inputs(described: dict[str, Any]) -> int:
    """Return the number of inputs of a plan: its facts are those of the process, and one item for each input."""
    return len(described["tuple"]) - 1
