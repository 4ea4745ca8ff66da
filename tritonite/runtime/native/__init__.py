"""The native dispatcher: a C++ extension, built once for a torch version and a source.

- state.h: an overridden operator, and the table of all
- key.h: the key of a call
- cache.h: the plans of an operator by key
- plan.h: a plan as C++ data
- record.h: runs Python without a plan, and converts the plan that Python returns
- replay.h: runs a plan
- graph.h: a graph's plan as C++ data
- prepared.h: the arguments of a graph's launches, prepared when the graph is made
- execution.h: the execution of a graph's plan, and the key of a graph's inputs
- audit.h: samples of calls for `tritonite.audit`
- driver.h: what a device gives the dispatcher; cuda.h, hip.h: what CUDA and HIP give; drivers.h: the one of each device
- libraries.h: functions of libraries that are loaded at run time
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
from collections.abc import Callable
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
    return _path(_NAME, _sources())


def _path(name: str, sources: bytes) -> Path:
    """Return the path of the library built of `sources`, which differs for every content, torch, Python and flags."""
    digest = hashlib.sha256(sources)
    digest.update(repr((torch.__version__, sys.version_info[:2], flags())).encode())
    folder = Path(os.environ.get("TRITONITE_CACHE") or cache.folder())
    return folder / f"{name}-{digest.hexdigest()[:16]}.so"


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
        return _build(library(), _command, "the native dispatcher, once for this torch (half a minute)")
    except OSError as error:
        raise BuildFailed(reason=str(error)) from error


def driver() -> str:
    """Return the default device's driver, as `use_driver` of the dispatcher takes it. Builds a plug-in's source.

    Raises BuildFailed.
    """
    native = devices.default.native
    given = Path(native.driver if native is not None else "")
    if given.suffix not in (".cpp", ".cc", ".cxx"):
        return str(given) if given.name else ""
    try:
        contents = given.read_bytes() + b"".join([file.read_bytes() for file in _HEADERS])
        command, what = functools.partial(_driver_command, given), f"the native driver of {devices.default.kind}"
        return str(_build(_path(given.stem, contents), command, what))
    except OSError as error:
        raise BuildFailed(reason=str(error)) from error


def _build(target: Path, command: Callable[[str, Path], list[str]], what: str) -> Path:
    """Build the library `target` unless it exists, by the command for a compiler and an output.

    `what` tells the user what is built.
    """
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
        progress.tell("building", f"building {what}")
        unfinished = target.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            command(compiler, unfinished), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
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


def _driver_command(source: Path, compiler: str, target: Path) -> list[str]:
    """Return the command that compiles a plug-in's driver, which includes driver.h and its vendor's headers alone."""
    options = ("-std=c++17", "-O2", "-fPIC", "-shared", *flags(), f"-I{_SOURCE.parent}")
    return [*compiler.split(), *options, str(source), "-o", str(target), "-ldl"]


@functools.lru_cache(maxsize=1)
def module() -> ModuleType | None:
    """Return the dispatcher, built if necessary, or None if it is not wanted or (with a warning) cannot be built."""
    if not wanted():
        if _requested():
            kind = devices.current.kind
            warnings.warn(f"calls take the slower Python path: no native driver for {kind}", stacklevel=2)
        return None
    try:
        loaded = _load_built()
        if own := driver():
            loaded.use_driver(devices.default.type, own)
    except (BuildFailed, ImportError, OSError, RuntimeError) as error:
        (reason, *_) = str(error).splitlines() or [""]
        warnings.warn(f"calls take the slower Python path: {reason}", stacklevel=2)
        return None
    return loaded


def _load_built() -> ModuleType:
    """Load the prebuilt dispatcher if it fits and can be loaded, or else the one that is built here.

    Raises BuildFailed, ImportError or OSError.
    """
    found = build()
    try:
        return _load(found)
    except (ImportError, OSError) as error:
        # A machine may have an older C++ library than the one that a prebuilt library comes from.
        if found == library():
            raise
        _warn_of_prebuilt(str(error))
        return _load(build_here())


def _load(file: Path) -> ModuleType:
    """Load the dispatcher from a library. Raises ImportError or OSError."""
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(file))
    spec = importlib.util.spec_from_file_location(_NAME, file, loader=loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded
