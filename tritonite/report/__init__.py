"""Reports for users: which kernel serves a call, or why ATen does.

- `explain.py`: describe a call before it runs: its kernels, or the reason to decline it.
- `report.py`: run a function and count its operators' calls in Triton kernels and in ATen.
- `audit/`: samples of a program's own calls, checked while it runs.
- `judge.py`, `tolerances.py`: the comparison of results, which tests share.
- `doctor/`: checks of the machine and the environment, with advice.
- `environment.py`: the environment variables that Tritonite reads.
- `stats.py`: the counts of calls served and declined, as a table.
"""
