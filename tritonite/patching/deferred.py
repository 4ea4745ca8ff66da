"""Logits that are computed only if something but a cross entropy needs them.

`DeferredLogits` stands for the result of a head, a linear layer of hidden states. It goes through what models do before
a loss: casts, a scale, a soft cap, slices of tokens, a view as rows. `torch.nn.functional.cross_entropy` of it is
`fused.linear_cross_entropy`. Any other use computes the logits, so that the result is right whatever a model does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tritonite import fused


class Head:
    """The head's part of a model's run: makes deferred logits, and notes what was done with them.

    Attributes:
        losses: the number of losses computed without logits.
        reason: the first use that needed the logits, or "".
    """

    def __init__(self, linear: torch.nn.Linear, replaced_input: torch.Tensor | None = None) -> None:
        self.linear = linear
        self.replaced_input = replaced_input
        self.losses = 0
        self.reason = ""

    def __call__(self, hidden: torch.Tensor) -> DeferredLogits:
        """Return the deferred logits of hidden states, or of the sample that is given in their place."""
        return DeferredLogits(self, hidden if self.replaced_input is None else self.replaced_input)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.linear, name)


class DeferredLogits:
    """outer * f(inner * head(hidden)), where f is tanh if `capped` and the identity otherwise."""

    def __init__(
        self,
        head: Head,
        hidden: torch.Tensor,
        dtype: torch.dtype | None = None,
        inner: float = 1.0,
        outer: float = 1.0,
        capped: bool = False,
    ) -> None:
        self.head, self.hidden = head, hidden
        self.inner, self.outer, self.capped = inner, outer, capped
        self.dtype = dtype or _computed_in(hidden)

    def _with(self, **changes: Any) -> DeferredLogits:
        fields = {name: getattr(self, name) for name in ("head", "hidden", "dtype", "inner", "outer", "capped")}
        return DeferredLogits(**(fields | changes))

    def tensor(self, reason: str) -> torch.Tensor:
        """Return the logits, computed by the head itself, and note who needs them."""
        self.head.reason = self.head.reason or reason
        logits = self.head.linear(self.hidden).to(self.dtype)
        if self.capped:
            return torch.tanh(logits * self.inner) * self.outer
        return logits if self.inner == 1.0 else logits * self.inner

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.linear.out_features))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> DeferredLogits:
        return self._with(dtype=torch.float32)

    def contiguous(self) -> DeferredLogits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and len(args) == 1 and args[0] in (self.device, str(self.device)):
            return self
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.dtype) and args[0].is_floating_point:
            return self._with(dtype=args[0])
        return self.tensor("to").to(*args, **kwargs)

    def view(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if len(sizes) == 2 and sizes[-1] == self.shape[-1]:
            return self._with(hidden=self.hidden.reshape(sizes[0], self.hidden.shape[-1]))
        return self.tensor("view").view(*shape)

    def reshape(self, *shape: Any) -> Any:
        return self.view(*shape)

    def __getitem__(self, index: Any) -> Any:
        whole = isinstance(index, tuple) and index[-1:] == (slice(None),)
        if whole and (Ellipsis in index or len(index) == self.ndim) and all(_keeps_dimension(each) for each in index):
            return self._with(hidden=self.hidden[index])
        return self.tensor("a part of them")[index]

    def __mul__(self, factor: Any) -> Any:
        if not isinstance(factor, (int, float)):
            return self.tensor("a product") * factor
        return self._with(outer=self.outer * factor) if self.capped else self._with(inner=self.inner * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if isinstance(divisor, (int, float)) and divisor:
            return self * (1.0 / divisor)
        return self.tensor("a quotient") / divisor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(name), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredLogits):
            if function is torch.tanh and not first.capped and len(args) == 1 and not kwargs:
                return first._with(capped=True)
            if function is torch.nn.functional.cross_entropy:
                return _cross_entropy(function, *args, **kwargs)
        reason = getattr(function, "__name__", str(function))
        computed = tree_map_only(DeferredLogits, lambda each: each.tensor(reason), (args, kwargs))
        return function(*computed[0], **computed[1])


def _cross_entropy(
    function: Callable[..., torch.Tensor],
    logits: DeferredLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross entropy of deferred logits: of rows with a class each, without their logits."""
    plain = weight is None and size_average is None and reduce is None and logits.ndim == 2
    if not plain or target.dim() != 1 or target.dtype is not torch.int64:
        kept = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        return function(logits.tensor("cross_entropy with weights or probabilities"), target, *kept)
    head = logits.head
    head.losses += 1
    hidden, weight, bias = logits.hidden, head.linear.weight, head.linear.bias
    # c tanh(z / c) with z = inner * outer * head(hidden) and c = outer.
    scale = logits.inner * logits.outer
    if abs(scale - 1.0) > 1e-12:
        hidden = hidden * scale
        bias = None if bias is None else bias * scale
    computed_in = _computed_in(hidden)
    loss: torch.Tensor = fused.linear_cross_entropy(
        hidden.to(computed_in),
        weight.to(computed_in),
        target,
        None if bias is None else bias.to(computed_in),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=logits.outer if logits.capped else None,
    )
    return loss.to(logits.dtype)


def _computed_in(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes: autocast's, or that of its input."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _keeps_dimension(index: Any) -> bool:
    return index is Ellipsis or isinstance(index, slice)


def _computing(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.tensor(name.strip("_")), name)(*args)

    return method


# Operators that Python looks up on the class, beside the two above.
for _name in ("add", "radd", "sub", "rsub", "rtruediv", "matmul", "neg", "pow", "lt", "le", "gt", "ge", "len", "iter"):
    setattr(DeferredLogits, f"__{_name}__", _computing(f"__{_name}__"))
