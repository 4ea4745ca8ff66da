"""Artifacts: files with compiled kernels, so that a process that loads one compiles nothing.

An artifact is a zip file without code of the host: GPU binaries and their metadata as Triton's disk cache keeps them,
further entries of bytes, and `manifest.json`, which lists every member with its SHA-256:

    manifest.json               versions, targets, members
    kernels/<hash>/<file>       Triton's metadata (.json) and the binary (.cubin, .hsaco)
    entries/<name>              what `write` was given, such as descriptions of plans
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from tritonite import devices
from tritonite.errors import InvalidArtifact, MismatchedArtifact, UnusableFile
from tritonite.runtime import cache, compilation, progress
from tritonite.runtime.launch import prepare_cache

_FORMAT = 1
_BINARIES = (".cubin", ".hsaco")
# Limits of an artifact: members, bytes of one, bytes of all.
_MOST_MEMBERS, _LARGEST_MEMBER, _LARGEST = 200_000, 2**28, 2**32
_HASH = re.compile(r"[0-9a-f]{64}")
# A file name, or a name of an entry with folders: no empty, hidden or parent folder.
_FILE = re.compile(r"\w[\w.\-]*")
_ENTRY = re.compile(r"\w[\w.\-]*(/\w[\w.\-]*)*")
# Entries of these folders are not compressed: weights hardly shrink, and take long.
_STORED = "entries/tensors/"
# When all members claim to be written, so that equal contents make equal files.
_TIME = (2020, 1, 1, 0, 0, 0)


class Contents(NamedTuple):
    """The contents of an artifact.

    Attributes:
        facts: versions, targets and environment of the process that wrote it.
        kernels: the files of each kernel by name, by Triton's hash.
        entries: further bytes by name.
    """

    facts: dict[str, Any]
    kernels: dict[str, dict[str, bytes]]
    entries: dict[str, bytes]


def save_kernels(path: str | os.PathLike[str]) -> int:
    """Write the kernels that this process has compiled, or loaded from Triton's disk cache, to a file.

    Call it after `tritonite.warm`, or after calls of every shape that production makes. Returns the number of kernels.
    Raises UnusableFile if the file cannot be written, or a kernel is gone from Triton's disk cache.
    """
    return write(path)


def load_kernels(path: str | os.PathLike[str], strict: bool = True) -> int:
    """Put the kernels of a file of `save_kernels` into Triton's disk cache, where calls find them.

    The file has to come from the same versions of Triton, torch and Tritonite, a GPU of the same name, and the same
    environment variables of Triton's compiler. Load only files that you trust: a GPU binary can do what a kernel can.

    Args:
        path: the file.
        strict: False accepts another version of torch or Tritonite, and another GPU of the same architecture. Kernels
            that differ there are compiled.

    Returns the number of kernels. Raises InvalidArtifact for a damaged or foreign file, MismatchedArtifact for one from
    another device or version.
    """
    contents = read(path)
    check(contents, path, strict)
    return install(contents)


def write(
    path: str | os.PathLike[str], entries: Mapping[str, bytes] | None = None, kernels: Iterable[str] | None = None
) -> int:
    """Write an artifact, replacing the file at once. Returns the number of kernels.

    Args:
        entries: further bytes by name, such as {"plans/decoder.json": ...}. Folders in a name are divided by "/".
        kernels: Triton's hashes of the kernels (`CompiledKernel.hash`); default: all of this process.
    """
    path, known = Path(path), compilation.kernel_files()
    members: dict[str, bytes] = {}
    wanted = sorted(known if kernels is None else set(kernels))
    for key in wanted:
        if key not in known:
            raise UnusableFile(path=path, reason=f"this process has no kernel with the hash {key}")
        for name, file in sorted(known[key].items()):
            if name.endswith((".json", *_BINARIES)):
                members[f"kernels/{key}/{name}"] = _contents(Path(file), path)
    for name, data in sorted((entries or {}).items()):
        if _ENTRY.fullmatch(name) is None:
            raise UnusableFile(path=path, reason=f"{name!r} is not a name for an entry")
        members[f"entries/{name}"] = bytes(data)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    manifest = {"format": _FORMAT, **facts(), "targets": _targets(members), "members": digests}
    cache.check_writable(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in {"manifest.json": json.dumps(manifest, indent=1).encode(), **members}.items():
                kind = zipfile.ZIP_STORED if name.startswith(_STORED) else zipfile.ZIP_DEFLATED
                archive.writestr(zipfile.ZipInfo(name, _TIME), data, kind)
        os.replace(unfinished, path)
    except OSError as error:
        raise UnusableFile(path=path, reason=error.strerror or error) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return len(wanted)


def read(path: str | os.PathLike[str]) -> Contents:
    """Read an artifact, and check its members. Raises InvalidArtifact."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, path)
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError, zlib.error) as error:
        raise InvalidArtifact(path=path, reason=f"it is damaged, or no artifact ({error})") from error
    except OSError as error:
        raise InvalidArtifact(path=path, reason=error.strerror or error) from error


def check(contents: Contents, path: str | os.PathLike[str], strict: bool = True) -> None:
    """Raise MismatchedArtifact unless this process can use the kernels of an artifact, as `load_kernels` says."""

    def require(*names: str) -> None:
        if (found := difference(contents.facts, names)) is not None:
            raise MismatchedArtifact(path=path, **found._asdict())

    require("triton", "environment", *(("torch", "tritonite") if strict else ()))
    if devices.current.interpreted or not devices.current.dispatch_key or not contents.kernels:
        return
    target = driver.active.get_current_target()
    if [target.backend, target.arch] not in contents.facts["targets"]:
        listed = ", ".join(" ".join(map(str, each)) for each in contents.facts["targets"])
        raise MismatchedArtifact(path=path, what="architecture", theirs=listed, ours=f"{target.backend} {target.arch}")
    if strict:
        require("device")


