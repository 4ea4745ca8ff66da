"""Products of float8 by recipes of scales, and of groups, against float64."""

import pytest
import torch

import tritonite
from tritonite.errors import Decline
from tritonite.ops import aten, scaled_products
from tritonite.testing.samples import REFERENCES, samples

pytestmark = pytest.mark.usefixtures("any_architecture")

check_architecture = aten.check_architecture
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
# Hopper's tensor cores add float8 products with 13 bits of the largest (DeepSeek-AI 2024).
TOLERANCE = 1e-5 if tritonite.backend.interpreted else 4e-3
TENSOR, ROW, ONE_BY_32, ONE_BY_128, SQUARE = 0, 1, 3, 4, 5


def random(*shape, dtype=E4M3):
    return torch.randn(shape, device=tritonite.device).to(dtype)


def agrees(actual, exact):
    rounded = torch.finfo(actual.dtype).eps if actual.dtype.itemsize == 2 else 0
    assert (actual.double() - exact).abs().max() <= (TOLERANCE + rounded) * exact.abs().max()


def product(x, weight, a, b, dtype=torch.float32, bias=None, swizzle=()):
    """Return the product of x and the transposed weight, with (scale, recipe) of each."""
    scales = [a[0]], [a[1]], swizzle, [b[0]], [b[1]], swizzle
    (out,) = scaled_products._scaled_mm_v2(x, weight.mT, *scales, bias, dtype, [], False)
    return out


