"""Copies, lists and formulas of coordinates, where samples do not reach."""

import contextlib
import importlib
import itertools
import math

import pytest
import torch
from conftest import some

import tritonite
from tritonite import dtypes
from tritonite.engine.pointwise.blocks import choose_tile
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.errors import Decline
from tritonite.language.indices import read_at
from tritonite.ops import aten
from tritonite.registry import scalar_kernel


def serves(overload, run, *, declined=False):
    """Return a call's result. Assert that a kernel of `overload` ran or, if `declined`, that none did."""
    tritonite.reset_stats()
    with tritonite.use_gems(include=[overload]):
        result = run()
    counts = tritonite.stats()[overload.removesuffix(".default")]
    assert bool(counts.launched + counts.replayed) != declined and bool(counts.declined) == declined
    return result


def identical(a, b):
    same = a.dtype is b.dtype and a.shape == b.shape and a.stride() == b.stride()
    return same and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.parametrize("dtype", dtypes.MOVED, ids=str)
def test_every_dtype_is_copied_bit_by_bit(dtype, device):
    bits = torch.randint(0, 256, (6, 4 * dtype.itemsize), dtype=torch.uint8, device=device)
    x = (bits & 1 if dtype is torch.bool else bits).view(dtype)
    assert identical(serves("clone.default", lambda: x.t().clone()), x.t().clone())
    y = torch.zeros_like(x)
    assert identical(serves("copy_.default", lambda: y.copy_(x)), x)
    assert identical(serves("cat.default", lambda: torch.cat([x, x], 1)), torch.cat([x, x], 1))


@pytest.mark.parametrize(("source", "to"), list(itertools.product(dtypes.ALL, dtypes.ALL)), ids=str)
def test_conversions_round_as_atens(source, to, device):
    values = [0.0, 1.0, 2.5, 100.7, 3.0, 0.49, 77.0, -1.0, -3.7, 126.0]
    if source is torch.uint8:
        values = [abs(value) for value in values]
    x = torch.tensor(values, dtype=torch.float64).to(source).to(device)
    if source is not to:
        assert identical(serves("_to_copy.default", lambda: x.to(to)), x.to(to))
    y = torch.zeros(len(values), dtype=to, device=device)
    expected = y.clone().copy_(x)
    assert identical(serves("copy_.default", lambda: y.copy_(x)), expected)


def test_16_bit_floats_are_converted_through_float32(device):
    # Just above the midpoint of two 16-bit floats, by less than float32 resolves.
    x = torch.tensor([1 + 2**-11 + 2**-40, 2**60 + 2**49 + 1], dtype=torch.float64, device=device)
    for dtype, to in itertools.product((torch.float64, torch.int64), (torch.float16, torch.bfloat16)):
        wide = x.to(dtype)
        assert identical(serves("_to_copy.default", lambda: wide.to(to)), wide.to(to))


def test_real_numbers_become_complex(device):
    x = torch.randn(3, 4, device=device)
    assert identical(serves("_to_copy.default", lambda: x.to(torch.complex128)), x.to(torch.complex128))


@pytest.mark.declines("conjugated or negated views")
@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view], ids=["conjugate", "negative"])
def test_negated_and_conjugated_views_go_to_aten(view, device):
    x = view(torch.randn(3, 4, dtype=torch.complex64, device=device))
    y = torch.zeros(3, 4, dtype=torch.complex64, device=device)
    assert torch.equal(serves("copy_.default", lambda: y.copy_(x), declined=True), x.resolve_conj().resolve_neg())


@pytest.mark.declines("the output overlaps")
def test_overlapping_copies_go_to_aten(device):
    x = torch.arange(10.0, device=device)
    with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
        serves("copy_.default", lambda: x[1:].copy_(x[:-1]), declined=True)
    with pytest.raises(RuntimeError, match="single memory location"):
        serves("copy_.default", lambda: x[:1].expand(4).copy_(x[:4]), declined=True)


