"""What the notebook 11_fsdp says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: units-table
assert [row[1:3] for row in rows] == [("16", "1"), ("8", "7"), ("1", "63")]
check.close_to([of_units(U)[2] for U in (1, 4, 32)], [14, 24.5, 27.5625], name="(2 - 1/U) (W-1)/W of 16 GB")

# after: model
matrices = [fresh(i).requires_grad_() for i in range(8)]
moments = [torch.zeros(24, 24, dtype=torch.float64) for _ in matrices]
for i in range(6):  # three steps of two micro-batches once more, without `train`
    x, y = torch.randn(2, 16, 24, generator=models.generator("rows", i), dtype=torch.float64)
    for weight in matrices:
        x = torch.tanh(x @ weight)
    ((x - y) ** 2).mean().div(2).backward()
    if i % 2:
        for weight, moment in zip(matrices, moments):
            moment.mul_(0.9).add_(weight.grad)
            weight.data -= moment
            weight.grad = None
check.equals_dense(one_process(k=2), torch.stack([weight.detach() for weight in matrices]), atol=1e-12)

# after: order-check
counts = [sum(e.op == "all_gather" for e in inside(run, "2 units", r.rank)) for r in run.ranks]
assert counts == [9] * 4, "three in each of three steps"
most = {U: max(m.parameters for m in run.ranks[0].memory if m.phase == f"{U} units") for U in (8, 2, 1)}
assert {U: m / layer_bytes - 2 for U, m in most.items()} == {8: 2, 2: 8, 1: 8}, "two units, or the only one"

# after: controls-table
dense = one_process(layers=4, k=3)
check.equals_dense(by_setting, [dict.fromkeys(by_setting[0], dense)] * 4, atol=1e-9, name="for every setting")
assert not torch.allclose(dense, torch.stack([fresh(i) for i in range(4)]), atol=1e-3), "the weights move"
assert [row[3:] for row in rows] == [
    ("9", "9", "2", "2"),
    ("6", "6", "5", "2"),
    ("7", "7", "5", "2"),
    ("7", "7", "2", "4.25"),
    ("2", "2", "5", "4.25"),
]

# after: hybrid-run
# %%ranks 4 -o _plain
seen = []


class Noted(WhenNeeded):
    def before_backward(self, units, i):
        seen.append(("before", i))
        super().before_backward(units, i)

    def after_backward(self, units, i):
        seen.append(("after", i))
        super().after_backward(units, i)


model = FSDP([Unit([i, i + 1]) for i in (0, 2, 4, 6)], Noted())
out = model(torch.ones(2, 24, dtype=torch.float64, device=device))
out.sum().backward()
seen

# after: hybrid-run
assert _plain.values == [[(when, i) for i in (3, 2, 1, 0) for when in ("before", "after")]] * 4

# after: axes-table
check.close_to([sent, formula], [{"shard": 1.5, "replicate": 0.5}] * 2)
shards = [[tuple(e.ranks) for e in inside(hybrid, "hybrid", r) if e.op == "all_reduce"] for r in range(4)]
assert shards == [[(0, 2)] * 6, [(1, 3)] * 6] * 2

# after: real-number
whole = 48 * 128 * 3 * 2048 * 768 + 48 * 2048 * (72 * 128 + 128) + 2 * 151_936 * 2048
assert abs(whole / 30.53e9 - 1) < 1e-3, "30.5 billion, without the norms"
assert abs(more - 5.66) < 0.01 and abs(off) < 0.02

# after: never-whole
# %%ranks 4 -o _drawn
drawn = torch.nn.Sequential(Layer(torch.zeros(24, 24, dtype=torch.float64, device=device)))
fully_shard(drawn)
torch.manual_seed(0)
torch.nn.init.normal_(drawn[0].weight)
drawn[0].weight.full_tensor().detach()

# after: never-whole
quarters = [value.chunk(4) for value in _drawn.values]
assert all(q.equal(of_rank[0]) for of_rank in quarters for q in of_rank), "equal quarters, as the answer says"

# after: train-built
calls = {
    name: [e.op for e in inside(of, name) if e.kind == "comm"]
    for of, name in ((built_run, "train"), (run, "8 units"))
}
assert calls["train"] == calls["8 units"] * 3, "fully_shard calls what the order of exercise 1 calls"

# after: train-built
# %%ranks 4 -o _hsdp
both = torch.nn.Sequential(*[Layer(fresh(i).to(device)) for i in range(2)])
for unit in both:
    fully_shard(unit, mesh=mesh)
fully_shard(both, mesh=mesh)
with span("hsdp"):
    train(both, k=2, rank=rank, world_size=world_size, device=device, before=both.set_requires_all_reduce)
torch.stack([unit.weight.full_tensor().detach() for unit in both])

# after: train-built
check.equals_dense(_hsdp.values, [one_process(layers=2, k=2)] * 4, atol=1e-9, name="HSDP by fully_shard")
called = [(e.op, tuple(e.ranks)) for e in inside(_hsdp, "hsdp") if e.kind == "comm" and e.op != "all_gather"]
step = [("reduce_scatter", (0, 1))] * 2 + [("reduce_scatter", (0, 1)), ("all_reduce", (0, 2))] * 2
assert called == step * 3, "one all-reduce of each unit in a step, on the axis of the replicas"


# wrong: order: waits at once for what it starts | nobody waits for unit
# %%ranks 4
class Ahead:
    def before_forward(self, units, i):
        if i == 0:
            units[0].start()
            units[0].wait()
        if i + 1 < len(units):
            units[i + 1].start()
            units[i + 1].wait()

    def after_forward(self, units, i):
        if i + 1 < len(units):
            units[i].free()

    def before_backward(self, units, i):
        if i > 0:
            units[i - 1].start()
            units[i - 1].wait()

    def after_backward(self, units, i):
        units[i].reduce()
        units[i].free()


# wrong: order: frees each unit one too late | at most two units are whole at a time (rank 0, 8 units: 3)
# %%ranks 4
class Ahead:
    def before_forward(self, units, i):
        if i == 0:
            units[0].start()
        units[i].wait()
        if i + 1 < len(units):
            units[i + 1].start()

    def after_forward(self, units, i):
        if i > 0:
            units[i - 1].free()

    def before_backward(self, units, i):
        if i + 1 < len(units):
            units[i].wait()
        if i > 0:
            units[i - 1].start()

    def after_backward(self, units, i):
        units[i].reduce()
        units[i].free()

# wrong: order: starts the next gather after a backward | the gather of unit 6 starts before unit 7 computes
# %%ranks 4
class Ahead:
    def before_forward(self, units, i):
        if i == 0:
            units[0].start()
        units[i].wait()
        if i + 1 < len(units):
            units[i + 1].start()

    def after_forward(self, units, i):
        if i + 1 < len(units):
            units[i].free()

    def before_backward(self, units, i):
        if i + 1 < len(units):
            units[i].wait()

    def after_backward(self, units, i):
        if i > 0:
            units[i - 1].start()
        units[i].reduce()
        units[i].free()


# right: order: knows what is whole, and starts the next before it waits
# %%ranks 4
class Ahead:
    def __init__(self):
        self.started = set()

    def need(self, units, i, then):
        for j in (i, then):
            if 0 <= j < len(units) and j not in self.started:
                units[j].start()
                self.started.add(j)
        units[i].wait()

    def drop(self, units, i):
        self.started.discard(i)
        units[i].free()

    def before_forward(self, units, i):
        self.need(units, i, i + 1)

    def after_forward(self, units, i):
        if units[i] is not units[-1]:
            self.drop(units, i)

    def before_backward(self, units, i):
        self.need(units, i, i - 1)

    def after_backward(self, units, i):
        units[i].reduce()
        self.drop(units, i)


# right: order: frees before it reduces
# %%ranks 4
class Ahead:
    def before_forward(self, units, i):
        if i == 0:
            units[i].start()
        for unit in units[i + 1 : i + 2]:
            unit.start()
        units[i].wait()

    def after_forward(self, units, i):
        for unit in units[i : len(units) - 1][:1]:
            unit.free()

    def before_backward(self, units, i):
        for unit in units[max(i - 1, 0) : i]:
            unit.start()
        units[i].wait()

    def after_backward(self, units, i):
        units[i].free()
        units[i].reduce()


# wrong: rounds: forgets that a forward frees what the backward before has left | with (True, False, True) and k = 3
def rounds(k, after_forward, after_backward, each_time):
    gathers = 1 if not after_backward else 2 * k if after_forward else k
    return gathers, k if each_time else 1


# wrong: rounds: counts only what is freed | with (True, False, True) and k = 3
def rounds(k, after_forward, after_backward, each_time):
    return k * after_forward + k * after_backward, k if each_time else 1


# right: rounds: plays the step
def rounds(k, after_forward, after_backward, each_time):
    gathers = reduces = 0
    whole = False
    for m in range(k):
        gathers += not whole
        whole = not after_forward
        gathers += not whole
        whole = not after_backward
        reduces += each_time or m == k - 1
    return gathers, reduces


# right: rounds: a table
def rounds(k, after_forward, after_backward, each_time):
    gathers = {(True, True): 2 * k, (False, True): k, (True, False): k + 1, (False, False): 1}
    return [gathers[after_forward, after_backward], (1, k)[each_time]]


# wrong: hybrid: the replicas go apart | one all_reduce on the replicate axis
# %%ranks 4
class HybridUnit(Unit):
    def reduce(self):
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_single(self.shard.grad, self.whole.grad, group=shard_group)
        self.shard.grad /= 2
        self.whole.grad = None


# wrong: hybrid: divides by the ranks of one axis | divided by the number of all ranks
# %%ranks 4
class HybridUnit(Unit):
    def reduce(self):
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_single(self.shard.grad, self.whole.grad, group=shard_group)
        dist.all_reduce(self.shard.grad, group=replicate_group)
        self.shard.grad /= self.ranks
        self.whole.grad = None


# wrong: hybrid: sums whole gradients over all ranks | each call is on one axis
# %%ranks 4
class HybridUnit(Unit):
    def reduce(self):
        dist.all_reduce(self.whole.grad)
        self.shard.grad = self.whole.grad.chunk(2)[dist.get_rank(shard_group)] / world_size
        self.whole.grad = None


# right: hybrid: what a unit does, and then the other axis
# %%ranks 4
class HybridUnit(Unit):
    def reduce(self):
        super().reduce()
        dist.all_reduce(self.shard.grad, group=replicate_group)
        self.shard.grad /= 2


# right: hybrid: divides first, with lists
# %%ranks 4
class HybridUnit(Unit):
    def reduce(self):
        parts = [part.contiguous() for part in (self.whole.grad / 4).chunk(2)]
        mine = torch.empty_like(self.shard.data)
        dist.reduce_scatter(mine, parts, group=mesh.get_group("shard"))
        dist.all_reduce(mine, group=mesh.get_group("replicate"))
        self.shard.grad, self.whole.grad = mine, None


# wrong: never-whole: draws the whole model first | at most two whole layers
# %%ranks 4 --pull filled -o built
with torch.device("meta"):
    model = torch.nn.Sequential(*[Layer(torch.empty(24, 24, dtype=torch.float64)) for _ in range(8)])
for unit in model:
    fully_shard(unit, reshard_after_forward=unit is not model[-1])
fully_shard(model)
model.to_empty(device=device)
with rankcell.memory(model) as measured, span("fill"), torch.no_grad():
    wholes = [fresh(i, seed=4) for i in range(8)]
    for unit, whole in zip(model, wholes):
        unit.weight.to_local().copy_(whole.chunk(world_size)[rank])
filled = torch.stack([unit.weight.to_local().detach() for unit in model])


# wrong: never-whole: the first rows on every rank | the initial weights
# %%ranks 4 --pull filled -o built
with torch.device("meta"):
    model = torch.nn.Sequential(*[Layer(torch.empty(24, 24, dtype=torch.float64)) for _ in range(8)])
for unit in model:
    fully_shard(unit, reshard_after_forward=unit is not model[-1])
fully_shard(model)
model.to_empty(device=device)
with rankcell.memory(model) as measured, span("fill"), torch.no_grad():
    for i, unit in enumerate(model):
        shard = unit.weight.to_local()
        shard.copy_(fresh(i, seed=4)[: len(shard)])
filled = torch.stack([unit.weight.to_local().detach() for unit in model])


# wrong: never-whole: rank 0 sends everybody its part | nothing is sent while the shards are filled
# %%ranks 4 --pull filled -o built
with torch.device("meta"):
    model = torch.nn.Sequential(*[Layer(torch.empty(24, 24, dtype=torch.float64)) for _ in range(8)])
for unit in model:
    fully_shard(unit, reshard_after_forward=unit is not model[-1])
fully_shard(model)
model.to_empty(device=device)
with rankcell.memory(model) as measured, span("fill"), torch.no_grad():
    from torch.distributed.tensor import distribute_tensor

    for i, unit in enumerate(model):
        whole = fresh(i, seed=4).to(device)
        unit.weight.copy_(distribute_tensor(whole, unit.weight.device_mesh, unit.weight.placements))
filled = torch.stack([unit.weight.to_local().detach() for unit in model])


# right: never-whole: a DTensor from the whole, without a message
# %%ranks 4 --pull filled -o built
with torch.device("meta"):
    model = torch.nn.Sequential(*[Layer(torch.empty(24, 24, dtype=torch.float64)) for _ in range(8)])
for unit in model:
    fully_shard(unit, reshard_after_forward=unit is not model[-1])
fully_shard(model)
model.to_empty(device=device)
with rankcell.memory(model) as measured, span("fill"), torch.no_grad():
    from torch.distributed.tensor import distribute_tensor

    for i, unit in enumerate(model):
        place = unit.weight.device_mesh, unit.weight.placements
        unit.weight.copy_(distribute_tensor(fresh(i, seed=4).to(device), *place, src_data_rank=None))
filled = torch.stack([unit.weight.to_local().detach() for unit in model])


# right: never-whole: a name holds the last layer while the next is drawn
# %%ranks 4 --pull filled -o built
with torch.device("meta"):
    model = torch.nn.Sequential(*[Layer(torch.empty(24, 24, dtype=torch.float64)) for _ in range(8)])
for unit in model:
    fully_shard(unit, reshard_after_forward=unit is not model[-1])
fully_shard(model)
model.to_empty(device=device)
with rankcell.memory(model) as measured, span("fill"), torch.no_grad():
    for i, unit in enumerate(model):
        whole = fresh(i, seed=4)
        unit.weight.to_local().copy_(whole.chunk(world_size)[rank])
filled = torch.stack([unit.weight.to_local().detach() for unit in model])


# right: never-whole: rows by number
# %%ranks 4 --pull filled -o built
with torch.device("meta"):
    model = torch.nn.Sequential(*[Layer(torch.empty(24, 24, dtype=torch.float64)) for _ in range(8)])
for unit in model:
    fully_shard(unit, reshard_after_forward=unit is not model[-1])
fully_shard(model)
model.to_empty(device=device)
with rankcell.memory(model) as measured, span("fill"), torch.no_grad():
    for i in range(len(model)):
        n = 24 // world_size
        model[i].weight.to_local()[:] = fresh(i, seed=4)[rank * n : rank * n + n]
filled = torch.stack([unit.weight.to_local().detach() for unit in model])

# after: what-compile-sees
layer = ["matmul", "tanh"]
assert compiled.values == [{"one piece": ([3 * layer], True), "fully_shard": ([layer], True)}] * 2
for r in compiled.ranks:  # of an eager and a compiled pass: the last layer is gathered twice, too, as all stay sharded
    counts = {op: sum(e.op == op for e in r.events) for op in ("all_gather", "reduce_scatter")}
    assert counts["reduce_scatter"] == 6 and counts["all_gather"] % 2 == 0 and counts["all_gather"] >= 6, counts
