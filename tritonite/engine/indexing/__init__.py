"""Gather and scatter by index tensors, embedding bags, stream compaction.

- indices: index tensors, and the collapsed space of the elements that are copied
- read: gather: index_select, gather, take, index, embedding
- write: scatter, with or without a reduction by atomics
- segments: scatter-add in a fixed order, by sorting rows by target
- bags: embedding bags and their gradients
- renorm: rows of a table scaled to a maximum norm
- compact: nonzero elements: their indices, ranks and copies
- repeat: repeat_interleave
- table: blocks for each kind of device

A call of `index_put` (`ops/scatter.py`):

1. `ops/indexing.py`, `Indexed`: the shape of the selected elements, the tensor's strides over it, and an `Index` for
   each index tensor.
2. `write_at` makes an `IndexedSpace`: the shape collapsed with the strides of values, target and indices. The fastest
   dimension makes columns. If no index depends on the column, a kernel loads an index once a row.
3. `IndexedSpace.meta` chooses a block, and `_write_at` runs: `element_offsets` loads and checks indices, and the kernel
   stores values, or combines them by the device's atomic addition or by compare and swap.
4. With `accumulate`, sums have a fixed order: `add_rows_at` sorts rows by target (`_sort_blocks`, `_merge_runs`), adds
   up chunks (`_add_rows`), and then the sums that cross chunks (`_add_partial_sums`).
"""
