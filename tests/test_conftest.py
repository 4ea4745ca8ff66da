"""The check that a test's calls are not all declined, and the cases that run with the full set alone."""

import ast
import types
from pathlib import Path

import conftest
import pytest
import torch
from conftest import SAMPLED

import tritonite

pytestmark = [pytest.mark.smoke, pytest.mark.host]


def _decline(device):
    with tritonite.use_gems(include="cosh"):
        torch.cosh(torch.ones(3, dtype=torch.complex64, device=device))


def _serve(device):
    with tritonite.use_gems(include="cosh", faster_only=False):
        torch.cosh(torch.ones(3, device=device))


@pytest.mark.xfail(strict=True, raises=pytest.fail.Exception, reason="every call is declined")
def test_a_test_whose_calls_are_declined_fails(device, path):
    _decline(device)


@pytest.mark.xfail(strict=True, raises=pytest.fail.Exception, reason="every call is declined")
def test_declines_before_a_reset_count(device, path):
    _decline(device)
    tritonite.reset_stats()


@pytest.mark.declines("dtype")
def test_a_marked_test_may_decline(device, path):
    _decline(device)


def test_calls_before_a_reset_count(device, path):
    _serve(device)
    tritonite.reset_stats()
    _decline(device)


@pytest.mark.parametrize("file", SAMPLED)
def test_tests_that_leave_cases_out_exist(file):
    source = ast.parse((Path(__file__).parent / file).read_text())
    names = {node.name for node in source.body if isinstance(node, ast.FunctionDef)}
    assert set(SAMPLED[file]) <= names


def test_a_part_of_the_cases_is_left_out(monkeypatch):
    file, name = "test_fused_optimizers.py", "test_twenty_steps_are_atens"
    every = SAMPLED[file][name]

    def case(test, i):
        return types.SimpleNamespace(path=Path(file), originalname=test, name=f"{test}[{i}]")

    monkeypatch.setattr(conftest, "FULL", False)
    left_out = [conftest.is_left_out(case(name, i)) for i in range(300)]
    assert 0.8 < sum(left_out) / (300 * (1 - 1 / every)) < 1.2
    pairs = [conftest.is_left_out(case(name, f"case{i}-dtype{i}")) for i in range(300)]
    assert 0.8 < sum(pairs) / (300 * (1 - 1 / every)) < 1.2
    assert not any(conftest.is_left_out(case("test_other", i)) for i in range(9))
    monkeypatch.setattr(conftest, "FULL", True)
    assert not any(conftest.is_left_out(case(name, i)) for i in range(300))
