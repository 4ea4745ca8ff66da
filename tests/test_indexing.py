"""Indexing beyond the sizes of samples: sorts of several blocks, sums over programs, and indices out of range."""
# Over 500 lines: reads and writes by index tensors share the drawn calls and the reference.

import importlib
import itertools

import pytest
import torch
from conftest import FULL, calls_through, some

import tritonite
from tritonite.engine.indexing import compact, read, write
from tritonite.errors import Decline

conditional, embedding, indexing, scatter = (
    importlib.import_module(f"tritonite.ops.{name}") for name in ("conditional", "embedding", "indexing", "scatter")
)
# Divisor of sizes and blocks in the interpreter, which takes seconds for full sizes.
LESS = 1 if FULL else 4


@pytest.fixture
def small_sorts(change_tables):
    """Make blocks so small that a few hundred rows take two rounds of merging."""
    change_tables(indexing={"segments": {"sorted": 128 // LESS, "merged": 64 // LESS, "runs": 2}})


@pytest.mark.parametrize("different", [1, 3, 40, 10_000], ids="{} rows".format)
@pytest.mark.parametrize("n", [17, 500 // LESS])
def test_embedding_gradients_are_reproducible(different, n, device, small_sorts):
    grad = torch.randn(n, 20, device=device)
    ids = torch.randint(0, min(different, 700), (n,), device=device)
    exact = torch.zeros(700, 20, dtype=torch.float64, device=device).index_add_(0, ids, grad.double())
    with tritonite.use_gems():
        result = torch.ops.aten.embedding_dense_backward(grad, ids, 700, -1, False)
        again = torch.ops.aten.embedding_dense_backward(grad, ids, 700, -1, False)
    assert (
        tritonite.stats()["embedding_dense_backward"].launched + tritonite.stats()["embedding_dense_backward"].replayed
    )
    torch.testing.assert_close(result, exact.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(result, again)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.float64], ids=str)
def test_index_put_accumulates_at_few_indices(dtype, device, small_sorts):
    x = torch.zeros(5, 6, dtype=dtype, device=device)
    first, second = (
        torch.randint(-5, 5, (300 // LESS,), device=device),
        torch.randint(0, 6, (300 // LESS,), device=device),
    )
    values = torch.randint(0, 2, (300 // LESS,), device=device).to(dtype)
    expected = x.index_put((first, second), values, accumulate=True)
    with tritonite.use_gems():
        assert torch.equal(x.index_put((first, second), values, accumulate=True), expected)
    assert tritonite.stats()["index_put"].launched


class _Noting:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


@pytest.mark.parametrize(
    "dtype, width", [(torch.float16, 600), (torch.float32, 513), (torch.uint8, 2048), (torch.int64, 130)], ids=str
)
@pytest.mark.parametrize("dim", [1, 2])
def test_columns_selected_from_rows_in_shared_memory(dtype, width, dim, device, monkeypatch, change_device):
    change_device(ptx=True, programs=2)
    monkeypatch.setattr(read, "_read_from_shared", noting := _Noting(read._read_from_shared))
    shape = (37, width) if dim == 1 else (7, 5, width)
    # Rows have gaps and belong to several programs.
    x = torch.randint(0, 100, (*shape[:-1], width + 24), device=device).to(dtype)[..., :width]
    for index_dtype, count in itertools.product((torch.int64, torch.int32), (width // 2, 2 * width + 3)):
        index = torch.randint(0, width, (count,), dtype=index_dtype, device=device)
        expected = x.index_select(dim, index)
        (result,) = tritonite.overloads()["index_select"].results((x, dim, index), {})
        assert torch.equal(result, expected)
        assert torch.equal(tritonite.overloads()["index.Tensor"](x, [*[None] * dim, index.long() - width]), expected)
    assert noting.launches == 8


@pytest.mark.parametrize(
    "dtype, width", [(torch.float16, 2048), (torch.float32, 1500), (torch.uint8, 3000), (torch.int64, 400)], ids=str
)
def test_columns_selected_from_slices_of_rows(dtype, width, device, monkeypatch, change_device, change_tables):
    change_device(ptx=True, programs=2)
    change_tables(indexing={"shared_rows": {"held_bytes": 2048}})
    monkeypatch.setattr(read, "_read_from_slices", noting := _Noting(read._read_from_slices))
    x = torch.randint(0, 100, (5, width + 24), device=device).to(dtype)[:, :width]
    for index_dtype, count in itertools.product((torch.int64, torch.int32), (width // 2, width + 3)):
        index = torch.randint(0, width, (count,), dtype=index_dtype, device=device)
        assert torch.equal(tritonite.overloads()["index_select"](x, 1, index), x.index_select(1, index))
    assert noting.launches == 4


def test_columns_out_of_range_stop_a_program(device, change_device):
    if device == "cuda":
        pytest.skip("the device's context would be lost")
    change_device(ptx=True, programs=2)
    x, index = torch.randn(20, 512, device=device), torch.full((512,), 512, device=device)
    with pytest.raises(Exception, match="out of bounds"):
        tritonite.overloads()["index_select"](x, 1, index)


@pytest.mark.parametrize("n", [0, 1, 4096, 4097, 9000])
def test_one_block_launches_no_scan_of_counts(n, device, path, monkeypatch):
    monkeypatch.setattr(compact, "_scan_counts", noting := _Noting(compact._scan_counts))
    x = torch.randn(n, device=device) > 0.5
    for _ in range(2):
        with tritonite.use_gems(include=["nonzero", "masked_select"]):
            places, chosen = x.nonzero(), x.masked_select(x)
        assert torch.equal(places, x.nonzero()) and torch.equal(chosen, x.masked_select(x))
    assert tritonite.stats()["nonzero"].launched and tritonite.stats()["masked_select"].launched
    assert (noting.launches == 0) == (1 <= n <= 4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_mask_selects_rows_or_elements(dims, dtype, device, path):
    x = torch.randn(6, 7, 5, device=device).to(dtype)
    mask = torch.rand(x.shape[:dims], device=device) > 0.5
    for chosen in (mask, torch.zeros_like(mask), torch.ones_like(mask)):
        expected = x[chosen]
        with tritonite.use_gems(include=["index.Tensor"]):
            for _ in range(2):
                result = x[chosen]
                assert torch.equal(result, expected) and result.stride() == expected.stride()
    counts = tritonite.stats()["index.Tensor"]
    assert not counts.declined and not counts.unrecordable and counts.launched + counts.replayed == 6


def test_one_value_is_put_under_a_mask(device):
    x = torch.randn(6, 7, 5, device=device)
    for mask in (x > 0, x[..., 0] > 0):
        for value in (torch.tensor([2.0], device=device), torch.tensor(3.0)):
            expected = x.index_put((mask,), value)
            with tritonite.use_gems():
                assert torch.equal(x.index_put((mask,), value), expected)
    assert tritonite.stats()["index_put"].launched == 4


@pytest.mark.declines("the indices are out of range")
@pytest.mark.skipif(tritonite.device == "cuda", reason="an assertion ends a GPU's context")
@pytest.mark.parametrize("place", [5, -6, 2**40])
def test_indices_out_of_range_raise_atens_error(place, path):
    x, index = torch.randn(5, 3), torch.tensor([0, place])
    calls = {
        "index.Tensor": lambda: x[index],
        "embedding": lambda: torch.embedding(x, index),
        "index_select": lambda: x.index_select(0, index),
        "index_select.out": lambda: torch.index_select(x[:, :0], 0, index, out=torch.empty(0)),
        "gather": lambda: x.gather(0, index[:, None]),
        "scatter_.value": lambda: x.clone().scatter_(0, index[:, None], 1.0),
        "index_put_": lambda: x.clone().index_put_((index,), x[0]),
        "index_add_": lambda: x.clone().index_add_(0, index, x[:2]),
    }
    for name, call in calls.items():
        raised = []
        for chosen in ([], [name]):
            with tritonite.use_gems(include=chosen), pytest.raises((IndexError, RuntimeError)) as error:
                call()
            raised.append(error.type)
        assert raised[0] is raised[1], name


@pytest.mark.parametrize("number", [2, True])
def test_numbers_put_into_bools(number, device):
    x, index = torch.zeros(2, 4, dtype=torch.bool, device=device), torch.tensor([[1, 1], [0, 3]], device=device)
    with tritonite.use_gems():
        results = x.scatter(1, index, number), torch.ops.aten.scatter.value_reduce(x, 1, index, number, reduce="add")
    for result in results:
        assert torch.equal(result.view(torch.uint8), x.scatter(1, index, True).view(torch.uint8))
    assert {"scatter.value", "scatter.value_reduce"} <= tritonite.stats().keys()


@pytest.mark.parametrize("path", ["native", "python"])
def test_a_negative_number_of_repeats_raises(path, device):
    """Calls are recorded and replayed, on a GPU as well. The next call is served."""
    good, bad = torch.tensor([2, 0, 1], device=device), torch.tensor([2, -1, 1], device=device)
    with calls_through(path), tritonite.use_gems(include=["repeat_interleave*"]):
        for repeats in (bad, good, bad, good, bad):
            if repeats is bad:
                with pytest.raises(RuntimeError):
                    torch.repeat_interleave(repeats)
            else:
                assert torch.repeat_interleave(repeats).tolist() == [0, 0, 2]
    assert path == "python" or tritonite.stats()["repeat_interleave.Tensor"].replayed


@pytest.mark.parametrize("name", ["scatter_add", "scatter", "scatter_reduce"])
def test_indices_into_no_elements_have_atens_outcome(name, device):
    """On a GPU, where ATen returns a result, a kernel's assertion would end the process."""
    x, index, source = (torch.zeros(7, n, device=device) for n in (0, 5, 5))
    more = ("sum",) if name == "scatter_reduce" else ()
    outcomes = []
    for scope in (tritonite.use_gems(include=()), tritonite.use_gems()):
        with scope:
            try:
                outcomes.append(getattr(x, name)(1, index.long(), source, *more).shape)
            except RuntimeError as error:
                outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


def test_a_source_too_small_for_its_mask_raises_as_atens(device):
    """For a gradient, a kernel's assertion would stop the program. Later calls are served."""
    grad, mask = torch.ones(4, 5, device=device), torch.ones(4, 5, dtype=torch.bool, device=device)
    with tritonite.use_gems(include=["masked_scatter_backward"]):
        with pytest.raises(RuntimeError):
            torch.ops.aten.masked_scatter_backward(grad, mask, [5])
        assert torch.equal(torch.ops.aten.masked_scatter_backward(grad, mask, [20]), torch.ones(20, device=device))


@pytest.mark.parametrize("name", ["scatter_add", "scatter"])
def test_a_zero_dim_index_into_an_empty_source_declines(name, device):
    x, index, source = torch.tensor(-1, device=device), torch.tensor(0, device=device), torch.zeros(0, device=device)
    with pytest.raises(tritonite.errors.Decline, match="larger than a source"):
        tritonite.overloads()[f"{name}.src" if name == "scatter" else name](x, 0, index, source.long())


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.complex128], ids=str)
def test_indices_of_columns_are_shared_by_rows(dtype, device, path):
    """There are several programs, each of several rows, with partial blocks of columns."""
    x = torch.randint(-9, 9, (11, 300), device=device).to(dtype)
    for index in (
        torch.randint(0, 300, (417,), device=device),
        torch.randint(0, 300, (834,), device=device)[::2].int(),
    ):
        places, one = index.long().unique()[:100], x[:, :1].expand(11, 100)
        expected = x.index_select(1, index), x.index_copy(1, places, one)
        with tritonite.use_gems(include=["index_select", "index_copy"]):
            found = x.index_select(1, index), x.index_copy(1, places, one)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert _served("index_select") == _served("index_copy") == 2


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _served(name):
    counts = tritonite.stats()[name]
    assert not counts.declined and not counts.unrecordable, counts
    return counts.launched + counts.replayed


@pytest.mark.parametrize(
    ("dtype", "path"),
    some([torch.float16, torch.float32, torch.int64, torch.bool, torch.complex64], ["native", "python"]),
    ids=str,
    indirect=["path"],
)
def test_deterministic_mode_adds_up_in_order(dtype, device, path, small_sorts, deterministic):
    def drawn(*shape):
        return torch.randint(0, 3, shape, device=device).to(dtype)

    x, rows, columns = (
        drawn(5, 7),
        torch.randint(0, 5, (300 // LESS,), device=device),
        torch.randint(0, 5, (40 // LESS, 7), device=device),
    )
    source, elements = drawn(300 // LESS, 7), drawn(40 // LESS, 7)
    alpha = True if dtype is torch.bool else 2
    expected = [x.index_add(0, rows, source, alpha=alpha), x.scatter_add(0, columns, elements)]
    with tritonite.use_gems(include=["index_add", "scatter_add"]):
        for _ in range(2):
            found = [x.index_add(0, rows, source, alpha=alpha), x.scatter_add(0, columns, elements)]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert _served("index_add") == _served("scatter_add") == 2


def test_sums_in_order_have_the_same_bits(device, small_sorts, deterministic):
    x, rows = torch.zeros(3, 5, device=device), torch.randint(0, 3, (400 // LESS,), device=device)
    source = torch.randn(400 // LESS, 5, device=device)
    with tritonite.use_gems(include=["index_add", "scatter_add"]):
        sums = [x.index_add(0, rows, source) for _ in range(3)]
        added = [x.scatter_add(0, rows[:, None], source) for _ in range(3)]
    expected = x.double().index_add(0, rows, source.double()).float()
    for results, columns in ((sums, slice(None)), (added, slice(1))):
        assert all(torch.equal(result, results[0]) for result in results)
        torch.testing.assert_close(results[0][:, columns], expected[:, columns])
    assert _served("index_add") == _served("scatter_add") == 3


@pytest.mark.parametrize(
    ("dtype", "path"), some([torch.complex64, torch.complex128], ["native", "python"]), ids=str, indirect=["path"]
)
def test_complex_numbers_are_added_up(dtype, device, path):
    x = torch.randint(-5, 5, (4, 6), device=device).to(dtype) * (1 + 2j)
    source = torch.randint(-5, 5, (9, 6), device=device).to(dtype) * (2 - 1j)
    rows, columns = torch.randint(0, 4, (9,), device=device), torch.randint(0, 4, (9, 6), device=device)
    calls = (
        lambda: x.index_add(0, rows, source),
        lambda: x.index_add(0, rows, source, alpha=3),
        lambda: x.t().contiguous().t().index_add(0, rows, source),
        lambda: x[0, 0].index_add(0, rows[:1] * 0, source[0, 0]),
        lambda: x.scatter_add(0, columns, source),
        lambda: x[0, 0].scatter_add(0, rows[0] * 0, source[0, 0]),
        lambda: x.index_put((rows,), source, accumulate=True),
        lambda: x.index_put((columns - 4, torch.arange(6, device=device)), source, accumulate=True),
    )
    expected = [call() for call in calls]
    with tritonite.use_gems(include=["index_add", "scatter_add", "index_put"]):
        for call, wanted in zip(calls, expected, strict=True):
            for _ in range(2):
                result = call()
                assert torch.equal(result, wanted) and result.stride() == wanted.stride()
    assert [_served(name) for name in ("index_add", "scatter_add", "index_put")] == [8, 4, 4]


@pytest.mark.parametrize(
    ("mode", "width", "last", "path"),
    some(["sum", "mean", "max"], [3, 700], [False, True], ["native", "python"], turns=2),
    indirect=["path"],
)
def test_bags_of_many_rows(mode, last, width, device, path):
    weight = torch.randn(30, width, device=device)
    ids, offsets = torch.randint(0, 30, (50,), device=device), [0, 0, 1, 9, 36] + [50] * last
    offsets = torch.tensor(offsets, device=device)
    factors = torch.randn(50, device=device) if mode == "sum" else None

    def embed(table, weights):
        return torch.nn.functional.embedding_bag(
            ids, table, offsets, mode=mode, padding_idx=4, per_sample_weights=weights, include_last_offset=last
        )

    def gradients():
        leaves = [x.clone().requires_grad_() for x in (weight, *([factors] if factors is not None else []))]
        result = embed(leaves[0], leaves[1] if factors is not None else None)
        return [result.detach(), *torch.autograd.grad((result * result.detach()).sum(), leaves)]

    expected = gradients()
    with tritonite.use_gems(include=["_embedding_bag*"]):
        for _ in range(2):
            for found, wanted in zip(gradients(), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert _served("_embedding_bag") == _served("_embedding_bag_dense_backward") == 2
    assert mode != "sum" or _served("_embedding_bag_per_sample_weights_backward") == 2


def test_max_bags_compare_with_the_first_row_as_aten(device):
    """A nan is the largest if it comes first, and is ignored otherwise."""
    nan = float("nan")
    weight = torch.tensor([[1.0, nan], [nan, 2.0], [0.5, 3.0]], device=device)
    ids, offsets = torch.tensor([0, 1, 2, 1, 0], device=device), torch.tensor([0, 3], device=device)
    expected = torch.nn.functional.embedding_bag(ids, weight, offsets, mode="max")
    with tritonite.use_gems(include=["_embedding_bag*"]):
        result = torch.nn.functional.embedding_bag(ids, weight, offsets, mode="max")
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert _served("_embedding_bag_forward_only") == 1


@pytest.mark.parametrize(
    ("reduce", "shape", "path"),
    some(["sum", "mean", "prod", "max", "min"], [(3000,), (70, 300), (2, 90, 5)], ["native", "python"], turns=2),
    ids=str,
    indirect=["path"],
)
def test_segments_of_several_blocks(reduce, shape, device, path):
    axis = len(shape) - 2 if len(shape) == 3 else 0
    x = torch.randint(-2, 3, shape, device=device).float().div(2).requires_grad_()
    size = shape[axis]
    ends = torch.tensor([0, 1, size // 2, size // 2, size], device=device).expand(*shape[:axis], 5).contiguous()

    def gradients(**told):
        result = torch.segment_reduce(x, reduce, axis=axis, unsafe=True, initial=1.0, **told)
        return result.detach(), *torch.autograd.grad((result * 2).sum(), x)

    tell = ({"offsets": ends}, {"lengths": ends.diff(dim=-1)})
    expected = [gradients(**told) for told in tell]
    with tritonite.use_gems(include=["*segment_reduce*"]):
        for told, wanted in zip(tell, expected, strict=True):
            for _ in range(2):
                torch.testing.assert_close(gradients(**told), wanted, equal_nan=True)
    assert _served("segment_reduce") == _served("_segment_reduce_backward") == 4


def test_padded_sequences_become_jagged(device, path):
    dense = torch.randn(5, 9, 40, device=device)
    for lengths in ([0, 9, 3, 0, 1], [9] * 5, [0, 0, 0, 0, 1]):
        ends = torch.tensor([0, *lengths], device=device).cumsum(0)
        expected = torch.cat([rows[:n] for rows, n in zip(dense, lengths, strict=True)])
        with tritonite.use_gems(include=["_padded_dense_to_jagged_forward"]):
            result = torch.ops.aten._padded_dense_to_jagged_forward(dense, [ends], sum(lengths))
        assert torch.equal(result, expected)
    assert _served("_padded_dense_to_jagged_forward") == 3


@pytest.mark.declines("ATen refuses the call")
@pytest.mark.skipif(tritonite.device != "cpu", reason="ATen's kernel for GPUs does not look at offsets")
def test_a_wrong_total_of_jagged_rows_raises_atens_error():
    dense, ends = torch.rand(1, 6, 10), torch.tensor([0, 6])
    with tritonite.use_gems(include=["_padded_dense_to_jagged_forward"]), pytest.raises(RuntimeError, match="total_L"):
        torch.ops.aten._padded_dense_to_jagged_forward(dense, [ends], 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_additions_leave_neighbours(device, dtype, monkeypatch):
    """An addition by a 32-bit atomic leaves the other 16 bits unchanged, at both ends of a tensor."""
    monkeypatch.setattr(write, "_accumulates_wide", lambda *_: False)
    # A 16-bit nan, whose payload an addition would change.
    memory = torch.full((70,), 0x7FA5, dtype=torch.int16, device=device)
    for begin, end in ((1, 8), (2, 9), (3, 4), (5, 70)):
        x = memory.clone()[begin:end].view(dtype).zero_()
        index = torch.tensor([0, x.numel() - 1] * 40 + [x.numel() // 2], device=device)
        whole = x.as_strided((70,), (1,), 0).view(torch.int16)
        with tritonite.use_gems(include="scatter_add"):
            x.scatter_add_(0, index, torch.ones(81, dtype=dtype, device=device))
        expected = torch.zeros(x.numel(), device=device).scatter_add_(0, index, torch.ones(81, device=device))
        assert torch.equal(x.float(), expected)
        assert bool(whole[:begin].eq(0x7FA5).all()) and bool(whole[end:].eq(0x7FA5).all())


def test_segments_with_a_bool_as_initial_value_have_atens_result(device):
    x, offsets = torch.randn(6, device=device), torch.tensor([0, 2, 6], device=device)
    expected = torch.segment_reduce(x, "max", offsets=offsets, unsafe=True, initial=True)
    with tritonite.use_gems():
        assert torch.equal(torch.segment_reduce(x, "max", offsets=offsets, unsafe=True, initial=True), expected)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("initial", [0.0, -0.0, None])
def test_signs_of_zeros_in_segments_are_atens(reduce, initial, device):
    x, offsets = torch.tensor([-0.0, -0.0, 0.0, -0.0], device=device), torch.tensor([0, 0, 2, 4], device=device)
    expected = torch.segment_reduce(x, reduce, offsets=offsets, unsafe=True, initial=initial)
    with tritonite.use_gems(include="segment_reduce", faster_only=False):
        found = torch.segment_reduce(x, reduce, offsets=offsets, unsafe=True, initial=initial)
    assert _served("segment_reduce")
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.parametrize("shape", [(), (1,), (3, 4)], ids=str)
@pytest.mark.parametrize("name", ["index_fill", "index_fill_"])
@pytest.mark.parametrize("number", [True, False], ids=["number", "tensor"])
def test_negative_indices_to_fill_count_from_the_end(shape, name, number, device):
    """Tensors have 0 to 2 dimensions."""
    x, index = torch.zeros(shape, device=device), torch.tensor([-1], device=device)
    value = 2.5 if number else torch.tensor(2.5, device=device)
    expected = torch.ops.aten.index_fill(x, -1, index, value)
    with tritonite.use_gems(include="index_fill*", faster_only=False):
        found = getattr(torch.ops.aten, name)(x.clone(), -1, index, value)
    assert _served(f"{name}.int_{'Scalar' if number else 'Tensor'}")
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("shape", "strides", "dim", "length"),
    [
        ((1, 2, 2), (2, 1, 2), 1, 2),
        ((4, 1, 3, 2), (6, 3, 1, 3), 2, 2),
        ((1, 5, 4, 3, 6), (1, 18, 90, 6, 1), 1, 4),
        ((1, 3, 2, 7, 5), (3, 1, 15, 30, 3), 2, 4),
        ((4, 1, 1, 1, 4), (1, 1, 7, 2, 4), 3, 2),
        ((2, 3, 1), (1, 2, 9), 0, 3),
    ],
    ids=str,
)
def test_strides_of_dimensions_of_size_1_decide_layouts_as_in_aten(shape, strides, dim, length, device):
    """ATen's choice of a layout reads the strides of dimensions of size 1, which views set."""
    x = torch.randn(512, device=device).as_strided(shape, strides)
    for index in (torch.zeros(length, dtype=torch.int64, device=device), torch.zeros(2, 2, device=device).long().t()):
        indices = [index if d == dim else None for d in range(dim + 1)]
        expected = torch.ops.aten.index(x, indices)
        with tritonite.use_gems(include="index.Tensor"):
            found = torch.ops.aten.index(x, indices)
        assert found.stride() == expected.stride() and torch.equal(found, expected)
    assert _served("index.Tensor") == 2


def test_indices_into_no_elements_decline(device):
    """ATen raises for some of these calls, and ignores the indices of others."""
    x, index = torch.ones(6, 4, device=device).narrow(1, 0, 0), torch.zeros(5, dtype=torch.int64, device=device)
    source, wide = torch.ones(6, 5, device=device), torch.zeros(6, 5, dtype=torch.int64, device=device)
    for host, arguments in (
        (scatter.index_fill, (x, 1, index, 2.0)),
        (scatter.index_fill, (x, -1, index, torch.ones((), device=device))),
        (scatter.index_copy, (x, 1, index, source)),
        (scatter.index_add, (x, 1, index, source)),
        (scatter.index_reduce, (x, 1, index, source, "prod")),
        (scatter.scatter, (x, 1, wide, source)),
        (scatter.scatter_add, (x, 1, wide, source)),
        (scatter.put, (x, index, source[0])),
        (scatter.index_put, (x, [None, index], source[0, 0])),
        (indexing.gather, (x, 1, wide)),
        (indexing.take, (x, index)),
        (indexing.index_select, (x, 1, index)),
        (indexing.index, (x, [None, index])),
    ):
        with pytest.raises(Decline, match=r"without elements|size 0|a source of"):
            host(*arguments)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_integers_at_several_indices_decline_on_gpus(dtype, monkeypatch, device):
    monkeypatch.setattr("tritonite.ops.aten.on_cpu", lambda: False)
    x, places = torch.zeros(3, dtype=dtype, device=device), [torch.zeros(1, dtype=torch.int64, device=device)]
    for host, more in ((indexing.index, ()), (indexing.unsafe_index, ()), (scatter.index_put, (x[0],))):
        with pytest.raises(Decline, match="dtype"):
            host(x, places, *more)


@pytest.mark.declines("ATen refuses the dtypes")
def test_dtypes_that_aten_does_not_implement_raise_its_error(device):
    index, wide = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, 2, device=device)
    calls = [
        lambda dtype=dtype: torch.index_select(wide[0].to(dtype), 0, index) for dtype in (torch.uint16, torch.uint64)
    ]
    calls.append(lambda: torch.block_diag(wide.to(torch.uint16), wide.to(torch.uint32)))
    calls.append(
        lambda: torch.zeros(3, dtype=torch.bool, device=device).index_reduce(0, index, wide[0, :1] > 0, "amax")
    )
    for call in calls:
        try:
            expected = call()
        except (NotImplementedError, RuntimeError) as error:
            expected = type(error)
        with tritonite.use_gems(include=["index_select", "block_diag", "index_reduce"], faster_only=False):
            if isinstance(expected, type):
                with pytest.raises(expected):
                    call()
            else:
                assert torch.equal(call(), expected)


@pytest.mark.declines("ATen refuses the dtypes on CPUs")
@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e5m2, torch.complex32], ids=str)
@pytest.mark.parametrize("name", ["pixel_shuffle", "pixel_unshuffle", "channel_shuffle"])
def test_dtypes_of_pixel_shuffle_are_atens(name, dtype, device):
    """ATen accepts these dtypes on GPUs only."""
    x = torch.zeros(1, 4, 2, 2, device=device).to(dtype)
    function = getattr(torch.ops.aten, name)
    with tritonite.use_gems(include=name, faster_only=False):
        if device == "cpu":
            with pytest.raises(NotImplementedError):
                function(x, 2)
        else:
            assert function(x, 2).dtype is dtype


@pytest.mark.declines("ATen returns a view on GPUs")
@pytest.mark.parametrize("groups", [1, 3])
def test_channel_shuffle_without_effect_aliases_as_aten(groups, device):
    """ATen returns a view on GPUs, and a copy on a CPU."""
    x = torch.randn(2, 3, 1, 5, device=device)
    expected = torch.channel_shuffle(x, groups)
    with tritonite.use_gems(include="channel_shuffle", faster_only=False):
        actual = torch.channel_shuffle(x, groups)
    assert torch.equal(actual, expected)
    assert (actual.data_ptr() == x.data_ptr()) == (expected.data_ptr() == x.data_ptr())


def test_embedding_renorm_of_a_column_whose_squares_overflow(device):
    weight = torch.tensor([[1e300], [-0.5], [3.0]], dtype=torch.float64, device=device)
    expected = torch.embedding_renorm_(weight.clone(), torch.arange(3, device=device), 1.5, 2.0)
    found = tritonite.overloads()["embedding_renorm"](weight, torch.arange(3, device=device), 1.5, 2.0)
    torch.testing.assert_close(found, expected)


def test_embedding_renorm_of_strided_rows_on_gpus(monkeypatch, device):
    """ATen's kernel for GPUs reads wrong elements of strided rows. A contiguous copy is scaled."""
    weight, indices = torch.randn(13, 40, device=device)[::2, 1::2], torch.tensor([1, 3, 1], device=device)
    expected = torch.embedding_renorm_(weight.contiguous(), indices, 1.5, 2.0)
    monkeypatch.setattr("tritonite.ops.aten.on_cpu", lambda: False)
    ops = tritonite.overloads()
    out = torch.empty(7, 20, device=device)
    found = ops["embedding_renorm"](weight, indices, 1.5, 2.0)
    ops["embedding_renorm.out"](weight, indices, 1.5, 2.0, out=out)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(out, expected)
    for rows in (weight, weight.t().contiguous().t()):
        with pytest.raises(Decline, match="rows that are not contiguous"):
            ops["embedding_renorm_"](rows, indices, 1.5, 2.0)
    with pytest.raises(Decline, match="rows that are not contiguous"):
        ops["embedding_renorm"](weight.t().contiguous().t(), indices, 1.5, 2.0)


def test_clamp_with_one_nan_bound_declines_on_gpus(monkeypatch, device):
    monkeypatch.setattr("tritonite.ops.aten.on_cpu", lambda: False)
    x = torch.ones((), dtype=torch.bfloat16, device=device)
    for bounds in ((float("nan"), None), (None, float("nan"))):
        with pytest.raises(Decline):
            conditional._check_bounds(x, *bounds)
    conditional._check_bounds(x, float("nan"), 1.0)
    conditional._check_bounds(x, 0.5, None)
