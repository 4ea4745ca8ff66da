"""Every overload through the native dispatcher, against ATen and float64."""

import glob
import math

import pytest
import torch
from conftest import FULL

import tritonite
from tritonite.devices import architecture
from tritonite.testing import verify
from tritonite.testing.samples import samples
from tritonite.testing.verify import DTYPES, check_overload

pytestmark = pytest.mark.usefixtures("through_native", "registered_once")

# Without the full set, every overload runs in one dtype on six layouts.
LAYOUTS = ("transposed", "broadcast", "zero_dim", "extreme", "boundaries-0", "boundaries-1")
SHORT = None if FULL else tuple(f"{layout}*" for layout in LAYOUTS)
OVERLOAD_DTYPES = DTYPES if FULL else (torch.float32,)

# Overloads that ATen lists for a device and does not have there.
MISSING = {}
if tritonite.device == "cuda":
    MISSING |= dict.fromkeys(("_batch_norm_no_update", "_batch_norm_no_update.out"), "ATen's calls the kernel for CPUs")
    MISSING["_batch_norm_with_update.out"] = "ATen's own ends the process where cuDNN serves it (torch 2.11)"
    MISSING["range.out_"] = "ATen's own calls itself until the process ends"
    MISSING["_histogramdd_from_bin_cts.out"] = "ATen's calls a functional form that it has for the CPU alone"
    if not architecture(torch.device("cuda", 0)).startswith("sm_8"):
        MISSING["_mixed_dtypes_linear"] = "ATen has it for sm_8x alone"
    MISSING["_add_relu.Scalar_out"] = "ATen's calls a functional form that it has for the CPU alone"
else:
    MISSING["rrelu_with_noise.out"] = "ATen's own for CPUs writes beyond an output that is too small"


def _labels(op, dtype):
    """Return globs of the samples to take, or None for all.

    Without the full set, each variant and each layout is taken once, not every variant on every layout. Of calls
    with a given output, every other layout is taken, and of calls in place the first three, whose values are ordinary;
    if the layouts are lists, both forms have the first two. The form that allocates its result has the others.
    """
    if FULL:
        return None
    layouts = LAYOUTS[::2] if op.out_names else LAYOUTS[:3] if op.inplace else LAYOUTS
    taken, met = [], set()
    own = list(samples(op, dtype, tritonite.device))
    if not any(sample.label.partition(" ")[0] in LAYOUTS for sample in own):
        # All of its layouts are the family's own.
        own = own[:2] if op.takes_lists and (op.out_names or op.inplace) else own
        return [glob.escape(sample.label) for sample in own]
    for sample in own:
        layout, _, variant = sample.label.partition(" ")
        values = {("layout", layout), ("variant", variant)}
        if layout in layouts and not values <= met and verify.by_aten(op, sample) is not None:
            met |= values
            taken.append(glob.escape(sample.label))
    return taken


def report_failures(report):
    assert not report.failures, "\n".join(report.failures[:5])


@pytest.mark.parametrize("name", [name for name, op in tritonite.overloads().items() if op.has_place])
def test_overload(name):
    """Kernels serve every sample that ATen accepts, with ATen's results."""
    if name in MISSING:
        pytest.skip(MISSING[name])
    op = tritonite.overloads()[name]
    served = 0
    for dtype in OVERLOAD_DTYPES:
        report = check_overload(op, dtype, labels=_labels(op, dtype))
        served += report.served
        report_failures(report)
    if not served:
        for dtype in (*OVERLOAD_DTYPES, torch.float64, torch.int32, torch.bool, torch.int8):
            report = check_overload(op, dtype, labels=SHORT)
            served += report.served
            report_failures(report)
    assert served, "no sample of it is one that ATen takes"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nextafter_of_nan(dtype, device):
    x = torch.tensor([1.0, -2.0, 0.0, float("inf"), float("nan")], dtype=dtype, device=device)
    other = torch.where(x.isnan(), 1.0, float("nan")).to(dtype)
    with tritonite.use_gems():
        assert torch.nextafter(x, other).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reciprocals_of_every_float16(dtype, device):
    x = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    expected = x.float().double().reciprocal().to(torch.float32).to(dtype)
    with tritonite.use_gems():
        found = x.reciprocal()
    assert not tritonite.stats()["reciprocal"].declined
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found[~x.isnan()].view(torch.int16), expected[~x.isnan()].view(torch.int16))


@pytest.mark.parametrize("divisor", [3.0, 49.0, -0.1, 1e-38, 1e-42, 3e38, 0.0, float("inf"), float("nan")])
def test_quotients_by_one_number(divisor, device):
    """Division by a scalar is a multiplication by its inverse. It must be as exact, also for subnormal inverses."""
    limits = torch.tensor([0.0, -0.0, 1.0, 49.0, 147.0, 1e-20, 1e20, 3e38, float("inf"), -float("inf"), float("nan")])
    x = torch.cat([limits, torch.randn(3000) * 100]).to(device)
    expected = (x.double() / torch.tensor(divisor, dtype=torch.float32).double().item()).float()
    with tritonite.use_gems():
        found, by_tensor = x / divisor, x / torch.tensor(divisor, device=device)
    assert not tritonite.stats()["div.Tensor"].declined
    for quotient in (found, by_tensor):
        assert torch.equal(quotient.isnan(), expected.isnan())
        assert torch.equal(quotient.nan_to_num(7.0).signbit(), expected.nan_to_num(7.0).signbit())
        ordinary = (expected.abs() > 1e-30) & (expected.abs() < 1e38) & (x.abs() > 1e-30)
        assert torch.equal(quotient[ordinary], expected[ordinary])
        torch.testing.assert_close(quotient, expected, rtol=2e-7, atol=3e-45, equal_nan=True)


