"""Reductions and row operators (softmax, norms) along any dimensions of operands of any layout.

- `declare.py`: `Reduction` and `RowTransform`, their `run`, and `reduced`, the host function of most reductions.
- `space.py`: `RowSpace`, the collapsed kept and reduced dimensions with every operand's strides.
- `blocks.py`: the choice of blocks, by `table.py`, the block shapes of each kind of device.
- `meta.py`: `RowsMeta`, the compile-time parameters of a kernel.
- `kernels.py`: the kernels, `reduce` and `transform_rows`.
- `load.py`, `states.py`: their device functions, some of which scans share: loads of a block, states of rows.
- `cooperative.py`: the exchange of states between programs that share a row.
- `fusion.py`: pointwise programs before and after the formulas of rows.
- `formulas.py`: device functions that operators and the norm engine share.

A call of `softmax`:

1. `_softmax` (ops/softmax.py) is a `RowTransform`: a `Reduction` to the maximum and the inverse sum of exponentials,
   and a formula of an element and those two results. Its host function allocates the output and calls `run`.
2. `RowSpace.of` collapses kept and reduced dimensions, so that any layout is read in place. An operand with stride 0
   along a group of dimensions is loaded once for a block.
3. `blocks.for_transform`: a warp has a short row; a program holds a longer one in registers; still longer ones are read
   twice. Few long rows are split or cooperative. Misaligned rows are read by aligned vectors.
4. `Reduction.meta` gathers all compile-time parameters in a `RowsMeta`.
5. `transform_rows` loads a block, or loops over blocks, and reduces them to a state per row. `project` makes the rows'
   results of the state, and `apply` the outputs.
6. Split rows take a second launch, which combines their states in a fixed order, so bits are the same every time.

Elements may reach their state by `stages`, one reduction each: the maximum, then the sum of shifted exponentials.
A column reduction with `grow` keeps a running state per lane. All lanes have seen the same count, so one division per
block suffices.
"""
