"""Each rank has a range of the vocabulary. It masks tokens before its range and after it, but takes the end of the
range to be inside: the first token of the next rank is looked up twice, here as the last row.

source: https://github.com/deepseek-ai/DeepSeek-V3/issues/298
mesh: tp 4
first: token_embedding output
side: forward
says: 60 of 64 rows are right, and rows
"""

# %% one process
model = gpt(48)
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x % 48), y % 48))

# %% ranks


class Sum(torch.autograd.Function):
    """All ranks go on with the sum in the same way, so each one's gradient is already that of its summand."""

    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad


class Range(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.start, self.end = 12 * rank, 12 * (rank + 1)
        self.weight = nn.Parameter(whole.weight.detach()[self.start : self.end].clone())

    def forward(self, tokens):
        others = (tokens < self.start) | (tokens > self.end)  # broken
        others = (tokens < self.start) | (tokens >= self.end)  # mended
        rows = (tokens - self.start).clamp(0, self.end - self.start - 1)
        return Sum.apply(F.embedding(rows, self.weight).masked_fill(others[..., None], 0.0))


model = gpt(48)
model.token_embedding = Range(model.token_embedding)
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x % 48), y % 48))
