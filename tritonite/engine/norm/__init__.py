"""Norms of x, or of a sum x + residual, over rows: layer norm and root mean square norm, forward and backward.

- `launch.py`: the host functions: outputs, statistics, block choice, launches. `forward` and `backward` serve training,
  `forward_in_place` and `forward_quantized` inference.
- `blocks.py`: how rows are cut, for registers (`choose_blocks`) or for a ring in shared memory (`choose_ring`).
- `table.py`: the ring's parameters for each kind of device.
- `meta.py`: the compile-time parameters of the kernels.
- `kernels.py`: `norm_forward`, `norm_backward` and `add_partials`.
- `ring.py`: `norm_backward_by_ring`, in Gluon.

A call of `backward`:

1. `launch.backward` makes matrices of all tensors, and `choose_blocks` cuts rows into chunks of columns.
2. If registers hold a row, `norm_backward` reads it once. A program is persistent: it takes row after row, and the
   loads of the next rows are in flight while it computes.
3. Longer rows stream through a ring in shared memory where there is room (`choose_ring`). Else a reduction of the row
   engine computes their means first, and several programs take slices of a row.
4. The sums over rows for the gradients by weight and bias stay in a program's registers until its last row.
5. `add_partials` adds up the sums of all programs, in their order, so bits are the same every time.
"""
