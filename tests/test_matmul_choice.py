"""The choice of a product's tile, and which operands TMA reads in place or by padded copies."""

import math
import random
import types

import pytest
import torch
from conftest import FULL, calls_through, some
from products import CONFIGS, LAYOUTS, SPECIALIZED, check, laid_out, matmul, normal
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

import tritonite
from tritonite import devices
from tritonite.engine.gemm import launch as gemm_launch
from tritonite.engine.gemm import operands as gemm_operands
from tritonite.engine.gemm import product, select, work
from tritonite.engine.gemm.problem import Problem
from tritonite.engine.gemm.table import Config
from tritonite.engine.gemm.work import Epilogue

# Batches, M, N and K of products for which the rule chooses tiles.
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
def test_the_rule_fits_the_device(case, dtypes, descriptors, change_device):
    change_device(kind="nvidia", programs=1056)
    problem, device = Problem(*case, *dtypes, True, True), torch.device("cpu")
    config = select.choose(problem, device, descriptors)
    K = case[3]
    assert 1 <= config.splits <= max(1, K // config.BLOCK_K)
    for epilogue_bytes in (0, 4):
        fitting, result = select.fitting(config, problem, device, epilogue_bytes), dtypes[1].itemsize + epilogue_bytes
        assert fitting.num_stages > 1
        assert fitting.shared(dtypes[0].itemsize, result if config.descriptors else 0) <= devices.current.shared_memory


@pytest.mark.parametrize("case", CASES)
def test_the_rule_warp_specialises_where_possible(case, change_device, monkeypatch):
    change_device(kind="nvidia", programs=1056)
    bf16, device = Problem(*case, torch.bfloat16, torch.bfloat16, True, True), torch.device("cpu")
    float8 = bf16._replace(dtype=torch.float8_e4m3fn, blockwise=True)

    def warp_specialized(problem, descriptors=True, can=True):
        config = select.fitting(select.rule(problem, device, descriptors, can), problem, device)
        result = problem.result.itemsize
        assert config.splits == 1 or not config.warp_specialize
        assert (
            config.shared(problem.dtype.itemsize, result if config.descriptors else 0) <= devices.current.shared_memory
        )
        return config.warp_specialize

    assert not any(map(warp_specialized, (bf16, float8)))
    monkeypatch.setattr(devices, "has_wgmma", lambda device: True)
    for problem in (bf16, float8, bf16._replace(result=torch.float32)):
        warp_specialized(problem)
    assert not warp_specialized(bf16, can=False)
    assert not warp_specialized(bf16, descriptors=False)
    assert not warp_specialized(float8._replace(b_inner=False))
    assert not warp_specialized(bf16._replace(dtype=torch.float32))


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


def test_explain_shows_the_tile(device, use_config):
    use_config(Config(32, 64, 16))
    a, b = torch.randn(64, 80, device=device), torch.randn(80, 96, device=device)
    found = tritonite.explain("mm", a, b)
    assert "BLOCK_M 32" in found and "BLOCK_N 64" in found and "BLOCK_K 16" in found


def _any_layout(draw, batches, rows, columns, dtype):
    """Return row-major or column-major matrices, with or without gaps within and between them, at any address."""
    if draw.random() < 0.4:
        return _any_layout(draw, batches, columns, rows, dtype).mT
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
def test_descriptors_address_aligned_memory_only(config, dtype, set_copy_time, monkeypatch):
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
    set_copy_time(-1e9)
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
        a, b = _any_layout(draw, batches, M, K, dtype), _any_layout(draw, batches, K, N, dtype)
        result = {torch.int8: torch.int32}.get(dtype, draw.choice([dtype, torch.float32]))
        out = _any_layout(draw, batches, M, N, result)
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


@pytest.mark.parametrize("layouts", [("plain", "plain"), ("plain", "transposed"), ("strided", "plain")])
def test_long_16_bit_operands_of_odd_sizes_are_copied_for_descriptors(layouts, use_config, set_copy_time):
    set_copy_time(-1e9)
    descriptors = use_config(
        next(config for config in CONFIGS.values() if config.descriptors and not config.warp_specialize)
    )
    a, b = laid_out(70, 77, layouts[0], torch.bfloat16), laid_out(77, 51, layouts[1], torch.bfloat16)
    check(matmul.mm(a, b)[0], torch.mm, a, b)
    a, b = laid_out(33, 24, layouts[0], torch.bfloat16, (2,)), laid_out(24, 37, layouts[1], torch.bfloat16, (2,))
    check(matmul.bmm(a, b)[0], torch.bmm, a, b)
    assert descriptors == [True, True]


@pytest.mark.parametrize(
    ("name", "first", "second"), some(["bf16x6", "transposed, split-K", "four rows"], LAYOUTS, LAYOUTS, turns=3)
)
def test_long_float32_operands_of_odd_sizes_are_copied_with_zero_padding(
    name, first, second, use_config, set_copy_time, monkeypatch
):
    copied, copy = [], gemm_operands.padded_copy
    monkeypatch.setattr(
        gemm_operands, "padded_copy", lambda x, *by_rows: copied.append(x.data_ptr()) or copy(x, *by_rows)
    )
    set_copy_time(-1e9)
    use_config(CONFIGS[name])
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


@pytest.mark.parametrize(("rows", "by_rows"), [(9, True), (70, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_few_rows_are_row_major(rows, by_rows, dtype, set_copy_time, monkeypatch):
    copies, copy = [], gemm_operands.padded_copy
    monkeypatch.setattr(gemm_operands, "padded_copy", lambda *given: copies.append(copy(*given)) or copies[-1])
    set_copy_time(-1e9)
    a, b = normal(77, rows, dtype=dtype).mT, normal(77, 51, dtype=dtype)
    check(matmul.mm(a, b)[0], torch.mm, a, b)
    (found,) = [each for each in copies if each.shape == (1, rows, 77)]
    assert (found.stride(2) == 1, found.stride(1) == 1) == (by_rows, not by_rows)
    assert torch.equal(found, a[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_without_terms_copy_nothing(dtype, set_copy_time, monkeypatch):
    set_copy_time(-1e9)
    monkeypatch.setattr(gemm_operands, "padded_copy", lambda *_: pytest.fail("a copy"))
    a, b, added = normal(33, 77, dtype=dtype), normal(77, 37, dtype=dtype), normal(37, dtype=dtype)
    assert torch.equal(matmul.addmm(added, a, b, 1, 0)[0], added.expand(33, 37))


@pytest.mark.parametrize("path", ["native", "python"])
def test_products_of_copies_are_replayed(path, set_copy_time):
    set_copy_time(-1e9)
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
