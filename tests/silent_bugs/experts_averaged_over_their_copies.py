"""Experts: their gradients are divided by the ranks that hold a copy, and each of these has tokens of two ranks.

source: https://github.com/deepspeedai/DeepSpeed/issues/6545
mesh: edp 2, ep 2
first: moe.experts.down grad
side: backward
says: 2 times the dense gradient on ranks 0-3: a sum over edp or ep where a mean is meant
"""

# %% one process
from rankcell.models import regression

inputs, wanted = regression(32)


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 12, 6) / 3)
        self.down = nn.Parameter(torch.randn(count, 6, 12) / 3)

    def forward(self, tokens, scores):
        hidden = torch.tanh(torch.einsum("td,ehd->teh", tokens, self.up))
        return torch.einsum("teh,edh,te->td", hidden, self.down, scores)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), Experts(2)

    def forward(self, tokens):
        return tokens + self.experts(tokens, self.gate(tokens).softmax(-1))


torch.manual_seed(0)
model = nn.Sequential()
model.moe, model.head = MoE(), nn.Linear(6, wanted.shape[-1])
step = training(model, adam(model), lambda: F.mse_loss(model(inputs), wanted))

# %% ranks
from rankcell.models import regression

inputs, wanted = (t.chunk(4)[rank] for t in regression(32))
low, high, even, odd = (dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]))
ep, edp = (low if rank < 2 else high), (odd if rank % 2 else even)
mine = rank % 2


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own.contiguous(), group=ep)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ep)
        return total.chunk(2)[mine]


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, made):
        total = made.clone()
        dist.all_reduce(total, group=ep)
        return total.chunk(2)[mine]

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(parts, grad.contiguous(), group=ep)
        return torch.cat(parts)


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter((torch.randn(count, 12, 6) / 3)[mine : mine + 1].clone())
        self.down = nn.Parameter((torch.randn(count, 6, 12) / 3)[mine : mine + 1].clone())

    def forward(self, tokens, scores):
        hidden = torch.tanh(torch.einsum("td,ehd->teh", tokens, self.up))
        return torch.einsum("teh,edh,te->td", hidden, self.down, scores)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), Experts(2)

    def forward(self, tokens):
        scores = Dispatch.apply(self.gate(tokens).softmax(-1))[:, mine : mine + 1]
        return tokens + Combine.apply(self.experts(Dispatch.apply(tokens), scores))


torch.manual_seed(0)
model = nn.Sequential()
model.moe, model.head = MoE(), nn.Linear(6, wanted.shape[-1])
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), wanted)
    loss.backward()
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad, group=edp if "experts" in name else None)
        p.grad /= 2 if "experts" in name else 4  # broken
        p.grad /= 4  # mended
    optimizer.step()
    return loss.item()
