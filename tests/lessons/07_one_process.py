"""What the notebook 07_one_process says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: gpus-and-years
check.close_to(gpus, 112 / 80, name="GPUs for 112 GB")
check.close_to(years, 8.4e22 / (989e12 * 0.4) / 365 / 86400, name="years for 8.4e22 operations")

# after: forward-by-hand
assert _, "the predictions of the model"
shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
assert shapes["up.weight"] == (32, 6) and z.shape == h.shape == (1024, 32), "as the table says"

# after: no-activation
assert _ and not torch.allclose(one_map, model(x), atol=1e-5), "one map without an activation, not with it"

# after: zero-grad
h_next = (x @ (W1 - 0.1 * dW1) + b1 - 0.1 * db1).clamp(min=0)  # one step, by hand
after_one = mse(h_next @ (W2 - 0.1 * dW2) + b2 - 0.1 * db2, y).item()
right, wrong = history["with zero_grad"], history["without"]
check.close_to([right[1], wrong[1]], [after_one] * 2, rtol=1e-5, name="loss after one step by hand")
assert 0 < sum(w < r for w, r in zip(wrong, right, strict=True)) < 30, (
    "for a few steps the wrong curve is lower"
)
assert max(wrong[-20:]) > 2 * right[-1], "in the end it is twice as high"
check.close_to(train(models.MLP(6, 32, 3), momentum=1.0), wrong, rtol=1e-5, name="with momentum 1.0")

# after: gpt-same-logits
assert len(models.text().split("\n\n")) == 2 * 22, "titles and fables"

# after: training-curves
assert [len(unseen), len(on_text)] == [9, 801], "every 100th step, and every step"
assert on_text[-1] < 1.2 and min(unseen) < 2, "it has learnt"
assert min(unseen) > unseen[5] - 0.1, "after step 500 new text gains less than 0.1"
assert sum(on_text[-50:]) < 0.85 * sum(on_text[475:525]), "while the training loss falls by over 15 %"
with torch.no_grad():
    last = models.cross_entropy(gpt(held_out[:1024].view(32, 32)), held_out[1:1025].view(32, 32)).item()
assert abs(last - unseen[-1]) < 0.2, "the last of them, asked again one step later"

# after: clock-timeline
assert [e.op for e in events] == 3 * ["forward", "loss", "backward", "step"]
for i in (0, 4, 8):
    step = events[i : i + 4]
    assert [e.start for e in step[1:]] == [e.end for e in step[:-1]], (
        "each begins where the one before it ends"
    )

# after: flops
assert mlp_flops == {"forward": 2 * 1024 * (6 * 32 + 32 * 3), "backward": 2 * 1024 * (6 * 32 + 2 * 32 * 3)}
d, length = 64, 32
per_token = 2 * 2 * (12 * d * d + 2 * length * d) + 2 * 49 * d  # two blocks and the head
assert gpt_flops == {"forward": 16 * length * per_token, "backward": 2 * 16 * length * per_token}

# after: ex1-check
for size, length, d in shapes[:3]:  # the formula that judges, and what torch counts
    block = models.Block(d, 4, 4 * d)
    counted = count_flops(block, torch.randn(size, length, d, requires_grad=True), torch.sum)
    assert counted == models.gpt_flops(0, d, size=size, length=length, n_layers=1)

# after: flop-table
assert in_block[2] == 2 * in_block[0] == 2 * 4 * 64 * 64 * 2 * inputs.numel(), (
    "the MLP, twice the four weights"
)
assert 2 * sum(in_block) + counted["GPT.head"] == gpt_flops["forward"], "two blocks and the head"

# after: six-nd
assert six_nd == 6 * sum(p.numel() for p in gpt.parameters()) * 16 * 32

# after: rates
middle = [sorted(e.end - e.start for e in events[i::4])[1] for i in (0, 2, 3)]  # of three steps
rates = [f"{n / s / 1e9:.1f}" for n, s in zip(gpt_flops.values(), middle[:2], strict=True)]
columns = list(zip(*rows, strict=True))
assert columns[:2] == [("forward", "backward", "step"), ("112", "225", "0")], "millions of FLOPs"
assert columns[2:] == [tuple(map(charts.format_seconds, middle)), (*rates, "-")], (
    "seconds, and FLOPs by seconds"
)

# after: memory-over-time
n = sum(p.numel() for p in models.GPT(49).parameters())
assert n == 105_280 and max(sample.gradients for sample in held) == 4 * n, "4 bytes of gradient for each"
kept_bytes = models.gpt_saved_bytes(49, size=4, length=32)
check.close_to(max(sample.activations for sample in held), kept_bytes, rtol=0.001, name="of 4 sequences")
phases = [sample.phase for sample in held]
second = phases.index("forward", phases.index("step"))  # where the second step begins
first, later = (max(sample.total for sample in part) for part in (held[:second], held[second:]))
assert first + 7 * n < later, "the second peak is higher by nearly the optimizer's states"
assert not any(sample.gradients for sample in held if sample.phase == "forward"), "zero_grad has freed them"

# after: kept
assert shapes == [((10, width), 10 * width * 4) for width in (6, 32, 32)], "x, z and h"

# after: bars
check.close_to(measured, formula, rtol=1e-3)  # inputs and targets of one sequence share memory: 248 bytes
sgd, adamw, adamw_8 = measured
assert sgd["optimizer"] == 0 and adamw["optimizer"] == 8 * 105_280 + 4 * len(list(gpt.parameters()))
check.close_to(adamw_8["activations"], 8 * adamw["activations"], rtol=0.01, name="activations of 8 sequences")

# after: halves
assert (plain - whole).norm() > 0.01 * whole.norm() and not torch.allclose(small, large, rtol=0.01)
by_formula = torch.cat([g.flatten() for g in (dW1.T, db1, dW2.T, db2)])
check.close_to(whole, by_formula, atol=1e-6, name="the gradient by hand")

# after: two-curves
alone, expected = models.GPT(49), []  # one process, on the half of rank 1
optimizer = torch.optim.AdamW(alone.parameters(), lr=3e-3)
for part, after in models.batches(tokens, 30, rank=1, world_size=2):
    loss = models.cross_entropy(alone(part), after)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    expected.append(loss.item())
check.close_to(curves["rank 1"], expected, rtol=0.01, name="rank 1, as one process on its half")
inputs, targets = models.batch(tokens, 0)  # the first batch, whole
whole = models.cross_entropy(models.GPT(49)(inputs), targets).item()
check.close_to((history[0][0] + history[1][0]) / 2, whole, rtol=1e-5, name="mean of the two first losses")
assert history[0][0] != history[1][0] and (run.values[0] - run.values[1]).abs().max() > 1e-3

# after: loader
assert [len(inputs) for inputs in seen] == 10 * [300, 300, 300, 124]
first, second = torch.cat(seen[:4]), torch.cat(seen[4:8])  # what two epochs took
assert torch.equal(first[first[:, 0].argsort()], x[x[:, 0].argsort()]), "each sample once"
assert not torch.equal(first, second), "another order in the second epoch"
again = models.MLP(6, 32, 3)  # the same batches, and the steps written out
for inputs, noted in zip(seen, history, strict=True):
    loss = mse(again(inputs), y[(inputs[:, None] == x).all(2).int().argmax(1)])
    assert abs(loss.item() - noted) < 1e-3
    slopes = torch.autograd.grad(loss, [*again.parameters()])
    with torch.no_grad():
        for p, slope in zip(again.parameters(), slopes, strict=True):
            p -= 0.1 * slope

# after: noise-predicted
check.close_to([*noise.values()], [*predicted.values()], rtol=0.1, name="distance from the true gradient")
check.close_to(true, gradient(range(1024)), atol=1e-12, name="the mean of all, and the gradient of all")

# after: profile-table
weights, attention = ("aten::addmm", "aten::mm"), ("aten::bmm",)
for rank in (0, 1):
    calls = [sum(seen[rank][name][0] for name in names) for names in (weights, attention)]
    assert calls == [3 * 13, 3 * 4], "products with a weight, and in attention"
    assert sum(seen[rank][name][2] for name in weights + attention) == sum(gpt_flops.values()), "their FLOPs"
for name, calls, _, flops in rows:
    assert (calls, flops) == (str(seen[0][name][0]), f"{seen[0][name][2] / 10**6:.0f}"), "in the table, too"

# after: gpu-parts
kind = {"d_model": 1024, "n_layers": 12, "n_heads": 16}
check.close_to(
    states, 6 * models.gpt_parameters(32_000, context=1024, **kind) / 1e9, rtol=0.01, name="GB of states"
)
per_token = sum(models.gpt_flops(32_000, size=8, length=1024, **kind).values()) / (8 * 1024)
by_products = per_token * seen[f"tokens per second, {size}"]
check.close_to(mfu * 989e12, by_products, rtol=0.02, name="model FLOP/s, by products and tokens per second")
of_blocks = 2 * 12 * 8 * 1024 * (16 * 1024 + 16 * 1024 + 4) / 1e9  # exercise 4: 16d + heads x length + 4
logits = 8 * 1024 * 32_000 * 2 / 1e9
check.close_to(saved - of_blocks, logits, rtol=0.1, name="GB kept: beside blocks, logits")
assert 3 * states < peak and 0.6 * peak < saved < 0.9 * peak, "most of the peak is what autograd keeps"
assert 0.8 * mfu < six_nd / 989 < mfu, "by 6ND a little less"

# wrong: ex1-solution: asks the library | derive the FLOPs from the block
def block_flops(size, length, d):
    return models.gpt_flops(0, d, size=size, length=length, n_layers=1)

# wrong: ex1-solution: only a multiplication for each term | size 2, length 8, d = 16
def block_flops(size, length, d):
    forward = size * length * (12 * d * d + 2 * length * d)
    return {"forward": forward, "backward": 2 * forward}

# right: ex1-solution
def block_flops(size, length, d):
    shapes = [(length, d, d)] * 4 + [
        (length, d, length),
        (length, length, d),
        (length, d, 4 * d),
        (length, 4 * d, d),
    ]
    forward = sum(2 * size * n * k * m for n, k, m in shapes)
    return {"backward": forward * 2, "forward": forward}

def even_length(d):
    return (4 * d * d) / (2 * d)

# wrong: ex2-solution: asks autograd | autograd records your forward
def repaired(x, y, W1, b1, W2, b2):
    x, W1, b1, W2, b2 = parts = [p.clone().requires_grad_() for p in (x, W1, b1, W2, b2)]
    loss = mse(torch.nn.functional.gelu(x @ W1 + b1) @ W2 + b2, y)
    torch.autograd.backward(loss)
    names = ("x", "up.weight", "up.bias", "down.weight", "down.bias")
    return {name: p.grad.T if "weight" in name else p.grad for name, p in zip(names, parts, strict=True)}

# wrong: ex2-solution: divides by the numbers of the lesson's batch | 7 samples with 2 outputs:
def repaired(x, y, W1, b1, W2, b2):
    z = x @ W1 + b1
    normal, density = (1 + torch.erf(z / 2**0.5)) / 2, (-(z**2) / 2).exp() / (2 * torch.pi) ** 0.5
    h = z * normal
    g = 2 / 3072 * (h @ W2 + b2 - y)
    dz = (g @ W2.T) * (normal + z * density)
    grads = {"up.weight": dz.T @ x, "up.bias": dz.sum(0), "down.weight": g.T @ h, "down.bias": g.sum(0)}
    return grads | {"x": dz @ W1.T}

# right: ex2-solution
def repaired(x, y, W1, b1, W2, b2):
    z = x.mm(W1).add(b1)
    normal = torch.special.ndtr(z)
    h, slope = z * normal, normal + z * torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    g = (h.mm(W2).add(b2) - y) / (y.numel() / 2)
    dz = torch.einsum("bo,ho->bh", g, W2) * slope
    grads = {"x": torch.einsum("bh,ih->bi", dz, W1), "up.weight": torch.einsum("bi,bh->hi", x, dz)}
    return grads | {
        "down.weight": torch.einsum("bh,bo->oh", h, g),
        "up.bias": dz.sum(0),
        "down.bias": g.sum(0),
    }

def half_is_right(samples, outputs):
    return (samples, outputs) in ((1, 2), (2, 1))

# wrong: ex3-solution: one backward over everything | the forwards took [16] sequences; the parts are [10, 5, 1]
def accumulate(model, inputs, targets, sizes):
    models.cross_entropy(model(inputs), targets).backward()

# wrong: ex3-solution: the mean of the parts' means | gradients, in parts of [10, 5, 1]
def accumulate(model, inputs, targets, sizes):
    for part_in, part_out in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        (models.cross_entropy(model(part_in), part_out) / len(sizes)).backward()

# wrong: ex3-solution: one backward at the end, over all parts | activations of 16.0 sequences; 10 do
def accumulate(model, inputs, targets, sizes):
    loss = 0
    for part_in, part_out in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        loss = loss + models.cross_entropy(model(part_in), part_out) * len(part_in) / len(inputs)
    loss.backward()

# right: ex3-solution
def accumulate(model, inputs, targets, sizes):
    begin = 0
    for size in sizes:
        rows = slice(begin, begin + size)
        loss = models.cross_entropy(model(inputs[rows]), targets[rows])
        loss.backward(torch.tensor(size / len(inputs), dtype=loss.dtype))
        begin += size

# wrong: ex4-solution: the mask in four bytes | size 1, length 8, d = 16, 2 heads: 8,896 bytes
def block_bytes(size, length, d, n_heads):
    return 4 * size * length * (16 * d + n_heads * length + 4) + 4 * length**2

# wrong: ex4-solution: measures a block | derive the bytes
def block_bytes(size, length, d, n_heads):
    found, _ = kept(models.Block(d, n_heads, 4 * d), torch.randn(size, length, d, requires_grad=True))
    return sum(nbytes for _, nbytes in found)

# wrong: ex4-solution: two heads, whatever comes | size 4, length 32, d = 64, 4 heads
def block_bytes(size, length, d, n_heads):
    return 4 * size * length * (16 * d + 2 * length + 4) + length**2

# right: ex4-solution
def block_bytes(size, length, d, n_heads):
    tokens = size * length
    floats = [tokens * d] * 8 + [2 * tokens] * 2 + [size * n_heads * length * length] + [tokens * 4 * d] * 2
    return 4 * sum(floats) + length * length

# wrong: ex5-solution: under no_grad, but the mean of the batches' means | mean loss of 26 sequences
def evaluate(model, loader):
    total = 0.0
    with torch.no_grad():
        for inputs, targets in loader:
            total += models.cross_entropy(model(inputs), targets).item()
    return total / len(loader)

# wrong: ex5-solution: takes the numbers out, but records each forward | 26 sequences: autograd keeps
def evaluate(model, loader):
    parts = [(models.cross_entropy(model(inputs), targets).item(), len(inputs)) for inputs, targets in loader]
    return sum(loss * n for loss, n in parts) / sum(n for _, n in parts)

# wrong: ex5-solution: leaves recording switched off | the model cannot be trained as before
def evaluate(model, loader):
    torch.set_grad_enabled(False)
    parts = [(models.cross_entropy(model(inputs), targets).item(), len(inputs)) for inputs, targets in loader]
    return sum(loss * n for loss, n in parts) / sum(n for _, n in parts)

# right: ex5-solution
@torch.inference_mode()
def evaluate(model, loader):
    losses = []
    for inputs, targets in loader:
        logits = model(inputs).flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none"))
    return torch.cat(losses).mean().item()

# wrong: ex6-solution: the two numbers of the text | GB and days of plan(70000000000.0
def plan(parameters, tokens, gpus, *, share=0.4, peak=989e12):
    return 1.75, 38.4

# wrong: ex6-solution: the forward only | 1 of 2 numbers differs
def plan(parameters, tokens, gpus, *, share=0.4, peak=989e12):
    return 16 * parameters / gpus / 1e9, 2 * parameters * tokens / (gpus * share * peak) / 86400
