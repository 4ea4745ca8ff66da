"""An operator of your own: you write what happens to one element, and call it with tensors of any shape."""

# First: without a GPU it sets up Triton's interpreter before triton is imported.
import tritonite  # noqa: I001

import torch
import triton.language as tl


# Two outputs. The function is written in Triton's language, for numbers.
@tritonite.pointwise_dynamic(num_outputs=2)
def polar(x, y):
    length = tl.sqrt(x * x + y * y)
    return length, x / length


# The second parameter is a Python number. The first output has the tensor's dtype, the second is bool.
@tritonite.pointwise_dynamic(is_tensor=[True, False], promotion_methods=[(0, "DEFAULT"), (0, "ALWAYS_BOOL")])
def clip(x, limit):
    return tl.minimum(x, limit), x > limit


# Shapes broadcast as in torch.add: (8, 1) and (5,) make (8, 5). Strides may be any.
x, y = torch.randn(8, 1, device=tritonite.device), torch.randn(10, device=tritonite.device)[::2]
length, cosine = polar(x, y)
torch.testing.assert_close(length, torch.hypot(*torch.broadcast_tensors(x, y)))
print(tuple(length.shape), length.dtype)

# Half precision: elements are computed in float32 and rounded once, at the end.
half, _ = polar(x.half(), y.half())
torch.testing.assert_close(half, torch.hypot(x.half().float(), y.half().float()).half())
print(tuple(half.shape), half.dtype)

# A number may stand for a tensor, and results may be written to tensors that are there already.
out = torch.empty_like(x)
polar(x, 1.0, out0=out)

clipped, changed = clip(x, 0.5)
torch.testing.assert_close(clipped, x.clamp(max=0.5))
print(int(changed.sum()), "elements clipped")
