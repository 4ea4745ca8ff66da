"""Patched models under PEFT, accelerate, Trainer, gradient checkpointing, torch.compile and FSDP."""

import copy
import importlib.util

import pytest
import torch
from conftest import FULL
from tiny_models import apart, inputs, make, replaced, trained

import tritonite

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def needs(library):
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


def compare(model, given, wanted, far=2e-5):
    output, gradients = trained(model, given)
    torch.testing.assert_close(output.loss, wanted[0].loss, rtol=far, atol=0.0)
    assert apart(gradients, wanted[1]) < far


def adapted(model, dropout=0.0):
    import peft

    config = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    torch.manual_seed(4)
    return peft.get_peft_model(model, config).train()


@needs("peft")
@pytest.mark.parametrize("dropout", [0.0, 0.25] if FULL else [0.25])
def test_adapters_before_the_patch(dropout):
    model, given = adapted(make("llama"), dropout), inputs("llama")
    wanted = trained(model, given)
    assert all("lora" in name for name in wanted[1])
    report = tritonite.patch(model)
    assert report.counts == replaced("llama"), report
    tritonite.reset_stats()
    compare(model, given, wanted)
    assert "tritonite::linear_cross_entropy" in tritonite.stats()
    assert tritonite.unpatch(model) == len(report.replaced)
    compare(model, given, wanted, far=1e-9)


@needs("peft")
def test_adapters_after_the_patch():
    given = inputs("llama")
    wanted = trained(adapted(make("llama")), given)
    model = make("llama")
    tritonite.patch(model)
    compare(adapted(model), given, wanted)


@needs("accelerate")
def test_hooks_of_accelerate():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules

    class Hook(ModelHook):
        """Count the calls of hooked modules."""

        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Hook.calls += 1
            return args, kwargs

    model, given = make("llama"), inputs("llama")
    wanted = trained(model, given)
    for module in list(model.modules()):
        add_hook_to_module(module, Hook())
    counts = replaced("llama")
    report = tritonite.patch(model)
    assert report.counts == {kind: count for kind, count in counts.items() if kind != "loss"}
    assert "has hooks" in report.kept[0].reason
    Hook.calls = 0
    compare(model, given, wanted)
    assert Hook.calls >= len(report.replaced)
    remove_hook_from_submodules(model)
    compare(model, given, wanted)
    assert tritonite.unpatch(model) == len(report.replaced)


@needs("accelerate")
def test_accelerator_with_accumulation():
    from accelerate import Accelerator

    given = inputs("llama")
    losses = []
    for patched in (False, True):
        model = make("llama")
        if patched:
            tritonite.patch(model)
        accelerator = Accelerator(cpu=tritonite.device == "cpu", gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        own = []
        for _ in range(3):
            with accelerator.accumulate(model):
                loss = model(**given).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            own.append(float(loss.detach()))
        losses.append(own)
    assert losses[0][2] < losses[0][1]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=0.0)


@needs("accelerate")
def test_trainer_with_accumulation_evaluation_and_a_checkpoint(tmp_path):
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    data = [{name: each[0].cpu() for name, each in inputs("llama").items()} for _ in range(4)]
    logged = []
    for patched in (False, True):
        model = make("llama")
        if patched:
            tritonite.patch(model)
        folder = tmp_path / str(patched)
        arguments = TrainingArguments(
            str(folder),
            max_steps=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_steps=1,
            report_to=[],
            use_cpu=tritonite.device == "cpu",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:1])
        trainer.train()
        measured = trainer.evaluate()["eval_loss"]
        logged.append([trainer.state.log_history[0]["loss"], measured])
        loaded = LlamaForCausalLM.from_pretrained(folder / "checkpoint-1").to(tritonite.device)
        for own, other in zip(loaded.parameters(), model.parameters(), strict=True):
            assert torch.equal(own, other)
    torch.testing.assert_close(*map(torch.tensor, logged), rtol=1e-4, atol=0.0)


def test_gradient_checkpointing():
    model, given = make("llama"), inputs("llama")
    wanted = trained(model, given)
    tritonite.patch(model)
    model.gradient_checkpointing_enable()
    tritonite.reset_stats()
    compare(model, given, wanted)
    layers = model.config.num_hidden_layers
    counts = tritonite.stats()["tritonite::silu_and_mul"]
    assert counts.launched + counts.replayed == 2 * layers


def test_a_model_compiles_without_graph_breaks():
    model, given = make("llama"), inputs("llama")
    wanted = trained(model, given)
    tritonite.patch(model)
    tritonite.reset_stats()
    torch._dynamo.reset()
    output = torch.compile(model, backend="aot_eager" if FULL else "eager", fullgraph=True)(**given)
    model.zero_grad()
    output.loss.backward()
    assert output.logits is None
    torch.testing.assert_close(output.loss, wanted[0].loss, rtol=1e-5, atol=0.0)
    assert apart({name: each.grad for name, each in model.named_parameters()}, wanted[1]) < 2e-5
    names = {"rms_norm", "silu_and_mul", "rotary_embedding", "linear_cross_entropy"}
    assert {f"tritonite::{name}" for name in names} <= tritonite.stats().keys()


