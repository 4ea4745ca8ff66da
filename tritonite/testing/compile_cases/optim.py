"""Update rules of optimisers, over lists of parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tritonite.optim import Rule, rules
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, recorded_launches

# States and numbers that a rule need not take, but for two rules.
_OPTIONAL = ("max_exp_avg_sq", "momentum_buffer", "grad_avg", "weight_decay", "shrink")
_TAKING_ALL = (rules.muon_update, rules.lion)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@compile_cases("optim")
def update_rules(full: bool) -> Iterator[Case]:
    """Each rule with everything that it takes and all flags set, and without what it need not take."""
    every = [own for own in vars(rules).values() if isinstance(own, Rule)]
    for own, dtype, most in itertools.product(every, _DTYPES if full else _DTYPES[:1], (True, False)):
        arguments = {name: _argument(own, name, dtype, most) for name in own.names}
        pattern, values = zip(*arguments.values(), strict=True)
        with recorded_launches() as found:
            own.declaration(pattern).host(values, ())
        for specialization in found:
            label = f"{own.__name__} {dtype} {'with all' if most else 'with few'} arguments"
            yield Case(label, specialization, tuple(TARGETS) if full else ("sm_90", "gfx942"))


def _argument(own: Rule, name: str, dtype: torch.dtype, most: bool) -> tuple[str, Any]:
    """Return type and value of a rule's argument."""
    if name in own.flags:
        return "bool", most
    if not most and name in _OPTIONAL and name in (*own.state, *own.numbers) and own not in _TAKING_ALL:
        return "Tensor?", None
    if name in own.numbers:
        # A number for each tensor, and one for all.
        return ("Scalar[]", [0.5, 0.25]) if most else ("Scalar", 0.5)
    if name in own.elements:
        return "Tensor[]", [torch.empty(()) for _ in range(2)]
    return "Tensor[]", [torch.empty(5000, dtype=dtype) for _ in range(2)]
