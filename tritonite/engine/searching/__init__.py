"""Binary search of sorted sequences, and membership tests.

- search: `search`, the number of bounds before each element; `check_sorter`
- membership: `among_few`, `among_many`, `among_all`: whether each element is among others
- table: blocks for each kind of device

A call of `searchsorted` (`ops/searching.py`):

1. `search` collapses the elements to row-major order and picks a kernel. Bounds are contiguous, of the same dtype.
2. With many elements and one row of bounds, `_search_from_shared` runs on NVIDIA's devices. A program copies the bounds
   that the first rounds compare with to shared memory, in heap order, and then searches for many blocks of elements.
3. Otherwise `_search` runs: a binary search in memory for each element, in its own row of bounds or in the only one.

A call of `isin` compares every element with every test if there are at most FEW tests. Elements of 8 and 16 bits are
looked up in a table with a flag for each value, all others in a hash table of the tests.
"""
