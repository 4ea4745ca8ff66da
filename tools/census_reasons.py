"""Why overloads with a CUDA kernel of ATen have no kernel here: globs over overloads by reason.

A glob without a dot matches packets, with all their overloads. Reasons that the registry has are not repeated.
"""

VIEW = "a view: it launches nothing"
METADATA = "reads or changes a tensor's metadata or storage: it launches nothing"
EMPTY = "allocates memory without writing to it"
HOST = "runs on the host: a check, a read or a choice of backend"
SPARSE = "sparse tensors, whose layouts are left to ATen"
SEMI_SPARSE = "2:4 sparse weights, in the packed layout of CUTLASS or cuSPARSELt"
NESTED = "nested tensors with a layout of their own; jagged tensors are served by their values"
QUANTISED = "quantised tensors, a type of their own in ATen"
NAMED = "named dimensions, which torch 2.13 dropped"
MIOPEN = "MIOpen's operators: PyTorch for CUDA has no kernel behind them"
CUDNN_RNN = "cuDNN's recurrent layers, their workspaces and packed weights"
CUDNN_CTC = "cuDNN's CTC loss, for targets in host memory; `_ctc_loss` has a kernel"
OTHERS = "another backend's operator (CPU, MPS, oneDNN); PyTorch registers it, or a form with out=, for every device"
HOOK = "a hook for backends outside PyTorch, which have kernels; PyTorch's own raises an error"
AUTOGRAD = "bookkeeping of autograd: it launches nothing, or copies"
FUNCTIONAL = "functional form of a change of metadata, which clones"
TESTS = "an operator of PyTorch's own tests"
COPY = "a copy between devices or backends"
COMPOSED = "ATen makes it of operators that have kernels"
TRITON_HOOK = "an experiment of PyTorch: raises an error unless Python overrides it"
FLASH_3_HOOK = "a hook for FlashAttention 3, whose package registers kernels in Python; PyTorch's own raises an error"
UNSYMMETRIC = (
    "eigenvalues of general matrices, left to cuSOLVER and MAGMA: QR steps follow one another, and their number and "
    "shifts depend on the data"
)
HOST_READS = "the host reads the norms of the matrices, which decide its steps; its products have kernels"
CODES = "the deprecated form of `linalg_cholesky_ex`: the host waits for the codes, which become errors"

REASONS: dict[str, tuple[str, ...]] = {
    VIEW: (
        *("_conj", "_neg_view", "_reshape_alias", "alias", "as_strided", "as_strided_", "detach", "detach_"),
        *("diagonal", "expand", "lift_fresh", "permute", "select.int", "slice.Tensor", "slice_inverse"),
        *("split.Tensor", "split_with_sizes", "squeeze", "squeeze_", "t", "t_", "transpose.int"),
        *("transpose_", "unbind.int", "unfold", "unsqueeze", "unsqueeze_", "view", "view_as_complex"),
        "view_as_real",
    ),
    METADATA: (
        *("_has_same_storage_numel", "_resize_output", "is_pinned", "is_same_size", "is_set_to"),
        *("record_stream", "resize_", "resize_as_", "set_"),
    ),
    EMPTY: (
        *("_efficientzerotensor", "empty.memory_format", "empty_like", "empty_permuted", "empty_strided"),
        "new_empty*",
    ),
    HOST: (
        *("_assert_scalar", "_assert_tensor_metadata", "_functional_assert_scalar"),
        *("_functional_sym_constrain_range*", "_fused_sdp_choice", "_local_scalar_dense", "_print"),
        *("from_file", "sym_constrain_range*"),
    ),
    SPARSE: (
        *("*sparse_compressed*", "*sparse_coo*", "_coalesce", "_coalesced", "_convert_indices_from_*"),
        *("_indices_copy", "_sparse_*softmax*", "_sparse_addmm", "_sparse_broadcast_to_copy"),
        *("_sparse_csr_*", "_sparse_mask_projection", "_sparse_sparse_matmul", "_sparse_sum*", "_spdiags"),
        *("_to_dense", "_to_sparse", "_to_sparse_[bc]*", "_validate_compressed_sparse_indices"),
        *("_values_copy", "c*_indices", "c*_indices_copy", "copy_sparse_to_sparse", "dense_dim", "indices"),
        *("indices_copy", "is_coalesced", "native_norm", "resize_as_sparse", "row_indices"),
        *("row_indices_copy", "sparse_dim", "sparse_mask", "sparse_resize*", "sspaddmm", "values"),
        "values_copy",
    ),
    SEMI_SPARSE: ("_cslt_*", "_sparse_semi_structured_*", "_to_sparse_semi_structured"),
    NESTED: ("_nested_*", "matmul_backward", "to_padded_tensor"),
    QUANTISED: (
        *("_empty_affine_quantized", "_empty_per_channel_affine_quantized", "_make_per_*_quantized_tensor"),
        *("dequantize.tensors_out", "empty_quantized", "int_repr", "q_per_channel_*", "quantize_per_*"),
        "quantized_*",
    ),
    NAMED: ("empty.names*", "full.names*", "ones.names*", "rand*.*names*", "zeros.names*"),
    MIOPEN: ("_use_miopen_ctc_loss", "miopen_*"),
    CUDNN_RNN: ("_cudnn_init_dropout_state", "_cudnn_rnn_*"),
    CUDNN_CTC: ("_cudnn_ctc_loss", "_use_cudnn_ctc_loss"),
    OTHERS: (
        *("*_mps", "*_mps_*", "*mkldnn_*", "_grid_sampler_2d_cpu_fallback", "_histogramdd_bin_edges"),
        *("_histogramdd_from_bin_tensors", "_nnpack_spatial_convolution", "linear_backward"),
        *("max_pool2d_backward", "mps_*", "to_mkldnn"),
    ),
    HOOK: ("*_overrideable", "*_overrideable_backward"),
    AUTOGRAD: ("_fw_primal*", "_make_dual*", "_new_zeros_with_same_feature_meta"),
    FUNCTIONAL: ("resize", "resize_as", "set"),
    TESTS: ("_fill_mem_eff_dropout_mask_", "_foobar", "_test_*"),
    COPY: ("_copy_from", "_copy_from_and_resize", "_pin_memory"),
    COMPOSED: (
        *("_embedding_bag_backward", "_native_multi_head_attention", "_pack_padded_sequence"),
        *("_transformer_encoder_layer_fwd", "cholesky_solve", "glu_backward_jvp", "linalg_pinv", "linear.out"),
    ),
    TRITON_HOOK: ("_triton_multi_head_attention", "_triton_scaled_dot_attention"),
    CODES: ("cholesky",),
    HOST_READS: ("linalg_matrix_exp",),
    FLASH_3_HOOK: ("_flash_attention_forward.quantized", "_scaled_dot_product_flash_attention.quantized"),
    UNSYMMETRIC: ("_linalg_eigvals", "linalg_eig", "linalg_eigvals"),
}
