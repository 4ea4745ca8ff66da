"""Kernels of matrix products.

- portable: tiles for every device, split-K, and the reduction of split-K slices
- hopper: warp-specialised tiles of fp16 and bf16
- hopper_fp32: warp-specialised tiles of float32 as bf16x3 and bf16x6
- epilogue: what is applied to a tile before it is stored
"""
