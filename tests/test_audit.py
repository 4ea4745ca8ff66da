"""`tritonite.audit`: wrong kernels are found, right ones are not, calls are unchanged, and nothing is left behind."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import tritonite
from tritonite import devices
from tritonite.errors import InvalidAudit
from tritonite.install import library, python
from tritonite.install.override import dispatcher_in_use
from tritonite.registry import Op, has_kernel, schemas
from tritonite.registry.results import CHOSEN_INDICES, UNORDERED
from tritonite.report.audit import running
from tritonite.report.audit.audit import _why_unchecked
from tritonite.report.audit.call import copied, size
from tritonite.report.audit.checks import _finite
from tritonite.runtime import contract
from tritonite.testing.samples import CHOSEN

pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture(autouse=True)
def ended():
    yield
    assert running() is None and python._InForce.audit is None
    assert not contract.inside_kernel()


@pytest.fixture
def sabotage(monkeypatch):
    """Return a function that changes the results of an overload's host function."""
    original, changes = Op.results, {}

    def results(self, args, kwargs):
        found = original(self, args, kwargs)
        if self.overload in changes:
            # A plan would repeat the kernel without the change.
            contract.unrepeatable("a change by a test")
            outer = contract.swap_inside_kernel(True)
            for result in found if self.schema.returns else args[:1]:
                for tensor in result if isinstance(result, list) else [result]:
                    changes[self.overload](tensor)
            contract.swap_inside_kernel(outer)
        return found

    monkeypatch.setattr(Op, "results", results)
    return changes.__setitem__


def audited(function, **options):
    """Call a function with Tritonite's kernels under an audit of all calls, and return the audit."""
    with tritonite.use_gems(), tritonite.audit(rate=1, **options) as audit:
        function()
    assert audit.checked
    return audit


def kinds(audit):
    return [(each.check, each.overload) for each in audit.findings]


def test_right_kernels_are_not_found(device):
    x = torch.randn(8, 9, device=device)
    weight = torch.randn(4, 9, device=device, requires_grad=True)

    def calls():
        for _ in range(2):
            y = x + 1
            y.mul_(2).add_(y)
            y[::2, 1:].sub_(1)
            torch.softmax(y.t(), 0)
            torch.add(x, 1, out=torch.empty_like(x))
            torch.mul(x, x.bfloat16(), out=torch.empty(9, 8, device=device).t())
            x.topk(3), x.sort(), x.argmax(1), x.long() // 3, (x > 0).any()
            torch._foreach_add([x, x[1:]], 1.0)
            torch._foreach_mul_([y, y[1]], 2.0)
            torch.nn.functional.linear(x, weight).square().mean().backward()
            torch.nn.functional.batch_norm(x, y[0], y[1].abs(), training=True)

    audit = audited(calls)
    assert not audit.findings and audit.skipped.keys() <= {"no tensors"}, (audit.findings, audit.skipped)
    assert audit.checked > 20 and "checked" in str(audit)


def test_drift_is_found(device, sabotage):
    sabotage("exp", lambda result: result[0].mul_(1.01))
    x = torch.randn(8, 9, device=device)
    audit = audited(lambda: (x.exp(), x.exp(), x.sin()))
    assert kinds(audit) == [("drift", "exp")]
    (found,) = audit.findings
    assert found.count == 2 and found.call == 0 and found.error > 1e4 and "9 of 72 elements differ" in found.detail
    assert "exp" in str(audit) and "exp" in audit._repr_html_()


@pytest.mark.parametrize(
    "overload, call",
    [
        ("exp_", lambda x: x.exp_()),
        ("exp.out", lambda x: torch.exp(x, out=torch.empty(9, 8, device=x.device).t())),
        ("exp.out", lambda x: torch.exp(x, out=x)),
        ("exp_", lambda x: x[::2, 1:].exp_()),
        ("_foreach_exp", lambda x: torch._foreach_exp([x, x[1:]])),
        ("_foreach_exp_", lambda x: torch._foreach_exp_([x, x.clone()])),
    ],
)
def test_drift_of_written_arguments_and_lists_is_found(device, sabotage, overload, call):
    sabotage(overload, lambda result: result[0].mul_(1.01))
    x = torch.randn(8, 9, device=device)
    assert kinds(audited(lambda: call(x))) == [("drift", overload)]