def test_zeros_without_memory_are_copied(device, path):
    x, y = torch._efficientzerotensor(3, device=device), torch.ones(3, device=device)
    with tritonite.use_gems():
        for _ in range(2):
            assert x.clone().tolist() == y.clone().copy_(x).tolist() == x.double().tolist() == [0, 0, 0]


def test_a_copy_to_itself(device):
    x = torch.randn(4, 5, device=device)
    kept = x.clone()
    assert serves("copy_.default", lambda: x.copy_(x)) is x and torch.equal(x, kept)


@pytest.mark.parametrize(
    ("count", "dim", "path"), some([1, 2, 3, 63, 64, 65, 130], [0, 1, -1], ["native", "python"]), indirect=["path"]
)
def test_cat_and_stack_of_lists_of_any_length(count, dim, device, path):
    xs = [torch.randn(3, 2, 4, device=device) for _ in range(count)]
    assert identical(serves("cat.default", lambda: torch.cat(xs, dim)), torch.cat(xs, dim))
    assert identical(serves("stack.default", lambda: torch.stack(xs, dim)), torch.stack(xs, dim))


def test_cat_of_mixed_dtypes_and_layouts(device):
    parts = [
        torch.randn(4, 6, device=device),
        torch.randn(6, 3, device=device).t()[:3].new_zeros(4, 0),
        torch.randn(5, 4, device=device).t(),
        torch.randn(4, 20, device=device)[:, ::2],
        torch.randn(1, 3, device=device).expand(4, 3),
        torch.randn(4, 1, device=device).half(),
        torch.ones(4, 2, dtype=torch.int32, device=device),
        torch.empty(0, device=device),
    ]
    assert identical(serves("cat.default", lambda: torch.cat(parts, 1)), torch.cat(parts, 1))


def test_cat_of_a_cache_and_a_step(device, path):
    for length in (7, 8):
        cache = torch.randn(2, 3, length, 4, dtype=torch.float16, device=device)
        step = torch.randn(2, 1, 3, 4, dtype=torch.float16, device=device).transpose(1, 2)
        expected = torch.cat([cache, step], 2)
        assert identical(serves("cat.default", lambda: torch.cat([cache, step], 2)), expected)


def test_cat_of_several_tiles_and_programs(device, change_device):
    change_device(tile_bytes=64)
    xs = [torch.randn(5, n, 40, device=device) for n in (1, 3, 2)]
    assert identical(serves("cat.default", lambda: torch.cat(xs, 1)), torch.cat(xs, 1))


@pytest.mark.parametrize("count", [3, 9])
def test_cat_and_stack_of_contiguous_tensors(count, device, change_device):
    change_device(tile_bytes=64)
    xs = [torch.randn(5, 16, device=device) for _ in range(count)]
    assert identical(serves("cat.default", lambda: torch.cat(xs, 0)), torch.cat(xs, 0))
    assert identical(serves("stack.default", lambda: torch.stack(xs, 0)), torch.stack(xs, 0))


@pytest.mark.parametrize(("widths", "shape"), some([(7, 7, 7), (31, 33), (129, 3)], [(21,), (2, 9)]))
def test_misaligned_tensors_in_a_list(widths, shape, device, change_device):
    change_device(tile_bytes=256)
    xs = [torch.randn(*shape, width, device=device).half() for width in widths]
    assert identical(serves("cat.default", lambda: torch.cat(xs, -1)), torch.cat(xs, -1))
    xs = [x.expand(3, *x.shape).transpose(0, -2) for x in xs]
    assert identical(serves("cat.default", lambda: torch.cat(xs, -1)), torch.cat(xs, -1))


@pytest.mark.parametrize(("count", "alike"), some([8, 9, 17], [True, False]))
def test_cat_of_long_lists_of_several_tiles(count, alike, device, change_device):
    change_device(tile_bytes=64)
    sizes = [2 if alike else 1 + i % 3 for i in range(count)]
    for dim in (0, 1):
        xs = [torch.randn(*[n if d == dim else 2 for d in range(2)], 40, device=device)[..., :38] for n in sizes]
        assert identical(serves("cat.default", lambda xs=xs, dim=dim: torch.cat(xs, dim)), torch.cat(xs, dim))


