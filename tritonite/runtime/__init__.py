"""The ground of every engine: what a host function may do, how a call is recorded, and how a kernel is launched.

In the order in which a call meets them:

- native: the C++ dispatcher, which replays the plan of a call
- recorder: notes what a host function does, and makes a plan of the notes
- watch: the dispatch mode in which a recorder sees calls of ATen
- plan: a recorded call as data
- contract: what a host function may do, such as allocate, read sizes, draw random numbers or decline
- symbols: numbers that a plan does not hold
- hollow: tensors without memory, for recordings that run nothing
- libentry: `libentry`, a cache of compiled kernels around any Triton kernel
- nested: kernel arguments in tuples and NamedTuples
- launch: kernel specialisations, and launches whose arguments an engine lays out itself
- compilation: where kernels are compiled, `on_compile`, and the log of compiled kernels
- artifact: files of compiled kernels
- interpreter: Triton's interpreter, changed to compute what a GPU computes
- stats: counters of calls served and declined
- progress: a line on standard error when a wait is long
- cache: the folder of files kept between processes, and warnings given once
- locks: locks that a fork takes and releases
- opaque: functions that torch.compile does not trace

A call of an overridden operator enters `native/dispatcher.cpp`, which looks up a plan by the call's key. With a plan it
replays the steps in C++. Without one `install/python.py` runs the host function under a `Recorder`. The host function
allocates through `contract` and launches through `Launch` or `LibEntry`, which run the kernel and add a step to the
recorder. `Recorder.plan` returns the plan, and the dispatcher keeps it under the key.
"""
