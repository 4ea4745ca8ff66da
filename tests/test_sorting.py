"""Sorting and selection where samples do not reach: rows of several blocks, ties, every dtype."""

import unittest.mock

import pytest
import torch
import triton
import triton.language as tl
from conftest import FULL, WAYS, served, some
from ties import identical, values

import tritonite
from tritonite import devices, registry
from tritonite.engine.sorting import lookback, radix, thread_tiles
from tritonite.engine.sorting.block import sort_pairs_by_network
from tritonite.engine.sorting.keys import Keys
from tritonite.engine.sorting.table import Slower
from tritonite.ops import sorting
from tritonite.runtime import contract
from tritonite.runtime.libentry import libentry
from tritonite.testing.samples import DRAWN

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool, torch.uint16]


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
def test_rows_around_the_sizes_of_blocks(n, way, device):
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
    """Launch the network itself. In the interpreter the engine uses NumPy's sort instead."""
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
def test_topk_takes_the_first_of_equal_elements(kind, dtype, way, device):
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
def test_topk_with_large_k_of_long_rows(kind, dtype, ptx, monkeypatch, device, change_device, change_tables):
    """Several programs select a fifth or nearly half of a row. Equal elements keep their order."""
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


def test_topk_with_large_k_of_equal_elements(monkeypatch, device, change_tables):
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
def test_topk_of_rows_in_another_order_than_the_results(n, device):
    """The order of the rows in memory differs from the order in which results are written."""
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
    """Random digits, equal digits, ascending digits, and a block whose last elements are behind the row's end."""
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
    """A pass by a digit that all elements of a row share moves nothing. Rows differ in the digits that they share."""
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
    # Each combination runs two of these, or one, so that every dtype and every set of digits gets all of them.
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
def test_rows_around_the_limits_of_each_route(route, descending, device):
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
def test_sorts_store_part_of_a_row_and_given_numbers(dtype, descending, change_tables, device):
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


def test_calls_that_aten_serves_faster_decline(change_tables, device):
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
def test_topk_of_the_largest_and_smallest(dtype, largest, k, way, device):
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
def test_kthvalue_and_median(dtype, nan, way, device):
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
def test_kthvalue_and_median_of_64_bits_in_shared_memory(dtype, change_device, device):
    """A program holds one row or several short rows. Either the first digits or the last ones decide."""
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
def test_median_of_negative_nan(dtype, shared, change_device, device):
    """A negative nan is behind all numbers, as on a CPU. ATen's kernels for GPUs sort it first."""
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


def test_inputs_drawn_for_gpus_have_no_negative_nan(change_device):
    """Unless a sort is stable, they have no negative zeros either, because ATen's order of them is open."""
    x = torch.tensor([1.0, -float("nan"), -0.0])
    change_device(aten="cuda")
    for name in ("median", "sort"):
        for stable in (False, True):
            drawn = DRAWN[name]({"self": x, "stable": stable})["self"]
            assert drawn.signbit().tolist() == [False, False, stable]
            assert drawn.isnan().tolist() == [False, True, False]
        # No operator distinguishes the signs of float8 on GPUs.
        assert DRAWN[name]({"self": x.to(torch.float8_e5m2)})["self"].dtype is torch.float8_e5m2


@pytest.mark.parametrize(
    ("dtype", "way"), some([torch.float32, torch.int8, torch.bool], WAYS, turns=2), ids=str, indirect=["way"]
)
def test_mode(dtype, way, device):
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


def test_long_rows_decline_where_programs_may_not_wait(device, change_device):
    change_device(interpreted=False, forward_progress=False)
    with pytest.raises(tritonite.errors.Decline):
        lookback.check_length(5000)
    change_device(forward_progress=True)
    lookback.check_length(5000)
