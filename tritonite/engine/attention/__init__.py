"""Flash attention, forward and backward, and decoding; a line a file, called first to called last:

    problem.py      Problem: a call's operands; AttentionMeta: the compile-time facts of a kernel
    table.py        tiles for each kind of device; where ATen's kernels are faster
    forward.py      attention(): chooses a forward kernel; `attend`, for all devices
    backward.py     attention_backward(): chooses backward kernels; `attend_backward_dq` and `attend_backward_dkdv`
    wide.py         attention(), attention_backward() of heads of more than 256 elements, by products
    decode.py       decode(): few queries over many keys, in splits that a second launch combines
    decode_keys.py  where a decoding program's tokens and keys are: sequences, splits, pages
    paged.py        attend_to_pages(), write_to_pages(): decoding over paged caches, and writing to them
    hopper/         sm_90 kernels in Gluon: warp-specialised ones for 16-bit floats, fp32_* for float32
    arguments.py    a call's tensors, strides and sizes as arguments of kernels
    prologue.py     types of those arguments; from a program's number to its block, head, sequence and pointers
    scores.py       masks, biases, exponentials, logsumexp; for Triton and Gluon
    dropout.py      the elements that ATen's dropout keeps

A call of `scaled_dot_product_attention`:

1. `ops/attention` checks the operands of ATen's operator, allocates its results and makes a `Problem`: (batch, heads,
   rows, elements) with a contiguous last dimension, a bias expanded to all scores, packed sequences by their starts.
2. `decode.decodes` sends few queries over many keys to `decode`. Otherwise `forward.attention` launches the first
   kernel that serves the problem: `hopper.forward`, `hopper.fp32_forward`, `attend`. `table` gives its tile.
3. `attend`: a program has a block of queries. `prologue` finds its head and sequence. `_attend_keys` updates
   accumulator, row max and row sum: first over the keys that all queries see, without masks, then over the rest.
4. The program divides by the row sum, and stores the result and the logsumexp.
5. The gradient recomputes probabilities from logsumexp. `attend_backward_dq` sums over keys and stores delta, each
   row's sum of out * grad_out. `attend_backward_dkdv` sums over queries, of all heads that share its keys. Nothing is
   atomic.
"""
