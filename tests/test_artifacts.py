"""Files of compiled kernels: what they hold, who may load them, and that a process that does compiles nothing."""

import hashlib
import json
import zipfile

import pytest
import torch
import triton
from without_gpu import run

import tritonite
from tritonite import devices
from tritonite.errors import InvalidArtifact, MismatchedArtifact, UnusableFile
from tritonite.runtime import artifact, compilation

HASH, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Have this process know two kernels, of which one has files that an artifact leaves out."""
    known = {}
    for key, more in ((HASH, ("add.source", "add.ptx")), (OTHER, ())):
        folder = tmp_path / key
        folder.mkdir()
        metadata = json.dumps({"hash": key, "target": {"backend": "cuda", "arch": 90, "warp_size": 32}})
        for name, data in {"add.json": metadata, "add.cubin": key[:4], **dict.fromkeys(more, "text")}.items():
            (folder / name).write_text(data)
        known[key] = {path.name: str(path) for path in folder.iterdir()}
    monkeypatch.setattr(compilation, "_files", known)
    return known


def write_members(path, contents, **facts):
    """Write an artifact with these members, and a manifest that fits them unless `facts` say otherwise."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    manifest = {"format": 1, "targets": [["cuda", 90]], "members": digests} | facts
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        for name, data in contents.items():
            archive.writestr(name, data)


def test_a_file_holds_binaries_and_metadata_alone(kernels, tmp_path):
    path = tmp_path / "folder" / "model.kernels"
    assert tritonite.save_kernels(path) == 2
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    assert names == {"manifest.json", *(f"kernels/{key}/add.{kind}" for key in kernels for kind in ("json", "cubin"))}
    contents = artifact.read(path)
    assert contents.kernels[HASH]["add.cubin"] == b"aaaa" and not contents.entries
    assert contents.facts["targets"] == [["cuda", 90]] and contents.facts["triton"] == triton.__version__
    first = path.read_bytes()
    tritonite.save_kernels(path)
    assert path.read_bytes() == first and [each.name for each in path.parent.iterdir()] == ["model.kernels"]


def test_a_file_takes_further_entries(kernels, tmp_path):
    path = tmp_path / "plan.kernels"
    assert artifact.write(path, {"plans/decoder.json": b"{}", "weights": b"\0"}, [OTHER]) == 1
    contents = artifact.read(path)
    assert contents.entries == {"plans/decoder.json": b"{}", "weights": b"\0"} and list(contents.kernels) == [OTHER]
    for name in ("../plan", "/plan", "plans//a", "plans/..", ".hidden", ""):
        with pytest.raises(UnusableFile, match="not a name"):
            artifact.write(path, {name: b""})
    with pytest.raises(UnusableFile, match="no kernel with the hash"):
        artifact.write(path, kernels=["c" * 64])


def test_kernels_that_are_gone_are_an_error(kernels, tmp_path):
    (tmp_path / HASH / "add.cubin").unlink()
    with pytest.raises(UnusableFile, match="gone from Triton's disk cache"):
        tritonite.save_kernels(tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "name",
    ["../x", "kernels/../../x", f"kernels/{HASH}/../x.cubin", f"kernels/{HASH}/a/b.cubin", "/etc/x", "entries/../x"]
    + [f"kernels/{HASH[1:]}/x.cubin", "entries/", "other/x", f"kernels/{HASH}/.x", "entries/a\\b", "entries/a\n"],
)
def test_names_that_lead_elsewhere_are_refused(name, tmp_path):
    write_members(tmp_path / "x", {name: b"data"})
    with pytest.raises(InvalidArtifact, match="has the name"):
        artifact.read(tmp_path / "x")


