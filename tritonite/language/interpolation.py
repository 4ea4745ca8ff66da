"""Interpolation along one dimension: source coordinates as ATen computes them, and the elements and weights they give.

Functions named `*_taps` return the indices of the elements that an output element is made of, and their weights. They
take the input's size per output element (`scale`), the output's index and the input's size.
"""

import triton
import triton.language as tl

# The cubic kernel's parameter in OpenCV, and in Pillow, which ATen's antialiased resampling follows.
CUBIC = tl.constexpr(-0.75)
CUBIC_ANTIALIASED = tl.constexpr(-0.5)


@triton.jit
def nearest_index(scale, index, size, EXACT: tl.constexpr):
    """Return the source index of nearest interpolation; EXACT takes the output element's centre, not its corner."""
    position = index.to(tl.float32)
    if EXACT:
        position += 0.5
    return tl.minimum(tl.floor(position * scale.to(tl.float32)).to(index.dtype), size - 1)


@triton.jit
def source_coordinate(scale, index, CORNERS: tl.constexpr):
    """Return the source coordinate of an output index. CORNERS aligns centres of the corner elements, not corners."""
    if CORNERS:
        coordinate = scale * index.to(scale.dtype)
    else:
        coordinate = scale * (index.to(scale.dtype) + 0.5) - 0.5
    return coordinate


@triton.jit
def linear_taps(scale, index, size, CORNERS: tl.constexpr):
    """Return the two neighbours of the source coordinate, and their weights."""
    coordinate = tl.maximum(source_coordinate(scale, index, CORNERS), 0.0)
    below = tl.minimum(tl.floor(coordinate).to(index.dtype), size - 1)
    weight = tl.minimum(tl.maximum(coordinate - below.to(coordinate.dtype), 0.0), 1.0)
    return (below, tl.minimum(below + 1, size - 1)), (1.0 - weight, weight)


@triton.jit
def cubic_near(x, a):
    """Return the weight of an element at distance x from 0 to 1 (Keys 1981), by factors of which none cancels."""
    return (1.0 - x) * (1.0 + x - x * x * (a + 2.0))


@triton.jit
def cubic_far(x, a):
    """Return the weight of an element at distance 1 + x from 1 to 2 (Keys 1981): a x (1 - x)^2, and 0 for -0."""
    return x * a * (1.0 - x) * (1.0 - x) + 0.0


@triton.jit
def cubic_weights(x):
    """Return the weights of four neighbours, for the fraction x of the source coordinate."""
    a: tl.constexpr = CUBIC
    return cubic_far(x, a), cubic_near(x, a), cubic_near(1.0 - x, a), cubic_far(1.0 - x, a)


@triton.jit
def cubic_taps(scale, index, size, CORNERS: tl.constexpr):
    """Return the four neighbours of the source coordinate, repeated beyond the border, and their weights."""
    coordinate = source_coordinate(scale, index, CORNERS)
    below = tl.floor(coordinate)
    first = below.to(index.dtype) - 1
    indices = ()
    for k in tl.static_range(4):
        indices = indices + (tl.minimum(tl.maximum(first + k, 0), size - 1),)
    return indices, cubic_weights(coordinate - below)


@triton.jit
def triangle(x):
    """Return the weight of an element at distance x, of linear interpolation."""
    return tl.maximum(1.0 - tl.abs(x), 0.0)


@triton.jit
def smooth_cubic(x):
    """Return the weight of an element at distance x, of cubic interpolation with Pillow's parameter."""
    a: tl.constexpr = CUBIC_ANTIALIASED
    x = tl.abs(x)
    return tl.where(x < 1.0, cubic_near(x, a), tl.where(x < 2.0, cubic_far(x - 1.0, a), 0.0))


@triton.jit
def antialiased_span(scale, support, index, size):
    """Return the first element under the filter of an output element, one past the last, and the filter's centre."""
    centre = scale * (index.to(scale.dtype) + 0.5)
    first = tl.maximum((centre - support + 0.5).to(index.dtype), 0)
    return first, tl.minimum((centre + support + 0.5).to(index.dtype), size), centre


@triton.jit
def antialiased_weight(scale, element, centre, filter: tl.constexpr):
    """Return the weight of an element under a filter that widens with the scale, before normalisation."""
    distance = element.to(scale.dtype) - centre + 0.5
    return filter(distance * (1.0 / tl.maximum(scale, 1.0)))
