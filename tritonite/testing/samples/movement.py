"""Copies, conversions, and rearrangements of elements."""

from __future__ import annotations

import torch

from tritonite.testing.samples import facts

facts.CHOICES["memory_format"] = (None, torch.preserve_format, torch.contiguous_format, torch.channels_last)
