"""From PyTorch's dispatcher to a host function.

- override: `enable`, `disable` and `use_gems`, which register overloads with torch and switch them on and off
- python: the kernel of an overload without the native dispatcher, and the function that dispatcher calls for a plan
- direct: calls of `tritonite.ops` that bypass PyTorch's dispatcher
- sampling: samples of calls, on both paths, for an audit
- library: operators outside ATen, with schema, fake function, gradient and vmap rule
"""
