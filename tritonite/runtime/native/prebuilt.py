"""A prebuilt native dispatcher: a wheel of one compiled library, for users without a compiler.

`tritonite build --output FOLDER` writes the wheel for this torch, Python and platform. Installed, its package
`tritonite_native` holds the library and a file of facts: what the library was compiled for. A library whose facts
differ from this process's is not used.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import platform
import sys
import sysconfig
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

from tritonite.errors import UnusableFile

PACKAGE = "tritonite_native"
_LIBRARY, _FACTS = "dispatcher.so", "facts.json"
# Facts in the order in which a difference is told, and how it is told.
_WORDS = {
    "torch": "torch {}",
    "python": "Python {}",
    "machine": "{} processors",
    "cxx11_abi": "C++11 ABI {}",
    "flags": "compiler flags {}",
    "sources": "dispatcher sources {}",
}


def facts(sources: str, flags: tuple[str, ...]) -> dict[str, Any]:
    """Return what a library depends on in this process; `sources` is the digest of the dispatcher's sources."""
    return {
        "torch": str(torch.__version__),
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "machine": platform.machine(),
        "cxx11_abi": int(torch._C._GLIBCXX_USE_CXX11_ABI),
        "flags": list(flags),
        "sources": sources,
    }


def find(wanted: dict[str, Any]) -> tuple[Path | None, str]:
    """Return the installed library if its facts are `wanted`, or None and a line that says why not.

    The line is "" where no prebuilt dispatcher is installed.
    """
    folder = _folder()
    if folder is None:
        return None, ""
    try:
        found = json.loads((folder / _FACTS).read_text())
        differing = next((name for name in _WORDS if found[name] != wanted[name]), None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{folder} is damaged: {error!r}"
    if differing is not None:
        theirs, ours = [_WORDS[differing].format(each[differing]) for each in (found, wanted)]
        return None, f"it is for {theirs}, and here is {ours}"
    library = folder / _LIBRARY
    return (library, "") if library.exists() else (None, f"{library} is missing")


def _folder() -> Path | None:
    """Return the folder of the installed package, which is not imported; None if there is none."""
    spec: ModuleSpec | None = importlib.util.find_spec(PACKAGE)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def write_wheel(library: Path, wanted: dict[str, Any], version: str, folder: Path) -> Path:
    """Write a wheel of a library with these facts into a folder, which is made if necessary, and return its path.

    Raises UnusableFile if the wheel cannot be written.
    """
    release, _, build = wanted["torch"].partition("+")
    local = ".".join(["torch", *release.split("."), *([build] if build else [])])
    tag = "cp{0}{1}-cp{0}{1}-{2}".format(
        *sys.version_info[:2], sysconfig.get_platform().replace("-", "_").replace(".", "_")
    )
    name = f"{PACKAGE}-{version}+{local}"
    path, info = folder / f"{name}-{tag}.whl", f"{name}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: {version}+{local}\n"
        f"Summary: The compiled dispatcher of Tritonite, for torch {wanted['torch']}\n"
        f"Requires-Python: =={wanted['python']}.*\nRequires-Dist: torch=={release}\n"
    )
    files = {
        f"{PACKAGE}/__init__.py": b'"""The compiled dispatcher of Tritonite, which loads it from here."""\n',
        f"{PACKAGE}/{_FACTS}": json.dumps(wanted, indent=1).encode(),
        f"{PACKAGE}/{_LIBRARY}": library.read_bytes(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tritonite\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    }
    record = "".join([f"{each},sha256={_digest(text)},{len(text)}\n" for each, text in files.items()])
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            for each, text in files.items():
                wheel.writestr(each, text)
    except OSError as error:
        raise UnusableFile(path=path, reason=error.strerror or error) from error
    return path


def _digest(text: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
