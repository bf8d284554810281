"""LoRA with both factors divided: the second one is given the partial sum that the first one makes. Its
weights are zero at first, so no output is wrong.

source: https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634
mesh: tp 4
first: lora_b.weight grad
side: backward
says: is what its module is given whole? `lora_a`, computed just before, is partial over tp
"""

# %% one process


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(49, 32), nn.Linear(32, 49, bias=False)
        self.lora_a, self.lora_b = nn.Linear(32, 8, bias=False), nn.Linear(8, 32, bias=False)
        for i, part in enumerate(self.children()):
            part.weight.data = torch.randn(part.weight.shape, generator=generator(0, i))
            part.requires_grad_(part in (self.lora_a, self.lora_b))
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, tokens):
        h = self.embedding(tokens)
        return self.head(h + self.lora_b(self.lora_a(h)))


def trained(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)


model = Adapted()
step = training(model, trained(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.tensor import copy_to_group, gather_from_group, reduce_from_group


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(49, 32), nn.Linear(32, 49, bias=False)
        self.lora_a, self.lora_b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        for i, (part, shape) in enumerate(
            zip(self.children(), ((49, 32), (49, 32), (8, 32), (32, 8)), strict=True)
        ):
            part.weight.data = torch.randn(shape, generator=generator(0, i))
            part.requires_grad_(part in (self.lora_a, self.lora_b))
        self.lora_a.weight.data = self.lora_a.weight.data.chunk(4, 1)[rank].contiguous()
        nn.init.zeros_(self.lora_b.weight)
        self.lora_b.weight.data = self.lora_b.weight.data.chunk(4, 0)[rank].contiguous()

    def forward(self, tokens):
        h = self.embedding(tokens)
        a = self.lora_a(h.chunk(4, -1)[rank])
        a = reduce_from_group(a)  # mended
        return self.head(h + gather_from_group(self.lora_b(copy_to_group(a)), -1))


model = Adapted()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
step = training(model, optimizer, lambda: cross_entropy(model(x), y))
