"""What the notebook 25_checkpoints_and_data says is right, and wrong answers to its exercises; tests/judge.py runs
them."""

# after: training
assert inputs.shape == targets.shape == (40, 42) and fresh().shape == (2016,)
assert torch.equal(fresh(), fresh()) and not torch.equal(inputs, targets)

# wrong: commit: commits before the others have written | cannot read its part
def save(job, folder, step, part):
    job.write(folder / f"{step}-{job.rank}", part)
    if job.rank == 0:
        job.write(folder / "new", step)
        job.rename(folder / "new", folder / "latest")
        mine = {"latest", *(f"{step}-{r}" for r in range(job.world_size))}
        for path in sorted(folder.glob("*")):
            if path.name not in mine:
                job.remove(path)


def load(job, folder):
    if not (folder / "latest").exists():
        return None
    step = torch.load(folder / "latest")
    return step, torch.load(folder / f"{step}-{job.rank}")


# wrong: commit: removes the old checkpoint first | nothing is left to load
def save(job, folder, step, part):
    if job.rank == 0:
        for path in sorted(folder.glob("*"), reverse=True):
            job.remove(path)
    job.barrier()
    job.write(folder / f"{step}-{job.rank}", part)
    job.barrier()
    if job.rank == 0:
        job.write(folder / "new", step)
        job.rename(folder / "new", folder / "latest")


def load(job, folder):
    if not (folder / "latest").exists():
        return None
    step = torch.load(folder / "latest")
    return step, torch.load(folder / f"{step}-{job.rank}")


# wrong: commit: every rank renames its own part: as many commits as ranks | all ranks load the same step
def save(job, folder, step, part):
    job.write(folder / f"new-{job.rank}", (step, part))
    job.barrier()
    job.rename(folder / f"new-{job.rank}", folder / f"part-{job.rank}")
    if job.rank == 0:
        for path in sorted(folder.glob("*")):
            if int(path.name.split("-")[1]) >= job.world_size:
                job.remove(path)


def load(job, folder):
    mine = folder / f"part-{job.rank}"
    return torch.load(mine) if mine.exists() else None


# wrong: commit: parts that were never committed stay, if they have the number of the step | only its files are left
def save(job, folder, step, part):
    job.write(folder / f"{step}-{job.rank}", part)
    job.barrier()
    if job.rank == 0:
        job.write(folder / "new", step)
        job.rename(folder / "new", folder / "latest")
        for path in sorted(folder.glob("*")):
            if path.name.split("-")[0] not in ("latest", str(step)):
                job.remove(path)


def load(job, folder):
    if not (folder / "latest").exists():
        return None
    step = torch.load(folder / "latest")
    return step, torch.load(folder / f"{step}-{job.rank}")


# right: commit: a folder for each step, whose rename is the commit
def save(job, folder, step, part):
    beside, place = folder / "beside", folder / f"step {step:09d}"
    beside.mkdir(exist_ok=True)
    job.write(beside / f"{job.rank} of {job.world_size}", part)
    job.barrier()
    if job.rank == 0:
        for path in beside.iterdir():
            if not path.name.endswith(f" of {job.world_size}"):
                job.remove(path)
        job.rename(beside, place)
        for old in folder.iterdir():
            if old != place:
                for path in old.iterdir():
                    job.remove(path)
                old.rmdir()
    job.barrier()


def load(job, folder):
    steps = sorted(path for path in folder.iterdir() if path.name.startswith("step"))
    if not steps:
        return None
    return int(steps[-1].name.split()[1]), torch.load(steps[-1] / f"{job.rank} of {job.world_size}")


# right: commit: the last rank commits a list of files, and each rank removes what it wrote before
def save(job, folder, step, part):
    mine = folder / f"{step}_{job.rank}.pt"
    before = [path for path in folder.glob(f"*_{job.rank}.pt") if path != mine]
    job.write(mine, part)
    job.barrier()
    if job.rank == job.world_size - 1:
        job.write(folder / "list.tmp", {"step": step, "files": [f"{step}_{r}.pt" for r in range(job.world_size)]})
        job.rename(folder / "list.tmp", folder / "list")
    job.barrier()
    for path in before:
        job.remove(path)
    if job.rank == 0:
        for path in folder.glob("*.pt"):
            if int(path.stem.split("_")[1]) >= job.world_size:
                job.remove(path)


def load(job, folder):
    try:
        committed = torch.load(folder / "list")
    except FileNotFoundError:
        return None
    return committed["step"], torch.load(folder / committed["files"][job.rank])


# right: commit: two slots, and each save takes the one that does not count
def save(job, folder, step, part):
    slot = "A"
    if (folder / "latest").exists() and torch.load(folder / "latest")[0] == "A":
        slot = "B"
    job.write(folder / f"{slot}-{job.rank}", part)
    job.barrier()
    if job.rank == 0:
        job.write(folder / "new", (slot, step))
        job.rename(folder / "new", folder / "latest")
        mine = {"latest", *(f"{slot}-{r}" for r in range(job.world_size))}
        for path in sorted(folder.glob("*")):
            if path.name not in mine:
                job.remove(path)