@scalar_kernel(own=("x",), index=("row", "column"))
def _numbered(x, row, column):
    return x + row * 100 + column


@scalar_kernel(pointer=("source",), integers=("shift",), index=("column",))
def _shifted(source, shift, column):
    return read_at(source, (column + shift,), column >= 0, 0)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 5), (7, 33), (2, 300)])
def test_coordinates_are_those_of_the_result(shape, device):
    x = torch.zeros(3, *shape, dtype=torch.int64, device=device)
    expected = torch.arange(shape[0], device=device)[:, None] * 100 + torch.arange(shape[1], device=device)
    for own in (x, x.transpose(0, 2).contiguous().transpose(0, 2), x[:1].expand(3, *shape)):
        out = torch.empty_like(x)
        _numbered.run((own, 1, 2), (out,))
        assert torch.equal(out, expected.expand(3, *shape))


def test_gathered_operands_with_64_bit_offsets(device, monkeypatch):
    """64-bit offsets are forced, because tensors that need them are too large to allocate."""
    monkeypatch.setattr("tritonite.engine.pointwise.declare.INT32_LIMIT", 8)
    x = torch.randn(3, 12, device=device)
    out = torch.empty(3, 10, device=device)
    _shifted.run((Gathered(x, (1,)), 2, 1), (out,))
    assert torch.equal(out, x[:, 2:])


@pytest.mark.parametrize("step", [2, 2**31 - 1, 2**31, 2**40, 2**63 - 1])
def test_slice_backward_with_large_steps(step, device, path):
    grad = torch.randint(1, 99, (1, 3, 4), device=device)
    result = serves("slice_backward.default", lambda: torch.ops.aten.slice_backward(grad, [2, 3, 4], 0, 0, 2, step))
    assert torch.equal(result[:1], grad) and not result[1].any()


def test_a_gathered_operand_must_not_overlap_the_result(device):
    x = torch.randn(4, device=device)
    from tritonite.errors import Decline

    with pytest.raises(Decline, match="overlaps"):
        _shifted.run((Gathered(x, (0,)), 0, 0), (x,))


def test_factories_follow_the_default_dtype(device, path):
    kept = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            for overload, run in {
                "full.default": lambda: torch.full((3,), 2.0, device=device),
                "zeros.default": lambda: torch.zeros(3, device=device),
                "arange.start_step": lambda: torch.arange(0, 1, 0.25, device=device),
                "eye.default": lambda: torch.eye(3, device=device),
            }.items():
                for _ in range(2):
                    assert serves(overload, run).dtype is dtype
    finally:
        torch.set_default_dtype(kept)


def test_fill_values_are_not_in_the_key(device):
    tritonite.reset_stats()
    with tritonite.use_gems(include=["full.default"]):
        for value in (1.5, -2.0, 7.25):
            assert torch.full((5,), value, device=device).tolist() == [value] * 5


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_fill_values_of_integers_are_truncated(dtype, device, path):
    """Values fit in the dtype. For others ATen raises, or its conversion is undefined."""
    tritonite.reset_stats()
    held = [2.5, -0.0, 126.9, *([] if dtype is torch.uint8 else [-2.5])]
    left = [-0.5, 300.7] if dtype is torch.uint8 else [2.0**63, -(2.0**63), math.inf, math.nan]
    expected = [torch.full((40,), value, dtype=dtype, device=device) for value in held]
    with tritonite.use_gems(include=["full", "fill_"]):
        for value, aten in zip(held, expected, strict=True):
            assert torch.equal(torch.full((40,), value, dtype=dtype, device=device), aten)
            assert torch.equal(torch.empty_like(aten).fill_(value), aten)
    counts = tritonite.stats()
    assert not counts["full"].declined and not counts["fill_.Scalar"].declined
    for value in left:
        with tritonite.use_gems(include=["full", "fill_"]), contextlib.suppress(RuntimeError):
            torch.empty(40, dtype=dtype, device=device).fill_(value)
    assert sum(tritonite.stats()["fill_.Scalar"].declined.values()) == (0 if dtype is torch.bool else len(left))


