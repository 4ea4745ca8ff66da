"""Sorting rows, selecting from them by rank, and unique elements.

- keys: elements as integer keys in their order; the layout of rows
- table: limits between the ways to sort, for each kind of device
- block: short rows, sorted in registers by a network
- radix: longer rows, sorted by 8-bit digits, by one program or by several; `sort_along` chooses
- lookback: counts of earlier blocks within one launch: tickets, published counts
- thread_tiles: which thread holds which element of a block
- topk: the k smallest of a row, by a bound from the minima of groups
- digit_search: the key of a rank in long rows, by radix select
- select: the element of a rank
- large_topk: top-k with large k
- runs: runs of equal neighbours in sorted vectors
- dense: unique integers of a narrow range, by a bitmap
- lexicographic: the order of the rows of a matrix

A call of `sort` (`ops/sorting.py`):

1. `Keys.of` describes the dtype's order. Kernels read bits as integers, so that one kernel serves dtypes of a width.
2. `radix.sort_along` asks `radix.route`. Rows up to `SortingTable.network` elements go to `block.sort_rows`, which
   packs key and index into one int64.
3. Rows up to 32 KiB go to `radix.sort_held_rows`: a program ranks its elements by a digit with counters in shared
   memory, permutes them through shared memory, and repeats that for each digit.
4. Longer rows go to `radix.sort_long_rows`. `_count_digits` counts all digits. `_plan_passes` finds the passes that
   have to move elements. Then `_sort_by_digit` runs for each digit: a program takes a ticket, ranks its block,
   publishes its counts, gets those of earlier blocks, and scatters its elements.
"""
