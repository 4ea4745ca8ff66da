"""Settings of kernels besides the choice of operators: faster_only and invariant."""

import threading

import pytest
import torch

import tritonite
from tritonite.bench.results import Result, Run, Timing, slower_operators
from tritonite.errors import ATEN_IS_FASTER, Decline
from tritonite.registry import slower
from tritonite.runtime import contract
from tritonite.testing.stand_in import standing_in


@pytest.fixture
def exp_is_slower(monkeypatch, change_device):
    """Count ATen as faster in exp of float32."""
    change_device(aten_measured=True)
    for name in ("exp", "exp_", "exp.out"):
        monkeypatch.setitem(tritonite.overloads()[name].__dict__, "slower_dtypes", frozenset({torch.float32}))
    contract.set_comparing(True)


def ran():
    """Return (calls that kernels served, declines by reason) of exp."""
    counts = tritonite.stats().get("exp", tritonite.Counts())
    return counts.launched + counts.replayed, counts.declined


def test_calls_that_aten_serves_faster_decline_by_default(device, path, exp_is_slower):
    x = torch.rand(5, device=device)
    for times in range(1, 4):
        with tritonite.use_gems():
            x.exp()
        assert ran() == (times - 1, {ATEN_IS_FASTER: times})
        with tritonite.use_gems(faster_only=False):
            x.exp()
        assert ran() == (times, {ATEN_IS_FASTER: times})
    counts = tritonite.stats()["exp"]
    assert counts.faster_in_aten == 3 and (counts.replayed == 2 or path == "python")
    with tritonite.use_gems():
        x.double().exp()
    assert ran()[0] == 4


def test_scopes_and_enable_set_faster_only(device, path, exp_is_slower):
    x = torch.rand(5, device=device)
    tritonite.enable(faster_only=False)
    x.exp()
    with tritonite.use_gems(include="exp"):
        x.exp()
        with tritonite.use_gems(include="exp", faster_only=False):
            x.exp()
        x.exp()
    x.exp()
    assert ran() == (3, {ATEN_IS_FASTER: 2})
    tritonite.disable()
    assert contract.settings() == (True, False)


def test_direct_calls_follow_faster_only(device, path, exp_is_slower):
    x = torch.rand(5, device=device)
    exp = tritonite.overloads()["exp"]
    with pytest.raises(Decline, match=ATEN_IS_FASTER):
        exp(x)
    torch.testing.assert_close(tritonite.ops.exp(x), x.exp())
    with tritonite.use_gems(include=(), faster_only=False):
        torch.testing.assert_close(exp(x), x.exp())


def test_calls_outside_scopes_follow_enable(device, path, exp_is_slower):
    x, seen = torch.rand(5, device=device), []

    def host(self):
        seen.append(contract.settings())
        return contract.empty(self.shape, self.dtype, self.device)

    for asked in ({"faster_only": False}, {"invariant": True}):
        with tritonite.use_gems(include="add", **asked):
            pass
        with standing_in("exp", host):
            x.exp()
    assert seen == [(True, False)] * 2


def test_declines_of_faster_only_are_counted_separately(device, path, exp_is_slower):
    x = torch.rand(5, device=device)
    with tritonite.use_gems():
        assert f"ATen: {ATEN_IS_FASTER}" in tritonite.explain("exp", x)
        found = tritonite.report(lambda: (x.exp(), x.to(torch.complex64).exp()))
        assert found.operators["exp"].faster_in_aten == 1 and found.operators["exp"].aten == 2
        assert "1 where ATen is faster" in str(found)
        assert "ATen faster" in str(tritonite.stats()) and tritonite.stats()["exp"].faster_in_aten == 1
    with tritonite.use_gems(faster_only=False):
        assert ATEN_IS_FASTER not in tritonite.explain("exp", x)


def test_without_measurements_nothing_is_left_to_aten_for_speed(device):
    assert contract.settings_of() == (False, False) and contract.settings_of(invariant=True).invariant


def test_plans_are_recorded_under_the_settings_in_their_key(device, path, exp_is_slower):
    """While other threads enter and leave scopes, no call replays a plan recorded under other settings."""
    if path == "python":
        pytest.skip("nothing is recorded")
    x, end = torch.rand(5, device=device), threading.Event()

    def toggle():
        while not end.is_set():
            with tritonite.use_gems(include="exp"):
                pass

    thread = threading.Thread(target=toggle)
    with tritonite.use_gems(include="exp", faster_only=False):
        thread.start()
        try:
            for size in range(1, 200):
                torch.testing.assert_close(x[:1].expand(size).exp(), x[:1].exp().expand(size))
        finally:
            end.set()
            thread.join()
        before = ran()[1].get(ATEN_IS_FASTER, 0)
        for size in range(1, 200):
            x[:1].expand(size).exp()
        assert ran()[1].get(ATEN_IS_FASTER, 0) == before


def test_the_table_of_slower_operators_is_of_operators():
    packets = {op.packet: op for op in tritonite.overloads().values()}
    for operators in slower.table().values():
        for name, dtypes in operators.items():
            assert {getattr(torch, dtype) for dtype in dtypes} <= set(packets[name].declaration.accepts), name


def test_an_operator_is_slower_where_no_large_case_is_fast():
    def result(op, elements, tritonite_time, flops=None):
        times = {"aten": Timing(8.0, 8.0, 8.0), "tritonite": Timing(tritonite_time, tritonite_time, tritonite_time)}
        return Result(op, "family", f"{elements}", "float32", "device", elements, 0, flops, times)

    results = [result("slow", 2**22, 11.0), result("slow", 2**24, 12.0), result("slow", 2**20, 2.0)]
    results += [result("fast", 2**22, 9.0), result("fast", 2**24, 12.0), result("mm", 2**24, 12.0, 1)]
    assert slower_operators(Run(None, results)) == {"slow": ["float32"]}
