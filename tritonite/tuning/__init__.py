"""Tools that time tiles of products and convolutions on this machine's GPU.

- `sweep.py`: time drawn products and fit the cost model's table of a device (`tritonite tune --model`).
- `tuner.py`: find the fastest tiles of single products and store them (`tritonite tune`).
- `convolution.py`: time tiles of convolutions of models (`tritonite tune --convolutions`).
- `convolution_fit.py`: fit the table of convolutions to these times.
"""
