"""Sorting rows, selecting of them, and searching in what is sorted.

`keys.py` makes integers of elements in their order, `block.py` sorts rows that a program holds, `radix.py` longer ones,
`select.py` finds elements by their rank, `search.py` places in what is sorted, `runs.py` what is next to its equals,
`lexicographic.py` orders whole slices.
"""
