"""Products where samples do not reach: several tiles, split sums, tensor descriptors, endings, groups, the rule."""

import contextlib
import dataclasses
import itertools
import math
import random
import sys
import types

import pytest
import torch
from conftest import FULL, calls_through, some
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

import tritonite
from tritonite import devices, registry
from tritonite.engine.gemm import cost, cost_pointers, product, select, table, work
from tritonite.engine.gemm import launch as gemm_launch
from tritonite.engine.gemm import operands as gemm_operands
from tritonite.engine.gemm.problem import Problem
from tritonite.engine.gemm.table import Config
from tritonite.engine.gemm.work import Epilogue
from tritonite.errors import Decline
from tritonite.testing import fuzz
from tritonite.testing.fuzz.draw import functional_results
from tritonite.testing.judge import assert_close, terms
from tritonite.testing.samples.matmul import shapes_of

# The family's module, whose name is its operator's in `tritonite.ops`.
matmul = sys.modules["tritonite.ops.matmul"]
CONFIGS = {
    "pointers": Config(32, 32, 16),
    "split": Config(16, 64, 16, splits=3),
    "one row": Config(1, 32, 32),
    "one row, split": Config(1, 32, 32, splits=2),
    "four rows": Config(4, 32, 32),
    "four rows, split": Config(4, 32, 32, splits=2),
    "descriptors": Config(32, 64, 32, descriptors=True),
    "descriptors, split": Config(32, 64, 32, descriptors=True, splits=3),
    "halves": Config(64, 32, 32, descriptors=True, split_store=True),
    "transposed": Config(64, 32, 32, descriptors=True, transposed=True),
    "transposed, split": Config(64, 16, 32, transposed=True, splits=3),
    "three parts": Config(64, 64, 32, bf16x6=True),
}
FLOATS = (torch.float32, torch.bfloat16, torch.float64)
# Warp-specialised tiles.
_SPECIALIZED = Config(128, 128, 64, 8, 4, descriptors=True, warp_specialize=True)
SPECIALIZED = {
    "wide": _SPECIALIZED._replace(BLOCK_N=256, num_stages=3),
    "high": _SPECIALIZED._replace(BLOCK_M=256, GROUP_M=1),
    "halves": _SPECIALIZED._replace(split_store=True, num_stages=6),
    "three groups": _SPECIALIZED._replace(BLOCK_M=192, num_warps=12, num_stages=2),
    "one group, twice": _SPECIALIZED._replace(BLOCK_M=64, num_warps=4, num_stages=3, programs=2),
    "transposed": _SPECIALIZED._replace(BLOCK_N=16, transposed=True),
    "split": _SPECIALIZED._replace(num_stages=3, splits=3),
    "transposed, split": _SPECIALIZED._replace(BLOCK_N=32, transposed=True, splits=2),
    "more columns": _SPECIALIZED._replace(MORE_N=64, split_store=True),
    "more columns, transposed": _SPECIALIZED._replace(BLOCK_N=64, MORE_N=16, transposed=True, splits=2),
    "ping-pong": _SPECIALIZED._replace(split_store=True, num_stages=6, pingpong=True),
    "ping-pong, transposed": _SPECIALIZED._replace(BLOCK_M=64, num_stages=3, pingpong=True, transposed=True),
    "ping-pong, more columns": _SPECIALIZED._replace(MORE_N=64, split_store=True, pingpong=True),
}
LAYOUTS = ("plain", "transposed", "strided")


on_sm_90 = pytest.mark.skipif(
    not devices.has_wgmma(torch.device(tritonite.device)), reason="Gluon's kernel is for sm_90, which it needs to run"
)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device=tritonite.device).to(dtype)


def laid_out(rows, columns, layout, dtype, batches=()):
    if layout == "transposed":
        return normal(*batches, columns, rows, dtype=dtype).mT
    if layout == "strided":
        return normal(*batches, rows, 2 * columns, dtype=dtype)[..., ::2]
    return normal(*batches, rows, columns, dtype=dtype)


@pytest.fixture
def use(monkeypatch):
    """Return a function that makes every product use a config, and the list of whether each could use descriptors."""
    descriptors = []

    def prepare(config):
        monkeypatch.setattr(
            select, "choose", lambda problem, device, can, warp_specialized: descriptors.append(can) or config
        )
        monkeypatch.setattr(select, "for_groups", lambda problem, device: config)
        return descriptors

    return prepare


def check(actual, function, *operands, **keywords):
    expected = function(*operands, **keywords)
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in operands]
    assert_close(actual, expected, function(*wide, **keywords), terms=terms("mm", operands, expected))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "dtype", "layouts"),
    some(list(CONFIGS), FLOATS, [("plain", "plain"), ("transposed", "transposed"), ("strided", "plain")], turns=3),
)
def test_every_kernel_in_every_layout(name, dtype, layouts, use, monkeypatch):
    config = CONFIGS[name]
    # No operand is copied, so that the kernel reads strided elements itself.
    monkeypatch.setattr(cost_pointers, "copying", lambda sizes, _: math.inf if sizes else 0.0)
    descriptors = use(config)
    # A group of tiles and a partial one of tiles with four rows.
    rows = {1: 1, 4: 40}.get(config.BLOCK_M, 72)
    columns = 104 if FULL or config.BLOCK_M != 4 else 40
    a, b = laid_out(rows, 80, layouts[0], dtype), laid_out(80, columns, layouts[1], dtype)
    if config.descriptors and "strided" in layouts:
        pytest.skip("no descriptor tells of elements apart from each other")
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
def test_sizes_that_divide_nothing(name, dtype, layouts, use):
    """K has one block or several. 16-bit operands are loaded element by element."""
    config = CONFIGS[name]
    use(config)
    for rows, inner, columns in (
        ((1, 1, 1), (1, 33, 37), (1, 31, 1)) if config.BLOCK_M == 1 else ((33, 17, 65), (5, 7, 3), (35, 111, 67))
    ):
        a, b = laid_out(rows, inner, layouts[0], dtype), laid_out(inner, columns, layouts[1], dtype)
        check(matmul.mm(a, b)[0], torch.mm, a, b)