def test_damaged_files_are_refused(kernels, tmp_path, monkeypatch):
    path, good = tmp_path / "x", tmp_path / "good"
    tritonite.save_kernels(good)

    def refused(match):
        with pytest.raises(InvalidArtifact, match=match):
            tritonite.load_kernels(path)

    refused("No such file")
    path.write_bytes(b"no zip file")
    refused("damaged, or no artifact")
    path.write_bytes(good.read_bytes()[:-50])
    refused("damaged, or no artifact")
    data = bytearray(good.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    refused("cannot be loaded")
    write_members(path, {}, format=2)
    refused("format is 2")
    write_members(path, {}, targets=None)
    refused("lists no targets")
    write_members(path, {"entries/a": b"x"}, members={})
    refused("not those that its manifest lists")
    write_members(path, {"entries/a": b"x"}, members={"entries/a": "0"})
    refused("not those that were written")
    metadata = json.dumps({"hash": OTHER}).encode()
    write_members(path, {f"kernels/{HASH}/x.json": metadata, f"kernels/{HASH}/x.cubin": b""})
    refused("another kernel's")
    # Nothing but metadata and one binary: no shared object, which would be code of the host.
    write_members(path, {f"kernels/{HASH}/x.json": metadata, f"kernels/{HASH}/x.so": b""})
    refused("has the files x.json, x.so")
    write_members(path, {f"kernels/{HASH}/x.json": b"[", f"kernels/{HASH}/x.cubin": b""})
    refused("not JSON")
    for limit in ("_MOST_MEMBERS", "_LARGEST_MEMBER", "_LARGEST"):
        with monkeypatch.context() as patch:
            patch.setattr(artifact, limit, 1)
            path.write_bytes(good.read_bytes())
            refused("larger")


@pytest.mark.parametrize("what", ["torch", "triton", "tritonite", "environment"])
def test_other_versions_are_refused(what, kernels, tmp_path):
    path = tmp_path / "x"
    tritonite.save_kernels(path)
    contents = artifact.read(path)
    artifact.check(contents, path)
    contents.facts[what] = {"TRITON_X": "1"} if what == "environment" else "0.0"
    with pytest.raises(MismatchedArtifact, match=r"0\.0|TRITON_X"):
        artifact.check(contents, path)
    if what in ("torch", "tritonite"):
        artifact.check(contents, path, strict=False)


def test_other_devices_are_refused(kernels, tmp_path, monkeypatch, change_device):
    path = tmp_path / "x"
    tritonite.save_kernels(path)
    contents, driver = artifact.read(path), artifact.driver
    change_device(type="cuda", interpreted=False, host_memory=False)
    monkeypatch.setattr(devices, "current_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(devices, "name_of", lambda device: "New GPU")
    for arch, strict in ((90, False), (90, True), (80, False)):
        target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
        monkeypatch.setattr(driver, "_active", type("Driver", (), {"get_current_target": lambda self: target})())
        if arch == 90 and not strict:
            artifact.check(contents, path, strict)
            continue
        with pytest.raises(
            MismatchedArtifact, match="architecture: cuda 90.* has cuda 80" if arch == 80 else "New GPU"
        ):
            artifact.check(contents, path, strict)


@pytest.mark.skipif(not devices.current.interpreted, reason="of the interpreter")
def test_the_interpreter_loads_nothing(kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    tritonite.save_kernels(tmp_path / "x")
    assert tritonite.load_kernels(tmp_path / "x") == 0 and not (tmp_path / "cache").exists()


_BOTH = """
path = {path!r}
x = torch.ones(64)
needed = needed_by(lambda x: (x + x).nonzero(), x)
CompiledKernel.function = None
"""
_WRITING = """
for each in needed:
    compilation.compile_kernel(each.source, TARGET, each.options)
assert tritonite.save_kernels(path) == len(needed) == 3
print(*sorted(compilation.kernel_files()))
"""
_LOADING = """
tritonite.on_compile("raise")
assert tritonite.load_kernels(path) == 3
for each in needed:
    each.load()
with mock.patch.object(CompiledKernel, "run", mock.Mock()) as launch:
    overloads()["add.Tensor"](x, x)
assert launch.call_count == 1
assert [each.from_cache for each in tritonite.stats().compiled] == [True] * 3
print(*sorted(compilation.kernel_files()))
"""


def test_a_process_that_loads_a_file_compiles_nothing(tmp_path):
    both = _BOTH.format(path=str(tmp_path / "model.kernels"))
    # Hashes of strings differ between the processes, and keys of kernels do not.
    written = run(both + _WRITING, tmp_path / "one", anew=True, PYTHONHASHSEED="1")
    assert run(both + _LOADING, tmp_path / "two") == written
