"""Compare a step of a small Llama on two GPUs with the same step on one, with Tritonite off and on.

    python tools/two_gpus.py --json docs/benchmarks/two_gpus.json
    torchrun --nproc-per-node 2 tools/two_gpus.py
    python tools/two_gpus.py --device cpu --backend gloo --quick        # the interpreter, a tiny model

The ways to share the work are those of tools/parallel_llama.py. The loss and every gradient are compared with those
that ATen computes on one GPU, in float32 or, for mixed precision, in bfloat16. A gradient's error is the norm of the
difference by the norm of ATen's gradient. Prints a table, and exits with 1 if a way fails or is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import parallel_llama
import torch
import torch.distributed as dist
from parallel_llama import TINY, Case, Gradients, NotHere, Size, Way
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from two_gpus_table import Row, table

import tritonite
from tritonite.bench.run import current_commit

INTERPRETED = "a CPU in Triton's interpreter"
# Largest relative error of a loss, and of a gradient's norm.
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 5e-2)}
PROCESSES = 2


def compare(way: Way, case: Case, on: bool, expected: tuple[float, Gradients]) -> tuple[Row, set[str]]:
    """Run a way on this process. Return its errors, and the names of its gradients."""
    row = Row(way.title, on, "equal")
    tritonite.reset_stats()
    try:
        with tritonite.use_gems(None if on else []):
            loss, found = way.run(case)
    except NotHere as reason:
        return dataclasses.replace(row, status=f"not run: {reason}"), set(expected[1])
    row.loss_error = abs(loss - expected[0]) / abs(expected[0])
    errors = {name: _distance(grad, expected[1][name]) for name, grad in found.items()}
    if errors:
        row.worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
        row.gradient_error = errors[row.worst]
    most_loss, most_gradient = TOLERANCE[way.dtype]
    if not (row.loss_error <= most_loss and row.gradient_error <= most_gradient):
        row.status = "differs"
    counts = tritonite.stats().values()
    row.served = sum(each.launched + each.replayed for each in counts)
    row.declined = sum(sum(each.declined.values()) for each in counts)
    if on and not row.served:
        row.status = "no kernel ran"
    return row, set(found)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, by the norm of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def joined(found: Sequence[tuple[Row, set[str]]], parameters: set[str]) -> Row:
    """Return the row of all processes, which together must have the gradient of every parameter."""
    rows = [row for row, _ in found]
    worst = max(rows, key=lambda row: (not row.is_right, row.gradient_error))
    missing = parameters.difference(*(names for _, names in found))
    if worst.is_right and missing:
        worst = dataclasses.replace(worst, status=f"no gradient of {min(missing)}")
    return dataclasses.replace(
        worst, served=sum(row.served for row in rows), declined=sum(row.declined for row in rows)
    )


def result(rows: Sequence[Row], size: Size, options: argparse.Namespace) -> dict[str, Any]:
    """Return what is stored as JSON."""
    return {
        "commit": current_commit(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else INTERPRETED,
        "backend": options.backend,
        "torch": torch.__version__,
        "size": dataclasses.asdict(size),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def worker(options: argparse.Namespace) -> int:
    """Run all ways on this process of the group. The first process prints and writes the results."""
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    device = torch.device(options.device, local) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend, timeout=datetime.timedelta(seconds=options.timeout))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    chosen = [way for way in parallel_llama.ways() if options.only in way.title]
    first = dist.get_rank() == 0
    rows: list[Row] = []
    for way in chosen:
        rows += _both(way, options, mesh, device)
        if first and options.json:
            # After each way, so that an interrupted command leaves what it has found.
            found = result(rows, TINY if options.quick else Size(), options)
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    if first:
        print(table(rows))
    return 0 if rows and all(row.is_right for row in rows) else 1


def _both(way: Way, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Iterator[Row]:
    """Yield a way's rows with Tritonite off and on."""
    size = TINY if options.quick else Size()
    if not way.deep:
        size = dataclasses.replace(size, layers=size.layers // 2)
    if way.equal_heads:
        size = dataclasses.replace(size, key_value_heads=size.heads)
    case = Case.make(size, mesh, device)
    expected = parallel_llama.one_process(case, way.dtype)
    for on in (False, True):
        # From the second time on, calls repeat the recorded launches of the first.
        found = [_on_all(way, case, on, expected) for _ in range(options.repeat if on else 1)]
        row = max(reversed(found), key=lambda row: not row.is_right)
        if dist.get_rank() == 0:
            print(f"{way.title}, Tritonite {'on' if on else 'off'}: {row.status}", flush=True)
        yield row


def _on_all(way: Way, case: Case, on: bool, expected: tuple[float, Gradients]) -> Row:
    """Run a way on all processes. Return their row; an error is its status."""
    try:
        own = compare(way, case, on, expected)
    except Exception as error:  # noqa: BLE001 - a way that fails is a row of the table
        traceback.print_exc()
        own = Row(way.title, on, f"{type(error).__name__}: {error}".splitlines()[0]), set()
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return joined(everyones, set(expected[1]))


def start(options: argparse.Namespace) -> int:
    """Start the processes of a group on this machine. Return the largest exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared = address | {"WORLD_SIZE": str(PROCESSES)}
    # A fork has imported everything, which takes longer than a tiny model's steps. A GPU's driver does not survive one.
    context: Any = multiprocessing.get_context("fork" if options.device == "cpu" else "spawn")
    running = [
        context.Process(target=_ranked, args=(shared | {"RANK": str(rank)}, options)) for rank in range(PROCESSES)
    ]
    try:
        for process in running:
            process.start()
        # One that has crashed leaves the other waiting for it.
        while any(process.is_alive() for process in running) and not any(each.exitcode for each in running):
            time.sleep(0.1)
        return max(abs(process.exitcode or 0) for process in running)
    finally:
        for process in running:
            if process.is_alive():
                process.kill()


def _ranked(variables: dict[str, str], options: argparse.Namespace) -> None:
    """Run as a process of a group that `start` has started."""
    os.environ.update(variables)
    sys.exit(worker(options))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "cpu"), default=tritonite.device)
    made.add_argument("--backend", help="nccl on GPUs, gloo on the CPU")
    made.add_argument("--quick", action="store_true", help="a tiny model")
    made.add_argument("--repeat", type=int, default=2, help="runs of each way with Tritonite on")
    made.add_argument("--only", default="", help="only the ways whose names contain this")
    made.add_argument("--json", type=Path, help="write the errors here")
    made.add_argument("--timeout", type=float, default=120, help="seconds that a collective may take")
    return made


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    options.backend = options.backend or {"cuda": "nccl", "cpu": "gloo"}[options.device]
    if options.device != tritonite.device:
        raise SystemExit(f"--device {options.device}: Tritonite runs on {tritonite.device} here")
    if options.device == "cuda" and torch.cuda.device_count() < PROCESSES:
        raise SystemExit(f"this machine has {torch.cuda.device_count()} of {PROCESSES} GPUs")
    return worker(options) if "RANK" in os.environ else start(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
