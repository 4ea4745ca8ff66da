"""A Llama of transformers, patched with fused operators and trained for a few steps beside an unpatched one."""

import copy

import torch

import tritonite

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    raise SystemExit("This example needs transformers: pip install transformers") from None

# A small Llama with random weights, so that nothing is downloaded. from_pretrained() works in the same way.
config = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
torch.manual_seed(0)
plain = LlamaForCausalLM(config).to(tritonite.device).train()
model = copy.deepcopy(plain)
tokens = torch.randint(config.vocab_size, (1, 12), device=tritonite.device)

report = tritonite.patch(model)
print(report)  # what was replaced by which operator, and what was not, and why
assert report.counts == {"RMS norm": 3, "gated MLP": 1, "rotation": 1, "loss": 1}


def train(model, steps=3):
    """Return the losses of a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    return losses


losses, expected = train(model), train(plain)
for step, pair in enumerate(zip(losses, expected, strict=True)):
    print("step {}: loss {:.6f}, unpatched {:.6f}".format(step, *pair))
torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=0.0)

# In training the logits are never in memory. In evaluation, and without labels, the model returns them as before.
assert model(input_ids=tokens, labels=tokens).logits is None
assert model.eval()(input_ids=tokens).logits.shape == (1, 12, config.vocab_size)

# The parameters are those of the model before, so its weights load into an unpatched model, and unpatch leaves nothing.
plain.load_state_dict(model.state_dict())
print("modules with their own forward again:", tritonite.unpatch(model))
