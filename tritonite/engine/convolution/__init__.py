"""Convolutions as implicit matrix products (Chetlur et al. 2014, arXiv:1410.0759).

Every convolution has three spatial dimensions, of size 1 where a call has fewer: tensors are (N, C, D, H, W), of any
strides, and filters are (columns, channels of a group, kernel depth, height, width).

- problem: `Geometry`, stride, padding, dilation and groups; `Problem`, what a choice of tiles may depend on
- meta: compile-time facts and run-time arguments of the kernels
- table: tiles and limits of each kind of device
- select: the tile of a product and its slices, merged groups, copies, and where ATen is faster
- coordinates: device functions that find the elements of the input that taps meet
- forward: kernel of the convolution and of its transpose
- filters: kernel of the gradient of the filters, by slices of the positions that are added up
- groups: filters of narrow groups as block-diagonal filters of one group
- epilogue: what follows a convolution: a residual, an activation, and the sums before it
- boxes: 16-bit channels-last convolutions of stride 1 or 2 by boxes of positions that TMA copies; hopper, their kernel
- filter_boxes: the gradient of their filters by such boxes; hopper_filters, its kernel
- slices: memory for slices of the filters' gradient, and their sum
- launch: host functions `convolve`, `convolve_transposed` and `filter_gradient`
- product: filters of one tap as ordinary matrix products, by the `gemm` engine
- depthwise: choice of tiles and launches where every group has one input channel; depthwise_taps, what its kernels
  share: facts, coordinates of taps, loads; depthwise_forward, the convolution and its gradient by the input;
  depthwise_backward, the gradient by the filters

A call of `conv2d`:

1. `ops/convolution/` views operands in three dimensions, allocates the result in ATen's memory format, and calls
   `convolve`.
2. `product.multiply` serves filters of one tap without stride or padding, where tensors are matrices.
3. `launch.problem_of` returns the `Problem`, in which narrow groups are merged (`select.merged`), and
   `select.forward_tile` chooses the tile and slices of K for it. Images that are not channels-last are copied, and so
   are filters that neither operand order reads well.
4. `forward.convolve_tile` multiplies a tile of output positions and output channels: a loop over taps and blocks of
   channels loads the input at the positions that a tap meets.
5. On Hopper `boxes.convolve` serves 16-bit channels-last calls of stride 1 or 2, unless slices of K are worth it.
6. With slices of K, `gemm.launch.add_slices` adds them, the bias and the activation.

The transpose gathers. An output position is met by the taps of one residue class modulo the stride, so each class of
positions (a phase) is a convolution of its own with fewer taps (`coordinates.phase_walk`).
"""
