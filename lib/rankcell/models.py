"""The models that the lessons train and split, what they cost by formula, and what they train on: a two-layer MLP, a
tiny GPT, and a Llama of the same size; a text that ships with the course, and a small regression. Every number comes
from a generator of its own, made from a seed and a name, and none from torch's global random numbers. So any rank can
build the whole model, or any part of it, and all agree.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EMBEDDING_STD = 0.02  # GPT-2's, https://github.com/openai/gpt-2/blob/master/src/model.py, 2019
BIAS_STD = 0.02  # not zero, so that a bias that is added twice shows at once
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "none": nn.Identity}


def generator(seed: int, *names: object) -> torch.Generator:
    """Random numbers that depend on `seed` and `names` only: the same on every rank, whatever was drawn before.

    generator(0, "batch", 7)  # the batch of step 7
    """
    digest = hashlib.sha256(repr((seed, *map(str, names))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _normal(shape: Sequence[int], seed: int, *names: object) -> Tensor:
    """Numbers of mean 0 and standard deviation 1 from the generator of these names."""
    return torch.randn(tuple(shape), generator=generator(seed, *names), device="cpu")


def initialise(module: nn.Module, *, seed: int = 0, prefix: str = "") -> nn.Module:
    """`module` with new weights, each from a generator named after the parameter.

    Linear weights have standard deviation 1/sqrt(fan-in), so that outputs are as large as inputs; embeddings, an output
    head and biases 0.02; a norm starts as 1 and 0. A part of a model gets the weights that it has in the whole:
    `initialise(stage, prefix="blocks.1.")`. Split a weight after it was drawn whole, never before.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():  # a tied weight has the numbers of its first name
            path, _, own = name.rpartition(".")
            part = module.get_submodule(path)
            if isinstance(part, (nn.LayerNorm, nn.RMSNorm)):
                parameter.fill_(1.0 if own == "weight" else 0.0)
            else:
                parameter.copy_(_normal(parameter.shape, seed, prefix + name) * _std(part, path, own))
    return module


def _std(part: nn.Module, path: str, name: str) -> float:
    if name == "bias":
        return BIAS_STD
    if isinstance(part, nn.Embedding) or path.split(".")[-1] == "head":
        return EMBEDDING_STD
    if isinstance(part, nn.Linear):
        return part.in_features**-0.5
    known = "Linear, Embedding, LayerNorm and RMSNorm"
    raise TypeError(f"initialise knows {known}, not the {type(part).__name__} at {path}.")


def _linear(n_in: int, n_out: int, *, bias: bool = True, device: Any = None, **dtype: Any) -> nn.Linear:
    """A linear layer whose weights are still to be drawn: nn.Linear's own would use the global generator."""
    where = {"device": device or torch.get_default_device(), **dtype}
    return nn.utils.skip_init(nn.Linear, n_in, n_out, bias=bias, **where)


