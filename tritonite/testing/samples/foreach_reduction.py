"""Reductions of lists of tensors: the layouts' tensors as one list, and orders of norms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tritonite.registry import Op
from tritonite.testing.samples import facts

# Orders of norms, by the dimensions of a layout's first tensor.
_ORDERS = (3, 1.0, 2, math.inf, 0)


@facts.arguments("_foreach_norm", "_foreach_powsum", "_foreach_max")
def _as_list(tensors: facts.Tensors) -> dict[str, Any]:
    """Return all tensors of a layout, and a part of the first that starts at an odd address."""
    more = [tensors[0].flatten()[1:]] if tensors[0].numel() > 1 else []
    return {"self": [*tensors, *more], "ord": _ORDERS[tensors[0].dim()]}


@facts.layouts("_foreach_norm", "_foreach_powsum", "_foreach_max")
def _sizes(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield lists of unequal tensors, with several blocks and of other dtypes."""
    yield "unequal", [make(3), make(70, 65), make(), make(1), make(2, 33)]
    yield "mixed dtypes", [make(30), make(50).double(), make(7).half(), make(40).float()]
