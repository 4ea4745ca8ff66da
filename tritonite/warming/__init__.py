"""Compilation before the first call: `warm` finds the kernels that calls need, and compiles them in processes.

- `warm.py`: `warm`, and the variants of a call that `shapes` asks for.
- `collect.py`: a dispatch mode that notes the kernels of a call, while ATen computes it.
- `state.py`: what such a call may not change.
- `workers.py`: processes that compile into Triton's disk cache.

The folder is `warming/`, not `warm/`: importing a package `tritonite.warm` would put the module in the place of the
function `tritonite.warm`.
"""
