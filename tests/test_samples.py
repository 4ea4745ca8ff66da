"""The samples and what excuses a decline on one: the floor under which no kernel may fall."""

import contextlib
import dataclasses
import fnmatch
import functools
import types
import weakref

import pytest
import torch
from conftest import FULL

import tritonite
from tritonite import devices
from tritonite.devices import nvidia
from tritonite.errors import Decline
from tritonite.install import override
from tritonite.registry import Op
from tritonite.testing import opinfo, verify
from tritonite.testing.judge import to_reference
from tritonite.testing.samples import (
    MAY_DECLINE,
    NOT_REACHED,
    REFERENCES,
    MayDecline,
    attention,
    compares_zero_sign,
    facts,
    samples,
)


def _exceptions():
    """Yield exceptions for the current device. Those for every device are tested on the CPU."""
    for exception in MAY_DECLINE:
        if (exception.device or "cpu") == tritonite.device:
            yield pytest.param(exception, id=f"{exception.names[0]}-{exception.labels[0]}")


WAYS = {"functional", "in-place", "out=", "gradient"}


def _named(exception):
    """Return the OpInfo functions that an exception names, or its overloads if its labels are not ways to call one."""
    names = opinfo.infos() if WAYS.issuperset(exception.labels) else {**tritonite.overloads(), **opinfo.infos()}
    return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in exception.names)]


def _check(name, exception, dtype):
    if name in tritonite.overloads() and not WAYS.issuperset(exception.labels):
        # For an exception with every label, two layouts are tested without the full set.
        labels = exception.labels if FULL or exception.labels != ("*",) else ("contiguous*", "channels_last*")
        return verify.check_overload(tritonite.overloads()[name], dtype, labels=labels)
    return verify.check_opinfo(name, opinfo.infos()[name], dtype, limit=None if FULL else 3)


@pytest.mark.parametrize("exception", list(_exceptions()))
@pytest.mark.declines("of some exceptions every sample is one")
def test_an_exception_is_needed(exception, monkeypatch):
    """Without the exception, each named overload fails in each named dtype, and each label belongs to a failure."""
    monkeypatch.setattr(verify, "MAY_DECLINE", [])
    found, labels = set(), set()
    for name in _named(exception):
        for dtype in exception.dtypes or (torch.float32,):
            report = _check(name, exception, dtype)
            failed = {failure.partition(": declined: ")[0] for failure in report.failures if ": declined: " in failure}
            excused = [x for x in report.declined if x[0] in failed and exception.covers(name, x[0], dtype, x[1])]
            assert excused, f"nothing of {name} in {dtype} needs it"
            labels.update(label for label, _ in excused)
            found.add(name)
    assert all(fnmatch.filter(found, glob) for glob in exception.names)
    assert all(fnmatch.filter(labels, glob) for glob in exception.labels)
    assert exception.why


@pytest.mark.parametrize("exception", MAY_DECLINE, ids=lambda exception: exception.names[0])
def test_an_exception_names_existing_overloads(exception):
    """Exceptions for another device are tested as well."""
    assert all(fnmatch.filter(_named(exception), glob) for glob in exception.names)


def test_exceptions_are_few():
    assert len(MAY_DECLINE) <= 40


@pytest.fixture
def declining(monkeypatch):
    """Make an operator decline calls whose arguments meet a condition, and forget its plans."""
    forgotten = set()

    def forget(name):
        if (dispatcher := override.native_dispatcher()) is not None:
            dispatcher.clear(name)

    def decline(name, condition):
        forgotten.add(name)
        forget(name)
        results = Op.results

        def whimsical(op, args, kwargs):
            if condition(*args):
                raise Decline("a whim")
            return results(op, args, kwargs)

        monkeypatch.setattr(Op, "results", whimsical)

    yield decline
    for name in forgotten:
        forget(name)


@pytest.mark.parametrize("name", ["add.Tensor", "exp.out", "neg_", "sum.dim_IntList"])
def test_a_decline_fails(name, declining):
    declining(name, lambda x, *_: x.shape == (6, 10))
    report = verify.check_overload(tritonite.overloads()[name], torch.float32, labels=("transposed*", "zero_dim*"))
    declined = {label for label, _ in report.declined}
    assert report.served and declined and all(label.startswith("transposed") for label in declined)
    assert {f"{label}: declined: {name}: a whim" for label in declined} == set(report.failures)


@pytest.mark.declines("the test declines")
@pytest.mark.skipif(tritonite.device == "cuda", reason="ATen has products of integers on CPUs alone")
def test_a_decline_of_an_unsupported_call_passes(declining):
    declining("mm", lambda *_: True)
    report = verify.check_overload(tritonite.overloads()["mm"], torch.int32, labels=("transposed",))
    assert report.samples == len(report.declined) == 1 and not report.served and not report.failures