class MLP(nn.Module):
    """Two linear layers, an activation between them: `(..., d_in)` -> `(..., d_hidden)` -> `(..., d_out)`.

    `activation` is "relu", "gelu" or "none"; with none the two layers are one affine map.
    """

    def __init__(
        self, d_in: int, d_hidden: int, d_out: int, *, activation: str = "relu", seed: int = 0, **where: Any
    ) -> None:
        super().__init__()
        self.up = _linear(d_in, d_hidden, **where)
        self.activation = ACTIVATIONS[activation]()
        self.down = _linear(d_hidden, d_out, **where)
        initialise(self, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class SwiGLU(nn.Module):
    """The MLP of a Llama: down(silu(gate(x)) * up(x)), without biases: `(..., d_model)` -> the same shape.

    From https://arxiv.org/abs/2002.05202 (2020), section 2, where it is called FFN_SwiGLU.
    """

    def __init__(self, d_model: int, d_hidden: int, *, seed: int = 0, **where: Any) -> None:
        super().__init__()
        self.gate = _linear(d_model, d_hidden, bias=False, **where)
        self.up = _linear(d_model, d_hidden, bias=False, **where)
        self.down = _linear(d_hidden, d_model, bias=False, **where)
        initialise(self, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Causal attention by heads, written out: `(batch, length, d_model)` -> the same shape.

    The number of heads is read off the width of query, key and value, so a rank that holds fewer columns computes fewer
    heads with this same code. With fewer `n_kv_heads` than `n_heads` each serves as many query heads in a row:
    grouped-query attention, https://arxiv.org/abs/2305.13245 (2023). With a `rope_base` queries and keys are rotated by
    their positions, see `rotate`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        rope_base: float | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        seed: int = 0,
        **where: Any,
    ) -> None:
        super().__init__()
        n_kv_heads = n_kv_heads or n_heads
        if d_model % n_heads or n_heads % n_kv_heads:
            these = f"these of the {n_kv_heads} heads of key and value"
            raise ValueError(f"d_model = {d_model} must be a multiple of the {n_heads} heads, and {these}.")
        self.d_head, self.rope_base = d_model // n_heads, rope_base
        self.query = _linear(d_model, d_model, bias=bias, **where)
        self.key = _linear(d_model, n_kv_heads * self.d_head, bias=bias, **where)
        self.value = _linear(d_model, n_kv_heads * self.d_head, bias=bias, **where)
        self.output = _linear(d_model, d_model, bias=bias, **where)
        self.dropout = nn.Dropout(dropout)
        initialise(self, seed=seed)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """With `documents`, `(batch, length)`, a position sees its own document only."""
        query, key, value = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
        if self.rope_base is not None:
            places = torch.arange(x.shape[-2], device=x.device)
            query, key = (rotate(t, places, base=self.rope_base) for t in (query, key))
        mixed = causal_attention(query, key, value, self.dropout, documents)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """`(batch, length, heads * d_head)` seen as `(batch, heads, length, d_head)`."""
        return x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: Callable[[Tensor], Tensor], documents: Tensor | None = None
) -> Tensor:
    """What each position mixes from the values up to itself: `(batch, heads, length, d_head)`.

    Keys and values may have fewer heads. With `documents`, `(batch, length)`, only positions of the same number see
    each other; padding gets a number of its own.
    """
    key, value = (repeat_heads(t, query.shape[1]) for t in (key, value))
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # (batch, heads, length, length)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    return dropout(scores.masked_fill(hidden, -math.inf).softmax(-1)) @ value


def repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    """`(..., kv_heads, length, d_head)` -> `(..., n_heads, length, d_head)`: each for all the queries it serves."""
    times = n_heads // x.shape[-3]
    return x if times == 1 else x.repeat_interleave(times, -3)


