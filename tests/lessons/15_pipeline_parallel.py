"""What 15_pipeline_parallel says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: bytes-table
assert sent["pipeline"] == 2 * 2**30 and sent["data parallel"] > 100 * sent["pipeline"], (
    "a hundredth of the bytes"
)
assert [row[1:] for row in rows] == [("129 GB", "226.6 GB", "4.53 s"), ("16 GB", "2.1 GB", "0.04 s")]

# after: cut-equal
names = [name for of_rank in gradients for name in of_rank]
assert len(names) == len({*names}) == len(expected), "every gradient is on one rank"
assert all(name.startswith("blocks.1.") for name in gradients[1]), "rank 1 has one layer"

# after: gpipe-plan
check.close_to(schedules.idle_share(schedules.predict(gpipe)), 3 / 11, name="idle share as drawn")
lengths = [schedules.length(schedules.predict(of)) for of in (gpipe, schedules.naive(4))]
assert lengths == [33, 12] and round(33 / 8, 1) == 4.1, "as the text says"
for p in (4, 16):
    for m in (1, 3, 8, 40):
        for make in (schedules.gpipe, schedules.one_f_one_b):
            found = schedules.idle_share(schedules.predict(make(p, m)))
            check.close_to(found, (p - 1) / (m + p - 1), name=f"idle share of {p} ranks")
as_small = [schedules.idle_share(schedules.predict(schedules.gpipe(p, m))) for p, m in ((4, 8), (16, 40))]
check.close_to(*as_small, name="16 ranks need five times as many")

# after: one-f-one-b-plan
assert schedules.peak_in_flight(gpipe) == [8] * 4 and schedules.peak_in_flight(plan) == [4, 3, 2, 1]
from torch.distributed.pipelining.schedules import Schedule1F1B

for r in range(4):
    text = "".join(action.kind for action in plan.actions[r])
    assert text == "F" * (3 - r) + "FB" * (5 + r) + "B" * (3 - r), "as the text says"


# wrong: one-f-one-b: GPipe: all forwards first | 8 micro-batches, rank 0 does 0F0 0F1 0F2 0F3 0B0 0F4
# %%ranks 4 --device cpu
def one_f_one_b(stage, inputs, loss_of, like, send):
    pairs, sent, losses = [], [], []
    for j, x in enumerate(inputs):
        if rank > 0:
            dist.recv(x := torch.empty_like(like), src=rank - 1)
            x.requires_grad_()
        out = stage(x)
        if rank < 3:
            sent.append(send(out.detach(), rank + 1))
        else:
            losses.append(out := loss_of(out, j))
        pairs.append((x, out))
    for x, out in pairs:
        grad = None
        if rank < 3:
            dist.recv(grad := torch.empty_like(like), src=rank + 1)
        out.backward(grad)
        if rank > 0:
            sent.append(send(x.grad, rank - 1))
    [work.wait() for work in sent]
    return sum(losses).detach() if rank == 3 else None


# wrong: one-f-one-b: keeps every micro-batch to the end | lets go of a micro-batch after its backward (8 outputs kept)
# %%ranks 4 --device cpu
def one_f_one_b(stage, inputs, loss_of, like, send):
    m, pairs, sent, total = len(inputs), [], [], 0
    ahead = min(3 - rank, m)
    for turn in range(m + ahead):
        if turn < m:
            x = inputs[turn]
            if rank > 0:
                dist.recv(x := torch.empty_like(like), src=rank - 1)
                x.requires_grad_()
            out = stage(x)
            if rank < 3:
                sent.append(send(out.detach(), rank + 1))
            else:
                out = loss_of(out, turn)
                total += out.item()
            pairs.append((x, out))
        if turn >= ahead:
            x, out = pairs[turn - ahead]  # and stays
            grad = None
            if rank < 3:
                dist.recv(grad := torch.empty_like(like), src=rank + 1)
            out.backward(grad)
            if rank > 0:
                sent.append(send(x.grad, rank - 1))
    [work.wait() for work in sent]
    return total if rank == 3 else None


# wrong: one-f-one-b: hands on the gradient that came, not that of its input | the gradient (8 micro-batches, rank 0)
# %%ranks 4 --device cpu
def one_f_one_b(stage, inputs, loss_of, like, send):
    m, pairs, sent, total = len(inputs), [], [], 0
    ahead = min(3 - rank, m)
    for turn in range(m + ahead):
        if turn < m:
            x = inputs[turn]
            if rank > 0:
                dist.recv(x := torch.empty_like(like), src=rank - 1)
                x.requires_grad_()
            out = stage(x)
            if rank < 3:
                sent.append(send(out.detach(), rank + 1))
            else:
                out = loss_of(out, turn)
                total += out.item()
            pairs.append((x, out))
        if turn >= ahead:
            x, out = pairs.pop(0)
            grad = None
            if rank < 3:
                dist.recv(grad := torch.empty_like(like), src=rank + 1)
            out.backward(grad)
            if rank > 0:
                sent.append(send(x.grad if grad is None else grad, rank - 1))
    [work.wait() for work in sent]
    return total if rank == 3 else None


# right: one-f-one-b: receives posted ahead, and each send waited for before the next one
# %%ranks 4 --device cpu
def one_f_one_b(stage, inputs, loss_of, like, send):
    m, kept, total, way = len(inputs), {}, 0.0, {}
    here = {j: torch.empty_like(like) for j in range(m)}
    coming = {j: dist.irecv(here[j], src=rank - 1) for j in range(m)} if rank else {}

    def out_of(tensor, other):
        if other in way:
            way[other].wait()
        way[other] = send(tensor, other)

    order = [("F", j) for j in range(min(3 - rank, m))]
    for j in range(m):
        order += [("F", j + 3 - rank)] * (j + 3 - rank < m) + [("B", j)]
    for kind, j in order:
        if kind == "F":
            if rank:
                coming[j].wait()
            x = here.pop(j).requires_grad_() if rank else inputs[j]
            kept[j] = x, stage(x) if rank < 3 else loss_of(stage(x), j)
            if rank < 3:
                out_of(kept[j][1].detach(), rank + 1)
            else:
                total = total + kept[j][1].detach()
            continue
        x, out = kept.pop(j)
        grad = torch.empty_like(like) if rank < 3 else None
        if rank < 3:
            dist.irecv(grad, src=rank + 1).wait()
        torch.autograd.backward(out, grad)
        del out
        if rank:
            out_of(x.grad, rank - 1)
    for work in way.values():
        work.wait()
    return total if rank == 3 else None


# right: one-f-one-b: one loop over turns, a float for the loss, and each gradient is waited for at once
# %%ranks 4 --device cpu
def one_f_one_b(stage, inputs, loss_of, like, send):
    from collections import deque

    m, pairs, sent, total = len(inputs), deque(), [], 0.0
    ahead = min(world_size - 1 - rank, m)
    for turn in range(m + ahead):
        if turn < m:
            x = inputs[turn]
            if rank > 0:
                x = torch.zeros(like.shape, dtype=like.dtype)
                dist.recv(x, src=rank - 1)
                x.requires_grad = True
            out = stage(x)
            if rank < world_size - 1:
                sent.append(send(out.detach().clone(), rank + 1))
            else:
                out = loss_of(out, turn)
                total += out.item()
            pairs.append((x, out))
        if turn >= ahead:
            x, out = pairs.popleft()
            if rank < world_size - 1:
                grad = torch.zeros(like.shape, dtype=like.dtype)
                dist.recv(grad, src=rank + 1)
                (out * grad).sum().backward()
            else:
                out.backward()
            if rank > 0:
                send(x.grad, rank - 1).wait()
    for work in sent:
        work.wait()
    return total if rank == world_size - 1 else None


# after: one-f-one-b-picture
for events in (run.events, predicted):
    ran = [[action for action, e in schedules.actions_of(events) if e.rank == r] for r in range(4)]
    assert ran == [[*of_rank] for of_rank in plan.actions], "every rank in the order of its list"
check.close_to(schedules.length(predicted), 11 * 0.09, name="seconds of the step as predicted")
for action, e in schedules.actions_of(run.events):
    assert e.seconds >= (0.0299 if action.kind == "F" else 0.0599), "30 ms forward, 60 ms backward"
assert [value[2] for value in result] == [4, 3, 2, 1], "micro-batches held"

# after: hang
# Forms that wait for each send before the next one: with blocking receives they hang alike, with early ones they do not.
form = """
def step_of(stage, inputs, loss_of, like, send):
    m, last, pairs, way, total = len(inputs), world_size - 1, [], {}, 0.0
    here = [torch.empty_like(like) for _ in inputs]
    coming = [dist.irecv(x, src=rank - 1) for x in here] if rank and early else []
    for turn in range(m + min(last - rank, m)):
        if turn < m:
            x = inputs[turn]
            if rank:
                x = here[turn]
                coming[turn].wait() if early else dist.recv(x, src=rank - 1)
                x.requires_grad_()
            out = stage(x)
            if rank < last:
                way.pop(rank + 1).wait() if rank + 1 in way else None
                way[rank + 1] = send(out.detach(), rank + 1)
            else:
                out = loss_of(out, turn)
            pairs.append((x, out))
        if turn >= min(last - rank, m):
            (x, out), grad = pairs.pop(0), None
            if rank < last:
                dist.recv(grad := torch.empty_like(like), src=rank + 1)
            out.backward(grad)
            if rank:
                way.pop(rank - 1).wait() if rank - 1 in way else None
                way[rank - 1] = send(x.grad, rank - 1)
    [work.wait() for work in way.values()]

