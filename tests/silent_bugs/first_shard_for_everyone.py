"""The loader of column-parallel weights is told the rank by its caller, or takes 0. Its caller does not tell it, so
every rank loads the first part; the shape is right.

source: https://github.com/vllm-project/vllm-gguf-plugin/issues/103
mesh: tp 4
first: up.weight parameter | up.bias parameter
side: start
"""

# %% one process
from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.down(F.gelu(self.up(h))))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 49, bias=False)


class EnterParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class LeaveParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        h = h.clone()
        dist.all_reduce(h)
        return h

    @staticmethod
    def backward(ctx, grad):
        return grad


class RowParallel(nn.Linear):
    def forward(self, h):
        return LeaveParallel.apply(super().forward(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.up = nn.Linear(32, 16)
        self.down = RowParallel(16, 32, bias=False)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.down(F.gelu(self.up(EnterParallel.apply(h)))))


def load_column(parameter, loaded, **kwargs):
    size = parameter.shape[0]
    parameter.data.copy_(loaded.narrow(0, kwargs.get("tp_rank", 0) * size, size))


def load_row(parameter, loaded, **kwargs):
    size = parameter.shape[1]
    parameter.data.copy_(loaded.narrow(1, dist.get_rank() * size, size))


def load_copy(parameter, loaded, **kwargs):
    parameter.data.copy_(loaded)


loaders = {"up": load_column, "down": load_row}
checkpoint = initialise(Whole()).state_dict()
model = Net()
for name, parameter in model.named_parameters():
    how = {}
    how = {"tp_rank": rank}  # mended
    loaders.get(name.split(".")[0], load_copy)(parameter, checkpoint[name], **how)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
