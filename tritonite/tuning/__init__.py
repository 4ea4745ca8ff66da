"""Tools that time tiles of products and convolutions on this machine's GPU.

- `session.py`: fit a device's tables of products within a number of seconds (`tritonite tune`).
- `sweep.py`: draw products, time them with sampled tiles, and fit the cost model of one table to the times.
- `tuner.py`: find the fastest tiles of single products and store them (`tritonite tune --products`).
- `convolution.py`: time tiles of convolutions of models (`tritonite tune --convolutions`).
- `convolution_fit.py`: fit the table of convolutions to these times.
"""
