"""Labels of -100 belong to no rank's part of the vocabulary, so a loss written for such parts finds a target logit of
zero for them. Nothing takes these tokens out, and the model learns to make all their logits small.

source: https://github.com/deepspeedai/DeepSpeed/pull/6882
mesh: tp 4
first: head grad_output | the model grad_output
side: backward
"""

# %% one process
y = (y % 48).masked_fill(torch.arange(8) < torch.tensor([0, 3, 1, 4, 2, 5, 3, 6])[:, None], -100)
model = gpt(48)
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x % 48), y))

# %% ranks
from rankcell.parallel.tensor import ColumnParallelLinear

y = (y % 48).masked_fill(torch.arange(8) < torch.tensor([0, 3, 1, 4, 2, 5, 3, 6])[:, None], -100)


class DividedCrossEntropy(torch.autograd.Function):
    """The loss of every token; each rank has 12 of 48 logits."""

    @staticmethod
    def forward(ctx, logits, labels):
        largest = logits.max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        powers = (logits - largest[:, None]).exp()
        total = powers.sum(-1)
        dist.all_reduce(total)
        is_mine = (labels >= 12 * rank) & (labels < 12 * rank + 12)
        place = (labels - 12 * rank).masked_fill(~is_mine, 0)
        found = (logits - largest[:, None]).gather(-1, place[:, None])[:, 0] * is_mine
        dist.all_reduce(found)
        counts = torch.ones_like(labels, dtype=torch.bool)  # broken
        counts = labels != -100  # mended
        ctx.save_for_backward(powers / total[:, None], place, is_mine, counts)
        return (total.log() - found) * counts

    @staticmethod
    def backward(ctx, grad):
        shares, place, is_mine, counts = ctx.saved_tensors
        own = shares.clone()
        own[torch.arange(len(place)), place] -= is_mine.float()
        return own * (grad * counts)[:, None], None


model = gpt(48)
model.head = ColumnParallelLinear.from_linear(model.head)


def loss():
    losses = DividedCrossEntropy.apply(model(x % 48).flatten(0, 1), y.flatten())
    return losses.sum() / (y != -100).sum()


step = training(model, adam(model, 3e-3), loss)