def limit(monkeypatch, **fields):
    """Replace limits of the current device's table."""
    monkeypatch.setitem(table.LIMITS, devices.current.kind, table.limits()._replace(**fields))


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize(
    ("K", "offset", "beyond"), [(65, 0, 0), (65, 1, 0), (65, 3, 5), (64, 6, 3), (66, 0, 0), (68, 4, 0)]
)
@pytest.mark.parametrize("name", ["pointers", "split", "four rows, split"])
def test_columns_that_begin_alike(name, K, offset, beyond, batches, use, monkeypatch):
    """The second operand has any alignment and odd columns, which are followed by other columns or by nan."""
    limit(monkeypatch, alike_columns=10, strided_k=10, strided_k_vectors=10, cached_bytes=0)
    config = CONFIGS[name]
    use(config)
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


@pytest.mark.parametrize("name", ["split", "four rows, split"])
def test_columns_of_equal_alignment_have_equal_tiles_in_all_slices(name, use, monkeypatch):
    """The product fits in the cache, and its partial products do not."""
    a, b = normal(5, 66, dtype=torch.float16), normal(299, 66, dtype=torch.float16).mT
    bytes_of_all = Problem.of(a[None], b[None], a.new_empty(1, 5, 299)).bytes
    limit(monkeypatch, alike_columns=10, strided_k_vectors=10, cached_bytes=bytes_of_all)
    use(CONFIGS[name])
    check(matmul.mm(a, b)[0], torch.mm, a, b)


@pytest.mark.parametrize(
    ("K", "dtype", "layouts"), some([1, 3, 8], FLOATS, list(zip(LAYOUTS, LAYOUTS, strict=True)), turns=3), ids=str
)
def test_short_inner_dimensions(K, dtype, layouts):
    """Products have one row or several tiles, batches, and addends."""
    for M, N, batches in ((1, 64, (5,)), (7, 130, (3,)), (70, 40, ()), (40, 1, (2,))):
        a, b = (laid_out(*size, layout, dtype, batches) for size, layout in zip(((M, K), (K, N)), layouts, strict=True))
        function = matmul.bmm if batches else matmul.mm
        check(function(a, b)[0], torch.bmm if batches else torch.mm, a, b)
    a, b, added = laid_out(70, K, layouts[0], dtype), laid_out(K, 40, layouts[1], dtype), normal(40, dtype=dtype)
    check(matmul.addmm(added, a, b, beta=0.5, alpha=2.0)[0], torch.addmm, added, a, b, beta=0.5, alpha=2.0)


@pytest.mark.parametrize("transposed", [False, True])
def test_slices_of_a_misaligned_row(transposed, use):
    use(Config(64, 16, 32, descriptors=True, transposed=transposed, splits=2))
    a, b = normal(1, 80, dtype=torch.bfloat16), normal(37, 80, dtype=torch.bfloat16).mT
    check(matmul.mm(a, b)[0], torch.mm, a, b)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("split_store", [False, True])
@pytest.mark.parametrize("batches", [(), (2,)])
@pytest.mark.parametrize(("rows", "layout"), [(70, "plain"), (72, "plain"), (72, "transposed")])
def test_slices_of_rows_that_are_no_multiple_of_16_bytes(
    rows, layout, batches, split_store, transposed, use, monkeypatch
):
    """16-bit operands are copied for TMA. A program stores several split-K slices, whose rows are misaligned, too."""
    monkeypatch.setattr(cost_pointers, "copying", lambda sizes, _: -1e9 * len(sizes))
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 1)
    use(Config(64, 32, 32, descriptors=True, transposed=transposed, split_store=split_store, splits=2))
    a, b = normal(*batches, rows, 80, dtype=torch.bfloat16), laid_out(80, 51, layout, torch.bfloat16, batches)
    function = torch.bmm if batches else torch.mm
    check(tritonite.overloads()[function.__name__](a, b), function, a, b)
    bias = normal(rows, 51, dtype=torch.bfloat16)
    if not batches:
        check(tritonite.overloads()["addmm"](bias, a, b), torch.addmm, bias, a, b)


