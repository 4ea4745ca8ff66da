"""A device in Python over the CPU's memory, at PyTorch's dispatch key PrivateUse1.

- memory.py: the allocator, and CPU tensors over a device's memory
- runtime.py: the module `torch.soft`: devices, streams, events, the generator
- kernels.py: the ATen kernels that every device needs, and the CPU's for all others
- device.py: the record that Tritonite asks for
- overrides.py: the vendor's own host function of an operator
"""

NAME = "soft"


def register() -> None:
    """Make "soft" a device of PyTorch."""
    from torch.utils import backend_registration

    from soft_device import kernels, runtime

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=runtime.MODULE)
    kernels.register()
