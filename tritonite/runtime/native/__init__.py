"""The native dispatcher: a C++ extension, built once for a torch version and a source.

- state.h: an overridden operator, and the table of all
- key.h: the key of a call
- cache.h: the plans of an operator by key
- plan.h: a plan as C++ data
- record.h: runs Python without a plan, and converts the plan that Python returns
- replay.h: runs a plan
- graph.h: a graph's plan as C++ data, and its execution
- audit.h: samples of calls for `tritonite.audit`
- driver.h: the CUDA driver, loaded at run time
- prebuilt.py: a wheel of the compiled dispatcher, and the installed one
- dispatcher.cpp: the boxed kernel of every overridden operator, and the functions that Python calls

It is loaded when an operator is first overridden.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch

from tritonite import devices
from tritonite.errors import BuildFailed, InvalidSetting
from tritonite.runtime import cache, progress
from tritonite.runtime.native import prebuilt

_NAME = "tritonite_dispatcher"
_SOURCE = Path(__file__).with_name("dispatcher.cpp")
# The standard for torch headers that state no minimum.
_NEWEST_STANDARD = "c++20"
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))


def _requested() -> bool | None:
    """Return TRITONITE_NATIVE as a bool, or None if it is unset. Raises InvalidSetting unless it is 0 or 1."""
    setting = os.environ.get("TRITONITE_NATIVE", "")
    if setting not in ("", "0", "1"):
        raise InvalidSetting(name="TRITONITE_NATIVE", value=setting, expected="0 or 1")
    return setting == "1" if setting else None


def wanted() -> bool:
    """Return whether to use the dispatcher for the default device: as its driver says, or as TRITONITE_NATIVE says."""
    requested, native = _requested(), devices.current.native
    return native is not None and (native.by_default if requested is None else requested)


def flags() -> tuple[str, ...]:
    """Return additional compiler flags from TRITONITE_NATIVE_FLAGS, such as sanitizers."""
    return tuple(os.environ.get("TRITONITE_NATIVE_FLAGS", "").split())


def _sources() -> bytes:
    return b"".join([file.read_bytes() for file in (_SOURCE, *_HEADERS)])


def _facts() -> dict[str, Any]:
    """Return what a library depends on, as a prebuilt one names it."""
    return prebuilt.facts(hashlib.sha256(_sources()).hexdigest()[:16], flags())


def library() -> Path:
    """Return the path of the library that this machine builds, which may not exist yet."""
    digest = hashlib.sha256(_sources())
    digest.update(repr((torch.__version__, sys.version_info[:2], flags())).encode())
    folder = Path(os.environ.get("TRITONITE_CACHE") or cache.folder())
    return folder / f"{_NAME}-{digest.hexdigest()[:16]}.so"


def path() -> Path:
    """Return the path of the prebuilt library if it fits, or else of the one built here, which may not exist yet."""
    return prebuilt.find(_facts())[0] or library()


def is_built() -> bool:
    """Return whether a library is there that needs no build."""
    return path().exists()


def state() -> str:
    """Return whether the dispatcher is built, for a table of facts."""
    if prebuilt.find(_facts())[0]:
        return "native dispatcher, prebuilt"
    try:
        return "native dispatcher" if library().exists() else "native dispatcher, to be built at first use"
    except OSError as error:
        return f"Python, as the native dispatcher cannot be built: {error}"


def build() -> Path:
    """Return the path of the prebuilt library if it fits, or else of one that is built here. Raises BuildFailed.

    Warns once if a prebuilt library is installed that does not fit.
    """
    found, reason = prebuilt.find(_facts())
    if found is not None:
        return found
    if reason:
        _warn_of_prebuilt(reason)
    return build_here()


def _warn_of_prebuilt(reason: str) -> None:
    cache.warn_once(f"the prebuilt dispatcher is not used, and one is built here: {reason}")


def write_wheel(version: str, folder: Path) -> Path:
    """Write a wheel of the dispatcher for this torch into a folder. Raises BuildFailed or UnusableFile."""
    return prebuilt.write_wheel(build_here(), _facts(), version, folder)


def build_here() -> Path:
    """Build the dispatcher if necessary and return the library's path. Raises BuildFailed."""
    try:
        return _build(library())
    except OSError as error:
        raise BuildFailed(reason=str(error)) from error


def _build(target: Path) -> Path:
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildFailed(reason="no C++ compiler was found; install one, or set CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        _wait_for(lock, target.parent)
        if target.exists():
            return target
        progress.tell("building", "building the native dispatcher, once for this torch (half a minute)")
        unfinished = target.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            _command(compiler, unfinished), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise BuildFailed(reason=_failure(compiler, done, target.with_suffix(".log")))
        unfinished.rename(target)
    return target


def _wait_for(lock: IO[str], folder: Path) -> None:
    """Take the lock of a build. Tells the user if another process holds it for seconds."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        line = f"waiting for another process that builds the native dispatcher in {folder} (half a minute)"
        with progress.timed("waiting", line, watched=True):
            fcntl.flock(lock, fcntl.LOCK_EX)


def _failure(compiler: str, done: subprocess.CompletedProcess[str], log: Path) -> str:
    """Write the compiler's output to the file `log`, and return a line with its first error."""
    log.write_text(f"{shlex.join(done.args)}\n{done.stdout}{done.stderr}")
    errors = [line.strip() for line in done.stderr.splitlines() if "error" in line]
    return f"{compiler} says: {errors[0] if errors else f'exit status {done.returncode}'} (all of it: {log})"


def _standard(include: Path) -> str:
    """Return the oldest C++ standard that the headers in torch's `include` folder accept, such as "c++20"."""
    header = include / "ATen" / "ATen.h"
    refused = re.search(r"__cplusplus < 20(\d\d)", header.read_text()) if header.exists() else None
    return f"c++{refused[1]}" if refused else _NEWEST_STANDARD


def compilation(compiler: str, include: Path) -> list[str]:
    """Return a command without an output that compiles the dispatcher with the headers in torch's `include` folder."""
    folders = [include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [
        *compiler.split(),
        *(f"-std={_standard(include)}", "-O2", "-fPIC", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *flags(),
        *(f"-I{folder}" for folder in folders),
        str(_SOURCE),
    ]


def _command(compiler: str, target: Path) -> list[str]:
    root = Path(torch.__file__).parent
    return [
        *compilation(compiler, root / "include"),
        *("-shared", "-o", str(target)),
        *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python", "-ltorch", "-ldl"),
    ]


@functools.lru_cache(maxsize=1)
def module() -> ModuleType | None:
    """Return the dispatcher, built if necessary, or None if it is not wanted or (with a warning) cannot be built."""
    if not wanted():
        if _requested():
            kind = devices.current.kind
            warnings.warn(f"calls take the slower Python path: no native driver for {kind}", stacklevel=2)
        return None
    try:
        found = build()
        try:
            return _load(found)
        except (ImportError, OSError) as error:
            # A machine may have an older C++ library than the one that a prebuilt library comes from.
            if found == library():
                raise
            _warn_of_prebuilt(str(error))
            return _load(build_here())
    except (BuildFailed, ImportError, OSError) as error:
        warnings.warn(f"calls take the slower Python path: {error}", stacklevel=2)
        return None


def _load(file: Path) -> ModuleType:
    """Load the dispatcher from a library. Raises ImportError or OSError."""
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(file))
    spec = importlib.util.spec_from_file_location(_NAME, file, loader=loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded
