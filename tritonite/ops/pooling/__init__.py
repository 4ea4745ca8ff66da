"""Pooling: averages and maxima over windows of images and volumes, their gradients, and unpooling.

images.py      batches, memory formats and checks that all share
average.py     averages over strided and adaptive windows
maximum.py     maxima and their indices, over strided and adaptive windows
fractional.py  maxima over windows at random positions
unpooling.py   maxima written back to their indices
"""

import importlib

for _kind in ("average", "maximum", "fractional", "unpooling"):
    importlib.import_module(f"tritonite.ops.pooling.{_kind}")