def _laid_anyhow(draw, batches, rows, columns, dtype):
    """Return matrices in rows or columns, with or without gaps within and between them, at any address."""
    if draw.random() < 0.4:
        return _laid_anyhow(draw, batches, columns, rows, dtype).mT
    # Mostly no gap, or a gap of 16 bytes.
    gaps = [0] * 6 + [1, 16 // dtype.itemsize]
    row = columns + draw.choice(gaps)
    matrix, first = rows * row + draw.choice(gaps), draw.choice(gaps)
    memory = torch.empty(first + batches * matrix, dtype=dtype, device=tritonite.device)
    return memory.as_strided((batches, rows, columns), (matrix, row, 1), first)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(config, dtype) for config in CONFIGS.values() for dtype in (torch.bfloat16, torch.float32, torch.int8)]
    # Warp-specialised tiles are for 16-bit operands.
    + [(config, torch.bfloat16) for config in SPECIALIZED.values()],
)
def test_descriptors_address_aligned_memory_only(config, dtype, monkeypatch):
    """No size, layout or epilogue makes a TMA descriptor of misaligned memory."""
    launched = []

    class Launched:
        def __getitem__(self, grid):
            return lambda *operands, **_: launched.append(operands)

    for module, kernel in (
        (gemm_launch, "multiply_tiles"),
        (gemm_launch, "multiply_short_k"),
        (gemm_launch, "multiply_few_rows"),
        (gemm_launch, "multiply_strided_columns"),
        (gemm_launch, "multiply_persistent"),
        (gemm_operands, "copy_rows"),
        (gemm_launch, "reduce_split_k"),
        (gemm_launch.hopper, "multiply_warp_specialized"),
    ):
        monkeypatch.setattr(module, kernel, Launched())
    monkeypatch.setattr(cost_pointers, "copying", lambda sizes, _: -1e9 * len(sizes))
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(devices, "has_tma", lambda device: True)
    other = Config(32, 32, 32)
    monkeypatch.setattr(select, "choose", lambda problem, device, can, _: config if can else other)
    monkeypatch.setattr(select, "fitting", lambda config, *_: config)
    draw = random.Random(0)
    for _ in range(150):
        sizes = draw.choice([[1, 2, 7, 8, 17, 64, 70, 72, 127, 128, 510], [16, 64, 128, 208]])
        M, N, K = (draw.choice(sizes) for _ in range(3))
        batches = draw.choice([1, 1, 1, 3])
        a, b = _laid_anyhow(draw, batches, M, K, dtype), _laid_anyhow(draw, batches, K, N, dtype)
        result = {torch.int8: torch.int32}.get(dtype, draw.choice([dtype, torch.float32]))
        out = _laid_anyhow(draw, batches, M, N, result)
        added = (
            Epilogue(draw.choice([out, out[:1, :1], out[:, :, :1]]), beta=1.0) if draw.random() < 0.5 else Epilogue()
        )
        invariant = types.SimpleNamespace(invariant=draw.random() < 0.3)
        for module in (product, work, gemm_operands):
            monkeypatch.setattr(module, "settings", lambda kept=invariant: kept)
        product.product(a, b, out, added)
    kinds = TensorDescriptor, gemm_launch.hopper.TensorDescriptor
    described = sum(isinstance(x, kinds) for operands in launched for x in operands)
    assert len(launched) >= 150 and (described > 60 or not config.descriptors)


@pytest.mark.parametrize("rows", [64, 72])
def test_few_columns_of_column_major_operands(rows, use):
    """Weight gradients of layers with few inputs. Warp-specialised kernels have no layout for narrow subtiles."""
    use(SPECIALIZED["transposed"])
    a, b = normal(80, rows, dtype=torch.bfloat16).mT, normal(80, 8, dtype=torch.bfloat16)
    check(matmul.mm(a, b)[0], torch.mm, a, b)


@pytest.mark.parametrize("name", ["descriptors", "transposed", "transposed, split"])
def test_a_vector_is_a_column_or_a_row(name, use):
    use(CONFIGS[name])
    a, x = normal(72, 80, dtype=torch.bfloat16), normal(80, dtype=torch.bfloat16)
    check(matmul.mv(a, x)[0], torch.mv, a, x)
    check(matmul.mm(x[None], a.mT)[0], torch.mm, x[None], a.mT)
    check(matmul.mm(a, x[:, None])[0], torch.mm, a, x[:, None])


