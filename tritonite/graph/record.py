"""`record`: a function as compiled graphs without Dynamo and its guards, for those who know their shapes."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tritonite import devices
from tritonite.errors import RecordedWithoutGradient
from tritonite.graph.compiled import CompiledGraph
from tritonite.graph.options import options_of
from tritonite.graph.passes import run_passes
from tritonite.install.override import select
from tritonite.runtime.locks import brief
from tritonite.runtime.opaque import OpaqueMode, opaque


class _Traced(NamedTuple):
    """A compiled graph, and the structure of the function's results."""

    graph: CompiledGraph
    structure: Any


class Kind(NamedTuple):
    """The kind of a call: what decides which graph serves it.

    Args:
        structure: the structure of the arguments.
        leaves: for each argument, a tensor's meta, or a value with the name of its type.
        grad: whether gradients are enabled.
        autocast: the settings of autocast.
    """

    structure: Any
    leaves: tuple[Hashable, ...]
    grad: bool
    autocast: Hashable

    def __str__(self) -> str:
        parts = [_described(leaf) for leaf in self.leaves]
        more = [] if self.autocast is None else ["under autocast"]
        return ", ".join([*parts, "with gradients enabled" if self.grad else "without gradients", *more])


class _Unwritten(OpaqueMode):
    """A mode after which tensors that a traced function writes have their values from before.

    make_fx computes with small constants while it traces, and would count a batch in a norm's statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for value in pytree.tree_leaves((args, kwargs)):
                if type(value) is torch.Tensor and id(value) not in self._before:
                    with _disable_current_modes():
                        self._before[id(value)] = value, value.clone()
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        with _disable_current_modes(), torch.no_grad():
            for value, before in self._before.values():
                if not torch.equal(value, before):
                    value.copy_(before)


class Recorded:
    """A function whose ATen calls are recorded once for each kind of arguments, and then replayed.

    `graphs` has the compiled graphs, the one used last at the end.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any] | None) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._options = options_of(None, options)
        self._selected = select(self._options.include, self._options.exclude)
        self._traced: OrderedDict[Kind, _Traced] = OrderedDict()

    @property
    def graphs(self) -> list[CompiledGraph]:
        with brief:
            return [each.graph for each in self._traced.values()]

    @property
    def traced(self) -> list[tuple[Kind, _Traced]]:
        """The kinds of arguments with their graphs."""
        with brief:
            return list(self._traced.items())

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind, tensors = kind_of(args, kwargs)
        with brief:
            traced = self._traced.get(kind)
            if traced is not None:
                self._traced.move_to_end(kind)
        if traced is None:
            traced = self._trace(args, kwargs)
            with brief:
                self._traced[kind] = traced
                if len(self._traced) > self._options.shapes:
                    self._traced.popitem(last=False)
        with torch._C._DisableAutocast():
            return pytree.tree_unflatten(traced.graph(tensors), traced.structure)

    def _trace(self, args: Any, kwargs: Any) -> _Traced:
        """Trace the function with fake tensors in the place of its arguments. Raises RecordedWithoutGradient."""
        results: Any = None
        leaves, structure = pytree.tree_flatten((args, kwargs))

        def call(*tensors: torch.Tensor) -> list[Any]:
            nonlocal results
            given = iter(tensors)
            filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(filled, structure)
            flat, results = pytree.tree_flatten(self._function(*args, **kwargs))
            if any(isinstance(each, torch.Tensor) and each.requires_grad for each in flat):
                raise RecordedWithoutGradient(name=f"tritonite.record({getattr(self, '__name__', 'function')})")
            return flat

        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        with _Unwritten():
            module = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
        run_passes(module, self._selected, self._options.fuse)
        return _Traced(CompiledGraph(module, self._selected, self._options.shapes), results)


def record(function: Callable[..., Any], options: dict[str, Any] | None = None) -> Recorded:
    """Return a function that replays the ATen calls of `function`: a graph without Dynamo and without guards.

    The first call with arguments of a kind runs `function` on fake tensors, notes its calls of ATen, and records them.
    Later calls replay the calls. A kind is the structure of the arguments, sizes, strides and dtypes of tensors, and
    the values of all others.

    Everything else is as it was in the first call: numbers that the function reads, branches that it takes, and the
    mode of its modules. Modules and tensors that the function refers to are read anew in every call, and are written if
    the function writes them.

    The results have no gradient. A gradient that the function computes itself, by torch.func.grad or
    torch.autograd.grad, is recorded like any other call.

    Args:
        options: as in `torch.compile(backend="tritonite", options=...)`.

    Raises:
        RecordedWithoutGradient: a result would need a gradient, in a call outside torch.no_grad().
    """
    return Recorded(function, options)


def kind_of(args: Any, kwargs: Any) -> tuple[Kind, list[torch.Tensor]]:
    """Return (kind of a call, the tensors among its arguments)."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return Kind(structure, tuple(map(_leaf, leaves)), torch.is_grad_enabled(), _autocast()), tensors


def _leaf(leaf: Any) -> Hashable:
    """Return the part of an argument that a graph depends on."""
    if isinstance(leaf, torch.Tensor):
        kind, shape = type(leaf), tuple(leaf.shape)
        named = kind.__name__ if kind in (torch.Tensor, torch.nn.Parameter) else kind
        return named, leaf.dtype, leaf.device, shape, leaf.stride(), leaf.requires_grad
    # 1, 1.0 and True are equal, and -0.0 equals 0.0.
    return type(leaf).__name__, repr(leaf) if isinstance(leaf, float) else leaf


def _described(leaf: Any) -> str:
    if len(leaf) == 2:
        return repr(leaf[1])
    kind, dtype, device, shape, stride, _ = leaf
    named = "" if isinstance(kind, str) else f"{kind.__name__} of "
    return f"{named}{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(stride)} on {device}"


def _autocast() -> Hashable:
    """Return the settings of autocast in force."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kinds = dict.fromkeys(("cpu", *[device.type for device in devices.present]))
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
