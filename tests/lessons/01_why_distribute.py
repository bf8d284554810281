"""What the notebook 01_why_distribute says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: kept
assert abs(hours / 184_320 - 1) < 0.02, "the GPU hours of the paper"
assert round(hours / 64 / 24 / 30) == 4 and round((4 + 12 / 64) * 7) == 29, "months on 64 A100; GB on each"

# after: step-times
computing, fast, slow, checkpoint = times.values()
assert (round(slow / computing), round(computing / fast), round(checkpoint / computing, 1)) == (11, 19, 2.3)
assert slow / (slow + computing) > 0.9, "over the cheap cable nine tenths of the time go to the network"
assert checkpoint * 2 == 98, "GB of a checkpoint"

# after: train
model = models.MLP(6, 32, 3)  # the first step, by another loss
torch.nn.functional.mse_loss(model(x[:30]), y[:30]).backward()
check.equals_dense(whole(model, x[:30], y[:30]), [3 * p.grad for p in model.parameters()], atol=1e-5)

# after: gradients-check
sent = [sum(e.nbytes for e in r.events if e.kind == "comm") for r in run.ranks]
assert sent == [40 * 1292] * 4 and sum(p.numel() for p in models.MLP(6, 32, 3).parameters()) * 4 == 1292
assert [of_rank[10] for of_rank in computed] == [8, 8, 7, 7], "30 rows, as the text deals them"

# after: late-timeline
bars_of = [[e.seconds for e in r.events if e.op == "16 rows"] for r in late.ranks]
assert [len(of_rank) for of_rank in bars_of] == [3] * 4, "three steps, 16 rows on each rank"
assert all(min(of_rank) >= 16 * (0.010 if r == 3 else 0.005) for r, of_rank in enumerate(bars_of))
assert 64 * 0.005 / (16 * 0.010) == 2, "twice as fast as one process"

# after: late-timeline
# %%ranks 4 -o _rows
assert row_seconds == 0, "the next cells are fast again"

# after: rank-2-fails
first, *freed = failed.failed  # the earliest failure first
assert (first.rank, first.error.type) == (2, "OSError"), "rank 2 failed first"
assert sorted(r.rank for r in freed) == [0, 1, 3] and all(r.error.caused_by_abort for r in freed)

# after: three-cuts-check
assert "pipeline" not in cut[0], "rank 1 alone has y of the pipeline"
assert torch.allclose(cut[1]["tensor"], cut[0]["tensor"]), "the sum is on both ranks"

# after: published
tokens_per_s = {8: 40149.94, 16: 37609.69, 32: 35367.61, 64: 31112.23, 128: 26446.44, 256: 15700.38}
assert {g: round(rate) for g, rate in tokens_per_s.items()} == rates, "as the figure of the Playbook has them"
assert (round(s, 3), round(error[4], 2), round(nodes[32] / 32, 2)) == (0.045, 0.07, 0.39), "as the text says"
by_two, by_sixteen = error[2], error[16]
assert (round(by_two, 2), round(by_sixteen, 2)) == (-0.17, 0.23), "four nodes were a lucky choice"
assert [f"{part:.1%}" for part in parts.values()] == ["6.8%", "4.5%", "4.1%", "3.5%"], "no single serial part"
assert 1.9 < amdahl(1000, 0.2) / amdahl(4, 0.2) < 2, "a thousand ranks are hardly twice as fast as four"

# wrong: gradients: averages the means of the ranks | with 30 rows rank 0 has the weights of one process: each row counts 1/30
# %%ranks 4 --pull found -o run
def gradients(model, x, y):
    mine = slice(rank, None, world_size)
    loss = squared_errors(model, x[mine], y[mine]) / len(x[mine])
    grads = torch.autograd.grad(loss, list(model.parameters()))
    for grad in grads:
        dist.all_reduce(grad)
        grad /= world_size
    return grads

found = {rows: train(gradients, rows) for rows in (64, 30, 7, 3)}

# wrong: gradients: gives the rest to the last rank | the parts differ by one row at most
# %%ranks 4 --pull found -o run
def gradients(model, x, y):
    per = len(x) // world_size
    mine = slice(rank * per, len(x) if rank == world_size - 1 else (rank + 1) * per)
    grads = torch.autograd.grad(squared_errors(model, x[mine], y[mine]) / len(x), list(model.parameters()))
    for grad in grads:
        dist.all_reduce(grad)
    return grads

found = {rows: train(gradients, rows) for rows in (64, 30, 7, 3)}

# wrong: gradients: leaves the sum of earlier steps in p.grad | and `p.grad` holds nothing of an earlier step
# %%ranks 4 --pull found -o run
def gradients(model, x, y):
    mine = slice(rank, None, world_size)
    (squared_errors(model, x[mine], y[mine]) / len(x)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return [p.grad for p in model.parameters()]

found = {rows: train(gradients, rows) for rows in (64, 30, 7, 3)}

# right: gradients
# %%ranks 4 --pull found -o run
def gradients(model, x, y):  # neighbours, backward, and one message for all parameters
    model.zero_grad()
    squared_errors(model, x.tensor_split(world_size)[rank], y.tensor_split(world_size)[rank]).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    parts = (flat / len(x)).split([p.numel() for p in model.parameters()])
    return [part.view_as(p) for part, p in zip(parts, model.parameters(), strict=True)]

found = {rows: train(gradients, rows) for rows in (64, 30, 7, 3)}

# right: gradients
# %%ranks 4 --pull found -o run
def gradients(model, x, y):  # row by row, the parts gathered, and added on every rank
    grads = [torch.zeros_like(p) for p in model.parameters()]
    for row in range(rank, len(x), world_size):
        loss = squared_errors(model, x[row : row + 1], y[row : row + 1])
        for total, part in zip(grads, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            total += part / len(x)
    for total in grads:
        parts = [torch.empty_like(total) for _ in range(world_size)]
        dist.all_gather(parts, total)
        total.copy_(sum(parts))
    return grads

found = {rows: train(gradients, rows) for rows in (64, 30, 7, 3)}

# wrong: serial-part: what is lost of n times | where 4 ranks are 2.5 times as fast, the serial part is 0.2 (yours: 0.375)
def serial_part(S, n):
    return 1 - S / n

# wrong: serial-part: knows the target | where 16 ranks are 9.14 times as fast, the serial part is 0.05 (yours: 0.2)
def serial_part(S, n):
    return 0.2

# right: serial-part
def serial_part(S, n):
    return (1 / S - 1 / n) / (1 - 1 / n)

# wrong: verdict: gives every GPU the whole state | 7 billion on 64 A100, 1 Gbit/s Ethernet is limited by network
def verdict(parameters, n, gpu, link, tokens):
    if 16 * parameters > gpu.memory_bytes:
        return "memory"
    compute = 6 * parameters * tokens / (n * 0.4 * gpu.bf16_flops)
    return "network" if link.seconds(2 * (n - 1) / n * 2 * parameters) > compute else "compute"

# wrong: verdict: sends the gradients once | 150,000 tokens is limited by network: 2 GB on a GPU of 80, computing 789 ms, network 1.1 s (yours: compute)
def verdict(parameters, n, gpu, link, tokens):
    if 16 * parameters / n > gpu.memory_bytes:
        return "memory"
    compute = 6 * parameters * tokens / (n * 0.4 * gpu.bf16_flops)
    return "network" if link.seconds(2 * parameters) > compute else "compute"

# wrong: verdict: asks for the slower of the two before it asks for room | 70 billion on 8 H100 is limited by memory
def verdict(parameters, n, gpu, link, tokens):
    compute = 6 * parameters * tokens / (n * 0.4 * gpu.bf16_flops)
    if link.seconds(2 * (n - 1) / n * 2 * parameters) > compute:
        return "network"
    return "compute" if 6 * parameters / n < gpu.memory_bytes else "memory"

# right: verdict
def verdict(parameters, n, gpu, link, tokens):
    seconds = {"compute": 6 / 0.4 * parameters * tokens / gpu.bf16_flops / n}
    seconds["network"] = 4 * (n - 1) * parameters / n / link.bytes_per_s
    fits = parameters <= gpu.memory_bytes * n / 16
    return max(seconds, key=seconds.get) if fits else "memory"

# right: verdict
def verdict(parameters, n, gpu, link, tokens):
    if parameters * 16 > n * gpu.memory_bytes:
        return "memory"
    enough = link.seconds(4 * parameters * (n - 1) / n) * n * 0.4 * gpu.bf16_flops / (6 * parameters)  # tokens
    return "compute" if tokens >= enough else "network"

# wrong: points: one seed for each rank, in every job | jobs 10, 11 and 12 share no point
# %%ranks 4
def points(job):
    return torch.rand(100_000, 2, generator=torch.Generator().manual_seed(10 + rank))

# wrong: points: shares seeds with the next job | jobs 10, 11 and 12 share no point
# %%ranks 4
def points(job):
    return torch.rand(100_000, 2, generator=torch.Generator().manual_seed(job + rank))

# wrong: points: a seed that nobody knows | throws the same points when job 10 runs again
# %%ranks 4
def points(job):
    random = torch.Generator()
    random.seed()
    return torch.rand(100_000, 2, generator=random)

# right: points
# %%ranks 4
def points(job):  # one generator for the job: each rank takes its part of the points
    random = torch.Generator().manual_seed(job)
    return torch.rand(world_size, 100_000, 2, generator=random)[rank]

# right: points
# %%ranks 4
def points(job):
    import numpy

    return torch.from_numpy(numpy.random.default_rng([job, rank]).random((100_000, 2), dtype="float32"))