@on_sm_90
@pytest.mark.smoke
@pytest.mark.parametrize("name", SPECIALIZED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layouts", list(itertools.product(["plain", "transposed"], repeat=2)))
def test_warp_specialised_products(name, dtype, layouts, use):
    use(SPECIALIZED[name])
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
def test_warp_specialised_products_have_two_stages(result, use, monkeypatch):
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
    swept = cost.load(cost.FOLDER / "sm_90.json")[2].configs
    configs = [each for each in (*swept, *SPECIALIZED.values()) if each.warp_specialize and each.splits == 1]
    for config in configs:
        use(config)
        product.product(a, b[:, :448], out, Epilogue(added, beta=0.5))
    assert len(stages) == len(configs) and min(stages) > 1


@pytest.mark.parametrize(
    ("name", "kind"),
    some(
        ["pointers", "split", "descriptors", "descriptors, split", "halves"],
        ["row", "column", "full", "number", "batch"],
        turns=2,
    ),
)
def test_addends(name, kind, use):
    use(CONFIGS[name])
    a, b = normal(3, 72, 48, dtype=torch.float16), normal(3, 48, 104, dtype=torch.float16)
    shape = {"row": (104,), "column": (72, 1), "full": (3, 72, 104), "number": (), "batch": (3, 1, 1)}[kind]
    x = normal(*shape, dtype=torch.float16)
    check(matmul.baddbmm(x, a, b, 0.5, 2)[0], torch.baddbmm, x, a, b, beta=0.5, alpha=2)


@pytest.mark.parametrize(
    "config",
    [CONFIGS[name] for name in ("descriptors", "transposed", "descriptors, split")]
    + [pytest.param(config, marks=on_sm_90) for config in SPECIALIZED.values()],
)
def test_addends_may_be_the_output(config, use):
    """Programs whose tiles share rows or columns must not read what another program has stored."""
    use(config)
    a, b = normal(3, 200, 48, dtype=torch.float16), normal(3, 48, 360, dtype=torch.float16)
    x = normal(3, 200, 360, dtype=torch.float16)
    expected = torch.baddbmm(x.double(), a.double(), b.double(), beta=0.5, alpha=2)
    product.product(a, b, x, Epilogue(x, alpha=2.0, beta=0.5))
    torch.testing.assert_close(x.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["pointers", "split", "descriptors"])
@pytest.mark.parametrize("use_gelu", [False, True])
def test_activations(name, use_gelu, use):
    use(CONFIGS[name])
    args = normal(104, dtype=torch.float16), normal(72, 48, dtype=torch.float16), normal(48, 104, dtype=torch.float16)
    function = torch.ops.aten._addmm_activation
    check(matmul._addmm_activation(*args, 1, 0.25, use_gelu)[0], function, *args, alpha=0.25, use_gelu=use_gelu)


@pytest.mark.parametrize("name", ["pointers", "split"])
def test_batches_that_are_summed(name, use):
    use(CONFIGS[name])
    x, a, b = normal(40), normal(5, 33, 50), normal(5, 50, 40)
    check(matmul.addbmm(x, a, b, 0.5, 2)[0], torch.addbmm, x, a, b, beta=0.5, alpha=2)


@pytest.mark.parametrize(
    ("size", "dtype", "layout"),
    some([(1, 300), (300, 1), (7, 300), (300, 16), (1, 1)], FLOATS, LAYOUTS[:2], turns=2),
    ids=str,
)
def test_few_rows_or_columns(size, layout, dtype):
    rows, columns = size
    a, b = laid_out(rows, 500, "plain", dtype), laid_out(500, columns, layout, dtype)
    check(matmul.mm(a, b)[0], torch.mm, a, b)
    x = normal(columns, dtype=dtype)
    check(matmul.addmm(x, a, b, 1, 1)[0], torch.addmm, x, a, b)


def test_vectors():
    a, v, w = normal(30, 700), normal(1400)[::2], normal(30)
    check(matmul.mv(a, v)[0], torch.mv, a, v)
    check(matmul.addmv(w, a, v, 0.5, -1)[0], torch.addmv, w, a, v, beta=0.5, alpha=-1)
    check(matmul.dot(v, v.flip(0))[0], torch.dot, v, v.flip(0))
    with pytest.raises(Decline):
        matmul.mv(a, v[:, None])
    with tritonite.use_gems():
        check(torch.addr(a, w, v), torch.addr, a, w, v)
        assert torch.addr(a.int(), w.int(), v.int(), alpha=2).dtype is torch.int32
        check(torch.addr(a * math.nan, w, v, beta=0), torch.addr, a, w, v, beta=0)
    assert tritonite.stats()["addr"].launched + tritonite.stats()["addr"].replayed


def test_factors_of_zero():
    a, b, x = normal(40, 30), normal(30, 50), torch.full((50,), math.nan, device=tritonite.device)
    assert matmul.addmm(x, a, b, 0, 1)[0].isfinite().all()
    assert (matmul.addmm(torch.ones_like(x), a * math.nan, b, 3, 0)[0] == 3).all()
    for beta, value in ((0, 0), (2, 2)):
        assert (matmul.addmm(torch.ones_like(x), a[:, :0], b[:0], beta, 1)[0] == value).all()
    assert not matmul.mm(a[:0], b)[0].numel()


# Sizes of a product, and factors. Sizes are 0, 1, or no multiple of a tile.
SIZES, FACTORS = (0, 1, 15, 63, 64), (0, 1, 0.5)
SIZED = [op for op in registry.overloads().values() if op.family == "matmul" and shapes_of(op.packet, 1, 1, 1, 1)]


def _sized_calls(op, dtype, count):
    """Yield calls of an overload by drawn sizes and factors. Operands with a factor of 0 are nan."""
    draw = random.Random(f"{op.overload} {dtype}")
    for number in range(count):
        # Half of the calls have an inner dimension or a factor of 0. Before an activation, such a dimension declines.
        inner = SIZES[1:] if op.packet == "_addmm_activation" else (0, *SIZES)
        batches, M, N, K = (draw.choice(each) for each in ((0, 1, 2), SIZES, SIZES, inner))
        alpha, beta = draw.choice((0, *FACTORS)), draw.choice(FACTORS)
        arguments = {
            name: normal(*shape, dtype=dtype) for name, shape in shapes_of(op.packet, batches, M, N, K).items()
        }
        own = {
            "beta": beta,
            "alpha": alpha,
            "use_gelu": number % 2 == 0,
            "out_dtype": max(dtype, torch.float32, key=lambda each: each.itemsize),
        }
        arguments |= {name: value for name, value in own.items() if name in op.names}
        if "beta" in arguments and beta == 0 and number % 2:
            arguments["self"].fill_(math.nan)
        # Without a BLAS, for a few elements, ATen multiplies batches by a factor of 0 on the CPU.
        reads = op.packet == "addr" or (op.packet == "baddbmm" and devices.current.type == "cpu")
        if "alpha" in arguments and alpha == 0 and number % 3 == 0 and not reads:
            arguments[op.names[1]].fill_(math.inf)
        arguments = {name: arguments[name] for name in op.names}
        call = fuzz.Call(op, arguments)
        if op.out_names:
            answer = functional_results(call)
            if answer is None:
                continue
            call = fuzz.Call(op, {**arguments, op.out_names[0]: torch.full_like(answer[0], math.nan)})
        yield call


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", SIZED, ids=lambda op: op.overload)
def test_products_of_all_sizes(op, dtype, path):
    if dtype not in op.declaration.accepts:
        pytest.skip("a dtype that the kernel is not for")
    if not op.has_place:
        pytest.skip("an overload that ATen has on a GPU alone")
    for call in _sized_calls(op, dtype, 125 if FULL else 8):
        tritonite.reset_stats()
        assert fuzz.check(call) is None, str(call)
        counts = tritonite.stats()[op.overload]
        assert counts.launched + counts.replayed == 2 and not counts.declined, (str(call), counts)
        assert path == "python" or counts.replayed, (str(call), counts)


WITHOUT_TERMS = {
    "mm": lambda x: matmul.mm(x[:15, :0], x[:0, :1]),
    "mm of columns": lambda x: matmul.mm(x[:0, :15].mT, x[:0, :1]),
    "bmm": lambda x: matmul.bmm(x.new_empty(2, 1, 0), x.new_empty(2, 0, 7)),
    "mv": lambda x: matmul.mv(x[:4, :0], x[0, :0]),
    "addmv": lambda x: matmul.addmv(x[0], x[:, :1], x[0, :1], 0, 0),
    "addmm": lambda x: matmul.addmm(x[0, :9], x[:, :0], x[:0, :9], 1, 3),
    "addmm by 0": lambda x: matmul.addmm(x[:, :9], x, x[:, :9], 0.5, 0),
    "activation by 0": lambda x: matmul._addmm_activation(x[0, :9], x, x[:, :9], 1, 0, True),
    "addbmm": lambda x: matmul.addbmm(x[:16, :1], x.new_empty(0, 16, 3), x.new_empty(0, 3, 1), 0.5, 1),
    "addbmm by 0": lambda x: matmul.addbmm(x[:16, :1], x[None, :16], x[None, :, :1], 1, 0),
    "baddbmm by 0": lambda x: matmul.baddbmm(x[None, :16, :1], x[None, :16], x[None, :, :1], 1, 0),
    "baddbmm to columns": lambda x: matmul.baddbmm(
        x[None], x[None], x[None], 1, 0, outs=(torch.zeros_like(x).mT[None],)
    ),
}


@pytest.mark.parametrize("name", WITHOUT_TERMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("invariant", [False, True])
def test_products_without_terms_need_no_tiles(name, dtype, invariant, monkeypatch):
    """Kernels with tiles need K above 0. Products with K of 0 are computed before tiles are chosen."""

    def no_tiles(problem, *_):
        raise AssertionError(f"tiles for {problem}")

    for asked in ("choose", "fitting", "aten_is_faster", "microseconds"):
        monkeypatch.setattr(select, asked, no_tiles)
    x = normal(63, 63, dtype=dtype)
    with tritonite.use_gems(invariant=invariant):
        assert WITHOUT_TERMS[name](x)[0].isfinite().all()


def test_activations_after_an_inner_dimension_of_0_decline():
    x = normal(32, 32)
    half, byte, one = x.half(), x.to(torch.float8_e4m3fn), torch.ones((), device=x.device)
    ends = torch.tensor([16, 32], dtype=torch.int32, device=x.device)
    for declined in (
        lambda: matmul._addmm_activation(x, x[:, :0], x[:0], 1, 1, False),
        lambda: matmul._scaled_mm(byte[:, :0], byte.mT[:0], one, one, None, None, torch.bfloat16, False),
        lambda: matmul._grouped_mm(half[:, :0], half[:0], ends, None, None),
        lambda: matmul._grouped_mm(half[:, :0], half.new_empty(2, 32, 16)[:, :0], ends, None, None),
    ):
        with pytest.raises(Decline, match="an inner dimension of 0"):
            declined()


def test_destinations():
    a, b = normal(40, 32, dtype=torch.float16), normal(32, 48, dtype=torch.float16)
    expected = torch.mm(a, b)
    kept = normal(48, 80, dtype=torch.float16)
    for out in (torch.empty_like(expected), torch.empty_like(expected.mT).mT, kept.clone().mT[::2]):
        with tritonite.use_gems():
            torch.mm(a, b, out=out)
        check(out.contiguous(), torch.mm, a, b)
    x = normal(40, 48, dtype=torch.float16)
    with tritonite.use_gems():
        y = x.clone().addmm_(a, b, beta=0.5)
    check(y, torch.addmm, x, a, b, beta=0.5)
    assert not any(counts.declined for counts in tritonite.stats().values())
    square = normal(32, 32)
    with pytest.raises(Decline, match="overlaps"):
        matmul.mm(square, square, outs=(square,))
    with pytest.raises(Decline, match="overlaps"):
        matmul.addmm(square.mT, square + 1, square + 2, 1, 1, outs=(square,))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(3, 4), torch.ones(5, 6)),
        (torch.ones(3, 4), torch.ones(4)),
        (torch.ones(3, 4), torch.ones(4, 5, dtype=torch.float64)),
        (torch.ones(3, 4).int(), torch.ones(4, 5).int()),
        (torch.ones(3, 4, dtype=torch.complex64), torch.ones(4, 5, dtype=torch.complex64)),
    ],
)
def test_invalid_operands_decline(a, b):
    with pytest.raises(Decline):
        matmul.mm(a.to(tritonite.device), b.to(tritonite.device))