def load(job, folder):
    if not (folder / "latest").exists():
        return None
    slot, step = torch.load(folder / "latest")
    return step, torch.load(folder / f"{slot}-{job.rank}")


# after: kills-table
assert [row[0] for row in rows] == [f"rank {r} {places[r][i]}" for i, (r, _) in enumerate(kills)] and len(rows) == 10
assert all(tuple(of) == tuple(began[0]) for of in began), "all ranks begin alike"
behind = {i for i, row in enumerate(rows) if "removes" in row[0]}
moved = {i for i, row in enumerate(rows) if row[1] != row[2]}
assert behind == moved and len(moved) == 2, "only a kill behind the commit lets the job go on from a later step"
assert sum("half written" in row[0] for row in rows) == 4

# after: kills-equal
from torch.optim import Adam

whole = fresh().requires_grad_()
optimizer = Adam([whole], lr=0.01)
for step in range(8):
    optimizer.zero_grad()
    loss(whole, [(8 * step + i) % 40 for i in range(8)]).backward()
    optimizer.step()
check.equals_dense(weights[0][0], whole.detach(), atol=1e-12)
assert (whole - fresh()).abs().mean() > 0.01, "eight steps move the weights"

# after: workers
assert (len(handed) // 2, len(taken)) == (5, 3) and [len(b) for b in taken] == [2, 2, 2]

# wrong: sampler: the iterator counts what it hands out | where workers had read ahead: each sample once
class Sampler:
    def __init__(self, n, batch, rank=0, world_size=1, seed=0):
        self.n, self.batch, self.rank, self.world_size, self.seed = n, batch, rank, world_size, seed
        self.trained, self.handed = 0, 0

    def __iter__(self):
        share = self.batch // self.world_size
        while True:
            for i in range(self.handed + self.rank * share, self.handed + (self.rank + 1) * share):
                order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + i // self.n))
                yield order[i % self.n].item()
            self.handed += self.batch

    def state_dict(self):
        return {"handed": self.handed}

    def load_state_dict(self, state):
        self.handed = state["handed"]


# wrong: sampler: keeps the samples of one rank, as if all came back on as many | 4 ranks, then 2, then 1: each sample once
class Sampler:
    def __init__(self, n, batch, rank=0, world_size=1, seed=0):
        self.n, self.batch, self.rank, self.world_size, self.seed = n, batch, rank, world_size, seed
        self.trained = 0

    def __iter__(self):
        share = self.batch // self.world_size
        position = self.trained
        while True:
            for i in range(position + self.rank * share, position + (self.rank + 1) * share):
                order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + i // self.n))
                yield order[i % self.n].item()
            position += self.batch

    def state_dict(self):
        return {"seen": self.trained // self.world_size}

    def load_state_dict(self, state):
        self.trained = state["seen"] * self.world_size


# wrong: sampler: keeps whole steps of an epoch, where one ends within a batch | an epoch that ends within a batch: each sample once
class Sampler:
    def __init__(self, n, batch, rank=0, world_size=1, seed=0):
        self.n, self.batch, self.rank, self.world_size, self.seed = n, batch, rank, world_size, seed
        self.trained = 0

    def __iter__(self):
        share = self.batch // self.world_size
        position = self.trained
        while True:
            for i in range(position + self.rank * share, position + (self.rank + 1) * share):
                order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + i // self.n))
                yield order[i % self.n].item()
            position += self.batch

    def state_dict(self):
        return {"epoch": self.trained // self.n, "step": self.trained % self.n // self.batch}

    def load_state_dict(self, state):
        self.trained = state["epoch"] * self.n + state["step"] * self.batch


# right: sampler: ranks take turns, and a generator of the whole order
class Sampler:
    def __init__(self, n, batch, rank=0, world_size=1, seed=0):
        self.n, self.batch, self.rank, self.world_size, self.seed = n, batch, rank, world_size, seed
        self.trained = 0

    def __iter__(self):
        epoch, skip = divmod(self.trained, self.n)

        def stream(epoch, skip):
            while True:
                generator = torch.Generator().manual_seed(self.seed * 1000 + epoch)
                yield from torch.randperm(self.n, generator=generator)[skip:].tolist()
                epoch, skip = epoch + 1, 0

        return islice(stream(epoch, skip), self.rank, None, self.world_size)

    def state_dict(self):
        return {"trained": self.trained}

    def load_state_dict(self, state):
        self.trained = state["trained"]


# right: sampler: epoch and place, and the seed, in the state
class Sampler:
    def __init__(self, n, batch, rank=0, world_size=1, seed=0):
        self.n, self.batch, self.rank, self.world_size, self.seed = n, batch, rank, world_size, seed
        self.trained = 0

    def sample(self, i):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + i // self.n))
        return int(order[i % self.n])

    def __iter__(self):
        step = self.trained // self.batch
        while True:
            mine = torch.arange(step * self.batch, (step + 1) * self.batch).chunk(self.world_size)[self.rank]
            yield from map(self.sample, mine.tolist())
            step += 1

    def state_dict(self):
        return {"epoch": self.trained // self.n, "place": self.trained % self.n, "seed": self.seed}

    def load_state_dict(self, state):
        self.trained, self.seed = state["epoch"] * self.n + state["place"], state["seed"]


# wrong: pieces: takes whole parts only | pieces(1008, 4, 3, 0): columns 0 to 335
def pieces(n, old, new, rank):
    return [(part, 0, n // old) for part in range(old * rank // new, old * (rank + 1) // new)]


# wrong: pieces: counts from the first of all columns | pieces(1008, 4, 2, 0): columns 0 to 503
def pieces(n, old, new, rank):
    begin, end, found = n * rank // new, n * (rank + 1) // new, []
    for part in range(old):
        first, last = n * part // old, n * (part + 1) // old
        if max(first, begin) < min(last, end):
            found.append((part, max(first, begin), min(last, end)))
    return found


# wrong: pieces: opens every file | files are opened
def pieces(n, old, new, rank):
    begin, end, found = n * rank // new, n * (rank + 1) // new, []
    for part in range(old):
        first, last = n * part // old, n * (part + 1) // old
        start = min(max(begin - first, 0), last - first)
        found.append((part, start, max(start, min(end, last) - first)))
    return found


# right: pieces: column by column
def pieces(n, old, new, rank):
    found = []
    for part in range(old):
        first, last = n * part // old, n * (part + 1) // old
        mine = [c - first for c in range(first, last) if n * rank // new <= c < n * (rank + 1) // new]
        if mine:
            found += [(part, mine[0], mine[-1] + 1)]
    return found


# right: pieces: from one border to the next
def pieces(n, old, new, rank):
    at, end, found, part = n * rank // new, n * (rank + 1) // new, [], 0
    while at < end:
        first, last = n * part // old, n * (part + 1) // old
        if at < last:
            found.append([part, at - first, min(last, end) - first])
            at = min(last, end)
        part += 1
    return found


# after: pieces
assert pieces(2016, 4, 3, 1) == [(1, 168, 504), (2, 0, 336)]

# after: two-equal
samples = [i for step in range(5) for i in islice(iter(Sampler(40, 8)), 8 * step, 8 * step + 8)]
assert sorted(samples) == [*range(40)] and samples != sorted(samples), "an epoch, shuffled"

# after: async
# %%ranks 4 --device cpu -o _whole
dcp.load({"weights": weights}, checkpoint_id=folder / "async")
weights.full_tensor()

# after: async
assert all(torch.equal(of.squeeze(), torch.arange(1.0, 5).repeat_interleave(3)) for of in _whole.values)

# after: lost
for s, F, young, daly in ((5, 15, 12.2, 9.1), (5, 6 * 60, 60.0, 57), (5, 24 * 60, 120, 117)):  # minutes, of Daly's figures 3 to 5
    x = (s / (2 * F)) ** 0.5
    assert abs((2 * s * F) ** 0.5 - young) < 0.06, "Young's rule"
    assert abs((2 * s * F) ** 0.5 * (1 + x / 3 + x**2 / 9) - s - daly) < 0.5, "Daly's"
found = [sum(of.values()) for of in shares.values()]
least = [min(s / t + (t / 2 + w) / (3.1 * 3600) for t in range(max(w, 1), 3000)) for s, w in ((27.34, 0), (0.54, 27))]
check.close_to(found, [100 * share for share in least], rtol=1e-3)  # no interval loses less
assert [f"{share:.1f} %" for share in found] == ["7.0 %", "1.2 %"], "as the text says"
assert 5.5 < found[0] / found[1] < 6.5 and 48 < 27.34 / 0.54 < 52
assert [round((2 * s * 3.1 * 3600) ** 0.5 / 60, 1) for s in (27.34, 0.54)] == [13.0, 1.8]

# after: real-number
assert psi == 176_247_271_424 and whole < 2.3 < whole + 0.1 and weights_only < 329 < weights_only + 1, "rounded up"
per_second, days = 14 * psi / 40 / 1e9, (100 * 100) ** 2 / (2 * 40) / 86400
assert round(per_second) == 62 and round(384 / per_second) == 6 and round(days) == 14

# after: dcp-save
# %%ranks 4 --device cpu -o _files
sorted(path.name for path in (folder / "dcp").iterdir())

# after: dcp-save
assert _files.values[0] == [".metadata", *(f"__{r}_0.distcp" for r in range(4))], "one file a rank, and the commit"

# after: stateful
from torch.utils.data import DataLoader

state = first.state_dict()
assert state["_snapshot"]["_main_snapshot"]["_num_workers"] == 1, "its state belongs to one worker"
