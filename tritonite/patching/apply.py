"""`patch` and `unpatch`: the walk over a model's modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tritonite.patching import experts, losses, mlps, norms, rotary
from tritonite.patching.rebind import check_free, replace_forward, restore_forward
from tritonite.patching.report import KeepError, Kept, PatchReport, Replaced
from tritonite.patching.samples import check_parameters, sampling, text_inputs, text_model


def patch(
    model: torch.nn.Module,
    *,
    norm: bool = True,
    mlp: bool = True,
    rotary: bool = True,
    loss: bool = True,
    moe: bool = True,
    logits: bool = False,
    verify: bool = True,
    inputs: dict[str, Any] | None = None,
) -> PatchReport:
    """Give modules of a model fused operators, in place, where these compute what the modules compute.

    A module is recognised by its parameters, its attributes and its results on random inputs, not by its class. It
    keeps its class, parameters, hooks and state dict, and gets a forward function of its own. `unpatch` takes it away.
    No `enable()` is needed; with it, attention and products run as Tritonite's kernels, too.

    Args:
        model: any module; a model of transformers, a model with adapters of PEFT, or a part of one.
        norm: whether to replace root mean square norms and layer norms.
        mlp: whether to replace gated feed-forward layers.
        rotary: whether to replace the rotation of query and key in attention.
        loss: whether a model with labels computes its loss without logits while it is in training. The output's
            `logits` are None then. In evaluation, and without labels, the model's own forward runs.
        moe: whether to replace experts of a mixture.
        logits: whether the output has logits in training, too; they are then computed beside the loss.
        verify: whether to compare gradients of modules, too, before their forward is replaced. Results are compared in
            any case.
        inputs: arguments of the model for the run that `rotary` and `loss` need, with labels; None for a few random
            tokens.

    Returns a report of what was replaced, what was not, and why. Its `str` is a table.
    """
    report = PatchReport()
    patcher = _Patcher(report, verify, inputs)
    wanted = {"norm": norm, "mlp": mlp, "moe": moe}
    with sampling(model):
        for kind in _KINDS:
            if wanted[kind.option]:
                patcher.replace_all(model, kind)
    if rotary:
        patcher.replace_rotations(model)
    if loss:
        patcher.replace_loss(model, logits)
    return report


def unpatch(model: torch.nn.Module) -> int:
    """Give all modules of a model the forward functions of their classes back, and return how many had others."""
    return sum([restore_forward(module) for module in model.modules()])


class _Kind(NamedTuple):
    """A kind of module that is recognised by itself."""

    name: Callable[[Any], str]
    option: str
    looks: Callable[[torch.nn.Module], bool]
    recognise: Callable[[torch.nn.Module], Any]
    check: Callable[[torch.nn.Module, Any, bool], None]
    forward: Callable[[Any], Callable[..., Any]]


def _check_gated(module: torch.nn.Module, formula: mlps.GatedLayer, with_gradients: bool) -> None:
    """Check a gated layer, and if it draws random numbers, in training, too."""
    mlps.check_gated_mlp(module, formula, with_gradients)
    if mlps.has_randomness(module):
        with sampling(module, training=True):
            mlps.check_gated_mlp(module, formula, with_gradients)


def _recognise_gated(module: torch.nn.Module) -> mlps.GatedLayer:
    """Return the formula of a gated layer, with its dropout where the layer has one."""
    formula = mlps.recognise_gated_mlp(module)
    for candidate in mlps.with_dropout(module, formula):
        try:
            _check_gated(module, candidate, False)
        except KeepError:
            continue
        return candidate
    return formula


_KINDS = (
    _Kind(
        lambda formula: "norm" if formula is None else "layer norm" if formula.centered else "RMS norm",
        "norm",
        norms.looks_like_norm,
        norms.recognise_norm,
        norms.check_norm,
        norms.norm_forward,
    ),
    _Kind(
        lambda _: "gated MLP", "mlp", mlps.looks_like_gated_mlp, _recognise_gated, _check_gated, mlps.gated_mlp_forward
    ),
    _Kind(
        lambda _: "experts",
        "moe",
        experts.looks_like_experts,
        experts.recognise_experts,
        experts.check_experts,
        experts.experts_forward,
    ),
)


class _Patcher:
    """One call of `patch`: the report it fills, and formulas by what modules look like."""

    def __init__(self, report: PatchReport, verify: bool, inputs: dict[str, Any] | None) -> None:
        self.report, self.verify, self.inputs = report, verify, inputs
        self.formulas: dict[Hashable, Any] = {}

    @contextmanager
    def keeping(self, name: str, kind: str) -> Iterator[None]:
        """Note a module as kept if the block raises, whatever it raises: the module is someone else's code."""
        try:
            yield
        except KeepError as error:
            self.report.kept.append(Kept(name, kind, str(error)))
        except Exception as error:  # noqa: BLE001 - code of a model may raise anything
            reason = f"it raised {type(error).__name__} on sample inputs: {str(error).splitlines()[:1]}"
            self.report.kept.append(Kept(name, kind, reason))

    def replace_all(self, model: torch.nn.Module, kind: _Kind) -> None:
        """Replace all modules of a kind."""
        for name, module in list(model.named_modules()):
            if not kind.looks(module):
                continue
            with self.keeping(name, kind.name(None)):
                check_free(module)
                check_parameters(module)
                formula = self.formula(module, kind)
                replace_forward(module, kind.name(formula), kind.forward(formula))
                self.report.replaced.append(Replaced(name, kind.name(formula), formula.operator))

    def formula(self, module: torch.nn.Module, kind: _Kind) -> Any:
        """Return a module's formula, checked. That of a module with equal parts is tried first."""
        parts = tuple([(name, each.shape, each.dtype) for name, each in module.named_parameters()])
        key = type(module), kind.option, parts
        if key in self.formulas:
            try:
                kind.check(module, self.formulas[key], self.verify)
            except KeepError:
                del self.formulas[key]
            else:
                return self.formulas[key]
        formula = kind.recognise(module)
        kind.check(module, formula, self.verify)
        self.formulas[key] = formula
        return formula

    def replace_rotations(self, model: torch.nn.Module) -> None:
        """Replace the rotation in modules whose forward calls one, after a run of the model that notes its calls."""
        calls: dict[torch.nn.Module, list[Any]] = {}
        originals = {}
        named = [(name, module, rotary.rotation_name(module)) for name, module in model.named_modules()]
        found = [(name, module, rotation) for name, module, rotation in named if rotation is not None]
        for name, module, rotation in found:
            with self.keeping(name, "rotation"):
                check_free(module)
                check_parameters(module)
                originals[module] = original = rotary.original_rotation(module, rotation)
                recorded = rotary.recording(original, calls.setdefault(module, []))
                replace_forward(module, "recording", rotary.with_rotation(module, rotation, recorded))
        problem = ""
        if calls:
            try:
                self._run(model)
            except Exception as error:  # noqa: BLE001 - code of a model may raise anything
                problem = str(error) if isinstance(error, KeepError) else f"the model raised {error!r} on sample inputs"
            finally:
                for module in calls:
                    restore_forward(module)
        for name, module, rotation in found:
            if module not in calls:
                continue
            with self.keeping(name, "rotation"):
                if problem:
                    raise KeepError(problem)
                with sampling(module):
                    formula = rotary.recognise_rotation(originals[module], calls[module], self.verify)
                ours = rotary.rotating(originals[module], formula)
                replace_forward(module, "rotation", rotary.with_rotation(module, rotation, ours))
                self.report.replaced.append(Replaced(name, "rotation", formula.operator))

    def _run(self, model: torch.nn.Module) -> None:
        """Run a model on sample inputs."""
        outermost = text_model(model) if self.inputs is None else model
        if outermost is None:
            raise KeepError("the model does not say that its inputs are token numbers: give `inputs`")
        with sampling(model), torch.no_grad():
            inputs = text_inputs(outermost) if self.inputs is None else self.inputs
            outermost(**inputs)

    def replace_loss(self, model: torch.nn.Module, keep_logits: bool) -> None:
        """Replace the forward of the outermost language model."""
        for name, module in model.named_modules():
            if not losses.looks_like_language_model(module):
                continue
            with self.keeping(name, "loss"):
                check_free(module)
                head = losses.head_name(module)
                takes = inspect.signature(type(module).forward).parameters
                inputs = self.inputs and {key: value for key, value in self.inputs.items() if key in takes}
                losses.check_loss(module, head, inputs, self.verify)
                replace_forward(module, "loss", losses.loss_forward(module, head, keep_logits))
                self.report.replaced.append(Replaced(name, "loss", losses.OPERATOR))
            return
