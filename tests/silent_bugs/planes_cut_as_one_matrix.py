"""Gate and up are the two planes of one weight; cut after both were laid into one matrix, some ranks get gates only.

source: https://github.com/NVIDIA/Megatron-LM/issues/360
mesh: tp 4
first: gate_up output
side: forward
says: `gate_up.weight` is cut along no single dim (sharded, flat): is what uses it cut alike?
"""


class GateUp(nn.Module):
    enter = staticmethod(lambda h: h)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 128, 64) / 8)

    def forward(self, h):
        return F.linear(self.enter(h), self.weight.flatten(0, 1)).unflatten(-1, (2, -1))


class Down(nn.Linear):
    leave = staticmethod(lambda h: h)

    def forward(self, h):
        return self.leave(super().forward(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gate_up = nn.Embedding(49, 64), GateUp()
        self.down, self.head = Down(128, 64, bias=False), nn.Linear(64, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        gate, up = self.gate_up(h).unbind(-2)
        return self.head(h + self.down(F.silu(gate) * up))


torch.manual_seed(0)
model = Net()

# %% one process
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.tensor import copy_to_group, reduce_from_group

GateUp.enter, Down.leave = staticmethod(copy_to_group), staticmethod(reduce_from_group)
mine = model.gate_up.weight.flatten(0, 1).chunk(4)[rank].unflatten(0, (2, -1))  # broken
mine = model.gate_up.weight.chunk(4, 1)[rank]  # mended
model.gate_up.weight = nn.Parameter(mine.detach().clone())
model.down.weight = nn.Parameter(model.down.weight.chunk(4, 1)[rank].detach().clone())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
