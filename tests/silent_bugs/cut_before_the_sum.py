"""The rows of the embedding are divided over data parallel ranks and gathered to look tokens up. Each rank finds a
gradient for all rows; the backward takes its own rows first and sums then, so that different words are added up.

source: https://github.com/openxla/xla/issues/42481
mesh: dp 4
first: token_embedding.weight grad
side: backward
"""

# %% one process
model = gpt(48)
step = training(model, adam(model), lambda: cross_entropy(model(x % 48), y % 48))

# %% ranks


class LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, tokens):
        parts = [torch.empty_like(weight) for _ in range(4)]
        dist.all_gather(parts, weight.detach())
        ctx.save_for_backward(tokens)
        return torch.cat(parts)[tokens]

    @staticmethod
    def backward(ctx, grad):
        (tokens,) = ctx.saved_tensors
        rows = grad.new_zeros(48, 32).index_add_(0, tokens.flatten(), grad.flatten(0, 1))
        rows = rows[12 * rank : 12 * rank + 12].contiguous()  # broken
        dist.all_reduce(rows)
        rows = rows[12 * rank : 12 * rank + 12].contiguous()  # mended
        return rows / 4, None


class ShardedEmbedding(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.weight = nn.Parameter(dense.weight.detach().chunk(4)[rank].clone())

    def forward(self, tokens):
        return LookUp.apply(self.weight, tokens)


model = gpt(48)
model.token_embedding = ShardedEmbedding(model.token_embedding)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4] % 48), y[rank::4] % 48)
    loss.backward()
    for name, parameter in model.named_parameters():
        if name != "token_embedding.weight":
            dist.all_reduce(parameter.grad)
            parameter.grad /= 4
    optimizer.step()
    return loss.item()