def test_autocast():
    model, given = make("llama"), inputs("llama")
    exact = trained(model, given)
    with torch.autocast(tritonite.device, torch.bfloat16):
        before = trained(model, given)
    tritonite.patch(model)
    tritonite.reset_stats()
    with torch.autocast(tritonite.device, torch.bfloat16):
        found = trained(model, given)
    names = {"rms_norm", "silu_and_mul", "rotary_embedding", "linear_cross_entropy"}
    assert {f"tritonite::{name}" for name in names} <= tritonite.stats().keys()
    assert found[0].loss.dtype is before[0].loss.dtype
    assert abs(found[0].loss - exact[0].loss) < 2 * abs(before[0].loss - exact[0].loss) + 1e-2
    assert apart(found[1], exact[1]) < 2 * apart(before[1], exact[1]) + 4e-3


def test_copies_of_a_model_and_its_saved_weights(tmp_path):
    from transformers import LlamaForCausalLM

    model, given = make("llama"), inputs("llama")
    wanted = trained(model, given)
    names = [*model.state_dict()]
    count = len(tritonite.patch(model).replaced)
    assert [*model.state_dict()] == names
    copied = copy.deepcopy(model)
    assert copied.forward.__self__ is copied
    compare(copied, given, wanted)
    assert tritonite.unpatch(copied) == count
    model.save_pretrained(tmp_path)
    compare(LlamaForCausalLM.from_pretrained(tmp_path).to(tritonite.device).train(), given, wanted)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is not available")
def test_fully_shard():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, given = make("llama"), inputs("llama")
    wanted = trained(model, given)
    tritonite.patch(model)
    backend = "nccl" if tritonite.device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(tritonite.device, (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        output = model(**given)
        output.loss.backward()
        torch.testing.assert_close(output.loss, wanted[0].loss, rtol=1e-5, atol=0.0)
        found = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
        assert apart(found, wanted[1]) < 2e-5
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def mesh():
    """Return a mesh of one process."""
    if not torch.distributed.is_available():
        pytest.skip("torch.distributed is not available")
    from torch.distributed.device_mesh import init_device_mesh

    backend = "nccl" if tritonite.device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(tritonite.device, (1,))
    torch.distributed.destroy_process_group()


def test_sequence_parallel_norms_keep_their_own_forward(mesh):
    """Fused operators have no sharding strategy, so a DTensor is served by ATen's operators."""
    from torch.distributed.tensor import DTensor, Shard, parallel

    model = make("llama")
    norm, x = model.model.norm, torch.randn(2, 8, 32, device=tritonite.device)
    expected = norm(x)
    assert tritonite.patch(model).counts == replaced("llama")
    parallel.parallelize_module(norm, mesh, parallel.SequenceParallel())
    with tritonite.use_gems():
        found = norm(x)
    assert isinstance(found, DTensor) and found.placements == (Shard(1),)
    torch.testing.assert_close(found.full_tensor(), expected)


def test_a_gated_mlp_of_dtensors(mesh):
    from torch.distributed.tensor import parallel

    model = make("llama")
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 8, 32, device=tritonite.device)
    expected = mlp(x)
    assert tritonite.patch(model).counts == replaced("llama")
    columns = parallel.ColwiseParallel(use_local_output=False)
    plan = {"gate_proj": columns, "up_proj": columns, "down_proj": parallel.RowwiseParallel()}
    parallel.parallelize_module(mlp, mesh, plan)
    with tritonite.use_gems():
        torch.testing.assert_close(mlp(x), expected)


def test_a_rotation_of_dtensors(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from tritonite.patching.rotary import Rotation, rotating

    q, k = torch.randn(2, 4, 6, 8, device=tritonite.device), torch.randn(2, 2, 6, 8, device=tritonite.device)
    angles = torch.randn(1, 6, 4, device=tritonite.device).repeat(1, 1, 2)
    given = q, k, angles.cos(), angles.sin()
    placements = Shard(1), Shard(1), Replicate(), Replicate()
    sharded = [distribute_tensor(x, mesh, [place]) for x, place in zip(given, placements, strict=True)]
    with tritonite.use_gems():
        found = rotating(apply_rotary_pos_emb, Rotation(False, False))(*sharded)
    for each, wanted in zip(found, apply_rotary_pos_emb(*given), strict=True):
        torch.testing.assert_close(each.full_tensor(), wanted)