def test_calls_have_the_results_that_they_have_without_an_audit(device):
    def calls():
        x = torch.linspace(-1, 1, 72, device=device).reshape(8, 9)
        base = x.clone()
        base[1:].add_(base[:1]), base.t()[2:].mul_(3), torch.add(base, 1, out=base)
        torch._foreach_add_([base[0], base[1]], 2.0)
        return base, base._version, x.cumsum(0)

    with tritonite.use_gems():
        expected, version, sums = calls()
    results = []
    audit = audited(lambda: results.extend(calls()))
    assert torch.equal(results[0], expected) and torch.equal(results[2], sums) and results[1] == version
    assert not audit.findings


def test_the_first_nan_of_finite_arguments_is_found(device, sabotage):
    sabotage("sin", lambda result: result[0].fill_(float("nan")))
    x = torch.ones(4, 4, device=device)
    audit = audited(lambda: (x * 2).sin().exp().sum(), checks="nan")
    assert kinds(audit) == [("nan", "sin")] and "the kernel is wrong" in audit.findings[0].detail
    assert audit.findings[0].call == 1
    audit = audited(lambda: (x - 2).log() + 1, checks=("nan",))
    assert kinds(audit) == [("nan", "log")] and "the data is the cause" in audit.findings[0].detail
    assert "inf" in audited(lambda: (x - 1).log(), checks="nan").findings[0].detail
    assert not audited(lambda: x.masked_fill(x > 0, float("-inf")), checks="nan").findings


def test_bits_that_change_are_found(device, sabotage):
    values = iter(range(100))
    sabotage("exp", lambda result: result[0, 0].add_(next(values) * 1e-6))
    x = torch.zeros(4, 4, device=device)
    audit = audited(lambda: (x.exp(), x.cos()), checks="bits")
    assert kinds(audit) == [("bits", "exp")] and "1 of 16 elements differ" in audit.findings[0].detail


def test_kernels_without_an_order_are_left_out(device, sabotage):
    values = iter(range(100))
    sabotage("index_add", lambda result: result[0].add_(next(values)))
    x, index = torch.zeros(4, 4, device=device), torch.tensor([0, 0], device=device)
    assert not audited(lambda: x.index_add(0, index, x[:2] + 1), checks="bits").findings


def test_facts_name_operators():
    packets = {op.packet for op in tritonite.overloads().values()}
    assert CHOSEN_INDICES.issuperset(CHOSEN)
    # ATen has some of them for CPUs alone.
    key = devices.current.dispatch_key
    present = {p for p in CHOSEN_INDICES | UNORDERED if any(has_kernel(overload, key) for overload, _ in schemas(p))}
    assert packets.issuperset(present) and len(present) > 25


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.complex64])
def test_any_dtype_is_checked_for_nan(device, dtype):
    x = torch.ones(4, device=device)
    assert _finite(x.to(dtype)) and not _finite((x * float("nan")).to(dtype))


def test_replays_are_checked_and_not_counted(device, path):
    x = torch.randn(4, 6, device=device)
    with tritonite.use_gems():
        x.exp()
        with tritonite.audit(rate=1) as audit:
            x.exp(), x.exp()
    counts = tritonite.stats()["exp"]
    assert audit.checked == 2 and not audit.findings
    assert (counts.replayed, counts.launched) == ((2, 1) if path == "native" else (0, 3))


def test_rates(device):
    x = torch.ones(1, device=device)

    def sampled(rate, seed=0):
        with tritonite.use_gems(), tritonite.audit(rate, "nan", seed=seed) as audit:
            for _ in range(100):
                x.abs()
        return audit.sampled

    assert sampled(0) == 0 and sampled(1) == 100
    assert 10 < sampled(0.25) < 45
    assert sampled(0.25, 7) == sampled(0.25, 7)


def test_large_calls_are_skipped(device):
    x, y = torch.ones(64, 64, device=device), torch.ones(4, device=device)
    audit = audited(lambda: (x + 1, y + 1, y.expand(2048, 4) + 1), max_bytes=4096)
    assert audit.skipped == {"more than 4096 bytes": 2} and audit.checked == 1


@pytest.mark.parametrize(
    "overload, args, kwargs, reason",
    [
        ("native_dropout", ("x", 0.5, True), {}, "random numbers"),
        ("bernoulli.p", ("x", 0.5), {}, "random numbers"),
        ("_scaled_dot_product_flash_attention", ("x", "x", "x", 0.1), {}, "random numbers"),
        ("_scaled_dot_product_flash_attention", ("x", "x", "x"), {}, ""),
        ("add.Tensor", ("x", 1), {}, ""),
        ("zeros_like", ("x",), {}, ""),
        ("full", ((2,), 1), {}, "no tensors"),
    ],
)
def test_random_operators_are_skipped(overload, args, kwargs, reason):
    args = tuple(torch.ones(4) if value == "x" else value for value in args)
    assert _why_unchecked(tritonite.overloads()[overload], (args, kwargs)) == reason