@pytest.mark.declines("the test declines")
def test_an_excuse_is_for_its_reason_alone(declining, monkeypatch):
    excuse = MayDecline(("exp",), ("zero_dim",), "a whim", "for a test")
    monkeypatch.setattr(verify, "MAY_DECLINE", [excuse])
    declining("exp", lambda *_: True)
    check = functools.partial(verify.check_overload, tritonite.overloads()["exp"], torch.float32)
    assert not check(labels=("zero_dim",)).failures
    assert check(labels=("transposed",)).failures
    monkeypatch.setattr(verify, "MAY_DECLINE", [dataclasses.replace(excuse, reason="a reason")])
    assert check(labels=("zero_dim",)).failures
    monkeypatch.setattr(verify, "MAY_DECLINE", [dataclasses.replace(excuse, device="tpu")])
    assert check(labels=("zero_dim",)).failures


@pytest.mark.declines("the test declines")
def test_a_function_of_which_all_samples_decline_fails(declining):
    info = opinfo.infos()["exp"]
    declining("exp", lambda *_: True)
    report = verify.check_opinfo("exp", info, torch.float32, limit=2)
    assert not report.served
    assert {failure.partition(":")[0] for failure in report.failures} == {"functional", "in-place", "out=", "gradient"}


def test_samples_that_reach_no_kernel_are_declined(monkeypatch):
    op = tritonite.overloads()["exp"]
    monkeypatch.setattr(verify, "use_gems", lambda **_: contextlib.nullcontext())
    report = verify.check_overload(op, torch.float32, labels=("zero_dim",))
    assert report.failures == [f"zero_dim: declined: exp: {NOT_REACHED}"]


def test_results_on_another_device_are_ignored(monkeypatch):
    """A factory without a device makes tensors on the CPU, while kernels are for a GPU."""
    made = [types.SimpleNamespace(input=1, args=(3, 4), kwargs={"device": "meta"}, transform=lambda _: made[0])]
    monkeypatch.setattr(opinfo, "sample_inputs", lambda *_, **__: iter(made))
    info = types.SimpleNamespace(
        op=torch.linspace, name="linspace", aten_name="linspace", inplace_variant=None, supports_out=False
    )
    info.supports_autograd = False
    report = verify.check_opinfo("linspace", info, torch.float32, limit=None)
    assert not report.samples and not report.failures


def test_nan_has_no_sign_where_aten_sorts_by_digits(monkeypatch):
    x = torch.tensor([-1, 0x7F80, 0, -0x8000], dtype=torch.int16).view(torch.bfloat16)
    assert facts.without_signed_nan(x) is x or tritonite.device == "cuda"
    monkeypatch.setattr(devices, "current", nvidia.RECORD)
    found = facts.without_signed_nan(x)
    assert found.isnan().tolist() == [True, False, False, False] and found.signbit().tolist() == [False] * 3 + [True]
    assert facts.without_signed_nan(found) is found


@pytest.mark.parametrize("name", ["add.Tensor", "native_layer_norm", "mm", "nll_loss_forward", "glu_backward"])
def test_samples_are_the_same_each_time(name):
    op = tritonite.overloads()[name]
    for once, again in zip(samples(op, torch.float32), samples(op, torch.float32), strict=True):
        assert once.label == again.label
        torch.testing.assert_close((once.args, once.kwargs), (again.args, again.kwargs), equal_nan=True)


def test_labels_name_every_layout_choice_and_flag():
    labels = [sample.label for sample in samples(tritonite.overloads()["gelu"], torch.float32)]
    assert "contiguous none" in labels and "extreme tanh" in labels and len(set(labels)) == len(labels)
    for name in ("add.Tensor", "sum.dim_IntList", "div.Tensor_mode", "native_batch_norm"):
        labels = [sample.label for sample in samples(tritonite.overloads()[name], torch.float32)]
        assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    "name", ["_batch_norm_with_update", "_batch_norm_with_update_functional", "batch_norm_backward"]
)
def test_batch_norm_has_a_reference_in_every_layout(name):
    """On a GPU ATen has cuDNN do float64, which refuses some; its kernels for CPUs refuse none."""
    op, labels = tritonite.overloads()[name], set()
    for sample in samples(op, torch.float16, tritonite.device):
        if sample.args[0].dim() < 2 or sample.label.startswith("extreme"):
            continue
        wide, plain = (sample.map(functools.partial(to_reference, device=device)) for device in (None, "cpu"))
        references = REFERENCES[name](*wide.args, **wide.kwargs)
        results = getattr(torch.ops.aten, name)(*plain.args, **plain.kwargs)
        for reference, result in zip(references, results, strict=True):
            if result.is_floating_point():
                torch.testing.assert_close(reference.cpu(), result, rtol=1e-9, atol=1e-9, equal_nan=True)
        labels.add(sample.label.removesuffix(" True").removesuffix(" False"))
    assert {"permuted", "sequences transposed"} <= labels


