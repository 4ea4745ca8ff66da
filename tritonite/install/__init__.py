"""Overloads put into torch and taken out again.

- override: `enable`, `disable` and `use_gems`
- python: the kernel of an overload where the native dispatcher does not run
- direct: calls of `tritonite.ops`, which go through no dispatcher
- library: operators outside ATen, with schema, fake function and autograd
"""
