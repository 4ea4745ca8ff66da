"""The ground of every engine: what a call may do, how it is recorded and replayed, and how a kernel is launched.

- contract: what a host function may do: allocate, read sizes, draw random numbers, decline
- symbols: numbers that a plan does not hold
- recorder: notes what a host function does and makes a plan of the notes
- watch: the dispatch mode in which a recorder sees calls of ATen
- plan: a recorded call as data
- hollow: tensors without memory, for recordings that run nothing
- native: the same replay as a C++ kernel of PyTorch's dispatcher
- opaque: functions that torch.compile does not trace
- libentry: `libentry`, a cache of compiled kernels around any Triton kernel
- launch: kernel specialisation, and launches of kernels whose arguments an engine lays out itself
- interpreter: Triton's interpreter with the results of a GPU
- stats: counters of calls served and declined
- progress: a line on the terminal when a wait is long
- cache: the folder of files kept between processes, and warnings given once
- locks: the process's locks, which a fork takes and gives back
"""
