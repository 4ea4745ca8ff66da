"""Every error a user of Tritonite can meet, one class each; the message template stands on the class."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the `known` name nearest to `name`; "" if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class TritoniteError(Exception):
    """Base class. A subclass sets `template`; its fields are the keyword arguments of the constructor."""

    template = "{message}"

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        super().__init__(self.template.format(**fields))


class UnknownOperator(TritoniteError):
    """Raised for a name or glob that matches no operator."""

    template = (
        "no operator matches {name!r}{hint}. Give an operator name such as 'softmax', an overload such as "
        "'add.Tensor', or a glob such as 'bitwise_*'; tritonite.overloads() lists them all."
    )


class TritonImportedTooEarly(TritoniteError):
    """Raised at import if Triton was imported first and cannot be switched to its interpreter."""

    template = (
        "no GPU driver was found, so Tritonite runs its kernels in Triton's interpreter, but triton was imported "
        "before tritonite without TRITON_INTERPRET=1. Import tritonite first, or set TRITON_INTERPRET=1 in the "
        "environment."
    )


class NoDevice(TritoniteError):
    """Raised when kernels have to run without a GPU and without the interpreter."""

    template = (
        "Tritonite has no device to run on: no GPU driver was found and TRITON_INTERPRET=0 turns the interpreter "
        "off. Unset TRITON_INTERPRET to run in the interpreter."
    )


class NothingToMeasure(TritoniteError):
    """Raised by `tritonite tune` where no kernel runs compiled."""

    template = "tritonite tune times compiled kernels on a GPU, and {reason}"


class InvalidDeclaration(TritoniteError):
    """Raised when an operator is declared in a way that contradicts its function or its schema."""

    template = "operator {name!r} cannot be declared: {reason}"


class InvalidArgument(TritoniteError, TypeError):
    """Raised by an operator of `pointwise_dynamic` for an argument of another type than declared."""

    template = "{name} takes {expected} for {parameter}, not {given}"


class InvalidOptions(TritoniteError, ValueError):
    """Raised for a mode or an option of torch.compile that the backend does not have."""

    template = 'torch.compile(backend="tritonite"): {reason}'


class RecordedWithoutGradient(TritoniteError):
    """Raised by a function of `tritonite.record` whose results would need a gradient."""

    template = (
        "the results of {name} would need a gradient, and a recorded function has none. Call it under "
        'torch.no_grad(), or use torch.compile(backend="tritonite").'
    )


class InvalidDevice(TritoniteError):
    """Raised for a device record of a plug-in that cannot be served; at import, a warning takes the error's place."""

    template = "{what} is {given}: expected {expected}"


class InvalidSetting(TritoniteError):
    """Raised for an environment variable with an invalid value."""

    template = "environment variable {name}={value!r} is not valid: expected {expected}"


class InvalidResults(TritoniteError):
    """Raised for a file without benchmark results."""

    template = "{path} does not hold benchmark results: {reason}"


class WrongAnswer(TritoniteError):
    """Raised when a provider to be timed does not compute what ATen computes."""

    template = "{provider} gives another answer than ATen for {case}: {reason}"


class InvalidProvider(TritoniteError):
    """Raised by `tritonite bench` for a --provider that does not exist."""

    template = "{text!r} is not a provider to measure: {reason}"


class UnusableFile(TritoniteError):
    """Raised when a file or folder cannot be written."""

    template = "{path} cannot be written: {reason}"


class InvalidArtifact(TritoniteError):
    """Raised for a file of compiled kernels that is damaged, or that is no such file."""

    template = "{path} cannot be loaded: {reason}"


class MismatchedArtifact(TritoniteError):
    """Raised for a file of compiled kernels from another device, or other versions."""

    template = (
        "{path} has kernels for another {what}: {theirs}, where this process has {ours}. Write the file again here, "
        "with tritonite.warm and tritonite.save_kernels."
    )


class InvalidTables(TritoniteError):
    """Raised for a file of fitted tables that is damaged, or that is no such file."""

    template = "{path} holds no tables: {reason}"


class MismatchedTables(TritoniteError):
    """Raised for a file of fitted tables of another device."""

    template = "{path} has tables of {theirs}, where this machine has {ours}. Run `tritonite tune` here."


class UnsavableGraph(TritoniteError):
    """Raised by `tritonite.save` for something that a file of graphs cannot hold."""

    template = "{name} cannot be saved: {reason}"


class MismatchedGraph(TritoniteError):
    """Raised by `tritonite.load` for graphs of another device, of other versions, or of another module."""

    template = "{path} cannot be loaded here: {reason}"


class NoSavedPlan(TritoniteError):
    """Raised by a loaded function for a call that its file has no plan for."""

    template = "{name} has no plan for this call: {reason}. A loaded function records and compiles nothing."


class BuildFailed(TritoniteError):
    """Raised when the native dispatcher's compilation fails."""

    template = "the native dispatcher cannot be built: {reason}"


class Unsupported(TritoniteError):
    """Raised by a call of an operator outside ATen for arguments that its kernel does not serve."""

    template = "{name} cannot take these arguments: {reason}"


class UnsupportedOptimizer(TritoniteError):
    """Raised by `tritonite.optim.fuse` for an optimizer whose step it cannot compute."""

    template = "{name} cannot be fused: {reason}. Served are {served} of torch.optim, without differentiable=True."


class NoGradient(TritoniteError):
    """Raised by a backward pass through an operator of `pointwise_dynamic` without a gradient."""

    template = (
        "{name} has no gradient. Give it one with @{function}.gradient over a formula of the results' gradients and "
        "the operator's parameters, or call it under torch.no_grad() or on tensor.detach()."
    )


class CapturedInPart(TritoniteError):
    """Raised during CUDA graph capture by a call that has launched a part and needs a kernel compiled."""

    template = (
        "the kernel {kernel} is not compiled, and nothing is compiled while a CUDA graph is captured. The call cannot "
        "fall back to ATen, because a part of it is captured already. Make the call once before the capture."
    )


class InvalidAction(TritoniteError, ValueError):
    """Raised by `tritonite.on_compile` for an action that it does not have."""

    template = "on_compile takes 'raise', 'warn', a function or None, not {action!r}"


class InvalidAudit(TritoniteError, ValueError):
    """Raised by `tritonite.audit` for arguments that it does not take, and while another audit runs."""

    template = "tritonite.audit: {reason}"


class InvalidShapes(TritoniteError, ValueError):
    """Raised by `tritonite.warm` for variants of a call that cannot be made."""

    template = (
        "shapes is a list of argument tuples, or sizes by (argument, dimension), such as "
        "{{(0, 1): [128, 512]}}: {reason}"
    )


class KernelNotCompiled(TritoniteError):
    """Raised before a kernel is compiled, under `tritonite.on_compile("raise")`."""

    template = (
        "the kernel {kernel}({signature}){served} is not compiled, and on_compile('raise') forbids compiling. Compile "
        "it beforehand with tritonite.warm, or load it with tritonite.load_kernels."
    )


# The reason of declines for speed.
ATEN_IS_FASTER = "ATen is faster here"
# The reason of declines of float64 by a device whose record has fp64=False.
NO_FP64 = "float64, in which this kind of device does not compute"


class Decline(Exception):
    """Raised by a host function, before its first launch, to leave a call to ATen.

    Args:
        reason: what was given and what is served, as `stats`, `explain` and `report` show it.
        lasting: every call with the same key declines too. False if a number's value or a passing state decided.
    """

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting
