"""Checks of the device, its driver, the versions of packages, and compilers."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import triton

from tritonite import devices
from tritonite.devices import plugins
from tritonite.errors import InvalidSetting
from tritonite.registry import overrides
from tritonite.registry.op import overloads
from tritonite.report.doctor.finding import Finding
from tritonite.runtime import native

# Triton's names of the two backends whose installations are checked here.
CUDA, ROCM = "cuda", "hip"
# The driver from which launches overlap: programmatic dependent launch.
_OVERLAPPING_LAUNCHES = (12, 3)
_LEAST = re.compile(r"^(\w+)\s*\(?>=\s*([\d.]+)")


def device() -> Iterator[Finding]:
    """Check for a device that can run kernels."""
    record, interpret = devices.current, os.environ.get("TRITON_INTERPRET")
    for name, reason in plugins.broken.items():
        yield Finding(
            "device", "error", f"device plug-in {name} is left out: {reason}", "docs/porting.md has its rules"
        )
    for unknown in overrides.unknown(overloads()):
        yield Finding("device", "error", str(unknown), "correct the name in the record of the plug-in")
    if record.kind == "none":
        yield Finding(
            "device", "error", f"no GPU, and TRITON_INTERPRET={interpret} forbids the interpreter", _unset_or_gpu()
        )
    elif record.plugin not in ("", "tritonite"):
        yield Finding("device", "ok", f"{record.served_by}, at PyTorch's device type {record.type}")
    elif record.interpreted and torch.cuda.is_available():
        advice = "unset TRITON_INTERPRET to run kernels on the GPU"
        yield Finding("device", "warning", f"TRITON_INTERPRET={interpret}: kernels run in the interpreter", advice)
    elif record.interpreted and gpu_driver_loaded():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        built = torch.version.cuda or torch.version.hip
        message = f"a GPU driver is loaded, but torch (for {build if built else 'CPUs only'}) finds no GPU"
        advice = (
            "check CUDA_VISIBLE_DEVICES, and whether the driver supports this CUDA (nvidia-smi)"
            if built
            else "install a torch for this GPU: https://pytorch.org/get-started/locally"
        )
        yield Finding("device", "error", message, advice)
    elif record.interpreted:
        advice = "results are right and slow; use a machine with a GPU for speed"
        yield Finding("device", "note", "no GPU: kernels run in Triton's interpreter on the CPU", advice)
    else:
        yield from _gpus()


def _unset_or_gpu() -> str:
    return "unset TRITON_INTERPRET, or make a GPU visible to torch"


def gpu_driver_loaded() -> bool:
    """Return whether the kernel has a driver of NVIDIA's or AMD's GPUs."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists()


def _gpus() -> Iterator[Finding]:
    """Check that torch was built for each GPU."""
    for i in range(torch.cuda.device_count()):
        name = f"GPU {i}, {torch.cuda.get_device_name(i)}"
        if torch.version.hip:
            yield Finding("device", "ok", name)
            continue
        major, minor = torch.cuda.get_device_capability(i)
        if (major, minor) < (8, 0):
            advice = "use a GPU from sm_80 on, or expect kernels that do not compile"
            yield Finding("device", "warning", f"{name}: sm_{major}{minor} is older than sm_80", advice)
        elif not any(arch.startswith((f"sm_{major}", f"compute_{major}")) for arch in torch.cuda.get_arch_list()):
            advice = "install a torch that was built for this GPU"
            yield Finding("device", "error", f"{name}: torch has no kernels for sm_{major}{minor}", advice)
        else:
            yield Finding("device", "ok", f"{name}, sm_{major}{minor}")


def driver() -> Iterator[Finding]:
    """Compare the driver with the CUDA that torch was built for."""
    if devices.current.target == ROCM:
        yield Finding("driver", "ok", f"ROCm {torch.version.hip}")
    if devices.current.target != CUDA:
        return
    has, needs = cuda_driver(), _version(torch.version.cuda or "")
    text = ".".join(map(str, has))
    if not has:
        yield Finding("driver", "error", "libcuda.so.1 cannot be loaded", "install NVIDIA's driver")
    elif has[0] < needs[0]:
        advice = "update NVIDIA's driver, or install a torch for an older CUDA"
        yield Finding("driver", "error", f"the driver is for CUDA {text}, torch for {torch.version.cuda}", advice)
    elif has < _OVERLAPPING_LAUNCHES:
        message = f"CUDA {text}: launches do not overlap before driver 12.3"
        yield Finding("driver", "note", message, "update NVIDIA's driver for faster small calls")
    else:
        yield Finding("driver", "ok", f"driver for CUDA {text}, torch for CUDA {torch.version.cuda}")


def cuda_driver() -> tuple[int, ...]:
    """Return the CUDA version of NVIDIA's driver, such as (12, 8); () if there is no driver."""
    found = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found)):
            return ()
    except (OSError, AttributeError):
        return ()
    return found.value // 1000, found.value % 1000 // 10


def versions() -> Iterator[Finding]:
    """Compare torch and Triton with the versions that Tritonite supports, and with each other."""
    for name, found in (("torch", torch.__version__), ("triton", triton.__version__)):
        least = least_versions().get(name, "")
        if least and _version(found) < _version(least):
            advice = f"pip install '{name}>={least}'"
            yield Finding("versions", "error", f"{name} {found} is older than {least}", advice)
        else:
            yield Finding("versions", "ok", f"{name} {found}" + (f", {least} or later is supported" if least else ""))
    pinned = tritons_of_torch()
    if pinned and devices.current.target != ROCM and _version(pinned) != _version(triton.__version__):
        message = f"torch {torch.__version__} was released with triton {pinned}, and {triton.__version__} is installed"
        yield Finding("versions", "note", message, f"pip install triton=={pinned}, if torch.compile has problems")


def least_versions() -> dict[str, str]:
    """Return the oldest supported versions by package, from the package's metadata or a checkout's pyproject.toml."""
    try:
        lines = importlib.metadata.requires("tritonite") or []
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).parents[3] / "pyproject.toml"
        text = project.read_text() if project.exists() else ""
        listed = re.search(r"^dependencies = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
        lines = re.findall(r'"([^"]+)"', listed[1]) if listed else []
    return {found[1]: found[2] for line in lines if "extra" not in line and (found := _LEAST.match(line))}


def tritons_of_torch() -> str:
    """Return the version of Triton that torch's package asks for; "" if it asks for none."""
    try:
        lines = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((found[1] for line in lines if (found := re.match(r"triton\s*\(?==\s*([\d.]+)", line))), "")


def _version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, such as (3, 6) for "3.6.0+git1"."""
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])[:2])) or (0,)


def compilers() -> Iterator[Finding]:
    """Check for a C compiler, which Triton needs, a C++ compiler and Python's headers for the dispatcher, and ptxas."""
    gpu = not devices.current.interpreted and devices.current.kind != "none"
    c = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if c is None or shutil.which(c.split()[0]) is None:
        advice = "install gcc or clang, or set CC"
        message = f"no C compiler{f' at CC={c}' if c else ''}: Triton cannot build its launcher"
        yield Finding("compilers", "error" if gpu else "note", message, advice)
    else:
        yield Finding("compilers", "ok", f"C: {c}")
    yield from _cxx()
    if devices.current.target == CUDA:
        path = ptxas()
        works = path is not None and os.access(path, os.X_OK)
        advice = "" if works else "reinstall triton, or set TRITON_PTXAS_PATH to CUDA's ptxas"
        message = f"ptxas: {path}" if works else f"no ptxas that can run{f' at {path}' if path else ''}"
        yield Finding("compilers", "ok" if works else "error", message, advice)


def _cxx() -> Iterator[Finding]:
    try:
        wanted = native.wanted()
    except InvalidSetting:
        # The check of the dispatcher reports the setting.
        return
    if not wanted:
        return
    level = "warning" if not native.is_built() else "note"
    cxx = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if cxx is None or shutil.which(cxx.split()[0]) is None:
        message = f"no C++ compiler{f' at CXX={cxx}' if cxx else ''}: the native dispatcher cannot be built"
        yield Finding("compilers", level, message, "install g++ or clang++, or set CXX")
    elif not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        message = f"no Python.h in {sysconfig.get_paths()['include']}: the native dispatcher cannot be built"
        yield Finding("compilers", level, message, "install Python's headers (python3-dev)")
    else:
        yield Finding("compilers", "ok", f"C++: {cxx}")


def ptxas() -> str | None:
    """Return the path of the assembler that Triton uses, if there is one."""
    given = os.environ.get("TRITON_PTXAS_PATH")
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return given or (str(own) if own.exists() else shutil.which("ptxas"))
