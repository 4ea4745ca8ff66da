"""`warm`: compile what calls will need, before they are made."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tritonite import devices
from tritonite.errors import InvalidShapes, NoDevice
from tritonite.runtime import contract, progress
from tritonite.runtime.compilation import Collector, Needed, in_disk_cache
from tritonite.runtime.launch import prepare_cache
from tritonite.warming import workers
from tritonite.warming.collect import collect

# Argument tuples in place of the call's, or sizes by (argument's index or keyword, dimension).
Shapes = Sequence[tuple[Any, ...]] | Mapping[tuple[int | str, int], Sequence[int]] | None
_NOTHING = "nothing to compile: kernels run in Triton's interpreter here"


@dataclasses.dataclass(frozen=True)
class Warmup:
    """Result of `warm()`.

    Attributes:
        calls: number of calls that were looked at.
        kernels: names of the kernels that the calls need, beyond those already in memory.
        compiled: number of kernels that had to be compiled; Triton's disk cache had the others.
        seconds: duration.
        failed: errors by kernel or overload. Such a kernel is compiled by the first call that needs it.
    """

    calls: int
    kernels: tuple[str, ...]
    compiled: int
    seconds: float
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        if devices.current.interpreted:
            return _NOTHING
        cached = len(self.kernels) - self.compiled
        text = f"{self.calls} calls: {self.compiled} kernels compiled, {cached} loaded from Triton's disk cache, "
        failures = "".join(f"\n{name}: {error}" for name, error in self.failed.items())
        return f"{text}{self.seconds:.1f} s{failures}"


def warm(
    function: Callable[..., Any], *args: Any, shapes: Shapes = None, jobs: int | None = None, **kwargs: Any
) -> Warmup:
    """Compile the kernels that calls of a function will need, in parallel processes.

    The function is called once for each variant. ATen computes its operators, in about the time and memory of a call
    without Tritonite, while the kernels that would serve them are noted. Worker processes then compile these kernels
    into Triton's disk cache, and this process loads them. A later call of such shapes compiles nothing.

    The overrides in force decide which operators have kernels; if there are none, `enable()`'s default does.

    Args:
        function: a model or another callable. A training step calls backward() itself.
        args: the function's positional arguments; `kwargs` has its keyword arguments.
        shapes: variants of the call, by default the call itself alone:

            - a list of tuples, each in place of `args`;
            - sizes of dimensions, `{(0, 1): [128, 512], ("mask", 1): [128, 512]}`: dimension 1 of the first argument
              and of the keyword argument `mask`. The lists advance together, one variant for each position. Elements
              of the given tensors are repeated or left out.
        jobs: processes; default: one for each core.

    Returns:
        A Warmup with numbers of kernels, and errors of kernels that cannot be compiled.

    Unchanged after `warm`: the contents of all tensors from before the call, such as parameters, buffers and caches;
    `.grad` of parameters; states of optimizers; states of torch's, NumPy's and Python's random generators. Memory that
    the call took is free again. Changed is what the function does to other Python objects, such as counters, lists and
    learning rate schedules.

    Raises InvalidShapes, NoDevice without a device to run on, and the function's own errors.
    """
    variants = list(_variants(args, kwargs, shapes))
    if devices.current.interpreted:
        progress.tell("warming", _NOTHING)
        return Warmup(len(variants), (), 0, 0.0)
    if not devices.current.dispatch_key:
        raise NoDevice
    begin, collector = time.perf_counter(), Collector(driver.active.get_current_target())
    failed: dict[str, str] = {}
    for given, named in variants:
        failed |= collect(function, given, named, collector)
    needed = list(collector.needed.values())
    compiled, broken = compile_all(needed, collector.target, jobs, failed)
    for each in needed:
        if id(each) not in broken:
            _load(each, failed)
    names = tuple([each.source.name for each in needed])
    return Warmup(len(variants), names, compiled, time.perf_counter() - begin, failed)


def compile_all(
    needed: Sequence[Needed], target: GPUTarget, jobs: int | None, failed: dict[str, str]
) -> tuple[int, set[int]]:
    """Compile kernels that Triton's disk cache lacks, with a progress bar. Adds errors to `failed`, by kernel.

    Returns (number of kernels compiled, ids of those that could not be).
    """
    prepare_cache()
    missing = [each for each in needed if not in_disk_cache(each.source, target, each.options)]
    built, broken = 0, set[int]()
    with progress.Bar("compiling", len(missing)) as bar:
        for done in workers.build(missing, target, jobs or workers.usual_jobs()) if missing else ():
            name = missing[done.number].source.name
            bar.advance(name)
            built += not done.error
            if done.error:
                failed[name] = done.error
                broken.add(id(missing[done.number]))
    return built, broken


def _load(each: Needed, failed: dict[str, str]) -> None:
    """Load a kernel from Triton's disk cache."""
    try:
        with contract.serving(each.overload):
            each.load()
    except Exception as error:  # noqa: BLE001 - the first call that needs the kernel raises it
        failed[each.source.name] = f"{type(error).__name__}: {error}"


def _variants(
    args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments of each call that `shapes` asks for. Raises InvalidShapes."""
    if shapes is None:
        yield args, kwargs
    elif isinstance(shapes, Mapping):
        if len({len(sizes) for sizes in shapes.values()}) != 1:
            raise InvalidShapes(reason="each dimension needs as many sizes as the others")
        for i in range(len(next(iter(shapes.values())))):
            given: dict[int | str, Any] = dict(enumerate(args))
            given.update(kwargs.items())
            for (argument, dim), sizes in shapes.items():
                if not isinstance(given.get(argument), torch.Tensor):
                    raise InvalidShapes(reason=f"argument {argument!r} is not a tensor of the call")
                if not -given[argument].dim() <= dim < given[argument].dim():
                    raise InvalidShapes(reason=f"argument {argument!r} has no dimension {dim}")
                given[argument] = resized(given[argument], dim, sizes[i])
            yield tuple([given[j] for j in range(len(args))]), {name: given[name] for name in kwargs}
    else:
        for each in shapes:
            if not isinstance(each, tuple):
                raise InvalidShapes(reason=f"a variant is a tuple of arguments, not {type(each).__name__}")
            yield each, kwargs


def resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return a tensor with another size along a dimension, of repeated elements, in the memory order of `tensor`."""
    with torch.no_grad():
        index = torch.arange(size, device=tensor.device) % max(tensor.shape[dim], 1)
        chosen = tensor.detach().index_select(dim, index)
        # Dimensions from the outermost in memory to the innermost.
        order = sorted(range(tensor.dim()), key=lambda i: (-tensor.stride(i), i))
        inverse = sorted(range(tensor.dim()), key=order.__getitem__)
        laid = chosen.permute(order).contiguous().permute(inverse)
    return laid.requires_grad_(tensor.requires_grad)
