"""Fourier transforms against ATen in float64: radices, two passes, layouts, gradients, declines."""

import math

import pytest
import torch
from conftest import served

import tritonite
from tritonite.engine import iteration
from tritonite.engine.fft import plan, table
from tritonite.engine.fft.strides import library_strides
from tritonite.errors import Decline

aten = torch.ops.aten
REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def draw(*shape, dtype=torch.complex64):
    return torch.randn(*shape, dtype=dtype, device=tritonite.device)


def check(name, x, *arguments):
    """Compare a direct call, so that a decline raises, with ATen in float64; return the result."""
    result, like = tritonite.overloads()[name](x, *arguments), getattr(aten, name)(x, *arguments)
    assert result.stride() == like.stride() and result.dtype is like.dtype
    exact = getattr(aten, name)(x.to(torch.complex128 if x.is_complex() else torch.float64), *arguments)
    size = math.prod(max(result.shape[d], x.shape[d]) for d in arguments[0])
    rms = exact.abs().square().mean().sqrt()
    bound = torch.finfo(result.dtype).eps * (2 + math.log2(size)) * 4 * rms
    assert float((result - exact).abs().max()) <= float(bound)
    return result


@pytest.fixture
def short_passes(monkeypatch):
    """Make transforms of more than 16 elements take two passes, in programs of few transforms."""
    kind = tritonite.devices.current.kind
    monkeypatch.setitem(table.TABLE, kind, table.FftTable(longest=16, elements=256))


LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 35, 49, 64, 70, 144, 210, 243, 512, 625)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_radix(length):
    for forward in (True, False):
        check("_fft_c2c", draw(3, length), [1], 0, forward)
    for onesided in (True, False):
        check("_fft_r2c", draw(3, length, dtype=torch.float32), [1], 1, onesided)
    check("_fft_c2r", draw(3, length // 2 + 1), [1], 2, length)


@pytest.mark.parametrize("length", [1024, 2401, 8192])
def test_long_transforms_of_one_pass(length):
    check("_fft_c2c", draw(1, length), [1], 0, True)


@pytest.mark.parametrize("length", [18, 20, 64, 144, 210, 256])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_two_passes(length, dtype, short_passes):
    """Signals of two passes are read and written with any strides."""
    if dtype is torch.complex128 and length > 64:
        pytest.skip("a float64 pass has half the elements")
    for x in (draw(2, length, dtype=dtype), draw(length, 2, dtype=dtype).t()):
        check("_fft_c2c", x, [1], 2, False)
        check("_fft_r2c", x.real, [1], 0, x.is_contiguous())
        check("_fft_c2r", x[:, : length // 2 + 1], [1], 0, length)


def test_dimensions_of_two_passes(short_passes):
    x = draw(18, 2, 20, dtype=torch.complex64)
    check("_fft_c2c", x, [2, 0], 1, True)
    check("_fft_r2c", x.real, [0, 2], 1, True)
    check("_fft_c2r", x[..., :11], [0, 2], 1, 20)


@pytest.mark.parametrize("dim", [[0], [1], [2], [0, 1], [1, 0], [2, 0], [0, 1, 2], [2, 1, 0], [3, 0, 2, 1]])
def test_layouts_and_orders_of_dimensions(dim):
    x = draw(3, 4, 5, 6, dtype=torch.complex128)
    layouts = (x, x.permute(3, 1, 0, 2), x[:, ::2, 1:, ::3], x[:, :1].expand(3, 4, 5, 6))
    for y in (*layouts, x.to(memory_format=torch.channels_last)):
        check("_fft_c2c", y, dim, 1, True)
        check("_fft_r2c", y.real, dim, 2, True)
        size = 2 * (y.shape[dim[-1]] - 1) or 1
        check("_fft_c2r", y, dim, 0, next(n for n in (size, size + 1) if n % 11))


def test_imaginary_parts_of_real_elements_are_ignored():
    """The first element of a spectrum is real, and the last one for a signal of even length."""
    x = draw(2, 5)
    y = x.clone()
    torch.view_as_real(y)[:, 0, 1] = float("nan")
    torch.view_as_real(y)[:, 4, 1] = 7.0
    transform = tritonite.overloads()["_fft_c2r"]
    assert torch.equal(transform(x, [1], 0, 8), transform(y, [1], 0, 8))
    assert not torch.equal(transform(x, [1], 0, 9), transform(y, [1], 0, 9))


def test_signals_of_one_element_in_the_last_dimension_are_cuffts_on_gpus(monkeypatch):
    """cuFFT ignores half of a spectrum that is not symmetric, and the CPU's libraries do not."""
    x, transform = draw(2, 3, 4, 1), tritonite.overloads()["_fft_c2r"]
    monkeypatch.setattr("tritonite.ops.aten.on_cpu", lambda: False)
    for dim in ([2, 3], [1, 3], [0, 2, 3]):
        with pytest.raises(Decline, match="half a spectrum"):
            transform(x, dim, 1, 1)
    # These are transformed in several steps, the last along one dimension.
    for dim in ([3], [0, 1, 3], [0, 1, 2, 3]):
        torch.testing.assert_close(transform(x, dim, 1, 1), aten._fft_c2r(x, dim, 1, 1))


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "rfft2", "irfft2", "fftn"])
def test_gradients(name):
    function = getattr(torch.fft, name)
    kind = torch.float64 if name[0] == "r" or name.startswith("ih") else torch.complex128
    x = draw(2, 4, 5, dtype=kind).requires_grad_()
    weight = torch.randn_like(function(x).detach())
    (exact,) = torch.autograd.grad((function(x) * weight).abs().square().sum(), x)
    with tritonite.use_gems(include="_fft_*", faster_only=False):
        (grad,) = torch.autograd.grad((function(x) * weight).abs().square().sum(), x)
    torch.testing.assert_close(grad, exact, rtol=1e-11, atol=1e-11)


def test_spectral_convolution():
    """A Fourier layer, as in neural operators, forward and backward."""
    x = draw(2, 3, 16, dtype=torch.float64).requires_grad_()
    weight = draw(3, 3, 5, dtype=torch.complex128).requires_grad_()

    def layer():
        modes = torch.einsum("bix,iox->box", torch.fft.rfft(x)[..., :5], weight)
        return torch.fft.irfft(modes, n=16)

    expected = torch.autograd.grad(layer().square().sum(), (x, weight))
    with tritonite.use_gems(include="_fft_*", faster_only=False):
        found = torch.autograd.grad(layer().square().sum(), (x, weight))
    torch.testing.assert_close(found, expected)


def test_short_time_transform():
    signal, window = torch.randn(2, 64, device=tritonite.device), torch.hann_window(16, device=tritonite.device)
    options = {"n_fft": 16, "hop_length": 4, "window": window}
    expected = torch.stft(signal, **options, return_complex=True)
    with tritonite.use_gems(include="_fft_*", faster_only=False):
        spectrum = torch.stft(signal, **options, return_complex=True)
        restored = torch.istft(spectrum, **options)
    assert served("_fft_r2c") and served("_fft_c2r")
    torch.testing.assert_close(spectrum, expected)
    torch.testing.assert_close(restored, signal, rtol=1e-4, atol=1e-5)


def test_64_bit_offsets(monkeypatch, short_passes):
    monkeypatch.setattr(iteration, "INT32_LIMIT", 1)
    x = draw(2, 3, 36).transpose(0, 1)
    check("_fft_c2c", x, [2], 0, True)
    check("_fft_c2r", x[..., :13], [0, 2], 1, 24)


def test_rows_do_not_depend_on_others():
    x = draw(5, 60)
    with tritonite.use_gems(include="_fft_*", faster_only=False, invariant=True):
        whole, alone = torch.fft.fft(x), torch.fft.fft(x[3:4])
    assert served("_fft_c2c") and torch.equal(whole[3:4], alone)


def test_given_outputs():
    x, out = draw(4, 6), draw(6, 4).t()
    tritonite.overloads()["_fft_c2c.out"](x, [1], 0, True, out=out)
    torch.testing.assert_close(out, torch.fft.fft(x))
    with pytest.raises(Decline, match="overlaps"):
        tritonite.overloads()["_fft_c2c.out"](x, [1], 0, True, out=x)


@pytest.mark.parametrize(
    ("name", "x", "arguments", "reason"),
    [
        ("_fft_c2c", draw(2, 11), ([1], 0, True), "prime factors"),
        ("_fft_c2c", draw(1).expand(2**23), ([0], 0, True), "up to"),
        ("_fft_c2c", draw(2, 4), ([], 0, True), "distinct"),
        ("_fft_c2c", draw(2, 4), ([1, 1], 0, True), "distinct"),
        ("_fft_c2c", draw(2, 4), ([1], 3, True), "normalization"),
        ("_fft_c2c", draw(0, 4), ([1], 0, True), "without elements"),
        ("_fft_r2c", draw(2, 4, dtype=torch.float32).half(), ([1], 0, True), "dtype"),
        ("_fft_c2r", draw(2, 4), ([1], 0, 8), "spectrum"),
    ],
)
def test_declines(name, x, arguments, reason):
    with pytest.raises(Decline, match=reason):
        tritonite.overloads()[name](x, *arguments)


def test_plans_of_lengths():
    for length in (2**n * m for n in range(21) for m in (1, 3, 5, 7, 9, 35)):
        factors = plan.radices(length)
        assert math.prod(factors) == length and set(factors) <= {1, 2, 3, 4, 5, 7, 8}
        if length <= 2**22:
            passes = plan.passes(length, 8192)
            assert math.prod(passes) == length and max(passes) <= 8192 and len(passes) == 1 + (length > 8192)
    with pytest.raises(Decline, match="two passes"):
        plan.passes(2**27, 8192)


def test_strides_of_results_of_cufft():
    """Transforms of the other dimensions of an image keep its batch and channels in the order of their strides."""
    shape = (2, 3, 4, 5)
    assert library_strides(shape, (60, 20, 5, 1), [2, 3], shape) == (60, 20, 5, 1)
    assert library_strides(shape, (60, 1, 15, 3), [1], shape) == (60, 1, 15, 3)
    assert library_strides(shape, (60, 20, 5, 1), [3, 2], (2, 3, 3, 5)) == (45, 15, 1, 3)
