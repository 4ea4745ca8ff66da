"""What formulas are written with, beside triton.language: `libdevice` and `math`.

`libdevice` is Triton's own module when kernels are compiled and its NumPy twin in the interpreter, which has none.
"""

from triton import knobs

if knobs.runtime.interpret:
    from tritonite.language import interpreted as libdevice
else:
    from triton.language.extra import libdevice

__all__ = ["libdevice"]
