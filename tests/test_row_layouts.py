"""Rows and columns whose layout decides how they are read: alignment, gaps, groups, vector widths."""

import functools
import math
from random import Random

import pytest
import torch
import triton
import triton.language as tl
from conftest import FULL, check_each, served, with_cuts

import tritonite
from tritonite import devices
from tritonite.devices import nvidia
from tritonite.engine.rows import blocks
from tritonite.engine.rows import space as spaces
from tritonite.engine.rows.blocks import RowTraits
from tritonite.engine.rows.space import RowSpace
from tritonite.language.indices import quotient
from tritonite.runtime import contract
from tritonite.runtime.libentry import libentry
from tritonite.testing.judge import assert_close


def test_outputs_of_any_strides_and_outputs_that_overlap_inputs(device):
    x = torch.randn(6, 8, device=device)
    out, expected = torch.empty(8, 2, device=device)[:, 0], x.sum(0)
    with tritonite.use_gems():
        torch.sum(x, 0, out=out)
        torch.testing.assert_close(out, expected)
        assert served("sum.IntList_out")
        torch.amax(x, 1, out=x[:, 0].view(6))
    assert tritonite.stats()["amax.out"].declined


@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("record", ["interpreter", "gpu"])
def test_blocks_are_powers_of_two(record, invariant, request):
    """Blocks of drawn rows and columns, of one to five operands of each size of an element."""
    if record == "gpu":
        request.getfixturevalue("on_a_gpu")
    random = Random(1)
    with contract.under(contract.Settings(False, invariant)):
        for _ in range(2000):
            sizes = [random.choice((1, 2, 3, 4, 5, 8, 12, 36, 100, 720, 4096, 50_000)) for _ in range(3)]
            dtype = random.choice((torch.bfloat16, torch.float32, torch.float64, torch.bool))
            operands = [torch.empty(sizes, dtype=dtype, device="meta") for _ in range(random.randint(1, 5))]
            dims = tuple(sorted(random.sample(range(3), random.randint(1, 2))))
            space = RowSpace.of(operands, dims, operands[:1], (), False)
            traits = RowTraits(dtype.itemsize, random.random() < 0.5, random.randint(1, len(operands)), torch.float32)
            found = blocks.for_reduction(space, 1), blocks.for_transform(space, traits), blocks.for_segments(space)
            for each in (*found, blocks.for_states(space)):
                assert each.rows.bit_count() == each.columns.bit_count() == 1, (sizes, dims, dtype, each)


def test_dimensions_that_all_operands_share_collapse():
    """The weights of a group norm have one element per channel. The elements of a channel are read in vectors."""
    x, weight = torch.empty(3, 2, 4, 36, dtype=torch.float16), torch.empty(8).view(1, 2, 4, 1).expand(3, 2, 4, 36)
    space = RowSpace.of((x, weight), (2, 3), (x,), (), False)
    assert space.reduced[0] == ((1,), (0, 1)) and space.reduced[1] == ((1,),)
    assert space.shapes == ((2,), (36,)) and space.kept[0][0] == (144,)


def test_weights_of_channel_groups_keep_vector_loads():
    x, weight = torch.empty(3, 2, 8, 7, dtype=torch.float16), torch.empty(1, 2, 8, 1).expand(3, 2, 8, 7)
    space = RowSpace.of((x, weight), (2, 3), (x,), (), False)
    assert space.aligned == 8 and space.vector_width == 8 and space.segment == 1 and space.full_operands == 2


@pytest.mark.parametrize("width", [16, 17, 40])
def test_columns_of_many_blocks(width, device, change_device):
    """Loads of 16 bytes or of one element are prefetched by one block. The last block is full or partial."""
    change_device(row_elements=256, programs=1)
    for x in (torch.randn(128, width, device=device), torch.randint(9, (101, width), device=device).float()):
        expected = x.min(0), x.sum(0), x.logsumexp(0)
        with tritonite.use_gems():
            torch.testing.assert_close((x.min(0), x.sum(0), x.logsumexp(0)), expected)
    assert served("min.dim") and served("sum.dim_IntList") and served("logsumexp")


@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_columns_whose_elements_are_grouped(dtype, programs, device, change_device):
    """A thread has several elements of a column. The last are masked; groups may hold infinities or nan."""
    change_device(row_elements=4096, programs=programs)
    for shape in ((200, 40), (201, 33), (4101, 64)):
        x = torch.randn(shape, device=device).to(dtype)
        x[:150, 0], x[:, 1], x[9, 2], x[190, 3] = -math.inf, -math.inf, math.inf, math.nan
        space = RowSpace.of((x,), (0,), (), (), False)
        chosen = blocks.for_reduction(space, 2)
        assert chosen.steps > 1 and (dtype.itemsize < 4 or chosen.groups(space)[0] > 1)
        expected = x.double().logsumexp(0).to(dtype)
        with tritonite.use_gems():
            torch.testing.assert_close(x.logsumexp(0), expected, equal_nan=True)
    assert served("logsumexp")


