"""Elementary functions."""

from __future__ import annotations

from typing import Any

from tritonite import devices
from tritonite.testing.samples import facts

facts.NAN_UNDEFINED.add("logit_backward")


@facts.drawn("logit")
def _bounds_in_order(arguments: dict[str, Any]) -> dict[str, Any]:
    """Keep the bounds in order: where they cross, ATen's vector and scalar loops on a CPU choose different ones."""
    eps = arguments["eps"]
    crossing = devices.current.aten == "cpu" and isinstance(eps, (int, float)) and eps > 0.5
    return arguments | {"eps": 0.5} if crossing else arguments


@facts.drawn("logit_backward")
def _not_at_the_ends(arguments: dict[str, Any]) -> dict[str, Any]:
    """Avoid 0 and 1, where the gradient is infinite and ATen's loops differ in its sign."""
    x = arguments["self"]
    return arguments | {"self": x.masked_fill((x == 0) | (x == 1), 0.5)} if facts.real(x) else arguments
