"""The steps of `torch.nn.SyncBatchNorm`, which ATen has on CUDA alone, against float64 and against one process."""

import pytest
import torch
from conftest import FULL

import tritonite
from tritonite.errors import Decline
from tritonite.testing import verify
from tritonite.testing.judge import to_reference
from tritonite.testing.samples import REFERENCES, facts, samples
from tritonite.testing.samples.sync_batch_norm import PACKETS

TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.float64: 1e-9}
FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize(
    ("name", "dtype"),
    # Without the full set, each step has one 16-bit dtype and float32, or the other one and float64.
    [(name, dtype) for i, name in enumerate(PACKETS) for j, dtype in enumerate(TOLERANCES) if FULL or (i + j) % 2 == 0],
)
def test_references_judge_cuda_only_operators(name, dtype, tiny_blocks):
    """The references judge samples in every layout."""
    op, served = tritonite.overloads()[name], set()
    for sample in samples(op, dtype, tritonite.device):
        narrower = dtype is torch.float64 and sample.label.startswith("float32 parameters")
        if narrower or sample.label.startswith("extreme"):
            continue
        wide, written = sample.map(to_reference), sample.map(verify._clone)
        exacts = REFERENCES[name](*wide.args, **wide.kwargs)
        try:
            results = op(*written.args, **written.kwargs)
        except Decline as decline:
            assert "16-bit" in str(decline) or "memory format" in str(decline), sample.label
            continue
        exacts = exacts if isinstance(exacts, tuple) else (exacts,)
        results = results if isinstance(results, tuple) else (results,)
        tolerance = TOLERANCES[dtype]
        # Running statistics are updated in place.
        for own, exact in zip((*results, *written.args), (*exacts, *wide.args), strict=True):
            if isinstance(own, torch.Tensor):
                torch.testing.assert_close(own.double(), exact.double(), atol=tolerance, rtol=tolerance, equal_nan=True)
        served.add(sample.label.split()[0])
    half = dtype.itemsize == 2
    assert {"sequences", "contiguous"} <= served or (half and name in ("batch_norm_gather_stats", PACKETS[-1]))


