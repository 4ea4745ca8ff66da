"""Comparison of fused operators, and of their gradients, with compositions of torch's operators in float64."""

import torch

import tritonite
from tritonite.testing.tolerances import RTOL


def normal(*shape, dtype=torch.float32, grad=False):
    return torch.randn(shape, device=tritonite.device).to(dtype).requires_grad_(grad)


def as_tuple(results):
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def close(actual, exact, terms=1, resolution=None):
    """Assert that values are within the dtype's resolution, and zeros within that of a sum of `terms` values near 1."""
    resolution = resolution or RTOL[actual.dtype]
    assert actual.shape == exact.shape
    torch.testing.assert_close(actual.double(), exact, rtol=resolution, atol=resolution * terms**0.5)


def check_library_operator(packet, args):
    """Check an operator's schema, fake and autograd registrations with a call, and that `explain` launches a kernel."""
    torch.library.opcheck(packet, args)
    assert "launch  " in tritonite.explain(packet._qualified_op_name, *args)


def agree(ours, theirs, operands, used=None, terms=1, grad_terms=1):
    """Compare the results of `ours`, and their gradients by all operands, with those of `theirs`.

    Gradients pass through the results in `used`, or through all. The resolution is that of the narrowest operand.
    """
    resolution = max(RTOL[each.dtype] for each in operands if each is not None)
    wide = [each if each is None else each.detach().double().requires_grad_(each.requires_grad) for each in operands]
    actual, exact = as_tuple(ours(*operands)), as_tuple(theirs(*wide))
    pairs = [pair for pair in zip(actual, exact, strict=True) if pair[0] is not None]
    for own, reference in pairs:
        assert own.is_contiguous()
        close(own.detach(), reference.detach(), terms, resolution)
    chosen = [pair for i, pair in enumerate(pairs) if used is None or i in used]
    grads = [torch.randn_like(own) for own, _ in chosen]
    variables = [(own, reference) for own, reference in zip(operands, wide, strict=True) if own is not None]
    variables = [pair for pair in variables if pair[0].requires_grad]
    found = torch.autograd.grad([own for own, _ in chosen], [own for own, _ in variables], grads, allow_unused=True)
    wanted = torch.autograd.grad(
        [each for _, each in chosen],
        [each for _, each in variables],
        [grad.double() for grad in grads],
        allow_unused=True,
    )
    for own, reference in zip(found, wanted, strict=True):
        assert (own is None) == (reference is None)
        if own is not None:
            close(own, reference, grad_terms, resolution)
