"""Build a wheel by way of a source distribution, install it into an empty environment, and use it outside the checkout.

    python tools/try_wheel.py [--demo]

The environment has the wheel, and this Python's packages on its path for PyTorch and Triton, so nothing is downloaded.
Then it gets a wheel of the compiled dispatcher, which is used without a compiler. Prints each command. If one fails,
prints its output and exits with 1. With --demo, `tritonite demo` is run as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUIET = ("-q", "--disable-pip-version-check")
# What a first program does: kernels for a call, a gradient and a graph, all from the installed package.
SMOKE = """
import os
import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
import tritonite

place = Path(tritonite.__file__)
assert place.is_relative_to(sys.prefix), place
assert (place.parent / "py.typed").exists() and distribution("tritonite").version == tritonite.__version__
# Announced by the wheel's entry point: tritonite.graph has not been imported.
assert "tritonite" in torch._dynamo.list_backends()

x = torch.randn(4, 8, device=tritonite.device, requires_grad=True)
expected = torch.nn.functional.gelu(x).sum()
with tritonite.use_gems():
    found = torch.nn.functional.gelu(x).sum()
    found.backward()
torch.testing.assert_close(found, expected)
assert {"gelu", "gelu_backward"} <= tritonite.stats().keys()

if "PREBUILT" in os.environ:
    module = tritonite.runtime.native.module()
    assert Path(module.__file__).is_relative_to(sys.prefix), module.__file__

compiled = torch.compile(lambda x: torch.softmax(x * 2, -1), backend="tritonite")
torch.testing.assert_close(compiled(x.detach()), torch.softmax(x.detach() * 2, -1))
"""


def build(folder: Path) -> Path:
    """Build a source distribution of this checkout's package, and a wheel from that. Return the wheel's path."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "tritonite", source / "tritonite", ignore=shutil.ignore_patterns("__pycache__"))
    # Without isolation the build takes this environment's setuptools, and downloads nothing.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source], folder)
    (wheel,) = folder.glob("tritonite-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment. Return the folder of its commands."""
    own = folder / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", own], folder)
    add(wheel, own, folder)
    (packages,) = own.glob("lib/python*/site-packages")
    # A path in a .pth file is searched after the environment's own packages, and its .pth files are not read.
    (packages / "present.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return own / "bin"


def add(wheel: Path, own: Path, folder: Path) -> None:
    """Install a wheel into an environment, without what it requires."""
    python = own / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, *QUIET, "install", "--no-deps", "--no-index", wheel], folder)


def run(command: Sequence[str | Path], folder: Path, **settings: str) -> None:
    """Run a command in a folder with settings, without this process's Python path. Exits with 1 if it fails."""
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= settings
    done = subprocess.run(words, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr)
        raise SystemExit(1)


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        commands = install(build(folder), folder)
        for arguments in (["--version"], ["info"], *([["demo"]] if "--demo" in sys.argv else [])):
            run([commands / "tritonite", *arguments], folder)
        # A file, because Triton reads the source of functions that it compiles.
        (folder / "smoke.py").write_text(SMOKE)
        run([commands / "python", folder / "smoke.py"], folder)
        run([commands / "tritonite", "build", "--output", folder / "dispatcher"], folder)
        add(next((folder / "dispatcher").glob("*.whl")), commands.parent, folder)
        without_compiler = {"CXX": "/nonexistent", "TRITONITE_CACHE": str(folder / "cache"), "TRITONITE_NATIVE": "1"}
        run([commands / "python", folder / "smoke.py"], folder, PREBUILT="1", **without_compiler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
