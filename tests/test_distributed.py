"""Training steps on two processes: FSDP2 and DDP, on two GPUs, or on the CPU in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tritonite

FILE = Path(__file__).with_name("distributed.py")


@pytest.mark.skipif(tritonite.device == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_steps_with_fsdp2_and_ddp_give_atens_parameters(tmp_path):
    root = str(FILE.parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(FILE), str(rank), "2", str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and output.endswith("equal\n"), output