def test_float32_results_of_16_bit_products():
    a, b = normal(40, 64, dtype=torch.bfloat16), normal(64, 48, dtype=torch.bfloat16)
    (wide,) = matmul.mm(a, b, out_dtype=torch.float32)
    assert_close(wide, a.float() @ b.float(), a.double() @ b.double(), terms=64 * 9)
    with pytest.raises(Decline):
        matmul.mm(a, b, out_dtype=torch.float16)
    x, a, b = wide[None], a[None], b[None]
    out = torch.empty_like(x)
    matmul.bmm(a, b, out_dtype=torch.float32, outs=(out,))
    assert_close(out, a.float() @ b.float(), a.double() @ b.double(), terms=64 * 9)
    matmul.baddbmm(x, a, b, 1, 2, out_dtype=torch.float32, outs=(out,))
    assert_close(out, x + 2 * a.float() @ b.float(), x + 2 * a.double() @ b.double(), terms=64 * 36)


def test_tf32_where_torch_allows_it(monkeypatch):
    taken, before = [], torch.backends.cuda.matmul.fp32_precision
    monkeypatch.setattr(matmul, "product", lambda *args, precision, **keywords: taken.append(precision))
    try:
        for setting in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = setting
            matmul.mm(normal(4, 4), normal(4, 4))
            matmul.mm(normal(4, 4).double(), normal(4, 4).double())
        torch.set_float32_matmul_precision("high")
        matmul.mm(normal(4, 4), normal(4, 4))
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before
    assert taken == ["ieee", "ieee", "tf32", "ieee", "tf32"]