def test_as_strided_copies_stay_within_the_tensor(device):
    x = torch.arange(20.0, device=device)[:10]
    run = torch.ops.aten.as_strided_copy
    assert identical(
        serves("as_strided_copy.default", lambda: run(x, [2, 3], [4, 1])), x.as_strided([2, 3], [4, 1]).clone()
    )
    # The storage has further elements, whose values are unknown.
    assert serves("as_strided_copy.default", lambda: run(x, [12], [1]), declined=True).tolist() == list(range(12))


def test_block_diagonals_and_column_stacks(device):
    """One tensor has a single dimension, which must not be taken for the other one."""
    tensors = [torch.randn(64, 4096, device=device) for _ in range(2)]
    for dim in (0, 1, 0, 1):
        with tritonite.use_gems(include=["cat"]):
            found = torch.cat(tensors, dim)
        assert torch.equal(found, torch.cat(tensors, dim))


@pytest.mark.parametrize("k", [-4, 0, 1, 2, 3])
def test_layouts_of_rotated_images_are_atens(k, device):
    x = torch.randn(2, 4, 5, 3, device=device).permute(0, 3, 1, 2)
    expected = torch.rot90(x, k, [-4, -2])
    with tritonite.use_gems(include="rot90"):
        actual = torch.rot90(x, k, [-4, -2])
    assert torch.equal(actual, expected) and actual.stride() == expected.stride()


def test_a_complex_number_with_unsigned_integers(device):
    """Unsigned integers promote with no complex dtype, and a number must not change that."""
    x, out = torch.ones(2, dtype=torch.uint16, device=device)
    with tritonite.use_gems(include="copy*"):
        assert torch.ops.aten.copy.out(x, 0j, False, out=out) == 0


def test_rot90_into_another_number_of_dimensions_raises_atens_error(device):
    x, out = torch.ones(6, 10, device=device).char(), torch.empty(0, dtype=torch.bfloat16, device=device)
    with tritonite.use_gems(), pytest.raises(RuntimeError, match="dtype"):
        torch.ops.aten.rot90.out(x, 1, [1, -2], out=out)


@pytest.mark.declines("no kernel writes such outputs")
@pytest.mark.parametrize("strides", [(1, 2, 36), (162, 1, 18)])
def test_im2col_into_other_strides_is_atens(strides, device):
    """ATen writes the output as if it were contiguous."""
    x = torch.randn(2, 3, 4, 5, device=device)
    found, expected = (torch.empty_strided((2, 18, 9), strides, device=device).zero_() for _ in range(2))
    torch.ops.aten.im2col.out(x, [2, 3], [1, 1], [1, 0], [2, 1], out=expected)
    serves("im2col.out", lambda: torch.ops.aten.im2col.out(x, [2, 3], [1, 1], [1, 0], [2, 1], out=found), declined=True)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["tril_indices", "triu_indices"])
def test_indices_of_an_empty_triangle_have_any_dtype_on_gpus(name, monkeypatch):
    creation = importlib.import_module("tritonite.ops.creation")
    function, out = getattr(creation, name), torch.empty(2, 0, device=tritonite.device)
    with pytest.raises(Decline, match="float32"):
        function(3, 3, outs=(out,))
    monkeypatch.setattr(aten, "on_cpu", lambda: False)
    (found,) = function(3, 0, outs=(out,))
    assert found is out and found.dtype is torch.float32
    with pytest.raises(Decline, match="float32"):
        function(3, 3, outs=(out,))


