"""Pointwise operators over operands of any shapes, strides and dtypes, from a scalar formula.

- `declare.py`: `Pointwise`, the declaration and its host function `run`; caches an `Iteration` per kind of call.
- `promotion.py`: dtypes of a call, and the dtype in which each argument reaches the formula.
- `gathered.py`: operands that a formula reads at indices it computes.
- `overlap.py`: overlap of outputs with operands, compared on each call because it depends on addresses.
- `specialize.py`: from a collapsed iteration space to a kernel, its signature and its grid.
- `blocks.py`: tile sizes, within the limits of `table.py`.
- `layout.py`: the compile-time parameters of a kernel.
- `kernels.py`: `elementwise_flat` and `elementwise_tile`, which serve all formulas.
- `program.py`: `Program`, several formulas in one launch, each on operands and on results of earlier ones.
- `steps.py`: the formula of all programs, which evaluates the steps.

A call of `x + y.t()`:

1. `Pointwise.run` looks up the call's iteration by dtypes, shapes, strides and alignment. The rest is done once a kind.
2. `types_of` promotes the dtypes and builds an `Operand` for each parameter of the formula.
3. `engine/iteration.py` broadcasts the shapes and finds the strides that ATen gives the output.
4. `collapse` drops dimensions of size 1 and merges those that one stride serves. The result is an `IterationSpace`.
5. `choose_tile` picks a tile, here one that is read along both dimensions, or None for the flat kernel.
6. `specialize` builds a `Layout` and a signature: strides of 0 and 1 are constants, the others run-time numbers.
7. `Launch` compiles the kernel and launches it. A program loads a block of each operand, calls the formula, and stores.
"""
