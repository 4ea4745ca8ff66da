"""Assertions about a tensor's one element that the host does not wait for."""

import torch
import triton.language as tl

from tritonite.dtypes import ALL
from tritonite.engine.assertion import assert_nonzero
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.registry import operator, scalar_kernel
from tritonite.runtime.contract import empty, refuse_if_negative

_MESSAGE = "Expected Tensor with single nonzero value, but got zero"


@scalar_kernel(accepts=ALL, output_dtypes=(torch.int64,))
def _refused(self):
    return tl.where(self != 0, 0, -1)


def _assert_nonzero(self, message):
    """Stop the program if the element is 0, as ATen does on a GPU; on a CPU leave it to ATen to raise its error."""
    outputs((self,), (), (), (), accepts=ALL)
    if self.numel() != 1:
        raise Decline(f"{self.numel()} elements; one is served")
    element = self.reshape(())
    if aten.on_cpu():
        flag = empty((), torch.int64, self.device)
        _refused.run((element,), (flag,))
        refuse_if_negative(flag, "an element that is 0")
    else:
        assert_nonzero(element, message)


@operator("_assert_async", accepts=ALL)
def _assert_async(self, outs=()):
    _assert_nonzero(self, _MESSAGE)
    return ()


@operator("_assert_async", accepts=ALL)
def _assert_async_msg(self, assert_msg, outs=()):
    _assert_nonzero(self, assert_msg)
    return ()


@operator("_functional_assert_async", accepts=ALL)
def _functional_assert_async_msg(self, assert_msg, dep_token, outs=()):
    """Return a copy of the token, which orders assertions in a graph."""
    _assert_nonzero(self, assert_msg)
    return (dep_token.clone(),)
