"""What the notebook 02_hardware says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: seconds-for-14-gb
check.close_to([*seconds.values()], [14 / rate for rate in (989e3, 3350, 450, 63, 50, 0.125)], rtol=0.01)
check.close_to(seconds["Ethernet 1 GbE"] / seconds["HBM3, H100 SXM"], 27_000, rtol=0.01, name="as the text says")

for gpu in (hw.GPUS["A100 SXM 80GB"], h100):
    rates = [way.bytes_per_s for way in (gpu.memory, gpu.nvlink, gpu.pcie, gpu.network)]
    assert rates == sorted(rates, reverse=True), "the order of the rungs is the same"

# after: memories
assert abs(5120 * 5.23e9 / 8 - h100.memory.bytes_per_s) < 0.01e12, "pins times bits per second and pin"

# after: copies
from unittest import mock

steps, made_up = [], [100.0] * 3 + [float(s) for s in range(1, 10)]  # of twelve rounds, by a made-up clock
looks = iter([look for s in made_up for look in (0.0, s)])
with (
    mock.patch.object(time, "perf_counter", lambda: steps.append("clock") or next(looks)),
    mock.patch.object(torch.Tensor, "copy_", lambda to, of: steps.append((to.nbytes, of.nbytes))),
):
    by_made_up = copy_rate(64)
assert steps == ["clock", (64, 64), "clock"] * 12, "all bytes are copied between two looks"
assert by_made_up == 2 * 64 / 5, "bytes read and written, by the median of 1 to 9 s"
assert torch.get_num_threads() == 1, "one thread copies"

# after: too-early
by_time = [sorted((e for e in of.events if e.kind == "comm"), key=lambda e: e.start) for of in run.ranks]
handed, answered = by_time[0][:12], by_time[0][12:]
assert [(e.op, e.nbytes) for e in handed] == [("send", 2**26)] * 12 and all(e.is_async for e in handed)
assert [e.op for e in answered] == ["send", "recv"] * 12, "there, and the answer back"
assert [e.nbytes for e in by_time[1]] == [2**26] * 12 + [2**26, 4] * 12, "rank 1 answers when it has the bytes"
assert all(a.end <= b.start for a, b in zip(by_time[1][12::2], by_time[1][13::2], strict=True))

# after: link-table
check.close_to(32e9 * 16 * 128 / 130 / 8, h100.pcie.bytes_per_s)
check.close_to([18 * 25e9, 4 * 100e9 / 8], [h100.nvlink.bytes_per_s, h100.network.bytes_per_s])
assert h100.nvlink.bytes_per_s / h100.network.bytes_per_s == 9 and h100.nvlink.both_ways == 900e9

# after: published-shares
assert (round(expected * 1e3), round(took * 1e3), round(expected / took, 2)) == (31, 35, 0.88), "nine tenths"

# after: gpu-roof
assert 0.8 < seen["copy within the GPU, bytes read and written"] / 3350 < 0.83, "near 80 % of the data sheet"
assert 0.22 < seen["host to GPU, pageable"] / 63 < 0.30, "a quarter of the PCIe rate"
products = [rate / 989e12 for _, rate in points[1:]]
assert round(small, 2) == 0.03 and [round(share, 2) for share in products[2:]] == [0.80, 0.80]
assert round(total, 2) == 0.86 and total > max(small, large, *products), "the sum comes nearest to its bound"

# wrong: rate: counts the calls that warm up | this counts the three calls that warm up
def rate(work, amount):
    times = []
    for _ in range(12):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return amount / statistics.median(times)

# wrong: rate: reads the clock before the work | the clock is read before and after each call
def rate(work, amount):
    times = []
    for _ in range(12):
        start = time.perf_counter()
        times.append(time.perf_counter() - start)
        work()
    return amount / statistics.median(times[3:])

# wrong: rate: a clock of another name | the clock is read as `time.perf_counter()`
def rate(work, amount):
    from time import monotonic

    times = []
    for _ in range(12):
        start = monotonic()
        work()
        times.append(monotonic() - start)
    return amount / statistics.median(times[3:])

# right: rate
def rate(work, amount):
    rates = []
    for _ in range(3):
        work()
    for _ in range(9):
        begin = time.perf_counter()
        work()
        rates.append(amount / (time.perf_counter() - begin))
    return sorted(rates)[4]

# right: rate
def rate(work, amount):
    looks = [time.perf_counter()]
    while len(looks) < 13:
        work()
        looks.append(time.perf_counter())
    return amount / torch.tensor(looks, dtype=torch.float64).diff()[3:].median().item()

# wrong: intensity: knows the number for the H100 | with k = 4096, n = 16384 161 rows are enough (yours: 319)
def intensity(m, k, n):
    return m * k * n / (m * k + k * n + m * n)

def smallest_batch(k, n, gpu):
    return 319

# wrong: intensity: forgets that the result is written | reads 50 numbers and writes 21
def intensity(m, k, n):
    return m * k * n / (m * k + k * n)

def smallest_batch(k, n, gpu):
    edge = gpu.bf16_flops / gpu.memory.bytes_per_s
    return next(m for m in range(1, 100_000) if intensity(m, k, n) >= edge)

# wrong: intensity: takes the edge itself for the batch | with k = 8192, n = 8192 319 rows are enough (yours: 295)
def intensity(m, k, n):
    return m * k * n / (m * k + k * n + m * n)

def smallest_batch(k, n, gpu):
    return round(gpu.bf16_flops / gpu.memory.bytes_per_s)

# wrong: intensity: searches for ever where no batch is enough | tries more and more rows, without end
def intensity(m, k, n):
    return m * k * n / (m * k + k * n + m * n)


def smallest_batch(k, n, gpu):
    m = 1
    while intensity(m, k, n) < gpu.bf16_flops / gpu.memory.bytes_per_s:
        m += 1
    return m


# right: intensity
def intensity(m, k, n):
    return 1 / (1 / m + 1 / k + 1 / n)

def smallest_batch(k, n, gpu):
    rest = gpu.memory.bytes_per_s / gpu.bf16_flops - 1 / k - 1 / n  # how large 1 / m may be
    return math.ceil(1 / rest) if rest > 0 else math.inf

# right: intensity
def intensity(m, k, n):
    return 2 * m * k * n / (2 * m * k + 2 * k * n + 2 * m * n)

def smallest_batch(k, n, gpu):  # doubles, then halves
    edge, above = gpu.bf16_flops / gpu.memory.bytes_per_s, 1
    while intensity(above, k, n) < edge:
        above *= 2
        if above > 2**40:
            return math.inf
    below = above // 2
    while above - below > 1:
        middle = (above + below) // 2
        below, above = (below, middle) if intensity(middle, k, n) >= edge else (middle, above)
    return above

# wrong: claims: repeats the claims | (yours: 7.8): the claim counts a bridged pair of cards
right = {"nvl": 7.8, "pcie": 242, "pair": 75, "gib": 50, "ethernet": 0.2}

# wrong: claims: counts both directions of the pair | (yours: 300): 900 is what one GPU has, both ways
right = {"nvl": 3.9, "pcie": 63, "pair": 300, "gib": 50, "ethernet": 12.5}

# wrong: claims: takes a GiB for a GB | gib is right (yours: 50): a GiB is 2**30 bytes
right = {"nvl": 3.9, "pcie": 63, "pair": 150, "gib": 50, "ethernet": 12.5}

# right: claims
right = {"nvl": 3.9, "pcie": 63, "pair": 150, "gib": 53.7, "ethernet": 12.5}

# right: claims
right = {"nvl": 6144 * 5.1 / 8e3, "pcie": 64 * 128 / 130, "pair": 450 / 3, "gib": 1.024**3 * 50, "ethernet": 12.5}
