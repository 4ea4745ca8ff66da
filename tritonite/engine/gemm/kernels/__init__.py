"""Kernels of matrix products.

- pointers: products of any layout: tiles, short K, few rows, strided columns
- symmetric: products of a matrix with its transpose, by tiles of the lower triangle
- persistent: products by tensor descriptors, of batches and of groups of rows
- hopper: warp-specialised tiles of fp16, bf16 and float8
- hopper_fp32: tiles of float32 as six products of bfloat16 terms (bf16x6)
- results: the reduction of split-K slices, and the epilogue of products without terms
- copies: operands copied to aligned rows
- epilogue: device functions of all kernels: tile order, alignment, epilogue, store
- arguments: run-time arguments whose fields kernels read by name
- meta: compile-time facts, a frozen dataclass for each kernel
"""
