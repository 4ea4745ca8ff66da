"""The family of random benchmark cases of fused operators, with sizes like those of models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from tritonite.bench.cases import Make, Shape
from tritonite.bench.drawing import TINY, Call, Source, family, log_uniform, named, tokens, width
from tritonite.bench.fused import PAIRS, Pair

DrawShape = Callable[[Source], Shape]
# Draws of the shape that a pair's operands are made from, by the pair's name; all others draw rows of a layer.
SHAPES: dict[str, DrawShape] = {}
# Tokens of a chunk of linear attention's composition, and of a page of its latents.
_CHUNK = 64


def shapes(*names: str) -> Callable[[DrawShape], DrawShape]:
    """Register a function that draws the shapes of the named pairs. "NAME*" is for all pairs that begin with NAME."""

    def register(draw: DrawShape) -> DrawShape:
        for name in names:
            known = [name] if name in PAIRS else [each for each in PAIRS if each.startswith(name.removesuffix("*"))]
            SHAPES.update(dict.fromkeys(known, draw))
        return draw

    return register


@family("fused")
def _fused(random: Source) -> Call:
    """Draw a call of a fused operator, or of its backward pass, with ATen's composition as baseline."""
    name = named(random, sorted(PAIRS))
    pair = PAIRS[name]
    shape = SHAPES.get(name, _rows)(random)
    return Call(name, name, functools.partial(_operands, pair, shape), pair=pair)


def _operands(pair: Pair, shape: Shape, make: Make) -> Sequence[torch.Tensor]:
    return pair.operands(make, shape)


