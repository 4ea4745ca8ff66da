"""Matrix products: operands -> tiles -> launch -> epilogue.

- product: `product()`: orientation, padding, descriptors, choice of tiles, launches
- problem: what a choice of tiles may depend on
- select: candidates, what the device can run, the cheapest
- cost, cost_pointers: the estimated time of a tile
- table: a device's tiles and fitted costs; models: tables of devices, as JSON
- store: tiles that `tritonite tune` measured on this machine
- kernels: the kernels
"""
