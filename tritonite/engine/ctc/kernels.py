"""Kernels of connectionist temporal classification: the recursions along a sequence, and the gradient of a step."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tritonite.language import libdevice
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry

# Rows of the table of sequences.
INPUT_LENGTHS, TARGET_LENGTHS, OFFSETS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


class Strides(NamedTuple):
    """Element strides of a batch of sequences, of shape (steps, sequences, classes) in any order."""

    step: int
    sequence: int
    label: int


@triton.jit
def _log_add(a, b, c):
    """Return log(exp(a) + exp(b) + exp(c))."""
    largest = tl.where(b > a, b, a)
    largest = tl.where(c > largest, c, largest)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    return libdevice.log(libdevice.exp(a - largest) + libdevice.exp(b - largest) + libdevice.exp(c - largest)) + largest


@triton.jit
def _sequence(table, sequence, n_sequences):
    """Return the steps and the labels of a sequence, and the offset of its first label."""
    steps = tl.load(table + INPUT_LENGTHS * n_sequences + sequence).to(tl.int32)
    labels = tl.load(table + TARGET_LENGTHS * n_sequences + sequence).to(tl.int32)
    return steps, labels, tl.load(table + OFFSETS * n_sequences + sequence)


@libentry()
@triton.jit(do_not_specialize=["target_stride", "n_sequences", "n_steps", "width", "blank"])
def run_recursion(
    states,
    losses,
    log_probs,
    targets,
    table,
    strides,
    target_stride,
    n_sequences,
    n_steps,
    width,
    blank,
    REVERSED: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write log alpha of a sequence to `states`, (sequences, steps, width), and its negative log-likelihood.

    If REVERSED write log beta, for the steps and positions of the sequence alone: from the last step and the last
    extended label the recursion is that of alpha.
    """
    wait_for_previous_launch()
    sequence = tl.program_id(0).to(INDEX)
    steps, labels, begin = _sequence(table, sequence, n_sequences)
    length = 2 * labels + 1
    probs = log_probs + sequence * strides.sequence
    states += sequence * n_steps * width
    step_stride = tl.full((), strides.step, INDEX)
    label_stride = tl.full((), strides.label, INDEX)
    width_stride = tl.full((), width, tl.int32).to(INDEX)
    dtype: tl.constexpr = log_probs.dtype.element_ty
    last, before_last = tl.zeros((1,), dtype), tl.zeros((1,), dtype)
    for first in range(0, width, BLOCK):
        position = first + tl.arange(0, BLOCK)
        exists = position < length
        place, towards = position, -1
        if REVERSED:
            place, towards = length - 1 - position, 1
        is_label = exists & (place % 2 == 1)
        pointers = targets + begin + (place // 2) * target_stride
        label = tl.load(pointers, mask=is_label, other=blank).to(INDEX)
        repeated = tl.load(pointers + towards * target_stride, mask=is_label & (position > 1), other=blank).to(INDEX)
        # A blank between two different labels may be skipped.
        skips = is_label & (position > 1) & (repeated != label)
        pointers = probs + label * label_stride
        step = tl.zeros((), tl.int32).to(INDEX)
        if REVERSED:
            step = (steps - 1).to(INDEX)
        value = tl.load(pointers + step * step_stride, mask=exists & (position < 2) & (steps > 0), other=-float("inf"))
        stored = exists & (steps > 0) if REVERSED else position < width
        tl.store(states + step * width_stride + place, value, mask=stored)
        for _ in range(1, steps):
            # The neighbours were stored by other threads.
            tl.debug_barrier()
            row = states + step * width_stride + place
            one = tl.load(row + towards, mask=exists & (position > 0), other=-float("inf"))
            two = tl.load(row + 2 * towards, mask=skips, other=-float("inf"))
            step -= towards
            log_prob = tl.load(pointers + step * step_stride, mask=exists, other=-float("inf"))
            value = _log_add(value, one, two) + log_prob
            tl.store(states + step * width_stride + place, value, mask=stored)
        if not REVERSED:
            for t in range(tl.maximum(steps, 1), n_steps):
                rest = tl.full((BLOCK,), -float("inf"), dtype)
                tl.store(states + t * width_stride + position, rest, mask=stored)
            last += tl.sum(tl.where(position == length - 1, value, 0.0), axis=0)
            before_last += tl.sum(tl.where(position == length - 2, value, 0.0), axis=0)
    if not REVERSED:
        before_last = tl.where(labels > 0, before_last, -float("inf"))
        none = tl.full((1,), -float("inf"), dtype)
        likelihood = _log_add(last, before_last, none)
        # Without steps only a sequence without labels is possible.
        likelihood = tl.where(steps > 0, likelihood, tl.where(labels > 0, -float("inf"), 0.0).to(dtype))
        tl.store(losses + sequence + tl.arange(0, 1), -likelihood)


@triton.jit
def _posterior(alpha, beta, place, log_prob, loss, mask):
    """Return the probability, given the labels, that a step emits the extended label at `place`."""
    both = tl.load(alpha + place, mask=mask, other=0) + tl.load(beta + place, mask=mask, other=0)
    return tl.where(mask, libdevice.exp(both + loss - log_prob), 0.0)


@libentry()
@triton.jit(do_not_specialize=["target_stride", "grad_stride", "n_sequences", "n_steps", "n_classes", "width", "blank"])
def gather_gradient(
    gradient,
    grad_output,
    grad_stride,
    log_alpha,
    log_beta,
    losses,
    log_probs,
    targets,
    table,
    strides,
    target_stride,
    n_sequences,
    n_steps,
    n_classes,
    width,
    blank,
    ZERO_INFINITY: tl.constexpr,
    INDEX: tl.constexpr,
    CLASSES: tl.constexpr,
    LABELS: tl.constexpr,
):
    """Write the gradient of a step of a sequence: each class's probability less its posterior, times `grad_output`.

    A class that occurs several times among the labels is written several times, with the same sum.
    """
    wait_for_previous_launch()
    sequence = (tl.program_id(0) % n_sequences).to(INDEX)
    step = (tl.program_id(0) // n_sequences).to(INDEX)
    steps, labels, begin = _sequence(table, sequence, n_sequences)
    grad = tl.load(grad_output + sequence * grad_stride)
    loss = tl.load(losses + sequence)
    probs = log_probs + sequence * strides.sequence + step * strides.step
    label_stride = tl.full((), strides.label, INDEX)
    out = gradient + (step * n_sequences + sequence) * n_classes
    alpha = log_alpha + (sequence * n_steps + step) * width
    beta = log_beta + (sequence * n_steps + step) * width
    lane = tl.arange(0, CLASSES)
    counts = step < steps
    if ZERO_INFINITY:
        counts = counts & (loss != float("inf"))
    for first in range(0, n_classes, CLASSES):
        mask = first + lane < n_classes
        log_prob = tl.load(probs + (first + lane) * label_stride, mask=mask, other=0)
        # exp(-inf) is nan for an impossible sequence or class.
        value = (libdevice.exp(log_prob) - libdevice.exp(-float("inf") + loss - log_prob)) * grad
        tl.store(out + first + lane, tl.where(counts, value, 0.0), mask=mask)
    # The gradients of all threads come before those of the labels.
    tl.debug_barrier()
    labels = tl.where(counts, labels, 0)
    other = tl.arange(0, LABELS)
    blank_prob = tl.load(probs + blank * label_stride)
    blanks = tl.zeros((LABELS,), log_probs.dtype.element_ty)
    for first in range(0, labels + 1, LABELS):
        exists = (first + other <= labels) & counts
        blanks += _posterior(alpha, beta, 2 * (first + other), blank_prob, loss, exists)
        exists = exists & (first + other < labels)
        label = tl.load(targets + begin + (first + other) * target_stride, mask=exists, other=-1)
        blanks += _posterior(alpha, beta, 2 * (first + other) + 1, blank_prob, loss, exists & (label == blank))
    value = (libdevice.exp(tl.full((1,), 0.0, blanks.dtype) + blank_prob) - tl.sum(blanks, axis=0)) * grad
    tl.store(out + blank + tl.arange(0, 1), value, mask=counts)
    for first in range(0, labels, LABELS):
        index = first + tl.arange(0, LABELS)
        exists = index < labels
        label = tl.load(targets + begin + index * target_stride, mask=exists, other=-1).to(INDEX)
        exists = exists & (label != blank)
        log_prob = tl.load(probs + label * label_stride, mask=exists, other=0)
        total = tl.zeros((LABELS,), log_prob.dtype)
        for begin_other in range(0, labels, LABELS):
            position = begin_other + other
            mask = position < labels
            same = tl.load(targets + begin + position * target_stride, mask=mask, other=-2).to(INDEX)
            own_prob = tl.load(probs + same * label_stride, mask=mask, other=0)
            posterior = _posterior(alpha, beta, 2 * position + 1, own_prob, loss, mask)
            total += tl.sum(tl.where(label[:, None] == same[None, :], posterior[None, :], 0.0), axis=1)
        tl.store(out + label, (libdevice.exp(log_prob) - total) * grad, mask=exists)
