"""Files of recorded graphs: `tritonite.save` and `tritonite.load`.

A file is an artifact (`runtime/artifact.py`), a zip file without code, of

- the binaries of the kernels that the graphs launch,
- `graphs.json`: the device and the versions, and for each kind of arguments its structure, its meta and its plans,
- `tensors/`: the bytes of parameters and constants that are saved by value.

Modules:

- values.py: numbers, dtypes, tuples and records of a plan as JSON
- names.py: kernels, formulas and classes of Tritonite by name
- steps.py: plans as JSON
- tensors.py: parameters and constants, by name or by value
- structure.py: arguments and results as trees
- binaries.py: kernels of a file, loaded onto the device
- files.py: `save` and `load`
- loaded.py: the function that `load` returns
"""
