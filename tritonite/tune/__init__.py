"""Tables of tiles for each kind of device, what tuning found on this one, and the tuner."""
