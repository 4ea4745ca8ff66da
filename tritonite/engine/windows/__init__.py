"""Windows over images and volumes: their arithmetic on the host, and as device functions of pointwise formulas.

A window is a range of positions along each of one to three dimensions. Pooling reduces the elements of a window; the
gradient of pooling gathers, for each element, from the range of windows that cover the element. Both are pointwise
formulas with coordinates and gathered operands, so one kernel serves every layout.

- `geometry.py`: `Windows`, the sizes, strides and padding of a call, strided or adaptive, with ATen's checks
- `bounds.py`: the first and last position of a window, and the first and last window over a position
- `taps.py`: a loop's counter as coordinates, and row-major indices

An average over an adaptive window, step by step: `adaptive` computes the longest window of each dimension.
A formula of `ops/pooling` gets the coordinates of an output, asks `positions_of` for the range of the window, and adds
up as many elements as the longest window has. Elements outside the own window are masked.
"""
