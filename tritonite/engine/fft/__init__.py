"""Fast Fourier transforms along one dimension, of lengths without a prime factor above 7.

`launch.transform` serves one dimension. `plan.py` factors the length into radices, and a length beyond one program into
two shorter ones (the four-step method, Bailey 1990). `kernels.py` is Stockham's self-sorting algorithm (Cochran et al.
1967): a program holds whole transforms in registers, and `butterfly.py` has the transforms of a radix. `strides.py`
gives the layout of ATen's results.

Lengths with a larger prime factor decline. Bluestein's algorithm would make two transforms of at least twice the length
and three passes over memory of one, where cuFFT has its own butterflies for primes up to 127, and the same algorithm in
fewer launches for others.

The roots of unity come from a table in device memory, which a kernel computes in float64. A recorded call keeps the
table of a short transform, and computes that of a long one anew.
"""
