"""Checks of cache folders, of fitted tables, and of the native dispatcher."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
import triton
from triton import knobs
from triton.compiler import ASTSource

from tritonite import devices
from tritonite.engine.gemm import fitted
from tritonite.errors import InvalidSetting, TritoniteError
from tritonite.language.order import wait_for_previous_launch
from tritonite.report.doctor.finding import Finding
from tritonite.runtime import cache, compilation, native

# Free bytes below which compilation may fail, and below which it soon will.
_FULL, _NEARLY_FULL = 64 << 20, 1 << 30
# Files of a folder whose sizes are added up at most.
_MOST_FILES = 200_000


def caches() -> Iterator[Finding]:
    """Check that the folders of compiled kernels and of the dispatcher can be written, and have space."""
    for name, variable, folder in folders():
        yield _folder(name, variable, folder)


def folders() -> list[tuple[str, str, Path]]:
    """Return (name, environment variable, path) of each cache folder. Raises OSError if the user has no home."""
    own = Path(os.environ.get("TRITONITE_CACHE") or cache.folder())
    return [
        ("Triton's cache", "TRITON_CACHE_DIR", Path(knobs.cache.dir)),
        ("Tritonite's cache", "TRITONITE_CACHE", own),
    ]


def _folder(name: str, variable: str, folder: Path) -> Finding:
    reason = unwritable(folder)
    if reason:
        advice = f"make {folder} writable, or set {variable} to another folder"
        return Finding("caches", "error", f"{name} {folder} cannot be written: {reason}", advice)
    nearest = _nearest(folder)
    if os.statvfs(nearest).f_flag & os.ST_NOEXEC:
        advice = f"set {variable} to a folder of another file system"
        return Finding("caches", "error", f"{name} {folder}: libraries cannot be loaded (noexec)", advice)
    free = shutil.disk_usage(nearest).free
    message = f"{name} {folder}: {_bytes(size(folder))}, {_bytes(free)} free"
    if free < _NEARLY_FULL:
        advice = f"free space, delete old files of {folder}, or set {variable} to another disk"
        return Finding("caches", "error" if free < _FULL else "warning", message, advice)
    return Finding("caches", "ok", message)


def unwritable(folder: Path) -> str:
    """Return why files cannot be made in a folder that may not exist; "" if they can."""
    nearest = _nearest(folder)
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def size(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    total = count = 0
    for root, _, names in os.walk(folder):
        for name in names:
            count += 1
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                # Another process has removed the file.
                continue
        if count > _MOST_FILES:
            break
    return total


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def tables() -> Iterator[Finding]:
    """Check that files of fitted tables can be used, and say where the tables of the device come from."""
    device = devices.current_device()
    name, architecture = devices.name_of(device), devices.architecture(device)
    named = os.environ.get(fitted.VARIABLE)
    try:
        for path in [*([Path(named)] if named else []), *([fitted.own(name)] if fitted.own(name).exists() else [])]:
            fitted.load(path, name)
    except (TritoniteError, OSError) as error:
        yield Finding("tables", "warning", str(error), f"run `tritonite tune`, or unset {fitted.VARIABLE}")
        return
    origin = fitted.fitted(name, architecture).origin
    unmeasured = "unmeasured" in origin
    advice = "run `tritonite tune`, which measures this GPU in five minutes" if unmeasured else ""
    yield Finding("tables", "note" if unmeasured else "ok", f"tables of products: {origin}", advice)


def dispatcher() -> Iterator[Finding]:
    """Check that the native dispatcher is wanted, built, and can be loaded."""
    try:
        wanted = native.wanted()
    except InvalidSetting as error:
        yield Finding("dispatcher", "error", str(error), "set TRITONITE_NATIVE to 0 or 1, or unset it")
        return
    kind, slower = devices.current.kind, "calls go through Python"
    if not wanted and os.environ.get("TRITONITE_NATIVE") == "0":
        driver = devices.current.native
        level = "warning" if driver is not None and driver.by_default else "note"
        yield Finding("dispatcher", level, f"TRITONITE_NATIVE=0: {slower}", "unset TRITONITE_NATIVE for faster calls")
    elif not wanted:
        # The interpreter's own time hides the calls', so that nothing is lost.
        none = f"there is no native dispatcher for {kind}"
        off = "TRITONITE_NATIVE=1 turns the native dispatcher on, which is not verified here"
        why = "in the interpreter" if devices.current.interpreted else off if devices.current.native else none
        yield Finding("dispatcher", "ok", f"{slower}: {why}")
    elif not native.is_built():
        advice = "run `tritonite build` beforehand, so that the first call need not wait half a minute"
        yield Finding("dispatcher", "note", f"{native.library()} is built at first use", advice)
    else:
        yield _loaded()


def _loaded() -> Finding:
    """Load the dispatcher, and say why if it cannot be loaded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = native.module()
    if module is not None:
        failed = "" if devices.current.interpreted else _trial(module)
        if failed:
            return Finding("dispatcher", "error", failed, "set TRITONITE_NATIVE=0, and report this error")
        return Finding("dispatcher", "ok", f"native: {native.path()}")
    why = (
        str(caught[0].message) if caught else "calls take the slower Python path: an earlier attempt to load it failed"
    )
    advice = f"delete {native.library()} and run `tritonite build`"
    return Finding("dispatcher", "warning", why, advice)


@triton.jit
def _do_nothing():
    wait_for_previous_launch()


def _trial(dispatcher: ModuleType) -> str:
    """Load and launch a kernel by the native driver. Return the step that fails and the driver's reason, or ""."""
    device = devices.current_device()
    # Creates the device's context.
    torch.empty(1, device=device)
    compiled = compilation.compile_kernel(ASTSource(_do_nothing, {}))
    threads = compiled.metadata.num_warps * compiled.metadata.target.warp_size
    try:
        # Every kernel of Triton's has two pointers to scratch memory as its last parameters.
        dispatcher.try_driver(str(device), compiled.kernel, compiled.metadata.name, threads, 2)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
