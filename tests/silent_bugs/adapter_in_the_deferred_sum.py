"""The sum of a row-parallel layer is put off so that it overlaps with something else. A LoRA on the layer, whose result
is already complete on every rank, is added before that sum and comes out four times as large.

source: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/6089
mesh: tp 4
first: down output
side: forward
"""

# %% one process
from rankcell.models import initialise


class Adapted(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.base = nn.Linear(n_in, n_out, bias=False)
        self.lora_a, self.lora_b = nn.Linear(n_in, 4, bias=False), nn.Linear(4, n_out, bias=False)

    def forward(self, h):
        return self.base(h) + 2 * self.lora_b(self.lora_a(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(49, 32), nn.Linear(32, 64)
        self.down, self.norm, self.head = Adapted(64, 32), nn.LayerNorm(32), nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(self.norm(h + self.down(F.gelu(self.up(h)))))


model = initialise(Net())
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise
from rankcell.parallel.tensor import ColumnParallelLinear, RowParallelLinear, reduce_from_group


class Adapted(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.base = nn.Linear(n_in, n_out, bias=False)
        self.lora_a, self.lora_b = nn.Linear(n_in, 4, bias=False), nn.Linear(4, n_out, bias=False)

    def forward(self, h):
        part = F.linear(h, self.base.weight)  # to be summed
        adapter = 2 * self.lora_b(self.lora_a(h))
        return reduce_from_group(part + adapter)  # broken
        return reduce_from_group(part) + adapter  # mended


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(49, 32), nn.Linear(32, 64)
        self.down, self.norm, self.head = Adapted(64, 32), nn.LayerNorm(32), nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(self.norm(h + self.down(F.gelu(self.up(h)))))


model = initialise(Net())
model.up = ColumnParallelLinear.from_linear(model.up)
model.down.base.weight = nn.Parameter(model.down.base.weight.detach().chunk(4, 1)[rank].contiguous())
model.down.lora_a = RowParallelLinear.from_linear(model.down.lora_a)
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))