@pytest.mark.parametrize(
    "name", ["native_batch_norm.out", "_native_batch_norm_legit.out", "_native_batch_norm_legit.no_stats_out"]
)
def test_statistics_to_write_have_the_dtype_that_aten_makes(name):
    """ATen's kernels for GPUs write float32 statistics into 16-bit outputs, and read them back wrongly."""
    op = tritonite.overloads()[name]
    packet, _, form = name.partition(".")
    functional = getattr(getattr(torch.ops.aten, packet), "no_stats" if "no_stats" in form else "default")
    for sample in samples(op, torch.float16, tritonite.device):
        made = verify._quietly(functools.partial(functional, *sample.map(verify._clone).args))
        if not isinstance(made, Exception):
            template = verify._functional(getattr(getattr(torch.ops.aten, packet), form), op, sample)
            assert [part.dtype for part in template] == [part.dtype for part in made], sample.label


def test_outputs_are_judged_by_the_familys_reference(monkeypatch):
    """The reference function has no output arguments."""
    asked = []

    def reference(self):
        asked.append(self.dtype)
        return self.expm1()

    monkeypatch.setitem(REFERENCES, "expm1", reference)
    report = verify.check_overload(tritonite.overloads()["expm1.out"], torch.float32, labels=["contiguous"])
    assert report.served and not report.failures and set(asked) == {torch.float64}
    assert report.error > 0
    monkeypatch.setitem(REFERENCES, "expm1", lambda self: self.expm1() * 2)
    wrong = verify.check_overload(tritonite.overloads()["expm1.out"], torch.float32, labels=["contiguous"])
    assert wrong.error > 1e5


def test_signs_of_zero_products_are_not_compared():
    """ATen's products call libraries. Outer products are ATen's own, and their signs are compared."""
    products = {op.packet for op in tritonite.overloads().values() if op.family == "matmul"}
    assert {packet for packet in products if compares_zero_sign(packet)} == {"addr", "_int_mm"}


@pytest.mark.parametrize("biased", [False, True])
def test_long_attention_has_the_same_reference_head_by_head(biased, monkeypatch):
    query, key, value, grad = (torch.randn(2, n, 11, 8, dtype=torch.float64) for n in (4, 2, 2, 4))
    bias = torch.randn(2, 1, 11, 11, dtype=torch.float64) if biased else None
    found = []
    for most in (attention._MAX_SCORES, 1):
        monkeypatch.setattr(attention, "_MAX_SCORES", most)
        operands = [x.detach().requires_grad_() for x in (query, key, value, *([bias] if biased else []))]
        out, logarithms = attention._attended(*operands[:3], operands[3] if biased else None, not biased, False, None)
        found.append((out, logarithms, *torch.autograd.grad(out, operands, grad)))
    torch.testing.assert_close(*found)


def test_gradients_of_long_attention_keep_the_scores_of_one_head(monkeypatch):
    query, key, value, grad = (torch.randn(2, 4, 11, 8, dtype=torch.float64) for _ in range(4))
    monkeypatch.setattr(attention, "_MAX_SCORES", 1)
    kept, most, scores_of = list[weakref.ref[torch.UntypedStorage]](), 0, attention._scores

    def counted(*arguments):
        nonlocal most
        most = max(most, sum(each() is not None for each in kept))
        found = scores_of(*arguments)
        kept.append(weakref.ref(found.untyped_storage()))
        return found

    monkeypatch.setattr(attention, "_scores", counted)
    REFERENCES["_scaled_dot_product_flash_attention_backward"](grad, query, key, value, None, None)
    assert len(kept) == 16 and most <= 1


def test_what_is_drawn_passes_every_function_of_an_operator():
    infinite = torch.full((0, 3, 4), torch.inf), torch.full((3, 2, 1), torch.inf)
    drawn = facts.DRAWN["convolution_backward"](
        {"grad_output": infinite[0], "weight": infinite[1], "bias_sizes": None, "padding": [0]}
    )
    assert drawn["bias_sizes"] == [3] and drawn["weight"].isfinite().all()
    drawn = facts.DRAWN["convolution_backward"]({"grad_output": torch.full((1, 3, 4), torch.inf), "bias_sizes": [3]})
    assert drawn["grad_output"].isfinite().all()
    given = {"self": torch.ones(1, 1, 4, 4), "output_size": [2, 1], "scales_h": 3.0, "scales_w": None}
    drawn = facts.DRAWN["_upsample_bilinear2d_aa"](given)
    assert drawn["output_size"] == [2, 2] and drawn["scales_h"] is None
