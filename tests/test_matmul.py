"""Products by every kernel and kind of tile: layouts, split-K, strided columns, epilogues."""

import itertools
import math

import pytest
import torch
from conftest import FULL, every_second, some
from products import CONFIGS, FLOATS, SPECIALIZED, check, laid_out, matmul, normal, on_sm_90

import tritonite
from tritonite import devices
from tritonite.engine.gemm import cost, product
from tritonite.engine.gemm import launch as gemm_launch
from tritonite.engine.gemm.problem import Problem
from tritonite.engine.gemm.table import Config
from tritonite.engine.gemm.work import Epilogue
from tritonite.testing.judge import assert_close, terms


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "dtype", "layouts"),
    some(list(CONFIGS), FLOATS, [("plain", "plain"), ("transposed", "transposed"), ("strided", "plain")], turns=3),
)
def test_every_kernel_in_every_layout(name, dtype, layouts, use_config, set_copy_time):
    config = CONFIGS[name]
    # No operand is copied, so that the kernel reads strided elements itself.
    set_copy_time(math.inf)
    descriptors = use_config(config)
    # A group of tiles and a partial one of tiles with four rows.
    rows = {1: 1, 4: 40}.get(config.BLOCK_M, 72)
    columns = 104 if FULL or config.BLOCK_M != 4 else 40
    a, b = laid_out(rows, 80, layouts[0], dtype), laid_out(80, columns, layouts[1], dtype)
    if config.descriptors and "strided" in layouts:
        pytest.skip("TMA needs a contiguous dimension")
    check(matmul.mm(a, b)[0], torch.mm, a, b)
    assert descriptors == ["strided" not in layouts]
    a, b = laid_out(rows, 48, layouts[0], dtype, (3,)), laid_out(48, 40, layouts[1], dtype, (3,))
    check(matmul.bmm(a, b)[0], torch.bmm, a, b)


@pytest.mark.parametrize(
    ("name", "dtype", "layouts"),
    some(
        [name for name, config in CONFIGS.items() if not config.descriptors],
        [torch.float32, torch.bfloat16],
        [("plain", "plain"), ("transposed", "transposed")],
        turns=2,
    ),
)
def test_sizes_that_divide_nothing(name, dtype, layouts, use_config):
    """K has one block or several. 16-bit operands are loaded element by element."""
    config = CONFIGS[name]
    use_config(config)
    for rows, inner, columns in (
        ((1, 1, 1), (1, 33, 37), (1, 31, 1)) if config.BLOCK_M == 1 else ((33, 17, 65), (5, 7, 3), (35, 111, 67))
    ):
        a, b = laid_out(rows, inner, layouts[0], dtype), laid_out(inner, columns, layouts[1], dtype)
        check(matmul.mm(a, b)[0], torch.mm, a, b)


@every_second(
    ("name", "columns", "batches"),
    ["pointers", "split-K", "four rows, split-K"],
    [(65, 0, 0), (65, 1, 0), (65, 3, 5), (64, 6, 3), (66, 0, 0), (68, 4, 0)],
    [1, 2],
)
def test_strided_columns_of_any_alignment(name, columns, batches, use_config, change_tables):
    """The second operand has any alignment and odd columns, which are followed by other columns or by nan."""
    K, offset, beyond = columns
    change_tables(gemm={"alike_columns": 10, "strided_k": 10, "strided_k_vectors": 10, "cached_bytes": 0})
    config = CONFIGS[name]
    use_config(config)
    M, N = 5, 299
    length = K + beyond
    b = torch.full((offset + batches * N * length + 8,), math.nan, dtype=torch.float16, device=tritonite.device)
    b = b[offset:].as_strided((batches, K, N), (N * length, 1, length)).copy_(normal(batches, K, N))
    a, bias, out = (normal(batches, M, size, dtype=torch.float16) for size in (K, N, N))
    problem = Problem.of(a, b, out).with_column_stride()
    assert problem.column_stride == 16 // math.gcd(16, 2 * length) and problem.b_vector == 16
    tiles = cost.records([config])
    assert problem.tiles(config) == cost.count(problem, tiles)[0] >= problem.column_stride
    check(matmul.baddbmm(bias, a, b, beta=0.5, alpha=2.0)[0], torch.baddbmm, bias, a, b, beta=0.5, alpha=2.0)
    few_columns = b.mT, a.mT
    check(matmul.bmm(*few_columns)[0], torch.bmm, *few_columns)


@pytest.mark.parametrize("name", ["split-K", "four rows, split-K"])
def test_columns_of_equal_alignment_have_equal_tiles_in_all_slices(name, use_config, change_tables):
    """The product fits in the cache, and its partial products do not."""
    a, b = normal(5, 66, dtype=torch.float16), normal(299, 66, dtype=torch.float16).mT
    bytes_of_all = Problem.of(a[None], b[None], a.new_empty(1, 5, 299)).bytes
    change_tables(gemm={"alike_columns": 10, "strided_k_vectors": 10, "cached_bytes": bytes_of_all})
    use_config(CONFIGS[name])
    check(matmul.mm(a, b)[0], torch.mm, a, b)


