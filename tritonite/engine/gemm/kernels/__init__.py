"""Kernels of matrix products.

- portable: tiles for every device, split-K, and the reduction of split-K slices
- hopper: warp-specialised tiles of fp16, bf16 and float8
- hopper_fp32: tiles of float32 as six products of bfloat16 terms (bf16x6)
- epilogue: device functions of all kernels: tile order, epilogue, store
- meta: compile-time facts, a frozen dataclass for each kernel
"""
