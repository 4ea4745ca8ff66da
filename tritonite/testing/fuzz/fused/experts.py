"""Draws of mixtures of experts: routers, permutations, grouped linear layers."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.testing.compositions import experts as compositions
from tritonite.testing.fuzz.fused.drawing import Drawer, FusedCall, draws

_OF_PRODUCTS = 8.0
_INDICES = ("experts", "offsets", "inverse")


def _logits(drawer: Drawer, leading: tuple[int, ...], n_experts: int, grad: float = 0.8) -> torch.Tensor:
    """Return logits of a row that differ by more than a rounding, so that the choice of experts is determined.

    ATen's scores of equal logits may differ: its vector and scalar loops round exponentials differently.
    """
    order = drawer.fractions((*leading, n_experts)).argsort(-1)
    return drawer.laid((order * (6 / max(1, n_experts)) - 3).to(drawer.dtype()), grad, distinct=-1)


def _routing(drawer: Drawer, n_experts: int) -> dict[str, Any]:
    """Draw options of `route`, k included."""
    given: dict[str, Any] = {"scoring": drawer.choice(("softmax", "sigmoid")), "renormalize": drawer.chance(0.6)}
    given["scale"] = drawer.choice((1.0, 2.5))
    most = n_experts
    if n_experts % 4 == 0 and drawer.chance(0.4):
        given |= {"num_groups": drawer.choice((1, 2, n_experts // 4)), "topk_groups": 1}
        most = n_experts // given["num_groups"]
    if drawer.chance(0.3):
        given["bias"] = drawer.laid(drawer.fractions((n_experts,)), 0.0)
    return given | {"k": drawer.randrange(1, min(most, 8) + 1)}


@draws("route", "topk_softmax")
def _route(drawer: Drawer, name: str) -> FusedCall:
    leading, n_experts = drawer.leading(), drawer.choice((1, 2, 3, 8, 16, 17, 32, 60, 64))
    given: dict[str, Any] = {"logits": _logits(drawer, leading, n_experts)}
    if name == "topk_softmax":
        given |= {"k": drawer.randrange(1, min(n_experts, 8) + 1), "renormalize": drawer.chance(0.5)}
    else:
        given |= _routing(drawer, n_experts)
    return FusedCall(name, given, compositions.route, slack=2.0)


@draws("load_balancing_loss", "router_z_loss")
def _balance(drawer: Drawer, name: str) -> FusedCall:
    leading, n_experts = drawer.leading(), drawer.choice((1, 2, 8, 17, 60, 64, 128))
    given: dict[str, Any] = {"logits": drawer.normal((*leading, n_experts), drawer.dtype(double=True), 0.85)}
    if name == "load_balancing_loss":
        chosen = drawer.integers(n_experts, (*leading, drawer.choice((1, 2, 4))))
        given["experts"] = drawer.laid(chosen.to(drawer.choice((torch.int32, torch.int64))))
    if drawer.chance(0.4):
        # Without a token that counts the loss is nan, and so is its gradient in torch's operators.
        mask = drawer.fractions(leading) < 0.7
        mask.view(-1)[:1] = True
        given["mask"] = drawer.laid(mask)
    return FusedCall(name, given, getattr(compositions, name), slack=4.0, indices=_INDICES)


def _experts(drawer: Drawer, tokens: int, n_experts: int) -> torch.Tensor:
    """Return (tokens, k) experts; some lie outside those that exist."""
    outside = drawer.choice((0, 0, 1))
    chosen = drawer.integers(n_experts + 2 * outside, (tokens, drawer.choice((1, 2, 2, 4)))) - outside
    return drawer.laid(chosen.to(drawer.choice((torch.int32, torch.int64))))


@draws("moe_align")
def _align(drawer: Drawer, name: str) -> FusedCall:
    n_experts = drawer.choice((1, 2, 5, 8, 33))
    chosen = _experts(drawer, drawer.choice((0, 1, 3, 17, 40)), n_experts)
    block = drawer.choice((1, 3, 4, 16))
    given = {"experts": chosen, "num_experts": n_experts, "block_size": block}
    return FusedCall(name, given, compositions.moe_align, indices=_INDICES)


@draws("permute")
def _permute(drawer: Drawer, name: str) -> FusedCall:
    n_experts, tokens = drawer.choice((1, 2, 5, 8, 33)), drawer.choice((0, 1, 3, 17, 40))
    x = drawer.normal((tokens, drawer.width(257)), drawer.dtype(double=True), 0.8)
    given = {"x": x, "experts": _experts(drawer, tokens, n_experts), "num_experts": n_experts}
    return FusedCall(name, given, compositions.permute, slack=2.0, indices=_INDICES)


@draws("unpermute")
def _unpermute(drawer: Drawer, name: str) -> FusedCall:
    tokens, k, width = drawer.choice((0, 1, 3, 17, 40)), drawer.choice((1, 2, 4)), drawer.width(257)
    dtype = drawer.dtype(double=True)
    order = drawer.fractions((tokens * k,)).argsort()
    inverse = torch.where(drawer.fractions((tokens * k,)) < 0.1, -1 - order, order).view(tokens, k)
    given: dict[str, Any] = {
        "y": drawer.normal((tokens * k, width), dtype, 0.8),
        "inverse": drawer.laid(inverse.to(torch.int32), overlap=False),
    }
    if drawer.chance(0.7):
        given["weights"] = drawer.laid(drawer.fractions((tokens, k)).to(drawer.parameter_dtype(dtype)), 0.8)
    return FusedCall(name, given, compositions.unpermute, slack=2.0, indices=_INDICES)


@draws("grouped_linear")
def _grouped(drawer: Drawer, name: str) -> FusedCall:
    rows, groups = drawer.choice((0, 1, 5, 17, 40)), drawer.choice((1, 2, 3, 5))
    columns, inner = (drawer.choice((1, 3, 8, 16, 17, 33, 64)) for _ in range(2))
    dtype = drawer.dtype()
    ends = drawer.integers(rows + 1, (groups,)).sort().values.to(torch.int32)
    given: dict[str, Any] = {
        "x": drawer.normal((rows, inner), dtype, 0.8),
        "weight": drawer.normal((groups, columns, inner), dtype, 0.8),
        "offsets": drawer.laid(ends),
    }
    if drawer.chance(0.4):
        given["bias"] = drawer.normal((groups, columns), drawer.parameter_dtype(dtype), 0.8)
    return FusedCall(name, given, compositions.grouped_linear, slack=_OF_PRODUCTS, indices=_INDICES)


@draws("moe", "moe_experts")
def _moe(drawer: Drawer, name: str) -> FusedCall:
    leading, n_experts = drawer.leading(), drawer.choice((1, 2, 4, 8))
    hidden, inner = drawer.choice((1, 8, 16, 17, 33)), drawer.choice((1, 8, 16, 17))
    dtype = drawer.dtype()
    weights: Any = [drawer.normal((n_experts, inner, hidden), dtype, 0.8) for _ in range(2)]
    if drawer.chance(0.5):
        weights = drawer.laid(torch.cat([each.detach().cpu() for each in weights], 1), 0.8)
    else:
        weights = tuple(weights)
    given: dict[str, Any] = {
        "x": drawer.normal((*leading, hidden), dtype, 0.8),
        "gate_up_weight": weights,
        "down_weight": drawer.normal((n_experts, hidden, inner), dtype, 0.8),
        "activation": drawer.choice(("silu", "gelu", "gelu_tanh")),
    }
    if name == "moe":
        given |= _routing(drawer, n_experts)
        # The weight of one expert is 1 if it is divided by itself, and its gradient is roundoff.
        constant = given["renormalize"] and given["k"] == 1
        given["router_logits"] = _logits(drawer, leading, n_experts, 0.0 if constant else 0.8)
    else:
        k = drawer.choice((1, 2))
        # A token may have an expert twice.
        given["experts"] = drawer.laid(drawer.integers(n_experts, (*leading, k)).to(torch.int32))
        given["weights"] = drawer.laid(drawer.fractions((*leading, k)).to(drawer.parameter_dtype(dtype)), 0.8)
    return FusedCall(name, given, getattr(compositions, name), slack=2 * _OF_PRODUCTS, indices=_INDICES)
