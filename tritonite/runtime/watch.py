"""`Watch`: the dispatch mode in which a recorder sees the calls of ATen that a host function makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from tritonite.runtime.hollow import DataUnknown, decline_guarded, hollow, is_hollow, without_elements
from tritonite.runtime.opaque import OpaqueMode

if TYPE_CHECKING:
    from tritonite.runtime.recorder import Recorder

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_COPIES = {_aten.clone.default, _aten._to_copy.default}


class Watch(OpaqueMode):
    """A mode that notes allocations, zeros and copies. Any other operator but views makes the call unrecordable."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        with self:
            # A composite operator, such as `contiguous`, is seen through the operators that it calls.
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func.is_view or func is _aten._unsafe_view.default:
            return func(*args, **kwargs)
        if func in _ALLOCATIONS or func in _ZEROS:
            result = self._fresh(func, args, kwargs)
            recorder.allocated(result)
            if func in _ZEROS:
                recorder.zeroed(result)
            return result
        decline_guarded(args, kwargs)
        if func in _COPIES:
            result = self._fresh(func, args, kwargs)
            if result.device == args[0].device:
                recorder.allocated(result)
                recorder.copied(result, args[0])
                return result
        elif func is _aten.copy_.default:
            recorder.copied(args[0], args[1])
            return args[0] if recorder.dry else func(*args, **kwargs)
        recorder.unrecordable(f"the host function calls {func}")
        return _without_running(func, args, kwargs) if recorder.dry else func(*args, **kwargs)

    def _fresh(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Return the tensor that `func` allocates, hollow if the recorder is dry."""
        return _hollow_results(func, args, kwargs) if self._recorder.dry else func(*args, **kwargs)


def _without_running(func: Any, args: Any, kwargs: Any) -> Any:
    """Return results like those of a call of ATen, without writing or drawing anything.

    A call whose tensors all have memory, and that draws nothing, is made. Raises DataUnknown if a result is a number
    that depends on hollow tensors.
    """
    schema = func._schema
    if schema.is_mutable:
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return written[0] if len(schema.returns) == 1 else tuple(written)
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    if tensors and torch.Tag.nondeterministic_seeded not in func.tags and not any(map(is_hollow, tensors)):
        return func(*args, **kwargs)
    if not all("Tensor" in str(returned.type) for returned in schema.returns):
        raise DataUnknown
    return _hollow_results(func, args, kwargs)


def _hollow_results(func: Any, args: Any, kwargs: Any) -> Any:
    """Return hollow tensors like the results of a call of ATen.

    Raises ATen's errors for its shapes, and DataUnknown if the shapes are data-dependent, or ATen's own function for
    them is missing or fails.
    """
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    device = kwargs.get("device") or (tensors[0].device if tensors else torch.device("cpu"))
    if torch.device(device).type == "meta":
        return func(*args, **kwargs)
    metas = pytree.tree_map_only(torch.Tensor, without_elements, (args, kwargs))
    if any(argument.name == "device" for argument in func._schema.arguments):
        metas[1].update(device="meta", pin_memory=None)
    try:
        results = func(*metas[0], **metas[1])
    except (NotImplementedError, AttributeError):
        # Up to torch 2.13 that of an LSTM cell reads the bias that is not given.
        raise DataUnknown from None
    return pytree.tree_map_only(
        torch.Tensor, lambda like: hollow(like.shape, like.stride(), like.dtype, device), results
    )