@pytest.mark.parametrize("transposed", [False, True])
def test_slices_of_a_misaligned_row(transposed, use_config):
    use_config(Config(64, 16, 32, descriptors=True, transposed=transposed, splits=2))
    a, b = normal(1, 80, dtype=torch.bfloat16), normal(37, 80, dtype=torch.bfloat16).mT
    check(matmul.mm(a, b)[0], torch.mm, a, b)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("split_store", [False, True])
@pytest.mark.parametrize("batches", [(), (2,)])
@pytest.mark.parametrize(("rows", "layout"), [(70, "plain"), (72, "plain"), (72, "transposed")])
def test_slices_of_rows_that_are_no_multiple_of_16_bytes(
    rows, layout, batches, split_store, transposed, use_config, set_copy_time, monkeypatch
):
    """16-bit operands are copied for TMA. A program stores several split-K slices, whose rows are misaligned, too."""
    set_copy_time(-1e9)
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 1)
    use_config(Config(64, 32, 32, descriptors=True, transposed=transposed, split_store=split_store, splits=2))
    a, b = normal(*batches, rows, 80, dtype=torch.bfloat16), laid_out(80, 51, layout, torch.bfloat16, batches)
    function = torch.bmm if batches else torch.mm
    check(tritonite.overloads()[function.__name__](a, b), function, a, b)
    bias = normal(rows, 51, dtype=torch.bfloat16)
    if not batches:
        check(tritonite.overloads()["addmm"](bias, a, b), torch.addmm, bias, a, b)


@pytest.mark.parametrize("rows", [64, 72])
def test_few_columns_of_column_major_operands(rows, use_config):
    """Weight gradients of layers with few inputs. Warp-specialised kernels have no layout for narrow subtiles."""
    use_config(SPECIALIZED["transposed"])
    a, b = normal(80, rows, dtype=torch.bfloat16).mT, normal(80, 8, dtype=torch.bfloat16)
    check(matmul.mm(a, b)[0], torch.mm, a, b)


@pytest.mark.parametrize("name", ["descriptors", "transposed", "transposed, split-K"])
def test_a_vector_is_a_column_or_a_row(name, use_config):
    use_config(CONFIGS[name])
    a, x = normal(72, 80, dtype=torch.bfloat16), normal(80, dtype=torch.bfloat16)
    check(matmul.mv(a, x)[0], torch.mv, a, x)
    check(matmul.mm(x[None], a.mT)[0], torch.mm, x[None], a.mT)
    check(matmul.mm(a, x[:, None])[0], torch.mm, a, x[:, None])


