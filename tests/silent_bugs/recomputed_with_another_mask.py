"""Blocks are computed again in the backward to save memory, and without the random state of the forward: dropout draws
another mask. All ranks draw the same one, and in one process the same seed gives the same first mask.

The dropout acts on what every rank has whole, from one seed for all, so it is the dense model's number by number.

source: https://github.com/allenai/OLMo-core/pull/828
mesh: tp 4
first: blocks.1.down grad_output
side: backward
"""

# %% one process
from rankcell.models import initialise


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(32), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, h):
        return h + self.dropout(self.down(F.gelu(self.up(self.norm(h)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(49, 32), nn.Linear(32, 49)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


model = initialise(Net())
optimizer = adam(model, 3e-3)
done = 0


def step():
    global done
    torch.manual_seed(done)
    done += 1
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


# %% ranks
from torch.utils.checkpoint import checkpoint

from rankcell.models import initialise
from rankcell.parallel.tensor import ColumnParallelLinear, RowParallelLinear

keep = False  # broken
keep = True  # mended


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(32), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, h):
        return h + self.dropout(self.down(F.gelu(self.up(self.norm(h)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(49, 32), nn.Linear(32, 49)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False, preserve_rng_state=keep)
        return self.head(h)


model = initialise(Net())
for block in model.blocks:
    block.up = ColumnParallelLinear.from_linear(block.up)
    block.down = RowParallelLinear.from_linear(block.down)
optimizer = adam(model, 3e-3)
done = 0


def step():
    global done
    torch.manual_seed(done)
    done += 1
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()
