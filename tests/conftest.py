"""tritonite comes first: without a GPU it must set up the interpreter before anything imports triton."""

import tritonite  # noqa: I001

import dataclasses
import os

import pytest
import torch

from tritonite import devices

FULL = os.environ.get("TRITONITE_TEST_FULL") == "1"


@pytest.fixture
def device() -> str:
    return tritonite.device


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks so small that rows take several of them, and several programs."""
    record = dataclasses.replace(devices.current, row_elements=128, row_columns=8, programs=4)
    monkeypatch.setattr(devices, "current", record)


@pytest.fixture(autouse=True)
def clean_state():
    """No test leaves an override, a count, or a changed default behind."""
    torch.manual_seed(0)
    tritonite.reset_stats()
    yield
    tritonite.disable()
    assert not tritonite.dispatch.override.installed()
    assert torch.get_default_dtype() is torch.float32


def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: quick checks run with every supported triton")
    torch.set_num_threads(1)