def scales_of_blocks(recipe, rows, K):
    """Return scales as ATen takes them, and for each element."""
    blocks = -(-K // 128)
    count, width = (rows, blocks) if recipe == ONE_BY_128 else (-(-rows // 128), -(-blocks // 4) * 4)
    by_row = torch.rand(count, width, device=tritonite.device) + 0.5
    given = by_row.t().contiguous().t() if recipe == ONE_BY_128 else by_row.t()
    spread = by_row.double().repeat_interleave(1 if recipe == ONE_BY_128 else 128, 0)
    return (given, recipe), spread.repeat_interleave(128, 1)[:rows, :K]


@pytest.mark.parametrize("recipes", [(ONE_BY_128, SQUARE), (SQUARE, ONE_BY_128), (ONE_BY_128, ONE_BY_128)])
@pytest.mark.parametrize("sizes", [(1, 16, 16), (70, 144, 272)])
def test_scales_of_blocks(recipes, sizes):
    M, N, K = sizes
    x, weight, bias = random(M, K), random(N, K), torch.randn(N, device=tritonite.device).bfloat16()
    (a, by_row), (b, by_column) = scales_of_blocks(recipes[0], M, K), scales_of_blocks(recipes[1], N, K)
    exact = (x.double() * by_row) @ (weight.double() * by_column).T
    agrees(product(x, weight, a, b), exact)
    agrees(product(x, weight, a, b, torch.bfloat16, bias), exact + bias.double())


def swizzled(scales):
    """Return scales (rows, blocks) in tiles of 128 rows and 4 blocks, row r at (r % 32, r // 32)."""
    rows, blocks = scales.shape
    down, across = -(-rows // 128), -(-blocks // 4)
    padded = torch.zeros(down * 128, across * 4, dtype=torch.uint8, device=scales.device)
    padded[:rows, :blocks] = scales
    return padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).contiguous().view(-1).view(E8M0)


def test_microscaled():
    M, N, K = 130, 48, 160
    x, weight = random(M, K), random(N, K)
    bits = [torch.randint(122, 132, (rows, K // 32), dtype=torch.uint8, device=x.device) for rows in (M, N)]
    a, b = [(swizzled(each), ONE_BY_32) for each in bits]
    spread = [torch.exp2(each.double() - 127).repeat_interleave(32, 1) for each in bits]
    agrees(product(x, weight, a, b, swizzle=[1]), (x.double() * spread[0]) @ (weight.double() * spread[1]).T)
    with pytest.raises(Decline, match="SWIZZLE_32_4_4"):
        product(x, weight, a, b, swizzle=[0])


@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("rows", [3, 80])
def test_operands_of_two_formats(formats, rows):
    """Gradients and weights of a layer have two formats of float8."""
    x, weight = random(rows, 144, dtype=formats[0]), random(48, 144, dtype=formats[1])
    half, two = torch.full((), 0.5, device=x.device), torch.full((1,), 2.0, device=x.device)
    agrees(product(x, weight, (half, TENSOR), (two, TENSOR)), x.double() @ weight.double().T)


def test_declined_recipes():
    x, one, rows = random(32, 64), torch.ones((), device=tritonite.device), torch.ones(32, 1, device=tritonite.device)
    with pytest.raises(Decline, match="which the recipe"):
        product(x, x, (rows, TENSOR), (one, TENSOR))
    with pytest.raises(Decline, match="a recipe of scales"):
        product(x, x, (one, TENSOR), (rows.mT, ROW))
    with pytest.raises(Decline, match="the recipe has"):
        product(x, x, (rows, ONE_BY_128), (rows.contiguous().view(1, 32), ONE_BY_128))
    with pytest.raises(Decline, match="one scale tensor for each operand"):
        scaled_products._scaled_mm_v2(
            x, x.mT, [one, one], [2, 0], [1, 0], [one, one], [2, 0], [1, 0], None, torch.float32, [], False
        )


@pytest.mark.parametrize("name", ["_scaled_grouped_mm", "_scaled_grouped_mm_v2"])
def test_references_judge_groups(name):
    """Samples have groups of rows, of columns and of the inner dimension, and batches."""
    op, served = tritonite.overloads()[name], set()
    for sample in samples(op, torch.float32, tritonite.device):
        given = sample.named(op)
        out = op(*sample.args, **sample.kwargs)
        agrees(out, REFERENCES[name](*sample.args, **sample.kwargs))
        served.add((given["self"].dim(), given["mat2"].dim()))
    assert len(served) == 4


def test_many_groups_over_several_tiles():
    """Rows of one group span tiles, and columns of a group are strided."""
    ends = torch.tensor([0, 16, 16, 144, 208], dtype=torch.int32, device=tritonite.device)
    x, weight = random(208, 144), random(5, 96, 144)
    rows, columns = torch.rand(208, device=x.device), torch.rand(5, 128, device=x.device)[:, :96]
    exact, begin = [], 0
    for group, end in enumerate(ends.tolist()):
        exact.append(x[begin:end].double() @ weight[group].double().T * rows[begin:end, None] * columns[group])
        begin = end
    for fast in (False, True):
        (out,) = scaled_products._scaled_grouped_mm(x, weight.mT, rows, columns, ends, None, None, None, fast)
        agrees(out, torch.cat(exact))


@pytest.mark.parametrize("ranks", [(2, 3), (3, 2), (3, 3), (2, 2)])
def test_groups_are_written_to_outputs(ranks):
    """torch 2.14 has an overload with out=."""
    ends = torch.tensor([16, 32], dtype=torch.int32, device=tritonite.device)
    operands = [random(32, 32), random(2, 32, 32)]
    x, weight = (operands[rank - 2] for rank in ranks)
    scales = [torch.rand((2, 32) if rank == 3 else (64 if ranks == (2, 2) else 32,), device=x.device) for rank in ranks]
    given = (
        x,
        weight.mT,
        [scales[0]],
        [ROW],
        [],
        [scales[1]],
        [ROW],
        [],
        None if ranks == (3, 3) else ends,
        None,
        None,
        [],
    )
    (fresh,) = scaled_products._scaled_grouped_mm_v2(*given, False)
    out = torch.zeros(*fresh.shape[:-1], 2 * fresh.shape[-1], dtype=torch.bfloat16, device=x.device)[..., ::2]
    assert scaled_products._scaled_grouped_mm_v2(*given, False, outs=(out,))[0] is out
    agrees(out, fresh.double())


def test_declined_groups():
    ends = torch.tensor([16, 32], dtype=torch.int32, device=tritonite.device)
    x, weight = random(32, 64), random(2, 48, 64)
    rows, columns = torch.ones(32, device=x.device), torch.ones(2, 48, device=x.device)
    good = x, weight.mT, rows, columns, ends, None, None, None, False
    scaled_products._scaled_grouped_mm(*good)
    for index, other, reason in (
        (0, x.to(E5M2), "float8_e4m3fn"),
        (1, weight.mT.contiguous(), "layout"),
        (2, rows[:, None], "scales of"),
        (4, None, "offsets missing"),
        (4, ends.long(), "offsets of"),
        (5, rows, "a bias"),
        (6, rows, "a scale for the result"),
        (7, torch.float32, "a result of"),
    ):
        with pytest.raises(Decline, match=reason):
            scaled_products._scaled_grouped_mm(*good[:index], other, *good[index + 1 :])


def test_architectures_that_aten_refuses_decline(monkeypatch):
    monkeypatch.setattr(aten.devices, "architecture", lambda device: "sm_90")
    check_architecture(torch.device("cpu"), ("sm_8", "sm_9"), "products")
    with pytest.raises(Decline, match="products on sm_90; ATen has them for sm_8x, sm_12x alone"):
        check_architecture(torch.device("cpu"), ("sm_8", "sm_12"), "products")