def test_sums_are_the_same_every_time(use):
    use(Config(16, 64, 16, splits=8))
    a, b = normal(20, 1000), normal(1000, 70)
    assert torch.equal(matmul.mm(a, b)[0], matmul.mm(a, b)[0])


@pytest.mark.parametrize(
    ("rows", "inner", "config"), [(1, 1, Config(1, 128, 1)), (1, 2, Config(1, 64, 2)), (3, 3, Config(4, 64, 4))]
)
def test_blocks_as_long_as_a_short_inner_dimension(rows, inner, config, use):
    """A single term needs no sum."""
    use(config)
    a, b = normal(5, rows, inner), normal(5, inner, 100)
    check(matmul.bmm(a, b)[0], torch.bmm, a, b)


def test_offsets_beyond_32_bits():
    store = torch.empty(2**31 + 4096, dtype=torch.float16, device=tritonite.device)
    a = store.as_strided((3, 64), (2**30, 1))
    a.copy_(normal(3, 64))
    b = normal(64, 40, dtype=torch.float16)
    check(matmul.mm(a, b)[0], torch.mm, a.clone(), b)


@pytest.mark.parametrize("ends", [(5, 8, 32), (0, 40, 50), (20, 20, 20)])
def test_groups_end_within_their_rows(ends):
    """Whatever the offsets, nothing beyond the rows is read or written."""
    a = normal(24, 48, dtype=torch.float16)
    offs = torch.tensor(ends, dtype=torch.int32, device=tritonite.device)
    matrices, rows = normal(3, 16, 16, dtype=torch.float16), torch.full((24, 16), 7.0, dtype=torch.float16)
    rows = rows.to(tritonite.device)
    product.grouped_product(a[:20, :16], matrices, offs, rows[:20], "ieee")
    for begin, end, matrix in zip((0, *ends), ends, matrices, strict=False):
        check(rows[begin : min(end, 20)], torch.mm, a[begin : min(end, 20), :16], matrix)
    assert (rows[20:] == 7).all()
    (sums,) = matmul._grouped_mm(a[:16, :24], a[:, 32:], offs, None, None)
    for begin, end, actual in zip((0, *ends), ends, sums, strict=False):
        check(actual, torch.mm, a[:16, begin : min(end, 24)], a[begin : min(end, 24), 32:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ends", [(40, 40, 107, 200), (0, 0, 0, 200), (8, 16, 24, 32)])
def test_groups(dtype, ends, use):
    use(Config(32, 32, 32, descriptors=True))
    offs = torch.tensor(ends, dtype=torch.int32, device=tritonite.device)
    parts = list(zip((0, *ends[:-1]), ends, strict=True))
    rows, square = normal(200, 64, dtype=dtype), normal(4, 64, 48, dtype=dtype)
    for b in (square, normal(4, 48, 64, dtype=dtype).mT):
        (out,) = matmul._grouped_mm(rows, b, offs, None, None)
        for own, (begin, end) in zip(b, parts, strict=True):
            check(out[begin:end].contiguous(), torch.mm, rows[begin:end], own)
    for second in (normal(64, 200, dtype=dtype), normal(200, 64, dtype=dtype).mT):
        (out,) = matmul._grouped_mm(square.mT.contiguous(), second, offs, None, None)
        for own, (begin, end) in zip(square.mT, parts, strict=True):
            check(out[:, begin:end].contiguous(), torch.mm, own, second[:, begin:end])
    for first in (normal(72, 200, dtype=dtype), normal(200, 72, dtype=dtype).mT):
        (out,) = matmul._grouped_mm(first, rows, offs, None, None)
        for own, (begin, end) in zip(out, parts, strict=True):
            check(own.contiguous(), torch.mm, first[:, begin:end], rows[begin:end])


def test_layouts_of_groups_are_atens():
    a, b = normal(24, 16, dtype=torch.bfloat16), normal(3, 20, 16, dtype=torch.bfloat16).mT
    # On a GPU groups of columns end at multiples of 16 bytes.
    offs = torch.tensor([8, 8, 24], dtype=torch.int32, device=tritonite.device)
    for args in ((a, b, offs), (b.mT.contiguous().mT.mT, a.mT, offs), (normal(3, 8, 16, dtype=torch.bfloat16), b)):
        with tritonite.use_gems():
            actual = torch._grouped_mm(*args[:2], offs=args[2] if len(args) > 2 else None)
        expected = torch._grouped_mm(*args[:2], offs=args[2] if len(args) > 2 else None)
        assert actual.shape == expected.shape
        assert actual.stride() == expected.stride()
    assert not tritonite.stats()["_grouped_mm"].declined
    refused = [(a, b, offs.long()), (a, b, offs[:2]), (a, b, None), (a[:, 1:], b[:, 1:], offs), (b.mT[:2], b, None)]
    for wrong in refused:
        with pytest.raises(Decline):
            matmul._grouped_mm(*wrong, None, None)


@on_sm_90
@pytest.mark.parametrize("name", ["wide", "halves", "three groups"])
@pytest.mark.parametrize("use_fast_accum", [False, True])
def test_warp_specialised_scaled_products(name, use_fast_accum, use):
    use(SPECIALIZED[name]._replace(BLOCK_N=128, BLOCK_K=128, num_stages=3))
    test_scaled(1504, torch.float8_e4m3fn, use_fast_accum)
    test_scaled(100, torch.float8_e5m2, use_fast_accum)


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [1, 9, 100])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("use_fast_accum", [False, True])
def test_scaled(rows, dtype, use_fast_accum):
    a, b = normal(rows, 256).to(dtype), normal(48, 256).to(dtype).mT
    one, two = torch.tensor([0.25], device=tritonite.device), torch.tensor(2.0, device=tritonite.device)
    bias = normal(48, dtype=torch.bfloat16)
    for scales in ((one, two), (normal(rows, 1), normal(1, 48))):
        for added in (None, bias):
            args = (a, b, *scales, added, None, torch.bfloat16, use_fast_accum)
            exact = (a.double() @ b.double()) * scales[0].double() * scales[1].double()
            exact = exact if added is None else exact + added.double()
            (actual,) = matmul._scaled_mm(*args)
            on_gpu, aten = tritonite.device == "cuda", exact.bfloat16()
            if on_gpu:
                with contextlib.suppress(RuntimeError, ValueError):
                    # cuBLAS has no products of two float8_e5m2 operands, nor of every size.
                    aten = torch._scaled_mm(*args)
            # Hopper's tensor cores add these products in 14 bits (DeepSeek-V3's report, 3.3.2), not in 24.
            assert_close(actual, aten, exact, terms=256 * 100 * (2**20 if on_gpu else 1))
            error, aten_error = (actual.double() - exact).abs().max(), (aten.double() - exact).abs().max()
            # ATen's error is one rounding at least.
            assert error <= 2 * torch.maximum(aten_error, exact.abs().max() / 2**9)
    with pytest.raises(Decline):
        matmul._scaled_mm(a, b, one, two, None, None, dtype, False)


# The rule, for the H200's tables.
CASES = [
    (1, 4096, 4096, 4096),
    (1, 8192, 8192, 1024),
    (1, 512, 512, 512),
    (1, 1, 128_256, 4096),
    (1, 16, 4096, 14_336),
    (128, 2048, 2048, 128),
    (1, 256, 256, 65_536),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.int8, torch.int32)])