def install(contents: Contents) -> int:
    """Put the kernels of an artifact into Triton's disk cache. Returns their number, 0 in the interpreter."""
    if devices.current.interpreted:
        progress.tell("artifact", "no kernel is loaded: kernels run in Triton's interpreter here")
        return 0
    prepare_cache()
    for key, files in contents.kernels.items():
        manager = get_cache_manager(key)
        (metadata,) = [name for name in files if name.endswith(".json")]
        if files.keys() <= (manager.get_group(metadata) or {}).keys():
            continue
        manager.put_group(metadata, {name: manager.put(data, name, True) for name, data in files.items()})
    return len(contents.kernels)


class Difference(NamedTuple):
    """A fact that differs between the process that wrote a file and this one: its name in words, and both values."""

    what: str
    theirs: Any
    ours: Any


def facts() -> dict[str, Any]:
    """Return what decides whether another process can use kernels and plans of this one."""
    return {name: own() for name, (_, own) in _FACTS.items()}


def difference(theirs: Mapping[str, Any], names: Iterable[str]) -> Difference | None:
    """Return the first of these facts that is another one in this process, or None."""
    for name in names:
        words, own = _FACTS[name]
        if theirs.get(name) != (ours := own()):
            return Difference(words, theirs.get(name), ours)
    return None


# The name in words of each fact, and the function that returns this process's.
_FACTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "tritonite": ("Tritonite", lambda: sys.modules["tritonite"].__version__),
    "torch": ("torch", lambda: torch.__version__.partition("+")[0]),
    "triton": ("Triton", lambda: triton.__version__),
    "environment": ("compiler's environment", lambda: dict(sorted(get_cache_invalidating_env_vars().items()))),
    "kind": ("device", lambda: devices.current.type + " (interpreted)" * devices.current.interpreted),
    "device": ("GPU", lambda: "" if devices.current.host_memory else devices.name_of(devices.current_device())),
    "capability": ("capability", lambda: devices.architecture(devices.current_device()) or "none"),
}


def _targets(members: Mapping[str, bytes]) -> list[Any]:
    """Return [backend, architecture] of each target that kernels are compiled for."""
    found = [json.loads(data)["target"] for name, data in members.items() if re.match(r"kernels/.*\.json$", name)]
    distinct = {(target["backend"], target["arch"]): None for target in found}
    return [list(target) for target in distinct]


def _contents(file: Path, path: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UnusableFile(path=path, reason=f"a kernel is gone from Triton's disk cache ({file})") from error


def _read(archive: zipfile.ZipFile, path: Any) -> Contents:
    infos = archive.infolist()
    if len(infos) > _MOST_MEMBERS or sum(info.file_size for info in infos) > _LARGEST:
        raise InvalidArtifact(path=path, reason="it is larger than an artifact may be")
    if any(info.file_size > _LARGEST_MEMBER for info in infos):
        raise InvalidArtifact(path=path, reason="a member is larger than a member may be")
    names = [info.filename for info in infos]
    if len(set(names)) != len(names) or "manifest.json" not in names:
        raise InvalidArtifact(path=path, reason="it has no manifest, or a member twice")
    manifest = _object(archive.read("manifest.json"), path)
    if manifest.get("format") != _FORMAT:
        raise InvalidArtifact(path=path, reason=f"its format is {manifest.get('format')}, not {_FORMAT}")
    digests, targets = manifest.pop("members", None), manifest.get("targets")
    if not isinstance(targets, list) or not all(isinstance(each, list) for each in targets):
        raise InvalidArtifact(path=path, reason="its manifest lists no targets")
    if not isinstance(digests, dict) or {*digests, "manifest.json"} != set(names):
        raise InvalidArtifact(path=path, reason="its members are not those that its manifest lists")
    contents = Contents(manifest, {}, {})
    for name, digest in digests.items():
        folder, _, rest = name.partition("/")
        key, _, file = rest.partition("/")
        is_kernel = folder == "kernels" and _HASH.fullmatch(key) and _FILE.fullmatch(file)
        if not is_kernel and not (folder == "entries" and _ENTRY.fullmatch(rest)):
            raise InvalidArtifact(path=path, reason=f"a member has the name {name!r}")
        data = archive.read(name)
        if hashlib.sha256(data).hexdigest() != digest:
            raise InvalidArtifact(path=path, reason=f"the contents of {name} are not those that were written")
        if is_kernel:
            contents.kernels.setdefault(key, {})[file] = data
        else:
            contents.entries[rest] = data
    for key, files in contents.kernels.items():
        _check_kernel(key, files, path)
    return contents


def _check_kernel(key: str, files: Mapping[str, bytes], path: Any) -> None:
    """Raise InvalidArtifact unless a kernel's files are its metadata and one binary."""
    kinds = sorted(os.path.splitext(name)[1] for name in files)
    if len(kinds) != 2 or ".json" not in kinds or not set(kinds) & set(_BINARIES):
        raise InvalidArtifact(path=path, reason=f"the kernel {key} has the files {', '.join(sorted(files))}")
    (metadata,) = [data for name, data in files.items() if name.endswith(".json")]
    if _object(metadata, path).get("hash") != key:
        raise InvalidArtifact(path=path, reason=f"the metadata of the kernel {key} is another kernel's")


def _object(data: bytes, path: Any) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidArtifact(path=path, reason="a member is not JSON")
    return found
