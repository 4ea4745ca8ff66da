"""Factorisations of batches of small and medium matrices, and solves with their factors.

A program holds a tile of whole matrices in registers, (matrices, rows, columns), padded to powers of two, and
eliminates one column after the other. Triton has no indexing by lane, so a column or a row is a masked sum of the tile
(`tile.column_of`, `tile.row_of`), which also puts it into the layout in which the rank-1 update needs it. Rows are
never swapped: a pivoted factorisation keeps the position of each row, and stores rows at their positions.

- `cholesky.py`, `lu.py`, `ldl.py` and `qr.py` factor a tile; `lu.py` also has permutations and determinants, `ldl.py`
  the solve by its factors.
- `eigen.py` and `singular.py` rotate pairs of columns until a tile is diagonal or its columns are orthogonal;
  `jacobi.py` has what both need.
- `substitution.py` solves triangular systems. A program holds a block of right-hand sides and reads one column of the
  factor at a time, so that a solve by LU or by Cholesky is one launch.
- `reflectors.py` applies Householder reflectors to a block of columns in the same way, and computes T of their compact
  WY form.
- `operands.py` describes strided batches, `table.py` chooses tiles, and `launch.py` has a function for each launch.
- `blocked.py` divides larger matrices into blocks: Cholesky, LU, and solves with triangles and with factors.
  `compact_wy.py` does the same for QR and products with reflectors. `triangles.py` copies triangles of any size.
- `ldl_in_memory.py` factors larger symmetric matrices that need not be definite, a program a matrix, in device memory.
- `block_jacobi.py` rotates pairs of blocks of columns of larger matrices, for eigenvalues and singular values, by the
  kernels of `block_pairs.py`.

A transposed problem, such as an upper Cholesky factor or X A = B, is the same kernel with rows' and columns' strides
swapped. Matrices larger than the largest tile of the table are divided into blocks, which no measurement favours yet:
ATen serves them unless `faster_only` is off. A panel of LU or QR has all rows of a matrix, so that more rows than
`table.panel_columns` allows decline. A tall matrix has the singular values of its R.
"""
