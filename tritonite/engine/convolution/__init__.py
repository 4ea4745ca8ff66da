"""Convolutions.

depthwise.py            depthwise convolutions and their gradients: choice of tiles, launches
depthwise_taps.py       what their kernels share: facts, coordinates of taps, loads
depthwise_forward.py    convolution, and its gradient by the input
depthwise_backward.py   gradient by the filters
"""
