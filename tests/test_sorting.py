"""Sorting where samples do not reach: rows of several blocks, ties, every dtype, replays, and what data decides."""

import functools
import itertools
import unittest.mock

import pytest
import torch
import triton
import triton.language as tl
from conftest import FULL, calls_through, some

import tritonite
from tritonite import devices, registry
from tritonite.engine import histogram
from tritonite.engine.sorting import lookback, radix, thread_tiles
from tritonite.engine.sorting.block import sort_pairs_by_network
from tritonite.engine.sorting.keys import Keys
from tritonite.engine.sorting.table import Slower
from tritonite.errors import Decline
from tritonite.ops import sets, sorting
from tritonite.runtime import contract
from tritonite.runtime.libentry import libentry
from tritonite.testing.samples import DRAWN

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool, torch.uint16]
WAYS = ["in registers", "by radix", "in shared memory"]


@pytest.fixture(params=WAYS)
def way(request, change_tables, change_device):
    """Rows that a program holds, or blocks so small that it takes several programs, which count as NVIDIA's do."""
    if request.param != "in registers":
        if request.param == "in shared memory":
            change_device(ptx=True)
        topk = {"sorted_at_once": 16, "held_bytes": 0, "block": 64}
        topk |= {"own_groups": 8, "least_groups": 16, "most_groups": 64}
        radix = {"held_bytes": 0, "block": 64}
        change_tables(sorting={"network": 32, "radix": radix, "select": {"block": 64}, "topk": topk})
    return request.param


def values(dtype, *shape, device):
    """Few different ones, and every special one."""
    x = torch.randn(shape) * 3
    if dtype.is_floating_point:
        flat = x.round_().view(-1)
        flat[::11], flat[1::13], flat[2::13], flat[3], flat[4] = float("nan"), -0.0, 0.0, float("inf"), -float("inf")
    elif not dtype.is_signed:
        x = x.abs()
    x = x.to(device, dtype)
    # Conversions to bfloat16 on CPUs make negative nans, which ATen's kernels for GPUs put first.
    return x.masked_fill_(x.isnan(), float("nan")) if dtype.is_floating_point else x


def identical(a, b):
    """Return whether all bits but those of nan are equal."""
    if not a.is_floating_point():
        return a.shape == b.shape and bool((a == b).all())
    same = (a == b) & (a.signbit() == b.signbit())
    return a.shape == b.shape and bool((same | (a.isnan() & b.isnan())).all())


def served(name):
    counts = tritonite.stats()[name]
    return counts.launched + counts.replayed > 0 and not counts.declined


@pytest.mark.parametrize(("dtype", "descending", "way"), some(DTYPES, [False, True], WAYS), ids=str, indirect=["way"])
def test_rows_are_sorted_stably(dtype, descending, way, device):
    if dtype is torch.uint16 and device == "cuda":
        pytest.skip("ATen refuses it on GPUs, and so it declines")
    for shape, dim in (((2, 150), 1), ((1 + FULL, 70, 2), 1)):
        x = values(dtype, *shape, device=device)
        expected = torch.sort(x, dim=dim, descending=descending, stable=True)
        with tritonite.use_gems(include="sort*"):
            result = torch.sort(x, dim=dim, descending=descending, stable=True)
        assert identical(result.values, expected.values) and torch.equal(result.indices, expected.indices)
        assert result.values.stride() == expected.values.stride() == result.indices.stride()
    assert served("sort.stable")


@pytest.mark.parametrize(("n", "way"), some([1, 31, 33, 64, 65, 128], WAYS, turns=2), indirect=["way"])
def test_ends_of_blocks(n, way, device):
    x = torch.randint(0, 5, (2, n), device=device)
    expected = torch.sort(x, stable=True)
    into = torch.empty_like(x.t()).t(), torch.empty(n, 2, dtype=torch.int64, device=device).t()
    with tritonite.use_gems(include="sort*"):
        torch.sort(x, stable=True, out=into)
    assert all(torch.equal(a, b) for a, b in zip(into, expected, strict=True))
    assert served("sort.values_stable")


