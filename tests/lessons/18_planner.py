"""What the notebook 18_planner says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: p18-best
top = found.best(1)[0]
possible = np.count_nonzero(np.nan_to_num(found.rate))
assert told == f"{found.rate.size} layouts, {possible} of them possible" and possible > 1000
check.close_to(16 * job.shape.params / 1e9, 128.5, rtol=1e-3, name="GB of states without ZeRO")
check.close_to(job.chip.memory_bytes, 80 * 2**30, name="bytes of an H100")
assert command.degrees(top.layout) == "dp 64, micro-batch 1, ZeRO-1", "data parallelism is best"
check.close_to([top.memory.total / 1e9, top.tokens_per_s_per_gpu], [77, 9867], rtol=0.01)

# after: p18-memory
for name, way in ways.items():
    check.close_to(sum(piles[name].values()), float(memory.fullest(job, way)) / 1e9, name=f"GB of {name}")
shards = {"data 64": (1, 1, 1), "ZeRO-1": (1, 1, 64), "ZeRO-2": (1, 64, 64), "ZeRO-3": (64, 64, 64)}
for name, by in shards.items():  # 2, 2 and 12 bytes per parameter, what is sharded by the ranks
    for part, n, d in zip(("parameters", "gradients", "optimizer"), (2, 2, 12), by, strict=True):
        states = n * job.shape.params / d / 1e9  # and of what is sharded some layers that are gathered
        assert 0.99 * states < piles[name][part] < 1.01 * states + (0 if d == 1 else 1.5), f"{name}, {part}"
check.close_to(limit[1], 0.95 * 80 * 2**30 / 1e9, name="GB that torch can use")
assert [name for name, pile in piles.items() if sum(pile.values()) > limit[1]] == ["data 64"], "others fit"
same = piles["pipeline 8 x data 8"]["activations"], piles["ZeRO-1"]["activations"]
check.close_to(*same, name="GB of activations, with a pipeline as without")

# wrong: p18-ex1: forgets that activations and logits do not shrink | llama3-8b: 2 GPUs; yours: 1
def fewest(model):
    for n in (2**k for k in range(13)):
        job = job_of(model, n, batch=n)
        if memory.zero_states(job.shape.params, n, 3) <= 2 * memory.limit(job):
            return n

# wrong: p18-ex1: goes on without end, and says the last number | as 405b, but 8 times as wide: None GPUs; yours: 4096
def fewest(model):
    for n in (2**k for k in range(13)):
        job, layout = job_of(model, n, batch=n), Layout(dp=n, zero=3, recompute=FULL)
        if memory.fullest(job, layout) <= memory.limit(job):
            break
    return n

# after: p18-act-bars
for name, nbytes in kept.items():
    check.close_to(nbytes, s * h * table2[name][0], rtol=1e-12, name=f"bytes, as printed: {name}")
    check.close_to(mib[name] * 2**20, nbytes, name="MiB")
check.close_to(kept["as it is"], s * h * 34 + 5 * a * s * s, name="bytes of the first row, multiplied out")

# wrong: p18-ex2-solution: keeps the layer of GPT: two matrices in the MLP, all heads | bytes per token and layer; yours:
def llama_kept(h, width, kv_width, ffn, tp):
    return 2 * (4 * h + 4 * width + 2 * ffn) / tp

# wrong: p18-ex2-solution: divides only what lies inside attention and MLP: tensor without sequence parallelism | llama3-8b, tp 2:
def llama_kept(h, width, kv_width, ffn, tp):
    return 2 * (4 * h + (2 * width + 2 * kv_width + 3 * ffn) / tp)

# right: p18-ex2-solution
def llama_kept(h, width, kv_width, ffn, tp):
    return sum(2 * n // tp for n in (h, h, width, kv_width, kv_width, width, h, h, ffn, ffn, ffn))

# after: p18-batch-lines
for m, points in zip((32, 16), shares.values(), strict=True):
    for v, percent in points:  # each of 15 waits is one v-th of a micro-batch
        check.close_to(percent, 100 * 15 / (m * v + 15), name=f"idle, m = {m}, {v} chunks")
for gpus, m in ((8192, 32), (16_384, 16)):
    assert Layout(tp=8, pp=16, dp=gpus // 128).microbatches(job_of("llama3-405b", gpus, batch=2048)) == m

# after: p18-bubble-show
both = inputs + weights
printed_idle = {
    "1F1B": (p - 1) * (forward + both),
    "ZB-H1": (p - 1) * (forward + inputs - weights),
    "ZB-H2": (p - 1) * (forward + inputs - 2 * weights),
    "DualPipe": (p / 2 - 1) * (overlapped + both - 3 * weights),
}
check.close_to(idle, printed_idle, rtol=0, name="idle seconds, as printed")
held = {"1F1B": p, "ZB-H1": p, "ZB-H2": 2 * p - 1, "DualPipe": p + 1}
check.close_to(in_flight, held, rtol=0, name="micro-batches held, as printed")

# after: p18-roof-lines
first, last = ({name: points[k] for name, points in roof.items()} for k in (0, -1))
crossing = {name: n * height for name, (n, height) in first.items()}  # where a line in 1/T goes through 1
check.close_to(Fb, {1: 20_821, 8: 2603}, rtol=1e-3, name="tokens, Fβ")
check.close_to(crossing["data 64, 1 card"], Fb[1], rtol=0.01, name="tokens to hide data, 1 card")
check.close_to(crossing["data 64, 8 cards"], Fb[8], rtol=0.01, name="tokens to hide data, 8 cards")
g = 64 / 8  # query heads per key head of this model
check.close_to(crossing["context 64, 8 cards"], 2 / g * Fb[8] * 63 / 64, name="tokens to hide context")
level = [name for name in roof if abs(first[name][1] / last[name][1] - 1) < 1e-9]
assert level == ["tensor 8", "tensor 64, 8 cards", "experts 8", "pipeline 64, 8 cards"], "level lines"
ours = [first[name][1] for name in ("tensor 8", "tensor 64, 8 cards")]
check.close_to(ours, [0.45, 5.15], rtol=0.02, name="tensor parallelism in a node and over eight")
assert first["pipeline 64, 8 cards"][1] < 0.2, "a pipeline sends little"

# after: p18-step
total = {name: sum(step.values()) for name, step in steps.items()}
check.close_to(
    total, {n: float(seconds.step(job, way).total) for n, way in five.items()}, name="no part lost"
)
assert min(total, key=total.get) == "data 64, ZeRO-1", "data parallelism is fastest here"
check.close_to(total["the same, all recomputed"] / total["data 64, ZeRO-1"], 1.3, rtol=0.01)
check.close_to(steps["pipeline 8 x data 8"]["model"] / steps["data 64, ZeRO-1"]["model"], 1.44, rtol=0.01)
plain, chunked = (step["bubble"] for name, step in steps.items() if "pipeline" in name)
check.close_to(plain, 4 * chunked, rtol=0.03, name="seconds of the bubble, four times that of four chunks")
assert [name for name, step in steps.items() if step["recomputed"]] == ["the same, all recomputed"]

# after: p18-grid
for rank in range(8):
    mine = sorted((e for e in events if e.rank == rank), key=lambda e: e.start)
    assert len(mine) == 2 * 128 / 8, "16 forwards and 16 backwards on each stage"
    warm_up = next(k for k, e in enumerate(mine) if "B" in e.op)
    assert warm_up == min(8 - rank, 16), "1F1B: stage p holds 8 - p micro-batches before its first backward"

# wrong: p18-ex3-solution | step after step, fewest ranks first; (step, ranks) of yours goes ['from (1, 8) to (1, 2)']
def recipe(job):
    best = {"tp": 1, "cp": 1, "pp": 1, "micro_batch": 1, "chunks": 1}
    for _ in range(2):  # each degree in turn, and again
        for name in ("tp", "pp", "cp", "micro_batch", "chunks"):
            ways = [best | {name: n} for n in (1, 2, 4, 8)]
            best = max(ways, key=lambda way: judge(job, **way))
    return best

# wrong: p18-ex3-solution | at most 100 questions; yours:
def recipe(job):
    degrees = [1, 2, 4, 8]
    ways = [
        {"tp": t, "pp": p, "cp": c, "micro_batch": b}
        for t in degrees
        for p in degrees
        for c in degrees
        for b in (1, 2)
    ]
    return max(ways, key=lambda way: judge(job, **way))

# right: p18-ex3-solution
def recipe(job):
    rates, ranks = {}, 1
    while not rates:
        for pp in (2**k for k in range(ranks.bit_length())):
            for tp in (1, 2, 4, 8):
                cp = ranks // (pp * tp)
                if cp in (1, 2, 4, 8) and (rate := judge(job, tp=tp, pp=pp, cp=cp)):
                    rates[tp, pp, cp] = rate
        ranks *= 2
    tp, pp, cp = max(rates, key=rates.get)
    split = {"tp": tp, "pp": pp, "cp": cp}
    b = max((1, 2, 4), key=lambda b: judge(job, **split, micro_batch=b))
    chunks = max((1, 2, 4), key=lambda v: judge(job, **split, micro_batch=b, chunks=v)) if pp > 1 else 1
    return split | {"micro_batch": b, "chunks": chunks}

# after: p18-pub-run
marked = [r for r in runs if r.get("tier") == "B" or "tier=B" in r["notes"]]
assert (len(runs), len(timed), len(marked)) == (1477, 432, 975), "rows: all, shown, marked B"
assert sum(r["source"] == "nanotron_playbook" for r in marked) > 0.95 * len(marked), "of the Playbook"
assert [int(r["cp"] or 1) for r in timed if int(r["cp"] or 1) > 1] == [2, 2], "two with cp, over 2 ranks"
row = timed[0]  # above 0 the plan is faster than the run
theirs = float(row["tokens_per_s_per_gpu"])
signed = (predict(row)["tokens_per_s_per_gpu"] - theirs) / theirs
check.close_to(off[NAMES[row["source"]]][0], signed, name="the sign of the error")
assert sum(map(len, off.values())) == len(timed) and np.median(np.abs(np.concatenate([*off.values()]))) < 0.05

# after: p18-apart
shown = {name: [float(percent[:-1]) for percent in columns[1:]] for name, *columns in rows}
for name, row in (*apart.items(), ("memory, not left out", stacks.ERRORS["memory"]["all"])):
    check.close_to(shown[name], [100 * row[k] for k in ("median", "p90", "signed")], atol=0.051, name=name)
    assert shown[name][0] < shown[name][1], "half of the rows are nearer than nine of ten"
unknown = [shown[name][0] for name in ("zero bubble", "playbook, whole", "MLPerf", "SimuMax")]
assert (min(unknown), max(unknown)) == (6.4, 34.3), "stacks that no other row uses: 6 to 34 %"
assert shown["memory, not left out"][0] < 9 and shown["memory, not left out"][1] < 24.5, "as the text says"

# wrong: p18-ex4: leaves the bug | TFLOP/s, 24 layers
def tokens_per_s(tflops, shape, seq):
    return tflops * 1e12 / shape.flops_per_token(seq)

# wrong: p18-ex4: scales by what happens to come out for the first row | tokens/s; yours:
def tokens_per_s(tflops, shape, seq):
    return 0.70 * tflops * 1e12 / shape.flops_per_token(seq)

# after: p18-ping-fit
assert {e.nbytes for e in ping.events if e.op == "send"} == {*times[0]}, "as many bytes as it says"
relative = np.array([(1 / t, size / t) for size, t in times[0].items()])  # alpha / t + S beta / t is about 1
check.close_to(tuple(link), np.linalg.lstsq(relative, np.ones(len(relative)), rcond=None)[0], rtol=1e-3)
calls = [[e for e in r.events if e.kind == "comm"] for r in ping.ranks]
laps = {size: [] for size in times[0]}  # half of the time from there to back, seen from rank 0: not shorter
for before, away, back in zip(*(calls[0][k::3] for k in range(3)), strict=True):
    assert [before.op, away.op, back.op] == ["barrier", "send", "recv"], "there and back"
    over = back.end if back.done is None else back.issued
    laps[away.nbytes].append((over - away.start) / 2)
for size, each in laps.items():
    assert times[0][size] >= 0.9 * sorted(each)[0], "a lap is not shorter than its calls"

# after: p18-cluster-lines
way, near = compared["tensor 8 x pipeline 8"], replace(wanted.chip, network=1e9 / communication.PORT)
step = seconds.step(replace(wanted, chip=replace(near, alpha_across=link.alpha)), way)  # with your latency
check.close_to(speed(way, 1e9), wanted.batch * wanted.seq / 64 / float(step.total), name="tokens/s/GPU")
ranking = {r: sorted(compared, key=lambda name: -speed(compared[name], r)) for r in (*rates, 2e9, 20e9)}
data, pipeline, zero3 = compared
assert ranking[2e9][0] == pipeline and ranking[20e9][0] == data, "they change places between 2 and 20 GB/s"
assert all(order[-1] == zero3 for order in ranking.values()), "ZeRO-3 is last at every rate"
assert all(memory.fullest(wanted, way) < memory.limit(wanted) for way in compared.values()), "all three fit"
assert memory.fullest(wanted, Layout(dp=64, zero=3)) > memory.limit(wanted), "only with all recomputed"
steps = [wanted.batch * wanted.seq / 64 / speed(compared[data], rate) for rate in (1e8, 2e8)]
by_slope = (steps[0] - steps[1]) / (1 / 1e8 - 1 / 2e8) * wanted.stack.network  # bytes; the rest is the same
gradients = float(communication.data(wanted, compared[data]).nbytes)
check.close_to(by_slope, gradients, name="bytes between nodes, from how the step falls with the rate")

# wrong: p18-ex5: forgets that all GPUs work at once | 18.3 days; yours: 1,173.0
def bill(rate, gpus, tokens, price, watts):
    hours = tokens / rate / 3600
    return hours / 24, hours * price, hours * watts / 1e6

# wrong: p18-ex5: pays for one GPU | 56,304.0 money; yours: 879.8
def bill(rate, gpus, tokens, price, watts):
    hours = tokens / (rate * gpus) / 3600
    return hours / 24, hours * price, hours * watts / 1e6

# after: p18-panel-def
from itertools import product

shown = planned("llama3-8b", "H100-80", 64, 50.0, 1, 1, 1, "none").parts[0].rows
assert dict(shown)["verdict"] == f"{found.best(1)[0].tokens_per_s_per_gpu:,.0f} tokens/s/GPU", "as at the top"
assert dict(shown)["bottleneck"].startswith("memory traffic, 11%"), "and why"
fits = [
    (tp, pp, again)
    for tp, pp, again in product((1, 2, 4, 8), (1, 4), ("none", "all"))
    if "rejected" not in repr(planned("llama3-70b", "H100-80", 64, 50.0, tp, pp, 1, again).parts[0])
]
fewest_tp = {rest: min(tp for tp, *of in fits if of == [*rest]) for rest in product((1, 4), ("none", "all"))}
assert [*fewest_tp.values()] == [8, 8, 4, 2], "70B with ZeRO-1: tp 8 with pp 1, tp 4 or 2 with pp 4"
assert planned("llama3-8b", "H100-80", 64, 5.0, 8, 1, 0, "none").parts[0].rows != shown, "choices count"

# after: p18-page-rows
by = {row[0].split(",")[0].split(" (")[0]: row for row in rows}
states, of_8b = [float(row[1]) for row in rows[:3]], one.shape.params / 1e9
check.close_to(states, [n * of_8b for n in (16, 5.5, 3.75)], rtol=0.02, name="GB of states, ZeRO 0 to 2")
halves = [float(by[name][2]) for name in ("tensor", "context")]
check.close_to(halves, [37 / 8] * 2, atol=0.5, name="GB of activations, an eighth")
check.close_to(
    float(by["data"][3]), 2 * 7 / 8 * 2 * of_8b, rtol=0.01, name="GB sent: 2 (n - 1) / n of the gradients"
)
assert by["ZeRO-1"][3] == by["data"][3], "ZeRO-1 sends what data parallelism sends"
check.close_to(float(by["ZeRO-3"][3]) / float(by["data"][3]), 1.5, rtol=0.01)
lost = {name: int(row[4][:-1]) for name, row in by.items()}
assert max(lost, key=lost.get) == "pipeline" and 20 < lost["recompute all"] <= 25, "at most one pass in four"

# after: p18-ways
small, large = ({way: points[k][1] for way, points in by_way.items()} for k in (0, -1))
assert small["ring"] > 6 * small["hierarchical"] > 12 * small["in-switch"], "16 KiB: steps decide"
assert small["tree"] < small["hierarchical"], "16 KiB: a tree takes fewer steps than the hierarchy"
assert large["in-switch"] < large["ring"] < min(large["tree"], large["hierarchical"]), "16 GiB"
check.close_to(small["ring"] / (2 * 1023), many.chip.alpha_across, rtol=0.02, name="seconds of one step")

# after: p18-zb
assert len(rows) == 12 and all(0 <= float(r[3]) - float(r[2]) < 0.03 for r in rows), "a little below"
for name, m, ours, _ in rows:
    p = int(name.split("_p")[1])
    check.close_to(float(ours), (p - 1) / (int(m) + p - 1), atol=6e-5, name="the bubble of 1F1B")

# after: p18-rehearse-compare
more = counted["inside a node"] / arithmetic["inside a node"]
for name in ("between nodes", "kept for backward"):
    check.close_to(counted[name], arithmetic[name], rtol=0.01, name=f"bytes {name}")
check.close_to(more, 1 + 2 / (4 * two.layers), rtol=0.01, name="inside the node, two sums more than eight")
check.close_to(in_gb["between nodes, rehearsed"], 0.699, rtol=0.02, name="GB between nodes")

# wrong: p18-ex6-solution: sums between the nodes after every micro-batch | between nodes at most
# %%ranks 1 of 1024 --on 128xh100x8 --as 7 -o quiet
def step(model, batches):
    mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("replicate", "shard"))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for batch in batches:
        models.cross_entropy(model(batch), batch).backward()

step(llama(), [tokens] * 4)

# wrong: p18-ex6-solution: never sums between the nodes | of gradients are summed over the nodes
# %%ranks 1 of 1024 --on 128xh100x8 --as 7 -o quiet
def step(model, batches):
    mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("replicate", "shard"))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    model.set_requires_all_reduce(False)
    for batch in batches:
        models.cross_entropy(model(batch), batch).backward()

step(llama(), [tokens] * 4)

# right: p18-ex6-solution
# %%ranks 1 of 1024 --on 128xh100x8 --as 7 -o quiet
def step(model, batches):
    mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("nodes", "gpus"))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["nodes", "gpus"], mp_policy=policy, reshard_after_forward=False)
    *others, last = batches
    model.set_requires_all_reduce(False)
    for batch in others:
        models.cross_entropy(model(batch), batch).backward()
    model.set_requires_all_reduce(True)
    models.cross_entropy(model(last), last).backward()

step(llama(), [tokens] * 4)
