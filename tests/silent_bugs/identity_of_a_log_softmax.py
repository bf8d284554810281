"""In `loss_parallel` the backward of every log_softmax is the identity, also of one that no cross-entropy takes.

source: https://github.com/pytorch/pytorch/issues/190746
mesh: tp 4
first: head grad_output
side: backward
says: the forward is right: look at the loss
"""


# %% one process
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mlp, self.norm = nn.Embedding(48, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.head = nn.Linear(32, 48, bias=False)

    def forward(self, t):
        h = self.embed(t)
        return self.head(self.norm(h + F.gelu(self.mlp(h))))


torch.manual_seed(0)
model = Net()
teacher = torch.randn(64, 48, generator=generator(0, "t")).softmax(-1)


def loss():
    logits = model(x % 48).flatten(0, 1)
    return (
        F.cross_entropy(logits, (y % 48).flatten()) - 0.5 * (teacher * F.log_softmax(logits, -1)).sum() / 64
    )


step = training(model, adam(model), loss)

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mlp, self.norm = nn.Embedding(48, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.head = nn.Linear(32, 48, bias=False)

    def forward(self, t):
        h = self.embed(t)
        return self.head(self.norm(h + F.gelu(self.mlp(h))).flatten(0, 1))


torch.manual_seed(0)
mesh = init_device_mesh("cpu", (4,))
model = Net()
parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
teacher = distribute_tensor(torch.randn(64, 48, generator=generator(0, "t")).softmax(-1), mesh, [Shard(1)])
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)


def step():
    optimizer.zero_grad()
    with loss_parallel():
        logits = model(x % 48)
        hard = F.cross_entropy(logits, distribute_tensor((y % 48).flatten(), mesh, [Replicate()]))
        log_p = F.log_softmax(logits, -1)  # broken
        log_p = logits - logits.logsumexp(-1, keepdim=True)  # mended
        loss = hard - 0.5 * (teacher * log_p).sum() / 64
        loss.full_tensor().backward()
    optimizer.step()
    return loss.full_tensor().item()
