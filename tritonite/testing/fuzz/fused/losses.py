"""Draws of losses: cross entropy, divergences, and losses of linear heads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tritonite import fused
from tritonite.testing.compositions import divergences, losses, preference
from tritonite.testing.fuzz.fused.drawing import Drawer, FusedCall, draws

_REDUCTIONS = ("mean", "sum", "none")
# A product in 16-bit floats rounds its operands, and sums of the products cancel.
_OF_PRODUCTS = 8.0
# If both completions of a pair have the same targets, their gradients cancel, and the 16-bit rounding of terms of up to
# beta remains. The tolerance is then relative to this fraction of beta.
_OF_PAIRS = 0.02


def _options(drawer: Drawer, shape: tuple[int, ...], classes: int, dtype: torch.dtype, weight: str) -> dict[str, Any]:
    """Draw options of a cross entropy; `weight` is the name of the class weights."""
    given: dict[str, Any] = {"reduction": drawer.choice(_REDUCTIONS), "return_z_loss": drawer.chance(0.3)}
    given["label_smoothing"] = drawer.choice((0.0, 0.0, 0.1, 1.0))
    given["softcap"] = drawer.choice((None, None, 3.0, 30.0))
    given["z_loss"] = drawer.choice((0.0, 0.0, 1e-2))
    for name, size, chance in ((weight, (classes,), 0.3), ("token_scale", shape, 0.25)):
        if drawer.chance(chance):
            given[name] = drawer.laid((0.1 + drawer.fractions(size)).to(drawer.parameter_dtype(dtype)))
    return given


def _loss(function: Any, return_z_loss: bool, *operands: Any, **given: Any) -> Any:
    """Return the loss, and the z-loss where it is asked for."""
    loss, z = function(*operands, **given)
    return (loss, z.detach()) if return_z_loss else loss


@draws("cross_entropy")
def _cross_entropy(drawer: Drawer, name: str) -> FusedCall:
    leading, classes = drawer.leading(), max(1, drawer.width())
    dtype = drawer.dtype(double=True)
    given = {"input": drawer.normal((*leading, classes), dtype, 0.85), "target": drawer.classes(classes, leading)}
    given |= _options(drawer, leading, classes, dtype, "weight")
    inplace = drawer.chance(0.15)
    return FusedCall(
        name, given, _cross_entropy_reference, function=_cross_entropy_in_place if inplace else None, slack=1.0
    )


def _cross_entropy_in_place(input: torch.Tensor, **given: Any) -> Any:
    """Call cross_entropy with a copy of the logits, over which it writes the gradient."""
    return fused.cross_entropy(input.clone(memory_format=torch.contiguous_format), inplace=True, **given)


def _cross_entropy_reference(input: torch.Tensor, return_z_loss: bool = False, **given: Any) -> Any:
    return _loss(losses.cross_entropy, return_z_loss, input, **given)


def _linear_cross_entropy_reference(return_z_loss: bool, accumulate_dtype: Any, chunk_tokens: Any, **given: Any) -> Any:
    return _loss(losses.linear_cross_entropy, return_z_loss, **given)


def _small_weight(drawer: Drawer, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Draw the weight of a head whose logits differ little, however many terms they are sums of."""
    size = min(1.0, 2 * max(1, shape[-1]) ** -0.5)
    return drawer.laid(((drawer.fractions(shape) - 0.5) * size).to(dtype), 0.8, distinct=0)


def _head(drawer: Drawer, leading: tuple[int, ...], classes: int, dtype: torch.dtype) -> list[Any]:
    """Draw hidden states, the head's weight and its bias or None.

    The gradient by hidden states is a product of the logits' gradient, whose elements add up to 0, and the weight. With
    equal rows for all classes it would be roundoff alone.
    """
    size = drawer.choice((1, 2, 3, 8, 16, 17, 33))
    bias = drawer.normal((classes,), drawer.parameter_dtype(dtype), 0.8) if drawer.chance(0.5) else None
    return [drawer.normal((*leading, size), dtype, 0.8), drawer.normal((classes, size), dtype, 0.8, distinct=0), bias]