import types
_ = types.FunctionType(one_step.__code__, {**globals(), "one_f_one_b": step_of})(8, 0.001, blocking)
"""
for early in (True, False):
    try:
        get_ipython().run_cell_magic("ranks", "4 --device cpu -o _other", f"early = {early}\n" + form)
    except Exception as error:
        assert not early and "ranks 2, 3 all send first" in str(error), str(error)
    else:
        assert early, "waits for ever with blocking receives"

# after: published-step
assert abs(loss - loss_4) < 1e-12, "the reported loss is right"
check.close_to(gradient_4, 4 * gradient, name="a gradient four times as large")

# after: published-step
moved = {}
for how, lr in ((torch.optim.SGD, 0.01), (torch.optim.AdamW, 0.01)):
    for m in (1, 4):
        model = models.MLP(6, 32, 3).double()
        optimizer, (x, y) = how(model.parameters(), lr=lr), (t.double() for t in models.regression(16))
        before = model.down.weight.detach().clone()
        published(model, x, y, m)
        optimizer.step()
        moved[how.__name__, m] = (model.down.weight - before).norm().item()
check.close_to(moved["SGD", 4], 4 * moved["SGD", 1], name="SGD steps four times as far")
check.close_to(moved["AdamW", 4], moved["AdamW", 1], rtol=1e-3, name="AdamW hides it")


# wrong: means: leaves the bug, and divides only what it reports | yours is 4.00 times as long
def step(model, x, y, m):
    reported = 0.0
    for xs, ys in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
        loss = torch.nn.functional.mse_loss(model(xs), ys)
        loss.backward()
        reported += loss.item() / m
    return reported


# wrong: means: divides by the number of micro-batches, whatever their size | micro-batches of [6, 5, 5]: the gradient
def step(model, x, y, m):
    reported = 0.0
    for xs, ys in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
        loss = torch.nn.functional.mse_loss(model(xs), ys) / m
        loss.backward()
        reported += loss.item()
    return reported


# wrong: means: scales all gradients at the end, those of the batch before too | gradients after a second batch
def step(model, x, y, m):
    reported = 0.0
    for xs, ys in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
        loss = torch.nn.functional.mse_loss(model(xs), ys, reduction="sum")
        loss.backward()
        reported += loss.item() / y.numel()
    for p in model.parameters():
        p.grad /= y.numel()
    return reported


# right: means: sums of squares, divided by all numbers
def step(model, x, y, m):
    reported = 0.0
    for xs, ys in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
        loss = (model(xs) - ys).square().sum() / y.numel()
        loss.backward()
        reported += loss.item()
    return reported


# right: means: the factor goes into the backward
def step(model, x, y, m):
    reported = 0.0
    for xs, ys in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
        share = torch.tensor(len(xs) / len(x), dtype=x.dtype)
        loss = torch.nn.functional.mse_loss(model(xs), ys)
        loss.backward(share)
        reported += loss.item() * share.item()
    return reported


# after: memory-table
assert all(
    [v[k] == (4 - r) * layer for k in (0, 1)] == [True, True]
    for r, v in enumerate(holds.values)
    if r in (1, 2)
)
logits, of_batch = (
    2 * 16 * len(models.vocabulary()) * 8 / 1024,
    2 * 4 * 16 * 8 / 1024,
)  # KiB: of 2, of 8 sequences
for k in (0, 1):
    ends = [holds.values[0][k] - 4 * layer, holds.values[3][k] - layer]
    assert 0 <= ends[0] - of_batch * (k + 1) < 1, "rank 0: the tokens, and little else"
    norm = 2 * 2 * 16 * 16 * 8 / 1024  # its input and its output
    assert 0 <= ends[1] - logits - norm - of_batch * (k + 1) < 1, "rank 3: norm, logits, targets"


# wrong: fewest: the idle time by the time that a rank computes | 9 will do
def fewest(p, share):
    m = 1
    while (p - 1) / m > share:
        m += 1
    return m


# wrong: fewest: rounds down | take more
def fewest(p, share):
    return max(1, int((p - 1) * (1 - share) / share))


# wrong: fewest: one more, to be sure | one fewer is too few
def fewest(p, share):
    return 1 - int(-(p - 1) * (1 - share) // share)

# right: fewest: solved for m
def fewest(p, share):
    return -int(-(p - 1) * (1 - share) // share)


# right: fewest: a float, by counting in the plan
def fewest(p, share):
    m = 1
    while schedules.idle_share(schedules.predict(schedules.gpipe(p, m))) > share + 1e-12:
        m += 1
    return float(m)


# after: real-number
assert [row[2] for row in rows] == ["11.8", "12.5", "13.7"] and [row[4] for row in rows] == [
    "+0%",
    "+0%",
    "+1%",
]

# after: torch-equal
from torch.distributed.pipelining import schedules as theirs

assert not issubclass(theirs.ScheduleGPipe, theirs.PipelineScheduleMulti), "takes one stage"
assert issubclass(theirs.ScheduleInterleaved1F1B, theirs.PipelineScheduleMulti), "takes a list of stages"

# after: torch-equal
# %%ranks 4 --device cpu
short = Schedule1F1B(
    PipelineStage(split_gpt(gpt(), 4)[rank], rank, 4, device), 4, loss_fn=cross_entropy, scale_grads=False
)
each = []
x, y = batch(tokens, 0, size=16, length=16)
short.step(*[x] * (rank == 0), target=y if rank == 3 else None, losses=each)
norm = torch.stack([p.grad.square().sum() for p in short._stage.submod.parameters()]).sum()
dist.all_reduce(norm)
dense = gpt()
cross_entropy(dense(x), y).backward()
expected = torch.stack([p.grad.square().sum() for p in dense.parameters()]).sum()
assert abs(norm.item() / expected.item() / 16 - 1) < 1e-9, "scale_grads=False: m times the gradient"
assert rank < 3 or abs(sum(each).item() / 4 - cross_entropy(dense(x), y).item()) < 1e-9, (
    "losses are not divided"
)
try:
    Schedule1F1B(short._stage, 2, loss_fn=cross_entropy)
except ValueError as error:
    assert "Number of microbatches (2) must be greater than or equal to the number of stages (4)" in " ".join(
        str(error).split()
    )
else:
    raise AssertionError("m < p is refused")

# after: overlap-table
check.close_to([*lengths(gpipe), *lengths(plan)], [33, 33 + 6 * 0.8, 33, 45.8], name="as the text says")
assert [row[1:] for row in rows] == [("33.0", "37.8"), ("33.0", "45.8")], "as the table shows"

# after: two-devices-model
assert TwoDevices()(torch.ones(4, 6)).shape == (4, 3)