@on_sm_90
@pytest.mark.smoke
@pytest.mark.parametrize("name", SPECIALIZED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layouts", list(itertools.product(["plain", "transposed"], repeat=2)))
def test_warp_specialised_products(name, dtype, layouts, use_config):
    use_config(SPECIALIZED[name])
    a, b = laid_out(1504, 136, layouts[0], dtype, (3,)), laid_out(136, 1032, layouts[1], dtype, (3,))
    check(matmul.bmm(a, b)[0], torch.bmm, a, b)
    check(matmul.mm(a[0], b[0])[0], torch.mm, a[0], b[0])
    x = normal(1032, dtype=dtype)
    check(matmul.addmm(x, a[0], b[0], 0.5, 2)[0], torch.addmm, x, a[0], b[0], beta=0.5, alpha=2)
    x = normal(1504, 1033, dtype=dtype)[:, 1:]
    check(matmul.addmm(x, a[0], b[0], 0.5, 2)[0], torch.addmm, x, a[0], b[0], beta=0.5, alpha=2)
    a, b = a[0], b[0]
    expected = torch.mm(a, b, out_dtype=torch.float32)
    actual = matmul.mm(a, b, torch.float32)[0]
    assert_close(actual, expected, a.double() @ b.double(), terms=terms("mm", (a, b), expected))
    for M, K, N in ((40, 8, 24), (264, 4104, 520), (2360, 1032, 2296), (16, 8192, 336)):
        a, b = laid_out(M, K, layouts[0], dtype), laid_out(K, N, layouts[1], dtype)
        check(matmul.mm(a, b)[0], torch.mm, a, b)


@pytest.mark.parametrize("result", [torch.float16, torch.float32])
def test_warp_specialised_products_have_two_stages(result, use_config, monkeypatch):
    """A block is released when the next one is being multiplied. With one stage a product would never end."""
    stages = []

    class Launched:
        def __getitem__(self, grid):
            return lambda *_, META, **__: stages.append(META.stages)

    monkeypatch.setattr(gemm_launch.hopper, "multiply_warp_specialized", Launched())
    monkeypatch.setattr(devices, "shared_memory", lambda device: 227 * 1024)
    monkeypatch.setattr(devices, "has_tma", lambda device: True)
    a, b = (torch.empty(1, 512, 512, dtype=torch.float16)[..., :n] for n in (448, 512))
    out, added = torch.empty(1, 512, 512, dtype=result), torch.empty(512, 513, dtype=result)[:, 1:]
    swept = cost.load(cost.FOLDER / "NVIDIA_H200.json")[2].configs
    configs = [each for each in (*swept, *SPECIALIZED.values()) if each.warp_specialize and each.splits == 1]
    for config in configs:
        use_config(config)
        product.product(a, b[:, :448], out, Epilogue(added, beta=0.5))
    assert len(stages) == len(configs) and min(stages) > 1


@pytest.mark.parametrize(
    ("name", "kind"),
    some(
        ["pointers", "split-K", "descriptors", "descriptors, split-K", "split_store"],
        ["row", "column", "full", "number", "batch"],
        turns=2,
    ),
)
def test_addends(name, kind, use_config):
    use_config(CONFIGS[name])
    a, b = normal(3, 72, 48, dtype=torch.float16), normal(3, 48, 104, dtype=torch.float16)
    shape = {"row": (104,), "column": (72, 1), "full": (3, 72, 104), "number": (), "batch": (3, 1, 1)}[kind]
    x = normal(*shape, dtype=torch.float16)
    check(matmul.baddbmm(x, a, b, 0.5, 2)[0], torch.baddbmm, x, a, b, beta=0.5, alpha=2)


@pytest.mark.parametrize(
    "config",
    [CONFIGS[name] for name in ("descriptors", "transposed", "descriptors, split-K")]
    + [pytest.param(config, marks=on_sm_90) for config in SPECIALIZED.values()],
)
def test_addends_may_be_the_output(config, use_config):
    """Programs whose tiles share rows or columns must not read what another program has stored."""
    use_config(config)
    a, b = normal(3, 200, 48, dtype=torch.float16), normal(3, 48, 360, dtype=torch.float16)
    x = normal(3, 200, 360, dtype=torch.float16)
    expected = torch.baddbmm(x.double(), a.double(), b.double(), beta=0.5, alpha=2)
    product.product(a, b, x, Epilogue(x, alpha=2.0, beta=0.5))
    torch.testing.assert_close(x.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["pointers", "split-K", "descriptors"])
@pytest.mark.parametrize("use_gelu", [False, True])
def test_activations(name, use_gelu, use_config):
    use_config(CONFIGS[name])
    args = normal(104, dtype=torch.float16), normal(72, 48, dtype=torch.float16), normal(48, 104, dtype=torch.float16)
    function = torch.ops.aten._addmm_activation
    check(matmul._addmm_activation(*args, 1, 0.25, use_gelu)[0], function, *args, alpha=0.25, use_gelu=use_gelu)


@pytest.mark.parametrize("name", ["pointers", "split-K"])
def test_batches_that_are_summed(name, use_config):
    use_config(CONFIGS[name])
    x, a, b = normal(40), normal(5, 33, 50), normal(5, 50, 40)
    check(matmul.addbmm(x, a, b, 0.5, 2)[0], torch.addbmm, x, a, b, beta=0.5, alpha=2)


def test_sums_are_the_same_every_time(use_config):
    use_config(Config(16, 64, 16, splits=8))
    a, b = normal(20, 1000), normal(1000, 70)
    assert torch.equal(matmul.mm(a, b)[0], matmul.mm(a, b)[0])


@pytest.mark.parametrize(
    ("rows", "inner", "config"), [(1, 1, Config(1, 128, 1)), (1, 2, Config(1, 64, 2)), (3, 3, Config(4, 64, 4))]
)
def test_blocks_as_long_as_a_short_inner_dimension(rows, inner, config, use_config):
    """A single term needs no sum."""
    use_config(config)
    a, b = normal(5, rows, inner), normal(5, inner, 100)
    check(matmul.bmm(a, b)[0], torch.bmm, a, b)


@pytest.mark.parametrize("name", ["pointers", "bf16x6", "four rows"])
def test_infinities_nan_and_extreme_values(name, use_config):
    use_config(CONFIGS[name])
    a, b = normal(64, 32), normal(32, 64)
    a[0, 0], a[1, 1], a[2, 2], a[3, 3], b[4, 4] = math.inf, math.nan, 3e38, 1e-40, -math.inf
    check(matmul.mm(a, b)[0], torch.mm, a, b)
    b[:, 5], b[0, 6] = 0, 1e-30
    check(matmul.mm(a, b)[0], torch.mm, a, b)