@draws("linear_cross_entropy")
def _linear_cross_entropy(drawer: Drawer, name: str) -> FusedCall:
    leading, classes = drawer.leading(), max(1, drawer.width(129))
    dtype = drawer.dtype(double=True)
    input, weight, bias = _head(drawer, leading, classes, dtype)
    given = {"input": input, "weight": weight, "target": drawer.classes(classes, leading), "bias": bias}
    given |= _options(drawer, leading, classes, dtype, "class_weight")
    given |= {"chunk_tokens": drawer.choice((None, 1, 3, 16)), "accumulate_dtype": torch.float32}
    if dtype is torch.float64 or drawer.chance(0.2):
        given["accumulate_dtype"] = None
    return FusedCall(name, given, _linear_cross_entropy_reference, slack=_OF_PRODUCTS)


@draws("jsd", "kl_divergence", "tv_distance")
def _divergence(drawer: Drawer, name: str) -> FusedCall:
    leading, classes = drawer.leading(), max(1, drawer.width())
    shape = (*leading, classes)
    given: dict[str, Any] = {"student_logits": drawer.normal(shape, drawer.dtype(double=True), 0.85)}
    given["teacher_logits"] = drawer.normal(shape, drawer.dtype(double=True))
    given |= {"temperature": drawer.choice((1.0, 0.5, 2.0)), "reduction": drawer.choice(_REDUCTIONS)}
    if drawer.chance(0.4):
        given["labels"] = drawer.classes(classes, leading)
    if name == "jsd":
        given["beta"] = drawer.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    elif name == "kl_divergence":
        given["reverse"] = drawer.chance(0.5)
    return FusedCall(name, given, functools.partial(_divergence_reference, name), slack=1.0)


def _divergence_reference(
    name: str,
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    temperature: float,
    reduction: str,
    labels: torch.Tensor | None = None,
    beta: float = 0.0,
    reverse: bool = False,
) -> torch.Tensor:
    beta = 1.0 if reverse else beta
    kind = "tv" if name == "tv_distance" else "kl" if beta in (0, 1) else "jsd"
    rows = divergences.of_rows(student_logits, teacher_logits, beta, temperature, kind)
    counts = torch.ones_like(rows, dtype=torch.bool) if labels is None else labels != divergences.IGNORED
    rows = torch.where(counts, rows, 0.0)
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / counts.sum().clamp(min=1)


@draws("kl_div")
def _kl_div(drawer: Drawer, name: str) -> FusedCall:
    leading, classes = drawer.leading(1), max(1, drawer.width())
    shape, is_log = (*leading, classes), drawer.chance(0.5)
    logs = drawer.fractions(shape).mul(3).log_softmax(-1)
    shares = drawer.fractions(shape).mul(3).softmax(-1)
    shares = torch.where(drawer.fractions(shape) < 0.1, 0.0, shares)
    # Log-probabilities of 0 would be infinite.
    target = shares.clamp(min=1e-4).log() if is_log else shares
    given = {
        "input": drawer.laid(logs.to(drawer.dtype(double=True)), 0.85),
        "target": drawer.laid(target.to(drawer.dtype(double=True))),
        "log_target": is_log,
        "reduction": drawer.choice((*_REDUCTIONS, "batchmean")),
    }
    return FusedCall(name, given, _kl_div_reference, slack=1.0)


def _kl_div_reference(input: torch.Tensor, target: torch.Tensor, log_target: bool, reduction: str) -> torch.Tensor:
    rows = torch.nn.functional.kl_div(input, target, reduction="none", log_target=log_target).sum(-1)
    if reduction == "none":
        return rows
    return rows.sum() / {"sum": 1, "mean": input.numel(), "batchmean": len(input)}[reduction]


