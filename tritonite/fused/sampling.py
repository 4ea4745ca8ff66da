"""Sampling of the next tokens of requests from their logits; the kernel is `engine.sampling`'s.

Filters follow transformers' logits processors and vLLM's penalties, in this order: repetition penalty, frequency and
presence penalty, temperature, top-k, top-p, min-p, typical sampling. Each filter sees the probabilities that the
filters before it leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch

from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.iteration import INT32_LIMIT, common_device
from tritonite.engine.sampling.launch import Parameters, Sampling
from tritonite.engine.sampling.launch import sample as sample_rows
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_shape
from tritonite.ops.random.draws import NOT_NEGATIVE, POSITIVE
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty, limit

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Dtypes of tokens, and of numbers of tokens.
_INTEGERS = torch.int32, torch.int64
_LIMITS = {"temperature": NOT_NEGATIVE, "repetition_penalty": POSITIVE}


class SamplingParameters(TypedDict, total=False):
    """Parameters of `sample`: a number for all rows, a (B,) tensor, or None for none."""

    temperature: float | torch.Tensor | None
    top_k: int | torch.Tensor | None
    top_p: float | torch.Tensor | None
    min_p: float | torch.Tensor | None
    typical_p: float | torch.Tensor | None
    repetition_penalty: float | torch.Tensor | None
    presence_penalty: float | torch.Tensor | None
    frequency_penalty: float | torch.Tensor | None


# Parameters in the order of the schema, each as a number and as a tensor.
_NAMES = tuple(SamplingParameters.__annotations__)


def sample(
    logits: torch.Tensor,
    *,
    tokens: torch.Tensor | None = None,
    prompt_lengths: int | torch.Tensor = 0,
    seeds: torch.Tensor | None = None,
    positions: int | torch.Tensor = 0,
    generator: torch.Generator | None = None,
    return_log_probs: bool = False,
    **parameters: Unpack[SamplingParameters],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sample a token for each row of logits, in one launch and without sorting.

    A token of the history has its logit x divided by `repetition_penalty` if x is positive, else multiplied by it.
    Then `frequency_penalty` times the token's count, and `presence_penalty` if the count is positive, are subtracted.
    Logits are divided by `temperature`. Of the softmax of the result the filters keep, one after the other:

    - top_k: the k largest probabilities, and all that equal the k-th;
    - top_p: the fewest of the largest probabilities whose sum is at least p, and all that equal the least of them;
    - min_p: probabilities of at least p times the largest;
    - typical_p: the tokens whose -log(probability) is nearest to the entropy, up to a sum of p, and equally near ones.

    A token is drawn by its probability among the kept ones. Scores, weights and sums over a row are float32, sums over
    blocks of a row and random numbers float64.

    Args:
        logits: (B, V) of float16, bfloat16 or float32, of any strides; nan counts as -inf.
        tokens: int32 or int64, (B, L): the history of each row, on which the penalties act. Entries outside [0, V),
            such as -1, are no tokens. None for no penalties.
        prompt_lengths: the number of tokens at the start of a history, or (B,) numbers, that the repetition penalty
            sees and that do not count for the others, as in vLLM.
        seeds: int64, (B,): a row's random number is the first of the Philox generator with its seed and the counter
            `positions`, so that it does not depend on other rows. None for numbers of `generator`.
        positions: an int or (B,) integers: the tokens that a request has drawn before. Only with `seeds`.
        generator: the generator to draw from without `seeds`; None for the device's default one.
        return_log_probs: whether to return log probabilities as well.
        temperature: a number or a (B,) tensor, not negative; 0 for the largest logit, and the first of equal ones.
        top_k: a number or a (B,) tensor; 0, a negative number, or V and more keep all.
        top_p, min_p, typical_p: numbers or (B,) tensors. 1 and more keep all for top_p and typical_p, 0 for min_p. The
            largest probability is kept by top_p and min_p.
        repetition_penalty: a positive number or a (B,) tensor.
        presence_penalty, frequency_penalty: numbers or (B,) tensors.

    Returns int64 tokens, (B,), -1 for a row whose logits are all -inf. With `return_log_probs` also float32 log
    probabilities of these tokens, (B,), among the tokens kept.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices. While a CUDA graph is
    captured, only calls with `seeds` are served.

    Source: Keskar et al. 2019 (repetition penalty); Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p); Nguyen et
    al. 2024 (min-p); Meister et al. 2023 (typical sampling); Salmon et al. 2011 (Philox).
    """
    if unknown := sorted(set(parameters) - set(_NAMES)):
        raise TypeError(f"sample() got unexpected keyword arguments {unknown}")
    flat: list[Any] = []
    for name in _NAMES:
        flat += _number_and_tensor(parameters.get(name))
    prompt = _number_and_tensor(prompt_lengths)
    position = _number_and_tensor(positions)
    token, log_probs = torch.ops.tritonite.sample(logits, *flat, tokens, *prompt, seeds, *position, generator)
    return (token, log_probs) if return_log_probs else token


