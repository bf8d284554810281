"""What the notebook 07_streams says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: step-times
check.close_to([1e3 * part for part in parts], [10.74, 15, 10.74], rtol=1e-3, name="ms, as the answer says")

# after: at-once
assert run.values == [6.0, 6.0], "1 + 2, and 3 + 3"
for mine in run.ranks:
    first, second, third = [e for e in mine.events if e.op == "all_reduce"]
    turn, once = (next(e for e in mine.events if e.op == op) for op in ("in turn", "at once"))
    assert not second.is_async and second.start >= turn.end, "in turn: after the computing"
    assert third.is_async and third.start <= once.start, "at once: before the computing"
    assert third.wait_start is None or third.wait_start >= once.end, "waited for after the computing"
    assert min(turn.seconds, once.seconds) >= 0.1

# after: four-products
check.close_to([host_done, gpu.now], [4 * 0.2e-3, 0.2e-3 + 4 * 2e-3], name="the host, the GPU")

# after: no-wait
assert len(gpu.races) == 1, "one race, on X"

# after: with-wait
assert not gpu.races
check.close_to([gpu.seconds, save_while_computing(Device(launch=0.2e-3), wait=False).seconds], [9.2e-3] * 2, rtol=1e-3)
times = {}
for pinned in (False, True):
    for non_blocking in (False, True):
        gpu = Device()
        gpu.copy(2**28, pinned=pinned, non_blocking=non_blocking)
        times[pinned, non_blocking] = gpu.now
assert times.pop((True, True)) < 1e-3 < min(times.values()), "the host goes on only with both"

# after: overwritten
assert [race.buffer for race in gpu.races] == ["Z"], "waits go both ways"

# after: backward
both = [Device(launch=launch) for _ in range(2)]
for gpu, a in zip(both, (True, False)):
    backward_of_three(gpu, async_op=a)
check.close_to([gpu.seconds for gpu in both], [16.05e-3, 22.05e-3], name="seconds, as the text says")
host = [e for e in both[0].events if e.kind == "wait"]
assert len(host) == 1 and host[0].start < 1e-3, "three wait() did not hold the host"
assert [{e.group for e in gpu.events if e.kind == "comm"} for gpu in both] == [{"nccl"}, {"default"}]
assert not any(gpu.races for gpu in both), "no race in any of the two"

# after: real-number
saved = in_turn - overlapped
assert [round(saved), round(100 * saved / in_turn), round(backward_alone)] == [83, 15, 417], "as the text says"

# after: functional
# %%ranks 2 --device cpu
from torch.distributed._functional_collectives import all_gather_tensor as gathered

total = all_reduce(torch.full((4,), rank + 1.0), "sum", dist.group.WORLD)
assert type(total).__name__ == "AsyncCollectiveTensor" and (total + 0).tolist() == [3.0] * 4, "waits at its first use"
with torch.autograd.profiler.profile() as summed:
    all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 0
with torch.autograd.profiler.profile() as gathering:
    gathered(torch.ones(4), 0, dist.group.WORLD) + 0
copies = [any(e.name == "aten::clone" for e in of.function_events) for of in (summed, gathering)]
assert copies == [True, False], "an all-reduce copies its input, an all-gather does not"

# after: two-blocks
found = {name: gpu.seconds for name, gpu in runs.items()}
slow = found.pop("copy first, pageable")
check.close_to([slow, *found.values()], [276.9e-3] + [164.3e-3] * 3, rtol=1e-3, name="as the answer says")
assert not any(gpu.races for gpu in runs.values()), "no race in any of the four"

# after: dropped
assert drop_too_early(record=True).seconds == drop_too_early(record=False).seconds, "it costs no time here"

# wrong: ex1-solution: reads the sums of the last two layers only | `use` gets (layer, smallest, largest number)
# %%ranks 2 --device cpu
def backward(n, compute, use, buffers):
    works = []
    for k in range(n):
        compute(k, buffers[k % 2])
        works.append(dist.all_reduce(buffers[k % 2], async_op=True))
    for k, work in enumerate(works):
        work.wait()
        use(k, buffers[k % 2])

# wrong: ex1-solution: never waits | `use` gets (layer, smallest, largest number)
# %%ranks 2 --device cpu
def backward(n, compute, use, buffers):
    for k in range(n + 1):
        if k < n:
            compute(k, buffers[k % 2])
            dist.all_reduce(buffers[k % 2], async_op=True)
        if k > 0:
            use(k - 1, buffers[(k - 1) % 2])

# wrong: ex1-solution: asks until it is done, before the next layer | `use` comes when the next layer is computed
# %%ranks 2 --device cpu
def backward(n, compute, use, buffers):
    for k in range(n):
        compute(k, buffers[k % 2])
        work = dist.all_reduce(buffers[k % 2], async_op=True)
        while not work.is_completed():
            pass
        use(k, buffers[k % 2])

# right: ex1-solution: waits when the next all-reduce is on its way
# %%ranks 2 --device cpu
def backward(n, compute, use, buffers):
    before = None
    for k in range(n):
        compute(k, buffers[k % 2])
        work = dist.all_reduce(buffers[k % 2], async_op=True)
        if before:
            before.wait()
            use(k - 1, buffers[(k - 1) % 2])
        before = work
    before.wait()
    use(n - 1, buffers[(n - 1) % 2])

# right: ex1-solution: a queue of works
# %%ranks 2 --device cpu
from collections import deque

def backward(n, compute, use, buffers):
    free, under_way = deque(buffers), deque()

    def finish():
        k, buffer, work = under_way.popleft()
        work.wait()
        use(k, buffer)
        free.append(buffer)

    for k in range(n):
        if not free:
            finish()
        buffer = free.popleft()
        compute(k, buffer)
        under_way.append((k, buffer, dist.all_reduce(buffer, async_op=True)))
    while under_way:
        finish()

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

# wrong: ex2-solution: waits for the loss, too | at most 12 ms, so the copy runs beside the loss
def pipeline(gpu):
    copies = gpu.stream("copies")
    for _ in range(2):
        with gpu.use(copies):
            gpu.copy(seconds=3e-3, writes="X", pinned=True, non_blocking=True)
        gpu.current_stream().wait_stream(copies)
        gpu.matmul(seconds=2e-3, reads="X", writes="Z")
        gpu.kernel("loss", 2e-3, reads="Z")
        copies.wait_stream(gpu.current_stream())

# right: ex2-solution: an event, for the copy to come
def pipeline(gpu):
    copies = gpu.stream("copies")
    for _ in range(2):
        with gpu.use(copies):
            gpu.copy(seconds=3e-3, writes="X", pinned=True, non_blocking=True)
        gpu.current_stream().wait_stream(copies)
        gpu.matmul(seconds=2e-3, reads="X", writes="Z")
        copies.wait_event(gpu.current_stream().record_event())
        gpu.kernel("loss", 2e-3, reads="Z")

# right: ex2-solution: the copy's stream waits for an event before each copy
def pipeline(gpu):
    copies = gpu.stream("copies")
    read = gpu.current_stream().record_event()
    for _ in range(2):
        with gpu.use(copies):
            read.wait()
            gpu.copy(seconds=3e-3, writes="X", pinned=True, non_blocking=True)
        gpu.current_stream().wait_stream(copies)
        gpu.matmul(seconds=2e-3, reads="X", writes="Z")
        read = gpu.current_stream().record_event()
        gpu.kernel("loss", 2e-3, reads="Z")

# wrong: ex3-solution: nobody waits for the copy | Race on batch
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

# wrong: ex3-solution: does not wait for the sums | Before the second, call wait() on what all_reduce returned
def program(gpu):
    copies = gpu.stream("copies")
    with gpu.use(copies):
        gpu.copy(seconds=6e-3, writes="batch", pinned=True, non_blocking=True)
    gpu.kernel("A", 4e-3, writes="gA")
    gpu.all_reduce("gA", seconds=5e-3, async_op=True)
    gpu.kernel("B", 4e-3, writes="gB")
    gpu.all_reduce("gB", seconds=3e-3, async_op=True)
    gpu.current_stream().wait_stream(copies)
    gpu.kernel("step", 1e-3, reads=("gA", "gB", "batch"))

# wrong: ex3-solution: reads where the copy writes, and so needs no wait | each job writes what it wrote
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

# right: ex3-solution
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

# right: ex3-solution: all-reduces in a stream of their own, and the step in that of the copy
def program(gpu):
    sums, copies = gpu.stream("sums"), gpu.stream("copies")
    for name, computing, sending in (("A", 4e-3, 5e-3), ("B", 4e-3, 3e-3)):
        gpu.kernel(name, computing, writes="g" + name)
        sums.wait_event(gpu.current_stream().record_event())
        with gpu.use(sums):
            gpu.all_reduce("g" + name, seconds=sending)
    with gpu.use(copies):
        gpu.copy(seconds=6e-3, writes="batch", pinned=True, non_blocking=True)
        copies.wait_stream(sums)
        gpu.kernel("step", 1e-3, reads=("gA", "gB", "batch"))

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
