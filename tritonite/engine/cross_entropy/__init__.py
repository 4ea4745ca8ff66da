"""Cross entropy over rows of logits: kernels, block choice, launches, and chunks of a head's logits.

- table: block shapes for each kind of device, and the tokens of a chunk
- arguments: run-time records and compile-time facts of the kernels
- kernels: device functions and kernels of losses and gradients
- launch: block choice and launches
- head: logits of a linear head, a chunk of tokens at a time
"""
