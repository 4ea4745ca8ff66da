"""Every error a user of Tritonite can meet, one class each; the message template stands on the class."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest of the `known` names, to end a sentence with; "" where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class TritoniteError(Exception):
    """Base class. A subclass sets `template`; its fields are the keyword arguments of the constructor."""

    template = "{message}"

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        super().__init__(self.template.format(**fields))


class UnknownOperator(TritoniteError):
    template = (
        "no operator matches {name!r}{hint}. Give an operator name such as 'softmax', an overload such as "
        "'add.Tensor', or a glob such as 'bitwise_*'; tritonite.overloads() lists them all."
    )


class TritonImportedTooEarly(TritoniteError):
    template = (
        "no GPU driver was found, so Tritonite runs its kernels in Triton's interpreter, but triton was imported "
        "before tritonite without TRITON_INTERPRET=1. Import tritonite first, or set TRITON_INTERPRET=1 in the "
        "environment."
    )


class NoDevice(TritoniteError):
    template = (
        "Tritonite has no device to run on: no GPU driver was found and TRITON_INTERPRET=0 turns the interpreter "
        "off. Unset TRITON_INTERPRET to run in the interpreter."
    )


class InvalidDeclaration(TritoniteError):
    template = "operator {name!r} cannot be declared so: {reason}"


class InvalidArgument(TritoniteError, TypeError):
    """Raised by a call of an operator of `pointwise_dynamic` for an argument of another type than it declares."""

    template = "{name} takes {expected} for {parameter}, not {given}"


class InvalidSetting(TritoniteError):
    template = "environment variable {name}={value!r} is not valid: expected {expected}"


class InvalidResults(TritoniteError):
    """A file is not a benchmark's results."""

    template = "{path} does not hold benchmark results: {reason}"


class WrongAnswer(TritoniteError):
    """What was to be timed does not compute what ATen computes."""

    template = "{provider} gives another answer than ATen for {case}: {reason}"


class InvalidProvider(TritoniteError):
    template = "{text!r} is no provider to measure: {reason}"


class UnusableFile(TritoniteError):
    """A file or folder that is to be written cannot be."""

    template = "{path} cannot be written: {reason}"


class BuildFailed(TritoniteError):
    template = "the native dispatcher cannot be built: {reason}"


class Unsupported(TritoniteError):
    """Raised by a direct call of an operator that has no ATen kernel to fall back to."""

    template = "{name} cannot take these arguments: {reason}"


class NoGradient(TritoniteError):
    """Raised by a backward through an operator of `pointwise_dynamic` that has not been given a gradient."""

    template = (
        "{name} has no gradient. Give it one with @{function}.gradient over a formula of the results' gradients and "
        "the operator's parameters, or call it under torch.no_grad() or on tensor.detach()."
    )


class CapturedInPart(TritoniteError):
    """Raised while a CUDA graph is captured, by a call that writes into its arguments and can no longer decline."""

    template = (
        "the kernel {kernel} is not compiled, nothing is compiled while a CUDA graph is captured, and a part of the "
        "call has been captured already. Make the call once before the capture."
    )


# Why a call is declined that a kernel could serve.
ATEN_IS_FASTER = "ATen is faster here"


class Decline(Exception):
    """Raised by a host function, before it launches anything, when ATen must serve the call.

    `lasting` where every call of the same key would be declined too; not where a number's value or the moment decided.
    """

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting
