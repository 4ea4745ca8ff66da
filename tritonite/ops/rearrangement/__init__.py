"""Flips, rolls, padding, sliding windows and shuffles, and gradients of those that repeat elements.

order.py    flips, rolls, rotations, shuffles
padding.py  padding, and its gradients
windows.py  im2col, col2im, and the gradient of unfold
"""

import importlib

for _kind in ("order", "padding", "windows"):
    importlib.import_module(f"tritonite.ops.rearrangement.{_kind}")