def rotate(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
    """Rotary positions, `(..., length, d_head)`: x[i] and x[i + d_head/2] turned by position * base^(-2i/d_head).

    A product of a query and a key then depends on how far apart they are. From https://arxiv.org/abs/2104.09864
    (RoFormer, 2021), section 3.2, which pairs neighbours instead.
    """
    half = x.shape[-1] // 2
    exact = torch.promote_types(x.dtype, torch.float32)  # 16 bits do not tell large positions apart
    speeds = base ** (-torch.arange(half, device=x.device, dtype=exact) / half)
    angles = positions.to(exact)[:, None] * speeds  # (length, d_head / 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Block(nn.Module):
    """One layer of the GPT: norm, attention, add; norm, MLP, add."""

    def __init__(
        self, d_model: int, n_heads: int, d_hidden: int, *, dropout: float = 0.0, seed: int = 0, **where: Any
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model, **where)
        self.attention = Attention(d_model, n_heads, dropout=dropout, **where)
        self.mlp_norm = nn.LayerNorm(d_model, **where)
        self.mlp = MLP(d_model, d_hidden, d_model, activation="gelu", **where)
        self.dropout = nn.Dropout(dropout)
        initialise(self, seed=seed)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), documents=documents))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class LlamaBlock(nn.Module):
    """One layer of the Llama: norm, attention, add; norm, SwiGLU, add. No biases.

    An RMSNorm, https://arxiv.org/abs/1910.07467 (2019), is a LayerNorm without its mean and bias.
    """

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int, d_hidden: int, *, seed: int = 0, **where: Any
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model, eps=1e-5, **where)
        self.attention = Attention(d_model, n_heads, n_kv_heads=n_kv_heads, rope_base=10000.0, bias=False, **where)
        self.mlp_norm = nn.RMSNorm(d_model, eps=1e-5, **where)
        self.mlp = SwiGLU(d_model, d_hidden, **where)
        initialise(self, seed=seed)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), documents=documents)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """What GPT and Llama have in common: tokens `(batch, length)` -> logits `(batch, length, vocab)`.

    `context` is the longest sequence it can read. A stage of a pipeline is a model without some of its parts: where
    there is no embedding it takes what the stage before computed, where there is no head it gives that on.
    """

    position_embedding: Any
    blocks: Any

    def __init__(
        self, vocab: int, context: int, blocks: Iterable[nn.Module], norm: Any, *, tied: bool, positions: bool
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": norm.weight.device, "dtype": norm.weight.dtype}
        embedding = partial(nn.utils.skip_init, nn.Embedding, embedding_dim=len(norm.weight), **where)
        self.context = context
        self.token_embedding = embedding(vocab)
        self.position_embedding = embedding(context) if positions else None
        self.blocks, self.norm = nn.ModuleList(blocks), norm
        self.head = _linear(len(norm.weight), vocab, bias=False, **where)
        if tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """With `documents`, `(batch, length)`, a position sees its own document only; positions count on."""
        if self.token_embedding is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x, documents=documents)
        return x if self.head is None else self.unembed(x)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """What enters the first block: `(batch, length)` -> `(batch, length, d_model)`.

        `positions`, `(length,)`, are those of the tokens, by default 0, 1, 2, ... A Llama's attention has its own.
        """
        length = tokens.shape[-1]
        if length > self.context:
            raise ValueError(f"{length} tokens are more than the context of {self.context}. Cut the sequence.")
        return self.token_embedding(tokens)

    def unembed(self, x: Tensor) -> Tensor:
        """What leaves the last block as logits: `(batch, length, d_model)` -> `(batch, length, vocab)`."""
        return self.head(self.norm(x))


class GPT(Decoder):
    """A decoder-only transformer: tokens `(batch, length)` -> logits `(batch, length, vocab)`.

    With `tied` the weight of the head *is* the token embedding: one Parameter with two names.
    """

    def __init__(
        self,
        vocab: int,
        d_model: int = 64,
        *,
        n_heads: int = 4,
        n_layers: int = 2,
        context: int = 32,
        d_hidden: int | None = None,
        tied: bool = True,
        dropout: float = 0.0,
        seed: int = 0,
        **where: Any,
    ) -> None:
        shape = d_model, n_heads, d_hidden or 4 * d_model
        blocks = (Block(*shape, dropout=dropout, **where) for _ in range(n_layers))
        super().__init__(vocab, context, blocks, nn.LayerNorm(d_model, **where), tied=tied, positions=True)
        self.dropout = nn.Dropout(dropout)
        initialise(self, seed=seed)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.dropout(super().embed(tokens) + self.position_embedding(positions))


class Llama(Decoder):
    """The GPT with the parts of a Llama: RMSNorm, rotary positions, SwiGLU, fewer key/value heads, no biases.

    From https://arxiv.org/abs/2307.09288 (Llama 2, 2023), section 2.2. The MLP has 8/3 of `d_model` hidden units, up to
    a multiple of 8, which makes three matrices as many numbers as the GPT's two.
    """

    def __init__(
        self,
        vocab: int,
        d_model: int = 64,
        *,
        n_heads: int = 4,
        n_kv_heads: int = 2,
        n_layers: int = 2,
        context: int = 32,
        tied: bool = False,
        seed: int = 0,
        **where: Any,
    ) -> None:
        shape = d_model, n_heads, n_kv_heads, -(-d_model // 3) * 8
        blocks = (LlamaBlock(*shape, **where) for _ in range(n_layers))
        super().__init__(vocab, context, blocks, nn.RMSNorm(d_model, eps=1e-5, **where), tied=tied, positions=False)
        initialise(self, seed=seed)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens of -log(probability of the token that came next), in nats."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def gpt_parameters(
    vocab: int, d_model: int = 64, *, n_layers: int = 2, context: int = 32, tied: bool = True, **_: Any
) -> int:
    """Numbers in a GPT with 4d hidden units, about 12d² per layer; those of a tied head count once."""
    d = d_model
    layer = (4 * d * d + 4 * d) + (8 * d * d + 5 * d) + 2 * 2 * d  # attention, MLP, two norms
    return vocab * d * (1 if tied else 2) + context * d + n_layers * layer + 2 * d