@draws("linear_jsd")
def _linear_jsd(drawer: Drawer, name: str) -> FusedCall:
    leading, classes = drawer.leading(), max(1, drawer.width(129))
    dtype = drawer.dtype(double=True)
    student, teacher = (_head(drawer, leading, classes, dtype) for _ in range(2))
    teacher = [None if each is None else each.detach() for each in teacher]
    given: dict[str, Any] = {"student": student[0], "student_weight": student[1], "student_bias": student[2]}
    given |= {"teacher": teacher[0], "teacher_weight": teacher[1], "teacher_bias": teacher[2]}
    given["loss_weights"] = drawer.choice(((0.0, 1.0), (0.5, 0.5), (1.0, 0.0), (0.0, 0.3)))
    given["labels"] = drawer.classes(classes, leading) if given["loss_weights"][0] or drawer.chance(0.4) else None
    given |= {"beta": drawer.choice((0.0, 0.1, 0.5, 1.0)), "temperature": drawer.choice((1.0, 2.0))}
    given["reduction"] = drawer.choice(_REDUCTIONS)
    return FusedCall(name, given, _linear_jsd_reference, slack=_OF_PRODUCTS)


def _linear_jsd_reference(
    student: Any,
    student_weight: Any,
    student_bias: Any,
    teacher: Any,
    teacher_weight: Any,
    teacher_bias: Any,
    **given: Any,
) -> Any:
    operands = student, student_weight, student_bias, teacher, teacher_weight, teacher_bias
    if given["labels"] is not None and given["labels"].numel() == 0:
        given = given | {"labels": None, "loss_weights": (0.0, given["loss_weights"][1])}
    return divergences.distilled(*operands, **given)


@draws("linear_dpo", "linear_orpo", "linear_cpo", "linear_simpo", "linear_kto", "linear_grpo")
def _preference(drawer: Drawer, name: str) -> FusedCall:
    pairs, tokens = drawer.choice((0, 1, 1, 2, 3)), drawer.choice((0, 1, 2, 4, 7))
    leading = (pairs if name in ("linear_kto", "linear_grpo") else 2 * pairs, tokens)
    classes, dtype = drawer.choice((1, 2, 11, 33, 65)), drawer.dtype(double=True)
    if name == "linear_orpo":
        classes = max(11, classes)
        leading = leading[0], max(1, tokens)
    input, weight, bias = _head(drawer, leading, classes, dtype)
    target = drawer.classes(classes, leading)
    if name in ("linear_orpo", "linear_grpo"):
        # A completion without targets has the probability 1, whose odds are infinite.
        target = drawer.laid(drawer.integers(max(2, classes), leading).clamp(max=classes - 1))
    if name == "linear_orpo" or dtype.itemsize == 2:
        # Odds of completions that are almost certain are roundoff, and so are differences of large 16-bit logits.
        weight = _small_weight(drawer, weight.shape, dtype)
    given: dict[str, Any] = {"input": input, "weight": weight, "target": target, "bias": bias}
    given |= _PREFERENCE[name](drawer, leading, classes, dtype)
    if name == "linear_grpo" and given["beta"]:
        # The divergence is exponential: for a large difference of logits its gradient is infinite, or roundoff.
        given["weight"] = _small_weight(drawer, weight.shape, dtype)
        if isinstance(given["reference"], fused.LinearHead):
            own = given["reference"]
            given["reference"] = own._replace(weight=_small_weight(drawer, own.weight.shape, dtype).detach())
    reference = functools.partial(_preference_reference, name.removeprefix("linear_"))
    # The metrics are detached values of the loss's own terms.
    function = functools.partial(_without_metrics, name)
    size = max(1e-3, _OF_PAIRS * given["beta"]) if dtype.itemsize == 2 else 1e-3
    return FusedCall(name, given, reference, slack=2 * _OF_PRODUCTS, size=size, function=function)


def _without_metrics(name: str, **given: Any) -> torch.Tensor:
    loss: torch.Tensor = getattr(fused, name)(**given)[0]
    return loss


