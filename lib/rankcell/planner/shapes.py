"""What a transformer is made of: its sizes, its parameters, its floating-point operations per token.

Counts are exact for the weight matrices and leave out biases and the vectors of the norms (less than 0.1 % of a
model of a billion parameters). Every field of a `Shape` may be a number or a NumPy array, so that the same
formulas serve one model and a table of thousands of rows.
"""

import difflib
import re
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The sizes of one decoder-only transformer.

    `ffn` is the inner size of a dense MLP, `gated` whether it has three matrices (SwiGLU) or two. `moe_layers`
    of the `layers` have, instead, `experts` MLPs of inner size `expert_ffn`, of which a token passes `top_k`,
    and shared ones of `shared_ffn` together. `attention` is the parameters of one attention where they do not
    follow from the heads (multi-head latent attention); 0: they do.
    """

    name: str
    layers: Any
    hidden: Any
    heads: Any
    kv_heads: Any
    ffn: Any
    vocab: Any
    gated: Any = True
    tied: Any = False
    head_dim: Any = 0
    experts: Any = 0
    top_k: Any = 0
    expert_ffn: Any = 0
    shared_ffn: Any = 0
    moe_layers: Any = 0
    attention: Any = 0

    @property
    def width(self) -> Any:
        """Elements of all query heads of a token together."""
        per_head = self.head_dim + (self.head_dim == 0) * (self.hidden / self.heads)
        return self.heads * per_head

    @property
    def kv_width(self) -> Any:
        """Elements of all key heads of a token together; the values are as many."""
        return self.width * self.kv_heads / self.heads

    @property
    def attention_params(self) -> Any:
        """Parameters of one attention: queries and output of `width`, keys and values of `kv_width`."""
        counted = self.hidden * (2 * self.width + 2 * self.kv_width)
        return self.attention + (self.attention == 0) * counted

    @property
    def matrices(self) -> Any:
        """How many matrices an MLP has: three with a gate, else two."""
        return 2 + 1 * self.gated

    @property
    def dense_params(self) -> Any:
        """Parameters of one dense MLP."""
        return self.matrices * self.hidden * self.ffn

    @property
    def expert_params(self) -> Any:
        """Parameters of all experts of one layer: what expert parallelism divides."""
        return self.experts * self.matrices * self.hidden * self.expert_ffn

    @property
    def shared_params(self) -> Any:
        """Parameters of the shared experts and the router of one layer."""
        return self.hidden * (self.matrices * self.shared_ffn + self.experts)

    @property
    def embedding_params(self) -> Any:
        """Parameters of one table of the vocabulary: the embedding, or the head that is as large."""
        return self.vocab * self.hidden

    @property
    def dense_layer_params(self) -> Any:
        """Parameters of the mean layer without its experts."""
        share = self.moe_layers / self.layers
        return self.attention_params + (1 - share) * self.dense_params + share * self.shared_params

    @property
    def expert_layer_params(self) -> Any:
        """Parameters of the experts of the mean layer."""
        return self.moe_layers / self.layers * self.expert_params

    @property
    def params(self) -> Any:
        """Parameters of the whole model; an embedding that is also the head counts once."""
        tables = self.embedding_params * (2 - 1 * self.tied)
        return self.layers * (self.dense_layer_params + self.expert_layer_params) + tables

    @property
    def active_layer_params(self) -> Any:
        """Parameters of the mean layer that a token meets."""
        routed = self.top_k * self.matrices * self.hidden * self.expert_ffn
        return self.dense_layer_params + self.moe_layers / self.layers * routed

    @property
    def active_params(self) -> Any:
        """Parameters that a token meets in a matrix product: all layers and the head."""
        return self.layers * self.active_layer_params + self.embedding_params

    def flops_per_token(self, seq: Any) -> Any:
        """Operations per token, forward and backward, nothing recomputed, attention causal.

        6 per parameter that the token meets, and 6 s w per layer for scores and values: half of the square
        that the convention of full attention counts. Narayanan et al., https://arxiv.org/abs/2104.04473,
        appendix (2021), whose formula counts the square and, with recomputation, the second forward.
        """
        return 6 * self.active_params + 6 * self.layers * seq * self.width


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more: Any
) -> Shape:
    return Shape(name, layers, hidden, heads, kv, ffn, vocab, **more)


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200) -> Shape:
    return Shape(name, layers, hidden, heads, heads, 4 * hidden, vocab, gated=False, tied=True)


def _moe(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv: int,
    head_dim: int,
    experts: tuple[int, int, int],
    vocab: int,
    **more: Any,
) -> Shape:
    count, top_k, ffn = experts
    filled = {"moe_layers": layers, "ffn": ffn, **more}
    return Shape(
        name, layers, hidden, heads, kv, vocab=vocab, head_dim=head_dim,
        experts=count, top_k=top_k, expert_ffn=ffn, **filled,
    )  # fmt: skip


# As the config.json of each model says; GPT-3: Brown et al., https://arxiv.org/abs/2005.14165, table 2.1.
# An MLA of DeepSeek-V3: 7168 x 1536 + 1536 x 128 x 192 + 7168 x 576 + 512 x 128 x 256 + 128 x 128 x 7168
_MLA_V3 = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
_MLA_V2_LITE = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
MODELS = {
    shape.name: shape
    for shape in (
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
        _llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        _llama("llama3-405b", 126, 16384, 128, 8, 53248, 128256),
        _llama("llama3.2-1b", 16, 2048, 32, 8, 8192, 128256, tied=True),
        _llama("llama3.2-3b", 28, 3072, 24, 8, 8192, 128256, tied=True),
        _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32000),
        _llama("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064),
        _llama("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064),
        _llama("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064),
        _llama("qwen3-8b", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
        _llama("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
        Shape("nemotron4-15b", 32, 6144, 48, 8, 24576, 256000, gated=False),
        Shape("nemotron4-340b", 96, 18432, 96, 8, 73728, 256000, gated=False),
        _gpt("gpt3-1.3b", 24, 2048, 16),
        _gpt("gpt3-5b", 24, 4096, 32),
        _gpt("gpt3-7b", 32, 4096, 32),
        _gpt("gpt3-13b", 40, 5120, 40),
        _gpt("gpt3-20b", 44, 6144, 48),
        _gpt("gpt3-175b", 96, 12288, 96),
        _gpt("bloom-176b", 70, 14336, 112, 250880),
        _moe("mixtral-8x7b", 32, 4096, 32, 8, 128, (8, 2, 14336), 32000),
        _moe("mixtral-8x22b", 56, 6144, 48, 8, 128, (8, 2, 16384), 32768),
        _moe("qwen3-30b-a3b", 48, 2048, 32, 4, 128, (128, 8, 768), 151936, ffn=6144),
        _moe("qwen3-235b-a22b", 94, 4096, 64, 4, 128, (128, 8, 1536), 151936, ffn=12288),
        _moe("deepseek-v2-lite", 27, 2048, 16, 16, 160, (64, 6, 1408), 102400,
             ffn=10944, moe_layers=26, shared_ffn=2816, attention=_MLA_V2_LITE),
        _moe("deepseek-v3", 61, 7168, 128, 128, 160, (256, 8, 2048), 129280,
             ffn=18432, moe_layers=58, shared_ffn=2048, attention=_MLA_V3),
        _moe("gpt-oss-20b", 24, 2880, 64, 8, 64, (32, 4, 2880), 201088),
        _moe("gpt-oss-120b", 36, 2880, 64, 8, 64, (128, 4, 2880), 201088),
        _moe("llama4-scout", 48, 5120, 40, 8, 128, (16, 1, 8192), 202048, shared_ffn=8192),
        _moe("llama4-maverick", 48, 5120, 40, 8, 128, (128, 1, 8192), 202048,
             ffn=16384, moe_layers=24, shared_ffn=8192),
    )
}  # fmt: skip


@cache
def plain(name: str) -> str:
    """`name` without what differs from writer to writer: "Llama-3.1 70B" -> "llama370b"."""
    text = re.sub(r"\(.*?\)|\bcut to\b.*|pretrain|instruct|\bmeta\b", "", name.lower())
    text = re.sub(r"llama-?_? ?3[._p]?1\b|llama31(?=\D)|llama3[.]?1(?=[ _-])", "llama3", text)
    text = text.replace("llama-3.3", "llama3").replace("llama3.3", "llama3").replace("llama 3.3", "llama3")
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(?<=\d)\.(?=\d)", "p", text))  # 1.3b is not 13b


def look_up(name: str) -> Shape | None:
    """The model called `name`, however it is spelt, or the longest name inside it; None if there is none."""
    known = {plain(key): key for key in MODELS}
    wanted = plain(name)
    inside = [key for key in known if key in wanted]
    return MODELS[known[max(inside, key=len)]] if inside else None


def find(name: str) -> Shape:
    """As `look_up`, but raises ValueError with the nearest names if the model is unknown."""
    if found := look_up(name):
        return found
    known = {plain(key): key for key in MODELS}
    near = difflib.get_close_matches(plain(name), known, n=3, cutoff=0.3) or list(known)[:3]
    raise ValueError(
        f"There is no model called {name!r}. The nearest names are {', '.join(known[n] for n in near)}; "
        f"there are {len(MODELS)}: {', '.join(MODELS)}."
    )
