"""A training that goes on from a snapshot gives the bits of one that never stopped."""

import io
import os
import random
import time

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
        self.model = torch.nn.Sequential(torch.nn.Dropout(0.3), MLP(6, 8, 3, dtype=torch.float64))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.8)
        x, y = regression(40)
        data = TensorDataset(x.double(), y.double())
        self.sampler = snapshots.Sampler(data, num_replicas=1, rank=0)
        self.loader = DataLoader(data, batch_size=4, sampler=self.sampler, generator=torch.Generator())
        self.step = 0
        self.losses = []

    @property
    def parts(self):
        names = ("model", "optimizer", "scheduler", "sampler")
        return {name: getattr(self, name) for name in names}

    def run(self, until):
        while self.step < until:
            self.sampler.set_epoch(self.step // 10)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(self.model(x), y) * random.random()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.sampler.seen += len(x)
                self.step += 1
                self.losses.append(loss.item())
                if self.step == until:
                    break
        return self.losses


@pytest.mark.parametrize("stop", [1, 10, 13, 24])
def test_goes_on_to_the_same_bits(tmp_path, stop):
    through = Training().run(25)
    first = Training()
    first.run(stop)
    snapshots.save(tmp_path / "snapshot.pt", stop, **first.parts)
    second = Training(seed=99)
    second.step = snapshots.load(tmp_path / "snapshot.pt", **second.parts)
    assert first.losses + second.run(25) == through


@pytest.mark.parametrize("lacks", ["model", "optimizer", "scheduler", "sampler"])
def test_every_part_is_needed(tmp_path, lacks):
    """Else the test above would prove little."""
    through = Training().run(25)
    first = Training()
    first.run(13)
    snapshots.save(tmp_path / "snapshot.pt", 13, **first.parts)
    second = Training(seed=99)
    parts = {name: part for name, part in second.parts.items() if name != lacks}
    second.step = snapshots.load(tmp_path / "snapshot.pt", **parts)
    assert first.losses + second.run(25) != through


def test_other_ranks_deal_what_is_left_of_the_epoch():
    data = range(24)
    two = [snapshots.Sampler(data, num_replicas=2, rank=r) for r in range(2)]
    done = []
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


def test_no_snapshot_is_step_0(tmp_path):
    assert snapshots.load(tmp_path / "snapshot.pt", **Training().parts) == 0


def test_a_write_that_fails_leaves_the_old_snapshot(tmp_path, monkeypatch):
    path, training = tmp_path / "snapshot.pt", Training()
    snapshots.save(path, 1, **training.parts)

    def half(content, file):
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError) as error:
        snapshots.save(path, 2, **training.parts)
    assert str(error.value) == "The snapshot was not saved: No space left on device"
    assert snapshots.load(path, **training.parts) == 1


def test_watching_sees_what_becomes_of_the_old_file(tmp_path):
    path, new = tmp_path / "snapshot.pt", tmp_path / "snapshot.pt.new"
    training = Training()
    with snapshots.watching(path, seconds=0) as seen:
        snapshots.save(path, 1, **training.parts)
        snapshots.save(path, 2, **training.parts)
    assert (seen.writes, seen.gaps) == ([True, True], [])
    assert snapshots.load(path, **training.parts) == 2
    save_file, unlink = torch.save, os.unlink
    with snapshots.watching(path, seconds=0) as seen:
        torch.save(3, path)
        torch.save(4, io.BytesIO())  # to no file
        torch.save(5, new)
        path.unlink()
        new.rename(path)
        path.rename(new)
        new.unlink()
    assert (seen.writes, seen.gaps) == ([False, True], ["os.unlink", "os.rename"])
    assert torch.save is save_file and os.unlink is unlink


def test_watching_makes_renaming_slow(tmp_path):
    path, new = tmp_path / "snapshot.pt", tmp_path / "snapshot.pt.new"
    torch.save(1, new)
    began = time.monotonic()
    with snapshots.watching(path, seconds=0.2):
        new.replace(path)
    assert time.monotonic() - began >= 0.2


def test_a_missing_part_is_named(tmp_path):
    training = Training()
    snapshots.save(tmp_path / "snapshot.pt", 1, model=training.model)
    with pytest.raises(KeyError) as error:
        snapshots.load(tmp_path / "snapshot.pt", **training.parts)
    assert "The snapshot holds model, but not optimizer, sampler, scheduler." in str(error.value)


def test_each_rank_gets_its_own_random_state_back(four, tmp_path):
    source = """
from rankcell.cluster import snapshots
torch.manual_seed(rank)
torch.rand(3)
snapshots.save(path, 7, model=torch.nn.Linear(1, 1))
before = torch.rand(2).tolist()
torch.manual_seed(0)
step = snapshots.load(path, model=torch.nn.Linear(1, 1))
step, before == torch.rand(2).tolist(), before
"""
    values = four.run(source, push={"path": str(tmp_path / "snapshot.pt")}).values
    assert [value[:2] for value in values] == [(7, True)] * 4
    assert len({tuple(value[2]) for value in values}) == 4


def test_every_rank_hears_that_rank_0_could_not_write(four, tmp_path):
    source = """
try:
    snapshots.save(path + "/missing/snapshot.pt", 1, model=torch.nn.Linear(1, 1))
    said = ""
except OSError as error:
    said = str(error)
said
"""
    source = "from rankcell.cluster import snapshots\n" + source
    values = four.run(source, push={"path": str(tmp_path)}).values
    assert len(set(values)) == 1 and "The snapshot was not saved: " in values[0]


def test_one_process_reads_what_wrapped_ranks_wrote(four, tmp_path):
    source = """
from rankcell.cluster import snapshots
from rankcell.parallel.ddp import DDP
snapshots.save(path, 3, model=DDP(torch.nn.Linear(2, 1)))
"""
    path = tmp_path / "snapshot.pt"
    four.run(source, push={"path": str(path)})
    assert snapshots.load(path, model=torch.nn.Linear(2, 1)) == 3