@pytest.mark.parametrize("name", ["tril_indices", "triu_indices"])
def test_indices_of_triangles_are_atens(name, device, path):
    """Shapes are all trapezoids and rectangles of few rows, and some of many."""
    function = getattr(torch, name)
    sizes = [(row, col, offset) for row in (0, 1, 4) for col in (0, 1, 3, 6) for offset in range(-6, 8, 2)]
    sizes += (
        [(2**30, 3, 3 - 2**30), (9, 2**31 - 9, -2)]
        if name == "tril_indices"
        else [(2**30, 3, 0), (2, 10**9, 10**9 - 4)]
    )
    sizes += [(1500, 1400, 3)]
    expected = [function(*size, device=device) for size in sizes]
    with tritonite.use_gems(include=[name]):
        for size, wanted in zip(sizes, expected, strict=True):
            result = function(*size, device=device)
            assert torch.equal(result, wanted) and result.dtype is wanted.dtype, size
    counts = tritonite.stats()[name]
    assert not counts.declined and counts.launched + counts.replayed == len(sizes)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 5, 7), (2, 1, 4, 1), (1, 2, 3, 4, 5)], ids=str)
def test_affine_grids_are_exact(size, corners, device, path):
    rank = len(size) - 2
    theta = torch.randn(size[0], rank, rank + 1, device=device)
    exact = torch.nn.functional.affine_grid(theta.double(), size, align_corners=corners)
    with tritonite.use_gems(include=["affine_grid_generator"]):
        result = torch.nn.functional.affine_grid(theta, size, align_corners=corners)
    torch.testing.assert_close(result, exact.float(), rtol=1e-6, atol=1e-6)
    assert result.is_contiguous() and tritonite.stats()["affine_grid_generator"].launched == 1


@pytest.mark.parametrize("kernel,stride", [((3, 3), 1), ((3, 2), 2), ((5, 5), 1), ((2, 3), (3, 1))], ids=str)
def test_col2im_sums_windows(kernel, stride, device, path):
    images = torch.randn(2, 3, 14, 13, dtype=torch.float64, device=device)
    columns = torch.nn.functional.unfold(images, kernel, padding=1, stride=stride)
    expected = torch.nn.functional.fold(columns, (14, 13), kernel, padding=1, stride=stride)
    with tritonite.use_gems(include=["col2im"]):
        result = torch.nn.functional.fold(columns, (14, 13), kernel, padding=1, stride=stride)
    torch.testing.assert_close(result, expected)
    assert tritonite.stats()["col2im"].launched == 1


def test_block_diag_of_matrices_and_zero_dim_tensors(device):
    matrix, number = torch.ones(2, 3, dtype=torch.bfloat16, device=device), torch.tensor(0.5).double().to(device)
    for tensors in ((matrix, number), (number, matrix), (number, number)):
        expected = torch.block_diag(*tensors)
        with tritonite.use_gems(include=["block_diag"]):
            result = torch.block_diag(*tensors)
        assert result.dtype is expected.dtype and torch.equal(result, expected)


@pytest.mark.declines("ATen refuses the output")
def test_chunk_cat_into_integers_raises_atens_error(device):
    x, out = torch.ones(3, device=device), torch.zeros(2, 2, dtype=torch.int64, device=device)
    with tritonite.use_gems(include=["_chunk_cat"]), pytest.raises(TypeError, match="can't be cast"):
        torch.ops.aten._chunk_cat.out([x[:1].expand(3)], 0, 2, out=out)


def test_pads_of_negative_zero_keep_its_sign(device, path):
    x = torch.ones(2, dtype=torch.complex128, device=device)
    with tritonite.use_gems(include=["constant_pad_nd"]):
        for value in (0.0, -0.0):
            padded = torch.view_as_real(torch.nn.functional.pad(x, [1, 0], value=value))
            assert bool(padded[0, 0].signbit()) == (str(value) == "-0.0")


