"""Attention in Gluon for Hopper's wgmma and TMA (sm_90); a line a file:

forward.py         warp-specialised forward kernel for 16-bit floats: a producer warp, one to three consumer groups
backward.py        launches of the warp-specialised backward kernels
backward_dq.py     dq: programs have queries, keys come through a ring
backward_dkdv.py   dk and dv: programs have keys, queries come through a ring
descriptors.py     which calls TMA can serve; descriptors, biases, waiting
tiles.py           device functions of the backward kernels
fp32_forward.py    float32 by bf16x6 products: forward
fp32_backward.py   float32: dq, dk and dv
fp32_tiles.py      which float32 calls are served; loads and stores
"""
