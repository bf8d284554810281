"""What a transformer is made of: its sizes, its parameters, its floating-point operations per token. Counts are exact
for the weight matrices and leave out biases and the norms (less than 0.1 % of a model of a billion parameters).
"""

import csv
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
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
        return self.heads * (self.head_dim + (self.head_dim == 0) * (self.hidden / self.heads))

    @property
    def kv_width(self) -> Any:
        """Elements of all key heads of a token together; the values are as many."""
        return self.width * self.kv_heads / self.heads

    @property
    def matrices(self) -> Any:
        """How many matrices an MLP has: three with a gate, else two."""
        return 2 + 1 * self.gated

    @property
    def embedding_params(self) -> Any:
        """Parameters of one table of the vocabulary: the embedding, or the head that is as large."""
        return self.vocab * self.hidden

    @property
    def dense_layer_params(self) -> Any:
        """Parameters of the mean layer without its experts, but with the shared ones and the router."""
        share = self.moe_layers / self.layers
        dense = self.matrices * self.hidden * self.ffn
        shared = self.hidden * (self.matrices * self.shared_ffn + self.experts)
        heads = self.hidden * (2 * self.width + 2 * self.kv_width)  # queries and output, keys and values
        attention = self.attention + (self.attention == 0) * heads
        return attention + (1 - share) * dense + share * shared

    @property
    def expert_layer_params(self) -> Any:
        """Parameters of the experts of the mean layer: what expert parallelism divides."""
        return self.moe_layers / self.layers * (self.experts * self.matrices * self.hidden * self.expert_ffn)

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

        6 per parameter that the token meets, and 6 s w per layer for scores and values: half of the square that
        Narayanan et al. count, https://arxiv.org/abs/2104.04473, appendix (2021).
        """
        return 6 * self.active_params + 6 * self.layers * seq * self.width


def table(name: str) -> list[dict[str, str]]:
    """The rows of a table of this package; lines that begin with # are about it."""
    text = files(__package__).joinpath(name).read_text("utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def _shape(name: str, gated: str, tied: str, **numbers: str) -> Shape:
    return Shape(name, gated=bool(gated), tied=bool(tied), **{k: int(n or 0) for k, n in numbers.items()})


MODELS = {row["name"]: _shape(**row) for row in table("models.csv")}


def find(name: str) -> Shape:
    """The model called `name`. Raises ValueError with the nearest names if it is unknown."""
    return look_up(name, MODELS, "model")


def look_up(name: str, known: Mapping[str, Any], what: str) -> Any:
    """The entry of `known` called `name`, in whatever case; ValueError with the nearest names if there is none."""
    lower = {key.lower(): key for key in known}
    if name.lower() in lower:
        return known[lower[name.lower()]]
    near = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.2) or list(lower)[:3]
    nearest = ", ".join(lower[key] for key in near)
    raise ValueError(f"There is no {what} called {name!r}. The nearest are {nearest}; there are {', '.join(known)}.")
