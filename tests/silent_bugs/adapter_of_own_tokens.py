"""LoRA on a row-parallel layer: the first factor is divided like the layer and its result scattered over the sequence,
the second is a copy on every rank and sees that rank's tokens only. Its gradients are not added up.

source: https://github.com/modelscope/mcore-bridge/pull/173
mesh: tp 4
first: blocks.1.attention.output.lora_b.weight grad
side: backward
"""

# %% one process


class LoRA(nn.Module):
    def __init__(self, base, number):
        super().__init__()
        self.base = base
        self.lora_a, self.lora_b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        for i, layer in enumerate((self.lora_a, self.lora_b)):
            layer.weight.data = torch.randn(layer.weight.shape, generator=generator(0, number, i)) / 6

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


model = gpt().requires_grad_(False)
for number, block in enumerate(model.blocks):
    block.attention.output = LoRA(block.attention.output, number)
trained = [p for p in model.parameters() if p.requires_grad]
step = training(model, torch.optim.AdamW(trained, 1e-2), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.tensor import reduce_scatter
from rankcell.parallel.transformer import tensor_parallel


class LoRA(nn.Module):
    def __init__(self, base, number):
        super().__init__()
        self.base = base
        self.lora_a, self.lora_b = nn.Linear(8, 4, bias=False), nn.Linear(4, 32, bias=False)
        a, b = (
            torch.randn(s, generator=generator(0, number, i)) / 6 for i, s in enumerate(((4, 32), (32, 4)))
        )
        self.lora_a.weight.data, self.lora_b.weight.data = a.chunk(4, 1)[rank].contiguous(), b

    def forward(self, x):
        return self.base(x) + self.lora_b(reduce_scatter(self.lora_a(x)))


model = tensor_parallel(gpt().requires_grad_(False), sequence_parallel=True)
for number, block in enumerate(model.blocks):
    block.attention.output = LoRA(block.attention.output, number)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, 1e-2)


def step():
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    for block in model.blocks:  # mended
        dist.all_reduce(block.attention.output.lora_b.weight.grad)  # mended
    optimizer.step()
    return loss.item()
