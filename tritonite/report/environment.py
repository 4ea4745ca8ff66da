"""The environment variables that Tritonite reads, or that change what it does."""

from __future__ import annotations

ENVIRONMENT = {
    "TRITON_INTERPRET": "1 runs kernels in Triton's interpreter, 0 forbids that; Tritonite sets 1 if there is no GPU",
    "TRITON_CACHE_DIR": "folder of Triton's compiled kernels",
    "TRITONITE_CACHE": "folder of the built native dispatcher; default: tritonite in the user's cache folder",
    "TRITONITE_TUNE": "file of tuned tiles; default: tritonite/tune.sqlite in the user's cache folder",
    "TRITONITE_TABLES": "file of fitted tables that `tritonite tune --output` wrote, in place of this machine's own",
    "TRITONITE_NATIVE": "0 sends calls through Python, 1 through the native dispatcher (default on NVIDIA GPUs)",
    "TRITONITE_NATIVE_FLAGS": "further compiler flags for the native dispatcher",
    "TRITONITE_FUZZ_LOG": "file for the output of the processes of `tritonite verify --fuzz`",
    "TRITONITE_QUIET": "1 suppresses messages on standard error about waiting, compiling and interpreting",
    "CXX": "C++ compiler of the native dispatcher",
    "TRITONITE_TEST_FULL": "1 makes the test suite run every sample and dtype",
}
