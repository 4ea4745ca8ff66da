"""Divergences between rows of two tensors of logits, and their gradients by the first one's logits.

- `launch.py`: `forward` and `backward`, the host functions.
- `table.py`: block sizes for each kind of device.
- `meta.py`: the compile-time parameters of the kernels.
- `kernels.py`: `divergence_forward` and `divergence_backward`.

The student has the probabilities q, the teacher p. A divergence is a sum of f(log q, log p) over a row. With the
derivatives d = df / d(log q), its gradient by the student's logits is d - q sum(d), divided by the temperature. So the
forward pass keeps both log-sum-exps and sum(d) of a row, and the backward pass is elementwise.
"""
