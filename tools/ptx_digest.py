"""Digest the PTX of every kernel in the compile matrix, to show that a change of the sources changes no kernel.

    python tools/ptx_digest.py --write FILE [--jobs N] [NAME...]
    python tools/ptx_digest.py --compare FILE [--jobs N] [NAME...]

A digest does not depend on names of kernels, files and functions, or on line numbers. FILE has one line for each kernel
of sm_90, and for every eighth one of sm_80: the digest, the target, and a label for people. `--compare` compares
digests alone, prints the kernels that are in only one of the two sets, and exits with 1 if there is one. NAME restricts
the matrix as in `tritonite.testing.targets`. Needs no GPU.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SAMPLED = 8
# Text that depends on the sources' names: assertion strings, debug information, comments. Triton itself leaves out line
# numbers (TRITON_DISABLE_LINE_INFO).
_STRINGS = re.compile(r"^\.global .*\bassert(?:File|Func|Message)\w*\[.*$", re.MULTILINE)
_NOTES = re.compile(r"^\s*(?:\.loc|\.file|//).*$|//.*$", re.MULTILINE)
_DEBUG_SECTIONS = re.compile(r"^\s*\.section\s+\.debug_.*?^\s*}\s*$", re.MULTILINE | re.DOTALL)
_FUNCTION = re.compile(r"\.(?:entry|func)\s*(?:\([^)]*\)\s*)?([\w$.]+)")


class Kernel(NamedTuple):
    """A compiled kernel of the matrix: the digest of its PTX, its target, and its label."""

    digest: str
    target: str
    label: str


def normalized(ptx: str) -> str:
    """Return PTX without the text that depends on names and lines of the sources."""
    for pattern in (_DEBUG_SECTIONS, _STRINGS, _NOTES):
        ptx = pattern.sub("", ptx)
    for i, name in enumerate(dict.fromkeys(_FUNCTION.findall(ptx))):
        ptx = re.sub(rf"(?<![\w$.]){re.escape(name)}(?=_param_|\b)", f"function{i}", ptx)
    return "\n".join(line for line in map(str.strip, ptx.splitlines()) if line)


def digests(names: list[str], part: str) -> Iterator[Kernel]:
    """Compile one shard of the matrix down to PTX, and yield its kernels."""
    from triton.backends.nvidia.compiler import CUDABackend

    from tritonite.testing import targets
    from tritonite.testing.parts import part_of

    stages, initialize = CUDABackend.add_stages, CUDABackend.__init__

    def to_ptx(self, found, *args, **kwargs):
        stages(self, found, *args, **kwargs)
        found.pop("cubin")

    def ending_with_ptx(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        self.binary_ext = "ptx"

    CUDABackend.add_stages, CUDABackend.__init__ = to_ptx, ending_with_ptx
    for label, specialization, chosen, _ in targets.matrix(names, False, part_of(part)):
        cuda = [name for name in chosen if name.startswith("sm_")]
        sampled = int(hashlib.sha256(label.encode()).hexdigest(), 16) % SAMPLED == 0
        for target in ["sm_90"] + ["sm_80"] * (sampled and "sm_80" in cuda):
            if target == "sm_90" and not cuda:
                continue
            compiled = specialization.compile(targets.TARGETS[target])
            # Triton stores the last stage as bytes.
            text = normalized(compiled.asm["ptx"].decode())
            yield Kernel(hashlib.sha256(text.encode()).hexdigest()[:24], target, label.replace("\n", " "))


def _all(names: list[str], jobs: int) -> list[Kernel]:
    """Compile the whole matrix in several processes."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            **{"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder, "TRITON_DISABLE_LINE_INFO": "1"},
            **{"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join((".", os.environ.get("PYTHONPATH", "")))},
        }
        command = [sys.executable, "-W", "ignore", __file__, *names]
        running = [
            subprocess.Popen([*command, "--part", f"{i}/{jobs}"], env=environment, stdout=subprocess.PIPE, text=True)
            for i in range(jobs)
        ]
        lines = [line for process in running for line in process.communicate()[0].splitlines()]
        if any(process.returncode for process in running):
            raise SystemExit("a shard of the matrix did not compile")
    return sorted(Kernel(*line.split("\t")) for line in lines)


def differences(before: list[Kernel], after: list[Kernel]) -> list[str]:
    """Describe the kernels whose digests are in one of two matrices only, or more often in one."""
    lines = []
    for sign, ours, theirs in (("-", before, after), ("+", after, before)):
        counted = collections.Counter((kernel.digest, kernel.target) for kernel in theirs)
        for kernel in ours:
            key = kernel.digest, kernel.target
            counted[key] -= 1
            if counted[key] < 0:
                lines.append(f"{sign} {kernel.target} {kernel.label}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        for kernel in digests(options.names, options.part):
            print(*kernel, sep="\t", flush=True)
        return 0
    if (options.write is None) == (options.compare is None):
        parser.error("either --write or --compare takes a file")
    kernels = _all(options.names, options.jobs)
    if options.write:
        options.write.write_text("".join("\t".join(kernel) + "\n" for kernel in kernels))
        print(f"{len(kernels)} kernels")
        return 0
    before = [Kernel(*line.split("\t")) for line in options.compare.read_text().splitlines()]
    lines = differences(before, kernels)
    print(*lines, f"{len(kernels)} kernels, {len(lines)} differ", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
