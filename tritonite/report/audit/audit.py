"""The audit of a process or a with block."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritonite import text_table
from tritonite.errors import Decline, InvalidAudit
from tritonite.install import sampling
from tritonite.registry import Op
from tritonite.report.audit import checks as checked
from tritonite.report.audit.call import Arguments, SampledCall, aside, can_copy, checking, size, tensors
from tritonite.report.audit.finding import Finding
from tritonite.runtime import contract
from tritonite.runtime.contract import is_capturing
from tritonite.runtime.locks import brief
from tritonite.runtime.opaque import opaque

_log = logging.getLogger("tritonite")
_running: list[audit] = []


class audit:  # noqa: N801 - called as a function is
    """Check samples of the calls that kernels serve: for the process until `stop()`, or within a with block.

        audit = tritonite.audit(rate=1e-4)      # from now on, in every thread
        ...
        print(audit)

        with tritonite.audit(rate=1) as audit:
            model(x)
        assert not audit.findings

    A sampled call runs as any other. Then the thread that made it checks its results, and waits for the device. Calls
    that are not sampled wait for nothing. Arguments are copied before calls that write into them.

    Three kinds of calls are not sampled: those that draw random numbers, those within CUDA graphs or graphs by
    torch.compile(backend="tritonite"), and those of `tritonite.ops` that bypass PyTorch's dispatcher.

    Args:
        rate: share of calls that are checked, 0 to 1.
        checks: one or several of

            - "drift": results are compared with ATen's and with float64, as in `tritonite verify`, more loosely
            - "nan": nan or inf in the results of finite arguments, with ATen's results beside them
            - "bits": the kernel runs again, and its bits are compared, which finds failing GPUs. Kernels that may add
              in no order are left out unless `torch.use_deterministic_algorithms(True)` is set.
        on_finding: a function that is called with each Finding, in the thread of the call. Its exceptions pass to the
            caller of the operator.
        seed: seed of the generator that chooses the calls.
        max_bytes: calls whose tensors take more bytes are not checked.

    Attributes:
        findings: a Finding for each check and overload that found something, in the order of the first calls.
        sampled: number of sampled calls; ATen may serve some of them.
        checked: number of sampled calls that a kernel served and the audit checked.
        skipped: number of sampled calls that were not checked, by reason.

    One audit runs at a time. Raises InvalidAudit for a second one, and for arguments that are not as above.
    """

    def __init__(
        self,
        rate: float = 1e-3,
        checks: Sequence[str] = tuple(checked.CHECKS),
        on_finding: Callable[[Finding], object] | None = None,
        *,
        seed: int = 0,
        max_bytes: int = 1 << 26,
    ) -> None:
        names = (checks,) if isinstance(checks, str) else tuple(checks)
        if not 0 <= rate <= 1:
            raise InvalidAudit(reason=f"rate is {rate!r}, not a share from 0 to 1")
        for name in names:
            if name not in checked.CHECKS:
                raise InvalidAudit(reason=f"no check {name!r}; checks are {', '.join(checked.CHECKS)}")
        self._rate, self._checks, self._on_finding, self._seed = rate, names, on_finding, seed
        self._max_bytes, self._numbers = max_bytes, itertools.count()
        self._found: dict[tuple[str, str], Finding] = {}
        self.sampled, self.checked, self.skipped = 0, 0, Counter[str]()
        self._start()

    def _start(self) -> None:
        with brief:
            if _running:
                raise InvalidAudit(reason="an audit is running; stop() it first")
            _running.append(self)
        if self._rate:
            sampling.start(self._begin, self._rate, self._seed)

    def stop(self) -> None:
        """End the audit. What it has found stays."""
        with brief:
            if self not in _running:
                return
            _running.remove(self)
        sampling.stop()

    def __enter__(self) -> audit:
        if self not in _running:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def findings(self) -> list[Finding]:
        with brief:
            return sorted(self._found.values(), key=lambda each: each.call)

    def since(self, before: Sequence[Finding]) -> list[Finding]:
        """Return what was found after `findings` had been `before`."""
        counts = {(each.check, each.overload): each.count for each in before}
        more = [(each, each.count - counts.get((each.check, each.overload), 0)) for each in self.findings]
        return [dataclasses.replace(each, count=count) for each, count in more if count]

    @opaque
    def _begin(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        """Return the function that checks a call's results, or None if the call is not checked."""
        if checking() or contract.recorder() is not None or contract.in_host_function() or is_capturing():
            return None
        given = args, kwargs
        with brief:
            number, self.sampled = next(self._numbers), self.sampled + 1
        reason = _why_unchecked(op, given)
        if not reason and size(given) > self._max_bytes:
            reason = f"more than {self._max_bytes} bytes"
        if not reason:
            try:
                with aside():
                    call = SampledCall(op, given)
                return functools.partial(self._check, call, number)
            except Exception as error:  # noqa: BLE001 - an audit never fails the call that it checks
                reason = _line(error)
        self._skip(reason)
        return None

    @opaque
    def _check(self, call: SampledCall, number: int, results: Any) -> None:
        """Check a call after it was made. Raises what `on_finding` raises."""
        try:
            with aside():
                call.finish(results)
                if size(results) > self._max_bytes:
                    raise Decline(f"more than {self._max_bytes} bytes")
                found = list(checked.found_in(call, self._checks))
        except Decline as decline:
            self._skip(decline.reason)
            return
        except Exception as error:  # noqa: BLE001 - an audit never fails the call that it checks
            self._skip(_line(error))
            return
        with brief:
            self.checked += 1
        for check, (detail, largest) in found:
            self._report(Finding(check, call.op.overload, detail, number, largest))

    def _report(self, finding: Finding) -> None:
        key = finding.check, finding.overload
        with brief:
            known = self._found.get(key)
            self._found[key] = finding if known is None else known.and_another(finding)
        if known is None:
            _log.warning("audit: %s of %s: %s", finding.check, finding.overload, finding.detail)
        if self._on_finding is not None:
            self._on_finding(finding)

    def _skip(self, reason: str) -> None:
        with brief:
            self.skipped[reason] += 1

    def __rich__(self) -> Any:
        return table_of(self.findings, self._summary())

    def __str__(self) -> str:
        return text_table.text_of(self)

    def _repr_html_(self) -> str:
        return text_table.html_of(self.__rich__())

    def _summary(self) -> str:
        with brief:
            skipped = dict(self.skipped)
        why = f", not checked: {'; '.join(f'{count} {reason}' for reason, count in skipped.items())}" if skipped else ""
        return f"{self.sampled} calls sampled, {self.checked} checked{why}"


