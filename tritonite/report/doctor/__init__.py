"""`diagnose`: check what Tritonite stands on, and say what to do about each problem.

- finding: a finding, and its levels
- machine: the device, its driver, versions, compilers
- files: cache folders, fitted tables and the native dispatcher
- clashes: kernels of other libraries for the same operators
- variables: environment variables
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tritonite.report.doctor import clashes, files, machine, variables
from tritonite.report.doctor.finding import LEVELS, Finding

Check = Callable[[], Iterable[Finding]]

CHECKS: dict[str, Check] = {
    "device": machine.device,
    "driver": machine.driver,
    "versions": machine.versions,
    "compilers": machine.compilers,
    "caches": files.caches,
    "tables": files.tables,
    "dispatcher": files.dispatcher,
    "clashes": clashes.clashes,
    "environment": variables.environment,
}


def diagnose() -> Iterator[Finding]:
    """Run every check, and yield its findings. A check that raises an error is an error itself."""
    for name, check in CHECKS.items():
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - a broken machine may raise anything, and the other checks go on
            message = f"the check failed: {type(error).__name__}: {error}"
            yield Finding(name, "error", message, "fix this error, which Tritonite will meet as well")


__all__ = ["CHECKS", "LEVELS", "Finding", "diagnose"]
