"""Products of quantised matrices, and conversions to and from their formats.

- products: `float8_product` and `int4_product`: check for empty operands, choose tiles, slice K, launch
- kernels: products by tensor cores: float8 with block scales, and 16-bit floats times packed 4-bit integers
- tensor_core_words: ATen's packed 4-bit weights: their layout, their product, and their conversion
- formats: device functions: float8 decoded from bytes, 4-bit integers as 16-bit floats
- conversions: kernels and launches that quantise, pack and dequantise
- table: tiles and blocks of each kind of device
- meta: compile-time facts, a frozen dataclass for each kernel

Products whose scales vary along rows and columns alone need no kernel here: `engine.gemm` applies such scales in its
epilogue. `float8_product` goes there if the device has float8 and no scale varies along K.
"""
