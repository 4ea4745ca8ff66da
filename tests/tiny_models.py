"""Models of transformers with tiny configurations and random weights; nothing is downloaded."""

import torch
from conftest import FULL

import tritonite

LAYERS = 2 if FULL else 1
_SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = _SMALL | _TOKENS | {"num_key_value_heads": 2, "max_position_embeddings": 64}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_positions": 64, "loss_type": "ForCausalLM"}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8, "num_experts": 4}
_IMAGE = {"image_size": 16, "patch_size": 8, "num_labels": 4}

# Class of the configuration, class of the model, and options.
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "mistral": ("MistralConfig", "MistralForCausalLM", _DECODER),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _DECODER | {"head_dim": 8}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _DECODER | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _DECODER | {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _DECODER | {"head_dim": 8}),
    "phi": ("PhiConfig", "PhiForCausalLM", _DECODER),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _DECODER),
    "granite": ("GraniteConfig", "GraniteForCausalLM", _DECODER | {"logits_scaling": 3.0}),
    "cohere": ("CohereConfig", "CohereForCausalLM", _DECODER),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2 | _TOKENS),
    "bert": ("BertConfig", "BertForMaskedLM", _SMALL),
    "vit": ("ViTConfig", "ViTForImageClassification", _SMALL | _IMAGE),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "gated_t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _DECODER | {"num_local_experts": 4}),
    "mixtral_balanced": (
        "MixtralConfig",
        "MixtralForCausalLM",
        _DECODER | {"num_local_experts": 4, "output_router_logits": True},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _DECODER | _EXPERTS),
}

# Modules replaced in each layer, and once in the model.
REPLACED = {
    "llama": ({"RMS norm": 2, "gated MLP": 1, "rotation": 1}, {"RMS norm": 1, "loss": 1}),
    "qwen3": ({"RMS norm": 4, "gated MLP": 1, "rotation": 1}, {"RMS norm": 1, "loss": 1}),
    "gemma2": ({"RMS norm": 4, "gated MLP": 1, "rotation": 1}, {"RMS norm": 1, "loss": 1}),
    "gemma3": ({"RMS norm": 6, "gated MLP": 1, "rotation": 1}, {"RMS norm": 1, "loss": 1}),
    "phi": ({"layer norm": 1, "rotation": 1}, {"layer norm": 1, "loss": 1}),
    "cohere": ({"layer norm": 1, "gated MLP": 1, "rotation": 1}, {"layer norm": 1, "loss": 1}),
    "gpt2": ({"layer norm": 2}, {"layer norm": 1, "loss": 1}),
    "bert": ({"layer norm": 2}, {"layer norm": 2}),
    "vit": ({"layer norm": 2}, {"layer norm": 1}),
    "t5": ({"RMS norm": 5}, {"RMS norm": 2, "loss": 1}),
    "gated_t5": ({"RMS norm": 5, "gated MLP": 2}, {"RMS norm": 2, "loss": 1}),
    "mixtral": ({"RMS norm": 2, "experts": 1, "rotation": 1}, {"RMS norm": 1, "loss": 1}),
    "qwen3_moe": ({"RMS norm": 4, "experts": 1, "rotation": 1}, {"RMS norm": 1, "loss": 1}),
}
_LIKE = {"mixtral_balanced": "mixtral"}


def replaced(name, layers=LAYERS):
    """Return the number of modules of each kind that `patch` replaces in a model."""
    each, once = REPLACED[_LIKE.get(name, name if name in REPLACED else "llama")]
    return {kind: each.get(kind, 0) * layers + once.get(kind, 0) for kind in {**each, **once}}


def make(name, dtype=torch.float32, layers=LAYERS, **options):
    """Return a model in training, with weights drawn from a fixed seed, and norms that are not the identity."""
    import transformers

    config_class, model_class, own = MODELS[name]
    count = {"GPT2Config": "n_layer", "T5Config": "num_layers"}.get(config_class, "num_hidden_layers")
    torch.manual_seed(3)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**own, **{count: layers}, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
    return model.to(dtype).to(tritonite.device).train()


def inputs(name, dtype=torch.float32, tokens=8):
    """Return arguments of a model, with labels."""
    if name == "vit":
        pixels = torch.randn(1, 3, 16, 16).to(dtype)
        return {"pixel_values": pixels.to(tritonite.device), "labels": torch.tensor([1]).to(tritonite.device)}
    ids = torch.randint(3, 64, (1, tokens), device=tritonite.device)
    labels = ids.clone()
    labels[:, 2] = -100
    return {"input_ids": ids, "labels": labels}


def trained(model, given):
    """Return a model's loss and gradients by name, from a fixed random state."""
    model.zero_grad()
    torch.manual_seed(7)
    output = model(**given)
    output.loss.backward()
    return output, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def apart(found, wanted):
    """Return the largest distance of gradients of one name, relative to the largest gradient of the model."""
    assert found.keys() == wanted.keys()
    largest = max(float(each.abs().max()) for each in wanted.values())
    return max(float((found[name].double() - wanted[name].double()).abs().max()) for name in wanted) / largest
