"""Tools that measure tiles on this machine: the sweep behind a device's table, and the tuner of single products."""
