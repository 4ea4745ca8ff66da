"""Device functions that formulas and kernels share, in addition to triton.language.

- `libdevice`: Triton's module, or in the interpreter `interpreted`, which has its functions in NumPy.
- `interpolation.py`: source coordinates, neighbours and weights of resampling.
- `math.py`: division, roots, powers and polynomials, correctly rounded or without branches.
- `approximate.py`: NVIDIA's fast approximations of float32 functions.
- `grid.py`: positions of grid sampling, and their derivatives.
- `indices.py`: quotients, offsets of strided layouts, loads at computed indices.
- `reduce.py`: block reductions over states of several values, in a fixed order where asked.
- `bf16x6.py`: float32 products from bfloat16 terms.
- `shared.py`, `atomic.py`, `registers.py`, `order.py`: shared memory, atomics, register packing, dependent launch.
- `random.py`, `rejection.py`: Philox and the distributions of cuRAND and ATen.
- `interpreted.py`, `interned.py`, `shortcuts.py`, `launches.py`: what Triton's interpreter lacks, types that it makes
  once, its operators on operands of one dtype, and launches whose facts of a kernel are found once.
- `source.py`: facts about a function from its Python source, before it is compiled.
"""

from triton import knobs

if knobs.runtime.interpret:
    from tritonite.language import interpreted as libdevice
else:
    from triton.language.extra import libdevice

__all__ = ["libdevice"]
