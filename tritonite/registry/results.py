"""Facts about the results of ATen's operators that their schemas do not have."""

from __future__ import annotations

_FLASH, _EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"

# By operator: the indices of results that ATen leaves uninitialised. Only their dtype, shape and device are ATen's.
UNWRITTEN: dict[str, tuple[int, ...]] = {
    # The state of the generator, which is uninitialised without dropout.
    **{"_flash_attention_forward": (2, 3), "_efficient_attention_forward": (2, 3)},
    **{_FLASH: (6, 7), _EFFICIENT: (2, 3)},
    **{"_scaled_dot_product_cudnn_attention": (6, 7), "_cudnn_attention_forward": (6, 7)},
    # A CPU leaves the states of impossible positions unwritten.
    "_ctc_loss": (1,),
}

# Operators with indices of one of several equal elements, of which ATen and a kernel may choose different ones.
CHOSEN_INDICES = frozenset(
    ("fractional_max_pool2d", "fractional_max_pool3d", "kthvalue", "median", "mode", "nanmedian", "sort", "topk")
)

# Operators whose kernels may add, or write to one element, in no order: their bits may differ from call to call.
UNORDERED = frozenset(
    (
        *("_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward"),
        *("_histogramdd_from_bin_cts", "_index_put_impl"),
        *("_unsafe_index_put", "bincount", "embedding_dense_backward", "embedding_renorm", "grid_sampler_2d_backward"),
        *("grid_sampler_3d_backward", "histc", "histogram", "index_add", "index_copy", "index_fill", "index_put"),
        *("index_reduce", "max_unpool2d", "max_unpool3d", "put", "scatter", "scatter_add", "scatter_reduce", "topk"),
    )
)
