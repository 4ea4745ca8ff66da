"""First steps: PyTorch's operators as Triton kernels, and a look at what ran where."""

import torch

import tritonite

# "cuda", or "cpu" without a GPU, where the kernels run in Triton's interpreter: slowly, and with the same results.
x = torch.randn(16, 64, device=tritonite.device)
expected = torch.nn.functional.gelu(x).softmax(dim=1)

# For the length of a block. Operators that have a Triton kernel run it; all others run as they always do.
with tritonite.use_gems():
    y = torch.nn.functional.gelu(x).softmax(dim=1)
torch.testing.assert_close(y, expected)

# For the process, until disable(). include= and exclude= take operators, overloads and patterns.
tritonite.enable(include=["add", "exp", "bitwise_*"])
x.exp() + 1
x.sin()  # not included: PyTorch's own kernel
x.to(torch.complex64) + 1  # included, but no kernel takes complex numbers: PyTorch's own again
tritonite.disable()

# What became of the calls of every overload. PyTorch served those that were declined, for the reasons given.
print(tritonite.stats())

# What would become of one call: its kernel and constants, or the reason why PyTorch serves it.
print(tritonite.explain("gelu", x))
