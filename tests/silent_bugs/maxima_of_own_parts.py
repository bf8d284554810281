"""A cross-entropy over a vocabulary in parts subtracts the largest logit before it takes the exponential. Each rank
subtracts its own largest one, and the sums that they add up are not of the same numbers.

source: https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/394
mesh: tp 4
first: head grad_output | the model grad_output
side: backward
"""

# %% one process
model = gpt(48)
nn.init.normal_(model.head.weight, std=0.2, generator=generator(0, "head"))
step = training(model, adam(model), lambda: cross_entropy(model(x % 48), y % 48))

# %% ranks
from rankcell.parallel.tensor import ColumnParallelLinear


class VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)  # mended
        shifted = logits - largest[:, None]
        total = shifted.exp().sum(-1)
        dist.all_reduce(total)
        mine = targets // 12 == rank
        own = F.one_hot(targets % 12, 12) * mine[:, None]
        found = (shifted * own).sum(-1)
        dist.all_reduce(found)
        ctx.save_for_backward(shifted.exp() / total[:, None], own)
        return (total.log() - found).mean()

    @staticmethod
    def backward(ctx, grad):
        probabilities, own = ctx.saved_tensors
        return grad * (probabilities - own) / len(own), None


model = gpt(48)
nn.init.normal_(model.head.weight, std=0.2, generator=generator(0, "head"))
model.head = ColumnParallelLinear.from_linear(model.head)
step = training(
    model, adam(model), lambda: VocabularyLoss.apply(model(x % 48).flatten(0, 1), (y % 48).flatten())
)
