"""Each rank scales its columns of a LoRA's first matrix by how many inputs it has, which is a quarter of them.

The second matrix begins as zeros, so the outputs of the first step do not show it.

source: https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5840
mesh: tp 4
first: lora_a.weight parameter
side: start
"""


# %% one process
class Net(nn.Module):
    """A frozen MLP; an adapter beside its second matrix learns, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32, bias=False)
        self.head = nn.Linear(32, 49, bias=False)
        self.requires_grad_(False)
        self.head.requires_grad_(True)
        self.lora_a = nn.Linear(128, 4, bias=False)
        self.lora_b = nn.Linear(4, 32, bias=False)
        with torch.no_grad():
            drawn = torch.randn(4, 128, generator=generator(0, "a"))
            self.lora_a.weight.copy_(drawn * (2 / (128 + 4)) ** 0.5)
            self.lora_b.weight.zero_()

    def forward(self, tokens):
        h = self.embed(tokens)
        inner = F.gelu(self.up(h))
        return self.head(h + self.down(inner) + 2 * self.lora_b(self.lora_a(inner)))


torch.manual_seed(0)
model = Net()
learning = [p for p in model.parameters() if p.requires_grad]
step = training(model, torch.optim.AdamW(learning, 3e-3), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.tensor import copy_to_group, reduce_from_group


class Columns(nn.Module):
    """This rank's outputs of a linear layer."""

    def __init__(self, dense):
        super().__init__()
        self.weight = nn.Parameter(dense.weight.detach().chunk(4)[rank].clone())
        self.bias = nn.Parameter(dense.bias.detach().chunk(4)[rank].clone())

    def forward(self, h):
        return F.linear(copy_to_group(h), self.weight, self.bias)


class Rows(nn.Module):
    """A linear layer of this rank's inputs and, summed, of the others'."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, h):
        return reduce_from_group(F.linear(h, self.weight))


class Net(nn.Module):
    """A frozen MLP; an adapter beside its second matrix learns, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.up = Columns(nn.Linear(32, 128))
        self.down = Rows(nn.Linear(128, 32, bias=False).weight.chunk(4, 1)[rank])
        self.head = nn.Linear(32, 49, bias=False)
        self.requires_grad_(False)
        self.head.requires_grad_(True)
        drawn = torch.randn(4, 128, generator=generator(0, "a")).chunk(4, 1)[rank]
        inputs = drawn.shape[1]  # broken
        inputs = 128  # mended
        self.lora_a = Rows(drawn * (2 / (inputs + 4)) ** 0.5)
        self.lora_b = nn.Linear(4, 32, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, tokens):
        h = self.embed(tokens)
        inner = F.gelu(self.up(h))
        return self.head(h + self.down(inner) + 2 * self.lora_b(self.lora_a(inner)))


torch.manual_seed(0)
model = Net()
learning = [p for p in model.parameters() if p.requires_grad]
step = training(model, torch.optim.AdamW(learning, 3e-3), lambda: cross_entropy(model(x), y))
