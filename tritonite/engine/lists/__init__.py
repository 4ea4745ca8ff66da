"""Operators over lists of tensors: one launch for all tensors of a list.

- `elementwise.py`: a formula over lists; groups tensors by dtypes and alignment. Its host function is `apply`.
- `table.py`: `Table`, addresses, sizes and numbers of a list in device memory, and the kernel that writes them there.
- `kernels.py`: `elementwise_list`, which serves all formulas, and how a program finds its tensor.
- `reduce.py`, `reduce_kernels.py`: reductions of each tensor of a list, and of all tensors together. Programs write
  partial states, which a second launch combines in order. Also products with a factor in memory that look for inf.
- `pairs.py`: copies of pairs of tensors with layouts of their own, for `cat` and `split`.

A call of `_foreach_add_(xs, ys, alpha=2)`:

1. `apply` takes the formula of `add`, and checks that each x and y are dense and have the same shape and strides. Where
   they are not, or have no partner of their dtypes, the pair is computed by a call of `add` of its own.
2. The remaining pairs are grouped by their dtypes and by whether their addresses are multiples of 16 bytes. `types_of`
   of the pointwise engine decides the dtypes of a group.
3. `Table.write` gives each tensor a number of programs, and launches `write_table`, whose arguments are the addresses
   of the group's tensors, their sizes, and the programs where those of each tensor end.
4. `elementwise_list` is launched for the group. A program finds its tensor by a binary search in the table, and
   evaluates the formula on several blocks of it.
5. The plan of the call has these launches. A replay passes the addresses of its own tensors to `write_table`.
"""
