"""Matrix products: operands -> tiles -> launch -> epilogue.

- product: `product` and `grouped_product`: orient, pad, select, launch
- symmetric: `symmetric_product`, X X^T by tiles of one triangle: select, launch
- problem: `Problem`, what a choice of tiles may depend on
- work: `Work`, what a launch computes: operands, `Epilogue` and `Sums`
- operands: orientation, alignment, padded copies, TMA descriptors
- select: the tile: stored, the cheapest possible candidate, or by rule
- cost, cost_pointers: the estimated time of a tile
- fitted: the tables of a device, by model, from this machine or from a file; estimated: tables from data sheets
- table: `Config`, a tile; tiles for devices without fitted costs; `GemmLimits`. models/: fitted tables, as JSON
- store: tiles that `tritonite tune --products` measured on this machine
- launch: a launch for each kernel
- kernels/: by how operands are loaded and sums added: pointers, symmetric, persistent, hopper (fp16, bf16, float8),
  hopper_fp32 (float32 as bf16x6); copies and results, the kernels before and after; arguments, meta and epilogue,
  shared by all

A call of `mm`:

1. `ops/matmul.py` views operands as (batches, rows, columns), a vector as one column, allocates the result and calls
   `product`.
2. A product without terms (K = 0, no batches, alpha = 0) is its epilogue: `write_epilogue` reads no operand.
3. Orient: `operands.is_transposed` computes the transpose where N is small or the result is column-major.
4. Pad: `operands.worth_copying` copies misaligned operands if copies and product together take less time.
5. Select: `select.choose` returns a `Config` for the `Problem`, and `select.fitting` its stages.
6. Launch: `launch.run` slices K (split-K), and `launch._launcher` chooses the kernel by the tile. Through TMA that is
   `multiply_warp_specialized` or `multiply_persistent`, and for float32 on sm_90 `multiply_bf16x6`. Through pointers it
   is `multiply_tiles`, `multiply_strided_columns`, `multiply_few_rows` or `multiply_short_k`.
7. Every kernel ends with `epilogue` on a tile in registers; with split-K, `reduce_split_k` adds the slices and does so.
"""
