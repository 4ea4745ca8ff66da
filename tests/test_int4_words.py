"""4-bit weights packed for tensor cores: the layout as documented, and products against float64."""

import pytest
import torch

import tritonite
from tritonite.engine.gemm import select
from tritonite.engine.quantized.table import aten_multiplies_words_faster
from tritonite.errors import Decline
from tritonite.testing.samples import facts, samples

convert = tritonite.overloads()["_convert_weight_to_int4pack"]
product = tritonite.overloads()["_weight_int4pack_mm"]


@pytest.fixture(autouse=True)
def every_call():
    """Serve calls for which ATen is faster, too."""
    with tritonite.use_gems(include=(), faster_only=False):
        yield


def numbers_of(packed, N):
    """Unpack one number after another, by the instruction's layout of its second operand (m16n8k16)."""
    tiles, outer, _, words = packed.shape
    found = torch.zeros(8 * tiles, outer * words * 32, dtype=torch.int64)
    for tile, block, lane, word in torch.cartesian_prod(*[torch.arange(size) for size in packed.shape]).tolist():
        bits = int(packed[tile, block, lane, word]) & 0xFFFFFFFF
        for s in range(8):
            byte = lane % 4 + 4 * (s % 4)
            k = (block * words + word) * 32 + 2 * byte + s // 4
            found[8 * tile + lane // 4, k] = bits >> 4 * s & 0xF
    return found[:N]


def packed_bytes(numbers):
    """Return bytes with the number at an even index in the high nibble."""
    return (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)


@pytest.mark.parametrize(("N", "K", "tiles"), [(8, 32, 2), (20, 128, 4), (16, 256, 8), (3, 64, 2)])
def test_layout(N, K, tiles):
    numbers = torch.randint(0, 16, (N, K))
    packed = convert(packed_bytes(numbers).to(tritonite.device), tiles)
    assert packed.dtype is torch.int32 and packed.is_contiguous()
    assert packed.shape == (-(-N // 8), K // (16 * tiles), 32, tiles // 2)
    assert torch.equal(numbers_of(packed.cpu(), N), numbers)
    # Rows that fill the last tile are zeros.
    assert not numbers_of(packed.cpu(), 8 * packed.shape[0])[N:].any()


def check(M, N, K, group, tiles, laid=lambda pairs: pairs):
    device = tritonite.device
    numbers = torch.randint(0, 16, (N, K), device=device)
    x = torch.randn(M, K, device=device).bfloat16()
    pairs = laid(torch.randn(K // group, N, 2, device=device).bfloat16())
    found = product(x, convert(packed_bytes(numbers), tiles), group, pairs)
    scale, zero = [pairs[..., i].t().repeat_interleave(group, 1).double() for i in range(2)]
    weight = ((numbers.double() - 8) * scale + zero).bfloat16().double()
    exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    assert found.dtype is torch.bfloat16 and found.is_contiguous()
    # One number in many is between two bfloat16 numbers, which float32's rounding decides.
    assert bool(((found - exact).abs() <= 2**-8 * exact.abs() + 1e-3 * size).all())


@pytest.mark.parametrize(
    ("M", "N", "K", "group", "tiles"),
    [(1, 8, 64, 32, 2), (5, 72, 256, 64, 4), (40, 40, 256, 128, 8), (2, 16, 512, 256, 8)],
)
def test_products(M, N, K, group, tiles):
    check(M, N, K, group, tiles)


def _between_words(pairs):
    return torch.cat([pairs.new_zeros(1), pairs.flatten()])[1:].view(pairs.shape)


@pytest.mark.parametrize("laid", [lambda pairs: pairs.mT.contiguous().mT, _between_words], ids=["strided", "offset"])
def test_pairs_that_are_no_words(laid):
    check(3, 16, 128, 32, 2, laid)


def test_slices_of_k(monkeypatch):
    of_tables = select.of_tables
    monkeypatch.setattr(select, "of_tables", lambda *given: of_tables(*given)._replace(splits=2))
    check(5, 24, 256, 32, 4)


def test_few_rows_of_few_terms_are_left_to_aten():
    assert aten_multiplies_words_faster(8, 4096)
    assert not aten_multiplies_words_faster(9, 4096) and not aten_multiplies_words_faster(8, 8192)


def test_no_rows():
    assert product(*_arguments(M=0)).shape == (0, 8)


def _arguments(M=2, group=32, dtype=torch.bfloat16):
    packed = torch.zeros(1, 2, 32, 1, dtype=torch.int32, device=tritonite.device)
    pairs = torch.zeros(64 // 32, 8, 2, dtype=torch.bfloat16, device=tritonite.device)
    return torch.zeros(M, 64, dtype=dtype, device=tritonite.device), packed, group, pairs


@pytest.mark.parametrize(
    ("change", "match"),
    [({"group": 16}, "groups of 16"), ({"group": 64}, "scales and zeros"), ({"dtype": torch.float16}, "operands of")],
)
def test_declines_what_aten_refuses(change, match):
    with pytest.raises(Decline, match=match):
        product(*_arguments(**change))


@pytest.mark.parametrize(("shape", "tiles", "match"), [((8, 24), 2, "48 numbers"), ((8, 32), 3, "3 tiles")])
def test_conversion_declines_what_aten_refuses(shape, tiles, match):
    with pytest.raises(Decline, match=match):
        convert(torch.zeros(shape, dtype=torch.uint8, device=tritonite.device), tiles)


def test_samples_reference_is_the_product():
    for sample in samples(product, torch.float32, tritonite.device):
        exact = facts.REFERENCES["_weight_int4pack_mm"](*sample.args, **sample.kwargs)
        found = product(*sample.args, **sample.kwargs)
        torch.testing.assert_close(found.double(), exact, atol=0.1, rtol=2**-7)
