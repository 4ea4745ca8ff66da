"""The judge of results, samples and the fuzzer: used by the project's tests and by `tritonite verify`."""
