"""What the notebook 17_failures says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# wrong: ex1-solution: forgets that half an interval is lost, not all of it | 0.0778 is lost when saving every 600 s; yours: 0.1055
def lost_share(t, s, F):
    return s / t + t / F

def best_interval(s, F):
    return (s * F) ** 0.5

# wrong: ex1-solution: takes the share for the interval | saving every 807 s loses
def lost_share(t, s, F):
    return s / t + t / (2 * F)

def best_interval(s, F):
    return (2 * s / F) ** 0.5

# right: ex1-solution
def lost_share(t, s, F):
    return (2 * F * s + t * t) / (2 * F * t)

def best_interval(s, F):
    return min((1.015**k for k in range(1000)), key=lambda t: lost_share(t, s, F))

# after: lost
lost_of = {row[0]: (row[1], row[2], row[3]) for row in rows}
one_fails = 54 * 24 / 419  # hours between two failures of all
for of, factor in (("16,384", 1), ("1,024", 16), ("64", 256), ("8", 2048)):
    hours = factor * one_fails
    share = (2 * 30 / (3600 * hours)) ** 0.5
    minutes = (2 * 30 * 3600 * hours) ** 0.5 / 60
    assert lost_of[of] == (f"{hours:,.1f} h", f"{minutes:.0f} min", f"{share:.1%}"), f"{of} GPUs"
check.close_to([lost_share(k * interval, 30, between) / lost for k in (2, 0.5)], [1.25] * 2, rtol=1e-3)

# after: lost-curves
kept = [sum(int(x / (t + 30)) * t for x in times.tolist()) / times.sum().item() for t in at]
by_rule = [100 * (30 / t + t / (2 * 54 * 86400 / 419)) for t in at]
check.close_to([1 - y / 100 for _, y in points["played"]], kept, rtol=1e-4, name="kept in the play")
check.close_to([y for _, y in points["rule"]], by_rule, name="lost by the rule, in per cent")
check.close_to(times.mean().item(), 54 * 86400 / 419, rtol=0.02, name="seconds between the failures played")
assert abs(played(interval) - lost) < 0.01, "the play agrees with the rule"
assert min(at, key=played) == min(at, key=lambda t: lost_share(t, 30, between)) == 16 * 60, "16 minutes"
assert [x for x, _ in points["rule"]] == [x for x, _ in points["played"]] == [t / 60 for t in at], "minutes"

# wrong: ex2-solution: keeps the random state of rank 0 for all | different are: random state
# %%ranks 4 --device cpu
import os

def save(path, step, training):
    if rank == 0:
        content = {name: part.state_dict() for name, part in training.parts.items()}
        torch.save(content | {"step": step, "random": torch.get_rng_state()}, f"{path}.new")
        os.replace(f"{path}.new", path)
    dist.barrier()

def load(path, training):
    content = torch.load(path, weights_only=True)
    for name, part in training.parts.items():
        part.load_state_dict(content[name])
    torch.set_rng_state(content["random"])
    return content["step"]

# wrong: ex2-solution: writes over the old file | the old file is untouched until the new one is written
# %%ranks 4 --device cpu
def save(path, step, training):
    states = [None] * world_size
    dist.all_gather_object(states, torch.get_rng_state())
    if rank == 0:
        content = {name: part.state_dict() for name, part in training.parts.items()}
        torch.save(content | {"step": step, "random": states}, path)
    dist.barrier()

def load(path, training):
    content = torch.load(path, weights_only=True)
    for name, part in training.parts.items():
        part.load_state_dict(content[name])
    torch.set_rng_state(content["random"][rank])
    return content["step"]

# right: ex2-solution
# %%ranks 4 --device cpu
from pathlib import Path

def save(path, step, training):
    content = {name: part.state_dict() for name, part in training.parts.items()} | {"step": step}
    random = [torch.empty_like(torch.get_rng_state()) for _ in range(world_size)]
    dist.all_gather(random, torch.get_rng_state())
    if rank == world_size - 1:
        beside = Path(f"{path}.part")
        torch.save((content, random), beside)
        beside.replace(path)
    dist.all_reduce(torch.zeros(1))  # the last to come is the one that writes

def load(path, training):
    content, random = torch.load(path)
    for name, part in training.parts.items():
        part.load_state_dict(content[name])
    torch.set_rng_state(random[rank])
    return content["step"]

# after: forgotten-table
off = {name: (step, float(largest)) for name, step, largest in rows}
assert off.pop("nothing") == ("none", 0), "with all parts no bit differs"
assert off["model"][0] == "14" and all(largest > 0 for _, largest in off.values()), "each part matters"
assert sorted(off, key=lambda name: -off[name][1])[:2] == ["model", "sampler"], "the model, then the sampler"
moves = max(abs(a - b) for a, b in pairwise(curves["nothing"]))
assert max(off[name][1] for name in ("optimizer", "scheduler", "random state")) < moves, "nobody sees them"
for name, curve in curves.items():  # the mean over the ranks, by a plain loop
    check.close_to(curve, [sum(of[name][k] for of in harm) / 4 for k in range(12)], name=name)

# after: asked-ahead
assert trained.tolist() == list(range(12)), "three batches, in order"
assert dealt == list(range((3 + 2 * 2) * 4)), "two workers, each with two batches on order"

# wrong: ex3-solution: still counts what was asked for | stopped after step 2, continued on 4 ranks, 2 samples of 48 in a step: each sample once
class Dealer:
    def __init__(self, n, rank, world_size):
        self.n, self.rank, self.world_size = n, rank, world_size
        self.epoch = self.done = 0

    def next_epoch(self):
        self.epoch, self.done = self.epoch + 1, 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for sample in order[self.done :][self.rank :: self.world_size]:
            self.done += self.world_size
            yield sample

    def trained(self, k):
        pass

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]

# wrong: ex3-solution: keeps the place of one rank | continued on 2 ranks
class Dealer:
    def __init__(self, n, rank, world_size):
        self.n, self.rank, self.world_size = n, rank, world_size
        self.epoch = self.done = 0

    def next_epoch(self):
        self.epoch, self.done = self.epoch + 1, 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from order[self.rank :: self.world_size][self.done :]

    def trained(self, k):
        self.done += k

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]

# after: steps-taken
from unittest import mock

order = {name: [int(line.split()[1]) for line in Path(name, "log").open()] for name in commands}
assert order["undisturbed"] == [*range(1, 41)], "40 steps, one after the other"
assert order["killed"] == [*range(1, 31), *range(25, 41)], "after step 30 it went on with step 25"
assert Path("killed/died").exists(), "a rank killed itself"
falls = "undisturbed never falls back and ends at step 40; killed falls back once and ends at step 40"
assert falls in picture.alt, "the picture says so"
with mock.patch.object(charts, "lines") as drawn:
    progress("killed")
times, steps = zip(*drawn.call_args.args[0][0].points, strict=True)
assert [*steps] == [*range(1, 31), 24, *range(25, 41)], "the line falls to the last snapshot"
clock = [float(line.split()[0]) for line in Path("killed/log").open()]
check.close_to(times, [t - clock[0] for t in (*clock[:30], *clock[29:])], name="seconds since its first step")

# after: loss-curves
assert by_step("killed") == by_step("undisturbed"), "the same loss at each step, to the last bit"
assert torch.equal(weights("killed"), weights("undisturbed")), "the same weights at the end, to the last bit"
assert len(curves["killed"]) == 40 and apart == 0, "all steps are drawn"

# wrong: ex4-solution: leaves alone | Deadlock
# %%ranks 4 --device cpu
def work(told, steps=12):
    for step in range(1, steps + 1):
        grads = torch.full((100,), float(rank + step))
        dist.all_reduce(grads)
        if told(step):
            return step, grads
    return steps, grads

# wrong: ex4-solution: takes `anyone` over from train.py | one message in each of 37 steps; you send 74
# %%ranks 4 --device cpu
def work(told, steps=12):
    for step in range(1, steps + 1):
        grads = torch.full((100,), float(rank + step))
        dist.all_reduce(grads)
        flag = torch.tensor(float(told(step)))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag:
            return step, grads
    return steps, grads

# after: preempt-run
# %%slurm net
_steps = [int(line.split()[1]) for line in Path("preempted/log").open()]
assert f"{first}     spare   PENDING" in queue, "the first job waits in the queue again"
assert _steps == list(range(1, 41)), "no step lost, none done twice"
assert torch.equal(weights("preempted"), weights("undisturbed")), "the weights of the undisturbed training"

# wrong: ex5-solution: compares with rank 0 | other sizes: (2, [0, 3]); yours: (2, [1, 2, 4, 5])
def first_difference(recorded):
    for number in range(max(map(len, recorded.values()))):
        stands = {
            r: (e[number]["profiling_name"], str(e[number]["input_sizes"])) if number < len(e) else None
            for r, e in recorded.items()
        }
        different = [r for r in recorded if stands[r] != stands[min(stands)]]
        if different:
            return number + 1, different
    return None

# wrong: ex5-solution | names that begin alike: (2, [2]); yours: None
from statistics import mode

def first_difference(recorded):
    begin = max((of[0]["collective_seq_id"] for of in recorded.values() if of), default=0)
    end = max((of[-1]["collective_seq_id"] for of in recorded.values() if of), default=-1)
    for number in range(begin, end + 1):
        at = {
            r: str(
                [(e["profiling_name"][:9], e["input_sizes"]) for e in of if e["collective_seq_id"] == number]
            )
            for r, of in recorded.items()
        }
        usual = mode(at.values())
        if different := [r for r in at if at[r] != usual]:
            return number, different

# right: ex5-solution
from statistics import mode

def first_difference(recorded):
    begin = max((of[0]["collective_seq_id"] for of in recorded.values() if of), default=0)
    end = max((of[-1]["collective_seq_id"] for of in recorded.values() if of), default=-1)
    for number in range(begin, end + 1):
        at = {
            r: str([(e["profiling_name"], e["input_sizes"]) for e in of if e["collective_seq_id"] == number])
            for r, of in recorded.items()
        }
        usual = mode(at.values())
        if different := [r for r in at if at[r] != usual]:
            return number, different

# after: stands-run
# %%slurm
assert stand[0].startswith("dist.all_reduce"), "rank 0 stands in the all_reduce"
assert stand[1] == "dist.barrier()", "rank 1 in the barrier"

# after: own-run
# %%slurm
_first, _others = (line.split() for line in report.splitlines()[1:3])
assert _first[:2] == ["rank", "2"] and "line 11 of own.py" in report, "rank 2 first, a line ahead"
assert _others[:4] == ["ranks", "0,", "1,", "3"] and "line 10 of own.py" in report, "the others behind"

# after: own-corrected
assert sum("is done" in line for line in printed) == 4, "all four come to the end"

# after: hanging
assert "rank 0 calls all_reduce(float32[])" in said, "rank 0 sums alone"
assert "waits for rank 1" in said, "and waits for the other half"

# wrong: ex6-solution: sums up its own half only | each once: [(2, 223.6), (4, 349.3), (3, 286.4), (6, 475.4), (9, 664.8)]; yours: [(2, 134.2)
corrected = """

