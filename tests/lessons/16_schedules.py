"""What 16_schedules says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: costs-table
assert [row[1:] for row in rows] == [
    ("30%", "14", "8"),
    ("18%", "30", "11.5"),
    ("10%", "62", "9.75"),
    ("13%", "14", "8"),
]
for p, v, m in ((4, 2, 8), (8, 4, 16), (3, 3, 9)):
    check.close_to(bubble(schedules.interleaved(p, m, v)), (p - 1) / (v * m + p - 1), name="the target")
    most = max(schedules.peak_in_flight(schedules.interleaved(p, m, v))) / v
    check.close_to(most, p + (p - 1) / v, name="memory of interleaving")

# after: interleaved-plan
forwards = [(a.stage, a.microbatch) for a in schedules.interleaved(2, 4).actions[0] if a.kind == "F"]
assert forwards[:6] == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3)]


# wrong: interleaved: gives a rank neighbouring stages | rank 0 has stages [0, 4] (yours: [0, 1])
def interleaved(rank, p, v, m):
    stages = [rank * v + chunk for chunk in range(v)]
    groups = [range(first, first + p) for first in range(0, m, p)]
    forwards = [(s, "F", j) for group in groups for s in stages for j in group]
    backwards = [(s, "B", j) for group in groups for s in reversed(stages) for j in group]
    ahead = min((v - 1) * p + 2 * (p - 1 - rank), v * m)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += [forward, backward]
    return order + backwards[v * m - ahead :]


# wrong: interleaved: backwards from the first stage to the last | The schedule never ends | waits for
def interleaved(rank, p, v, m):
    stages = [rank + p * chunk for chunk in range(v)]
    groups = [range(first, first + p) for first in range(0, m, p)]
    order = [(s, "F", j) for group in groups for s in stages for j in group]
    backwards = [(s, "B", j) for group in groups for s in stages for j in group]
    return order + backwards


# wrong: interleaved: all micro-batches through the first stage, then all through the second | at most 11 activations
def interleaved(rank, p, v, m):
    stages = [rank + p * chunk for chunk in range(v)]
    forwards = [(s, "F", j) for s in stages for j in range(m)]
    backwards = [(s, "B", j) for s in reversed(stages) for j in range(m)]
    ahead = min((v - 1) * m + 2 * (p - 1 - rank), v * m)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += [forward, backward]
    return order + backwards[v * m - ahead :]


# right: interleaved: by the number of the forward, with half as many ahead, as actions
def interleaved(rank, p, v, m):
    ahead = min((v - 1) * p + p - 1 - rank, v * m)

    def nth(k, kind):
        chunk = k // p % v if kind == "F" else v - 1 - k // p % v
        return schedules.Action(chunk * p + rank, kind, k // (p * v) * p + k % p)

    order, done = [nth(k, "F") for k in range(ahead)], 0
    while done < v * m:
        if ahead < v * m:
            order.append(nth(ahead, "F"))
            ahead += 1
        order.append(nth(done, "B"))
        done += 1
    return order


# right: interleaved: played on a clock, a backward before a forward
def interleaved(rank, p, v, m):
    done, orders, free = {}, [[] for _ in range(p)], [0.0] * p
    todo = {(s, kind, j) for s in range(p * v) for kind in "FB" for j in range(m)}
    ahead = [(v - 1) * p + 2 * (p - 1 - r) + 1 for r in range(p)]

    def ready(action):
        s, kind, j = action
        needs = [(s - 1, "F", j)] if kind == "F" else [(s + 1, "B", j), (s, "F", j)]
        needs = [n for n in needs if 0 <= n[0] < p * v]
        return max([done[n] for n in needs], default=0.0) if all(n in done for n in needs) else None

    def rank_of_order(action):
        s, kind, j = action
        chunk = s // p if kind == "F" else v - 1 - s // p
        return j // p, chunk, j % p

    while todo:
        best = None
        for r in range(p):
            mine = [a for a in todo if a[0] % p == r]
            live = sum(1 if k == "F" else -1 for _, k, _ in orders[r])
            for kind in "BF" if live >= ahead[r] else "FB":
                own = [a for a in mine if a[1] == kind]
                first = min(own, key=rank_of_order, default=None)
                if first is None or (kind == "F" and live >= ahead[r]):
                    continue
                at = ready(first)
                if at is not None:
                    start = max(at, free[r])
                    if best is None or (start, r) < best[:2]:
                        best = start, r, first
                    break
        start, r, action = best
        free[r] = done[action] = start + (1 if action[1] == "F" else 2)
        orders[r].append(action)
        todo.remove(action)
    return orders[rank]


# after: interleaved-check
for p, m in ((4, 8), (3, 6)):  # the library's own order, and torch's, as lesson 15's tests compare them
    lists = schedules.interleaved(p, m).actions
    assert [[*map(tuple, of_rank)] for of_rank in lists] == [interleaved(r, p, 2, m) for r in range(p)]


# wrong: halves: replaces the gradient that was there | is added to what was there
def input_gradient(layer, grad):
    return grad @ layer.weight


def weight_gradients(layer, x, grad):
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    layer.weight.grad = grad.T @ x
    if layer.bias is not None:
        layer.bias.grad = grad.sum(0)


# wrong: halves: autograd does the second one, by a call of the layer | do not call the layer
def input_gradient(layer, grad):
    return grad @ layer.weight


def weight_gradients(layer, x, grad):
    with torch.enable_grad():
        layer(x.detach()).backward(grad)


# wrong: halves: the first half does both | leaves the gradients of the layer alone
def input_gradient(layer, grad):
    layer.weight.grad = torch.zeros_like(layer.weight)
    return grad @ layer.weight


def weight_gradients(layer, x, grad):
    layer.weight.grad += torch.einsum("...o,...i->oi", grad, x)
    if layer.bias is not None:
        layer.bias.grad = grad.flatten(0, -2).sum(0)


# right: halves: products by name, in place
def input_gradient(layer, grad):
    return torch.einsum("...o,oi->...i", grad, layer.weight)


def weight_gradients(layer, x, grad):
    for p in layer.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    layer.weight.grad += torch.einsum("...o,...i->oi", grad, x)
    if layer.bias is not None:
        layer.bias.grad += grad.sum(tuple(range(grad.dim() - 1)))


# right: halves: autograd does the second one, without the layer
def input_gradient(layer, grad):
    return torch.matmul(grad, layer.weight.detach())


def weight_gradients(layer, x, grad):
    with torch.enable_grad():
        torch.nn.functional.linear(x.detach(), layer.weight, layer.bias).backward(grad)


# after: zero-bubble-plan
share = [schedules.idle_share(schedules.predict(of)) for of in (schedules.one_f_one_b(4, 8), zero_bubble)]
length = [schedules.length(schedules.predict(of)) for of in (schedules.one_f_one_b(4, 8), zero_bubble)]
check.close_to([a * b for a, b in zip(share, length)], [9, 3], name="idle forwards")
assert length[1] == 27 and schedules.peak_in_flight(zero_bubble) == [4] * 4
for p, m in ((4, 8), (3, 3), (5, 6), (8, 16)):
    idles = schedules.length(schedules.predict(schedules.zero_bubble(p, m))) - m * 3
    check.close_to(idles, p - 1, name="the formula at the end")
assert schedules.length(schedules.predict(schedules.zero_bubble(8, 4))) - 4 * 3 == 11, "more, if m < p"

# after: split-linear
# %%ranks 4 --device cpu
layers = split(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)))
layers(torch.randn(2, 3, requires_grad=True)).sum().backward()
[job() for job in later]
later.clear()
assert not any(p.grad.requires_grad for p in layers.parameters()), "a gradient keeps no micro-batch alive"

# after: train-equal
assert [len(names) for _, names in by_zero_bubble] == [2 * 16 + 2, 2 * 16, 2 * 16, 2 * 16 + 3]
check.close_to([by_zero_bubble[3][0], by_interleaved[3][0]], [losses] * 2, rtol=1e-9)
assert max(abs(a - b) for a, b in zip(losses, by_lost[3][0])) < 0.03, "the losses hardly tell"

# after: lost-table
assert wrong == [0, 1, 2, 3] and [row[-1] for row in rows] == ["", "ranks 0, 1, 2, 3"]
try:
    schedules.rounds(lost)
except ValueError as error:
    assert str(error) == "3W7 is missing."
else:
    raise AssertionError("rounds tells")


# wrong: own: 1F1B | ranks idle for at most 12%
def schedule_for(p, m, times, message, limit):
    return schedules.one_f_one_b(p, m).actions


# wrong: own: zero bubble of the paper | ranks idle for at most 12% (yours: 16.3%, zero bubble: 16.3%)
def schedule_for(p, m, times, message, limit):
    return schedules.zero_bubble(p, m).actions


# wrong: own: as many forwards ahead as there are | a rank holds at most 6 micro-batches (yours: 12)
def schedule_for(p, m, times, message, limit):
    return [[(r, k, j) for k in "FIW" for j in range(m)] for r in range(p)]


# right: own: every rank takes what can begin first, I before F before W
def schedule_for(p, m, times, message, limit):
    seconds, done, free = dict(zip("FIW", times)), {}, [0.0] * p
    lists = [[] for _ in range(p)]
    count = [dict.fromkeys("FIW", 0) for _ in range(p)]
    for _ in range(3 * m * p):
        possible = []
        for r, n in enumerate(count):
            if n["F"] < min(m, n["W"] + limit) and (r == 0 or (r - 1, "F", n["F"]) in done):
                possible.append((done[r - 1, "F", n["F"]] + message if r else 0, 1, r, "F"))
            if n["I"] < n["F"] and (r == p - 1 or (r + 1, "I", n["I"]) in done):
                possible.append((done[r + 1, "I", n["I"]] + message if r < p - 1 else 0, 0, r, "I"))
            if n["W"] < n["I"]:
                possible.append((0, 2, r, "W"))
        start, _, r, kind = min((max(at, free[r]), turn, r, k) for at, turn, r, k in possible)
        j = count[r][kind]
        count[r][kind] += 1
        lists[r].append((r, kind, j))
        free[r] = done[r, kind, j] = start + seconds[kind]
    return lists


# right: own: a search over how far ahead, and how long W is put off
def schedule_for(p, m, times, message, limit):
    def lists(step, more):
        found = []
        for r in range(p):
            ahead = min(step * (p - 1 - r) + more, limit - 1, m)
            order, waiting = [schedules.Action(r, "F", j) for j in range(ahead)], []
            for j in range(m):
                if ahead + j < m:
                    order.append(schedules.Action(r, "F", ahead + j))
                order.append(schedules.Action(r, "I", j))
                waiting.append(schedules.Action(r, "W", j))
                if len(waiting) > limit - 1 - ahead:
                    order.append(waiting.pop(0))
            found.append(order + waiting)
        return found

    tried = {}
    for step in (1, 2, 3):
        for more in (0, 1):
            candidate = lists(step, more)
            tried[step, more] = score(schedules.schedule("a try", candidate), times, message), candidate
    return min(tried.values(), key=lambda one: one[0])[1]


# after: own-plan
events = schedules.predict(own)
ends = [max(e.end for e in events if e.rank == r) for r in range(4)]
begins = [min(e.start for e in events if e.rank == r) for r in range(4)]
assert ends == [24, 25, 26, 27] and begins == [0, 1, 2, 3], "no rank has a gap"
assert max(schedules.peak_in_flight(own)) == 7
for p, m in ((4, 8), (6, 24)):  # ZB-H2: (p - 1)(F + I - 2W) idle between a rank's first action and its last
    events = schedules.predict(plan_of(schedule_for(p, m, (1, 1, 1), 0, 2 * p - 1), "it"))
    spans = [[e for e in events if e.rank == r] for r in range(p)]
    assert all(max(e.end for e in s) - min(e.start for e in s) == 3 * m for s in spans)

# after: message-table
assert rows[2][1:] == ("10%", "19%", "27%", "41%") and rows[0][1:] == ("30%", "34%", "38%", "44%")


# after: message-table
def begun_with(each):  # interleaved, 4 ranks, 2 stages, with each * (p - 1 - r) forwards beside (v - 1) p
    orders = []
    for r, of_rank in enumerate(schedules.interleaved(4, 8).actions):
        forwards, backwards = ([a for a in of_rank if a.kind == kind] for kind in "FB")
        turns = zip(forwards[4 + each * (3 - r) :], backwards)
        steady = [a for pair in turns for a in pair]
        orders.append([*forwards[: 4 + each * (3 - r)], *steady, *backwards[len(steady) // 2 :]])
    return schedules.schedule(f"{each}", orders)


assert begun_with(2).actions == schedules.interleaved(4, 8).actions
fewer, more = begun_with(1), begun_with(2)
check.close_to(bubble(fewer), bubble(more), name="alike with free messages")
assert bubble(fewer, 0.1) > bubble(more, 0.1) + 0.03, "the larger number waits less"
assert max(schedules.peak_in_flight(fewer)) == 8 < max(schedules.peak_in_flight(more)) == 11

# after: real-number
assert [row[4] for row in rows] == ["+0%", "+6%", "+8%", "+5%"]
assert [row[7] for row in rows] == ["+1%", "+6%", "+4%", "+2%"] and round(11.8 * 31 / 24, 1) == 15.2

# after: torch-equal
from torch.distributed.pipelining import schedules as theirs

v = [theirs.ScheduleZBVZeroBubble, theirs.ScheduleDualPipeV, theirs.ScheduleInterleaved1F1B]
assert all(issubclass(one, theirs.PipelineScheduleMulti) for one in v)
assert theirs.generate_stage_to_rank_mapping(4, 8, style="v") == {s: min(s, 7 - s) for s in range(8)}
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

for how in ("twice", "chunk"):  # both are mended in this torch
    w = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def run_stage():
        if how == "twice":
            return (x @ w @ w).square().sum()
        a, b = (x @ w).chunk(2, -1)
        return (a * b.sin()).sum()

    expected = torch.autograd.grad(run_stage(), [x, w])
    dx, groups = stage_backward_input([run_stage()], None, [x], iter([w]))
    stage_backward_weight(iter([w]), groups)
    check.close_to([dx[0], w.grad], [*expected], rtol=1e-9)


# wrong: late-clip: waits for the norm, then steps | start, then step, then wait
# %%ranks 4 --device cpu
def step(optimizer, max_norm, start_sum):
    parameters = optimizer.param_groups[0]["params"]
    square = sum(p.grad.square().sum() for p in parameters)
    start_sum(square).wait()
    if (norm := square.sqrt()) > max_norm:
        for p in parameters:
            p.grad *= max_norm / norm
    optimizer.step()


# wrong: late-clip: undoes the weights, and leaves the optimizer's moments | the optimizer's moments undone, too
# %%ranks 4 --device cpu
def step(optimizer, max_norm, start_sum):
    parameters = optimizer.param_groups[0]["params"]
    square = sum(p.grad.square().sum() for p in parameters)
    work = start_sum(square)
    weights = [p.detach().clone() for p in parameters]
    optimizer.step()
    work.wait()
    if (norm := square.sqrt()) > max_norm:
        for p, before in zip(parameters, weights):
            p.data.copy_(before)
            p.grad *= max_norm / norm
        optimizer.step()


# wrong: late-clip: the norm of this rank alone | one all-reduce of one number
# %%ranks 4 --device cpu
def step(optimizer, max_norm, start_sum):
    parameters = optimizer.param_groups[0]["params"]
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()


# right: late-clip: a tensor of one entry, and copies of the state by hand
# %%ranks 4 --device cpu
def step(optimizer, max_norm, start_sum):
    parameters = optimizer.param_groups[0]["params"]
    total = torch.cat([p.grad.flatten() for p in parameters]).square().sum().view(1)
    work = start_sum(total)
    kept = [(p, p.data.clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in parameters]
    optimizer.step()
    work.wait()
    norm = total.item() ** 0.5
    if norm <= max_norm:
        return
    for p, data, state in kept:
        p.data = data
        p.grad = p.grad * (max_norm / norm)
        optimizer.state[p] = state
    optimizer.step()


# right: late-clip: torch's function scales, with the norm of all
# %%ranks 4 --device cpu
from copy import deepcopy


def step(optimizer, max_norm, start_sum):
    parameters = optimizer.param_groups[0]["params"]
    own = torch.nn.utils.get_total_norm([p.grad for p in parameters]) ** 2
    work = start_sum(own)
    before, state = [p.data.clone() for p in parameters], deepcopy(optimizer.state_dict())
    optimizer.step()
    work.wait()
    norm = own.sqrt()
    if norm.item() > max_norm:
        optimizer.load_state_dict(state)
        for p, data in zip(parameters, before, strict=True):
            p.data.copy_(data)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        optimizer.step()