def gpt_saved_bytes(
    vocab: int, d_model: int = 64, *, size: int, length: int, n_layers: int = 2, n_heads: int = 4, itemsize: int = 4
) -> int:
    """Bytes that autograd keeps from the forward of a GPT and its loss, parameters left out.

    Per token and layer, in numbers: 16d + heads·length + 4. That is two norms (2d in, 2d out, 4 statistics), query,
    key, value (3d), the attention weights (heads·length), the values they mix (d), the MLP (4d before GELU, 4d after).
    In 2-byte numbers that is 32d + 2·heads·length bytes; dropout's masks and outputs make it the 34d + 5·heads·length
    of Korthikanti et al., https://arxiv.org/abs/2205.05198, section 4 (2022).
    """
    d, tokens = d_model, size * length
    layer = tokens * (16 * d + n_heads * length + 4) * itemsize
    mask = length * length  # one byte each
    end = tokens * (2 * d + 2 + vocab) * itemsize  # final norm, and the log-probabilities that the loss keeps
    indices = 8 * (2 * tokens + length)  # tokens, targets, positions: int64
    average = itemsize  # how many tokens the loss is averaged over
    return n_layers * (layer + mask) + end + average + indices


@cache
def text() -> str:
    """The course's text: 22 old fables in our own words, about 10 kB."""
    return files(__package__).joinpath("data/fables.txt").read_text("utf-8")


@cache
def vocabulary() -> str:
    """Every character of the text once, in order; a token is a place in it."""
    return "".join(sorted(set(text())))


def encode(words: str) -> Tensor:
    """One token per character, `(length,)` int64."""
    places = {character: place for place, character in enumerate(vocabulary())}
    if missing := sorted(set(words) - set(places)):
        raise ValueError(f"The text has no {', '.join(map(repr, missing))}. It knows {vocabulary()!r}.")
    return torch.tensor([places[character] for character in words], dtype=torch.long)


def batch(
    tokens: Tensor, step: int, *, size: int = 16, length: int = 32, seed: int = 0, rank: int = 0, world_size: int = 1
) -> tuple[Tensor, Tensor]:
    """The inputs and targets of one step, each `(size / world_size, length)`: pieces from random places.

    `size` is that of the global batch. The rows depend on `seed` and `step` only, so with `world_size` ranks rank r
    gets the r-th part of the very rows that one process would get.
    """
    if size % world_size:
        raise ValueError(f"A batch of {size} cannot be shared by {world_size} ranks. Choose a multiple.")
    places, random = len(tokens) - length, generator(seed, "batch", step)
    starts = torch.randint(places, (size,), generator=random, device="cpu").chunk(world_size)[rank]
    rows = torch.stack([tokens[start : start + length + 1] for start in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batches(tokens: Tensor, steps: int, **options: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of `steps` steps from step 0, with the options of `batch`."""
    return (batch(tokens, step, **options) for step in range(steps))


def regression(
    samples: int = 1024, d_in: int = 6, d_out: int = 3, *, noise: float = 0.1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs `(samples, d_in)` and targets `(samples, d_out)` that can be learnt: a fixed net's outputs plus noise.

    A model that has learnt all there is to learn has a mean squared error of noise², 0.01.
    """
    x = _normal((samples, d_in), seed, "inputs")
    inner = _normal((d_in, 16), seed, "inner") / d_in**0.5
    outer = _normal((16, d_out), seed, "outer") / 16**0.5
    y = torch.tanh(2 * x @ inner) @ outer
    return x, y + noise * _normal(y.shape, seed, "noise")
