"""Attention by the warp-specialised kernels of Hopper, in 16-bit floats and in float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest import mock

import torch

from tritonite import devices
from tritonite.engine.attention.hopper import backward as hopper_backward
from tritonite.engine.attention.hopper import forward as hopper_forward
from tritonite.engine.attention.hopper import fp32_backward, fp32_forward
from tritonite.engine.attention.problem import Packed, Problem
from tritonite.engine.attention.table import WARP_SPECIALIZED_BACKWARD_WITH_BIAS
from tritonite.testing.compile_cases.cases import Case, compile_cases, recorded_launches


@compile_cases("attention")
def attention_16_bit(full: bool) -> Iterator[Case]:
    """Forward and backward in 16-bit floats, by every tile of the tables, without a bias and with two kinds."""
    dtypes, sizes = (torch.float16, torch.bfloat16), ((64, 64), (80, 128), (128, 128), (128, 256), (256, 256))
    # 100 batches give a program several tiles.
    lengths = ((1, 300), (100, 200), (100, 300), (100, 600))
    for dtype, (head, value), causal, (batch, keys) in itertools.product(dtypes, sizes, (False, True), lengths):
        if not full and (dtype, head, causal) != (torch.float16, value, True):
            continue
        query, key = torch.empty(batch, 4, 200, head, dtype=dtype), torch.empty(batch, 2, keys, head, dtype=dtype)
        out, logsumexp = torch.empty(batch, 4, 200, value, dtype=dtype), torch.empty(batch, 4, 200)
        problem = Problem(query, key, key.new_empty(batch, 2, keys, value), None, None, causal, 100, "ieee")
        bias = key.new_empty(batch, 1, 200, 608)[..., :keys]
        for kind, given in (("", None), (" with a bias", bias), (" with a bias of keys", bias[:, :, :1])):
            if given is not None:
                # Without `full` one head size has a bias where a program has several tiles.
                if causal if full else batch > 1 and (head, keys) != (128, 600):
                    continue
                problem = problem._replace(bias=given.expand(batch, 4, 200, keys))
            with recorded_launches() as found:
                hopper_forward.attention(problem, out, logsumexp if causal else None)
                if batch == 1 and (given is None or max(head, value) in WARP_SPECIALIZED_BACKWARD_WITH_BIAS):
                    for splits in (False, True):
                        with mock.patch.object(hopper_backward, "_splits_heads", lambda *_, splits=splits: splits):
                            hopper_backward.attention_backward(problem, out, out, logsumexp, problem[:3])
            for specialization in found:
                name = specialization.kernel.__name__
                label = f"{name}{kind} {dtype} of {batch}x{keys}x{head} and {value}{' causal' if causal else ''}"
                yield Case(label, specialization, ("sm_90",))


@compile_cases("parts")
def attention_float32(full: bool) -> Iterator[Case]:
    """Forward and backward in float32, of batches and packed sequences, with biases and masks."""
    multiprocessors = devices.multiprocessors(torch.device("cpu"))
    starts = torch.zeros(3, dtype=torch.int32)
    for i, (head, value, causal) in enumerate(((64, 64, False), (24, 64, True), (64, 64, True), (48, 20, False))):
        # More than two programs a multiprocessor, so that the backward pass of keys is compiled for three.
        heads = multiprocessors + 1
        query, key = torch.empty(2, heads, 60, head), torch.empty(2, heads, 60, head)
        out, logsumexp = torch.empty(2, heads, 60, value), torch.empty(2, heads, 60)
        scores = torch.empty(2, heads, 60, 60)
        kinds: list[tuple[str, torch.Tensor | None]] = [("", None), (" with a bias", scores), (" packed", None)]
        kinds += [(" with a bias of keys", scores[:, :, :1]), (" mask", scores > 0)]
        for kind, bias in kinds if full else (kinds[:3], kinds[3:], (), ())[i]:
            given = None if bias is None else bias.expand(scores.shape)
            problem = Problem(query, key, key.new_empty(2, heads, 60, value), given, None, causal, 0, "ieee")
            if kind == " packed":
                one = {"query": query[:1], "key": key[:1], "value": problem.value[:1]}
                problem = problem._replace(**one, packed=Packed(starts, starts, 60, 60, causal, True))
            batches = len(problem.query)
            written, sums, grads = out[:batches], logsumexp[:batches], problem[:3]
            with recorded_launches() as found:
                fp32_forward.attention(problem, written, sums if causal else None)
                for grad_bias in (None, scores) if bias is scores else (None,):
                    fp32_backward.attention_backward(problem, written, written, sums, grads, grad_bias)
            for specialization in found:
                label = f"{specialization.kernel.__name__}{kind} of {head} and {value}{' causal' if causal else ''}"
                yield Case(label, specialization, ("sm_90",))