def running() -> audit | None:
    """Return the audit that runs, if one does."""
    with brief:
        return _running[0] if _running else None


def table_of(findings: Sequence[Finding], title: str) -> Any:
    """Return a rich table of findings."""
    from rich.table import Column, Table
    from rich.text import Text

    calls, error = (Column(name, justify="right") for name in ("calls", "error, eps"))
    table = Table(
        "check", Column("operator", overflow="fold"), calls, error, "first", title=title, title_justify="left"
    )
    for each in findings:
        size = f"{each.error:.3g}" if each.error else ""
        table.add_row(each.check, each.overload, str(each.count), size, Text(f"call {each.call}: {each.detail}"))
    return table


def _why_unchecked(op: Op, given: Arguments) -> str:
    """Return why a call is not checked; "" if it is."""
    args, kwargs = given
    named = dict(zip(op.names, op.defaults, strict=True)) | dict(zip(op.names, args, strict=False)) | kwargs
    space, _, name = op.qualified.partition("::")
    packet, _, overload = name.partition(".")
    function = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    draws = torch.Tag.nondeterministic_seeded in function.tags and named.get("dropout_p") != 0.0
    if draws or named.get("generator") is not None:
        return "random numbers"
    if not can_copy(given):
        return "tensors of other kinds"
    return "" if tensors(given) else "no tensors"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
