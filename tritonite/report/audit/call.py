"""A sampled call: its copies, and its results by the kernel, by ATen and in float64."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite.install import direct, sampling
from tritonite.registry import Op
from tritonite.registry.names import overload_named
from tritonite.report.judge import to_reference
from tritonite.runtime import contract

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# Copies keep addresses modulo this number of bytes, which keys and kernels depend on.
_ALIGNMENT = 16


class _Local(threading.local):
    checking = False


_local = _Local()


def checking() -> bool:
    """Return whether this thread checks a sampled call."""
    return _local.checking


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Send this thread's calls to ATen, below autograd and autocast, and sample none of them."""
    outer = contract.swap_inside_kernel(True)
    _local.checking = True
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys |= torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    try:
        with (
            torch.no_grad(),
            torch._C._AutoDispatchBelowADInplaceOrView(),
            torch._C._ExcludeDispatchKeyGuard(keys),
        ):
            yield
    finally:
        _local.checking = False
        contract.swap_inside_kernel(outer)


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a call's arguments or results, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def size(tree: Any) -> int:
    """Return the bytes that copies of a call's tensors take."""
    return sum(high - low for low, high, _ in _extents(tensors(tree)).values())


def _extents(given: list[torch.Tensor]) -> dict[tuple[torch.device, int], tuple[int, int, torch.Tensor]]:
    """Return (first byte, end, one of the tensors) by storage: the range of a storage that tensors reach."""
    found: dict[tuple[torch.device, int], tuple[int, int, torch.Tensor]] = {}
    for tensor in given:
        low, high = _extent(tensor)
        before = found.get(_storage(tensor), (low, high, tensor))
        found[_storage(tensor)] = min(low, before[0]), max(high, before[1]), tensor
    return found


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    storage = tensor.untyped_storage()
    # Storages without memory have no address.
    return tensor.device, storage.data_ptr() or -storage._cdata


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = tensor.storage_offset() * tensor.itemsize
    return low - low % _ALIGNMENT, low + (reach + 1) * tensor.itemsize if tensor.numel() else low


def copied(tree: Any) -> Any:
    """Copy a call's tensors with their strides, gaps and overlaps; tensors of one storage share a storage again."""
    made = {}
    for key, (low, high, tensor) in _extents(tensors(tree)).items():
        reach = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        made[key] = low, reach.set_(tensor.untyped_storage(), low, (high - low,), (1,)).clone().untyped_storage()

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        low, storage = made[_storage(tensor)]
        offset = tensor.storage_offset() - low // tensor.itemsize
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, offset, tensor.shape, tensor.stride())

    return pytree.tree_map_only(torch.Tensor, copy, tree)


class SampledCall:
    """A call that a kernel serves, with the arguments as they were before it."""

    def __init__(self, op: Op, given: Arguments) -> None:
        self.op, self._given = op, given
        self._before = copied(given) if op.writes else given
        # Each of a call's results: (index in the schema's returns, the result).
        self.own: list[tuple[int, Any]] = []

    def finish(self, results: Any) -> None:
        """Take the results of the kernel."""
        self.own = self._leaves(results, self._given)

    def inputs(self) -> list[Any]:
        """Return the tensors and numbers that the call reads, without those of out= arguments."""
        args, kwargs = self._before
        read = {name: value for name, value in kwargs.items() if name not in self.op.out_names}
        return pytree.tree_leaves((args, read))

    def _leaves(self, results: Any, given: Arguments) -> list[tuple[int, Any]]:
        if self.op.schema.returns:
            several = isinstance(results, (list, tuple)) and len(self.op.schema.returns) > 1
            each = list(results) if several else [results]
            # The native dispatcher gives a list of the results, also of one.
            if isinstance(results, list) and len(self.op.schema.returns) == 1 and len(results) == 1:
                each = results
        else:
            # A call without results writes into its arguments.
            args, kwargs = given
            names = [argument.name for argument in self.op.schema.arguments]
            each = [args[i] if i < len(args) else kwargs.get(names[i]) for i in self.op.written]
        return [(i, leaf) for i, result in enumerate(each) for leaf in pytree.tree_leaves(result)]

    def _run(self, function: Callable[..., Any], arguments: Arguments) -> list[tuple[int, Any]]:
        args, kwargs = arguments
        return self._leaves(function(*args, **kwargs), arguments)

    def _fresh(self) -> Arguments:
        """Return arguments that a repetition may write into."""
        fresh: Arguments = copied(self._before) if self.op.writes else self._before
        return fresh

    @functools.cached_property
    def aten(self) -> list[tuple[int, Any]] | None:
        """ATen's results; None for an operator outside ATen, or if ATen raises an error."""
        if self.op.declaration.library is not None:
            return None
        try:
            return self._run(overload_named(self.op.overload), self._fresh())
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None

    @functools.cached_property
    def exact(self) -> list[tuple[int, Any]] | None:
        """ATen's results in float64; None if ATen has none."""
        if self.aten is None:
            return None
        floating = any(isinstance(x, torch.Tensor) and x.is_floating_point() for _, x in self.aten)
        # Integers are converted unless ATen needs them.
        for integers in dict.fromkeys((floating, False)):
            widened = pytree.tree_map(functools.partial(to_reference, integers=integers), self._without_conversion())
            with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                return self._run(overload_named(self.op.overload), copied(widened) if self.op.writes else widened)
        return None

    def _without_conversion(self) -> Arguments:
        """Return the arguments without `half_to_float`, which ATen accepts for 16-bit inputs alone."""
        args, kwargs = self._before
        if "half_to_float" not in self.op.names:
            return args, kwargs
        i = self.op.names.index("half_to_float")
        if i < len(args):
            return (*args[:i], False, *args[i + 1 :]), kwargs
        return args, kwargs | {"half_to_float": False}

    def repeated(self) -> list[tuple[int, Any]]:
        """Return the results of the kernel in another run. Raises Decline if it does not serve the call again."""
        args, kwargs = self._fresh()
        outer = contract.swap_inside_kernel(False)
        try:
            return self._leaves(sampling.repeat(self.op, args, kwargs), (args, kwargs))
        finally:
            contract.swap_inside_kernel(outer)


def can_copy(given: Arguments) -> bool:
    """Return whether all of a call's tensors are ordinary ones with memory."""
    args, kwargs = given
    return direct.in_memory((*args, *kwargs.values()))
