"""Random inputs of modules and models, and the comparison of what two functions make of them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tritonite import devices
from tritonite.patching.report import KeepError

# The resolution of a dtype, relative to the largest element of a result.
RESOLUTION = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5, torch.float64: 1e-10}
# Tokens of a sample of text, at most.
_TOKENS = 8
_SEED = 17


def check_parameters(module: torch.nn.Module) -> None:
    """Raise KeepError unless all parameters are plain tensors in the memory of Tritonite's device."""
    for name, parameter in module.named_parameters():
        if parameter.device.type == "meta":
            raise KeepError(f"{name} is on the meta device: load the model first")
        if parameter.device.type != devices.current.type:
            raise KeepError(f"{name} is on {parameter.device}: kernels run on {devices.current.type}")
        if type(parameter) is not torch.nn.Parameter:
            raise KeepError(
                f"{name} is a {type(parameter).__name__}: patch the model before its parameters are sharded"
            )


def dtype_and_device(module: torch.nn.Module) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and the device of a module's first parameter; the default dtype if it has none."""
    for parameter in module.parameters():
        return parameter.dtype, parameter.device
    return torch.get_default_dtype(), torch.device(devices.current.type)


def required_arguments(function: Callable[..., Any]) -> int:
    """Return the number of positional arguments without a default, which a bound method counts without `self`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(each.kind in kinds and each.default is inspect.Parameter.empty for each in parameters)


def normal(shape: Sequence[int], like: tuple[torch.dtype, torch.device], scale: float = 1.0) -> torch.Tensor:
    """Return normal random numbers times a scale, which records gradients."""
    dtype, device = like
    return (torch.randn(tuple(shape)) * scale).to(dtype).to(device).requires_grad_()


@contextlib.contextmanager
def sampling(module: torch.nn.Module, training: bool = False) -> Iterator[None]:
    """Set a module to training or evaluation, without autocast, and leave modes and random states as they were."""
    modes = [(each, each.training) for each in module.modules()]
    devices_of = {each.device for each in module.parameters() if each.device.type not in ("cpu", "meta")}
    numbers = [each.index or 0 for each in devices_of]
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(numbers, device_type=devices.current.accelerator))
            stack.enter_context(torch.autocast(devices.current.type, enabled=False))
            stack.enter_context(torch.enable_grad())
            torch.manual_seed(_SEED)
            module.train(training)
            yield
    finally:
        for each, mode in modes:
            each.training = mode


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference over the largest element, infinite for another shape, dtype or for nan."""
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return float("inf")
    if not wanted.numel():
        return 0.0
    wide = torch.float64 if wanted.dtype is torch.float64 else torch.float32
    found, wanted = found.detach().to(wide), wanted.detach().to(wide)
    difference = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(torch.finfo(wide).tiny))
    return difference if difference == difference else float("inf")


def gradients(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of a result's product with fixed random numbers, by the operands that record gradients."""
    wanted = [each for each in operands if each.requires_grad]
    generator = torch.Generator().manual_seed(_SEED)
    factors = torch.randn(result.shape, generator=generator).to(result.dtype).to(result.device)
    found = torch.autograd.grad(result, wanted, factors, allow_unused=True)
    return [torch.zeros_like(each) if grad is None else grad for each, grad in zip(wanted, found, strict=True)]


def check_alike(
    ours: Callable[[], torch.Tensor],
    theirs: Callable[[], torch.Tensor],
    operands: Sequence[torch.Tensor],
    with_gradients: bool,
    slack: float = 1.0,
) -> None:
    """Raise KeepError unless two functions have one result, and one gradient by each operand.

    Both start with the same random state, so that a dropout draws the same numbers in both.
    """
    results = []
    for function in (ours, theirs):
        torch.manual_seed(_SEED)
        results.append(function())
    resolution = slack * max(RESOLUTION[each.dtype] for each in (*operands, results[1]))
    if (apart := distance(*results)) > resolution:
        raise KeepError(f"the operator's result differs by {apart:.1e} on random inputs")
    if with_gradients and results[1].requires_grad:
        for found, wanted in zip(*(gradients(each, operands) for each in results), strict=True):
            if (apart := distance(found, wanted)) > resolution:
                raise KeepError(f"the operator's gradient differs by {apart:.1e} on random inputs")


def text_model(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the outermost module that says that its main input is token numbers; None if there is none."""
    for module in model.modules():
        if getattr(type(module), "main_input_name", None) == "input_ids" and hasattr(module, "config"):
            return module
    return None


def text_inputs(model: torch.nn.Module) -> dict[str, Any]:
    """Return random token numbers of a model of text, and labels if it takes labels of tokens.

    The first label is one that losses ignore.
    """
    config: Any = model.config
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if not vocabulary:
        raise KeepError("its configuration names no vocabulary to draw sample tokens from: give `inputs`")
    device = model.get_input_embeddings().weight.device  # type: ignore[operator, union-attr]
    tokens = torch.randint(vocabulary, (1, _TOKENS)).to(device)
    labels = tokens.clone()
    labels[:, 2] = -100
    takes = inspect.signature(type(model).forward).parameters
    given: dict[str, Any] = {"input_ids": tokens}
    if "decoder_input_ids" in takes:
        given["decoder_input_ids"] = tokens
    return given | ({"labels": labels} if "labels" in takes else {})
