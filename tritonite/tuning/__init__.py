"""Tools that time GEMM tiles on this machine's GPU.

- `sweep.py`: time drawn products and fit the cost model's table of a device (`tritonite tune --model`).
- `tuner.py`: find the fastest tiles of single products and store them (`tritonite tune`).
"""
