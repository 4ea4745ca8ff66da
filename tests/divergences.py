"""Operands of divergences and distillation losses, and `fused.linear_jsd` with its operands in another order."""

import torch
from compositions import normal

import tritonite
from tritonite import fused
from tritonite.testing.compositions.divergences import IGNORED


def heads(*leading, dtype=torch.float32, bias=True, hidden=6, size=5, classes=11):
    """Return student, its weight and bias, with gradients, and the teacher's."""
    own = [normal(*leading, hidden, dtype=dtype), normal(classes, hidden, dtype=dtype)]
    other = [normal(*leading, size, dtype=dtype), normal(classes, size, dtype=dtype)]
    own.append(normal(classes, dtype=dtype) if bias else None)
    other.append(normal(classes, dtype=dtype) if bias else None)
    return [each if each is None else each.requires_grad_() for each in own] + other


def linear_jsd(student, weight, bias, teacher, teacher_weight, teacher_bias, **options):
    return fused.linear_jsd(
        *(student, weight, teacher, teacher_weight), student_bias=bias, teacher_bias=teacher_bias, **options
    )


def labels_of(*leading, classes=11):
    labels = torch.randint(classes, leading, device=tritonite.device)
    labels.view(-1)[::4] = IGNORED
    return labels
