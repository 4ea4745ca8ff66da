"""Convolutions.

depthwise.py           depthwise convolutions and their gradients: choice of tiles, launches
depthwise_kernels.py   their kernels
"""