def _room(random: Source, *others: int) -> int:
    """Return how many times tensors of the sizes `others` fit, with room for a composition's intermediate results."""
    return max(1, random.sizes.most // (4 * max(1, torch.Size(others).numel())))


def _whole_width(random: Source) -> int:
    """Draw a model's width as it is, which heads, pairs and groups divide."""
    return random.choice(random.sizes.widths)


def _rows(random: Source) -> Shape:
    """Draw (rows, width) of a layer."""
    size = width(random)
    return min(tokens(random), _room(random, size)), size


@shapes("rotary_embedding", "rotary_embedding_backward", "multimodal_rotary_embedding")
def _of_heads(random: Source) -> Shape:
    size = _whole_width(random)
    return min(tokens(random), _room(random, size)), size


@shapes("cross_entropy", "cross_entropy_backward", "jsd", "kl_divergence")
def _logits(random: Source) -> Shape:
    """Draw (tokens, classes)."""
    classes = random.choice(random.sizes.classes)
    return min(tokens(random), _room(random, classes)), classes


@shapes("sample", "sample_unfiltered")
def _vocabulary(random: Source) -> Shape:
    """Draw (rows, classes), more than the filters keep."""
    classes = max(64, random.choice(random.sizes.classes))
    return min(log_uniform(random, (1, 256)), _room(random, classes)), classes


@shapes("linear_cross_entropy")
def _head(random: Source) -> Shape:
    """Draw (tokens, hidden size, classes)."""
    size, classes = min(4096, _whole_width(random)), random.choice(random.sizes.classes)
    return min(tokens(random), _room(random, max(size, classes))), min(size, 4 * _room(random, classes)), classes


@shapes("linear_jsd", "linear_dpo")
def _sequences(random: Source) -> Shape:
    """Draw (sequences, tokens, hidden size, classes), an even number of sequences."""
    count, size, classes = _head(random)
    sequences = 2 * log_uniform(random, (1, 4))
    return sequences, max(1, count // sequences), size, classes


def _heads(random: Source) -> tuple[int, int, int]:
    """Draw the heads of queries, of keys, and their size."""
    kv_heads = min(8, random.choice(random.sizes.heads))
    return kv_heads * random.choice((1, 2, 4, 8)), kv_heads, random.choice(random.sizes.head_sizes)


@shapes("paged_attention")
def _paged(random: Source) -> Shape:
    """Draw (sequences, heads, key heads, keys of a sequence, head size, tokens of a page)."""
    heads, kv_heads, size = _heads(random)
    page = random.choice((16, 32, 256)) if random.sizes is not TINY else 16
    pages = max(1, log_uniform(random, (random.sizes.positions[0], 2 * random.sizes.positions[1])) // page)
    sequences = min(log_uniform(random, random.sizes.batches), _room(random, kv_heads, pages * page, size))
    return sequences, heads, kv_heads, pages * page, size, page


@shapes("attention_*")
def _attention(random: Source) -> Shape:
    """Draw (batch, heads, key heads, queries and keys, head size), of which the composition stores all scores."""
    heads, kv_heads, size = _heads(random)
    # Gradients of a few keys are differences of rounded numbers.
    length = max(32, log_uniform(random, random.sizes.positions))
    return min(log_uniform(random, random.sizes.batches), _room(random, heads, length, max(length, size))), *(
        heads,
        kv_heads,
        length,
        size,
    )


@shapes("mla_decode")
def _latents(random: Source) -> Shape:
    """Draw (sequences, heads, rows of a sequence, rows of a page)."""
    pages = max(1, log_uniform(random, random.sizes.positions) // _CHUNK)
    sequences = min(log_uniform(random, random.sizes.batches), _room(random, pages * _CHUNK, 576))
    return sequences, random.choice((16, 64, 128)) if random.sizes is not TINY else 2, pages * _CHUNK, _CHUNK


@shapes("chunk_gated_delta_rule", "gated_delta_rule_backward")
def _delta(random: Source) -> Shape:
    """Draw (batch, tokens, key heads, heads, head size), whole chunks of tokens."""
    key_heads, size = min(16, random.choice(random.sizes.heads)), random.choice(random.sizes.head_sizes)
    heads = key_heads * random.choice((1, 2))
    count = log_uniform(random, random.sizes.positions)
    count = count if count < _CHUNK else count // _CHUNK * _CHUNK
    batch = min(log_uniform(random, random.sizes.batches), _room(random, heads, count, 4 * size))
    return batch, count, key_heads, heads, size


@shapes("recurrent_gated_delta_rule")
def _decoding(random: Source) -> Shape:
    _, _, key_heads, heads, size = _delta(random)
    return min(log_uniform(random, (1, 256)), _room(random, heads, size, size)), 1, key_heads, heads, size


@shapes("short_convolution", "short_convolution_backward")
def _channels(random: Source) -> Shape:
    """Draw (batch, channels, tokens)."""
    channels, count = width(random), log_uniform(random, random.sizes.positions)
    return min(log_uniform(random, random.sizes.batches), _room(random, channels, count)), channels, count


@shapes("conv_bias_*")
def _layers(random: Source) -> Shape:
    """Draw (batch, channels, columns, side, kernel) of a layer of images."""
    channels, columns = random.choice(random.sizes.channels), random.choice(random.sizes.channels)
    side, kernel = log_uniform(random, random.sizes.sides), random.choice((1, 3, 3, 5))
    batch = min(log_uniform(random, random.sizes.batches), _room(random, max(channels, columns), side, side))
    return batch, channels, columns, side, kernel


@shapes("gated_rms_norm", "gated_rms_norm_backward")
def _rows_of_heads(random: Source) -> Shape:
    heads, size = random.choice(random.sizes.heads), random.choice(random.sizes.head_sizes)
    return min(tokens(random) * heads, _room(random, size)), size


@shapes("topk_softmax", "load_balancing_loss")
def _router(random: Source) -> Shape:
    """Draw (tokens, experts), 8 experts at least."""
    n_experts = random.choice((8, 16, 64, 128, 256)) if random.sizes is not TINY else random.choice((8, 16))
    return tokens(random), n_experts


@shapes("permute", "unpermute", "grouped_linear_backward_weight", "moe")
def _experts(random: Source) -> Shape:
    """Draw (tokens, hidden size, size within an expert, experts, experts of a token), of whole shares of tokens."""
    n_experts = random.choice((8, 16, 64, 128)) if random.sizes is not TINY else 4
    size = min(4096, _whole_width(random))
    inner = max(8, min(_whole_width(random), _room(random, n_experts, size) // 16 * 16))
    k = random.choice((1, 2, 4, 8)) if random.sizes is not TINY else 2
    shares = max(1, min(tokens(random), _room(random, k, size + 2 * inner)) // n_experts)
    return shares * n_experts, size, inner, n_experts, k


@shapes("linear_fp8_blocks", "linear_int8", "linear_int4", "fp8_linear")
def _product(random: Source) -> Shape:
    """Draw (M, N, K)."""
    return tokens(random), _whole_width(random), _whole_width(random)
