"""Resampling of sequences, images and volumes, and its gradients.

scales.py       sizes and scales, and the outputs that a gradient looks at
formulas.py     formulas of outputs and of gradients
nearest.py      nearest and nearest-exact interpolation
smooth.py       linear, bilinear, trilinear and bicubic interpolation
antialiased.py  bilinear and bicubic interpolation with a filter as wide as an output element
"""

import importlib

for _kind in ("nearest", "smooth", "antialiased"):
    importlib.import_module(f"tritonite.ops.resampling.{_kind}")
