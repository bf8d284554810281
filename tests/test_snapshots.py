"""A training that goes on from a snapshot gives the bits of one that never stopped."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from rankcell.cluster import snapshots
from rankcell.models import MLP, regression


class Training:
    """Dropout, Adam, a scheduler, shuffled batches and Python's random numbers, on one process."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        random.seed(seed)
        model = torch.nn.Sequential(torch.nn.Dropout(0.3), MLP(6, 8, 3, dtype=torch.float64))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        x, y = (part.double() for part in regression(40))
        sampler = snapshots.Sampler(TensorDataset(x, y), num_replicas=1, rank=0)
        self.loader = DataLoader(sampler.dataset, 4, sampler=sampler, generator=torch.Generator())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
        self.parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
        self.step, self.losses = 0, []

    def run(self, until):
        model, optimizer, scheduler, sampler = self.parts.values()
        while self.step < until:
            sampler.set_epoch(self.step // 10)
            for x, y in self.loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y) * random.random()
                loss.backward()
                optimizer.step()
                scheduler.step()
                sampler.seen += len(x)
                self.step += 1
                self.losses.append(loss.item())
                if self.step == until:
                    break
        return self.losses


@pytest.mark.parametrize(
    ("stop", "lacks"),
    [
        (1, ""),
        (10, ""),
        (24, ""),
        *((13, name) for name in ("", "model", "optimizer", "scheduler", "sampler")),
    ],
)
def test_goes_on_to_the_same_bits_with_every_part(tmp_path, stop, lacks):
    through, first = Training().run(25), Training()
    assert snapshots.load(tmp_path / "snapshot.pt", **first.parts) == 0  # there is none
    first.run(stop)
    snapshots.save(tmp_path / "snapshot.pt", stop, **first.parts)
    second = Training(seed=99)
    parts = {name: part for name, part in second.parts.items() if name != lacks}
    second.step = snapshots.load(tmp_path / "snapshot.pt", **parts)
    assert (first.losses + second.run(25) == through) == (not lacks)


def test_other_ranks_deal_what_is_left_of_the_epoch():
    data, done = range(24), []
    two = [snapshots.Sampler(data, num_replicas=2, rank=r) for r in range(2)]
    for sampler in two:
        sampler.set_epoch(3)
        done += list(sampler)[:5]
        sampler.seen += 5
    one = snapshots.Sampler(data, num_replicas=1, rank=0)
    one.load_state_dict(two[0].state_dict())
    assert sorted(done + list(one)) == list(data)
    one.set_epoch(3)
    assert len(list(one)) == 14
    one.set_epoch(4)
    assert len(list(one)) == 24


def test_a_write_that_fails_leaves_the_old_snapshot(tmp_path, monkeypatch):
    path, training = tmp_path / "snapshot.pt", Training()
    snapshots.save(path, 1, model=training.parts["model"])
    with pytest.raises(KeyError, match=r"The snapshot holds model, but not optimizer, sampler, scheduler."):
        snapshots.load(path, **training.parts)

    def half(content, file):
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match=r"^The snapshot was not saved: No space left on device$"):
        snapshots.save(path, 2, **training.parts)
    assert snapshots.load(path, model=training.parts["model"]) == 1


ON_RANKS = """
from rankcell.cluster import snapshots
from rankcell.parallel.ddp import DDP
torch.manual_seed(rank)
snapshots.save(path, 7, model=DDP(torch.nn.Linear(2, 1)))
before = torch.rand(2).tolist()
torch.manual_seed(0)
step, same = snapshots.load(path, model=torch.nn.Linear(2, 1)), before == torch.rand(2).tolist()
try:
    snapshots.save(path + "/missing/snapshot.pt", 1, model=torch.nn.Linear(2, 1))
except OSError as error:
    said = str(error)
step, same, said, before
"""


def test_ranks_have_their_own_random_state_back_and_hear_of_failures(four, tmp_path):
    values = four.run(ON_RANKS, push={"path": str(tmp_path / "snapshot.pt")}).values
    assert [value[:2] for value in values] == [(7, True)] * 4
    assert len({value[2] for value in values}) == 1 and "The snapshot was not saved: " in values[0][2]
    assert len({tuple(value[3]) for value in values}) == 4
    # one process reads what wrapped ranks wrote
    model, before = torch.nn.Linear(2, 1), torch.get_rng_state()
    assert snapshots.load(tmp_path / "snapshot.pt", model=model) == 7
    assert torch.equal(torch.get_rng_state(), before)  # the states of four ranks are not that of one
