"""Unique elements and runs: by sorting, by a bitmap, of rows, and over several blocks."""

import functools

import pytest
import torch
import triton
import triton.language as tl
from conftest import WAYS, calls_through, served, some
from ties import identical, values

import tritonite
from tritonite.engine.sorting import lookback
from tritonite.errors import Decline
from tritonite.ops import sets
from tritonite.runtime import contract
from tritonite.runtime.libentry import libentry


@pytest.mark.parametrize("path", ["native", "python"])
def test_sizes_that_data_decides_are_read_in_every_call(path, device):
    """Calls are recorded and replayed. ATen refuses the data of one call in between."""
    bad = torch.tensor([1, -1, 2], device=device)
    with calls_through(path), tritonite.use_gems(include=["_unique2", "bincount", "unique_dim"]):
        for x in ([1, 1, 2], [3, 1, 2], None, [0, 0, 0]):
            if x is None:
                with pytest.raises(RuntimeError):
                    torch.bincount(bad)
                continue
            given = torch.tensor(x, device=device)
            assert torch.unique(given).tolist() == sorted(set(x))
            assert torch.bincount(given).tolist() == [x.count(i) for i in range(max(x) + 1)]
            rows = torch.unique(given[:, None].expand(3, 2).contiguous(), dim=0)
            assert rows.tolist() == [[i, i] for i in sorted(set(x))]
    for name in ("_unique2", "bincount", "unique_dim"):
        counts = tritonite.stats()[name]
        assert counts.launched + counts.replayed >= 3 and not counts.unrecordable


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool], ids=str)
def test_unique_slices(dtype, change_tables, device):
    """The merge sort of slices has several rounds."""
    change_tables(sorting={"merge": {"runs": 4}})
    x = torch.randint(0, 2, (90, 3, 2), device=device).to(dtype)
    # On GPUs ATen serves other dimensions, where the layout of the result depends on the data.
    for dim in (0, 1, 2) if device == "cpu" else (0,):
        expected = torch.unique(x, dim=dim, return_inverse=True, return_counts=True)
        with tritonite.use_gems(include="unique_dim"):
            result = torch.unique(x, dim=dim, return_inverse=True, return_counts=True)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert served("unique_dim")


@pytest.mark.parametrize(("way", "inverse"), some(WAYS, [False, True]), indirect=["way"])
def test_unique_elements(inverse, way, device):
    for x in (torch.randint(0, 50, (4, 70), device=device), torch.randn(280, device=device).round()):
        expected = torch.unique(x, return_inverse=inverse, return_counts=True)
        with tritonite.use_gems(include="_unique2"):
            result = torch.unique(x, return_inverse=inverse, return_counts=True)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert served("_unique2")


@pytest.fixture
def small_bitmaps(change_tables):
    """Find unique elements of a few hundred by bitmaps, in several blocks."""
    bitmap = {"least": 100, "block": 128, "threads": 32, "each": 2, "words": 16, "shared_bytes": 400}
    radix = {"held_bytes": 0, "block": 256}
    change_tables(sorting={"bitmap": bitmap, "radix": radix, "slower": {"sets": True}})


_RANGES = ((0, 6), (-300, 900), (-(2**63), 2**63), (-(2**63), 50 - 2**63), (2**63 - 50, 2**63))


@pytest.mark.parametrize(
    ("dtype", "counts"), some([torch.int64, torch.int32, torch.uint8, torch.bool], [False, True]), ids=str
)
def test_unique_integers_by_a_bitmap(dtype, counts, small_bitmaps, device):
    """Ranges fit in shared memory, in global memory, or in neither, and lie at both ends of the dtype's range."""
    info = torch.iinfo(torch.uint8 if dtype is torch.bool else dtype)
    if dtype is torch.bool and tritonite.device == "cuda":
        counts = True
    for low, high in _RANGES:
        low, high = min(max(low, info.min), info.max - 50), max(min(high - 1, info.max), info.min + 50)
        x = torch.randint(low, high, (301,)).to(device, dtype)
        x[6], x[300] = high, low
        # For bools on a GPU inverse and counts are only asked for together.
        together = dtype is torch.bool and tritonite.device == "cuda"
        for given, inverse in ((x, together), (x[::2], True)) if high - low < 2000 else ((x, True),):
            expected = torch.unique(given, return_inverse=inverse, return_counts=counts)
            with tritonite.use_gems(include="_unique2", faster_only=False):
                found = torch.unique(given, return_inverse=inverse, return_counts=counts)
            pairs = zip(found, expected, strict=True) if inverse or counts else ((found, expected),)
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    assert served("_unique2")


@pytest.mark.parametrize(
    ("special", "dtype"), some([1.0, -0.0, float("nan"), float("inf")], [torch.float16, torch.bfloat16]), ids=str
)
def test_unique_16_bit_floats_by_a_bitmap(dtype, special, small_bitmaps, device):
    # A CPU may give nan a sign, which ATen's kernels for GPUs sort by.
    x = torch.cat([torch.randn(300), torch.tensor([0.0, special, special, -1.0])]).to(device).to(dtype).repeat(2)
    expected = torch.unique(x, return_inverse=True, return_counts=True)
    with tritonite.use_gems(include="_unique2", faster_only=False):
        found = torch.unique(x, return_inverse=True, return_counts=True)
        alone = torch.unique(x)
    for a in (found[0], alone):
        assert torch.allclose(a, expected[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])
    assert served("_unique2")