@pytest.mark.parametrize(("dtype", "cut"), with_cuts(torch.float16, torch.float32), indirect=["cut"])
def test_columns_that_fit_in_a_block(dtype, device, cut):
    x = torch.randn(3, 21, 40, device=device).to(dtype)
    x[0, :20, 0], x[1, :, 1], x[2, 5, 2], x[2, 5, 3] = -math.inf, -math.inf, math.inf, math.nan
    for name in ("softmax", "log_softmax"):
        with tritonite.use_gems():
            found = getattr(x, name)(1)
        torch.testing.assert_close(found, getattr(x.double(), name)(1).to(dtype), equal_nan=True)
    assert served("_softmax") and served("_log_softmax")


def test_split_columns_of_an_expanded_gradient(device, change_device):
    """The first operand is one element, expanded, and there are fewer states than operands."""
    change_device(row_elements=32, row_columns=16, programs=64)
    x, weight = torch.randn(70, 5, device=device), torch.randn(5, device=device)
    _, mean, rstd = torch.native_layer_norm(x, (5,), weight, None, 1e-5)
    grad = torch.ones((), device=device).expand(70, 5)
    arguments = (grad, x, (5,), mean, rstd, weight, None, (False, True, False))
    expected = torch.ops.aten.native_layer_norm_backward(*arguments)[1]
    with tritonite.use_gems():
        torch.testing.assert_close(torch.ops.aten.native_layer_norm_backward(*arguments)[1], expected)
    assert served("native_layer_norm_backward")


def cut_for_transform(x, inputs, dim, traits):
    """Return the blocks of a row operator, which cover the whole space."""
    space = RowSpace.of(inputs, (dim,), (x,), (), False)
    cut = blocks.for_transform(space, traits)
    assert cut.programs * cut.rows >= space.n_kept * cut.programs_per_row
    assert cut.columns * cut.steps * cut.splits * cut.programs_per_row >= space.n_reduced
    return cut


