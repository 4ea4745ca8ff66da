"""The check that a test's calls are not all declined."""

import pytest
import torch

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
