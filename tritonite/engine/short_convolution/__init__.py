"""Causal depthwise convolution with a short kernel.

meta.py      compile-time facts, table of blocks
kernels.py   convolution, its gradients, its update by one token
launch.py    host functions
"""