@libentry()
@triton.jit
def _sort_pairs(x, places, NETWORK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    offset = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    key, place = NETWORK(tl.load(x + offset), tl.load(places + offset))
    tl.store(x + offset, key)
    tl.store(places + offset, place)


def test_a_network_of_pairs_sorts(device):
    """The interpreter uses another function instead of the network."""
    x = torch.randint(-3, 3, (4, 16), device=device)
    expected = x.sort(stable=True)
    places = torch.arange(16, device=device).repeat(4, 1)
    _sort_pairs[(1,)](x, places, NETWORK=sort_pairs_by_network, ROWS=4, COLUMNS=16)
    assert torch.equal(x, expected.values) and torch.equal(places, expected.indices)


_KINDS = {
    "all equal": lambda n: torch.full((2, n), 3.0),
    "two values": lambda n: torch.randint(0, 2, (2, n)).float(),
    "in order": lambda n: torch.arange(n).float().repeat(2, 1),
    "in reverse": lambda n: -torch.arange(n).float().repeat(2, 1),
    "nan": lambda n: torch.full((2, n), float("nan")),
    # All small elements are in one group.
    "in one group": lambda n: (torch.arange(n) % 16 != 5).float().repeat(2, 1),
}


@pytest.mark.parametrize(
    ("kind", "dtype", "way"),
    some(list(_KINDS), [torch.float32, torch.int64, torch.bfloat16], WAYS, turns=2),
    ids=str,
    indirect=["way"],
)
def test_the_first_of_equals_are_taken(kind, dtype, way, device):
    for n, order in ((129, (False, True, False)), (700, (True, False, True))):
        x = _KINDS[kind](n).nan_to_num(float("nan") if dtype.is_floating_point else 1).to(device, dtype)
        # Orders alternate, because only keys depend on them.
        for k, largest in zip((1, 7, 30), order, strict=True):
            expected = torch.sort(x, dim=1, descending=largest, stable=True)
            with tritonite.use_gems(include="topk"):
                result = torch.topk(x, k, 1, largest)
            assert torch.equal(result.indices, expected.indices[:, :k])
            assert identical(result.values, x.gather(1, result.indices))
    assert served("topk")


@pytest.mark.parametrize(
    ("kind", "dtype", "ptx"),
    some(list(_KINDS), [torch.float32, torch.int64, torch.bfloat16], [False, True]),
    ids=str,
)
def test_many_of_long_rows_in_order(kind, dtype, ptx, monkeypatch, device, change_device, change_tables):
    """A fifth or nearly half of a row is selected, by several programs; equal elements keep their order."""
    change_device(ptx=ptx)
    held_bytes = 128 * max(4, dtype.itemsize)
    change_tables(sorting={"radix": {"held_bytes": held_bytes}, "select": {"block": 64}})
    monkeypatch.setattr(sorting, "_MANY_OF_LONG", 4)
    taken = unittest.mock.Mock(wraps=sorting.write_few_smallest)
    monkeypatch.setattr(sorting, "write_few_smallest", taken)
    x = _KINDS[kind](300).nan_to_num(float("nan") if dtype.is_floating_point else 1).to(device, dtype)
    x = x[:1, None].expand(1, 2, 300)
    for k, largest in ((60, True), (128, False)):
        expected = torch.sort(x, dim=2, descending=largest, stable=True)
        indices = torch.empty(k, 2, 1, dtype=torch.int64, device=device).permute(2, 1, 0)
        into = torch.empty_like(x[..., :k]), indices
        with tritonite.use_gems(include="topk*", faster_only=False):
            torch.topk(x, k, 2, largest, out=into)
        assert torch.equal(into[1], expected.indices[..., :k])
        assert identical(into[0], x.gather(2, into[1]))
    assert taken.call_count == 2 or device == "cuda"
    assert served("topk.values")


def test_many_of_a_long_row_of_equals(monkeypatch, device, change_tables):
    """A program selects all elements of a block."""
    change_tables(sorting={"radix": {"held_bytes": 4 * 512}, "select": {"few_each": 16}})
    monkeypatch.setattr(sorting, "_MANY_OF_LONG", 4)
    x = torch.ones(2, 1100, device=device)
    with tritonite.use_gems(include="topk*", faster_only=False):
        values, indices = torch.topk(x, 400)
    assert torch.equal(values, x[:, :400])
    assert torch.equal(indices.sort(1).values, torch.arange(400, device=device).expand(2, 400))
    assert served("topk")


@pytest.mark.parametrize("n", [1000, 9000])
def test_rows_of_one_memory_into_another_layout(n, device):
    """Their order in memory says nothing of the order in which the results are written."""
    x = torch.randn(3, 1, n, device=device).expand(3, 2, n)
    for operands in (x, x.transpose(0, 1)):
        expected = torch.topk(operands, 20)
        shape = (operands.shape[1], operands.shape[0], 20)
        into = [torch.empty(shape, dtype=dtype, device=device).transpose(0, 1) for dtype in (x.dtype, torch.int64)]
        with tritonite.use_gems(include="topk*"):
            torch.topk(operands, 20, out=tuple(into))
        assert all(torch.equal(a, b) for a, b in zip(into, expected, strict=True))
    assert served("topk.values")


@libentry()
@triton.jit
def _move_by_digit(x, places, shift, valid, KEYS: tl.constexpr, THREADS: tl.constexpr, EACH: tl.constexpr):
    word, place = (), ()
    for k in tl.static_range(EACH):
        place = place + (thread_tiles.index_in_block(k, THREADS, EACH),)
        word = word + (tl.load(x + place[k]),)
    digits = radix._digits_of(word, shift, valid, KEYS)
    moved, from_place = radix._sort_by_one_digit(radix._own_room(word), word, place, digits)
    for k in tl.static_range(EACH):
        tl.store(x + place[k], moved[k])
        tl.store(places + place[k], from_place[k])


@pytest.mark.parametrize(
    ("each", "shift", "threads", "dtype"),
    some([1, 4, 5, 16], [0, 8, 24], [32, 128], [torch.int32, torch.int64], turns=3),
    ids=str,
)
def test_a_program_sorts_by_a_digit(each, threads, dtype, shift, device):
    """Also where all elements have the same one, and where the last of them are none."""
    n = threads * each
    every = torch.randint(-(2**31), 2**31, (n,), device=device).to(dtype)
    for x in (every, torch.full_like(every, 7), torch.arange(n, device=device).to(dtype) << shift):
        for valid in (n, n - 9):
            digits = (x[:valid].to(torch.int64) + (2**31 if dtype is torch.int32 else 0)) >> shift & 255
            expected = digits.sort(stable=True).indices
            moved, places = x.clone(), torch.empty(n, dtype=torch.int32, device=device)
            facts = {"KEYS": Keys.of(dtype), "THREADS": threads, "EACH": each, "num_warps": threads // 32}
            _move_by_digit[(1,)](moved, places, shift, valid, **facts)
            assert torch.equal(places[:valid], expected.to(torch.int32))
            assert torch.equal(places[valid:], torch.arange(valid, n, device=device, dtype=torch.int32))
            assert torch.equal(moved, x[places.long()])


_SHARING = [torch.float32, torch.int64, torch.int16]
_SHARED = [(), (0,), (1,), (0, 1), (0, 1, 2, 3), (2,), (0, 2)]


@pytest.mark.parametrize(("digits", "dtype"), some(_SHARED, _SHARING, turns=2), ids=str)
def test_digits_that_all_elements_share(digits, dtype, change_tables, device):
    """Whose passes move nothing, in some rows and not in others."""
    change_tables(sorting={"radix": {"block": 64}})
    n = 150 if FULL else 100
    x = torch.zeros(3, n, dtype=torch.int64, device=device)
    for digit in digits:
        x |= torch.randint(0, 120, x.shape, device=device) << 8 * digit
    x[1] = 300
    x[2, 70:] = 2**20
    x = x.to(torch.int32).view(torch.float32) if dtype is torch.float32 else x.to(dtype)
    expected = torch.sort(x, stable=True)
    given = torch.randint(0, 2**20, x.shape, device=device, dtype=torch.int32)
    wanted = ((1, 1, None), (1, 0, None), (0, 1, None), (1, 1, given), (0, 1, given))
    # Two of them by turns, each with every dtype, and with every set of digits; or one.
    turn = _SHARED.index(digits) + 2 * _SHARING.index(dtype)
    for ordered, numbers, numbered in (wanted[turn % 5], wanted[(turn + 1) % 5])[: 1 + FULL]:
        into = torch.full((n, 3), 5, device=device).to(dtype).t() if ordered else None
        indices = torch.full(x.shape, 5, device=device) if numbers else None
        radix.sort_long_rows(x, 1, Keys.of(dtype), into, indices, numbered)
        assert into is None or torch.equal(into, expected.values)
        places = expected.indices if numbered is None else given.gather(1, expected.indices).long()
        assert indices is None or torch.equal(indices, places)


_ROUTES = [(128, "network"), (129, "held"), (511, "held"), (8192, "held"), (8193, "long")]


@pytest.mark.parametrize(("route", "descending"), some(_ROUTES, [False, True]), ids=str)
def test_ends_of_routes(route, descending, device):
    n, way = route
    x = values(torch.float32, 2, n, device=device)
    assert devices.current.kind == "amd" or radix.route(n, Keys.of(x.dtype)) == way
    expected = torch.sort(x, descending=descending, stable=True)
    with tritonite.use_gems(include="sort*", faster_only=False):
        result = torch.sort(x, descending=descending, stable=True)
    assert identical(result.values, expected.values) and torch.equal(result.indices, expected.indices)
    assert served("sort.stable")


@pytest.mark.parametrize(
    ("dtype", "descending"),
    some([torch.float32, torch.float16, torch.int64, torch.uint8], [False, True]),
    ids=str,
)
def test_some_of_a_row_and_numbers_of_its_elements(dtype, descending, change_tables, device):
    """A sort stores fewer elements than the row has, and given numbers in place of indices."""
    change_tables(sorting={"radix": {"block": 64}})
    x = values(dtype, 2, 150 if FULL else 80, device=device)
    given = torch.randint(0, 2**20, x.shape, device=device, dtype=torch.int32)
    expected = torch.sort(x, descending=descending, stable=True)
    for sort in (radix.sort_held_rows, radix.sort_long_rows):
        ordered = torch.full((2, 70), 3, device=device).to(dtype)
        numbers = torch.zeros(2, 70, dtype=torch.int64, device=device)
        sort(x, 1, Keys.of(dtype, descending), ordered, numbers, given)
        assert identical(ordered, expected.values[:, :70])
        assert torch.equal(numbers, given.gather(1, expected.indices)[:, :70].to(torch.int64))
        sort(x, 1, Keys.of(dtype, descending), ordered.zero_(), None)
        assert identical(ordered, expected.values[:, :70])
        sort(x, 1, Keys.of(dtype, descending), None, numbers.zero_())
        assert torch.equal(numbers, expected.indices[:, :70])


def test_calls_that_aten_is_faster_in_decline(change_tables, device):
    slow = Slower(one_long_row=True, top_k=10, wide_ranks=True, sets=True)
    change_tables(sorting={"slower": slow, "radix": {"held_bytes": 400}, "topk": {"held_bytes": 1024}})
    ops, x = registry.overloads(), torch.randint(0, 50, (200,), device=device).float()
    slower = (
        ("sort", (x,)),
        ("topk", (x, 20)),
        ("median.dim", (x[:100].double(), 0)),
        ("_unique2", (x,)),
        ("_unique2", (x.long(), True, True)),
        ("unique_consecutive", (x,)),
    )
    others = (
        ("sort", (x.view(2, 100),)),
        ("topk", (x, 5)),
        ("median.dim", (x[:100], 0)),
        ("_unique2", (x, True, True)),
    )
    with contract.under(contract.settings_of()._replace(faster_only=True)):
        for name, arguments in slower:
            with pytest.raises(tritonite.errors.Decline, match="ATen is faster here"):
                ops[name](*arguments)
        for name, arguments in others:
            ops[name](*arguments)
    for name, arguments in (*slower, *others):
        ops[name](*arguments)


@pytest.mark.parametrize(
    ("k", "way", "dtype", "largest"),
    some([1, 40, 100, 150], WAYS, [torch.float32, torch.bfloat16, torch.int64, torch.uint8], [False, True], turns=2),
    ids=str,
    indirect=["way"],
)
def test_the_largest_and_smallest(dtype, largest, k, way, device):
    x = values(dtype, 2, 150, device=device)
    expected = torch.topk(x, k, 1, largest, True).values
    with tritonite.use_gems(include="topk"):
        for ordered in (True, False):
            result = torch.topk(x, k, 1, largest, ordered)
            assert identical(result.values, x.gather(1, result.indices))
            assert all(len(set(row)) == k for row in result.indices.tolist())
            found = result.values if ordered else result.values.sort(1, descending=largest).values
            assert torch.equal(found.nan_to_num(99), expected.nan_to_num(99))
    assert served("topk")


@pytest.mark.parametrize(
    ("dtype", "nan", "way"),
    some([torch.float32, torch.float16, torch.int64, torch.int8], [False, True], WAYS, turns=2),
    ids=str,
    indirect=["way"],
)
def test_elements_by_their_rank(dtype, nan, way, device):
    x = values(dtype, 3, 151, device=device)
    if dtype.is_floating_point:
        x = x if nan else x.nan_to_num(1.0)
        x[2] = float("nan") if nan else x[2]
    for name, arguments in (("kthvalue", (7, 1)), ("kthvalue", (151, 1)), ("median", (1,)), ("nanmedian", (1,))):
        expected = getattr(torch, name)(x, *arguments)
        overload = name if name == "kthvalue" else f"{name}.dim"
        with tritonite.use_gems(include=overload):
            result = getattr(torch, name)(x, *arguments)
        assert torch.equal(result.values.nan_to_num(99), expected.values.nan_to_num(99))
        assert identical(result.values, x.gather(1, result.indices[:, None])[:, 0])
        assert served(overload)
    for name in ("median", "nanmedian"):
        expected = getattr(torch, name)(x)
        with tritonite.use_gems(include=f"{name}.default"):
            assert torch.equal(getattr(torch, name)(x).nan_to_num(99), expected.nan_to_num(99))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_elements_of_64_bits_by_their_rank_in_shared_memory(dtype, change_device, device):
    """A program holds one row or several short ones. The first digits or the last decide."""
    change_device(ptx=True)
    for shape in ((5, 151), (2, 1030)):
        x = values(dtype, *shape, device=device)
        if dtype is torch.int64:
            x[::2] = torch.randint(-(2**62), 2**62, x[::2].shape, device=device)
        for name, arguments in (("kthvalue", (7, 1)), ("kthvalue", (151, 1)), ("median", (1,)), ("nanmedian", (1,))):
            overload = name if name == "kthvalue" else f"{name}.dim"
            expected = getattr(torch, name)(x, *arguments)
            with tritonite.use_gems(include=overload, faster_only=False):
                result = getattr(torch, name)(x, *arguments)
            assert torch.equal(result.values.nan_to_num(99), expected.values.nan_to_num(99))
            assert identical(result.values, x.gather(1, result.indices[:, None])[:, 0])
            assert served(overload)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_nan_with_a_sign_is_behind_all_numbers(dtype, shared, change_device, device):
    """CPUs put it last, and ATen's kernels for GPUs first."""
    change_device(ptx=shared)
    x = torch.arange(196.0, dtype=dtype, device=device).view(14, 14)
    x[3] = -torch.tensor(float("nan"), dtype=dtype)
    assert x[3].signbit().all()
    with tritonite.use_gems(include=["median", "nanmedian"], faster_only=False):
        assert torch.median(x).isnan()
        # 182 numbers, without those from 42 to 55.
        assert torch.nanmedian(x) == 104
    assert served("median")
    assert served("nanmedian")


def test_calls_drawn_for_gpus_have_no_nan_with_a_sign(change_device):
    """Nor do they have negative zeros, unless the sort is stable."""
    x = torch.tensor([1.0, -float("nan"), -0.0])
    change_device(type="cuda")
    for name in ("median", "sort"):
        for stable in (False, True):
            drawn = DRAWN[name]({"self": x, "stable": stable})["self"]
            assert drawn.signbit().tolist() == [False, False, stable]
            assert drawn.isnan().tolist() == [False, True, False]
        # No operator tells their signs there.
        assert DRAWN[name]({"self": x.to(torch.float8_e5m2)})["self"].dtype is torch.float8_e5m2


@pytest.mark.parametrize(
    ("dtype", "way"), some([torch.float32, torch.int8, torch.bool], WAYS, turns=2), ids=str, indirect=["way"]
)
def test_the_most_frequent(dtype, way, device):
    x = values(dtype, 3, 150, device=device)
    x = x.nan_to_num(0) if dtype.is_floating_point else x
    ordered = x.sort(1).values
    count = (x[:, :, None] == x[:, None, :]).sum(2).amax(1)
    with tritonite.use_gems(include="mode"):
        result = torch.mode(x, 1)
    assert torch.equal((x == result.values[:, None]).sum(1), count)
    for row, value, most in zip(ordered, result.values, count, strict=True):
        assert not any(int((row == other).sum()) == int(most) for other in row[row < value])
    assert torch.equal(x.gather(1, result.indices[:, None])[:, 0], result.values) and served("mode")


@pytest.mark.parametrize(
    ("tests", "invert", "way", "dtype"),
    some(
        [0, 5, 64, 65, 300],
        [False, True],
        WAYS,
        [torch.float32, torch.float16, torch.int8, torch.int16, torch.int64],
        turns=6,
    ),
    ids=str,
    indirect=["way"],
)
def test_elements_are_among_others(dtype, tests, invert, way, device):
    x, others = values(dtype, 5, 40, device=device), values(dtype, tests + 5, device=device)[:tests]
    expected = ((x[..., None] == others).any(-1) != invert) if tests else torch.full_like(x, invert, dtype=torch.bool)
    with tritonite.use_gems(include="isin*"):
        assert torch.equal(torch.isin(x, others, invert=invert), expected)
        assert torch.equal(torch.isin(x.t(), others, invert=invert), expected.t())
        assert torch.isin(2, others).item() == bool((others == 2).any())
        assert torch.equal(torch.isin(x, 2), x == 2)
    assert served("isin.Tensor_Tensor") and served("isin.Scalar_Tensor") and served("isin.Tensor_Scalar")


@pytest.mark.parametrize("count", [8, 300])
def test_a_number_counts_for_less_than_few_elements_alone(count, device):
    """ATen sorts a number with many elements, in float64, and on a CPU compares it with few in theirs."""
    tests = torch.rand(count, device=device)
    tests[2] = 0.1
    for number in (0.1, 0.5, torch.tensor(0.1, dtype=torch.float64, device=device)):
        expected = torch.isin(number, tests)
        with tritonite.use_gems(include="isin*", faster_only=False):
            assert torch.isin(number, tests) == expected
    with tritonite.use_gems(include="isin*", faster_only=False):
        assert torch.isin(0.1, tests).item() == (count == 8 and tritonite.device == "cpu")


@pytest.mark.parametrize("path", ["native", "python"])
def test_data_decides_again_each_time(path, device):
    """Recorded and replayed calls, and one in between whose data ATen refuses."""
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


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_sorter_out_of_range_raises(wrong, path, device):
    bounds, good = torch.tensor([3.0, 1.0, 2.0], device=device), torch.tensor([1, 2, 0], device=device)
    bad = torch.tensor([1, 2, wrong], device=device)
    with tritonite.use_gems(include="searchsorted*"):
        for sorter in (good, bad, good, bad):
            if sorter is bad:
                with pytest.raises(RuntimeError):
                    torch.searchsorted(bounds, bounds, sorter=sorter)
            else:
                assert torch.searchsorted(bounds, bounds, sorter=sorter).tolist() == [2, 0, 1]


def test_a_range_that_is_not_finite_raises(path, device):
    good, bad = torch.tensor([1.0, 3.0, 2.0], device=device), torch.tensor([1.0, float("inf"), 2.0], device=device)
    with tritonite.use_gems(include="histc"):
        for x in (good, bad, good, bad):
            if x is bad:
                with pytest.raises(RuntimeError):
                    torch.histc(x, 4)
            else:
                assert torch.histc(x, 4).tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_integers_next_to_which_their_dtype_has_none_are_told(dtype, device):
    info = torch.iinfo(dtype)
    for low, high, held in ((5, 5, True), (3, 9, True), (info.max, info.max, False), (info.min, info.min, False)):
        extrema = tuple(torch.tensor(x, dtype=dtype, device=device) for x in (low, high))
        limits, flag = histogram.limits_of_extrema(dtype, extrema)
        (edges,) = limits.edges
        assert (int(flag) == 0) is held
        assert not held or edges.tolist() == [low - (low == high), high + (low == high)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_limits_of_bins_have_the_precision_of_the_elements(dtype, device, path):
    """Numbers that float32 does not hold are the first and the last bin's edges, and inside."""
    x = torch.tensor([0.1, 0.3, 0.7, 0.7], dtype=dtype, device=device)
    with tritonite.use_gems(include="histc"):
        for _ in range(2):
            assert torch.histc(x, 3, 0.1, 0.7).tolist() == [1, 1, 2]
    assert served("histc")


@pytest.mark.parametrize("ptx", [False, True], ids=["in registers", "in shared memory"])
def test_few_elements_are_counted_by_one_program(ptx, device, monkeypatch, change_device, change_tables):
    """One program stores the result. Several add to it if sums are exact. An output with gaps is copied to last."""
    change_tables(histogram={"block": 128})
    change_device(ptx=ptx)
    monkeypatch.setattr(histogram, "zeros", noting := _Noting(histogram.zeros))
    monkeypatch.setitem(histogram._EXACT, torch.float32, 601)
    few, many, more = (torch.rand(n, device=device) for n in (100, 600, 700))
    gaps = torch.full((20,), -1.0, device=device)
    calls = ((few, None, 0), (many, None, 0), (more, None, 1), (few, gaps[::2], 1), (few.double(), None, 0))
    for x, out, allocates in calls:
        noting.calls = 0
        expected = torch.histc(x, 10, 0, 1)
        with tritonite.use_gems(include="histc*", faster_only=False):
            found = torch.histc(x, 10, 0, 1) if out is None else torch.histc(x, 10, 0, 1, out=out)
        assert torch.equal(found, expected) and noting.calls == allocates
    assert bool(gaps[1::2].eq(-1).all()) and served("histc") and served("histc.out")


class _Noting:
    """A function that notes its calls."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool], ids=str)
def test_slices_in_order(dtype, change_tables, device):
    """There are several rounds of merging."""
    change_tables(sorting={"merge": {"runs": 4}})
    x = torch.randint(0, 2, (90, 3, 2), device=device).to(dtype)
    # On GPUs slices between others are ATen's, whose layout data decides.
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
def by_bits(change_tables):
    """Compare vectors of a few hundred elements by bit sets, in several blocks."""
    bitmap = {"least": 100, "block": 128, "threads": 32, "each": 2, "words": 16, "shared_bytes": 400}
    radix = {"held_bytes": 0, "block": 256}
    change_tables(sorting={"bitmap": bitmap, "radix": radix, "slower": {"sets": True}})


_RANGES = ((0, 6), (-300, 900), (-(2**63), 2**63), (-(2**63), 50 - 2**63), (2**63 - 50, 2**63))


@pytest.mark.parametrize(
    ("dtype", "counts"), some([torch.int64, torch.int32, torch.uint8, torch.bool], [False, True]), ids=str
)
def test_integers_of_a_range(dtype, counts, by_bits, device):
    """Narrow enough for shared memory, for bits in memory, or for none; at both ends of what there are."""
    info = torch.iinfo(torch.uint8 if dtype is torch.bool else dtype)
    if dtype is torch.bool and tritonite.device == "cuda":
        counts = True
    for low, high in _RANGES:
        low, high = min(max(low, info.min), info.max - 50), max(min(high - 1, info.max), info.min + 50)
        x = torch.randint(low, high, (301,)).to(device, dtype)
        x[6], x[300] = high, low
        # For bools inverse and counts come together, as in ATen on a GPU.
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
def test_16_bit_floats_as_bits(dtype, special, by_bits, device):
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
def test_integers_of_a_wide_range(faster_only, path, by_bits, monkeypatch, device, change_device):
    """They are sorted, or ATen's if that is faster, and so are later calls with such sizes."""
    change_device(aten_measured=True)
    monkeypatch.setattr(contract, "_comparing", True)
    near = torch.arange(300, device=device) // 2
    far = near * 10**9
    with tritonite.use_gems(include="_unique2", faster_only=faster_only):
        for x in (near, far, near, far[:200], near[:200]):
            assert torch.equal(torch.unique(x), x[::2])
    counts = tritonite.stats()["_unique2"]
    # Only the native dispatcher keeps what has been found of a call.
    declined = (4 if path == "native" else 2) if faster_only else 0
    assert counts.launched + counts.replayed == 5 - declined and not counts.unrecordable
    assert sum(counts.declined.values()) == declined


def test_long_rows_decline_where_programs_may_not_wait(device, change_device):
    change_device(interpreted=False, forward_progress=False)
    with pytest.raises(tritonite.errors.Decline):
        lookback.check_length(5000)
    change_device(forward_progress=True)
    lookback.check_length(5000)


@pytest.mark.parametrize("ptx", [False, True], ids=["in registers or outside", "in shared memory"])
@pytest.mark.parametrize("bins", [3, 1000, 1100, 10239, 10241])
def test_bins_on_either_side_of_where_they_are_counted(ptx, bins, change_tables, device, change_device):
    change_tables(histogram={"block": 128})
    change_device(ptx=ptx)
    for n in (1, 700, 3000) if FULL else (1, 700):
        x = torch.randint(0, bins, (n,), device=device)
        with tritonite.use_gems(include=["bincount", "histc"]):
            found = torch.bincount(x), torch.bincount(x, x.float()), torch.bincount(x, x), torch.histc(x.float(), bins)
            one, inside = torch.bincount(x * 0 + bins - 1), torch.histc(x.double(), bins, 1, bins)
        expected = torch.bincount(x), torch.bincount(x, x.float()), torch.bincount(x, x), torch.histc(x.float(), bins)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert one.tolist() == [0] * (bins - 1) + [n]
        assert torch.equal(inside, torch.histc(x.double(), bins, 1, bins))
    assert served("bincount") and served("histc")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8], ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 100, 1000])