@libentry()
@triton.jit
def _divide(x, out, sizes, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    tl.store(out + places, quotient(tl.load(x + places), sizes[0]))


@pytest.mark.parametrize("divisor", [2, 3, 7, 8, 167, 4097, 65_535, 2**20 + 1, 2**30, 2**30 + 1, 2**31 - 1])
def test_quotients_by_multiplication(divisor, device):
    near = [n * divisor + d for n in (0, 1, 2, 3, 1000, 2**31 // divisor) for d in (-1, 0, 1)]
    near = [n for n in near if 0 <= n < 2**31]
    x = torch.cat([torch.tensor(near, dtype=torch.int32), torch.randint(2**31 - 1, (64 - len(near),)).int()]).to(device)
    out = torch.empty_like(x)
    _divide[(1,)](x, out, (divisor,), COUNT=64)
    assert torch.equal(out, x // divisor)


@pytest.mark.parametrize("long", [False, True], ids=["32 bits", "64 bits"])
def test_offsets_beyond_32_bits(long, device, monkeypatch):
    """The product of index and stride of a transposed operand needs 64 bits."""
    if long:
        monkeypatch.setattr(spaces, "INT32_LIMIT", 4)
    x, y = torch.randn(2, 1301, 1303, device=device)
    y = y.reshape(1303, 1301).t()
    with tritonite.use_gems():
        found = torch.nn.functional.mse_loss(x, y)
    assert served("mse_loss") == 1
    torch.testing.assert_close(found, ((x - y) ** 2).mean())


@pytest.mark.parametrize(
    ("part", "dtype", "aligned"),
    [
        (36, torch.float16, 4),
        (36, torch.float32, 4),
        (38, torch.float16, 2),
        (38, torch.float32, 2),
        (35, torch.float16, 0),
    ],
)
def test_alignment_of_rows_in_several_slices(part, dtype, aligned):
    x = torch.empty(16, 3, part, dtype=dtype)
    assert RowSpace.of((x,), (0, 2), (), (), False).aligned == aligned


BEGINNINGS = [
    (n, dtype, programs)
    for n in (129, 130, 131, 137, 255, 257, 300, 517)
    for dtype in (torch.float16, torch.float32)
    for programs in (1, 64)
]
if not FULL:
    BEGINNINGS = [(129, torch.float16, 1), (131, torch.float32, 64), (255, torch.float16, 64), (257, torch.float32, 1)]


@pytest.mark.parametrize(("n", "dtype", "programs"), BEGINNINGS, ids=str)
def test_misaligned_rows(n, dtype, programs, device, change_device):
    """Rows are read in vectors, except before the first vector boundary and behind the last one."""
    change_device(row_elements=32, row_columns=16, programs=programs)
    # One row more than there are different misalignments.
    rows = 16 // dtype.itemsize + 1
    storage = torch.randn(rows, n + 1, device=device).to(dtype)
    for x in (storage.view(-1)[: rows * n].view(rows, n), storage[:, :n], storage[:, 1:]):
        grad, y = torch.randn_like(x), x.softmax(1)
        calls = {
            "_softmax": lambda x=x: x.softmax(1),
            "_log_softmax": lambda x=x: x.log_softmax(1),
            "native_layer_norm": lambda x=x: torch.native_layer_norm(x, (n,), None, None, 1e-5),
            "_softmax_backward_data": lambda x=x, grad=grad, y=y: torch.ops.aten._softmax_backward_data(
                grad, y, 1, x.dtype
            ),
        }
        check_each(calls, dtype)


def test_misaligned_rows_in_place(device, change_device):
    """The last block, which has no whole vector, must not read results of the block before it."""
    change_device(row_elements=32, programs=1)
    # Up to 263 elements behind the first vector boundary leave the ninth block of 32 empty.
    for n in range(256, 275) if FULL else (257, 259, 262, 274):
        x = torch.randn(7, n, device=device)
        expected = x.softmax(1)
        with tritonite.use_gems():
            torch.ops.aten._softmax.out(x, 1, False, out=x)
        torch.testing.assert_close(x, expected)
    assert served("_softmax.out")


def test_rows_of_different_misalignments_are_read_by_element(monkeypatch):
    monkeypatch.setattr(devices, "current", nvidia.RECORD)
    x, y = torch.empty(300, 36_555, dtype=torch.float16), torch.empty(300, 36_560, dtype=torch.float16)
    for others, misaligned in (((x,), True), ((x, x), True), ((y[:, :-5],), False), ((x.float(),), False)):
        space = RowSpace.of((x,), (1,), others, (), False)
        found = blocks.with_aligned_loads(space, (x, *others), True)
        assert found.misaligned == misaligned and found.vector_width == (8 if misaligned else 1)
    short = x[:, :1000]
    assert not blocks.with_aligned_loads(
        RowSpace.of((short,), (1,), (short,), (), False), (short, short), True
    ).misaligned


@pytest.mark.parametrize(
    ("length_and_width", "cut"), with_cuts((100, 4), (102, 2), (104, 8), (101, 8)), indirect=["cut"]
)
def test_vector_width_of_padded_rows(length_and_width, device, cut):
    """The width divides the length. If only 1 does, rows are read in whole vectors except for the end."""
    length, width = length_and_width
    x = torch.randn(9 if FULL else 5, 112, device=device).half()[:, :length]
    assert RowSpace.of((x,), (1,), (torch.empty_like(x),), (), False).vector_width == width
    expected = x.sum(1), x.softmax(1), torch.nn.functional.layer_norm(x, (length,))
    with tritonite.use_gems():
        found = x.sum(1), x.softmax(1), torch.nn.functional.layer_norm(x, (length,))
    torch.testing.assert_close(found, expected)
    assert served("sum.dim_IntList") and served("_softmax") and served("native_layer_norm")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((72, 117), torch.float32), ((72, 117), torch.bfloat16)]
    + ([((250, 33), torch.float32), ((250, 33), torch.bfloat16)] if FULL else [((168, 49), torch.float32)]),
    ids=str,
)
def test_many_misaligned_rows(shape, dtype, device, change_device):
    """Rows alone, with a column-major gradient, or with weights, on a device for which they are long."""
    change_device(row_elements=128, programs=1)
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[1], device=device).to(dtype)
    gradient = torch.randn(shape[::-1], device=device).to(dtype).mT
    layer_norm = functools.partial(torch.nn.functional.layer_norm, x, shape[1:], weight)
    log_softmax_backward = functools.partial(torch.ops.aten._log_softmax_backward_data, gradient, x, 1, dtype)
    expected = x.softmax(1), layer_norm(), log_softmax_backward(), x.sum(1), x.sum(0)
    with tritonite.use_gems():
        found = x.softmax(1), layer_norm(), log_softmax_backward(), x.sum(1), x.sum(0)
    torch.testing.assert_close(found, expected, atol=1e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1.6e-2)
    assert served("_softmax") and served("native_layer_norm") and served("_log_softmax_backward_data")


# A row of 17 or 18 elements has nine tiny blocks, enough for several programs.
COLUMNS = [((30, 40), 8), ((3, 30, 12), 4), ((30, 64), 1), ((30, 33), 1)]
COLUMNS = COLUMNS if FULL else [((18, 24), 8), ((2, 17, 12), 4), ((17, 16), 1), ((18, 17), 1)]


@pytest.mark.parametrize(("shape_and_alignment", "cut"), with_cuts(*COLUMNS), indirect=["cut"])
def test_vector_width_of_columns(shape_and_alignment, device, cut):
    shape, alignment = shape_and_alignment
    for x in (torch.randn(shape, device=device), torch.randn(*shape[:-1], 2 * shape[-1], device=device)):
        x = x[..., : shape[-1]]
        assert RowSpace.of((x,), (x.dim() - 2,), (), (), False).kept_alignment == alignment
        expected = x.sum(-2), x.softmax(-2)
        with tritonite.use_gems():
            torch.testing.assert_close((x.sum(-2), x.softmax(-2)), expected)
    assert served("sum.dim_IntList") and served("_softmax")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((96, 33), torch.bfloat16), ((97, 17), torch.float16)]
    + ([((96, 33), torch.float16), ((97, 33), torch.bfloat16), ((3, 64, 15), torch.bfloat16)] if FULL else []),
    ids=str,
)
def test_16_bit_columns_loaded_one_by_one(shape, dtype, device, change_device):
    """16-bit columns are loaded by elements, in several prefetched blocks, the last of which is full or partial."""
    change_device(row_elements=64, row_columns=16, programs=4)
    x = torch.randn(shape, device=device).to(dtype)
    x[..., 5, :] = 0
    assert RowSpace.of((x,), (x.dim() - 2,), (), (), False).scalar_loads
    assert not RowSpace.of((x[..., :-1].contiguous(),), (x.dim() - 2,), (), (), False).scalar_loads
    functions = {
        "sum.dim_IntList": lambda: x.sum(-2),
        "amax": lambda: x.amax(-2),
        "argmax": lambda: x.argmax(-2),
        "count_nonzero": lambda: x.count_nonzero(-2),
        "var.correction": lambda: x.var(-2),
        "logsumexp": lambda: x.logsumexp(-2),
    }
    for name, function in functions.items():
        expected = function()
        with tritonite.use_gems():
            found = function()
            assert served(name)
        torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("count", "length", "inner", "programs"),
    [(*space, programs) for space in ((9, 33, 8), (9, 100, 2), (9, 100, 7)) for programs in (1, 8, 512)]
    if FULL
    else [(9, 33, 8, 1), (9, 33, 8, 512), (3, 100, 2, 8), (3, 100, 2, 512), (3, 100, 7, 1)],
)
def test_columns_of_few_kept_elements(count, length, inner, programs, device, change_device):
    """A program has all kept elements in blocks, or in a small space some of them with whole columns."""
    change_device(row_elements=32, row_columns=64, programs=programs)
    grad, x = torch.randn(2, count, length, inner, device=device)
    with tritonite.use_gems():
        probabilities, total, largest = x.softmax(1), x.sum(1), x.max(1)
        gradient = torch._softmax_backward_data(grad, probabilities, 1, torch.float32)
    torch.testing.assert_close(probabilities, x.double().softmax(1).float())
    torch.testing.assert_close(total, x.double().sum(1).float())
    assert torch.equal(largest.indices, x.max(1).indices)
    exact = torch._softmax_backward_data(grad.double(), probabilities.double(), 1, torch.float64)
    torch.testing.assert_close(gradient, exact.float())


