"""How kernels are fed: TensorIterator's algorithm, and an engine for each kind of operator."""
