"""A model from Hugging Face's transformers, unchanged: its operators are PyTorch's, so they run as Triton kernels."""

import torch

import tritonite

try:
    from transformers import LlamaConfig, LlamaModel
except ImportError:
    raise SystemExit("This example needs transformers: pip install transformers") from None

# A small Llama with random weights, so that nothing is downloaded. from_pretrained() works in the same way.
config = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="eager",  # made of products and softmax, which have kernels
)
torch.manual_seed(0)
model = LlamaModel(config).eval().to(tritonite.device)
tokens = torch.randint(config.vocab_size, (2, 10), device=tritonite.device)

with torch.no_grad():
    expected = model(tokens).last_hidden_state
    with tritonite.use_gems():
        states = model(tokens).last_hidden_state

torch.testing.assert_close(states, expected, rtol=1e-3, atol=1e-4)
print("largest difference of the hidden states:", float((states - expected).abs().max()))
for name, counts in tritonite.stats().items():
    print(f"{name}: {counts.launched + counts.replayed} calls in Triton, declined: {counts.declined}")