@pytest.mark.parametrize("programs", [1, 8, 512])
def test_columns_with_gaps(programs, device, change_device):
    """Columns in the same memory sector belong to the same program."""
    change_device(row_elements=32, row_columns=64, programs=programs)
    x = torch.randn(*((3, 100) if FULL else (2, 60)), 6, 2, device=device)[:, :, ::2]
    expected = *torch.std_mean(x, 1), x.softmax(1), x.sum((0, 1))
    with tritonite.use_gems():
        torch.testing.assert_close((*torch.std_mean(x, 1), x.softmax(1), x.sum((0, 1))), expected)
    assert served("std_mean.correction") and served("_softmax") and served("sum.dim_IntList")


SHORT_COLUMNS = {
    "sum.dim_IntList": lambda x: x.sum(1),
    "mean.dim": lambda x: x.mean(1),
    "amax": lambda x: x.amax(1),
    "prod.dim_int": lambda x: x.prod(1),
    "any.dim": lambda x: (x > 1).any(1),
    "var.correction": lambda x: x.var(1, correction=0),
    "argmax": lambda x: x.argmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "_softmax": lambda x: x.softmax(1),
    "_log_softmax": lambda x: x.log_softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "_softmax_backward_data": lambda x: torch._softmax_backward_data(x, x, 1, x.dtype),
}


