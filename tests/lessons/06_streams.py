"""What the notebook 06_streams says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: step-times
check.close_to([1e3 * part for part in parts], [10.74, 15, 10.74], rtol=1e-3, name="ms, as the answer says")

# after: six-small
computed = sum(e.seconds for e in gpu.events if e.kind == "compute")
check.close_to(
    [gpu.seconds, computed / gpu.seconds], [1.25e-3, 0.24], rtol=0.01, name="all, and share computed"
)
check.close_to(
    [host_done, gpu_done], [4 * 0.2e-3, 0.2e-3 + 4 * 2e-3], name="four products: the host, the GPU"
)

# after: overwritten
assert len(gpu.races) == 1, "one race, on Z"

# after: recorded
assert len(gpu.races) == 1 and kept.seconds == gpu.seconds, "one race without it, and it costs no time here"

# after: buffers-picture
assert not any(gpu.races for gpu in buffers.values()), "both waits are right with one buffer, too"
check.close_to([buffers[n].seconds for n in (1, 2)], [0.05e-3 + 4 * 11e-3, 0.05e-3 + 4 * 6e-3 + 5e-3])
check.close_to(
    busy_together(buffers[2].events, "compute", "copy"), 3 * 5e-3, name="all products but the last"
)

# after: backward
both = (overlapped, one_by_one)
check.close_to([gpu.seconds for gpu in both], [16.05e-3, 22.05e-3], name="seconds, as the text says")
assert host_done < 1e-3, "three wait() did not hold the host"
assert [{e.group for e in gpu.events if e.kind == "comm"} for gpu in both] == [{"nccl"}, {"default"}]
assert not any(gpu.races for gpu in both), "no race in any of the two"

# after: hidden-share
assert together.values == [3.0, 3.0], "the sum on each rank"
assert [e.nbytes for e in together.events if e.op == "all_reduce"] == [64 * 2**20] * 2, "64 MiB"
ops = [sorted(e.op for e in of_rank.events) for of_rank in warmed.ranks]
assert ops == [["all_reduce", "products"]] * 2, "both ranks had warmed up"
for of_rank in together.ranks:
    summed, busy = (next(e for e in of_rank.events if e.op == op) for op in ("all_reduce", "products"))
    both = max(0.0, min(summed.end, busy.end) - max(summed.start, busy.start))  # seconds
    assert abs(hidden(together, of_rank.rank) - both / summed.seconds) < 1e-6, "the share of the all-reduce"
    late = summed.wait_start is None or summed.wait_start >= busy.end  # None: it was over by then
    assert summed.start <= busy.start and late, "it begins before, and is waited for after"

# after: medians
once = [
    ("all_reduce", False),
    ("products", False),
    ("all_reduce", False),
    ("all_reduce", True),
    ("products", False),
]
for of_rank in rounds.ranks:
    calls = sorted((e for e in of_rank.events if e.op != "barrier"), key=lambda e: e.start)
    assert [(e.op, e.is_async) for e in calls] == once * 5, "alone, one after the other, at once; five times"
    assert sum(e.op == "barrier" for e in of_rank.events) == 15, "a barrier before each"
    waited = [a.wait_start is None or a.wait_start >= b.end for a, b in zip(calls[3::5], calls[4::5])]
    assert all(waited), "at once is over when the all-reduce is waited for"
of_0, of_1 = rounds.values
columns = [sorted(max(a[k], b[k]) for a, b in zip(of_0, of_1)) for k in range(3)]
check.close_to(medians, [of[2] for of in columns], rtol=1e-4, name="the median of five slower ranks")

# after: late-timeline
ops = sorted((e.rank, e.op) for e in rows)
assert ops == [(r, op) for r in (0, 1) for op in ("all_reduce", "useful work")], (
    "the work and the sum of both"
)
barrier, summed = (next(e for e in late.ranks[1].events if e.op == op) for op in ("barrier", "all_reduce"))
assert summed.start - barrier.end >= 0.3, "rank 1 comes late"
sums = [next(e for e in of_rank.events if e.op == "all_reduce") for of_rank in late.ranks]
work = next(e for e in late.ranks[0].events if e.op == "useful work")
assert late.values[0] > 0 and work.end >= sums[1].start, "rank 0 works until the other has come"

# after: lecture-times
check.close_to([1e3 * shorter, one_stream / two_streams], [112.6, 1.69], rtol=0.01, name="ms, and the factor")

# after: two-blocks
found = {name: gpu.seconds for name, gpu in runs.items()}
slow = found.pop("copy first, pageable")
check.close_to([slow, *found.values()], [276.9e-3] + [164.3e-3] * 3, rtol=1e-3, name="as the answer says")
assert not any(gpu.races for gpu in runs.values()), "no race in any of the four"

# wrong: ex1-solution: nobody waits for the copy | Race on batch
def program(gpu):
    with gpu.use(gpu.stream("copies")):
        gpu.copy(seconds=6e-3, writes="batch", pinned=True, non_blocking=True)
    gpu.kernel("A", 4e-3, writes="gA")
    a = gpu.all_reduce("gA", seconds=5e-3, async_op=True)
    gpu.kernel("B", 4e-3, writes="gB")
    b = gpu.all_reduce("gB", seconds=3e-3, async_op=True)
    a.wait()
    b.wait()
    gpu.kernel("step", 1e-3, reads=("gA", "gB", "batch"))

# wrong: ex1-solution: reads where the copy writes, and so needs no wait | each job writes what it wrote
def program(gpu):
    with gpu.use(gpu.stream("copies")):
        gpu.copy(seconds=6e-3, reads="batch", pinned=True, non_blocking=True)
    gpu.kernel("A", 4e-3, writes="gA")
    a = gpu.all_reduce("gA", seconds=5e-3, async_op=True)
    gpu.kernel("B", 4e-3, writes="gB")
    b = gpu.all_reduce("gB", seconds=3e-3, async_op=True)
    a.wait()
    b.wait()
    gpu.kernel("step", 1e-3, reads=("gA", "gB", "batch"))

# right: ex1-solution
def program(gpu):  # copies last, and waits for events
    gpu.kernel("A", 4e-3, writes="gA")
    works = [gpu.all_reduce("gA", seconds=5e-3, async_op=True)]
    with gpu.use(gpu.stream("side")):
        gpu.copy(seconds=6e-3, writes="batch", pinned=True, non_blocking=True)
        there = gpu.current_stream().record_event()
    gpu.kernel("B", 4e-3, writes="gB")
    works.append(gpu.all_reduce("gB", seconds=3e-3, async_op=True))
    gpu.current_stream().wait_event(there)
    for work in works[::-1]:
        work.wait()
    gpu.kernel("step", 1e-3, reads=("batch", "gB", "gA"))

# wrong: ex2-solution: holds the host | the host goes on
def pipeline(gpu):
    copies = gpu.stream("copies")
    for _ in range(2):
        with gpu.use(copies):
            gpu.copy(seconds=3e-3, writes="X", pinned=True, non_blocking=True)
        gpu.current_stream().wait_stream(copies)
        gpu.matmul(seconds=2e-3, reads="X", writes="Z")
        gpu.synchronize()
        gpu.kernel("loss", 2e-3, reads="Z")

# wrong: ex2-solution: gives each copy a buffer of its own | each job touches the same memory
def pipeline(gpu):
    copies = gpu.stream("copies")
    for x in ("X", "Y"):
        with gpu.use(copies):
            gpu.copy(seconds=3e-3, writes=x, pinned=True, non_blocking=True)
        gpu.current_stream().wait_stream(copies)
        gpu.matmul(seconds=2e-3, reads=x, writes="Z")
        gpu.kernel("loss", 2e-3, reads="Z")

# wrong: ex3-solution: lets the current stream wait | it takes 8 ms as before: only the copies wait (yours: 10 ms)
def offload(gpu):
    copies = gpu.stream("copies")
    for z in ("Z0", "Z1"):
        gpu.empty(z)
        gpu.kernel("layer", 2e-3, writes=z)
        copies.wait_stream(gpu.current_stream())
        with gpu.use(copies):
            gpu.copy(seconds=3e-3, to="host", reads=z, pinned=True, non_blocking=True)
        gpu.current_stream().wait_stream(copies)
        gpu.free(z)

# wrong: ex3-solution: never drops a tensor | both tensors are dropped with gpu.free (still there: Z0, Z1)
def offload(gpu):
    copies = gpu.stream("copies")
    for z in ("Z0", "Z1"):
        gpu.empty(z)
        gpu.kernel("layer", 2e-3, writes=z)
        copies.wait_stream(gpu.current_stream())
        with gpu.use(copies):
            gpu.copy(seconds=3e-3, to="host", reads=z, pinned=True, non_blocking=True)
        gpu.record_stream(z, copies)

# wrong: ex4-solution: fills the buffer while it is read | Race on X0
class Prefetcher:
    def __init__(self, gpu, n, seconds=6e-3):
        self.gpu, self.left, self.seconds, self.arrived = gpu, n, seconds, []
        self.copies = gpu.stream("copies")
        self.done("X0")
        self.done("X1")

    def next(self):
        buffer, event = self.arrived.pop(0)
        self.gpu.current_stream().wait_event(event)
        return buffer

    def done(self, buffer):
        if self.left:
            self.left -= 1
            with self.gpu.use(self.copies):
                self.gpu.copy(seconds=self.seconds, writes=buffer, pinned=True, non_blocking=True)
            self.arrived.append((buffer, self.copies.record_event()))

# wrong: ex4-solution: uses one buffer | 4 batches, copy 6 ms, product 5 ms: 29 ms (yours: 44 ms)
class Prefetcher:
    def __init__(self, gpu, n, seconds=6e-3):
        self.gpu, self.seconds, self.used = gpu, seconds, None
        self.copies = gpu.stream("copies")

    def next(self):
        if self.used:
            self.copies.wait_event(self.used)
        with self.gpu.use(self.copies):
            self.gpu.copy(seconds=self.seconds, writes="X0", pinned=True, non_blocking=True)
        self.gpu.current_stream().wait_stream(self.copies)
        return "X0"

    def done(self, buffer):
        self.used = self.gpu.current_stream().record_event()

# right: ex4-solution
class Prefetcher:
    def __init__(self, gpu, n, seconds=6e-3):
        self.gpu, self.copies = gpu, gpu.stream("copies")
        self.to_do, self.there = [seconds] * n, []
        for x in ("X0", "X1")[:n]:
            self.fill(x)

    def fill(self, x):
        with self.gpu.use(self.copies):
            self.gpu.copy(seconds=self.to_do.pop(), writes=x, pinned=True, non_blocking=True)
            self.there.insert(0, (x, self.gpu.current_stream().record_event()))

    def next(self):
        x, arrived = self.there.pop()
        self.gpu.current_stream().wait_event(arrived)
        return x

    def done(self, buffer):
        read = self.gpu.current_stream().record_event()
        if self.to_do:
            self.copies.wait_event(read)
            self.fill(buffer)

# wrong: ex5-solution: one after the other | 4 batches, copy 6 ms, product 5 ms: 29 ms (yours: 44 ms)
def seconds_ahead(n, copy, product):
    return n * (copy + product)

# wrong: ex5-solution: the copy is taken for the longer one | 8 batches, copy 2 ms, product 5 ms: 42 ms (yours: 21 ms)
def seconds_ahead(n, copy, product):
    return n * copy + product

# wrong: ex6-solution: knows the sum without communicating | two sums of 32 MiB on rank 0 (yours: [] MiB)
# %%ranks 2 --device cpu -o halves
gradients = torch.ones(2**24) * 3
products(50)
products(50)
gradients[0].item(), gradients[-1].item()

# wrong: ex6-solution: sums the second half before it is there | the second half is summed only when it is there
# %%ranks 2 --device cpu -o halves
gradients = torch.ones(2**24) * (rank + 1)
products(50)
works = [dist.all_reduce(half, async_op=True) for half in gradients.chunk(2)]
products(50)
for work in works:
    work.wait()
gradients[0].item(), gradients[-1].item()

# right: ex6-solution
# %%ranks 2 --device cpu -o halves
gradients = torch.ones(2**24) * (rank + 1)
first, second = gradients[: 2**23], gradients[2**23 :]
products(50)
early = dist.all_reduce(first, async_op=True)
products(50)
dist.all_reduce(second, async_op=True).wait()
early.wait()
gradients[0].item(), gradients[-1].item()
