"""What the notebook 01_why_distribute says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: late
check.close_to(run.values, [[6, 6, 6]] * 4)
assert all(run.ranks[r].events[0].start >= 0.1 * r for r in range(4)), "rank r comes 0.1 r seconds late"

# after: hours
assert math.isclose(sum(kept(70e9).values()), 14 * room), "70 billion parameters fill 14 GPUs"
assert abs(hours / 184_320 - 1) < 0.02, "the GPU hours of the paper"

# after: step-bars
assert times["a checkpoint to storage at 2 GB/s"] * 2 == 98, "GB of a checkpoint"
assert slow / (1 + slow) > 0.9, "over Ethernet nine tenths of the time go to the network"

# after: three-cuts
for of in run.ranks:
    halves = [("send", 256) if of.rank == 0 else ("recv", 256), ("all_reduce", 128)]
    assert [(e.op, e.nbytes) for e in of.events] == halves, "bytes of each message"
assert "pipeline" not in y[0], "rank 1 alone has y of the pipeline"

# after: training-losses
check.close_to(together, alone, rtol=0, atol=1e-5)
for of in run.ranks:
    sent = [(e.op, e.nbytes) for e in of.events]
    assert sent == [("all_reduce", 4 * 8 * 16), ("all_reduce", 4 * 16)] * 10, "two messages, 576 bytes a step"
w1, w2 = first_weights(seed=1)
h = torch.relu(x @ w1)  # the first step of w2, by hand
check.close_to(alone[0], float((h @ w2 - y).square().sum() / 32))
w2_next = w2 - 0.1 * h.T @ (h @ w2 - y) * 2 / 32
h = torch.relu(x @ (w1 - 0.1 * torch.autograd.grad((h @ w2 - y).square().mean(), w1)[0]))
check.close_to(alone[1], float((h @ w2_next - y).square().mean()), rtol=1e-5)

# after: messages
for of, seconds in zip(run.ranks, one, strict=True):
    events = of.events
    assert [e.nbytes for e in events] == [2**19] * 11 + [2**10] * 512, (
        "11 large messages, then 512 small ones"
    )
    timed = sum(
        e.seconds for e in events[1:11]
    )  # inside the ten that are timed, and those between two others
    most = events[11].start - events[0].end
    assert 0.999 * timed <= 10 * seconds <= 1.001 * most, "seconds of one of the ten"

# after: rank-2-fails
first, *freed = failed.failed  # the earliest failure first
assert (first.rank, first.error.type) == (2, "OSError"), "rank 2 failed first"
assert sorted(r.rank for r in freed) == [0, 1, 3] and all(r.error.caused_by_abort for r in freed)

# after: two-jobs-timeline
serial = [e.seconds for e in run.ranks[0].events if e.op == "serial"]
shared = [[e.seconds for e in of.events if e.op == "units"] for of in run.ranks]
assert len(serial) == 2 and min(serial) >= 5 * 0.01, "five units of 10 ms, alone, in both jobs"
assert [len(of_rank) for of_rank in shared] == [2, 1, 1, 1], "one rank shares the units, then four"
assert shared[0][0] >= 20 * 0.01 and min(of_rank[-1] for of_rank in shared) >= 5 * 0.01, "20 units, 5 each"

# after: speed-up-curves
units = [sum(e.op == "units" for e in of.events) for of in jobs.ranks]
assert units == [9 * 3, 6 * 3, 3 * 3, 3 * 3], "three kinds of job, each three times on 1, 2 and 4 ranks"
assert all(fixed[0][n] >= 0.01 * (5 + 20 / n) for n in (1, 2, 4)), "the same units, shared by n ranks"
assert all(grown[0][n] >= 0.01 * (5 + 20) for n in (1, 2, 4)), "twenty units for each rank"
rate = {n: (5 + 20 * n) / grown[0][n] for n in (1, 2, 4)}  # units per second
check.close_to(scaled, {n: rate[n] / rate[1] for n in rate})
for seconds, drawn in ((fixed, seen["measured, fixed work"]), (busy, seen[cores])):
    check.close_to([drawn[n] * seconds[0][n] for n in (1, 2, 4)], [seconds[0][1]] * 3)
check.close_to(laws["Amdahl"], {n: 25 / (5 + 20 / n) for n in (1, 2, 4, 8, 16, 32)})
check.close_to(laws["Gustafson"], {n: (5 + 20 * n) / 25 for n in (1, 2, 4, 8)})

# after: drift
before, after = ([float((of[r] - of[0]).abs().max()) for r in (1, 2, 3)] for of in (begin, end))
assert min(before) > 0.5, "four different models before the first step"
check.close_to(after, before, rtol=1e-5, name="how far ranks 1, 2 and 3 are from rank 0, as before")
ways = [first_weights(seed=100 + r) for r in range(4)]  # all four on one process
for _ in range(10):
    for (w1, w2), a, b in zip(ways, x.chunk(4), y.chunk(4), strict=True):
        (torch.relu(a @ w1) @ w2 - b).square().mean().backward()
    mean = [sum(way[k].grad for way in ways) / 4 for k in (0, 1)]
    for way in ways:
        for w, grad in zip(way, mean, strict=True):
            w.data, w.grad = w.data - step_size * grad, None
check.equals_dense([*end], [w1.detach() for w1, _ in ways], atol=1e-5)

# after: index
from rankcell import models

text = "".join(models.text().split("\n\n")[1::2]).lower()
check.close_to(counts, [[text.count(c) for c in "abcdefghijklmnopqrstuvwxyz"]] * 4)
assert sorted(i for indices in run.values for i in indices) == [*range(22)], "every fable once"

# wrong: ex1-solution: rounds up | with s = 0.3 it is 4 ranks, 52.6% efficient; 5 are 45.5% efficient (yours: 5)
def serial_part(S, n):
    return (n / S - 1) / (n - 1)

def most_ranks(s):
    return math.ceil(1 + 1 / s - 1e-9)

# wrong: ex1-solution: forgets the rank that does the serial part | it is 6 ranks, 50.0% efficient
def serial_part(S, n):
    return (n / S - 1) / (n - 1)

def most_ranks(s):
    return int(1 / s + 1e-9)

# wrong: ex2-solution: gives every GPU the whole state | memory, network, compute (yours:
def verdict(parameters, n, gpu, link, tokens):
    if 16 * parameters > gpu.memory_bytes:
        return "memory"
    compute = 6 * parameters * tokens / (n * 0.4 * gpu.bf16_flops)
    return "network" if link.seconds(2 * (n - 1) / n * 2 * parameters) > compute else "compute"

# wrong: ex2-solution: sends the gradients once | 7 billion on 64 A100, 150,000 tokens: network (yours: compute)
def verdict(parameters, n, gpu, link, tokens):
    if 16 * parameters / n > gpu.memory_bytes:
        return "memory"
    compute = 6 * parameters * tokens / (n * 0.4 * gpu.bf16_flops)
    return "network" if link.seconds(2 * parameters) > compute else "compute"

# right: ex2-solution
def verdict(parameters, n, gpu, link, tokens):
    seconds = {"compute": 6 / 0.4 * parameters * tokens / gpu.bf16_flops / n}
    seconds["network"] = 4 * (n - 1) * parameters / n / link.bytes_per_s
    fits = parameters <= gpu.memory_bytes * n / 16
    return max(seconds, key=seconds.get) if fits else "memory"

# wrong: ex3-solution: leaves every rank its own gradients | the ranks talk, and only by all-reduce (yours: nothing)
# %%ranks 4 --device cpu
def average(weights):
    for w in weights:
        w.grad = w.grad.clone()

# wrong: ex3-solution: one message for each weight | 10 messages in 10 steps (yours: 20)
# %%ranks 4 --device cpu
def average(weights):
    for w in weights:
        dist.all_reduce(w.grad)
        w.grad /= world_size

# right: ex3-solution
# %%ranks 4 --device cpu
def average(weights):
    flat = torch.empty(sum(w.numel() for w in weights))
    parts, at = [], 0
    for w in weights:
        parts.append(flat[at : at + w.numel()].view_as(w))
        parts[-1].copy_(w.grad / world_size)
        at += w.numel()
    dist.all_reduce(flat)
    for w, part in zip(weights, parts, strict=True):
        w.grad.copy_(part)

# wrong: ex4-solution: the same seed everywhere, without a message | 576 bytes of weights are broadcast before the first
# %%ranks 4 --device cpu --push first_weights -o start
w1, w2 = first_weights(seed=100)

# wrong: ex4-solution: broadcasts one weight only | before the first step (yours: [('broadcast', 512)])
# %%ranks 4 --device cpu --push first_weights -o start
w1, w2 = first_weights(seed=100 + rank)
dist.broadcast(w1.data, src=0)

# right: ex4-solution
# %%ranks 4 --device cpu --push first_weights -o start
w1, w2 = first_weights(seed=100 + rank)
flat = torch.cat([w1.data.flatten(), w2.data.flatten()])
dist.broadcast(flat, src=0)
for w, part in zip((w1, w2), flat.split([w1.numel(), w2.numel()]), strict=True):
    w.data.copy_(part.view_as(w))

# wrong: ex5-solution: leaves the same seed everywhere | the four ranks throw 400,000 different points (yours: 100,000)
# %%ranks 4 -o run
def points(job):
    return torch.rand(100_000, 2, generator=torch.Generator().manual_seed(job))

hits = (points(10).norm(dim=1) < 1).float()
[round(4 * hits[:n].mean().item(), 4) for n in (100, 1_000, 10_000, 100_000)]

# wrong: ex5-solution: shares seeds with the next job | jobs 10, 11 and 12 share no point
# %%ranks 4 -o run
def points(job):
    return torch.rand(100_000, 2, generator=torch.Generator().manual_seed(job + rank))

hits = (points(10).norm(dim=1) < 1).float()
[round(4 * hits[:n].mean().item(), 4) for n in (100, 1_000, 10_000, 100_000)]

# wrong: ex5-solution: a seed that nobody knows | throws the same points when job 10 runs again
# %%ranks 4 -o run
def points(job):
    random = torch.Generator()
    random.seed()
    return torch.rand(100_000, 2, generator=random)

hits = (points(10).norm(dim=1) < 1).float()
[round(4 * hits[:n].mean().item(), 4) for n in (100, 1_000, 10_000, 100_000)]

# right: ex5-solution
# %%ranks 4 -o run
def points(job):
    random = torch.Generator().manual_seed(
        job
    )  # one generator for the job: each rank takes its part of the points
    return torch.rand(world_size, 100_000, 2, generator=random)[rank]

hits = (points(10).norm(dim=1) < 1).float()
[round(4 * hits[:n].mean().item(), 4) for n in (100, 1_000, 10_000, 100_000)]

# wrong: ex6-solution: the bug | of 22 on 4 ranks every index is somebody's (yours: [20, 21] are lost)
# %%ranks 4
def share(n, rank, world_size):
    per = n // world_size
    return range(rank * per, rank * per + per)

# wrong: ex6-solution: the last rank takes all that is left | 22 on 4 ranks: lengths [5, 5, 5, 7] differ by 1 at most
# %%ranks 4
def share(n, rank, world_size):
    per = n // world_size
    return range(rank * per, n if rank == world_size - 1 else rank * per + per)

# wrong: ex6-solution: deals them out in turn | 22 on 4 ranks: rank after rank, these are 0, 1, 2 and so on
# %%ranks 4
def share(n, rank, world_size):
    return range(rank, n, world_size)

# right: ex6-solution
# %%ranks 4
def share(n, rank, world_size):
    return torch.arange(n).tensor_split(world_size)[rank].tolist()
