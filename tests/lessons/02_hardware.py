"""What the notebook 02_hardware says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: gradient-seconds
check.close_to([*seconds.values()], [14 / rate for rate in (3350, 450, 63, 50, 1.25, 0.125)], rtol=0.01)
check.close_to(seconds[last] / h100.nvlink.seconds(gradients), 3600, name="NVLink over 1 Gbit/s")

# after: link-table
check.close_to(each_way, h100.pcie.bytes_per_s)
check.close_to(
    [nvlink, port, h100.nvlink.both_ways], [h100.nvlink.bytes_per_s, h100.network.bytes_per_s, 900e9]
)

# after: four-gpus
check.close_to([pair, whole], [150, 450], name="GB/s each way, to one and to all three")
assert all(sum(n for gpus, n in mesh.items() if g in gpus) == 18 for g in range(4)), "18 links leave each GPU"

# after: topology
assert server.path("GPU0", "GPU7") == "NV18", "all 18 links run into NVSwitch"
assert [server.path("GPU0", nic) for nic in server.nics] == ["PIX", "SYS"], "GPU0 is near NIC0 only"

# after: ex4-check
for senders, up in ((1, 4), (1, 1), (4, 4), (4, 1)):  # of each leaf of the left half, to the right one
    traffic = {(h, h + 8): 1e9 for h in range(8) if h % 4 < senders}
    check.close_to(1e9 / seconds_of(traffic, 4, up, 50e9), across(senders, up, 50) * 1e9)
assert sorted(order) == [*range(16)], "each host once"
assert all(order[k] // 4 != order[k - 1] // 4 for k in range(16)), "neighbours are under different leaves"
cards = {(8 * node + gpu, 8 * ((node + 1) % 4) + gpu): 1e9 for node in range(4) for gpu in range(8)}
by_rail = {(a % 8 * 4 + a // 8, b % 8 * 4 + b // 8): nbytes for (a, b), nbytes in cards.items()}
assert seconds_of(by_rail, 4, 1, 50e9) == 0.02, "a ring that keeps the local rank needs no link up"

# after: copies-by-size
from unittest import mock

steps, made_up = [], [100.0] * 3 + [float(s) for s in range(1, 16)]  # of 18 rounds, by a made-up clock
looks = iter([look for s in made_up for look in (0.0, s)])
with (
    mock.patch.object(time, "perf_counter", lambda: steps.append("clock") or next(looks)),
    mock.patch.object(torch.Tensor, "copy_", lambda to, of: steps.append((to.nbytes, of.nbytes))),
):
    by_made_up = copy_seconds(64)
assert steps == ["clock", (64, 64), "clock"] * 18, "18 times all bytes are copied between two looks"
assert by_made_up == 8, "the median of 1 to 15 s: the warm-up is left out"
assert torch.get_num_threads() == 1, "one thread copies"
assert copies.points == [(n, n / s) for n, s in took.items()], "drawn are bytes over seconds"
assert all(b == machine.cache(name)[0].nbytes for b, name in marks), "the marks are bytes of a cache"

# after: factors
calls = [e for e in run.ranks[0].events if e.op != "barrier"]
assert [e.nbytes for e in calls[::30]] == [*moved[0]] == [2**k for k in range(12, 27, 2)], (
    "15 trips of each size"
)
assert [e.op for e in calls] == ["send", "recv"] * 15 * 8, "there and back"
begins = [e.end for e in run.ranks[0].events if e.op == "barrier"]
assert len(begins) == 15 * 8 and all(b <= e.start for b, e in zip(begins, calls[::2], strict=True))
for k, (n, rate) in enumerate(moved[0].items()):  # a trip is shorter than from its barrier to the next one
    trips = range(15 * k + 3, 15 * k + 15)
    least = statistics.median(calls[2 * i + 1].end - calls[2 * i].start for i in trips)
    ends = [*(e.start for e in run.ranks[0].events if e.op == "barrier"), math.inf]
    most = statistics.median(ends[i + 1] - begins[i] for i in trips)
    assert 0.999 * least <= 2 * n / rate <= 1.001 * most, "half of the median of the last twelve"

# after: too-early
by_time = [sorted(of.events, key=lambda e: e.start) for of in run.ranks]
handed, came = ([(b, e) for b, e in zip(of, of[1:], strict=False) if b.op == "barrier"] for of in by_time)
assert [e.nbytes for _, e in came] == [2**26] * 12, "twelve messages of 64 MiB"
assert returns == sorted(returned[0][-9:])[4] and arrives == sorted(arrived[1][-9:])[4], (
    "medians of the last nine"
)
for (b, e), seconds in zip(handed, returned[0], strict=True):
    assert seconds <= e.wait_start - b.end, "the sender reads its clock before it waits"
for (_, e), seconds in zip(came, arrived[1], strict=True):
    assert seconds >= e.end - e.start, "the receiver reads it when the bytes are there"

# after: two-rates
assert [claimed, honest] == [charts.format_rate(2**26 / s) for s in (returns, arrives)], "each clock's"

# after: ladder
ours = {"copy in cache": max(copied.values()), "copy through memory": copied[2**28]}
ours["rank 0 to rank 1"] = max(moved[0].values())
assert {r.name.removesuffix(", here"): r.value for r in rungs if r.measured} == ours, "solid: measured above"
published = [0.125, 1.25, 31.5, 50, 63, 450, 900, 3350]
check.close_to(sorted(r.value / 1e9 for r in rungs if not r.measured), published, rtol=0.01)
assert [r.value for r in rungs] == sorted((r.value for r in rungs), reverse=True), "from fast to slow"

# after: far-card
assert [far.path(gpu, "NIC0") for gpu in far.gpus] == ["PIX", "PXB", "SYS", "SYS"], "GPU2 and GPU3 are far"

# after: duplex
for of, times in zip(hidden.ranks, zip(there, both, strict=True), strict=True):
    calls = sorted(of.events, key=lambda e: e.start)
    at = [i for i, e in enumerate(calls) if e.op == "barrier"]
    assert len(at) == 24, "a barrier before each time"
    for i, j, s in zip(at, at[1:], (s for pair in zip(*times, strict=True) for s in pair), strict=False):
        under_way = max(e.end for e in calls[i + 1 : j]) - calls[i + 1].start
        assert 0.999 * under_way <= s <= 1.001 * (calls[j].start - calls[i].end), (
            "from a barrier to the last byte"
        )
assert one == sorted(there[1][-9:])[4], "the median of the last nine, where the bytes come"
slower = [max(a, b) for a, b in zip(both[0][-9:], both[1][-9:], strict=True)]
assert two == sorted(slower)[4], "the median of the last nine, of the slower rank"

# after: gpu-roof
assert 0.8 < copy < 1 and 0.5 < product < 1 and min(to_gpu, to_host) > 2, "as the text reads the record"
assert a_sum == max(of_roof) and 0.7 < a_sum < 1, "the sum comes nearest to its roof"
by_size = [seen[f"product of {n} x {n} in bf16"] / 989 for n in sizes]
assert by_size[0] < 0.01 and by_size[1] < 0.4 and 0.5 < min(by_size[2:]), (
    "half of the peak between 1024 and 4096"
)
assert 3e-6 < 2 * 256**3 / (by_size[0] * 989e12) < 4.5e-6, "seconds of the smallest"

# wrong: ex1-solution: knows the number for the H100 | with k = 4096, n = 16384 161 rows are enough (yours: 319)
def intensity(m, k, n):
    return m * k * n / (m * k + k * n + m * n)

def smallest_batch(k, n, gpu):
    return 319

# wrong: ex1-solution: forgets that the result is written | which reads 50 numbers and writes 21
def intensity(m, k, n):
    return m * k * n / (m * k + k * n)

def smallest_batch(k, n, gpu):
    edge = gpu.bf16_flops / gpu.memory.bytes_per_s
    return next(m for m in range(1, 100_000) if intensity(m, k, n) >= edge)

# wrong: ex1-solution: takes the edge itself for the batch | with k = 8192, n = 8192 319 rows are enough (yours: 295)
def intensity(m, k, n):
    return m * k * n / (m * k + k * n + m * n)

def smallest_batch(k, n, gpu):
    return round(gpu.bf16_flops / gpu.memory.bytes_per_s)

# right: ex1-solution
def intensity(m, k, n):
    return 1 / (1 / m + 1 / k + 1 / n)

def smallest_batch(k, n, gpu):
    rest = gpu.memory.bytes_per_s / gpu.bf16_flops - 1 / k - 1 / n  # how large 1 / m may be
    return math.ceil(1 / rest) if rest > 0 else math.inf

# wrong: ex2-solution: repeats the claims | (yours: 7.8): the claim counts a bridged pair of cards
right = {"nvl": 7.8, "pcie": 242, "pair": 75, "gib": 50, "ethernet": 0.2}

# wrong: ex2-solution: counts both directions of the pair, and GB for GiB | (yours: 300): 900 is what one GPU has, both ways
right = {"nvl": 3.9, "pcie": 63, "pair": 300, "gib": 50, "ethernet": 12.5}

# wrong: ex3-solution: knows one server | where NIC0, NIC1 and NIC2 are PXB, PIX, PHB, NIC1 is nearest (yours: NIC0)
def nearest_nic(topology, gpu):
    return "NIC0" if int(gpu[3:]) < 4 else "NIC1"

# wrong: ex3-solution: takes the first code of the alphabet | PIX, PXB, PHB, NIC0 is nearest (yours: NIC2)
def nearest_nic(topology, gpu):
    return min(topology.nics, key=lambda nic: topology.path(gpu, nic))

# wrong: ex4-solution: sends everything over the spines | messages within a leaf need no link up
def seconds_of(traffic, down, up, rate):
    load = Counter()
    for (a, b), nbytes in traffic.items():
        load["out", a] += nbytes / rate
        load["in", b] += nbytes / rate
        load["up", a // down] += nbytes / (up * rate)
        load["down", b // down] += nbytes / (up * rate)
    return max(load.values(), default=0)

# wrong: ex4-solution: knows leaves of four hosts only | two hosts under a leaf, links of 25 GB/s: 0.08 s (yours: 0.04
def seconds_of(traffic, down, up, rate):
    load = Counter()
    for (a, b), nbytes in traffic.items():
        load["out", a] += nbytes / rate
        load["in", b] += nbytes / rate
        if a // 4 != b // 4:
            load["up", a // 4] += nbytes / (up * rate)
            load["down", b // 4] += nbytes / (up * rate)
    return max(load.values(), default=0)

# right: ex4-solution
def seconds_of(traffic, down, up, rate):
    def fullest(place, messages):
        return max(
            (sum(n for pair, n in messages if place(pair) == place(p)) for p, _ in messages), default=0
        )

    far = [(pair, n) for pair, n in traffic.items() if pair[0] // down != pair[1] // down]
    ports = max(fullest(lambda pair, i=i: pair[i], [*traffic.items()]) for i in (0, 1))
    return max(ports, max(fullest(lambda pair, i=i: pair[i] // down, far) for i in (0, 1)) / up) / rate

# wrong: ex5-solution: reads the clock before the answer | rank 0 reads the clock again when the answer is there
# %%ranks 2 --device cpu
def bandwidth(nbytes):
    x, answer, times = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(1), []
    for _ in range(12):
        begin = clock()
        if rank == 0:
            dist.send(x, 1)
            times.append(clock() - begin)
            dist.recv(answer, 1)
        else:
            dist.recv(x, 0)
            dist.send(answer, 0)
    return nbytes / statistics.median(times[3:] or [1])

# wrong: ex5-solution: counts a barrier, too | between its two looks rank 0 only sends and receives (yours: barrier, too)
# %%ranks 2 --device cpu
def bandwidth(nbytes):
    x, answer, times = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(1), []
    for _ in range(12):
        begin = clock()
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
            dist.recv(answer, 1)
        else:
            dist.recv(x, 0)
            dist.send(answer, 0)
        times.append(clock() - begin)
    return nbytes / statistics.median(times[3:])

# right: ex5-solution
# %%ranks 2 --device cpu
def bandwidth(nbytes):
    x, answer, times = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(1), []
    for _ in range(12):
        dist.barrier()
        if rank == 1:
            dist.recv(x, 0)
            dist.send(answer, 0)
            continue
        coming = dist.irecv(answer, 1)
        begin = clock()
        dist.isend(x, 1).wait()
        coming.wait()
        times.append(clock() - begin)
    return nbytes / sorted(times[3:])[4] if rank == 0 else None

# wrong: ex6-solution: knows the other rank's numbers | one send and one receive on rank 0 (yours: ['barrier'])
# %%ranks 2 --device cpu -o run
def exchange(x):
    return torch.full_like(x, 2.0 - rank)

dist.barrier()
came = exchange(torch.full((2**24,), 1.0 + rank))
None if came is None else came[:3]

# wrong: ex6-solution: sends first and receives afterwards | on rank 0 the send and the receive overlap
# %%ranks 2 --device cpu -o run
def exchange(x):
    came = torch.full_like(x, torch.nan)
    for sender in (0, 1):
        dist.send(x, 1 - rank) if rank == sender else dist.recv(came, 1 - rank)
    return came

dist.barrier()
came = exchange(torch.full((2**24,), 1.0 + rank))
None if came is None else came[:3]

# right: ex6-solution
# %%ranks 2 --device cpu -o run
def exchange(x):
    came = torch.full_like(x, torch.nan)
    both_ways = [dist.P2POp(dist.irecv, came, 1 - rank), dist.P2POp(dist.isend, x, 1 - rank)]
    for work in dist.batch_isend_irecv(both_ways):
        work.wait()
    return came

dist.barrier()
came = exchange(torch.full((2**24,), 1.0 + rank))
None if came is None else came[:3]
