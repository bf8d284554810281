"""Ulysses with fewer heads in keys and values than in queries. Each is filled up with zeros to a number that the ranks
divide: 12 query heads stay 12, 3 key heads become 4. So 3 and no longer 4 query heads share one of the keys.

source: https://github.com/vllm-project/vllm-omni/pull/5716
mesh: cp 4
first: core output
side: forward
says: On dim 2 it is right at places 0-2, 4, 5, 8, wrong at places 3, 6, 7, 9-11
"""


class Core(nn.Module):
    """Attention of all positions, tensors `(batch, position, head, feature)`; several query heads share a key."""

    def forward(self, q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Net(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, n, bias=False) for n in (48, 12, 12))
        self.core, self.out = core, nn.Linear(48, 3, bias=False)

    def forward(self, x):
        return self.out(
            self.core(*(w(x).unflatten(-1, (-1, 4)) for w in (self.q, self.k, self.v))).flatten(-2)
        )


pictures = torch.randn(2, 16, 24, generator=generator(0, "pictures")).double()
wanted = pictures.cumsum(1)[..., :3]
torch.manual_seed(0)

# %% one process
model = Net(Core()).double()
step = training(model, adam(model), lambda: F.mse_loss(model(pictures), wanted))


# %% ranks
class AllToAll(torch.autograd.Function):
    """Cuts dim `scatter` over the ranks, and puts their parts together on dim `gather`."""

    @staticmethod
    def forward(ctx, x, scatter, gather):
        ctx.dims = scatter, gather
        give = torch.stack(x.chunk(4, scatter)).contiguous()
        take = torch.empty_like(give)
        dist.all_to_all_single(take, give)
        return torch.cat(take.unbind(0), gather)

    @staticmethod
    def backward(ctx, grad):
        scatter, gather = ctx.dims
        return AllToAll.apply(grad, gather, scatter), None, None


class Ulysses(Core):
    """Each rank has a part of the positions; inside, all positions of a part of the heads."""

    def forward(self, q, k, v):
        heads, shared = q.shape[2], k.shape[2]
        filled = -(-shared // 4) * 4
        q_filled = -(-heads // 4) * 4  # broken
        q_filled = heads // shared * filled  # mended
        q = F.pad(q, (0, 0, 0, q_filled - heads))
        k, v = (F.pad(t, (0, 0, 0, filled - shared)) for t in (k, v))
        q, k, v = (AllToAll.apply(t, 2, 1) for t in (q, k, v))
        return AllToAll.apply(super().forward(q, k, v), 1, 2)[:, :, :heads]


model = Net(Ulysses()).double()
mine, own = (t.chunk(4, dim=1)[rank] for t in (pictures, wanted))
step = training(model, adam(model), lambda: F.mse_loss(model(mine), own), average)
