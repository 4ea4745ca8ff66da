"""A device in Python over the CPU's memory, at PyTorch's dispatch key PrivateUse1.

- device.py: the record that Tritonite asks for
- overrides.py: the vendor's own host function of an operator
"""


def register() -> None:
    """Make "soft" a device of PyTorch."""
    import python_backend

    python_backend.register("soft")
