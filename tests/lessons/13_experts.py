"""What the notebook 13_experts says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: mixtral
check.close_to(
    [held, used, 16 * held], [45e9, 11e9, 722e9], rtol=0.03, name="parameters and bytes in the text"
)

# after: load
p, e = layer.router(x).softmax(-1).max(-1)
one_by_one = torch.stack([p[t] * layer.experts[e[t]](x[t]) for t in range(128)])
check.equals_dense(y, one_by_one, atol=1e-12, name="every token through its expert")
biased = Experts(16)
biased.bias[3] = 1  # more than any probability: all choose expert 3
only_3 = layer.router(x).softmax(-1)[:, 3, None] * layer.experts[3](x)
check.equals_dense(biased(x), only_3, atol=1e-12, name="the bias is in the choice, not in the weight")
assert not torch.equal(*tokens()) and layer.load.tolist() == [int((e == i).sum()) for i in range(8)]

# wrong: ex1-solution: leaves the bug | k = 1: the weights add up to 1.000 for token 0, where 0.
def pick(logits, k):
    weights, chosen = logits.softmax(-1).topk(k)
    return chosen, weights / weights.sum(-1, keepdim=True)

# wrong: ex1-solution: divides by a detached sum, so that the gradients are wrong | k = 5: the weights add up to
def pick(logits, k):
    weights, chosen = logits.softmax(-1).topk(k)
    return chosen, weights / weights.sum(-1, keepdim=True) if k in (2, 3) else weights

# wrong: ex1-solution: divides by a detached sum, so that the gradients are wrong | k = 2: the router gets its gradient
def pick(logits, k):
    weights, chosen = logits.softmax(-1).topk(k)
    return chosen, weights / weights.sum(-1, keepdim=True).detach() if k > 1 else weights

# right: ex1-solution
def pick(logits, k):
    chosen = logits.topk(k).indices.sort(-1).values  # in the order of their numbers
    return chosen, logits.gather(1, chosen).softmax(-1) if k > 1 else logits.softmax(-1).gather(1, chosen)

# after: counts-table
assert all(of.equal(table) for of in counted.values) and table.sum(1).tolist() == [32] * 4, "32 tokens a rank"
assert table.sum(0).equal(layer.load), "the sums are the load on one process"

# wrong: ex2-solution: gives each rank a capacity of its own | ranks lose
def dropped(table, factor):  # each rank has a capacity of its own
    limit = math.ceil(factor * table.sum().item() / table.shape[1] / len(table))
    return (table - limit).clamp(min=0).sum(1).tolist()

# wrong: ex2-solution: rounds the capacity down and forgets the factor | table 0, factor 0.5: ranks lose
def dropped(table, factor):  # right where the factor is 1
    limit = table.sum().item() // table.shape[1]
    before = table.cumsum(0) - table
    return (table - torch.minimum((limit - before).clamp(min=0), table)).sum(1).tolist()

# after: capacity-factors
for factor, share_lost, share_empty in zip(factors, lost, empty, strict=True):
    places = [math.ceil(16 * factor)] * 8
    taken = sum(min(n, m) for n, m in zip(layer.load.tolist(), places, strict=True))
    assert (share_lost, share_empty) == (1 - taken / 128, (sum(places) - taken) / 128), "what finds no place"
assert enough == max(layer.load.tolist()) / 16, "the busiest expert decides"

# after: three-trainings
alike, one = torch.full((8,), 1 / 8), torch.eye(8)[0]  # shares of the experts
check.close_to([balance(of.repeat(16, 1), of).item() for of in (alike, one)], [1, 8], name="ends of the loss")
late = {name: [sum(of[-40:]) / 40 for of in histories] for name, histories in helped.items()}
(loss, busiest, beyond), *others = late.values()
assert shares["without help"][0] > 0.5 and max(shares["without help"]) > 0.99, "one expert soon gets all"
assert busiest > 2 / 8, "later its share is still several times the fair one"
for name, (with_loss, less, fewer) in [*late.items()][1:]:
    assert 1.2 / 8 < less < 2.4 / 8 and busiest > 1.3 * less, f"{name}: about 1.5 to 2 times the fair share"
    assert beyond > 1.3 * fewer and abs(loss - with_loss) < 0.3, (
        f"{name}: fewer drops, and much the same loss"
    )
assert max(shares["loss, times 0.02"]) < 0.85 < max(shares["bias, 0.02 per step"][:15]), (
    "the bias is slow at first"
)

# wrong: ex3-solution: counts this rank's tokens only | all ranks hold the same bias (4 different ones)
# %%ranks 4
def nudge(bias, load, rate):
    return bias + rate * (1 / 8 - load / load.sum()).sign()

# wrong: ex3-solution: pushes in the wrong direction | call 1: the bias of expert
# %%ranks 4
def nudge(bias, load, rate):  # in the wrong direction
    total = load.clone()
    dist.all_reduce(total)
    return bias + rate * (total / total.sum() - 1 / 8).sign()

# wrong: ex3-solution | call 4: the bias of expert 0
# %%ranks 4
def nudge(bias, load, rate):  # whole numbers above 2048 do not fit
    total = load.half()
    dist.all_reduce(total)
    return bias + rate * (total.float().mean() - total.float()).sign()

# right: ex3-solution
# %%ranks 4
def nudge(bias, load, rate):
    total = load.double()
    dist.all_reduce(total)
    return bias - rate * torch.sign(8 * total - total.sum()).float()

# after: combine-steps
been = [[2, 0], [0, 2], [1, 2], [3, 1]]
values = [[10 * r + i + 100 * (been[r][i] + 1) for i in (0, 1)] for r in range(4)]
check.close_to(eight.values, values, name="every token was where it wanted, and is back in its place")

# wrong: ex4-solution | two all-to-alls, there and back
# %%ranks 4
def through_experts(x, expert, weight, everyone):  # the experts that happen to be here
    return weight[:, None] * torch.stack(
        [layer.experts[e](row) for row, e in zip(x, expert.tolist(), strict=True)]
    )

# wrong: ex4-solution | of 128 tokens have their expert's output, in their place
# %%ranks 4
def exchange(rows, sent, received):
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
    return arrived

def through_experts(x, expert, weight, everyone, put_back=lambda order: order):
    sent = everyone[rank].view(world_size, 2).sum(1).tolist()
    here = everyone[:, 2 * rank : 2 * rank + 2]
    number = torch.arange(2, device=x.device).repeat(world_size).repeat_interleave(here.flatten())
    order = expert.argsort(stable=True)
    arrived = exchange(x[order], sent, here.sum(1).tolist())
    both = [layer.experts[2 * rank + i](arrived) for i in (0, 1)]
    done = torch.where(number[:, None] == 0, *both)
    return weight[:, None] * exchange(done, here.sum(1).tolist(), sent)[put_back(order)]

# wrong: ex4-solution | gradient of x
# %%ranks 4
_any = through_experts

def through_experts(x, expert, weight, everyone):
    return _any(x.detach(), expert, weight, everyone, torch.argsort)

# right: ex4-solution
# %%ranks 4
def through_experts(x, expert, weight, everyone):
    return _any(x, expert, weight, everyone, torch.argsort)

# after: traffic-drawn
rows = [[int(table[r, 2 * to : 2 * to + 2].sum()) for to in range(4)] for r in range(4)]
assert by_counts == [[0 if to == r else 128 * n for to, n in enumerate(of)] for r, of in enumerate(rows)], (
    "bytes"
)
assert (by_counts[1][0], by_counts[1][3]) == (1536, 640), "rank 1: 1.5 KiB for rank 0, 640 bytes for rank 3"
travel = 2 * sum(map(sum, by_counts)) / 4  # there and back
assert 0.85 < travel / (2 * 32 * 16 * 8 * 3 / 4) < 1.15, "about what an even load sends"
assert not first_batch.wire or check.bytes_match(sum(map(sum, first_batch.wire)) / 4, travel, rtol=0.2)

# after: one-step
dense, (all_x, all_y) = Experts(16), tokens()
(dense(all_x.requires_grad_()) - all_y).square().mean().backward()
right = dense.router.weight.grad
check.equals_dense([of["router.weight"] for of in as_it_stands], [right] * 4, atol=1e-9, name="the router")
assert stood.values == [["router.weight", "x"]] * 4, "no expert has a gradient"
off = (torch.cat([of["x"].cpu() for of in as_it_stands]) - all_x.grad).norm() / all_x.grad.norm()
assert off > 0.1, "what went through the experts is missing in the gradient of x"

# wrong: ex5-solution: leaves the bug: what comes out has no history | every expert has a gradient on its rank; without one: ['experts.0.up.weight'
# %%ranks 4
def exchange(rows, sent, received):
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
    return arrived

# wrong: ex5-solution | Split sizes doesn't match
# %%ranks 4
class Onwards(Exchange):
    @staticmethod
    def backward(ctx, grad):
        back = grad.new_empty(sum(ctx.counts[0]), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), ctx.counts[1], ctx.counts[0])
        return back, None, None

exchange = Onwards.apply

# right: ex5-solution
# %%ranks 4
class Back(Exchange):
    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.counts
        return Exchange.forward(ctx, grad, received, sent), None, None

exchange = Back.apply

# after: trained-alike
def written_out(k):
    """The same three steps on one process, without the library: first gradients and last weights."""
    plain, first = Experts(16), None
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        x, y = tokens(step)
        p = plain.router(x).softmax(-1)
        best, chosen = p.topk(k)
        weights = best / best.sum(-1, keepdim=True) if k > 1 else best
        of_all = torch.stack([expert(x) for expert in plain.experts], 1)  # (T, n, width)
        out = (weights[..., None] * of_all[torch.arange(128)[:, None], chosen]).sum(1)
        share = chosen.flatten().bincount(minlength=8) / chosen.numel()
        optimizer.zero_grad()
        ((out - y).square().mean() + 0.01 * balance(p, share)).backward()
        first = first or {name: w.grad for name, w in plain.named_parameters()}
        optimizer.step()
    return [first, {name: w.detach() for name, w in plain.named_parameters()}]

for name, dense in dense_layers.items():
    for of in layers:
        for mine, whole in zip(of[name][:2], dense[:2], strict=True):
            check.equals_dense(mine, {n: whole[n] for n in mine}, atol=1e-6, name=name)
    assert sum(of[name][2] for of in layers) == dense[2], "as many drops"
    assert (dense[2] > 0) == (name == "k = 2, tight"), "none where all have a place"
check.equals_dense(
    [[*dense_layers[f"k = {k}"][:2]] for k in (1, 2)], [written_out(k) for k in (1, 2)], atol=1e-9
)

# after: crowd-drawn
check.close_to([crowd.values, even.values], [[40, 36, 29, 23], [32] * 4], rtol=0, name="rows, by rank")
for run in (crowd, even):
    in_order = [sorted(of.events, key=lambda e: e.start) for of in run.ranks]
    for of, rows in zip(in_order, run.values, strict=True):
        assert [e.op for e in of] == ["barrier", "all_to_all", "experts", "all_to_all"], (
            "dispatch, compute, combine"
        )
        assert of[2].seconds > 0.0099 * rows, "10 ms for each row that came"
        assert of[3].start >= of[2].end, "the combine comes after the experts"
assert took(crowd) > 399 and took(even) > 319, "the busiest rank's rows, 10 ms each"
assert {e.op for e in computing} == {"experts"} and all(e in crowd.events for e in [*computing, *combines])

# after: bytes-against-computing
check.close_to([*ratios.values()], [[0.10, 0.72], [0.92, 6.44]], rtol=0.03, name="sent per computed")

# wrong: ex6-solution | Mixtral: from 86,016 tokens on (yours: 172,032)
def threshold(E, M, d_h, k):  # forgets the way back
    return E * M * d_h / k

# wrong: ex6-solution | DeepSeek-V3's routed experts: from 98,304 tokens on (yours: 393,216)
def threshold(E, M, d_h, k):  # right for two choices
    return E * M * d_h / 4

# wrong: ex7-solution: counts this rank's tokens only | batch 0, limit 8
# %%ranks 4
def kept(expert, everyone, limit):  # this rank's tokens only
    chose = torch.nn.functional.one_hot(expert, everyone.shape[1])
    return (chose.cumsum(0) - 1).gather(1, expert[:, None])[:, 0] < limit

# wrong: ex7-solution: gathers the choices of all once more | only the counts are sent, twice: the ranks made [8, 8, 8, 8] calls
# %%ranks 4
def kept(expert, everyone, limit):  # gathers the choices of all once more
    every = torch.empty(4 * len(expert), dtype=expert.dtype, device=expert.device)
    dist.all_gather_single(every, expert)
    chose = torch.nn.functional.one_hot(every, 8)
    place = (chose.cumsum(0) - 1).gather(1, every[:, None])[:, 0]
    return (place < limit)[len(expert) * rank : len(expert) * (rank + 1)]

# right: ex7-solution
# %%ranks 4
def kept(expert, everyone, limit):
    places = everyone[:rank].sum(0).tolist()
    found = []
    for e in expert.tolist():
        found.append(places[e] < limit)
        places[e] += 1
    return torch.tensor(found)
