"""Random numbers, permutations and dropout, equal to ATen's on CUDA for a seed and offset of the generator.

transforms.py     distributions, as ATen's transforms of samples
draws.py          drawing into a tensor
distributions.py  numbers of a distribution, in place or like another tensor
fresh.py          fresh tensors of random numbers, permutations
dropout.py        dropout
rrelu.py          the randomised leaky ReLU
"""

import importlib

for _kind in ("distributions", "fresh", "dropout", "rrelu"):
    importlib.import_module(f"tritonite.ops.random.{_kind}")