# Rows that are read by 16 bytes, by 4, and one by one; a length that fills a block's columns, and one that does not.
@pytest.mark.parametrize("shape", [(3, 2, 256), (2, 5, 514), (2, 21, 129), (1, 32, 520), (40, 3, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_short_columns_reduced_by_one_thread(shape, dtype, device, change_device):
    change_device(programs=2)
    x = torch.randn(shape, device=device).to(dtype)
    chosen = blocks.for_reduction(RowSpace.of((x,), (1,), (), (), False), 1)
    assert chosen.meta_fields(RowSpace.of((x,), (1,), (), (), False))["row_per_thread"]
    close = {"rtol": 1.6e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 4e-3, "atol": 4e-3}
    for name, function in SHORT_COLUMNS.items():
        expected = function(x.double()) if name != "_softmax_backward_data" else function(x)
        with tritonite.use_gems():
            found = function(x)
        torch.testing.assert_close(found, expected.to(found.dtype), **close)
        assert served(name)


@pytest.mark.parametrize("shape", [(64, 100), (4, 3, 5)], ids=str)
def test_operands_expanded_along_all_dimensions(shape, device):
    """No operand is contiguous along any dimension."""
    x = torch.randn(1, device=device).expand(shape)
    expected = torch.softmax(x, 0), torch.ops.aten._softmax_backward_data(x, x, 0, x.dtype)
    with tritonite.use_gems(faster_only=False):
        found = torch.softmax(x, 0), torch.ops.aten._softmax_backward_data(x, x, 0, x.dtype)
    torch.testing.assert_close(found, expected)
    assert served("_softmax") and served("_softmax_backward_data")


def test_pairs_of_odd_rows_are_contiguous():
    """Pairs of rows of odd length get a contiguity hint where rows are contiguous, and none elsewhere."""
    odd, even, gaps = torch.empty(4, 3, 55), torch.empty(4, 3, 56), torch.empty(4, 3, 110)[..., ::2]
    found = [RowSpace.of((x,), (1,), (), (), False) for x in (odd, even, gaps)]
    assert [space.odd_strides for space in found] == [True, False, False]
    assert (
        RowSpace.of((odd,), (1,), (odd,), (), False).odd_strides
        and not RowSpace.of((odd, gaps[..., :55]), (1,), (), (), False).odd_strides
    )


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("copied", [False, True])
def test_operands_contiguous_along_another_dimension_than_results(order, dim, copied, device, change_tables):
    """Large operands are copied first. Small ones are read as they are."""
    change_tables(rows={"copied_elements": 0 if copied else 2**19})
    x = torch.randn([(17, 20, 24)[d] for d in order], device=device).permute([order.index(d) for d in range(3)])
    grad = torch.randn(17, 20, 24, device=device)
    with tritonite.use_gems():
        probabilities = x.softmax(dim)
        gradient = torch._softmax_backward_data(grad, x, dim, torch.float32)
    torch.testing.assert_close(probabilities, x.double().softmax(dim).float())
    exact = torch._softmax_backward_data(grad.double(), x.double(), dim, torch.float64)
    torch.testing.assert_close(gradient, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(72, torch.float16), (136, torch.bfloat16), (200, torch.float16), (208, torch.bfloat16)]
    + ([(72, torch.bfloat16), (136, torch.float16), (200, torch.bfloat16), (208, torch.float16)] if FULL else []),
    ids=str,
)
def test_norms_of_rows_far_below_a_power_of_2(length, dtype, device, change_device):
    change_device(row_elements=64, programs=8)
    x, weight, bias = [torch.randn(shape, device=device).to(dtype) for shape in ((9, length), (length,), (length,))]
    norm = torch.nn.functional.layer_norm
    aten, exact = norm(x, (length,), weight, bias), norm(x.double(), (length,), weight.double(), bias.double())
    with tritonite.use_gems():
        found = norm(x, (length,), weight, bias)
    assert_close(found, aten, exact)
    assert served("native_layer_norm")
