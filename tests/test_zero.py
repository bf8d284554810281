"""ZeRO's sharded optimizer on real ranks; stages 2 and 3 are in test_fsdp.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from rankcell import models
from rankcell.parallel.shards import FlatLayout
from rankcell.parallel.zero import ShardedOptimizer

pytestmark = pytest.mark.slow


def test_a_layout_cuts_every_number_once():
    shapes = [torch.Size(s) for s in ((3, 5), (7,), (), (0, 4), (2, 2, 2))]
    for n in (1, 2, 4, 7, 50):
        layout = FlatLayout(shapes, n)
        assert layout.length == layout.chunk * n >= 31 > layout.length - n
        buffer = torch.arange(float(layout.length))
        for i, whole in enumerate(layout.views(buffer)):
            pieces = [layout.shard(buffer, r)[layout.parts(r)[i][1]] for r in range(n)]
            assert torch.equal(torch.cat(pieces), whole.reshape(-1))
            assert all(torch.equal(whole.reshape(-1)[layout.parts(r)[i][0]], pieces[r]) for r in range(n))


class Odd(nn.Module):
    """No sizes that ranks divide; a number without dims, a vector of one, a frozen and an unused weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 3, bias=False)
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.unused = nn.Linear(2, 2)
        for part in (self.up, self.down, self.unused):
            models.initialise(part)
        self.up.bias.requires_grad_(False)
        self.double()

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale + self.one


MAKE = {"lr": 1e-2, "weight_decay": 0.1}


def start(model, sharded=True, group=None):
    """An optimizer of two groups of parameters, the second added later, and a schedule."""
    groups, kind = [{"params": list(model.up.parameters()), "lr": 3e-2}], torch.optim.AdamW
    optimizer = (
        ShardedOptimizer(groups, kind, process_group=group, **MAKE) if sharded else kind(groups, **MAKE)
    )
    optimizer.add_param_group({"params": [p for n, p in model.named_parameters() if not n.startswith("up")]})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return optimizer, schedule


def train(model, optimizer, schedule, steps):
    for step in steps:
        x, y = (t.double() for t in models.regression(8, 6, 3, seed=step))

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        schedule.step()


def apart(a, b):
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


def trained(size):
    """Difference from one process after six steps with a schedule, and numbers of states."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2] if size == 2 else None
    dense, model = Odd(), Odd()
    reference, ours = start(dense, sharded=False), start(model, group=group)
    train(dense, *reference, range(6))
    train(model, *ours, range(6))
    assert [g["lr"] for g in ours[0].param_groups] == [g["lr"] for g in reference[0].param_groups]
    return apart(model, dense), sum(s["exp_avg"].numel() for s in ours[0].state.values())


@pytest.mark.parametrize("size", [2, 4])
def test_weights_and_states_equal_one_process(four, size):
    run = four.run(trained, args=(size,))
    assert max(off for off, _ in run.values) < 1e-12
    assert sum(n for _, n in run.values[:size]) == 6 * 7 + 7 * 3 + 1 + 1
    each = [e.nbytes for e in run.ranks[0].events if e.op == "all_gather"][:2]
    assert each == [8 * -(-n // size) for n in (6 * 7 + 7, 7 * 3 + 1 + 1 + 6)]  # frozen and unused ones too
