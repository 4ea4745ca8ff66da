"""A small Llama on two processes: a forward and a backward pass in each way to share the work, and on one process.

A way is a function of a `Case`. It returns the loss of the whole batch and the gradients of this process, by the names
that parameters have on one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

Gradients = dict[str, torch.Tensor]
# Renamed in torch 2.13.
all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class NotHere(Exception):
    """PyTorch cannot run this way on this device; the message says why."""


@dataclass(frozen=True)
class Size:
    """The size of a Llama and of its batch. `layers` are those of pipelines; other ways use half of them."""

    width: int = 1024
    heads: int = 8
    key_value_heads: int = 4
    inner: int = 2816
    vocabulary: int = 4096
    layers: int = 4
    batch: int = 8
    sequence: int = 512


TINY = Size(width=16, heads=4, key_value_heads=2, inner=32, vocabulary=32, layers=2, batch=4, sequence=8)


class Llama(nn.Module):
    """A Llama of transformers' layers, or a stage of one: consecutive ones of its embedding, layers and head."""

    def __init__(self, size: Size, units: Sequence[int] | None = None) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama import modeling_llama as llama

        super().__init__()
        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.inner,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.key_value_heads,
            max_position_embeddings=size.sequence,
            attn_implementation="sdpa",
        )
        # Unit 0 is the embedding, and the last one norm and head.
        units = range(size.layers + 2) if units is None else units
        self.embed = nn.Embedding(size.vocabulary, size.width) if 0 in units else None
        own = [i for i in range(size.layers) if i + 1 in units]
        self.layers = nn.ModuleDict({str(i): llama.LlamaDecoderLayer(config, i) for i in own})
        last = size.layers + 1 in units
        self.norm = llama.LlamaRMSNorm(size.width, config.rms_norm_eps) if last else None
        self.head = nn.Linear(size.width, size.vocabulary, bias=False) if last else None
        self.rotary = llama.LlamaRotaryEmbedding(config)
        # A buffer, so that context parallelism can shard it with the tokens.
        self.register_buffer("positions", torch.arange(size.sequence)[None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits or hidden states of tokens or hidden states."""
        x = self.embed(x) if self.embed is not None else x
        rotation = self.rotary(x, self.positions)
        for layer in self.layers.values():
            x = layer(x, position_embeddings=rotation, attention_mask=None)
        return self.head(self.norm(x)) if self.head is not None else x


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits, in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@dataclass(frozen=True)
class Case:
    """Weights, tokens and labels, the same on every process, and the mesh of all processes."""

    size: Size
    mesh: DeviceMesh
    whole: Llama
    tokens: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def make(cls, size: Size, mesh: DeviceMesh, device: torch.device) -> Case:
        torch.manual_seed(0)
        whole = Llama(size)
        text = torch.randint(size.vocabulary, (size.batch, size.sequence + 1)).to(device)
        return cls(size, mesh, whole.to(device), text[:, :-1].contiguous(), text[:, 1:].contiguous())

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def copied(self, dtype: torch.dtype) -> Llama:
        """Return a copy whose parameters have a dtype. Frequencies of the rotation stay float32."""
        model = copy.deepcopy(self.whole)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model

    def shard(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this process's tokens and labels: a part of the sequences (0), or of their positions (1)."""
        return tuple(each.chunk(self.mesh.size(), dim)[self.rank].contiguous() for each in (self.tokens, self.labels))

    def mean(self, loss: torch.Tensor) -> float:
        """Return the mean of the processes' losses."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / self.mesh.size()


def gradients(model: nn.Module) -> Gradients:
    """Return a model's gradients by name, shards gathered."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name.removeprefix("module.")] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def one_process(case: Case, dtype: torch.dtype = torch.float32) -> tuple[float, Gradients]:
    """Compute loss and gradients of the whole batch without communication."""
    model = case.copied(dtype)
    loss = loss_of(model(case.tokens), case.labels)
    loss.backward()
    return float(loss.detach()), gradients(model)


def replicated(case: Case) -> tuple[float, Gradients]:
    """Give each process a part of the sequences, by DistributedDataParallel."""
    model = DistributedDataParallel(copy.deepcopy(case.whole))
    return _data_parallel(case, model)


def sharded(case: Case, **options: Any) -> tuple[float, Gradients]:
    """Give each process a part of the sequences and a shard of each parameter, by fully_shard."""
    model = copy.deepcopy(case.whole)
    for layer in (*model.layers.values(), model):
        fully_shard(layer, mesh=case.mesh, **options)
    return _data_parallel(case, model)


def sharded_mixed(case: Case) -> tuple[float, Gradients]:
    """Compute in bfloat16 with float32 parameters and float32 sums of gradients."""
    return sharded(case, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def _data_parallel(case: Case, model: nn.Module) -> tuple[float, Gradients]:
    tokens, labels = case.shard(0)
    loss = loss_of(model(tokens), labels)
    loss.backward()
    return case.mean(loss), gradients(model)


def tensor_parallel(case: Case) -> tuple[float, Gradients]:
    """Give each process a part of the heads and of the MLP's columns, by parallelize_module."""
    plan: dict[str, tp.ParallelStyle] = {"head": tp.ColwiseParallel(output_layouts=Replicate())}
    for name in case.whole.layers:
        plan |= {f"layers.{name}.self_attn.{each}_proj": tp.ColwiseParallel() for each in "qkv"}
        plan |= {f"layers.{name}.mlp.{each}_proj": tp.ColwiseParallel() for each in ("gate", "up")}
        plan |= {f"layers.{name}.{each}": tp.RowwiseParallel() for each in ("self_attn.o_proj", "mlp.down_proj")}
    return _parallelized(case, plan)


def sequence_parallel(case: Case) -> tuple[float, Gradients]:
    """Share norms and residuals by positions as well."""
    by_position = Shard(1)
    plan: dict[str, tp.ParallelStyle] = {
        "embed": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=by_position),
        "norm": tp.SequenceParallel(),
        "head": tp.ColwiseParallel(input_layouts=by_position, output_layouts=Replicate()),
    }
    for name in case.whole.layers:
        plan |= {f"layers.{name}.{each}_layernorm": tp.SequenceParallel() for each in ("input", "post_attention")}
        plan |= {f"layers.{name}.self_attn.{each}_proj": tp.ColwiseParallel() for each in "qkv"}
        plan |= {f"layers.{name}.mlp.{each}_proj": tp.ColwiseParallel() for each in ("gate", "up")}
        plan |= {
            f"layers.{name}.{each}": tp.RowwiseParallel(output_layouts=by_position)
            for each in ("self_attn.o_proj", "mlp.down_proj")
        }
        plan[f"layers.{name}.self_attn"] = tp.PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": by_position},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan[f"layers.{name}.mlp"] = tp.PrepareModuleInput(
            input_layouts=(by_position,), desired_input_layouts=(Replicate(),)
        )
    return _parallelized(case, plan)


def _parallelized(case: Case, plan: dict[str, tp.ParallelStyle]) -> tuple[float, Gradients]:
    model = copy.deepcopy(case.whole)
    tp.parallelize_module(model, case.mesh, plan)
    loss = loss_of(model(case.tokens), case.labels)
    loss.backward()
    return float(loss.detach()), gradients(model)


def pipelined(schedule: str, stages: int, microbatches: int) -> Callable[[Case], tuple[float, Gradients]]:
    """Return a way that gives each process consecutive layers, or with several stages a process such groups."""

    def run(case: Case) -> tuple[float, Gradients]:
        size, processes = case.size, case.mesh.size()
        units, count = range(size.layers + 2), stages * processes
        weights, device = case.whole.state_dict(), case.tokens.device
        own = []
        for i in range(case.rank, count, processes):
            module = Llama(size, units[i * len(units) // count : (i + 1) * len(units) // count])
            module.load_state_dict({name: weights[name] for name in module.state_dict()})
            own.append(PipelineStage(module.to(device), i, count, device))
        make = schedules.get_schedule_class(schedule)
        several = issubclass(make, schedules.PipelineScheduleMulti)
        runs = make(own if several else own[0], n_microbatches=microbatches, loss_fn=loss_of)
        losses: list[torch.Tensor] = []
        last = case.rank == processes - 1
        given = (case.tokens,) if case.rank == 0 else ()
        runs.step(*given, **({"target": case.labels, "losses": losses} if last else {}))
        mean = torch.stack(losses).mean() if last else torch.zeros((), device=device)
        # Only the last process has a loss.
        return case.mean(mean) * processes, {k: v for stage in own for k, v in gradients(stage.submod).items()}

    return run


def ring(kernel: SDPBackend, dtype: torch.dtype) -> Callable[[Case], tuple[float, Gradients]]:
    """Return a way that gives each process a part of the positions; keys and values go round, by context_parallel."""

    def run(case: Case) -> tuple[float, Gradients]:
        if case.tokens.device.type != "cuda":
            raise NotHere("PyTorch has context_parallel for the attention kernels of GPUs only")
        model, tokens, labels = case.copied(dtype), case.tokens.clone(), case.labels.clone()
        buffers = [tokens, labels, model.positions]
        with context_parallel(case.mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)), sdpa_kernel(kernel):
            loss = loss_of(model(tokens), labels)
            loss.backward()
            return case.mean(loss), _averaged(case, model)

    return run


def gathered_keys(case: Case) -> tuple[float, Gradients]:
    """Give each process a part of the positions; keys and values of all are gathered by functional collectives."""
    model, (tokens, labels) = copy.deepcopy(case.whole), case.shard(1)
    length = tokens.shape[1]
    first = case.rank * length
    model.positions = model.positions[:, first : first + length]
    attend = functional.scaled_dot_product_attention

    def over_all_keys(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        key, value = (all_gather(each.contiguous(), 2, case.mesh) for each in (key, value))
        at = torch.arange(key.shape[2], device=key.device)
        options |= {"attn_mask": at <= at[first : first + length, None], "is_causal": False}
        return attend(query, key, value, **options)

    functional.scaled_dot_product_attention = over_all_keys
    try:
        loss = loss_of(model(tokens), labels)
        loss.backward()
    finally:
        functional.scaled_dot_product_attention = attend
    return case.mean(loss), _averaged(case, model)


def _averaged(case: Case, model: nn.Module) -> Gradients:
    """Return the mean of the processes' gradients."""
    found = gradients(model)
    for grad in found.values():
        dist.all_reduce(grad)
        grad /= case.mesh.size()
    return found


@dataclass(frozen=True)
class Way:
    """A way to share the work, and the dtype that it computes in."""

    run: Callable[[Case], tuple[float, Gradients]]
    title: str
    dtype: torch.dtype = torch.float32
    # Whether stages need all layers of the size.
    deep: bool = False
    # Whether there are as many key heads as query heads, because context_parallel does not serve groups.
    equal_heads: bool = False


def ways() -> Iterator[Way]:
    yield Way(replicated, "DDP")
    yield Way(sharded, "FSDP2")
    yield Way(sharded_mixed, "FSDP2, mixed precision", torch.bfloat16)
    yield Way(tensor_parallel, "tensor parallel")
    yield Way(sequence_parallel, "tensor and sequence parallel")
    yield Way(pipelined("GPipe", 1, 2), "pipeline, GPipe", deep=True)
    yield Way(pipelined("1F1B", 1, 2), "pipeline, 1F1B", deep=True)
    yield Way(pipelined("Interleaved1F1B", 2, 2), "pipeline, interleaved 1F1B", deep=True)
    efficient, flash = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION
    yield Way(ring(efficient, torch.float32), "context parallel, ring", equal_heads=True)
    yield Way(
        ring(flash, torch.bfloat16), "context parallel, ring of flash attention", torch.bfloat16, equal_heads=True
    )
    yield Way(gathered_keys, "context parallel, gathered keys")
