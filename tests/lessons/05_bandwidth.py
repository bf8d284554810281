"""What the notebook 05_bandwidth says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: lower-limits
assert [round(1e3 * sent / rate) for rate in (450e9, 50e9)] == [54, 490] and abs(computing - 0.435) < 5e-3

# after: ring-steps
carried = [e.watched.before[e.watched.part[0]] for e in run.ranks[0].events if e.op == "send"]
assert carried == [1, 1001, 1101, 1111, 1111, 1111], "what rank 0 sends, as the answer says"
assert [sum(e.nbytes for e in r.events if e.op == "send") for r in run.ranks] == [1.5 * 16] * 4, "2 (n-1)/n S"

# after: sweep
sizes = [2**k for k in (10, 14, 18, 20, 22, 24)]
first = swept.ranks[0].events
assert [e.nbytes for e in first if e.op == "all_reduce" and e.nbytes > 4] == [s for s in sizes for _ in range(11)]
assert [e.nbytes for e in first if e.op == "send"] == [s // 4 for s in sizes for _ in range(6 * 11)], "a quarter"
assert library == [library[0]] * 4 and ring == [ring[0]] * 4, "one time for all ranks"

# after: sweep-table
row = bandwidths({2**20: 1e-3}, 4).rows[0]
assert row[2:] == (format_rate(2**20 / 1e-3), format_rate(1.5 * 2**20 / 1e-3)), "algbw, then 2 (n - 1) / n of it"

# after: busbw-picture
published = gpus["8 H100, published"]
assert abs(published[2**34] - 480e9) < 1e9 and abs(published[2**30] - 466.33e9) < 1e8, "as the table prints"
mine = here["4 ranks, the library"]
assert all(abs(mine[s] / (1.5 * s / t) - 1) < 1e-9 for s, t in library[0].items()), "four ranks send 1.5 S"
array = 2**34 / 62648e-6  # bytes per second
check.close_to([array, 9 / 8 * array / 450e9], [274e9, 0.69], rtol=0.01, name="as the text says")
assert (round(9 / 8 * round(array / 1e9)), round(14e12 / array)) == (308, 51), "GB/s on the link, ms for 14 GB"

# after: worst-fit
import statistics

assert abs(h100[2**34] / (alpha + beta * 2**34) - 0.888) < 2e-3, "at 16 GiB 11 % less than the line"

assert worst == 2**22 and abs(times_as_long - 1.54) < 0.01, "worst at 4 MiB"
assert abs(statistics.linear_regression(list(us), list(us.values())).intercept - 55) < 0.5, "a plain line"

# after: three-calls-table
t = timed[0]["all_reduce", 2]
assert rows[2][2:] == (format_rate(2**24 / t),) * 2, "on two ranks both bandwidths are the same"
t = timed[0]["reduce_scatter", 4]
assert rows[1][3] == format_rate(0.75 * 2**24 / t), "one phase"

# after: buckets
# %%ranks 4 -o _packed
for i, g in enumerate(gradients):
    g.fill_(i * (rank + 1))
in_a_bucket()
assert [g.tolist() for g in gradients] == [[10.0 * i] * 1024 for i in range(32)], "each gradient is summed"

# after: buckets
carried = [e.nbytes for e in packed.ranks[0].events if e.op == "send"]  # 1 + 4 times, and 3 + 20 times
assert carried == [2**10] * (5 * 32 * 6) + [2**15] * (23 * 6), "six messages for each array, or for all of them"

# after: tree-steps
up_and_down = [[(e.op, e.peer) for e in r.events if e.op in ("send", "recv")] for r in small.ranks]
assert up_and_down[0] == [("recv", 1), ("recv", 2), ("send", 2), ("send", 1)], "rank 0, as the text says"
assert up_and_down[2] == [("recv", 3), ("send", 0), ("recv", 0), ("send", 3)], "and rank 2"
one = costs.Link(alpha=1.0, beta=1.0)
assert abs(costs.ring_all_reduce(0.8, 4, one) - costs.tree_all_reduce(0.8, 4, one)) < 1e-9, (
    "equal at 0.8 a / b"
)

# after: rounds-ratios
s = 2**22  # 4 MiB: six messages of a quarter or four of the whole, then in rounds of `at_once`
formula = {"ring": 6 * link.send(s / 4), "tree": 4 * link.send(s)}
rounds_of = {
    "ring": 6 * -(-4 // at_once) * link.send(s / 4),
    "tree": 2 * (1 + -(-2 // at_once)) * link.send(s),
}
for op in formula:
    check.close_to([off[op][s] * formula[op], after[op][s] * rounds_of[op]], [seconds[op][s]] * 2)
assert 2 * at_once <= max(2, cores), "no core serves two messages"
fewer = ring_counted(s, 4, link) - tree_counted(s, 4, link)
assert at_once > 1 or abs(fewer / (18 * link.alpha + 1e-12) - 1) < 1e-6 or link.alpha == 0, "18 alpha"

# after: wire-table
with_parts = 3 / 4 + 3 / 16  # the reduce: three ranks of four send their part, a quarter of S, to rank 0
expected = [1.5, 0.75, 0.75, 0.75, with_parts, 1.5]
check.close_to([*sent.values()], expected if sent else [], rtol=0.02, name="arrays that a rank sends")

# after: tree-size-check
assert abs(tree_up_to(256, nic) / tree_up_to(4, nic) - 44) < 0.5, "44 times as large, as the answer says"

# after: busbw-formula-check
assert abs(335 * 1024**3 / 1e9 - 360) < 1 and abs(83 * 4 - 335) < 4, (
    "the all-reduce beside it, and the factor"
)

# after: ex4-curve
assert best == 13 and abs(finish(1) - finish(13) - 0.043) < 1e-3, "13 buckets are 43 ms earlier"

# after: pieces-curve
assert all(e.is_async for e in in_pieces.events if e.op == "send"), "no rank stands while a piece leaves"
check.close_to([by_pieces[k] for k in (1, 10, 1000)], [25.5e-3, 4.5e-3, 22e-3], rtol=0.01)

# wrong: benchmark: the mean of the ranks | of the slowest one, 0.04 (yours, by rank: 0.025, 0.025, 0.025, 0.025)
# %%ranks 4
def benchmark(call, iterations=20, warmup=3):
    for _ in range(warmup):
        call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    seconds = torch.tensor((time.perf_counter() - start) / iterations)
    dist.all_reduce(seconds)
    return seconds.item() / world_size

# wrong: benchmark: the time of each rank by itself | of the slowest one, 0.04 (yours, by rank: 0.01, 0.02, 0.03, 0.04)
# %%ranks 4
def benchmark(call, iterations=20, warmup=3):
    for _ in range(warmup):
        call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    return (time.perf_counter() - start) / iterations

# wrong: benchmark: the clock starts before the barrier | nothing but the calls runs under the clock
# %%ranks 4
def benchmark(call, iterations=20, warmup=3):
    for _ in range(warmup):
        call()
    start = time.perf_counter()
    dist.barrier()
    for _ in range(iterations):
        call()
    seconds = torch.tensor((time.perf_counter() - start) / iterations)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()

# wrong: benchmark: a clock for each call | the clock is read once before the calls and once after them
# %%ranks 4
def benchmark(call, iterations=20, warmup=3):
    for _ in range(warmup):
        call()
    dist.barrier()
    took = 0.0
    for _ in range(iterations):
        start = time.perf_counter()
        call()
        took += time.perf_counter() - start
    seconds = torch.tensor(took / iterations)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()

# right: benchmark: gathers the times, and meets in an all-reduce
# %%ranks 4
def benchmark(call, iterations=20, warmup=3):
    [call() for _ in range(warmup)]
    dist.all_reduce(torch.zeros(1))
    start = time.perf_counter()
    [call() for _ in range(iterations)]
    took = time.perf_counter() - start
    times = [None] * world_size
    dist.all_gather_object(times, took / iterations)
    return max(times)

# wrong: fit: minimises the plain errors | the H100: alpha is 18.1 us, by relative errors (yours: 55.1 us)
def fit(seconds):
    slope, intercept = np.polyfit(list(seconds), list(seconds.values()), 1)
    return intercept, slope

# wrong: fit: returns the numbers of the target | four noisy times: alpha is 1001.1 us
def fit(seconds):
    return 18.08e-6, 1 / 243.7e9

# right: fit: solves the two normal equations
def fit(seconds):
    u, v = [1 / t for t in seconds.values()], [s / t for s, t in seconds.items()]
    uu, uv, vv = (sum(a * b for a, b in zip(x, y)) for x, y in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    return (sum(u) * vv - sum(v) * uv) / determinant, (uu * sum(v) - uv * sum(u)) / determinant

# right: tree-size: where two straight lines meet
def tree_up_to(n, link):
    levels = math.ceil(math.log2(n))
    slope_of_ring, slope_of_tree = 2 * (n - 1) / n * link.beta, 2 * levels * link.beta
    return (2 * (n - 1) * link.alpha - 2 * levels * link.alpha) / (slope_of_tree - slope_of_ring)

# wrong: tree-size: knows four ranks only | on 64 ranks the tree is faster up to 2273 kB (yours: 160 kB)
def tree_up_to(n, link):
    return 0.8 * link.alpha / link.beta

# wrong: tree-size: does not round the height of the tree | on 12 ranks the tree is faster up to 454 kB
def tree_up_to(n, link):
    levels = __import__("math").log2(n)
    return (n - 1 - levels) / (levels - (n - 1) / n) * link.alpha / link.beta

# right: busbw-formula: what each rank sends on a ring, by hand
def reduce_scatter_busbw(output_bytes, seconds, n):
    return output_bytes * (n - 1) / seconds * 1e-9

# wrong: busbw-formula: puts back the factor of the world size, and keeps GiB | (yours: 332.0); 1 GB is 10^9 bytes
def reduce_scatter_busbw(output_bytes, seconds, n):
    return output_bytes * (n - 1) / seconds / 1024**3

# wrong: busbw-formula: is made for four ranks | 8 ranks that keep 1.0 GB each
def reduce_scatter_busbw(output_bytes, seconds, n):
    return output_bytes * 3 / seconds / 1e9

# right: bucket-count: backwards in time, from the last bucket
def finish(k, backward=0.050, nbytes=500e6, link=cluster):
    each = costs.ring_all_reduce(nbytes / k, 8, link)
    return max(backward * i / k + (k - i + 1) * each for i in range(1, k + 1))

# wrong: bucket-count: begins to communicate when the backward pass is over | (yours: 277.5 ms)
def finish(k, backward=0.050, nbytes=500e6, link=costs.Link(alpha=20e-6, beta=1 / 10e9)):
    return backward + k * costs.ring_all_reduce(nbytes / k, 8, link)

# wrong: bucket-count: looks the targets up | 1 GB in four buckets, in a backward of 1 s
def finish(k, *others):
    return {1: 0.1378, 500: 0.2276}.get(k, 0.0950)

# wrong: ring: lets the library do it | (you called all_reduce)
# %%ranks 4 -o run
def ring_all_reduce(x):
    dist.all_reduce(x)

x = torch.full((4,), 10.0**rank)
ring_all_reduce(x)
x

# wrong: ring: knows the sum without communicating | six messages per rank
# %%ranks 4 -o run
def ring_all_reduce(x):
    x.fill_(1111)

x = torch.full((4,), 10.0**rank)
ring_all_reduce(x)
x

# right: ring
# %%ranks 4 -o run
def ring_all_reduce(x):  # to the left, with irecv, the all-gather in a loop of its own
    n, ends = world_size, [len(x) * i // world_size for i in range(world_size + 1)]
    parts = [x[a:b] for a, b in zip(ends, ends[1:])]
    for k in range(n - 1):
        came = torch.empty_like(parts[(rank + k + 1) % n])
        both = dist.irecv(came, (rank + 1) % n), dist.isend(parts[(rank + k) % n], (rank - 1) % n)
        [work.wait() for work in both]
        parts[(rank + k + 1) % n] += came
    for k in range(n - 1):
        both = (
            dist.irecv(parts[(rank + k) % n], (rank + 1) % n),
            dist.isend(parts[(rank + k - 1) % n], (rank - 1) % n),
        )
        [work.wait() for work in both]

x = torch.full((4,), 10.0**rank)
with watch(x):
    ring_all_reduce(x)
x

# wrong: ex8-solution: uses the ring | four messages per rank (yours: [6, 6, 6, 6])
# %%ranks 4 -o run
def halving_doubling(x):
    ring_all_reduce(x)

x = torch.arange(2.0**18) * (rank + 1)
halving_doubling(x)
x[:: 2**16].tolist()

# wrong: ex8-solution: exchanges the whole array twice | four messages per rank (yours: [2, 2, 2, 2])
# %%ranks 4 -o run
def halving_doubling(x):
    for distance in (2, 1):
        came = torch.empty_like(x)
        exchange(x.clone(), came, rank ^ distance)
        x += came

x = torch.arange(2.0**18) * (rank + 1)
halving_doubling(x)
x[:: 2**16].tolist()

# right: ex8-solution
# %%ranks 4 -o run
def halving_doubling(x, distance=2):
    if distance == 0:
        return
    halves = x.chunk(2)
    keep, give = halves if rank & distance == 0 else halves[::-1]
    came = torch.empty_like(keep)
    exchange(give, came, rank ^ distance)
    keep.add_(came)
    halving_doubling(keep, distance // 2)
    exchange(keep, give, rank ^ distance)

x = torch.arange(2.0**18) * (rank + 1)
halving_doubling(x)
x[:: 2**16].tolist()
