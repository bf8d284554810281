"""What the notebook 24_failures says is right, and wrong answers to its exercises; tests/judge.py runs them."""


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
lost_of = {row[0]: row[1:] for row in rows}
one_fails = 54 * 24 / 419  # hours between two failures of all
for of, factor in (("16,384", 1), ("1,024", 16), ("64", 256), ("8", 2048)):
    hours = factor * one_fails
    minutes = (2 * 30 * 3600 * hours) ** 0.5 / 60
    shares = [f"{(2 * s / (3600 * hours)) ** 0.5:.1%}" for s in (30, 1)]
    assert lost_of[of] == (f"{hours:,.1f} h", f"{minutes:.0f} min", *shares), f"{of} GPUs"
assert round(47.7 * 24 * 8 / 16384, 1) == 0.6 and round(one_fails, 1) == 3.1, "the hours of the text"

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


# after: forgotten
# %%ranks 4 --device cpu
assert sorted(off, key=off.get)[-2:] == ["sampler", "model"], "the model, then the sampler"
assert all(off.values()), "each part matters"
assert min(off, key=off.get) == "scheduler", "the rate is in the state of the optimizer"


# wrong: leave-together: leaves alone | Deadlock
# %%ranks 4 --device cpu
def work(told, steps=12):
    for step in range(1, steps + 1):
        grads = torch.full((100,), float(rank + step))
        dist.all_reduce(grads)
        if told(step):
            return step, grads
    return steps, grads


# wrong: leave-together: sends the flag in a message of its own | one message in each of 37 steps; you send 74
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


# right: leave-together
# %%ranks 4 --device cpu
def work(told, steps=12):
    for step in range(1, steps + 1):
        message = torch.full((101,), float(rank + step))
        message[0] = told(step)
        dist.all_reduce(message)
        if message[0]:
            break
    return step, message[1:]


# after: recorded
last = [entries[-1]["profiling_name"] for entries in recorded.values()]
assert last == ["gloo:all_reduce", "gloo:barrier", "gloo:all_reduce"], "rank 1 waits in the barrier"

# after: verdict
import re

said = Path("hang/verdict.txt").read_text()
assert "rank 1 calls barrier() where ranks 0, 2 call all_reduce" in said, "rank 1 left the order"
program = Path("hangs.py").read_text().splitlines()
at = [program[int(n) - 1].strip() for n in re.findall(r"at line (\d+) of hangs.py", said)[:2]]
assert at == ["dist.all_reduce(torch.ones(1000))", "dist.barrier()"], "the lines in which they stood"

# wrong: who-differs: compares with rank 0 | other sizes: (2, [0, 3]); yours: (2, [1, 2, 4, 5])
from itertools import zip_longest


def first_difference(recorded):
    for number, entries in enumerate(zip_longest(*recorded.values()), 1):
        calls = [e and (e["profiling_name"], e["input_sizes"]) for e in entries]
        if different := [r for r, call in zip(recorded, calls) if call != calls[0]]:
            return number, different
    return None


# wrong: who-differs: ends with the shortest list | a list that ends: (4, [2]); yours: None
def first_difference(recorded):
    for number, entries in enumerate(zip(*recorded.values()), 1):
        calls = [(e["profiling_name"], e["input_sizes"]) for e in entries]
        most = max(calls, key=calls.count)
        if different := [r for r, call in zip(recorded, calls) if call != most]:
            return number, different
    return None


# wrong: who-differs | names that begin alike: (2, [2]); yours: None
from itertools import zip_longest


def first_difference(recorded):
    for number, entries in enumerate(zip_longest(*recorded.values()), 1):
        calls = [e and (e["profiling_name"][:8], e["input_sizes"]) for e in entries]
        most = max(calls, key=calls.count)
        if different := [r for r, call in zip(recorded, calls) if call != most]:
            return number, different
    return None


# right: who-differs
from statistics import mode


def first_difference(recorded):
    for k in range(max(len(of) for of in recorded.values())):
        at = {
            r: f"{of[k]['profiling_name']} {of[k]['input_sizes']}" if k < len(of) else "ended"
            for r, of in recorded.items()
        }
        usual = mode(at.values())
        if different := [r for r in at if at[r] != usual]:
            return k + 1, different


# after: undisturbed
from rankcell.models import MLP, regression

model = torch.nn.Sequential(torch.nn.Dropout(0.1), MLP(6, 32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.8)
x, y = regression(160)
states = [torch.Generator().manual_seed(r).get_state() for r in range(2)]
by_rank = [[], []]
for step in range(40):  # the same in one process
    shuffled = torch.randperm(160, generator=torch.Generator().manual_seed(step // 10))
    batch = shuffled[step % 10 * 16 :][:16]
    optimizer.zero_grad()
    for r in range(2):
        torch.set_rng_state(states[r])
        loss = torch.nn.functional.mse_loss(model(x[batch[r::2]]), y[batch[r::2]])
        states[r] = torch.get_rng_state()
        (loss / 2).backward()
        by_rank[r].append(loss.item())
    optimizer.step()
    scheduler.step()
check.close_to(losses, by_rank, atol=1e-5, name="the losses of both ranks")
check.equals_dense(list(weights[1].values()), [p.detach() for p in model.parameters()], atol=1e-4)

# after: killed
assert order == [*range(1, 31), *range(25, 41)], "after step 30 it went on with step 25"

# after: preempt-run
# %%slurm net
assert f"{first}     spare   PENDING" in queue, "the first job waits in the queue again"
assert [step for step, _ in done("preempted.out")] == [*range(1, 41)], "no step lost, none done twice"

# after: straggler-picture
assert waited[slow] == min(waited)
for r in run.ranks:
    assert sum(e.kind == "comm" for e in r.events) == 6 and len(r.events) == 12, "six steps"
    by_hand = sum(e.end - e.start for e in r.events if e.kind == "comm")
    check.close_to(waited[r.rank], by_hand, name=f"seconds of rank {r.rank} in its calls")
    slept = sum(e.end - e.start for e in r.events if e.kind != "comm")
    assert slept >= 6 * (0.06 if r.rank == 2 else 0.02) * 0.99, "a sleep lasts as long as asked, or longer"
assert f"rank {slow} waits least: it is the slow one" in picture.alt


# after: patient-b
# %%ranks 4 --device cpu -o _longer
import time

for step in range(3):
    if (rank, step) == (1, 1):
        time.sleep(5)
    dist.all_reduce(torch.ones(8))

# after: patient-b
assert all(sum(e.op == "all_reduce" for e in r.events) == 3 for r in _longer.ranks), "B ends without a limit"


# wrong: clinic: believes the advice | A: more time helps, you say: who could set `answered`?
def clinic():
    return {"A": (2, True), "B": (1, True), "C": (3, True)}


# wrong: clinic: blames a rank that waits | C: all others wait for the one rank that computes (yours: 0)
def clinic():
    return {"A": (2, False), "B": (1, True), "C": (0, False)}


# wrong: clinic: takes the slow one for a hang | B: more time does not help, you say
def clinic():
    return {"A": (2, False), "B": (1, False), "C": (3, False)}


# right: clinic: as lists, the sure one first
def clinic():
    said = {name: [rank, False] for name, rank in zip("CA", (3, 2), strict=True)}
    said["B"] = [1, True]
    return said


# right: clinic: by what ends them
def clinic():
    cured = {"B"}
    return {name: (who, name in cured) for who, name in enumerate("BAC", 1)}
