"""Training steps on two processes: FSDP2 and DDP, on two GPUs, or on the CPU in the interpreter."""

import pytest
import torch
from scripts import run_ranks

import tritonite


@pytest.mark.skipif(tritonite.device == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_steps_with_fsdp2_and_ddp_give_atens_parameters(tmp_path):
    run_ranks("distributed", 2, tmp_path / "store")
