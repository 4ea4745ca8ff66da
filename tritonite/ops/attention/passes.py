"""The kernels that serve a forward or backward pass, and the calls in which ATen's are faster."""

from tritonite import devices
from tritonite.engine.attention import table, wide
from tritonite.engine.attention.backward import attention_backward
from tritonite.engine.attention.decode import decode, decodes
from tritonite.engine.attention.forward import attention
from tritonite.engine.attention.hopper import backward as hopper_backward
from tritonite.engine.attention.hopper import forward as hopper
from tritonite.errors import Decline
from tritonite.runtime.contract import decline_if_slower


def _decline_if_slower(problem, backend, *done_by):
    """Decline if a backend of ATen's is faster in one of these passes and the settings leave such calls to ATen."""
    query, biased = problem.query, problem.bias is not None
    itemsize, head = query.dtype.itemsize, max(query.shape[3], problem.value.shape[3])
    measured = devices.has_wgmma(query.device)
    unmeasured = devices.current.aten_measured and not measured
    if problem.dropout is None:
        heads, multiprocessors = problem.batch * query.shape[1], devices.multiprocessors(query.device)
        few = table.are_few(problem.queries, heads, multiprocessors)
        given = itemsize, head, biased, problem.keys, few, table.are_short(problem.queries, problem.keys)
        slower = any([table.aten_is_faster(backend, each, *given) for each in done_by])
    else:
        # With dropout only FlashAttention's gradients are faster than these kernels'.
        slower = backend == "flash" and "backward" in done_by
    decline_if_slower(unmeasured or (measured and slower))


def _decline_wide_if_slower(problem):
    """Decline heads wider than a tile where ATen may be faster: few scores or masked ones, which are not measured."""
    measured = devices.has_wgmma(problem.query.device) and not problem.causal and problem.bias is None
    scores = problem.batch * problem.queries * problem.keys
    decline_if_slower(devices.current.aten_measured and not (measured and scores >= table.WIDE_FASTER))


def run_forward(problem, backend, out, logsumexp, empty_rows):
    """Write out and logsumexp, and return the seed and the offset that dropout drew, or None.

    A kernel that leaves logsumexp is to serve the gradient as well, unless there is dropout.
    """
    if problem.size > table.LARGEST_HEAD:
        _decline_wide_if_slower(problem)
        wide.attention(problem, out, logsumexp, empty_rows)
        return None
    gradient = ()
    if logsumexp is not None and problem.dropout is None:
        gradient = (_backward_kernels(problem, out, problem[:3]),)
    if decodes(problem, logsumexp):
        _decline_if_slower(problem, backend, "decoding", *gradient)
        decode(problem, out, logsumexp, empty_rows)
        return None
    _decline_if_slower(problem, backend, "warp specialised" if hopper.serves(problem, out) else "forward", *gradient)
    return attention(problem, out, logsumexp, empty_rows)


def _backward_kernels(problem, grad_out, grads, grad_bias=None):
    """Return the kernels that serve a backward pass, as `table.aten_is_faster` names them."""
    if grad_bias is not None:
        return "backward of a bias"
    return "warp specialised backward" if hopper_backward.serves(problem, grad_out, grads) else "backward"


def run_backward(problem, backend, grad_out, out, logsumexp, grads, grad_bias=None):
    """Write and return the gradients of query, key and value, and write that of the bias unless it is None."""
    grad_out = grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()
    if problem.size > table.LARGEST_HEAD:
        if grad_bias is not None:
            raise Decline(f"the gradient of a bias of heads of more than {table.LARGEST_HEAD} elements")
        _decline_wide_if_slower(problem)
        wide.attention_backward(problem, grad_out, out, logsumexp, grads)
        return grads
    _decline_if_slower(problem, backend, _backward_kernels(problem, grad_out, grads, grad_bias))
    attention_backward(problem, grad_out, out, logsumexp, grads, grad_bias)
    return grads
