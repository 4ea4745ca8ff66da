"""Sorting rows, selecting of them, and searching in what is sorted.

`keys.py` makes integers of elements in their order, `block.py` sorts short rows in registers, `radix.py` longer ones by
their digits, for which elements change places in shared memory (`shared.py`). `select.py` finds elements by their rank,
`search.py` places in what is sorted, `runs.py` what is next to its equals, `lexicographic.py` orders whole slices.
"""