@pytest.mark.parametrize("function", [torch.add, torch.sub, torch.rsub])
@pytest.mark.parametrize("alpha", [0.0, -0.0, 1.0, -2.0])
def test_signs_of_sums_of_zeros_are_atens(function, alpha, device):
    zeros = torch.tensor([0.0, -0.0, 1.0], device=device)
    for other in (0.0, -0.0, 3.0, -3.0):
        expected = function(zeros, other, alpha=alpha)
        with tritonite.use_gems(include=function.__name__):
            result = function(zeros, other, alpha=alpha)
        assert torch.equal(result.signbit(), expected.signbit()) and torch.equal(result, expected)


@pytest.mark.parametrize("divisor", [0.1, -0.3, 7.0, 1e-3, 1e-38, float("inf")])
def test_remainders_are_exact(divisor, device):
    """Operands near multiples of the divisor have quotients that round to integers, large in some blocks."""
    y = torch.tensor(divisor, dtype=torch.float32, device=device)
    multiples = torch.arange(-2000, 2000, device=device).float() * (y if y.isfinite() else 1.0)
    x = torch.cat([multiples, *[torch.nextafter(multiples, torch.full_like(y, end)) for end in (-9.0, 9.0)]])
    exact = torch.tensor([math.fmod(value, y.item()) for value in x.tolist()], dtype=torch.float64, device=device)
    with tritonite.use_gems(include=["fmod", "remainder", "floor_divide"]):
        rest, floored, quotient = x.fmod(y), x.remainder(y), x.floor_divide(y)
    assert torch.equal(rest.double(), exact) and torch.equal(rest.signbit(), x.signbit())
    moved = exact.sign() * y.sign() < 0
    assert torch.equal(floored, torch.where(moved, exact.float() + y, exact.float()))
    if divisor > 1e-30 and y.isfinite():
        assert torch.equal(quotient.double(), ((x.double() - exact) / y.double()).round() - moved.double())


def test_large_powers_of_numbers_near_1(device):
    """A multiply-add that the compiler fuses within the logarithm would leave an error of 40 ulp."""
    x = torch.exp2(torch.linspace(-0.5, 0.5, 4000, dtype=torch.float64)).float()
    for size in (-112.0, 112.0):
        y = (size / x.double().log2()).float()
        with tritonite.use_gems():
            powers = torch.pow(x.to(device), y.to(device)).cpu().double()
        exact = x.double().pow(y.double())
        assert float((powers / exact - 1).abs().max()) < 6e-7


def test_the_derivative_of_silu_near_its_root(device):
    """A sum of 1 and a product near -1 would leave the product's roundoff."""
    x = torch.linspace(-1.32, -1.24, 3000, device=device)
    ones = torch.ones_like(x)
    exact = torch.ops.aten.silu_backward(ones.double(), x.double())
    rows = x[:, None].requires_grad_()
    unit = torch.ones_like(rows)
    with tritonite.use_gems():
        found = [torch.ops.aten.silu_backward(ones, x)]
    for result in (tritonite.fused.silu_and_mul(rows, unit), tritonite.fused.gated_rms_norm(unit, rows, None, 0.0)):
        found += [torch.autograd.grad(result.sum(), rows)[0][:, 0]]
    for each in found:
        assert float((each.double() - exact).abs().max()) < 1e-8


@pytest.mark.parametrize("kind", ["t", "u", "v", "w"])
def test_shifted_polynomials_near_their_zeros(kind, device):
    """Near a zero, an error of the shifted argument would be large."""
    function = getattr(torch.special, f"shifted_chebyshev_polynomial_{kind}")
    x = torch.linspace(0.01, 0.99, 2000, device=device)
    with tritonite.use_gems():
        values = function(x, 9).cpu().double()
    exact = function(x.cpu().double(), 9)
    assert bool(((values - exact).abs() <= 1e-7 * exact.abs()).all())


def test_zeta_of_large_negative_numbers_needs_few_terms(device):
    x = torch.tensor([2.0, 3.0, 8.0], dtype=torch.float64, device=device)
    # ATen adds up 10^8 terms for the second number. The fractional part decides both results.
    near, far = torch.full_like(x, -4096.25), torch.full_like(x, -1e8 - 0.25)
    with tritonite.use_gems():
        results = torch.special.zeta(x, near), torch.special.zeta(x, far)
    torch.testing.assert_close(results[0], torch.special.zeta(x, near))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1 / 4096)


# An overload for each conversion to the result's dtype in an engine.
_ROUNDED = ("mul.Tensor", "exp.out", "mean.dim", "sum.IntList_out", "_softmax", "native_layer_norm", "cumsum", "mm")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _ROUNDED)
def test_16_bit_results_are_rounded_to_nearest(name, dtype):
    """The layouts have enough elements for the judge to detect one-sided rounding."""
    report = check_overload(tritonite.overloads()[name], dtype, labels=("broadcast*", "transposed*"))
    assert report.served
    report_failures(report)