def _reference_model(
    drawer: Drawer, leading: tuple[int, ...], shape: tuple[int, ...], classes: int, dtype: torch.dtype
) -> Any:
    """Draw the head of a reference model, or its log-probabilities."""
    if drawer.chance(0.5):
        return drawer.laid(-3 * drawer.fractions(shape))
    return fused.LinearHead(*[None if x is None else x.detach() for x in _head(drawer, leading, classes, dtype)])


def _dpo(drawer: Drawer, leading: tuple[int, ...], classes: int, dtype: torch.dtype) -> dict[str, Any]:
    kind = drawer.choice(("sigmoid", "sigmoid", "ipo", "hinge"))
    return {
        "reference": _reference_model(drawer, leading, leading[:1], classes, dtype),
        "beta": drawer.choice((0.1, 0.5)),
        "label_smoothing": drawer.choice((0.0, 0.2)) if kind == "sigmoid" else 0.0,
        "loss_type": kind,
        "average": drawer.chance(0.5),
    }


def _kto(drawer: Drawer, leading: tuple[int, ...], classes: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "desirable": drawer.laid(drawer.fractions(leading[:1]) < 0.5),
        "reference": _reference_model(drawer, leading, leading[:1], classes, dtype),
        "kl": drawer.choice((0.0, -1.0, 0.7, torch.tensor(0.5, device=drawer.device))),
        "beta": drawer.choice((0.1, 0.4)),
        "loss_weights": drawer.choice(((1.0, 1.0), (1.0, 1.5))),
    }


def _grpo(drawer: Drawer, leading: tuple[int, ...], classes: int, dtype: torch.dtype) -> dict[str, Any]:
    # The divergence is exponential: its gradient exceeds the range of float16.
    beta = 0.0 if dtype is torch.float16 else drawer.choice((0.0, 0.3))
    refers = beta or drawer.chance(0.2)
    return {
        "advantages": drawer.normal(leading if drawer.chance(0.4) else leading[:1], torch.float32),
        "mask": drawer.laid(drawer.fractions(leading) < 0.7) if drawer.chance(0.6) else None,
        "old_log_probabilities": drawer.laid(-3 * drawer.fractions(leading)) if drawer.chance(0.5) else None,
        "reference": _reference_model(drawer, leading, leading, classes, dtype) if refers else None,
        "beta": beta,
        "epsilon": drawer.choice(((0.2, 0.2), (0.1, 0.3))),
        "temperature": drawer.choice((1.0, 1.7)),
        "loss_type": drawer.choice(("grpo", "bnpo", "dr_grpo", "dapo")),
    }


def _orpo(drawer: Drawer, *_: Any) -> dict[str, Any]:
    return {"beta": drawer.choice((0.1, 0.7))}


def _cpo(drawer: Drawer, *_: Any) -> dict[str, Any]:
    smoothing = drawer.choice((0.0, 0.1))
    return {"beta": drawer.choice((0.1, 0.5)), "alpha": drawer.choice((0.0, 1.0)), "label_smoothing": smoothing}


def _simpo(drawer: Drawer, *_: Any) -> dict[str, Any]:
    smoothing = drawer.choice((0.0, 0.1))
    return {"beta": drawer.choice((0.5, 2.0)), "gamma": drawer.choice((0.0, 1.0)), "label_smoothing": smoothing}


_PREFERENCE: dict[str, Any] = {
    "linear_dpo": _dpo,
    "linear_orpo": _orpo,
    "linear_cpo": _cpo,
    "linear_simpo": _simpo,
    "linear_kto": _kto,
    "linear_grpo": _grpo,
}


def _preference_reference(name: str, input: Any, weight: Any, target: Any, bias: Any = None, **given: Any) -> Any:
    if name == "grpo":
        given["old"] = given.pop("old_log_probabilities")
    return getattr(preference, name)((input, weight, bias), target, **given)
