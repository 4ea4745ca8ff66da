"""Check of the environment variables that change what Tritonite, Triton or CUDA do."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tritonite.errors import did_you_mean
from tritonite.report.doctor.finding import Finding
from tritonite.report.environment import ENVIRONMENT

_ON = ("1", "true", "yes", "on", "y")
# Switches that slow calls or compilation down: what they do.
_SLOW = {
    "TRITON_ALWAYS_COMPILE": "every process compiles every kernel anew",
    "TRITON_DEBUG": "kernels check bounds and overflow",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation waits for the device",
}


def environment() -> Iterator[Finding]:
    """Find variables that Tritonite does not read, and those that slow it down."""
    quiet = True
    for name, value in sorted(os.environ.items()):
        if name.startswith("TRITONITE_") and name not in ENVIRONMENT:
            quiet = False
            message = f"{name} is not read by Tritonite{did_you_mean(name, ENVIRONMENT)}"
            yield Finding("environment", "warning", message, "`tritonite info` lists the variables")
        elif name in _SLOW and value.lower() in _ON:
            quiet = False
            yield Finding(
                "environment", "warning", f"{name}={value}: {_SLOW[name]}", f"unset {name}, unless on purpose"
            )
        elif name.startswith("TRITONITE_") and value:
            quiet = False
            yield Finding("environment", "note", f"{name}={value}: {ENVIRONMENT[name]}")
    if quiet:
        yield Finding("environment", "ok", "no variable changes what Tritonite does")
