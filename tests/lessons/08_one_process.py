"""What the notebook 08_one_process says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: gpus-and-years
check.close_to([h100, a100], [8.4e22 / (0.4 * peak) / 365 / 86400 for peak in (989e12, 312e12)], name="years")
assert abs(184_320 / 24 / 365 - a100) < 0.5 and round(184_320 / 24 / 365, 1) == 21.0, "as Llama 2 reports"
assert round(6 * 6.74e9 * 2e12 / (184_320 * 3600 * 312e12), 2) == 0.39, "about 40 % of the peak"
assert round(h100, 1) == 6.7 and 16 * 7 == 112, "as the folded answer says"

# after: backward-check
net = models.MLP(6, 32, 3)
linear = {"W1": net.up.weight.T, "b1": net.up.bias, "W2": net.down.weight.T, "b2": net.down.bias}
some_x, some_y = models.regression(50)
mse_loss(net(some_x), some_y).backward()
said = backward(some_x, some_y, **{name: p.detach() for name, p in linear.items()})
grads = {
    "W1": net.up.weight.grad.T,
    "b1": net.up.bias.grad,
    "W2": net.down.weight.grad.T,
    "b2": net.down.bias.grad,
}
check.close_to({name: said[name] for name in grads}, grads, atol=1e-6, name="those of nn.Linear, transposed")
flat = models.MLP(6, 32, 3, activation="none")
w1, w2 = flat.up.weight.T, flat.down.weight.T
assert torch.allclose(some_x @ (w1 @ w2) + (flat.up.bias @ w2 + flat.down.bias), flat(some_x), atol=1e-5)

# after: gpt
assert len(models.text().split("\n\n")) == 2 * 22, "titles and fables"
assert len(models.vocabulary()) == 49 and abs(_ - 3.89) < 0.1, "near ln 49"
some = models.GPT(49, n_layers=8)
assert torch.equal(loss_of(some, plain), models.cross_entropy(some(inputs), targets)), (
    "as the model's own forward"
)

# after: memory-over-time
assert (
    models.gpt_parameters(49, n_layers=8)
    == 405_184
    == sum(p.numel() for p in models.GPT(49, n_layers=8).parameters())
)
phases = [sample.phase for sample in held]
second = phases.index("forward", phases.index("step"))  # where the second step begins
before_backward = [sample for sample in held[second:] if sample.phase == "forward"][-1]
assert [round(n / 2**20, 2) for n in (before_backward.parameters, before_backward.optimizer)] == [1.55, 3.09]
assert not any(sample.gradients for sample in held if sample.phase == "forward"), "zero_grad has freed them"
first, later = (max(sample.total for sample in part) for part in (held[:second], held[second:]))
assert first + 7 * 405_184 < later, "the second peak is higher by nearly the optimizer's states"

# after: by-formula
block = 4 * 4 * 32 * (16 * 64 + 4 * 32 + 4) + 32 * 32  # the table of the text, in bytes, and the mask
ends = [models.gpt_saved_bytes(49, size=4, length=32, n_layers=k) for k in (0, 8)]
assert ends[1] - ends[0] == 8 * block and 16 * 64 + 4 * 32 + 4 == 1156

# after: flops
d, length = 64, 32
per_token = 8 * 2 * (12 * d * d + 2 * length * d) + 2 * 49 * d  # eight blocks and the head
assert forward == 4 * length * per_token and back == 2 * forward, "as counted"
assert round(six_nd / (forward + back), 2) == 0.94, "6 % too low"
assert 3 * 2 * 2 * d * d / (6 * 12 * d * d) == 1 / 6, "attention, where length = d"

# after: recompute-cost
with rankcell.memory(some := models.GPT(49, n_layers=8)) as seen:
    some_loss = loss_of(some, recompute)
ends = models.gpt_saved_bytes(49, size=4, length=32, n_layers=0)
assert seen.samples[-1].activations == ends + 8 * 4 * 128 * 64, (
    "eight inputs of 64 numbers per token, and the ends"
)
d, length = 64, 32
again = 8 * 4 * length * 2 * (12 * d * d + 2 * length * d)  # each block's forward once more
assert (
    costs["yours"][1] == f"{(3 * forward + again) / 1e6:.0f} million FLOPs"
    and 0.32 < again / (3 * forward) < 0.34
)

# after: recompute-memory
again = two_steps(recompute)
most_held = [max(sample.total for sample in samples) / 2**20 for samples in (held, again)]
assert most_held[0] > 9 and most_held[1] < 7, "MiB at the peak"
last = max(again, key=lambda sample: sample.total)
assert last.phase == "backward" and last.gradients > 0.85 * last.parameters, "near the end of backward"
assert last.parameters + last.gradients + last.optimizer > 0.85 * last.total, "nearly all of it states"

# after: real-number
assert round(7.7 / (7.7 + 11.9), 2) == 0.39 and abs(predicted["by FLOPs"] - 26.13) < 0.01
assert round(predicted["by time"] / measured - 1, 3) == 0.004, "forward once more"

# after: checkpoint
d, length = 64, 32
again = 8 * 4 * length * 2 * (12 * d * d + 2 * length * d)
last_product = 8 * 2 * 128 * 256 * 64  # down of each MLP
assert costs["torch's"][1] == f"{(3 * forward + again - last_product) / 1e6:.0f} million FLOPs"
attention = 8 * 4 * length * 2 * 2 * length * d  # scores and mixing once more
assert costs["torch's, selective"][1] == f"{(3 * forward + attention) / 1e6:.0f} million FLOPs"

# after: noise
check.close_to(
    [*noise.values()], [sigma / size**0.5 for size in noise], rtol=0.1, name="distance from the true gradient"
)

# after: autocast-run
assert "19.5 MiB" in exact and "12.4 MiB" in mixed and exact[:9] == mixed[:9], "not half, and the same loss"

# after: zero-grad
net = models.MLP(6, 32, 3)
first = mse_loss(net(x), y)
first.backward()
with torch.no_grad():
    for p in net.parameters():
        p -= 0.1 * p.grad
right, wrong = curves.values()
check.close_to([right[0], right[1], wrong[1]], [first.item(), *[mse_loss(net(x), y).item()] * 2], rtol=1e-5)
assert 0 < sum(w < r for w, r in zip(wrong, right, strict=True)) < 30, (
    "for a few steps the wrong curve is lower"
)
assert max(wrong[-20:]) > 2 * right[-1], "in the end it is twice as high"
zeros = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(zeros.parameters(), lr=0.1)
zeros(torch.ones(1, 2)).sum().backward()
optimizer.step()
for set_to_none, moves in ((True, False), (False, True)):
    optimizer.zero_grad(set_to_none=set_to_none)
    before = zeros.weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, zeros.weight) != moves, "zeros still move a parameter, nothing does not"
    zeros(torch.ones(1, 2)).sum().backward()


# wrong: backward: asks autograd | the gradients come from formulas
def backward(x, y, W1, b1, W2, b2):
    x, W1, b1, W2, b2 = parts = [p.clone().requires_grad_() for p in (x, W1, b1, W2, b2)]
    torch.autograd.backward(mse_loss((x @ W1 + b1).relu() @ W2 + b2, y))
    return dict(zip(("x", "W1", "b1", "W2", "b2"), (p.grad for p in parts), strict=True))


# wrong: backward: the handbook's half | are those of a *mean*
def backward(x, y, W1, b1, W2, b2):
    z = x @ W1 + b1
    g = z.clamp(min=0) @ W2 + b2 - y
    dz = (g @ W2.T) * (z > 0)
    return {"x": dz @ W1.T, "W1": x.T @ dz, "b1": dz.sum(0), "W2": z.clamp(min=0).T @ g, "b2": g.sum(0)}


# wrong: backward: no activation on the way back | no gradient passes where z is not positive (yours passes everywhere)
def backward(x, y, W1, b1, W2, b2):
    h = (x @ W1 + b1).clamp(min=0)
    g = 2 / y.numel() * (h @ W2 + b2 - y)
    dz = g @ W2.T
    return {"x": dz @ W1.T, "W1": x.T @ dz, "b1": dz.sum(0), "W2": h.T @ g, "b2": g.sum(0)}


# right: backward: with einsum, and another form of the mean
def backward(x, y, W1, b1, W2, b2):
    h = torch.relu(x.mm(W1).add(b1))
    g = (h.mm(W2).add(b2) - y) / (y.shape[0] * y.shape[1] / 2)
    dz = torch.einsum("bo,ho->bh", g, W2).masked_fill(h == 0, 0)
    return {
        "W2": torch.einsum("bh,bo->ho", h, g),
        "W1": torch.einsum("bi,bh->ih", x, dz),
        "x": torch.einsum("bh,ih->bi", dz, W1),
        "b1": dz.sum(0),
        "b2": torch.ones(len(g), dtype=g.dtype) @ g,
    }


# right: backward: sample by sample
def backward(x, y, W1, b1, W2, b2):
    grads = {"x": torch.zeros_like(x)} | {
        k: torch.zeros_like(t) for k, t in dict(W1=W1, b1=b1, W2=W2, b2=b2).items()
    }
    for i in range(len(x)):
        z = x[i] @ W1 + b1
        h = z.relu()
        g = 2 * (h @ W2 + b2 - y[i]) / y.numel()
        dz = (W2 @ g) * (z > 0)
        grads["x"][i] = W1 @ dz
        grads["W1"] += torch.outer(x[i], dz)
        grads["b1"] += dz
        grads["W2"] += torch.outer(h, g)
        grads["b2"] += g
    return grads


# wrong: accumulate: the loop of the task | yours is the mean of the parts' means
def accumulate(model, inputs, targets, size):
    parts = list(zip(inputs.split(size), targets.split(size), strict=True))
    for part_in, part_out in parts:
        (models.cross_entropy(model(part_in), part_out) / len(parts)).backward()


# wrong: accumulate: weights the parts by their sequences | each *target* counts the same (yours weights the parts by their sequences)
def accumulate(model, inputs, targets, size):
    for part_in, part_out in zip(inputs.split(size), targets.split(size), strict=True):
        (models.cross_entropy(model(part_in), part_out) * len(part_in) / len(inputs)).backward()


# wrong: accumulate: one backward at the end, over all parts | activations of 4 sequences at most
def accumulate(model, inputs, targets, size):
    loss, count = 0, (targets != -100).sum()
    for part_in, part_out in zip(inputs.split(size), targets.split(size), strict=True):
        loss = loss + models.cross_entropy(model(part_in), part_out) * (part_out != -100).sum() / count
    loss.backward()


# wrong: accumulate: scales everything that is in .grad at the end | is what was in .grad before scaled
def accumulate(model, inputs, targets, size):
    for part_in, part_out in zip(inputs.split(size), targets.split(size), strict=True):
        (models.cross_entropy(model(part_in), part_out) * (part_out != -100).sum()).backward()
    for p in model.parameters():
        p.grad /= (targets != -100).sum()


# right: accumulate: a sum in each part
def accumulate(model, inputs, targets, size):
    count = targets.ne(-100).sum().item()
    for begin in range(0, len(inputs), size):
        logits, wanted = (
            model(inputs[begin : begin + size]).flatten(0, 1),
            targets[begin : begin + size].flatten(),
        )
        (torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") / count).backward()


# right: accumulate: sequence by sequence, the share given to backward
def accumulate(model, inputs, targets, size):
    counts = (targets >= 0).sum(1)
    for row, wanted, count in zip(inputs, targets, counts, strict=True):
        loss = models.cross_entropy(model(row[None]), wanted[None])
        loss.backward((count / counts.sum()).to(loss.dtype))


# wrong: recompute: keeps the graph of the forward | only five inputs and the output are kept
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.out = block(ctx.x)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.out.backward(grad)
        return ctx.x.grad, None


# wrong: recompute: forgets the parameters | x and all parameters get a gradient
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.save_for_backward(x)
        ctx.block = block
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        return torch.autograd.grad(out, x, grad)[0], None


# wrong: recompute: one block for all calls | x and all parameters get a gradient
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.save_for_backward(x)
        Recompute.block = block
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = Recompute.block(x)
        out.backward(grad)
        return x.grad, None


# right: recompute: asks for all gradients, and adds those of the parameters
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.kept, ctx.block = x, block
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        parameters = list(ctx.block.parameters())
        with torch.enable_grad():
            x = ctx.kept.detach().clone().requires_grad_()
            first, *others = torch.autograd.grad(ctx.block(x), [x, *parameters], grad)
        for p, other in zip(parameters, others, strict=True):
            p.grad = other if p.grad is None else p.grad + other
        return first, None


# right: recompute: a dot product with the gradient that comes in
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    @torch.enable_grad()
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        x = kept.detach()
        x.requires_grad = True
        (ctx.block(x) * grad.detach()).sum().backward()
        return x.grad.detach(), None


# wrong: held-out: under no_grad, but the mean of the batches' means | mean loss of 26 sequences
def evaluate(model, loader):
    total = 0.0
    with torch.no_grad():
        for inputs, targets in loader:
            total += models.cross_entropy(model(inputs), targets).item()
    return total / len(loader)


# wrong: held-out: takes the numbers out, but records each forward | autograd keeps nothing
def evaluate(model, loader):
    parts = [(models.cross_entropy(model(inputs), targets).item(), len(inputs)) for inputs, targets in loader]
    return sum(loss * n for loss, n in parts) / sum(n for _, n in parts)


# wrong: held-out: leaves recording switched off | the modes of torch and of the model are as before
def evaluate(model, loader):
    torch.set_grad_enabled(False)
    parts = [(models.cross_entropy(model(inputs), targets).item(), len(inputs)) for inputs, targets in loader]
    return sum(loss * n for loss, n in parts) / sum(n for _, n in parts)


# right: held-out
@torch.inference_mode()
def evaluate(model, loader):
    losses = []
    for inputs, targets in loader:
        logits = model(inputs).flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none"))
    return torch.cat(losses).mean().item()
