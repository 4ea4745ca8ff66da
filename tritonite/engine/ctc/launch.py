"""Launches of connectionist temporal classification."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritonite import devices
from tritonite.engine.ctc.kernels import Strides, gather_gradient, run_recursion
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.engine.lists.table import Table
from tritonite.runtime.contract import empty

# Extended labels that a program holds at a time.
_MOST_POSITIONS = 2048


def _table(
    input_lengths: Sequence[int], target_lengths: Sequence[int], targets: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return the table of sequences: their steps, labels, and the offset of the first label in `targets`."""
    if targets.dim() == 1:
        starts = [sum(target_lengths[:i]) * targets.stride(0) for i in range(len(target_lengths))]
    else:
        starts = [i * targets.stride(0) for i in range(len(target_lengths))]
    table = Table(input_lengths, 1)
    table.add_numbers(target_lengths, False)
    table.add_numbers(starts, False)
    return table.write(device)


def _recursion(
    states: torch.Tensor,
    losses: torch.Tensor | None,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    table: torch.Tensor,
    blank: int,
) -> None:
    n_steps, n_sequences, _ = log_probs.shape
    width = states.shape[2]
    block = min(_MOST_POSITIONS, power_of_2(width))
    run_recursion[(n_sequences,)](
        *(states, losses, log_probs, targets, table, Strides(*log_probs.stride()), targets.stride(-1)),
        *(n_sequences, n_steps, width, blank),
        REVERSED=losses is None,
        INDEX=offset_type(states, log_probs, targets),
        BLOCK=block,
        num_warps=min(8, devices.warps(block // 2)),
        # The neighbours are loaded after a barrier, never ahead of a step.
        num_stages=1,
    )


def forward(
    losses: torch.Tensor,
    log_alpha: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int,
) -> None:
    """Write the negative log-likelihoods, and the contiguous `log_alpha`, (sequences, steps, extended labels)."""
    table = _table(input_lengths, target_lengths, targets, log_probs.device)
    _recursion(log_alpha, losses, log_probs, targets, table, blank)


def backward(
    gradient: torch.Tensor,
    grad_output: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    losses: torch.Tensor,
    log_alpha: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> None:
    """Write the contiguous gradient by `log_probs`, where the log-probabilities are a log-softmax."""
    n_steps, n_sequences, n_classes = log_probs.shape
    table = _table(input_lengths, target_lengths, targets, log_probs.device)
    log_beta = empty(tuple(log_alpha.shape), log_probs.dtype, log_probs.device)
    _recursion(log_beta, None, log_probs, targets, table, blank)
    gather_gradient[(n_steps * n_sequences,)](
        *(gradient, grad_output, grad_output.stride(0), log_alpha, log_beta, losses),
        *(log_probs, targets, table, Strides(*log_probs.stride()), targets.stride(-1)),
        *(n_sequences, n_steps, n_classes, log_alpha.shape[2], blank),
        ZERO_INFINITY=zero_infinity,
        INDEX=offset_type(gradient, log_alpha, log_beta, log_probs, targets),
        CLASSES=min(1024, power_of_2(n_classes)),
        LABELS=min(32, power_of_2(1 + max(target_lengths))),
        num_warps=2,
    )
