"""Reports about calls that were made: of a function, counts as a table, the log, and profiles."""

import io
import logging
import sys

import pytest
import torch
from typer.testing import CliRunner

import tritonite
from tritonite import cli
from tritonite.install.override import installed
from tritonite.runtime.stats import counts_of

pytestmark = pytest.mark.usefixtures("path")


def step(x):
    y = x.softmax(-1) * 2
    torch.linalg.eig(y.detach() @ y.detach().mT)
    y.sum().backward()
    return x.grad


def test_a_report_says_who_ran_each_call_and_why(device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    report = tritonite.report(step, x)
    assert report.result is x.grad and not installed()
    for name in ("_softmax", "_softmax_backward_data", "mul.Tensor", "sum"):
        found = report.operators[name]
        assert found.calls == found.tritonite > 0 and not found.reasons
    assert report.operators["linalg_eig"].reasons == {"no kernel": 1}
    timed = [found.microseconds for found in report.operators.values() if found.microseconds]
    assert bool(timed) == (device == "cuda")
    assert report.as_dict()["linalg_eig"]["aten"] == 1
    assert "linalg_eig" in str(report) and "no kernel" in str(report) and "in Triton kernels" in str(report)


def test_a_report_keeps_to_what_is_enabled(device):
    x = torch.randn(4, device=device)
    tritonite.enable(include="exp")
    report = tritonite.report(lambda: (x.exp(), x.log(), x.to(torch.complex64).exp()))
    assert report.operators["log"].reasons == {"not enabled": 1}
    assert report.operators["exp"].reasons == {"dtype torch.complex64": 1} and report.operators["exp"].tritonite == 1


@pytest.mark.declines("ATen refuses the call")
def test_exceptions_pass_through(device):
    with pytest.raises(RuntimeError, match="must match"):
        tritonite.report(torch.add, torch.ones(3, device=device), torch.ones(4, device=device))
    assert not installed()


def test_stats_print_as_a_table(device):
    x = torch.randn(4, device=device)
    with tritonite.use_gems():
        x.exp(), x.to(torch.complex64).exp()
    lines = str(tritonite.stats()).splitlines()
    (line,) = (line for line in lines if "exp" in line)
    assert "replayed" in "".join(lines) and "dtype torch.complex64" in line


@pytest.mark.declines("no kernel accepts the dtype")
def test_declines_are_logged_once_for_each_reason(device, caplog):
    # A size that no other test uses, because the native dispatcher remembers declined calls.
    x = torch.randn(4, 37, device=device).to(torch.complex64)
    with caplog.at_level(logging.DEBUG, logger="tritonite"), tritonite.use_gems(include="cosh"):
        x.cosh(), x[1:].cosh(), x[2:].cosh()
    assert [record.getMessage() for record in caplog.records] == ["cosh is left to ATen: dtype torch.complex64"]


def test_a_profile_shows_our_calls_under_their_own_name(device):
    x = torch.randn(64, 64, device=device)
    with tritonite.use_gems():
        x + x
        with torch.profiler.profile() as profile:
            x + x
    assert {"aten::add", "tritonite::add.Tensor"} <= {event.key for event in profile.key_averages()}


def test_the_command_reports_on_a_model():
    pytest.importorskip("transformers", reason="models come from transformers")
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(
        cli.app, ["report", "--model", "bert", "--tokens", "8"]
    )
    assert result.exit_code == 0 and "bert prefill, 8 tokens" in result.output and "addmm" in result.output


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_tables_print_on_any_terminal(encoding, monkeypatch):
    x = torch.randn(4, 4, device=tritonite.device)
    with tritonite.use_gems(include="sigmoid"):
        report = tritonite.report(torch.sigmoid, x)
        tritonite.reset_stats()
        torch.sigmoid(x)
    counts_of("sigmoid").count_decline("a size of 3 \N{GREEK SMALL LETTER MU}m")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    print(tritonite.stats())
    print(report)
    terminal.flush()
    text = terminal.buffer.getvalue().decode(encoding)
    assert "sigmoid" in text and "a size of 3" in text


def block(x, query):
    """Run composite operators, whose steps have kernels, and a decomposition, which has none."""
    y = torch.nn.functional.layer_norm(torch.nn.functional.linear(x, x), (4,))
    y = torch.nn.functional.dropout(y, 0.5).reshape(2, 2, 4)
    torch.nn.functional.scaled_dot_product_attention(query, query, query)
    torch.linalg.eig(y @ y.mT)
    return torch.einsum("bij,kj->bik", torch.nn.functional.conv1d(y, y), x)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_report_lists_what_composite_operators_are_made_of(mode, device):
    with mode():
        found = tritonite.report(block, torch.randn(4, 4, device=device), torch.randn(1, 2, 4, 8, device=device))
    names = {name.partition(".")[0] for name in found.operators}
    assert not names & {"linear", "layer_norm", "dropout", "scaled_dot_product_attention", "einsum", "conv1d", "matmul"}
    assert found.operators["native_layer_norm"].tritonite == 1 and found.operators["linalg_eig"].aten == 1
    assert found.operators["mm"].tritonite == 1


def test_a_report_leaves_random_numbers_unchanged(device):
    x = torch.ones(64, device=device)
    with torch.inference_mode():
        torch.manual_seed(5)
        expected = torch.nn.functional.dropout(x, 0.5)
        torch.manual_seed(5)
        assert torch.equal(tritonite.report(torch.nn.functional.dropout, x, 0.5).result, expected)


def test_a_report_takes_names_and_stats_say_where_others_are(device):
    x = torch.randn(4, 8, device=device)
    assert tritonite.report("torch.softmax", x, 0).operators["_softmax"].tritonite == 1
    assert "tritonite.report" in str(tritonite.stats())


def test_a_report_names_devices_without_kernels(device):
    x = torch.ones(3, device="meta")
    found = tritonite.report(lambda: (torch.add(x, x), torch.add(torch.ones(3, device=device), 1)))
    assert found.operators["add.Tensor"].reasons == {"tensors on meta": 1}
    assert found.operators["add.Tensor"].tritonite == 1
