"""The engines: how kernels of each kind of operator get their operands, blocks and launches.

`iteration.py` broadcasts, orders and collapses dimensions as TensorIterator does, and `outputs.py` allocates or checks
outputs, for all engines. docs/design.md lists the engines and what each computes. An engine's `__init__` docstring is
its map: a line a file, and a walk of one call.
"""
