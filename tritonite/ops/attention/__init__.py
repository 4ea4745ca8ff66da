"""Scaled dot product attention: the operators that `scaled_dot_product_attention` chooses among, and their gradients.

    checks.py      what ATen's operators accept: operands, biases, packed sequences, results of the forward pass
    passes.py      the kernels that serve a pass; where ATen's are faster
    cpu.py         ATen's operator for CPUs
    flash.py       flash attention, dense and packed
    efficient.py   efficient attention, dense and packed
    cudnn.py       cuDNN's attention
    projection.py  queries, keys and values of `nn.TransformerEncoderLayer`'s fast path

All compute the same by `engine.attention`. They differ in the calls that they accept and in the layouts of their
results. Dropout draws ATen's own numbers, so that a kernel's gradient may follow ATen's result and the other way round.
cuDNN's mapping of dropout is its own, so calls with it are declined.
"""

import importlib

for _backend in ("cpu", "flash", "efficient", "cudnn", "projection"):
    importlib.import_module(f"tritonite.ops.attention.{_backend}")
