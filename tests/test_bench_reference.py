"""The results in float64 that the benchmark compares answers with."""

import torch

from tritonite.bench import cases, run
from tritonite.testing.samples import Sample


def test_calls_that_aten_refuses_in_float64_have_no_reference():
    def fake_quantize(x):
        if x.dtype is torch.float64:
            raise RuntimeError("expected scalar type Float but found Double")
        return x.round()

    case = next(each for each in cases.cases(measures=["device"], ops=["round"]) if each.dtype is torch.float32)
    sample = Sample("", (torch.ones(3),), {})
    assert run._exact(case, fake_quantize, sample) is None
    assert run._exact(case, torch.round, sample)[0].dtype is torch.float64
