"""How results are judged, on which inputs: used by the project's tests and by `tritonite verify`."""