@pytest.mark.parametrize("faster_only", [False, True])
def test_unique_integers_of_a_wide_range(faster_only, path, small_bitmaps, monkeypatch, device, change_device):
    """Integers are sorted, or go to ATen if that is faster, and so do later calls of the same shape."""
    change_device(aten_measured=True)
    monkeypatch.setattr(contract, "_comparing", True)
    near = torch.arange(300, device=device) // 2
    far = near * 10**9
    with tritonite.use_gems(include="_unique2", faster_only=faster_only):
        for x in (near, far, near, far[:200], near[:200]):
            assert torch.equal(torch.unique(x), x[::2])
    counts = tritonite.stats()["_unique2"]
    # Only the native dispatcher remembers that the range of an earlier call was too wide.
    declined = (4 if path == "native" else 2) if faster_only else 0
    assert counts.launched + counts.replayed == 5 - declined and not counts.unrecordable
    assert sum(counts.declined.values()) == declined


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000])
def test_runs_of_several_blocks(dtype, n, change_tables, device):
    change_tables(sorting={"runs": {"written": 128}})
    x = values(dtype, n, 2, device=device)[:, 0] if n > 5 else torch.ones(n, dtype=dtype, device=device)
    expected = torch.unique_consecutive(x, return_inverse=True, return_counts=True)
    with tritonite.use_gems(include="unique_consecutive"):
        result = torch.unique_consecutive(x, return_inverse=True, return_counts=True)
        alone = torch.unique_consecutive(x)
    # ATen's kernels for GPUs keep the last of equal zeros, not the first.
    same = identical if device == "cpu" else functools.partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    assert same(result[0], expected[0]) and same(alone, expected[0])
    assert torch.equal(result[1], expected[1]) and torch.equal(result[2], expected[2])
    # The storage has room for more elements, and no other tensor shares it.
    assert alone.is_contiguous() and not alone._is_view() and not alone.storage_offset()
    assert served("unique_consecutive")


@libentry()
@triton.jit
def _before(out, words, block, AT_ONCE: tl.constexpr):
    count, last = lookback.runs_before(words, block, tl.full((), 7, tl.int32), tl.full((), 1000, tl.int32), AT_ONCE)
    tl.store(out, count)
    tl.store(out + 1, last)


@pytest.mark.parametrize("whole", [-1, 0, 5, 8, 13])
@pytest.mark.parametrize("at_once", [2, 4, 32])
def test_look_back_over_blocks_that_are_not_complete(whole, at_once, device):
    """Programs have published the runs of their own block, or of all blocks up to it. Several blocks have no run."""
    words = [count << 32 | (start + 1) << 2 | 1 for count, start in ((2, 9), (0, -1), (0, -1), (4, 13)) * 4][:14]
    words[0] += 1
    if whole > 0:
        words[:whole] = [(1 << 40) | 1] * whole
        words[whole] = 100 << 32 | 51 << 2 | 2
    expected = sum(word >> 32 for word in words[max(whole, 0) :])
    words = torch.tensor([*words, 0], device=device)
    out = torch.zeros(2, dtype=torch.int32, device=device)
    _before[(1,)](out, words, 14, AT_ONCE=at_once, num_warps=1)
    last = max([50] * (whole > 0) + [13 if whole < 13 else 50])
    assert out.tolist() == [expected, last]
    assert int(words[14]) == (expected + 7) << 32 | 1001 << 2 | 2


def test_unique_bools_decline_on_gpus_where_aten_differs(monkeypatch, device):
    x = torch.tensor([True, False, True], device=device)
    monkeypatch.setattr("tritonite.ops.aten.on_cpu", lambda: False)
    for host, asked in ((sets.unique, (True,)), (sets.unique2, (True, True)), (sets.unique2, (True, False, True))):
        with pytest.raises(Decline, match="bools"):
            host(x, *asked)
    with tritonite.use_gems(include="_unique2", faster_only=False):
        values, places, lengths = torch.ops.aten._unique2(x, True, True, True)
    assert served("_unique2")
    assert (values.tolist(), places.tolist(), lengths.tolist()) == ([False, True], [1, 0, 1], [1, 2])


def test_unique_of_no_elements_returns_indices_on_gpus(monkeypatch, device):
    """ATen's kernels for GPUs return indices whether they are asked for or not."""
    monkeypatch.setattr("tritonite.ops.aten.on_cpu", lambda: False)
    for dtype in (torch.float32, torch.bool):
        found = tritonite.overloads()["_unique2"](torch.empty(0, 3, dtype=dtype, device=device), True, False, True)
        assert [tuple(part.shape) for part in found] == [(0,), (0, 3), (0,)]
        assert [part.dtype for part in found] == [dtype, torch.int64, torch.int64]
