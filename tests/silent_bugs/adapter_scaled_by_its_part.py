"""The two matrices of a LoRA are cut along its rank. The scale alpha / r is computed from the shape of the matrix that
this process holds, so with four processes the adapter counts four times.

source: https://github.com/predibase/lorax/pull/324
mesh: tp 4
first: up output
side: forward
says: what is too much in it is 3 times what `up.lora_b` gives
"""

# %% one process
from rankcell.models import initialise


class LoRALinear(nn.Linear):
    def __init__(self, n_in, n_out, r=8, alpha=8):
        super().__init__(n_in, n_out, bias=False)
        self.alpha = alpha
        self.lora_a, self.lora_b = nn.Linear(n_in, r, bias=False), nn.Linear(r, n_out, bias=False)

    def forward(self, h):
        return super().forward(h) + self.alpha / self.lora_a.weight.shape[0] * self.lora_b(self.lora_a(h))


model = nn.Sequential()
for name, part in {
    "embed": nn.Embedding(49, 32),
    "up": LoRALinear(32, 64),
    "act": nn.GELU(),
    "head": nn.Linear(64, 49),
}.items():
    model.add_module(name, part)
initialise(model)
model.up.weight.requires_grad_(False)
step = training(model, adam(model, 1e-2), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise
from rankcell.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class LoRALinear(nn.Linear):
    def __init__(self, n_in, n_out, r=8, alpha=8):
        super().__init__(n_in, n_out, bias=False)
        self.alpha, self.r = alpha, r
        self.lora_a, self.lora_b = nn.Linear(n_in, r, bias=False), nn.Linear(r, n_out, bias=False)

    def forward(self, h):
        scale = self.alpha / self.lora_a.weight.shape[0]  # broken
        scale = self.alpha / self.r  # mended
        return super().forward(h) + scale * self.lora_b(self.lora_a(h))


model = nn.Sequential()
for name, part in {
    "embed": nn.Embedding(49, 32),
    "up": LoRALinear(32, 64),
    "act": nn.GELU(),
    "head": nn.Linear(64, 49),
}.items():
    model.add_module(name, part)
initialise(model)
model.up.weight.requires_grad_(False)
model.up.lora_a = ColumnParallelLinear.from_linear(model.up.lora_a)
model.up.lora_b = RowParallelLinear.from_linear(model.up.lora_b)
step = training(model, adam(model, 1e-2), lambda: cross_entropy(model(x), y))
