"""Convolutions.

depthwise.py            depthwise convolutions and their gradients: choice of tiles, launches
depthwise_taps.py       facts, coordinates of taps and loads of their kernels
depthwise_forward.py    convolution, and its gradient by the input
depthwise_backward.py   gradient by the filters
"""
