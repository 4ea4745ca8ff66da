"""A backend of PyTorch in Python over the CPU's memory, at the dispatch key PrivateUse1.

- memory.py: the allocator, and CPU tensors over a device's memory
- runtime.py: the module `torch.NAME`: devices, streams, events, the generator
- kernels.py: the ATen kernels that every device needs, and the CPU's for all others
"""


def register(name: str) -> None:
    """Make `name` a device type of PyTorch. A process has one at PrivateUse1."""
    from torch.utils import backend_registration

    from python_backend import kernels, runtime

    backend_registration._setup_privateuseone_for_python_backend(name, backend_module=runtime.MODULE)
    kernels.register()