@pytest.mark.parametrize("descriptors", [True, False])
def test_the_rule_fits_the_device(case, dtypes, descriptors, monkeypatch):
    monkeypatch.setattr(devices, "current", dataclasses.replace(devices.current, kind="nvidia", programs=1056))
    problem, device = Problem(*case, *dtypes, True, True), torch.device("cpu")
    config = select.choose(problem, device, descriptors)
    K = case[3]
    assert 1 <= config.splits <= max(1, K // config.BLOCK_K)
    for beside in (0, 4):
        fitting, result = select.fitting(config, problem, device, beside), dtypes[1].itemsize + beside
        assert fitting.num_stages > 1
        assert fitting.shared(dtypes[0].itemsize, result if config.descriptors else 0) <= devices.current.shared_memory


@pytest.mark.parametrize("case", CASES)
def test_the_rule_divides_work_where_it_can_be(case, monkeypatch):
    monkeypatch.setattr(devices, "current", dataclasses.replace(devices.current, kind="nvidia", programs=1056))
    half, device = Problem(*case, torch.bfloat16, torch.bfloat16, True, True), torch.device("cpu")
    float8 = half._replace(dtype=torch.float8_e4m3fn, blockwise=True)

    def warp_specialized(problem, descriptors=True, can=True):
        config = select.fitting(select.rule(problem, device, descriptors, can), problem, device)
        result = problem.result.itemsize
        assert config.splits == 1 or not config.warp_specialize
        assert (
            config.shared(problem.dtype.itemsize, result if config.descriptors else 0) <= devices.current.shared_memory
        )
        return config.warp_specialize

    assert not any(map(warp_specialized, (half, float8)))
    monkeypatch.setattr(devices, "has_wgmma", lambda device: True)
    for problem in (half, float8, half._replace(result=torch.float32)):
        warp_specialized(problem)
    assert not warp_specialized(half, can=False)
    assert not warp_specialized(half, descriptors=False)
    assert not warp_specialized(float8._replace(b_inner=False))
    assert not warp_specialized(half._replace(dtype=torch.float32))


@pytest.mark.parametrize("name", ["pointers", "three parts", "four rows"])
def test_infinities_nan_and_extreme_values(name, use):
    use(CONFIGS[name])
    a, b = normal(64, 32), normal(32, 64)
    a[0, 0], a[1, 1], a[2, 2], a[3, 3], b[4, 4] = math.inf, math.nan, 3e38, 1e-40, -math.inf
    check(matmul.mm(a, b)[0], torch.mm, a, b)
    b[:, 5], b[0, 6] = 0, 1e-30
    check(matmul.mm(a, b)[0], torch.mm, a, b)


@pytest.mark.skipif(tritonite.device == "cuda", reason="there ATen has them, and the samples are theirs")
@pytest.mark.parametrize("packet", ["mm", "bmm", "addmm", "baddbmm"])
def test_float32_results_that_aten_has_on_cuda_only(packet):
    rank = 3 if "b" in packet.removeprefix("add") else 2
    a, b, added = (torch.randn(*(2, 5, 5)[3 - rank :], generator=torch.manual_seed(i)).half() for i in range(3))
    exact, given = a.double() @ b.double(), (a, b)
    if packet not in ("mm", "bmm"):
        exact, given = exact * 0.5 + added.double() * 2.0, (added, a, b)
    factors = {"alpha": 0.5, "beta": 2.0} if len(given) == 3 else {}
    op = tritonite.overloads()[f"{packet}.dtype"]
    assert not op.has_place
    found = op(*given, torch.float32, **factors)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    out = torch.empty_like(found)
    assert tritonite.overloads()[f"{packet}.dtype_out"](*given, torch.float32, **factors, out=out) is out
    assert torch.equal(out, found)


@pytest.mark.parametrize("layouts", [("plain", "plain"), ("plain", "transposed"), ("strided", "plain")])
def test_long_16_bit_operands_of_odd_sizes_are_copied_for_descriptors(layouts, use, monkeypatch):
    monkeypatch.setattr(cost_pointers, "copying", lambda sizes, _: -1e9 * len(sizes))
    descriptors = use(next(config for config in CONFIGS.values() if config.descriptors and not config.warp_specialize))
    a, b = laid_out(70, 77, layouts[0], torch.bfloat16), laid_out(77, 51, layouts[1], torch.bfloat16)
    check(matmul.mm(a, b)[0], torch.mm, a, b)
    a, b = laid_out(33, 24, layouts[0], torch.bfloat16, (2,)), laid_out(24, 37, layouts[1], torch.bfloat16, (2,))
    check(matmul.bmm(a, b)[0], torch.bmm, a, b)
    assert descriptors == [True, True]


@pytest.mark.parametrize(("rows", "by_rows"), [(9, True), (70, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_few_rows_are_row_major(rows, by_rows, dtype, monkeypatch):
    copies, copy = [], gemm_operands.padded_copy
    monkeypatch.setattr(gemm_operands, "padded_copy", lambda *given: copies.append(copy(*given)) or copies[-1])
    monkeypatch.setattr(cost_pointers, "copying", lambda sizes, _: -1e9 * len(sizes))
    a, b = normal(77, rows, dtype=dtype).mT, normal(77, 51, dtype=dtype)
    check(matmul.mm(a, b)[0], torch.mm, a, b)
    (found,) = [each for each in copies if each.shape == (1, rows, 77)]
    assert (found.stride(2) == 1, found.stride(1) == 1) == (by_rows, not by_rows)
    assert torch.equal(found, a[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_without_terms_copy_nothing(dtype, monkeypatch):
    monkeypatch.setattr(cost_pointers, "copying", lambda sizes, _: -1e9 * len(sizes))
    monkeypatch.setattr(gemm_operands, "padded_copy", lambda *_: pytest.fail("a copy"))
    a, b, added = normal(33, 77, dtype=dtype), normal(77, 37, dtype=dtype), normal(37, dtype=dtype)
    assert torch.equal(matmul.addmm(added, a, b, 1, 0)[0], added.expand(33, 37))


@pytest.mark.parametrize(
    ("name", "first", "second"), some(["three parts", "transposed, split", "four rows"], LAYOUTS, LAYOUTS, turns=3)
)
def test_long_float32_operands_of_odd_sizes_are_copied_with_zero_padding(name, first, second, use, monkeypatch):
    copied, copy = [], gemm_operands.padded_copy
    monkeypatch.setattr(
        gemm_operands, "padded_copy", lambda x, *by_rows: copied.append(x.data_ptr()) or copy(x, *by_rows)
    )
    monkeypatch.setattr(cost_pointers, "copying", lambda sizes, _: -1e9 * len(sizes))
    use(CONFIGS[name])
    # The interpreter is slow for tiles of four rows.
    rows = 66 if FULL or name != "four rows" else 10
    a, b = laid_out(rows, 77, first, torch.float32), laid_out(77, 51, second, torch.float32)
    check(matmul.mm(a, b)[0], torch.mm, a, b)
    assert set(copied) == {a.data_ptr(), b.data_ptr()}
    copied.clear()
    # Only one operand is padded. Elements behind the other one, a slice, must not contribute.
    whole = torch.full((3, 96, 64), math.nan, device=tritonite.device)
    b = whole[:, :77, :52]
    b.copy_(normal(3, 77, 52))
    a = laid_out(rows, 77, first, torch.float32, (3,))
    check(matmul.bmm(a, b)[0], torch.bmm, a, b)
    check(matmul.bmm(b.mT, a.mT)[0], torch.bmm, b.mT, a.mT)
    assert set(copied) == {a.data_ptr()}


@pytest.mark.parametrize("path", ["native", "python"])
def test_products_of_copies_are_replayed(path, monkeypatch):
    monkeypatch.setattr(cost_pointers, "copying", lambda sizes, _: -1e9 * len(sizes))
    bias = normal(51, dtype=torch.bfloat16)
    tritonite.reset_stats()
    with calls_through(path):
        for _ in range(3):
            a, b = normal(70, 77, dtype=torch.bfloat16), normal(51, 77, dtype=torch.bfloat16).mT
            with tritonite.use_gems(include=["addmm"]):
                found = torch.addmm(bias, a, b)
            check(found, torch.addmm, bias, a, b)
    counts = tritonite.stats()["addmm"]
    assert counts.launched + counts.replayed == 3 and not counts.unrecordable
    assert counts.replayed == 2 or path == "python"


@pytest.mark.declines("the result has another shape in ATen")
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_product_without_rows_has_its_addends_shape_in_aten(shape):
    added, mat, vec = (torch.ones(size, device=tritonite.device) for size in (shape, (0, 2), (2,)))
    assert torch.addmv(added, mat, vec).shape == shape
    with tritonite.use_gems(include="addmv", faster_only=False):
        assert torch.addmv(added, mat, vec).shape == shape


@pytest.mark.parametrize("stages", [1, 2])
def test_a_compiler_that_needs_more_shared_memory_gets_fewer_stages(stages, device, monkeypatch):
    run, tried = gemm_launch.run, []

    def refusing(work, config):
        tried.append(config.num_stages)
        if config.num_stages > stages:
            raise OutOfResources(2**18, 2**17, "shared memory")
        run(work, config)

    monkeypatch.setattr(gemm_launch, "run", refusing)
    # Sizes differ each time, because plans outlive a scope and a replayed plan tries no tiles.
    a, b = torch.randn(70 + stages, 40, device=device), torch.randn(40, 90, device=device)
    with tritonite.use_gems():
        found = a @ b
    torch.testing.assert_close(found, (a.double() @ b.double()).float())
    assert tried == list(range(tried[0], stages - 1, -1)) and len(tried) > 1


def test_explain_shows_the_tile(device, use):
    use(Config(32, 64, 16))
    a, b = torch.randn(64, 80, device=device), torch.randn(80, 96, device=device)
    found = tritonite.explain("mm", a, b)
    assert "BLOCK_M 32" in found and "BLOCK_N 64" in found and "BLOCK_K 16" in found