def _number_and_tensor(value: Any) -> tuple[Any, torch.Tensor | None]:
    """Return a parameter as a number, or as a tensor; None for the other."""
    return (None, value) if isinstance(value, torch.Tensor) else (value, None)


def _check_rows(name: str, tensor: torch.Tensor | None, logits: torch.Tensor, accepts: tuple[torch.dtype, ...]) -> None:
    if tensor is None:
        return
    if tensor.dtype not in accepts:
        raise Decline(f"{name} is {tensor.dtype}: it may be {', '.join(str(each) for each in accepts)}")
    check_shape(name, tensor, logits.shape[:1], "one for each row of logits")
    check_device(name, tensor, "logits", logits)


def _check(logits: torch.Tensor, given: Parameters, tokens: torch.Tensor | None) -> None:
    if logits.dtype not in SINGLE_FLOATS:
        raise Decline(f"logits is {logits.dtype}: it may be float16, bfloat16 or float32")
    if logits.dim() != 2 or not 0 < logits.shape[1] < INT32_LIMIT:
        raise Decline(
            f"logits has the shape {tuple(logits.shape)}: it must be (rows, vocabulary), with a token at least, and "
            f"fewer than {INT32_LIMIT}"
        )
    for name, tensor in given._asdict().items():
        counts = name in ("top_k", "prompt_length", "position")
        accepts = (torch.int64,) if name == "seed" else _INTEGERS if counts else (*SINGLE_FLOATS, torch.float64)
        _check_rows(f"{name}s" if name in ("seed", "prompt_length", "position") else name, tensor, logits, accepts)
    if tokens is not None:
        if tokens.dtype not in _INTEGERS:
            raise Decline(f"tokens is {tokens.dtype}: it may be torch.int32 or torch.int64")
        if tokens.dim() != 2 or tokens.shape[0] != logits.shape[0] or tokens.shape[1] >= INT32_LIMIT:
            raise Decline(f"tokens has the shape {tuple(tokens.shape)}: it must be ({logits.shape[0]}, length)")
        check_device("tokens", tokens, "logits", logits)


def _sampling(logits: torch.Tensor, *others: Any) -> Sampling:
    """Return the call for the operator's arguments; decline arguments that do not fit each other."""
    flat, (tokens, prompt, prompts, seed, position, positions, generator) = others[:16], others[16:]
    given = Parameters._make([*flat[1::2], prompts, seed, positions])
    numbers = dict(zip(_NAMES, flat[::2], strict=True)) | {"prompt_length": prompt, "position": position}
    _check(logits, given, tokens)
    for name, limits in _LIMITS.items():
        if numbers[name] is not None:
            limit(numbers[name], limits)
    return Sampling(logits, tokens, given, numbers, generator)


def _fake(logits, *others):
    work = _sampling(logits, *others)
    rows = work.logits.shape[:1]
    return work.logits.new_empty(rows, dtype=torch.int64), work.logits.new_empty(rows, dtype=torch.float32)


_SCHEMA = ", ".join(f"{'int' if name == 'top_k' else 'float'}? {name}, Tensor? {name}_of_rows" for name in _NAMES)


@library_operator(
    f"sample(Tensor logits, {_SCHEMA}, Tensor? tokens, int? prompt_length, Tensor? prompt_lengths, Tensor? seeds, "
    "int? position, Tensor? positions, Generator? generator) -> (Tensor, Tensor)",
    fake=_fake,
    accepts=SINGLE_FLOATS,
    draws=True,
)
def sample_host(
    logits,
    temperature,
    temperature_of_rows,
    top_k,
    top_k_of_rows,
    top_p,
    top_p_of_rows,
    min_p,
    min_p_of_rows,
    typical_p,
    typical_p_of_rows,
    repetition_penalty,
    repetition_penalty_of_rows,
    presence_penalty,
    presence_penalty_of_rows,
    frequency_penalty,
    frequency_penalty_of_rows,
    tokens,
    prompt_length,
    prompt_lengths,
    seeds,
    position,
    positions,
    generator,
):
    """Tokens sampled from filtered logits, by search of their cumulative probabilities: Holtzman et al. 2020."""
    work = _sampling(
        *(logits, temperature, temperature_of_rows, top_k, top_k_of_rows, top_p, top_p_of_rows, min_p, min_p_of_rows),
        *(typical_p, typical_p_of_rows, repetition_penalty, repetition_penalty_of_rows, presence_penalty),
        *(presence_penalty_of_rows, frequency_penalty, frequency_penalty_of_rows, tokens, prompt_length),
        *(prompt_lengths, seeds, position, positions, generator),
    )
    common_device((logits, *[each for each in (*work.given, tokens) if each is not None]), ())
    rows = logits.shape[0]
    token = empty((rows,), torch.int64, logits.device)
    log_prob = empty((rows,), torch.float32, logits.device)
    sample_rows(work, token, log_prob)
    return token, log_prob
