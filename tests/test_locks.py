"""A child that is forked while another thread is at work."""

import pytest
import scripts
from conftest import some

import tritonite

FORKS = """
import os, signal, threading
import tritonite
import torch

torch.set_num_threads(1)
x, large, stop = torch.ones(4), torch.randn(1 << 18), threading.Event()


def enter_a_scope():
    with tritonite.use_gems(exclude="exp"):
        pass
    tritonite.disable()


def run_a_kernel():
    with tritonite.use_gems(include="exp"):
        large.exp()


def work():
    while not stop.is_set():
        {work}()


thread = threading.Thread(target=work)
thread.start()
for _ in range(10):
    child = os.fork()
    if not child:
        signal.alarm(20)
        tritonite.reset_stats()
        with tritonite.use_gems(include="exp"):
            right = torch.allclose(x.exp(), torch.full((4,), 2.718281828))
        counts = tritonite.stats()["exp"]
        os._exit(0 if right and counts.launched + counts.replayed == 1 else 1)
    status = os.waitpid(child, 0)[1]
    if status:
        break
stop.set()
thread.join()
assert status == 0
"""


@pytest.mark.skipif(tritonite.device != "cpu", reason="a GPU's context does not survive a fork")
@pytest.mark.parametrize(("work", "path"), some(["run_a_kernel", "enter_a_scope"], ["python", "native"]))
def test_a_forked_child_does_not_wait_for_its_parents_threads(work, path):
    scripts.run(FORKS.format(work=work), TRITONITE_NATIVE="1" if path == "native" else "0")
