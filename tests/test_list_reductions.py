"""Reductions over lists of tensors, loss scaling, and clipping of gradients, against ATen."""

import copy
import dataclasses
import math
import warnings

import pytest
import torch
from conftest import FULL, calls_through

import tritonite
from tritonite import devices
from tritonite.engine.lists import reduce, table
from tritonite.optim import clip

ATEN = torch.ops.aten
# Relative errors of sums in float32 and float64, and of results rounded to 16 bits.
RTOL = {torch.float32: 2e-6, torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ORDERS = (0, 1, 2, 3.5, -1.5, math.inf, -math.inf)


def tensors(device, dtype=torch.float32):
    """Tensors of several sizes, layouts and alignments, without empty ones."""
    shapes = ((5,), (300, 10), (1,), ())
    found = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    found += [torch.randn(4, 6, device=device).to(dtype).t(), torch.randn(33, device=device).to(dtype)[1:]]
    found += [torch.randn(8, 6, device=device).to(dtype)[:, ::2], torch.randn(3, device=device).to(dtype).expand(2, 3)]
    return found


def mixed(device):
    """Tensors of every floating-point dtype."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    return [torch.randn(40 + i, device=device).to(dtypes[i % 4]) for i in range(8)]


def same(actual, expected, exact=None):
    """Assert that results have ATen's shapes, strides and dtypes, and its values within the dtype's resolution.

    `exact` are ATen's values in float64, for sums in which its own error may be the resolution.
    """
    for own, reference, precise in zip(actual, expected, exact or expected, strict=True):
        assert (own.dtype, own.shape, own.stride()) == (reference.dtype, reference.shape, reference.stride())
        rtol = RTOL.get(own.dtype, 0)
        torch.testing.assert_close(own, precise.to(own.dtype), rtol=rtol, atol=0, equal_nan=True)


def in_float64(xs):
    return [x.double() for x in xs]


def served(name):
    counts = tritonite.stats()[name]
    return counts.launched + counts.replayed and not counts.declined


@pytest.mark.smoke
def test_norms_of_lists(device, path):
    empty = [torch.empty(0, device=device), torch.empty(3, 0, device=device, dtype=torch.float16)]
    for ord in ORDERS:
        xs = tensors(device) + mixed(device) + (empty if 0 <= ord < math.inf else [])
        expected = torch._foreach_norm(xs, ord)
        with tritonite.use_gems():
            found = torch._foreach_norm(xs, ord)
        same(found, expected, torch._foreach_norm(in_float64(xs), ord))
    assert served("_foreach_norm.Scalar")


@pytest.mark.skipif(not hasattr(ATEN, "_foreach_powsum"), reason="torch has the operator since 2.13")
def test_sums_of_powers_of_lists(device):
    for ord in (0, 1, 2, 3.5, -math.inf):
        xs = tensors(device)[:7] + mixed(device)[:4]
        expected = ATEN._foreach_powsum.Scalar(xs, ord)
        with tritonite.use_gems():
            found = ATEN._foreach_powsum.Scalar(xs, ord)
        same(found, expected, ATEN._foreach_powsum.Scalar(in_float64(xs), ord))
    assert served("_foreach_powsum.Scalar")


def test_maxima_of_lists(device, path):
    numbers = torch.randint(-9, 9, (70, 3), device=device)
    dtypes = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
    xs = [numbers.to(dtype) for dtype in dtypes] + tensors(device) + mixed(device)
    xs += [torch.tensor([-(2**63), -(2**62)], device=device), torch.tensor([False], device=device)]
    xs += [torch.full((40,), -math.inf, device=device), torch.tensor([1.0, math.nan, math.inf], device=device)]
    expected = torch._foreach_max(xs)
    with tritonite.use_gems():
        same(torch._foreach_max(xs), expected)
    assert served("_foreach_max")


def test_norms_of_infinite_and_undefined_elements(device):
    xs = [torch.tensor(values, device=device) for values in ((1, math.inf), (-math.inf, 2), (math.nan, math.inf, 1))]
    for ord in ORDERS:
        expected = torch._foreach_norm(xs, ord)
        with tritonite.use_gems():
            same(torch._foreach_norm(xs, ord), expected)


@pytest.mark.declines("ord is")
def test_an_order_of_more_than_64_bits_raises(device):
    with tritonite.use_gems(), pytest.raises(RuntimeError, match="overflow"):
        torch._foreach_norm([torch.ones(3, device=device)], 2**63)


def test_norms_in_another_dtype(device):
    xs = [torch.full((300,), 300.0, dtype=torch.float16, device=device) for _ in range(3)]
    for dtype in (None, torch.float32, torch.float64):
        expected = torch._foreach_norm(xs, 2, dtype)
        with tritonite.use_gems():
            same(torch._foreach_norm(xs, 2, dtype), expected)
    assert served("_foreach_norm.Scalar")


def test_norms_are_written_to_given_tensors(device, path):
    xs = tensors(device)
    expected = torch._foreach_norm(xs, 2)
    with tritonite.use_gems():
        for _ in range(2):
            outs = [torch.full((), math.nan, device=device) for _ in xs]
            assert ATEN._foreach_norm.Scalar_out(xs, 2, out=outs) is None
            same(outs, expected)
            assert [out._version for out in outs] == [1] * len(outs)
    assert served("_foreach_norm.Scalar_out")


def test_autograd_sees_that_a_list_was_written(device, path):
    """PyTorch leaves version counters of lists to the kernel, and ATen's kernels increment them."""
    weight = torch.ones(3, device=device, requires_grad=True)
    xs = [torch.ones(3, device=device), torch.ones(2, device=device)]
    with tritonite.use_gems():
        for version in (1, 2, 3):
            torch._foreach_mul_(xs, 2.0)
            assert [x._version for x in xs] == [version] * 2
        product = (weight * xs[0]).sum()
        torch._foreach_mul_(xs, 2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    assert served("_foreach_mul_.Scalar")


@pytest.mark.declines("ATen resizes outputs, and reads results that other tensors are made of")
def test_outputs_that_are_resized_or_shared_go_to_aten(device):
    xs = [torch.arange(1.0, 5.0, device=device), torch.arange(3.0, device=device)]
    with tritonite.use_gems(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outs = [torch.empty(0, device=device), torch.empty((), device=device)]
        ATEN._foreach_norm.Scalar_out(xs, 1, out=outs)
        assert [out.item() for out in outs] == [10, 3]
        outs = [xs[1][0], torch.empty((), device=device)]
        ATEN._foreach_norm.Scalar_out(xs, 1, out=outs)
        assert outs[0].item() == 10


@pytest.mark.declines("ATen raises an error")
def test_too_few_outputs_are_atens_error(device):
    xs, one = [torch.ones(3, device=device), torch.ones(2, device=device)], torch.ones(1, device=device)
    with tritonite.use_gems():
        with pytest.raises(RuntimeError):
            ATEN._foreach_norm.Scalar_out(xs, 1, out=[torch.empty((), device=device)])
        with pytest.raises(RuntimeError):
            ATEN._amp_foreach_non_finite_check_and_unscale.out(xs, one, one, out=[torch.empty_like(xs[0])])


@pytest.mark.declines("lists that ATen refuses, or whose dtypes no kernel serves")
@pytest.mark.parametrize(
    ("make", "ord"),
    [
        (lambda device: [], 2),
        (lambda device: [torch.ones(3, device=device, dtype=torch.int64)], 2),
        (lambda device: [torch.ones(3, device=device), torch.empty(0, device=device)], -1),
        (lambda device: [torch.ones(3, device=device)], True),
    ],
    ids=["no tensors", "integers", "empty", "bool order"],
)
def test_errors_are_atens(make, ord, device):
    with pytest.raises(RuntimeError) as expected:
        torch._foreach_norm(make(device), ord)
    with tritonite.use_gems(), pytest.raises(RuntimeError) as found:
        torch._foreach_norm(make(device), ord)
    assert str(found.value) == str(expected.value)


@pytest.mark.declines("no kernel serves complex tensors")
def test_complex_lists_go_to_aten(device):
    xs = [torch.ones(3, device=device, dtype=torch.complex64)]
    expected = torch._foreach_norm(xs, 2)
    with tritonite.use_gems():
        same(torch._foreach_norm(xs, 2), expected)


def test_norms_of_more_tensors_than_a_launch_writes_addresses_of(device):
    """Addresses and sizes of 130 tensors are more numbers than one launch of `write_table` takes."""
    xs = [torch.full((i % 3 + 1,), float(i), device=device) for i in range(600 if FULL else 130)]
    expected = torch._foreach_norm(xs, 1)
    with calls_through("native"), tritonite.use_gems():
        same(torch._foreach_norm(xs, 1), expected)
        same(torch._foreach_norm(xs[::-1], 1), expected[::-1])


def test_partial_states_are_combined_in_one_order(device, monkeypatch):
    """A tensor takes many programs of several blocks, and every call gives the same bits."""
    monkeypatch.setattr(devices, "current", dataclasses.replace(devices.current, programs=1))
    monkeypatch.setattr(reduce, "_BLOCK", 64)
    monkeypatch.setattr(table, "_WAVES", 16)
    monkeypatch.setattr(reduce, "_FEW_STATES", (2, 4))
    monkeypatch.setattr(reduce, "_MANY_STATES", (1, 8))
    xs = [torch.randn(3000, device=device), torch.randn(10, device=device), torch.randn(600, device=device).half()]
    block, steps = reduce._blocks([x.numel() for x in xs])
    assert steps > 1 and block * steps < 3000 / 8
    for ord in (1, 2, 3.0, math.inf):
        expected = torch._foreach_norm(xs, ord)
        with tritonite.use_gems():
            found = torch._foreach_norm(xs, ord)
            again = torch._foreach_norm(xs, ord)
        same(found, expected)
        assert all(map(torch.equal, found, again))


def test_invariant_norms_do_not_depend_on_the_list(device):
    x = torch.randn(3000, device=device)
    with tritonite.use_gems(invariant=True):
        (alone,) = torch._foreach_norm([x], 2)
        among = torch._foreach_norm([torch.randn(9000, device=device), x], 2)[1]
    assert torch.equal(alone, among)


def gradients(device):
    """Return gradients of the dtypes that ATen's kernel for the device unscales: on a GPU all but bfloat16."""
    every = [x.clone() if 0 in x.stride() else x for x in tensors(device)] + mixed(device)
    return [x for x in every if tritonite.device == "cpu" or x.dtype is not torch.bfloat16]


def unscaled(xs, shape, value):
    """Unscale in place, by ATen unless kernels are in use. Returns the gradients and the flag."""
    found = torch.zeros(shape, device=xs[0].device)
    scale = torch.full(shape, value, device=xs[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(xs, found, scale)
    return [*xs, found]


@pytest.mark.smoke
@pytest.mark.parametrize("bad", [None, -math.inf, math.nan], ids=str)
def test_gradients_are_unscaled_and_checked(bad, device, path):
    for shape, value in (((), 0.3), ((1,), 1.0)):
        xs = gradients(device)
        xs += [torch.empty(0, device=device)]
        for at in () if bad is None else (1, 6):
            xs[at][-1, -1] = bad
            expected = unscaled(copy.deepcopy(xs), shape, value)
            with tritonite.use_gems():
                given = copy.deepcopy(xs)
                same(unscaled(given, shape, value), expected)
        if bad is None:
            expected = unscaled(copy.deepcopy(xs), shape, value)
            with tritonite.use_gems():
                same(unscaled(copy.deepcopy(xs), shape, value), expected)
            assert expected[-1].sum() == 0
    assert served("_amp_foreach_non_finite_check_and_unscale_")


def test_unscaling_keeps_a_flag_that_is_set(device):
    found = torch.full((1,), 1.0, device=device)
    with tritonite.use_gems():
        torch._amp_foreach_non_finite_check_and_unscale_(
            [torch.ones(3, device=device)], found, torch.ones(1, device=device)
        )
    assert found.item() == 1


def test_functional_unscaling(device):
    xs = gradients(device)
    xs[0][2] = math.inf
    found, scale = torch.zeros(1, device=device), torch.full((), 0.7, device=device)
    operator = ATEN._amp_foreach_non_finite_check_and_unscale
    expected = operator.default(xs, found, scale)
    outs, references = [[torch.empty_like(x) for x in xs] for _ in range(2)]
    operator.out(xs, found, scale, out=references)
    with tritonite.use_gems():
        results, flag = operator.default(xs, found, scale)
        operator.out(xs, found, scale, out=outs)
    same([*results, flag], [*expected[0], expected[1]])
    same(outs, references)
    assert found.item() == 0 and flag.item() == 1


@pytest.mark.declines("the same gradient twice is ATen's to unscale, and overlapping elements are an error")
def test_gradients_that_share_memory_go_to_aten(device):
    x = torch.ones(5, device=device)
    with tritonite.use_gems():
        unscaled([x, x], (1,), 0.5)
        # ATen's launch over a list on a GPU reads both before it writes either.
        assert torch.equal(x, torch.full_like(x, 0.25 if tritonite.device == "cpu" else 0.5))
        with pytest.raises(RuntimeError, match="single memory location"):
            unscaled([torch.ones(1, device=device).expand(3)], (1,), 0.5)


@pytest.mark.declines("ATen checks the scale and the flag")
def test_wrong_scales_are_atens_errors(device):
    x = torch.ones(5, device=device)
    with tritonite.use_gems(), pytest.raises(RuntimeError, match="inv_scale must be a 1-element tensor"):
        torch._amp_foreach_non_finite_check_and_unscale_([x], x.new_zeros(1), x.new_ones(2))


@pytest.mark.parametrize("found", [0.0, 1.0, math.nan])
def test_scale_grows_and_backs_off(found, device, path):
    for tracker, scale, shape in ((0, 65536.0, ()), (4, 65536.0, (1,)), (4, 3e38, ()), (7, 0.1, (1, 1))):

        def state():
            numbers = (torch.tensor(tracker, dtype=torch.int32), torch.tensor(found))
            return [x.reshape(shape).to(device) for x in (torch.tensor(scale), *numbers)]

        for name in ("_amp_update_scale_", "_amp_update_scale"):
            theirs, ours = state(), state()
            operator = getattr(ATEN, name).default
            expected = operator(*theirs, 2.1, 0.3, 5)
            with tritonite.use_gems():
                results = operator(*ours, 2.1, 0.3, 5)
            same(ours, theirs)
            assert results is ours[0] if name.endswith("_") else not same(results, expected)
            assert served(name)


def trained(device, dtype=torch.float32):
    """Train with a GradScaler; the loss of step 3 overflows. Returns parameters, scales, and the scaler's state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6, device=device, dtype=dtype)).square().mean()
        scaler.scale(loss * (math.inf if step == 3 else 1)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.detach() for p in model.parameters()], scales, scaler.state_dict()


def test_training_with_loss_scaling(device, path):
    expected, scales, state = trained(device)
    names = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "_foreach_norm", "_foreach_mul_")
    with tritonite.use_gems(include=(*names, "stack", "linalg_vector_norm", "clamp", "add", "mul", "reciprocal")):
        found, found_scales, found_state = trained(device)
    assert found_scales == scales and found_state == state and scales[3] == scales[2] / 2 < scales[5]
    for own, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-6)
    counts = tritonite.stats()
    assert all(served(name) for name in ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"))
    assert not any(each.declined for each in counts.values())


def test_clipping_by_torch_is_served_throughout(device):
    grads = mixed(device)
    ours, theirs = (parameters([x.clone() for x in grads]) for _ in range(2))
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    with tritonite.use_gems():
        total = torch.nn.utils.clip_grad_norm_(ours, 1.0)
    counts = tritonite.stats()
    assert {"_foreach_norm.Scalar", "stack", "linalg_vector_norm", "_foreach_mul_.Tensor"} <= set(counts)
    # The norms' dtypes differ, and torch converts them before they are stacked.
    assert not any(each.declined for each in counts.values())
    clipped_alike(ours, theirs, total, expected)


def parameters(grads):
    """Return parameters with these gradients, and one without a gradient."""
    found = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(found, grads, strict=True):
        parameter.grad = grad
    return [*found, torch.nn.Parameter(torch.zeros(3, device=grads[0].device))]


def clipped_alike(ours, theirs, total, expected):
    """Assert that a norm is torch's, and that gradients are scaled alike."""
    dtypes = {p.grad.dtype for p in theirs if p.grad is not None}
    rtol = 2e-5 if dtypes == {torch.float32} else 2e-2
    assert (total.dtype, total.shape, total.device) == (expected.dtype, expected.shape, expected.device)
    assert not total.requires_grad
    torch.testing.assert_close(total, expected, rtol=rtol, atol=0, equal_nan=True)
    for own, reference in zip(ours, theirs, strict=True):
        if reference.grad is None:
            assert own.grad is None
            continue
        torch.testing.assert_close(own.grad, reference.grad, rtol=rtol, atol=1e-6, equal_nan=True)


@pytest.mark.smoke
@pytest.mark.parametrize("ord", [2.0, 1, 3.5, -1.0, 0.0, "inf", -math.inf], ids=str)
@pytest.mark.parametrize("make", [gradients, mixed, lambda device: [torch.randn(7, 5, device=device)]], ids="abc")
def test_gradients_are_clipped_by_their_norm(make, ord, device):
    torch.manual_seed(1)
    grads = make(device)
    for max_norm in (0.5, 1e6):
        ours, theirs = (parameters([x.clone() for x in grads]) for _ in range(2))
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, ord)
        total = clip.clip_grad_norm_(ours, max_norm, ord)
        clipped_alike(ours, theirs, total, expected)


def test_clipping_passes_twice_over_gradients(device, path):
    ours = parameters([torch.full((100,), 3.0, device=device), torch.full((50, 2), 4.0, device=device)])
    for max_norm in (5.0, 2.5):
        before = [p.grad._version for p in ours[:2]]
        clip.clip_grad_norm_(ours, max_norm)
        assert torch.cat([p.grad.flatten() for p in ours[:2]]).norm().item() == pytest.approx(max_norm, rel=1e-5)
        assert [p.grad._version for p in ours[:2]] == [version + 1 for version in before]
    # No operator of ATen's takes part.
    assert set(tritonite.stats()) == {"tritonite::clip_grad_norm_"}


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("ord", [2.0, math.inf])
def test_norms_that_are_not_finite(bad, ord, device):
    grads = [torch.randn(50, device=device), torch.randn(3, device=device)]
    grads[0][7] = bad
    ours, theirs = (parameters([x.clone() for x in grads]) for _ in range(2))
    for each in (clip.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
            each(ours, 1.0, ord, error_if_nonfinite=True)
        assert all(torch.equal(p.grad.nan_to_num(7), x.nan_to_num(7)) for p, x in zip(ours, grads, strict=False))
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0, ord)
    clipped_alike(ours, theirs, clip.clip_grad_norm_(ours, 1.0, ord), expected)


@pytest.mark.parametrize("make", [gradients, mixed], ids=["layouts", "dtypes"])
def test_gradients_are_clipped_by_their_values(make, device):
    grads = make(device)
    grads[0][0] = math.nan
    ours, theirs = (parameters([x.clone() for x in grads]) for _ in range(2))
    torch.nn.utils.clip_grad_value_(theirs, 0.7)
    assert clip.clip_grad_value_(ours, 0.7) is None
    for own, reference in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.equal(own.grad.nan_to_num(9), reference.grad.nan_to_num(9))
    assert served("tritonite::clip_grad_value_")


def test_clipping_takes_what_torch_takes(device):
    x = torch.nn.Parameter(torch.zeros(4, device=device))
    x.grad = torch.full((4,), 2.0, device=device)
    assert clip.clip_grad_norm_(x, 1.0).item() == 4
    assert clip.clip_grad_norm_((p for p in [x]), 0.5).item() == pytest.approx(1, rel=1e-5)
    clip.clip_grad_value_(iter([x]), 0.1)
    assert x.grad.max().item() == pytest.approx(0.1)
    assert clip.clip_grad_norm_([torch.nn.Parameter(torch.zeros(3))], 1.0).item() == 0
    with pytest.warns(UserWarning, match="empty generator"):
        clip.clip_grad_norm_((p for p in ()), 1.0)
    with pytest.raises(ValueError, match="could not convert"):
        clip.clip_grad_norm_(x, "much")


@pytest.mark.declines("torch clips complex and integer gradients")
def test_other_gradients_are_clipped_by_torch(device):
    ours, theirs = (parameters([torch.ones(3, device=device, dtype=torch.complex64)]) for _ in range(2))
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    clipped_alike(ours, theirs, clip.clip_grad_norm_(ours, 0.5), expected)


def test_sharded_gradients(device, tmp_path):
    """Gradients of FSDP2 are DTensors: norms of the shards are reduced over the mesh."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,))
        grads = [torch.randn(8, 3, device=device), torch.randn(5, device=device)]
        ours, theirs = (parameters([distribute_tensor(x, mesh, [Shard(0)]) for x in grads])[:-1] for _ in range(2))
        expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        total = clip.clip_grad_norm_(ours, 0.5)
        assert type(total) is type(expected) and total.placements == expected.placements
        torch.testing.assert_close(total.full_tensor(), expected.full_tensor())
        clip.clip_grad_value_(ours, 0.01)
        torch.nn.utils.clip_grad_value_(theirs, 0.01)
        for own, reference in zip(ours, theirs, strict=True):
            assert own.grad.placements == reference.grad.placements
            torch.testing.assert_close(own.grad.to_local(), reference.grad.to_local())
    finally:
        distributed.destroy_process_group()
    assert served("_foreach_norm.Scalar") and served("_foreach_mul_.Tensor")