@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_two_processes_are_one(memory_format, dtype, parameters, tiny_blocks):
    """The steps of `SyncBatchNorm` on two shards of a batch give the results of batch norm on the whole batch."""
    ops, eps, momentum = tritonite.overloads(), 1e-3, 0.25
    x, grad = (torch.randn(5, 6, 4, 7, device=tritonite.device).to(dtype) for _ in range(2))
    x, grad = (part.to(memory_format=memory_format) for part in (x + 2, grad))
    weight, bias = (torch.randn(6, device=tritonite.device).to(parameters) for _ in range(2))
    running = [torch.zeros(6, device=tritonite.device), torch.ones(6, device=tritonite.device)]
    wide, kept = [part.double().requires_grad_() for part in (x, weight, bias)], [part.double() for part in running]
    exact = torch.nn.functional.batch_norm(wide[0], *kept, wide[1], wide[2], True, momentum, eps)
    exact.backward(grad.double())

    parts, grads = (list(whole.split([2, 3])) for whole in (x, grad))
    own = [ops["batch_norm_stats"](part, eps) for part in parts]
    stacked = [torch.stack(each) for each in zip(*own, strict=True)]
    counts = torch.tensor([part.numel() / 6 for part in parts], device=x.device)
    gather = ops["batch_norm_gather_stats_with_counts"]
    mean, invstd = gather(parts[0].float(), *stacked, *running, momentum, eps, counts)
    found = [ops["batch_norm_elemt"](part, weight, bias, mean, invstd, eps) for part in parts]
    assert all(part.is_contiguous(memory_format=memory_format) and part.dtype is dtype for part in found)
    tolerance = {"atol": 20 * TOLERANCES[dtype] / 4, "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(torch.cat(found).double(), exact.detach(), **tolerance)
    for moved, expected in zip(running, kept, strict=True):
        torch.testing.assert_close(moved.double(), expected, atol=1e-4, rtol=1e-4)

    flags = (True, True, True)
    reduce = ops["batch_norm_backward_reduce"]
    sums = [reduce(*each, mean, invstd, weight, *flags) for each in zip(grads, parts, strict=True)]
    assert [part.dtype for part in sums[0]] == [torch.float32] * 2 + [parameters] * 2
    total, product, by_weight, by_bias = (a.double() + b.double() for a, b in zip(*sums, strict=True))
    torch.testing.assert_close(by_weight, wide[1].grad, atol=0.1 if parameters is torch.bfloat16 else 1e-3, rtol=2e-2)
    torch.testing.assert_close(by_bias, wide[2].grad, atol=0.1 if parameters is torch.bfloat16 else 1e-3, rtol=2e-2)
    if dtype is parameters is torch.bfloat16 and memory_format is torch.contiguous_format:
        weight = weight.float()
    given = mean, invstd, weight, total.float(), product.float(), counts.int()
    back = [ops["batch_norm_backward_elemt"](*each, *given) for each in zip(grads, parts, strict=True)]
    assert all(part.is_contiguous(memory_format=memory_format) and part.dtype is dtype for part in back)
    torch.testing.assert_close(torch.cat(back).double(), wide[0].grad, **tolerance)


def test_sums_outside_the_mask_are_undefined():
    reduce = tritonite.overloads()["batch_norm_backward_reduce"]
    x, rows = torch.randn(3, 4, 5, device=tritonite.device), torch.rand(4, device=tritonite.device) + 1
    whole = reduce(x, x, rows, rows, rows, True, True, True)
    for flags in ((False, True, False), (False, False, True), (True, False, False)):
        found = reduce(x, x, rows, rows, rows, *flags)
        for flag, own, other in zip((flags[0], *flags), found, whole, strict=True):
            assert (own is None) != flag
            if flag:
                torch.testing.assert_close(own, other)
    images = torch.randn(3, 4, 5, 2, device=tritonite.device).to(memory_format=torch.channels_last)
    shapes = [tuple(part.shape) for part in reduce(images, images, rows, rows, None, True, False, False)]
    # As in ATen's channels-last kernel.
    assert shapes == [(4,), (4,), (0,), (0,)]


def test_statistics_of_zero_variance_without_eps():
    x = torch.ones(3, 2, 4, device=tritonite.device)
    mean, invstd = tritonite.overloads()["batch_norm_stats"](x, 0.0)
    assert mean.tolist() == [1, 1] and invstd.tolist() == [0, 0]


def test_a_weight_of_zero_prevents_overflow():
    """ATen multiplies by the weight before the inverse deviation."""
    x = torch.tensor([[3e38, 1.0], [-1.0, 2.0]], device=tritonite.device)
    mean, invstd, weight = (torch.tensor(row, device=x.device) for row in ([-1e37, 0.0], [4.0, 2.0], [0.0, 3.0]))
    found = tritonite.overloads()["batch_norm_elemt"](x, weight, weight + 1, mean, invstd, 1e-3)
    assert found.tolist() == [[1.0, 10.0], [1.0, 16.0]]


def test_gradients_in_another_layout_than_the_input():
    """ATen's kernels read each operand by its strides, except one for channels-last inputs."""
    ops, x = tritonite.overloads(), torch.randn(3, 4, 5, 2, device=tritonite.device)
    grad, rows = torch.randn_like(x), torch.rand(4, device=tritonite.device) + 1
    one, last = torch.full((1,), 30, dtype=torch.int32, device=x.device), torch.channels_last
    sums = ops["batch_norm_backward_reduce"](grad, x, rows, rows, rows, True, True, True)
    for operands in ((grad.to(memory_format=last), x), (grad, x.to(memory_format=last)), (grad.mT.contiguous().mT, x)):
        found = ops["batch_norm_backward_reduce"](*operands, rows, rows, rows, True, True, True)
        for own, other in zip(found, sums, strict=True):
            torch.testing.assert_close(own, other)
    exact = ops["batch_norm_backward_elemt"](grad, x, rows, rows, rows, *sums[:2], one)
    for operands in ((grad, x.to(memory_format=last)), (grad.mT.contiguous().mT, x)):
        found = ops["batch_norm_backward_elemt"](*operands, rows, rows, rows, *sums[:2], one)
        assert found.is_contiguous()
        torch.testing.assert_close(found, exact)


def test_declines():
    ops, x = tritonite.overloads(), torch.randn(3, 4, 5, 2, device=tritonite.device)
    last, rows = x.to(memory_format=torch.channels_last), torch.rand(4, device=tritonite.device) + 1
    one = torch.ones(1, dtype=torch.int32, device=tritonite.device)
    with pytest.raises(Decline, match="memory format"):
        ops["batch_norm_backward_elemt"](last, x, rows, rows, rows, rows, rows, one)
    with pytest.raises(Decline, match=r"counts of torch\.int64"):
        ops["batch_norm_backward_elemt"](x, x, rows, rows, rows, rows, rows, one.long())
    with pytest.raises(Decline, match=r"statistics whose dtype is not torch\.float32"):
        ops["batch_norm_elemt"](x, rows, rows, rows.double(), rows, 1e-5)
    with pytest.raises(Decline, match="for each process"):
        ops["batch_norm_gather_stats_with_counts"](x, rows[None], rows[None], None, None, 0.1, 1e-5, one)
    with pytest.raises(Decline, match="without a weight"):
        ops["batch_norm_backward_reduce"](x, x, rows, rows, None, True, True, False)


def test_a_complex_momentum_is_drawn():
    draw = facts.DRAWN["batch_norm_gather_stats"]
    assert draw({"momentum": 1j})["momentum"] == 1j
    assert draw({"momentum": -7})["momentum"] == 0.0
