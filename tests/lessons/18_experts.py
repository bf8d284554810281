"""What the notebook 18_experts says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: mixtral
check.close_to([held, used, 16 * held], [45e9, 11e9, 722e9], rtol=0.03, name="parameters and bytes in the text")
rows = 2 * 8192 * 7 / 8 * 4096 * 2
check.close_to([rows, rows / 450e9, rows / 50e9], [117e6, 0.26e-3, 2.3e-3], rtol=0.03, name="a dispatch in the text")

# after: experts-layer
layer, (x, y) = Experts(), tokens(0)
p, e = (x @ layer.router).softmax(-1).max(-1)
one_by_one = torch.stack([p[t] * layer.expert(e[t], x[t]) for t in range(128)])
check.equals_dense(layer(x), one_by_one, atol=1e-12, name="every token through its expert")
assert layer.load.tolist() == [int((e == i).sum()) for i in range(8)] and not x.equal(y)
layer.bias[3] = 1  # more than any probability: all choose expert 3
only_3 = (x @ layer.router).softmax(-1)[:, 3, None] * layer.expert(3, x)
check.equals_dense(layer(x), only_3, atol=1e-12, name="the bias is in the choice, not in the factor")

# after: traffic-drawn
load = Experts().choose(tokens(0)[0])[0].bincount(minlength=8).view(4, 2).sum(1)
assert load.tolist() == [46, 25, 35, 22], "rows of each rank, as the text says, 46 / 32 = 1.44 times the fair share"
assert len({tuple(sorted(row)) for row in matrix}) == 4, "no two senders have the same row"
assert round(100 * abs(sum(map(sum, matrix)) / 4 / by_formula - 1)) == 4, "percent, as the text says"

# after: ex1-run
wire = run.wire  # of three dispatches and combines, with what TCP adds
assert not wire or sum(map(sum, wire)) > 3 * 128 * 128 / 2, "the rows really travel"

# after: ex2-run
plain, first = Experts(), None  # the same three steps on one process, written out
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
for step in range(3):
    x, y = tokens(step)
    p, e = (x @ plain.router).softmax(-1).max(-1)
    hidden = torch.nn.functional.gelu(torch.einsum("td,tdh->th", x, plain.up[e]))
    out = p[:, None] * torch.einsum("th,thd->td", hidden, plain.down[e])
    optimizer.zero_grad()
    (out - y).square().mean().backward()
    first = first or {name: w.grad.clone() for name, w in plain.named_parameters()}
    optimizer.step()
check.equals_dense({name: one_gradients[name] for name in first}, first, atol=1e-12, name="first gradients")
check.equals_dense(one_weights, dict(plain.named_parameters()), atol=1e-9, name="weights")

# after: crowd
for of, rows in zip(crowd.ranks, (46, 25, 35, 22), strict=True):
    order = [e for e in sorted(of.events, key=lambda e: e.start) if e.op != "barrier"]
    assert [e.op for e in order] == ["all_to_all", "all_to_all", "experts", "experts", "all_to_all"]
    assert sum(e.seconds for e in order if e.op == "experts") > 0.0099 * rows, "10 ms for each row that came"
ends = [max(e.end for e in of.events) for of in crowd.ranks]
starts = [max(e.end for e in of.events if e.op == "barrier") for of in crowd.ranks]
assert min(ends) - max(starts) > 0.44, "every rank waits for the busiest one's 460 ms"

# after: two-trainings
free, helped = ([share for _, share in of.points] for of in curves)
assert abs(loss - loss_biased) < 0.1, "nearly the same loss"
assert max(free) > 0.99, "without a bias one expert gets all"
assert sum(free[-10:]) / 10 > 0.35 and 0.15 < sum(helped[-10:]) / 10 < 0.33, "half of them; about a quarter"
assert sum(sorted(load)[-3:]) > 0.9 * sum(load) and sorted(load)[4] < 0.05 * sum(load), "three have nearly all"

# after: real-number
check.close_to([predicted, 56 * 8 * 128 / 64 * 7168 * 2 / 50e9], [289e-6, 257e-6], rtol=0.01)
rows = 8 * 128 * 7168 * 2 / 114e-6  # of 8 ranks: 114 us
check.close_to(rows, 127e9, rtol=0.02, name="bytes/s, as the page counts them")
assert round(257 / 314 - 1, 2) == -0.18 and 14336 / 2048 == 7

# wrong: ex1-solution: leaves every token where it is | the rows travel twice
# %%ranks 4
def through_experts(layer, x, chosen):
    return torch.stack([layer.expert(int(e) % 2, row) for e, row in zip(chosen, x)]) if len(x) else x

# wrong: ex1-solution: sends the results home in another order | of 128 tokens have their expert's output, in their place
# %%ranks 4
def through_experts(layer, x, chosen):
    counts = chosen.bincount(minlength=8)
    coming = exchange(counts, [2] * 4, [2] * 4).view(4, 2)
    sent, received = counts.view(4, 2).sum(1).tolist(), coming.sum(1).tolist()
    number = torch.arange(2, device=x.device).repeat(4).repeat_interleave(coming.flatten())
    order = chosen.argsort(stable=True)
    arrived = exchange(x[order], sent, received)
    done = torch.cat([layer.expert(i, arrived[number == i]) for i in (0, 1)])  # sorted by expert
    y = torch.empty_like(x)
    y[order] = exchange(done, received, sent)
    return y

# wrong: ex1-solution: sends the choice of every token, not counts | besides the rows only counts are sent
# %%ranks 4
def through_experts(layer, x, chosen):
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=8)
    coming = exchange(counts, [2] * 4, [2] * 4).view(4, 2)
    sent, received = counts.view(4, 2).sum(1).tolist(), coming.sum(1).tolist()
    number = exchange(chosen[order], sent, received) % 2
    arrived = exchange(x[order], sent, received)
    done = torch.empty_like(arrived)
    for i in (0, 1):
        done[number == i] = layer.expert(i, arrived[number == i])
    y = torch.empty_like(x)
    y[order] = exchange(done, received, sent)
    return y

# right: ex1-solution: all ranks learn all counts, and the rows are cut into pieces
# %%ranks 4
def through_experts(layer, x, chosen):
    everyone = torch.empty(4 * 8, dtype=torch.long, device=x.device)
    dist.all_gather_single(everyone, chosen.bincount(minlength=8))
    everyone = everyone.view(4, 8)
    order = chosen.argsort()
    sent = everyone[rank].view(4, 2).sum(1).tolist()
    mine = everyone[:, 2 * rank : 2 * rank + 2]
    pieces = exchange(x[order], sent, mine.sum(1).tolist()).split(mine.flatten().tolist())
    done = torch.cat([layer.expert(i % 2, piece) for i, piece in enumerate(pieces)])
    return exchange(done, mine.sum(1).tolist(), sent)[order.argsort()]

# right: ex1-solution: one list of rows for each rank
# %%ranks 4
def through_experts(layer, x, chosen):
    places = [(chosen == e).nonzero()[:, 0] for e in range(8)]
    counts = torch.tensor([len(at) for at in places], device=x.device)
    coming = exchange(counts, [2] * 4, [2] * 4).tolist()
    received = [coming[2 * r] + coming[2 * r + 1] for r in range(4)]
    sent = [len(places[2 * r]) + len(places[2 * r + 1]) for r in range(4)]
    rows = exchange(x[torch.cat(places)], sent, received)
    done, at = [], 0
    for i, n in enumerate(coming):
        done.append(layer.expert(i % 2, rows[at : at + n]))
        at += n
    home = exchange(torch.cat(done), received, sent)
    return torch.zeros_like(x).index_copy(0, torch.cat(places), home)

# wrong: ex2-solution: what comes out has no history | have a gradient (none:
# %%ranks 4
def exchange(rows, sent, received):
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
    return arrived

def complete(layer):
    dist.all_reduce(layer.router.grad)

# wrong: ex2-solution: sums the experts' gradients, too | the first gradient is that of one process
# %%ranks 4
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = sent, received
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.counts
        return Exchange.apply(grad, received, sent), None, None

exchange = Exchange.apply

def complete(layer):
    for p in layer.parameters():
        dist.all_reduce(p.grad)

# wrong: ex2-solution: averages the router's gradient, which Adam would hide | router: the first gradient is that of one process (its norm is 0.250
# %%ranks 4
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = sent, received
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.counts
        return Exchange.apply(grad, received, sent), None, None

exchange = Exchange.apply

def complete(layer):
    dist.all_reduce(layer.router.grad)
    layer.router.grad /= world_size

# right: ex2-solution: the backward calls the forward with the counts changed, and the router is summed by a broadcast
# %%ranks 4
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = sent, received
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        return Exchange.forward(ctx, grad, *reversed(ctx.counts)), None, None

exchange = Exchange.apply

def complete(layer):
    dist.reduce(layer.router.grad, dst=0)
    dist.broadcast(layer.router.grad, src=0)

# right: ex2-solution: torch's own all-to-all
# %%ranks 4
from torch.distributed._functional_collectives import all_to_all_single_autograd

def exchange(rows, sent, received):
    return all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)

def complete(layer):
    dist.all_reduce(layer.router.grad)

# wrong: ex3-solution: counts this rank's tokens only | all ranks hold the same bias
# %%ranks 4
def nudge(bias, load, rate):
    return bias + rate * (1 / 8 - load / load.sum()).sign()

# wrong: ex3-solution: pushes in the wrong direction | call 1: the bias of expert
# %%ranks 4
def nudge(bias, load, rate):
    total = load.clone()
    dist.all_reduce(total)
    return bias + rate * (total / total.sum() - 1 / 8).sign()

# wrong: ex3-solution: whole numbers above 2048 do not fit | call 4: the bias of expert
# %%ranks 4
def nudge(bias, load, rate):
    total = load.half()
    dist.all_reduce(total)
    return bias + rate * (total.float().mean() - total.float()).sign()

# wrong: ex3-solution: the next bias is rounded to bfloat16 | is -0.02 (yours: -0.0200195)
# %%ranks 4
def nudge(bias, load, rate):
    total = load.bfloat16()
    dist.all_reduce(total)
    return bias + rate * (total.mean() - total).sign()

# right: ex3-solution: in float64
# %%ranks 4
def nudge(bias, load, rate):
    total = load.double()
    dist.all_reduce(total)
    return bias - rate * torch.sign(8 * total - total.sum()).float()

# right: ex3-solution: shares, and a loop
# %%ranks 4
def nudge(bias, load, rate):
    total = load.detach().clone()
    dist.all_reduce(total)
    new, mean = bias.clone(), total.sum().item() / 8
    for e, n in enumerate(total.tolist()):
        new[e] += rate * ((n < mean) - (n > mean))
    return new

# wrong: ex4-solution: gives each rank a capacity of its own | the ranks lose
def dropped(table, factor):
    limit = -int(-factor * table.sum() // table.shape[1] // len(table))
    return (table - limit).clamp(min=0).sum(1).tolist()

# wrong: ex4-solution: rounds the capacity down and forgets the factor | factor 0.5: the ranks lose
def dropped(table, factor):
    limit = table.sum().item() // table.shape[1]
    before = table.cumsum(0) - table
    return (table - torch.minimum((limit - before).clamp(min=0), table)).sum(1).tolist()

# right: ex4-solution: token by token
def dropped(table, factor):
    n, lost = table.shape[1], []
    places = [math.ceil(factor * int(table.sum()) / n)] * n
    for row in table.tolist():
        taken = [min(a, b) for a, b in zip(row, places)]
        places = [b - a for a, b in zip(taken, places)]
        lost.append(sum(row) - sum(taken))
    return lost

import math

# right: ex4-solution: how many of the first ranks' tokens are taken, and the differences
def dropped(table, factor):
    places = torch.tensor(factor * table.sum() / table.shape[1]).ceil().long()
    taken = table.cumsum(0).clamp(max=places).diff(dim=0, prepend=torch.zeros_like(table[:1]))
    return [int(row.sum() - kept.sum()) for row, kept in zip(table, taken)]

# wrong: ex5-solution: leaves the bug | k = 1: the weights add up to 0.
def pick(logits, k):
    weights, chosen = logits.softmax(-1).topk(k)
    return chosen, weights / weights.sum(-1, keepdim=True)

# wrong: ex5-solution: normalises for k = 2 and 3 only | k = 5: the weights add up to 1.000
def pick(logits, k):
    weights, chosen = logits.softmax(-1).topk(k)
    return chosen, weights / weights.sum(-1, keepdim=True) if k in (2, 3) else weights

# wrong: ex5-solution: divides by a detached sum | k = 2: the router gets the gradient of its weights
def pick(logits, k):
    weights, chosen = logits.softmax(-1).topk(k)
    return chosen, weights / weights.sum(-1, keepdim=True).detach() if k > 1 else weights

# right: ex5-solution: in the order of their numbers
def pick(logits, k):
    chosen = logits.topk(k).indices.sort(-1).values
    return chosen, logits.gather(1, chosen).softmax(-1) if k > 1 else logits.softmax(-1).gather(1, chosen)

# right: ex5-solution: a softmax over the chosen ones, and a factor for one
def pick(logits, k):
    best, chosen = logits.topk(k, sorted=False)
    if k > 1:
        return chosen, best.softmax(-1)
    return chosen, (best - logits.logsumexp(-1, keepdim=True)).exp()

# right: ex6-solution: in bytes of one rank
def threshold(E, M, d_h, k, d=4096, W=8):
    gathered = 2 * E * M * d * d_h * (W - 1) / W
    for_a_token = 2 * k * 2 * d * (W - 1) / W
    return gathered / for_a_token

# right: ex6-solution: whole tokens
def threshold(E, M, d_h, k):
    tokens = 0
    while 2 * k * tokens < E * M * d_h:
        tokens += 1
    return tokens

# wrong: ex6-solution: forgets the way back | Mixtral: from 86,016 tokens on (yours: 172,032)
def threshold(E, M, d_h, k):
    return E * M * d_h / k

# wrong: ex6-solution: right for two choices | DeepSeek-V3's routed experts: from 98,304 tokens on (yours: 393,216)
def threshold(E, M, d_h, k):
    return E * M * d_h / 4

# after: row-per-node
one, x = Experts(), tokens(0)[0].requires_grad_()
p, chosen = (x @ one.router).softmax(-1).topk(4)
done = torch.stack([one.expert(e, x) for e in range(8)], 1)  # every token through every expert
y = (p[..., None] * done.gather(1, chosen[..., None].expand(-1, -1, 16))).sum(1)
right = [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *one.parameters()])]
for got in (by_expert, by_node):
    joined = [torch.cat([of[i].cpu() for of in got]) for i in (0, 1, 3, 4)]
    joined.insert(2, sum(of[2].cpu() for of in got))  # the router's
    check.equals_dense(joined, right, atol=1e-9, name="one process with all experts")

# after: between-nodes
chosen = (tokens(0)[0] @ Experts().router).topk(4).indices
away = chosen // 4 != torch.arange(128)[:, None] // 64
assert (away.sum().item(), away.any(1).sum().item()) == (268, 128), "rows that leave their node"
if plain.wire:  # four exchanges of 128 bytes a row; two of 192 and two of 128
    for run, nbytes in ((plain, 268 * 4 * 128), (twice, 128 * (2 * 192 + 2 * 128))):
        counted = sum(run.wire[i][j] for i in range(4) for j in range(4) if i // 2 != j // 2)
        assert 0 < counted - nbytes < 8 * 1024, "and headers"

# after: shared-meanwhile
for r in hidden.ranks:
    dispatch, shared = (next(e for e in r.events if e.op == op) for op in ("all_to_all", "shared expert"))
    assert dispatch.is_async and dispatch.start <= shared.start, "the dispatch is under way first"
    assert shared.end <= (dispatch.wait_start or shared.end), "and waited for last"
