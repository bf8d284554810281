"""`local_map` runs an MLP whose hidden units are divided. It is told how the input lies, not how its gradient does, and
takes the gradients for copies: each rank goes on with what its own hidden units gave.

source: https://github.com/pytorch/torchtitan/pull/4054
mesh: tp 4
first: blocks.1.mlp_norm grad_output
side: backward
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
placements = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1), "down.bias": Replicate()}


def hidden(h, up, bias, down):
    return F.gelu(h @ up.T + bias) @ down.T


class MLP(nn.Module):
    """The MLP of a dense block with its weights as DTensors, under the same names."""

    def __init__(self, dense):
        super().__init__()
        self.up, self.down = nn.Module(), nn.Module()
        for name, placement in placements.items():
            layer, kind = name.split(".")
            whole = getattr(getattr(dense, layer), kind).detach()
            getattr(self, layer).register_parameter(
                kind, nn.Parameter(distribute_tensor(whole, mesh, [placement]))
            )
        columns, rows, copies = (Shard(0),), (Shard(1),), (Replicate(),)
        self.run = local_map(
            hidden,
            out_placements=[Partial()],
            in_placements=(copies, columns, columns, rows),
            in_grad_placements=((Partial(),), columns, columns, rows),  # mended
            device_mesh=mesh,
        )

    def forward(self, h):
        h = DTensor.from_local(h, mesh, [Replicate()])
        y = self.run(h, self.up.weight, self.up.bias, self.down.weight).redistribute(mesh, [Replicate()])
        return (y + self.down.bias).to_local()


model = gpt()
for block in model.blocks:
    block.mlp = MLP(block.mlp)
step = training(model, adam(model, foreach=False), lambda: cross_entropy(model(x), y))
