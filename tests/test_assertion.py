"""Asynchronous assertions: elements that pass, and ATen's error for one that is 0."""

import pytest
import torch

import tritonite

aten = torch.ops.aten


@pytest.mark.parametrize("value", [1, -2.5, True, float("nan")])
def test_elements_that_are_not_0(value):
    x = torch.tensor(value, device=tritonite.device)
    ops = tritonite.overloads()
    for element in (x, x.view(1), x.view(1, 1)):
        ops["_assert_async"](element)
        ops["_assert_async.msg"](element, "a message")
        # ATen has the functional form on CPUs alone.
        if functional := ops.get("_functional_assert_async.msg"):
            token = torch.ones(2, device=tritonite.device)
            copy = functional(element, "a message", token)
            assert torch.equal(copy, token) and copy.data_ptr() != token.data_ptr()


@pytest.mark.skipif(tritonite.device != "cpu", reason="a failed assertion on a GPU ends the process")
@pytest.mark.declines("on a CPU ATen raises its own error")
def test_an_element_that_is_0():
    zero = torch.zeros(1)
    with tritonite.use_gems(include="*assert_async"):
        with pytest.raises(RuntimeError, match="got zero"):
            torch._assert_async(zero)
        with pytest.raises(RuntimeError, match="a message"):
            torch._assert_async(zero, "a message")
        with pytest.raises(RuntimeError, match="a message"):
            aten._functional_assert_async.msg(zero, "a message", zero)