def test_findings_are_handed_on(device, sabotage):
    sabotage("exp", lambda result: result.add_(1))
    x, seen = torch.ones(4, device=device), []
    audited(lambda: (x.exp(), x.exp()), on_finding=seen.append, checks="drift")
    assert [(each.overload, each.call, each.count) for each in seen] == [("exp", 0, 1), ("exp", 1, 1)]

    def refuse(finding):
        raise RuntimeError(f"stop at {finding.overload}")

    with pytest.raises(RuntimeError, match="stop at exp"):
        audited(x.exp, on_finding=refuse)


def test_a_report_shows_findings(device, sabotage):
    sabotage("exp", lambda result: result.add_(1))
    x = torch.ones(4, device=device)
    with tritonite.audit(rate=1, checks="drift"):
        report = tritonite.report(lambda: x.exp())
        assert [each.overload for each in report.findings] == ["exp"]
        assert "drift of exp" in str(report) and "drift of exp" in report._repr_html_()
        assert not tritonite.report(lambda: x.cos()).findings
    assert not tritonite.report(lambda: x.exp()).findings


def test_an_audit_ends_and_leaves_nothing(device):
    x = torch.ones(4, device=device)
    audit = tritonite.audit(rate=1)
    tritonite.enable()
    x.abs()
    assert audit.checked == 1
    with pytest.raises(InvalidAudit, match="stop"):
        tritonite.audit()
    audit.stop(), audit.stop()
    x.abs()
    assert audit.sampled == 1
    with audit:
        x.abs()
    assert audit.sampled == 2
    gone = weakref.ref(audit)
    del audit
    gc.collect()
    assert gone() is None


def test_an_audit_may_last_until_the_process_ends(path):
    code = """
import torch, tritonite
tritonite.enable()
audit = tritonite.audit(rate=1)
torch.ones(4, device=tritonite.device).exp()
print(audit.checked > 0)
"""
    environment = os.environ | {"TRITONITE_NATIVE": "1" if path == "native" else "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_calls_at_graph_breaks_are_checked(device):
    @torch.compile(backend="eager")
    def function(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y.exp()

    audit = audited(lambda: function(torch.ones(4, device=device)))
    assert audit.checked == 2 and not audit.findings


@pytest.mark.parametrize("options", [{"rate": 2}, {"rate": -0.1}, {"checks": "drifts"}, {"checks": ("nan", "x")}])
def test_other_arguments_are_refused(options):
    with pytest.raises(InvalidAudit):
        tritonite.audit(**options)


def test_threads(device, sabotage):
    sabotage("exp", lambda result: result.add_(1))
    x = torch.ones(4, device=device)

    def work():
        for _ in range(10):
            x.exp(), x.cos()

    with tritonite.use_gems(), tritonite.audit(rate=1, checks=("drift", "bits")) as audit:
        threads = [threading.Thread(target=work) for _ in range(3)]
        [each.start() for each in threads], [each.join() for each in threads]
    (found,) = audit.findings
    assert found.overload == "exp" and found.count == 30 and audit.checked == 60


def test_operators_outside_aten_are_checked(device, path):
    # An operator stays with the dispatcher, or without one, as it was registered: each path has one of its own here.
    name = {"native": "relu_and_mul", "python": "gelu_and_mul"}[path]
    if f"tritonite::{name}" in library.registered():
        pytest.skip("an earlier test has registered the operator, on either path")
    x = torch.randn(4, 8, device=device)
    with tritonite.audit(rate=1) as audit:
        getattr(tritonite.fused, name)(x)
    assert audit.checked == 1 and not audit.findings and not audit.skipped


def test_an_audit_of_no_dispatcher_is_none(path):
    assert (dispatcher_in_use() is not None) == (path == "native")


def test_copies_keep_strides_overlaps_and_alignment(device):
    base = torch.arange(64.0, device=device)
    tree = [base[5:37].view(4, 8).t(), (base[9:11], base[:0], base[3].expand(2, 2)), 7, torch.ones(2, device=device)]
    copy = copied(tree)
    for old, new in [(tree[0], copy[0]), *zip(tree[1], copy[1], strict=True), (tree[3], copy[3])]:
        assert torch.equal(old, new) and old.stride() == new.stride()
        assert not old.numel() or old.data_ptr() % 16 == new.data_ptr() % 16
    assert copy[2] == 7
    copy[0].zero_()
    assert copy[1][0].sum() == 0 and copy[3].sum() == 2 and base.sum() == 2016
    assert size(tree) == 37 * 4 + 8
