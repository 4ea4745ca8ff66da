"""Convolutions and transposed convolutions of sequences, images and volumes, and their gradients.

call.py     checked calls: geometry, shape and memory format of the result, precision of the products
compute.py  the convolution of a checked call, and its gradients
general.py  the operators behind `torch.conv1d` to `torch.conv_transpose3d`
slow.py     ATen's operators without a library of convolutions
cudnn.py    operators that ATen serves with cuDNN
"""

import importlib

for _kind in ("general", "slow", "cudnn"):
    importlib.import_module(f"tritonite.ops.convolution.{_kind}")
