"""Compile the native dispatcher against the headers of given releases of torch: `torch_headers.py FOLDER VERSION...`.

The headers are unpacked into FOLDER, once. They come from the wheel for macOS, which is the smallest. The headers that
the dispatcher includes are the same on every platform.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tritonite.runtime import native

# The newest macOS, which wheels for every earlier one fit.
PLATFORM = "macosx_26_0_arm64"


def include(folder: Path, version: str) -> Path:
    """Return the include folder of torch `version`, downloaded unless it is in `folder`. Raises SystemExit."""
    unpacked = folder / f"torch-{version}"
    if not unpacked.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            with zipfile.ZipFile(_download(version, Path(temporary))) as wheel:
                headers = [name for name in wheel.namelist() if name.startswith("torch/include/")]
                wheel.extractall(temporary, headers)
            (Path(temporary) / "torch").rename(unpacked)
    return unpacked / "include"


def _download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--platform={PLATFORM}", "-d", str(folder)]
    # Nothing is installed, so constraints on installed versions must not apply.
    environment = os.environ | {"PIP_CONSTRAINT": os.devnull}
    done = subprocess.run([*command, f"torch=={version}"], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "pip printed nothing").splitlines()[-1]
        raise SystemExit(f"cannot download the headers of torch {version}; is a package index in reach? {reason}")
    return next(folder.glob("*.whl"))


def compiles(headers: Path) -> str:
    """Return the compiler's errors for the dispatcher with these headers; "" if it compiles."""
    command = [*native.compilation(os.environ.get("CXX", "c++"), headers), "-fsyntax-only"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def main() -> int:
    folder, *versions = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    headers = [include(Path(folder), version) for version in versions]
    with ThreadPoolExecutor() as pool:
        failures = list(pool.map(compiles, headers))
    for version, failure in zip(versions, failures, strict=True):
        print(f"native dispatcher with the headers of torch {version}: {failure or 'compiles'}")
    return int(any(failures))


if __name__ == "__main__":
    sys.exit(main())
