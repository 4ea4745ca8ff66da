"""Check for kernels that other libraries have registered for the operators that Tritonite overrides."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from tritonite import devices, registry
from tritonite.install import override
from tritonite.report.doctor.finding import Finding

# A line of the dispatcher's table: "CUDA (inactive): registered at FILE:LINE :: ...".
_LINE = re.compile(r"^(\w+)(?:\[alias\])?( \(inactive\))?: registered at (.+?)(?::\d+)? ::")
# ATen's own kernels, by the folders of its build.
_ATEN = re.compile(r"(^|/)(aten/src/|build/aten/|torch/csrc/|torch/include/)|^tritonite$")
_TORCH, _NATIVE = str(Path(torch.__file__).parent), "torch._native"
# Overloads that a finding names.
_NAMED = 3


def clashes() -> Iterator[Finding]:
    """Find the libraries whose kernels Tritonite displaces, or that displace Tritonite's."""
    found = registrations()
    for owner, names in sorted(found.items()):
        ours = names & override.registered()
        listed = ", ".join(sorted(names)[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        message = f"{owner} has kernels for {len(names)} overloads that Tritonite has, too ({listed})"
        if owner == _NATIVE:
            advice = "nothing, if Tritonite's are wanted, which replace them; else name these overloads in exclude="
            yield Finding("clashes", "note", message, advice)
            continue
        advice = (
            f"call tritonite.enable() after {owner}, with exclude= for the overloads that {owner} should serve; "
            "the library that registers last serves a call"
        )
        hidden = f"; {len(ours)} are Tritonite's now" if ours else ""
        yield Finding("clashes", "warning", message + hidden, advice)
    if not found:
        yield Finding("clashes", "ok", "no other library has registered kernels for operators that Tritonite has")


def registrations() -> dict[str, set[str]]:
    """Return the overloads of the catalog for which libraries besides ATen and Tritonite have kernels, by library."""
    device = devices.current.dispatch_key or "CPU"
    keys = {device, f"Autograd{device}", "Autograd", f"Autocast{device}", "CompositeExplicitAutograd"}
    keys.add("CompositeImplicitAutograd")
    found = defaultdict[str, set[str]](set)
    for name, op in registry.overloads().items():
        for line in torch._C._dispatch_dump(op.qualified).splitlines():
            matched = _LINE.match(line)
            if matched and matched[1] in keys and (owner := owner_of(matched[3])):
                found[owner].add(name)
    return dict(found)


def owner_of(path: str) -> str:
    """Return the library of a source file that registered a kernel; "" for ATen, torch and Tritonite."""
    if path.startswith(str(Path(_TORCH) / "_native")):
        return _NATIVE
    if _ATEN.search(path) or path.startswith(_TORCH) or path.startswith(str(Path(__file__).parents[2])):
        return ""
    _, found, below = path.rpartition("-packages/")
    return below.partition("/")[0].removesuffix(".py") if found else path
