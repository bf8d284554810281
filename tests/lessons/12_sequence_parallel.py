"""What 12_sequence_parallel says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: activations-drawn
check.close_to([gigabytes(n, kind) for kind, n in filled.items()], [80, 80], name="GB where a GPU is full")
check.close_to([*filled.values()], [3_500, 18_000], rtol=0.02, name="positions")
assert [word for _, word in marks] == [
    f"{n:,.0f}" for n in (filled["with the scores"], 80e9 / (32 * 34 * 4096))
]

# wrong: ex1-solution | after scores of 3 and 5 the sum is exp(3 - 5) + exp(5 - 5) = 1.135 (yours: 168.
def add(seen, scores, value):  # never subtracts the largest
    largest, total, values = seen
    weights = torch.exp(scores)
    return largest, total + weights.sum(-1, keepdim=True), values + weights @ value

# wrong: ex1-solution | output, scores near -900
def add(seen, scores, value):  # a largest score of 0 at least
    largest, total, values = seen
    new = torch.maximum(largest, scores.amax(-1, keepdim=True)).clamp(min=0)
    old, weights = torch.exp(largest - new), torch.exp(scores - new)
    return new, total * old + weights.sum(-1, keepdim=True), values * old + weights @ value

# right: ex1-solution
def add(seen, scores, value):
    largest, total, values = seen
    both = torch.cat([largest + total.log(), scores], -1)  # the sum so far as one more key
    new = both.amax(-1, keepdim=True)
    weights = torch.exp(both - new)
    old = torch.exp(largest - new)
    return new, weights.sum(-1, keepdim=True), values * old + weights[..., 1:] @ value

# after: largest-score
scores = 300 * q[0, 0, 0] @ k[0, 0].T / 32**0.5  # of query 0 with all 1024 keys
so_far = [scores[: 64 * (i + 1)] for i in range(16)]
check.close_to(largest, [s.max().item() / 1000 for s in so_far], name="largest scores / 1000")
check.close_to(outputs, [(s.softmax(0) @ v[0, 0, : len(s), 0]).item() for s in so_far], name="outputs")
assert scores.max().exp().isinf(), "exp of the largest score overflows even in float64"

# after: going-round-drawn
check.close_to(going_round.values, [[0, 10, 20, 30]] * 4, name="every rank met all blocks")

# after: ring-verdict
# %%ranks 4 -o _causal
ring(q, k, v, causal=True)[0], lse

# after: ring-verdict
outputs, sums = zip(*_causal.values, strict=True)
check.equals_dense(whole(outputs), dense_attention(True)[0], atol=1e-9, name="causal")
q, k = (x.double() for x in sequence()[:2])
check.equals_dense(whole(sums), (q @ k.mT / 32**0.5).logsumexp(-1, keepdim=True), atol=1e-9, name="lse")

# after: level-drawn
blocks = {
    "full": (full, [4] * 4),
    "late": (late, [4] * 4),
    "causal": (causal, [0.5, 1.5, 2.5, 3.5]),
    "level": (level, [2] * 4),
}
for name, (run, work_of) in blocks.items():
    for of, n in zip(run.ranks, work_of, strict=True):
        in_order = sorted((e for e in of.events if e.op != "barrier"), key=lambda e: e.start)
        messages_of = [e for e in in_order if e.kind == "comm"]
        computed = sum(e.seconds for e in in_order if e.kind == "compute")
        assert computed > 0.199 * n, f"{name}: rank {of.rank} computes {n} blocks of 200 ms"
        assert [e.op for e in messages_of] == ["send", "recv"] * 3, f"{name}: three blocks are passed on"
        assert all(e.nbytes == 2 * 4 * 256 * 32 * 8 and e.seconds > 0.079 for e in messages_of), "80 ms each"
        if name in ("full", "late"):
            first = ["send", "recv", "block"] if name == "full" else ["block", "send", "recv"]
            kinds = [e.op.split()[0] for e in in_order]
            assert kinds == (first * 3 + ["block"]), (
                f"{name}: rank {of.rank} passes on before or after it computes"
            )
            used = [int(e.op[-1]) for e in in_order if e.kind == "compute"]
            assert used == [(of.rank - step) % 4 for step in range(4)], (
                "own block first, then those that come"
            )

# after: layouts-drawn
by_band = [m.sum(1).view(4, 4).sum(1).tolist() for m in by_rank.values()]
assert by_band == [[10, 26, 42, 58], [34] * 4], "filled cells of each rank's band"
assert all(m.diagonal().all() for m in by_rank.values()), "queries and keys in the same order"

# wrong: ex2-solution | every rank passes on three blocks: [0, 0, 0, 0]
# %%ranks 4
def zigzag(q, k, v):
    rows, source, seen = q.chunk(2, 2), rank, [start(part) for part in q.chunk(2, 2)]
    for i, j in (0, 0), (1, 0), (1, 1):
        with span(f"{'triangle' if i == j else 'whole'} of {source}"):
            seen[i] = add(seen[i], scores_of(rows[i], k.chunk(2, 2)[j], i == j), v.chunk(2, 2)[j])
    return torch.cat([values / total for _, total, values in seen], 2)

# wrong: ex2-solution | 9 looks on every rank: [3, 7, 11, 15]
# %%ranks 4
def pairs(source):  # compares ranks instead of pieces
    return [(i, j) for i in (0, 1) for j in (0, 1) if source < rank or (source == rank and j <= i)]

def zigzag(q, k, v):
    rows, block = q.chunk(2, 2), torch.stack([k, v])
    seen = [start(part) for part in rows]
    for step in range(world_size):
        coming, wait = pass_on(block) if step < 3 else (None, lambda: None)
        source = (rank - step) % world_size
        for i, j in pairs(source):
            with span(f"{'triangle' if source == rank and i == j else 'whole'} of {source}"):
                key, value = (part.chunk(2, 2)[j] for part in block)
                seen[i] = add(seen[i], scores_of(rows[i], key, source == rank and i == j), value)
        wait()
        block = coming
    return torch.cat([values / total for _, total, values in seen], 2)

# right: ex2-solution
# %%ranks 4
def pairs(source):  # for the loop of the answer above: late queries see all early pieces
    if source == rank:
        return [(0, 0), (1, 0), (1, 1)]
    return [(0, 0), (1, 0)] if source < rank else [(1, 0), (1, 1)]

# wrong: ex3-solution: leaves the bug | with 4 ranks no query sees a later key
def places(rank, n, world_size):
    return torch.arange(n) + n * rank

# wrong: ex3-solution: counts the back pieces from the wrong end | with 4 ranks no query sees a later key
def places(rank, n, world_size):  # counts the late pieces from the wrong end
    piece = torch.arange(n // 2)
    return torch.cat([piece + n // 2 * rank, piece + n // 2 * (world_size + rank)])

# wrong: ex3-solution: knows four ranks only | positions of 3 ranks: 6 of 12 numbers differ
def places(rank, n, world_size):
    piece = torch.arange(n // 2)
    return torch.cat([piece + n // 2 * rank, piece + n // 2 * (7 - rank)])

# after: sums-follow-drawn
check.close_to(follows.values, [1111] * 4, name="every rank added its part to each sum")

# wrong: ex4-solution | The largest difference is at ['gradient of
# %%ranks 4
def of_block(q, key, value, triangle, lse, g, mean):
    p = torch.exp(scores_of(q, key, triangle) - lse)
    ds = p * (g @ value.mT - mean) / q.shape[-1] ** 0.5
    return ds @ key, torch.stack([ds.mT @ q, p.mT @ g])

def ring_backward(q, k, v, out, lse, g, causal):  # its own block only
    part, here = of_block(q, k, v, causal, lse, g, (g * out).sum(-1, keepdim=True))
    return part, *here

# wrong: ex4-solution | 3 blocks forward, 3 backward and 4 sums; sent: [3.0, 3.0, 3.0, 3.0]
# %%ranks 4
def ring_backward(q, k, v, out, lse, g, causal):  # right numbers, by two other collectives
    blocks, mean = [torch.empty_like(torch.stack([k, v])) for _ in range(4)], (g * out).sum(-1, keepdim=True)
    dist.all_gather(blocks, torch.stack([k, v]))
    visible = range(rank + 1 if causal else 4)
    parts = [of_block(q, *blocks[r], causal and r == rank, lse, g, mean) for r in visible]
    sums = torch.stack([parts[r][1] if r in visible else torch.zeros_like(blocks[r]) for r in range(4)])
    dist.all_reduce(sums)
    return sum(part for part, _ in parts), *sums[rank]

# wrong: ex4-solution | 9 of 10 messages of rank 3 travel while it computes
# %%ranks 4
def ring_backward(q, k, v, out, lse, g, causal, at_once=True):
    block, grad_q, sums = torch.stack([k, v]), torch.zeros_like(q), (0, lambda: None)
    for step in range(4):
        following, wait = pass_on(block) if step < 3 else (None, lambda: None)
        source, here = (rank - step) % 4, torch.zeros_like(block)
        if source <= rank or not causal:
            with span("block"):
                part, here = of_block(
                    q, *block, causal and source == rank, lse, g, (g * out).sum(-1, keepdim=True)
                )
                grad_q += part
        sums[1]()
        sums = pass_on(here + sums[0])
        if at_once:
            sums[1]()
            sums = sums[0], lambda: None
        wait()
        block = following
    sums[1]()
    return grad_q, *sums[0]

# right: ex4-solution
# %%ranks 4
_plain = ring_backward

def ring_backward(*args, **kwargs):
    return _plain(*args, **kwargs, at_once=False)

# after: train-one-process
def summed(way):
    """Losses (the ranks' shares added up), gradients of rank 3 and its weights."""
    return [[sum(of) for of in zip(*(run[way][0] for run in runs), strict=True)], *runs[3][way][1:]]

for way, layout in zip(runs[0], context.LAYOUTS, strict=True):
    check.equals_dense(summed(way), dense_steps, atol=1e-6, name=way)
    check.same_on_all_ranks([run[way][2] for run in runs])
gpt, first = small_gpt(), ()  # a plain loop without the helpers
adam = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
for step, (x, y) in enumerate(models.batches(models.encode(models.text()), 5, size=8, length=32)):
    each = torch.nn.functional.cross_entropy(gpt(x).flatten(0, 1), y.flatten(), reduction="none").view(8, 32)
    grads = torch.autograd.grad(each.mean(), [*gpt.parameters()])  # of this step alone
    first = first or grads
    for p, grad in zip(gpt.parameters(), grads, strict=True):
        p.grad = grad
    adam.step()
    for way, layout in zip(runs[0], context.LAYOUTS, strict=True):
        of_rank = [each[:, context.positions(32, r, 4, layout=layout)].sum().item() / 256 for r in range(4)]
        check.close_to(
            [run[way][0][step] for run in runs], of_rank, name=f"{way}: losses of a rank's positions"
        )
check.equals_dense(dense_steps[1:], [[*first], [p.detach() for p in gpt.parameters()]], name="a plain loop")
looks = [sum(e.kind == "compute" for e in of_rank.events) for of_rank in trained.ranks]
assert looks == [5 * 2 * 2 * (r + 1) for r in range(4)], "our ring was in the model: r + 1 blocks on rank r"

# after: heads-and-positions
for r, (before, after) in enumerate(zip(*cuts.values(), strict=True)):
    assert (before, after) == (((0, 4), (2 * r, 2 * r + 2)), ((r, r + 1), (0, 8))), (
        "two positions, then one head"
    )

# after: bytes-drawn
check.close_to(
    [points[1][1] for points in mib.values()], [n / 2**20 for n in sent.values()], name="MiB on 4 ranks"
)
check.close_to(mib["ring"][-1][1], 2 * (3 * 32 - 2) * 4 * B / 32 / 2**20, name="2 (3 W - 2) B on 32 ranks")
assert [len(sends), len(swaps)] == [3 * 4 - 2, 4], "calls of a rank"
for run, nbytes in zip((ring_run, swapped), sent.values(), strict=True):
    assert not run.wire or check.bytes_match(sum(map(sum, run.wire)) / 4, nbytes, rtol=0.02)

# after: to-hide
table = [[2_198, 4_396, 275, 549], [19_780, 39_560, 2_472, 4_945]]
check.close_to([[*of.values()] for of in needed.values()], table, rtol=2e-3, name="positions")

# wrong: ex5-solution: sends as many key heads as query heads | ring, 8 and 2 heads on 4 ranks: 1.5 of the queries' bytes (yours: 6)
def forward_blocks(method, heads, kv_heads, W):
    return 2 * (W - 1) if method == "ring" else 4 * (W - 1) / W

# wrong: ex5-solution: forgets that the all-to-all repeats key heads | all_to_all, 8 and 2 heads on 4 ranks
def forward_blocks(method, heads, kv_heads, W):  # no key head is repeated
    if method == "ring":
        return 2 * (W - 1) * kv_heads / heads
    return 2 * (1 + kv_heads / heads) * (W - 1) / W

# wrong: ex6-solution: computes what the causal mask hides | ring, 16,384 positions, 8 key/value heads: 1.00 ms (yours: 1.26)
W, heads, d_head = 16, 64, 128
flops, across = gpu.bf16_flops, links["400 Gbit/s network"]

def in_the_open(method, N, kv_heads, hidden=0):
    n = N / W
    if method == "ring":
        return (W - 1) * max(0.0, 4 * n * kv_heads * d_head / across - hidden * n**2 * heads * d_head / flops)
    return n * d_head * 2 * (2 * heads + 2 * max(kv_heads, W)) / 2 / across

# wrong: ex6-solution | ring, 16,384 positions, 8 key/value heads: 1.00 ms (yours: 0.7
_any = in_the_open

def in_the_open(method, N, kv_heads):  # computes what the mask hides
    return _any(method, N, kv_heads, hidden=4)

# right: ex6-solution
def in_the_open(method, N, kv_heads):
    return _any(method, N, kv_heads, hidden=2)

# after: in-the-open-drawn
assert better == ["all_to_all"] * 3 + ["ring"] * 3, "short sequences take the all-to-all, long ones the ring"
assert marks == [(65_536, "65,536")], "the mark stands where the ring is better first"

# after: kept-drawn
check.close_to([alone[0], *kept], [formula[0], *formula[1:] * 4], rtol=0.05, name="bytes kept")
check.close_to(alone[0] / kept[0], 36, rtol=0.05, name="times less")

# after: torch-context-parallel
pieces = [context.split(x, 4, dim=2) for x in sequence()[:3]]
own_only = [scaled_dot_product_attention(*(part[r] for part in pieces), is_causal=True) for r in range(4)]
dense = context.split(scaled_dot_product_attention(*sequence()[:3], is_causal=True), 4, dim=2)
check.equals_dense([[*of] for of in cut], [[*p] for p in zip(*pieces, strict=True)], atol=0, name="cut")
check.equals_dense(early, own_only, atol=1e-9, name="attention over each rank's own positions")
assert max((a - b).abs().max() for a, b in zip(early, dense, strict=True)) > 0.1, (
    "that is not the causal output"
)
assert "flash_attention_for_cpu" in reason[0] and not theirs.ranks[0].events, "refused, and nothing was sent"

# after: ex7-batches
tokens = [counting(first)[2].tolist() for first in (32, 9)]
few = [[True] * n + [False] * (32 - n) for n in range(9, 1, -1)]
assert tokens == [[[True] * 32] * 8, few], "all tokens count; nine, then one fewer in each row"

# wrong: ex7-solution | all count: gradients are 4.000 times those of one process
def counted_share(
    parallel,
    x,
    y,
    counted,
    share=lambda parallel, each, counted: each[counted].sum() / counted.sum().clamp(min=1),
):
    logits = parallel(parallel.split(x)).flatten(0, 1)
    y, counted = parallel.split(y).flatten(), parallel.split(counted).flatten()
    each = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    return share(parallel, each, counted)

# wrong: ex7-solution | nine or fewer of a row count: gradients are 0.1
_any_share = counted_share

def counted_share(parallel, x, y, counted):  # the padding is in the number of tokens
    return _any_share(
        parallel, x, y, counted, lambda parallel, each, counted: parallel.share_of_mean(each * counted)
    )

# right: ex7-solution
def counted_share(parallel, x, y, counted):
    shares = _any_share(parallel, x, y, counted, lambda parallel, each, mine: each[mine].sum())
    return shares / counted.sum()