def test_searches_that_begin_in_shared_memory(dtype, length, change_tables, device, change_device):
    """The search visits the elements that ATen visits, so that nan among boundaries gives ATen's indices."""
    change_tables(searching={"shared_programs": 1, "shared_queries": 64, "shared_levels": {4: 6, 8: 5}})
    change_device(ptx=True)
    bounds = values(dtype, length, device=device) if length > 5 else torch.ones(length, dtype=dtype, device=device)
    bounds, x = bounds.sort().values, values(dtype, 40 if FULL else 5, 33, device=device)
    for right, queries in itertools.product((False, True), (x, x.t())):
        expected = torch.searchsorted(bounds, queries.contiguous(), right=right)
        with tritonite.use_gems(include="searchsorted*"):
            assert torch.equal(torch.searchsorted(bounds, queries, right=right), expected)
    assert served("searchsorted.Tensor")


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
    # The memory is that of more elements, and it is nobody else's.
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
def test_runs_of_blocks_whose_programs_still_work(whole, at_once, device):
    """Word of single blocks, as far as one of all blocks up to it, if there is one; several blocks have no run."""
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


def test_bools_of_which_aten_gives_other_results_are_its_on_gpus(monkeypatch, device):
    x = torch.tensor([True, False, True], device=device)
    monkeypatch.setattr("tritonite.ops.aten.on_cpu", lambda: False)
    for host, asked in ((sets.unique, (True,)), (sets.unique2, (True, True)), (sets.unique2, (True, False, True))):
        with pytest.raises(Decline, match="bools"):
            host(x, *asked)
    with tritonite.use_gems(include="_unique2", faster_only=False):
        values, places, lengths = torch.ops.aten._unique2(x, True, True, True)
    assert served("_unique2")
    assert (values.tolist(), places.tolist(), lengths.tolist()) == ([False, True], [1, 0, 1], [1, 2])


