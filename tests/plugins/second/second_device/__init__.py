"""A second device in Python, with narrow memory and wide warps, at PyTorch's dispatch key PrivateUse1.

- memory.py: the allocator, and CPU tensors over a device's memory
- runtime.py: the module `torch.second`: devices, streams, events, the generator
- kernels.py: the ATen kernels that every device needs, and the CPU's for all others
- device.py: the record that Tritonite asks for
- overrides.py: the vendor's own host function of an operator
"""

NAME = "second"


def register() -> None:
    """Make "second" a device of PyTorch."""
    from torch.utils import backend_registration

    from second_device import kernels, runtime

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=runtime.MODULE)
    kernels.register()
