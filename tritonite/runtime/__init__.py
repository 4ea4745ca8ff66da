"""The ground of every engine: what a call may do, how it is recorded and replayed, and how a kernel is launched.

- contract: the arguments of host functions as slots, allocation, views and ATen calls that a plan can repeat
- hollow: tensors without storage, with which host functions run when nothing may be computed
- plan: a recorded call as steps, and its replay in Python
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