def test_a_few_tests_that_are_no_vector_are_atens_to_refuse(device):
    """If ATen does not sort, it compares all pairs through a view."""
    x, tests = torch.arange(9.0, device=device), torch.arange(600.0, device=device).view(-1, 4)[:, :3]
    with tritonite.use_gems(include="isin.Tensor_Tensor", faster_only=False):
        assert torch.isin(x, tests).tolist() == [True, True, True, False, True, True, True, False, True]
        assert torch.isin(x, tests[:4, 0]).tolist() == [True, False, False, False, True, False, False, False, True]
        assert served("isin.Tensor_Tensor")
        with pytest.raises(RuntimeError, match="view size"):
            torch.isin(x, tests[:4])


def test_empty_sets_have_indices_on_gpus(monkeypatch, device):
    """ATen's kernels for GPUs return indices whether they are asked for or not."""
    monkeypatch.setattr("tritonite.ops.aten.on_cpu", lambda: False)
    for dtype in (torch.float32, torch.bool):
        found = tritonite.overloads()["_unique2"](torch.empty(0, 3, dtype=dtype, device=device), True, False, True)
        assert [tuple(part.shape) for part in found] == [(0,), (0, 3), (0,)]
        assert [part.dtype for part in found] == [dtype, torch.int64, torch.int64]