def test_view_as_complex_at_odd_offsets_raises_atens_error(device, path):
    memory = torch.zeros(12, device=device)
    with tritonite.use_gems(include=["view_as_complex_copy"]):
        for offset, rows in itertools.product((0, 2, 1), (0, 3)):
            x = memory[offset : offset + 2 * rows].view(rows, 2)
            if offset % 2:
                with pytest.raises(RuntimeError, match="storage_offset"):
                    torch.view_as_complex_copy(x)
            else:
                assert torch.equal(torch.view_as_complex_copy(x), torch.view_as_complex(x))


def test_unfold_backward_with_large_steps(device):
    grad = torch.randn(1, 3, 2, device=device)
    with tritonite.use_gems():
        found = torch.ops.aten.unfold_backward(grad, [2, 3], 0, 2, 2**31)
    assert torch.equal(found, grad[0].t()) and not tritonite.stats()["unfold_backward"].declined


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_complex_numbers_have_the_bits_of_their_components(dtype, device):
    real = torch.randn(6, 10, device=device, dtype=torch.float64).to(dtype)
    imag = real.flip(0)
    real[0, :3], imag[1, :3] = torch.tensor([-0.0, torch.inf, torch.nan]), torch.tensor([-torch.inf, -0.0, 0.0])
    for parts in ((real, imag), (real.t(), imag.t()), (real[:, ::2], imag[0, ::2]), (real, imag[0, 0])):
        assert identical(serves("complex", lambda parts=parts: torch.complex(*parts)), torch.complex(*parts))


@pytest.mark.declines("ATen refuses the ranges")
@pytest.mark.parametrize(
    ("name", "ends", "dtype"),
    [
        ("arange", (-1e308, 1e308), None),
        ("arange", (0.0, 1.0, 1e-320), None),
        ("arange", (0.0, 2.0**70), torch.int64),
        ("arange", (1e19, 1e19 + 4096), torch.int32),
        ("range", (0.0, 1e308), torch.float32),
        ("range", (1e308, -1e308, -1.0), torch.float32),
        ("range", (0.0, 1e308), torch.int64),
    ],
)
def test_ranges_too_large_for_memory_raise_atens_error(name, ends, dtype, device, path):
    function = getattr(torch.ops.aten, name)
    with tritonite.use_gems(include=[name]), pytest.raises(RuntimeError, match=r"overflow|cannot be represented"):
        function(*ends, dtype=dtype, device=device)


def test_rows_of_all_dimensions_share_a_tile(device):
    """Patches of 16 by 16 are copied, converted, and added to an operand that repeats along some dimensions."""
    x = torch.randn(3, 3, 80, 64, device=device)
    patches = x.unfold(2, 16, 16).unfold(3, 16, 16)
    assert choose_tile((16, 16, 14, 2688), ((1, 224, 16, 3584), (1, 16, 256, 3584)), 4).linear
    assert not choose_tile((64, 64, 2), ((1, 64, 4096), (1, 64, 4096)), 4).linear
    for view in (patches, patches.permute(0, 2, 3, 1, 4, 5), patches[:, :, 1:, :, :13], patches[..., :13, :]):
        for other in (view[:1, :, :1], view[..., :1, :], view[:, :1, :, :1, :1]):
            expected = view.clone(memory_format=torch.contiguous_format), view.half(), view + other
            with tritonite.use_gems():
                found = view.clone(memory_format=torch.contiguous_format), view.half(), view + other
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert found[0].is_contiguous() and found[2].stride() == expected[2].stride()


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("value", [-100.0, 2.7, -0.5, 0.0])
def test_integers_are_padded_with_a_truncated_float(dtype, value):
    """The labels of a decoder are padded with -100.0. A number that the dtype has not is ATen's to refuse."""
    x = torch.ones(3, 4, dtype=dtype, device=tritonite.device)
    pad = tritonite.overloads()["constant_pad_nd"]
    if dtype is torch.uint8 and value < 0:
        with pytest.raises(Decline):
            pad(x, [1, 2], value)
        return
    assert torch.equal(pad(x, [1, 2], value), torch.ops.aten.constant_pad_nd(x, [1, 2], value))
