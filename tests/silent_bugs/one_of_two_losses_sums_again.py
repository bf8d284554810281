"""Two branches use one output. What one of them sends back is summed over the ranks, though each has rows of its own.

source: https://github.com/NVIDIA-NeMo/Automodel/issues/3776
first: body grad_output
side: backward
says: `left` and `right` are given it, and each sends back its part of this gradient
"""

numbers = torch.randn(8, 16, generator=generator(0, "numbers"))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 49), nn.Linear(16, 49)

    def forward(self, x):
        h = self.body(x)
        return self.left(h) + self.right(h)


# %% one process
model = Branches()
step = training(model, adam(model), lambda: cross_entropy(model(numbers), y[:, 0]))

# %% ranks


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)  # broken
        return gradient


class Right(nn.Linear):
    def forward(self, x):
        return super().forward(Again.apply(x))


model = Branches()
model.right.__class__ = Right
mine = slice(2 * rank, 2 * rank + 2)
step = training(model, adam(model), lambda: cross_entropy(model(numbers[mine]), y[mine, 0]), average)