def train(steps, every):
    for step in range(1, steps + 1):
        grad = torch.full((500,), float(rank + step))
        dist.all_reduce(grad, group=copies)
        if rank == 0 and step % every == 0:
            print(f"step {step} norm {grad.norm().item()}", flush=True)

"""

# wrong: ex6-solution: asks for the norm in every step | ranks 0 and 1 do 5 calls more, one a norm; yours 13, 13
corrected = """

def train(steps, every):
    for step in range(1, steps + 1):
        grad = torch.full((500,), float(rank + step))
        dist.all_reduce(grad, group=copies)
        whole = norm(grad)
        if rank == 0 and step % every == 0:
            print(f"step {step} norm {whole}", flush=True)

"""

# after: straggler-picture
for r in run.ranks:
    assert sum(e.kind == "comm" for e in r.events) == 6 and len(r.events) == 12, "six steps"
    by_hand = sum(e.end - e.start for e in r.events if e.kind == "comm")
    check.close_to(waited[r.rank], by_hand, name=f"seconds of rank {r.rank} in its calls")
    slept = sum(e.end - e.start for e in r.events if e.kind != "comm")
    assert slept >= 6 * (0.06 if r.rank == 2 else 0.02) * 0.99, "a sleep lasts as long as asked, or longer"
assert f"rank {slow} waits least: it is the slow one" in picture.alt

# after: elastic-run
# %%slurm net
_ranks_at = {int(line.split()[1]): int(line.split()[3]) for line in Path("elastic/log").open()}
_one, _two = by_step("elastic"), by_step("undisturbed")
assert _ranks_at[8] == 2 and _ranks_at[40] == 1, "two ranks at the start, one at step 40"
assert all(_one[k] == _two[k] for k in range(1, 9)), "until the snapshot of step 8 the same bits"
assert _one[40] != _two[40], "at the end not"
assert "--nnodes=1:2" in str(more) and "--max-restarts=3" in str(more), "one node is enough"
assert "preempted never falls back" in drawn.alt and "elastic falls back" in drawn.alt, "one goes back"
