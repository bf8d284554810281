"""What the notebook 15_silent_bugs says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: two-losses
alone = Net()  # the averaged training once more, in one process
optimizer = torch.optim.AdamW(alone.parameters(), lr=3e-3)
for step in range(30):
    optimizer.zero_grad()
    loss = F.mse_loss(alone(x), y)
    assert abs(loss.item() - curves["averaged"][step]) < 1e-4, (
        "the mean over the ranks is the loss of one process"
    )
    loss.backward()
    optimizer.step()
assert abs(F.mse_loss(alone(x), y).item() - on_all[0]["averaged"]) < 1e-4, "one model, the same on all ranks"
assert curves["not averaged"][-1] < curves["averaged"][-1] < curves["averaged"][0], (
    "without the average it ends lower"
)
assert all(of["averaged"] < of["not averaged"] for of in on_all), (
    "and every rank's model is worse on all eight"
)

# after: against-one
for (first, last), of in zip(run.values, histories):
    assert abs(first - of["averaged"][0]) < 1e-5 and abs(last - of["averaged"][9]) < 1e-5, (
        "as in the training above"
    )
assert right.ok and {row.kind for row in right.rows} == {"output", "grad_output", "grad", "parameter"}

# after: few-rows
layouts = {
    kind: {r.layout for r in right.rows if r.kind == kind} for kind in ("output", "grad_output", "grad")
}
assert [*layouts.values()] == [{"part of the batch"}, {"4 times it"}, {"the same on all"}], "as the text says"

# after: alone-verdict
assert not wrong.ok and (wrong.first.name, wrong.first.kind) == ("head.bias", "grad"), (
    "the head's is the first"
)
for (first, last), of in zip(run.values, histories):
    assert abs(last - of["not averaged"][9]) < 1e-5 and last < first, "as in the training above; it goes down"

# after: verdict-1
assert all(last < first for first, last in run.values), "the loss goes down"
of_all = {round(r.factor, 3) for r in case.rows if r.kind == "grad"}
assert of_all == {4.0}, "all gradients of the parameters are 4 times what they should be"

# after: verdict-2
assert all(last < first for first, last in run.values), "the loss goes down"
vectors = {name for name, p in Net().named_parameters() if p.dim() == 1}
own = {r.name for r in case.rows if r.kind == "grad" and r.layout != "the same on all"}
assert own == vectors and len(vectors) == 7, "biases and norms, and nothing else, are left out"

# after: verdict-3
one_loss = F.mse_loss(Net()(x), y).item()
assert all(last < first for first, last in run.values), "the loss goes down"
assert all(abs(first - one_loss) < 1e-5 for first, _ in run.values), "the first loss is that of one process"
assert (case.first.name, case.first.kind) == ("blocks.1.norm", "grad_output"), "found in the backward"

# after: verdict-4
assert all(last < first for first, last in run.values), "the loss goes down"
assert abs(sum(first for first, _ in run.values) / 4 - F.mse_loss(Net()(x), y).item()) < 1e-5
partial = {r.name for r in case.rows if r.kind == "grad" and r.layout.startswith("partial")}
whole = {name for name, _ in Net().named_parameters() if "norm" in name or "head" in name}
assert partial == whole, "partial: those of the norms and of the head"

# after: verdict-5
squares = norms[0][0] ** 2 + norms[1][0] ** 2 + norms[2][0] ** 2 + norms[3][0] ** 2
assert abs(squares.sqrt() / norm_of_all - 1) < 1e-4, "the parts' squares add up to that of the whole"
assert (
    abs(case.first.factor / (norm_of_all / norms[3][0]) - 1) < 1e-3 and abs(case.first.factor - 1.92) < 0.01
)
cut = [r for r in case.rows if r.kind == "grad" and "another multiple" in r.layout]
assert len(cut) == 7, "seven gradients are cut over several ranks"

# after: verdict-6
assert not case.ok and case.first.kind == "grad" and "times it" not in case.first.layout, "no multiple"
for (first, _), of in zip(run.values, histories):
    assert abs(4 * first - of["averaged"][0]) < 1e-5, "the loss that a rank shows is a quarter of its mean"

# after: verdict-7
own = [F.mse_loss(Net()(x[2 * r : min(2 * r + 2, 7)]), y[2 * r : min(2 * r + 2, 7)]).item() for r in range(4)]
assert [round(first, 4) for first, _ in run.values] == [round(loss, 4) for loss in own], (
    "2, 2, 2 and 1 samples"
)
assert case.first.name == "head" and case.first.kind == "grad_output", (
    "the gradients of the outputs are the first"
)

# after: verdict-8
assert case.first.kind == "output" and case.first.ranks == (0, 1, 2), "wrong on all ranks but the last"
assert next(r.layout for r in case.rows if (r.name, r.kind) == ("key.bias", "grad")) == "the same on all"

# after: against-dense
assert run.against.ok and len(run.against.rows) == 10 + 10 + 12 + 12, "every tensor was compared"

# after: against-case-7
assert before.against.ok, "it does not see what is wrong in the loss"

# wrong: ex1-solution: down is thought to be whole | output of down: the same on all
layouts["output of up"], layouts["output of down"] = "sharded on dim 2", "the same on all"

# wrong: ex1-solution: the weights the wrong way round | weight of up: sharded on dim 1
layouts = {
    "output of up": "sharded on dim 2",
    "output of down": "partial over ranks 0-3",
    "output of the block": "the same on all",
    "weight of up": "sharded on dim 1",
    "weight of down": "sharded on dim 0",
}

# wrong: ex2-solution: a factor of 4 only | -2 times it on three ranks is 'multiple' (yours: 'none')
def relation(pieces, whole):
    if all(p.shape == whole.shape for p in pieces):
        if all(torch.allclose(p, whole) for p in pieces):
            return "replicated"
        if any(all(torch.allclose(p, f * whole) for p in pieces) for f in (4, 0.25)):
            return "multiple"
        return "partial" if torch.allclose(sum(pieces), whole) else "none"
    joined = torch.cat(pieces)
    return "sharded" if joined.shape == whole.shape and torch.allclose(joined, whole) else "none"

# wrong: ex2-solution: never looks at the whole | the same wrong tensor on all ranks is 'none' (yours: 'multiple')
def relation(pieces, whole):
    if all(p.shape == whole.shape for p in pieces):
        if all(torch.allclose(p, whole) for p in pieces):
            return "replicated"
        if all(p.equal(pieces[0]) for p in pieces):
            return "multiple"
        return "partial" if torch.allclose(sum(pieces), whole) else "none"
    joined = torch.cat(pieces)
    return "sharded" if joined.shape == whole.shape and torch.allclose(joined, whole) else "none"

# right: ex2-solution
def relation(pieces, whole):  # asks in another order, and takes the factor from the largest number
    def alike(a, b):
        return a.shape == b.shape and torch.allclose(a, b)

    same = all(alike(p, pieces[0]) for p in pieces)
    if same and pieces[0].shape == whole.shape:
        place = whole.abs().argmax()
        factor = pieces[0].flatten()[place] / whole.flatten()[place]
        if alike(pieces[0], factor * whole):
            return "replicated" if alike(pieces[0], whole) else "multiple"
        return "none"
    if len({p.shape[1:] for p in pieces}) == 1 and alike(torch.cat(list(pieces)), whole):
        return "sharded"
    return "partial" if {p.shape for p in pieces} == {whole.shape} and alike(sum(pieces), whole) else "none"

# wrong: ex3-said: takes the factor for a missing sum | what is missing is
said = {"kind": "grad", "held": "multiple", "missing": "an all-reduce after the backward"}

# wrong: ex3-said: thinks that the outputs differ | is of the kind 'output'
said = {"kind": "output", "held": "parts", "missing": "a division"}

# wrong: ex3-solution: divides by the samples of a rank | 2 times the dense gradient
# %%ranks 4 --device cpu -o run
def repaired_1(model):
    mine = slice(2 * rank, 2 * rank + 2)
    loss = F.mse_loss(model(x[mine]), y[mine])
    loss.backward()
    sum_up(model)
    for parameter in model.parameters():
        parameter.grad /= 2
    return loss.item()

watch(Net(), repaired_1)

# wrong: ex3-solution: the whole batch on every rank | each rank computes its own two samples, and no others
# %%ranks 4 --device cpu -o run
def repaired_1(model):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.item()

watch(Net(), repaired_1)

# wrong: ex4-said: all weights' gradients are each rank's own, and nobody sums | what is missing is
said = {"kind": "grad", "held": "its own on each", "missing": "an all-reduce in the backward"}

# wrong: ex4-said: takes them for partial sums | the ranks hold it as 'partial sum'
said = {"kind": "grad", "held": "partial sum", "missing": "an all-reduce after the backward"}

# wrong: ex4-solution: one all-reduce for each gradient | one all-reduce per step, ten in all
# %%ranks 4 --device cpu -o run
def average_in_a_bucket(model):
    average(model)

watch(Net(), case_2)

# wrong: ex4-solution: averaged, and never put back | its gradients are never averaged
# %%ranks 4 --device cpu -o run
def average_in_a_bucket(model):
    bucket = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(bucket)
    bucket /= world_size

watch(Net(), case_2)

# wrong: ex5-said: looks at the weights' gradients first | is of the kind 'grad'
said = {"kind": "grad", "held": "partial sum", "missing": "an all-reduce after the backward"}

# wrong: ex5-said: looks behind the first | the ranks hold it as 'something else'
said = {"kind": "grad_output", "held": "something else", "missing": "an all-reduce in the backward"}

# wrong: ex5-solution: multiplies instead of sending | an all-reduce over ranks 0-3 is missing in the backward
# %%ranks 4 --device cpu -o run
class Repaired3(ParallelBlock):
    def forward(self, x):
        normed = self.norm(x)
        normed.register_hook(lambda gradient: gradient * world_size)
        return x + reduce_from_group(self.down(F.gelu(self.up(normed))))

watch(parallel_net(Repaired3), whole_batch)

# wrong: ex5-solution: sums the gradient that the hook gets in place | which another path needs, too
# %%ranks 4 --device cpu -o run
class Repaired3(ParallelBlock):
    def forward(self, x):
        normed = self.norm(x)
        normed.register_hook(lambda gradient: dist.all_reduce(gradient))
        return x + reduce_from_group(self.down(F.gelu(self.up(normed))))

watch(parallel_net(Repaired3), whole_batch)

# wrong: ex6-said: takes the parts of the positions for the mistake | is of the kind 'output'
said = {"kind": "output", "held": "parts", "missing": "an all-reduce in the forward"}

# wrong: ex6-said: looks for it in the backward | what is missing is
said = {"kind": "grad", "held": "partial sum", "missing": "an all-reduce in the backward"}

# wrong: ex6-solution: everything is summed, the shards as well | .grad
# %%ranks 4 --device cpu -o run
def repaired_4(model):
    last = by_position(model)
    sum_up(model)
    return last

watch(parallel_net(Case4), repaired_4)

# wrong: ex6-solution: sends the shards, too, and puts its own back | 528 bytes of gradients are summed in a step
# %%ranks 4 --device cpu -o run
def repaired_4(model):
    last = by_position(model)
    for name, parameter in model.named_parameters():
        own = parameter.grad.clone()
        dist.all_reduce(parameter.grad)
        if "up" in name or "down" in name:
            parameter.grad.copy_(own)
    return last

watch(parallel_net(Case4), repaired_4)

# right: ex6-solution
# %%ranks 4 --device cpu -o run
def repaired_4(model):  # in one bucket
    last = by_position(model)
    whole = [p.grad for name, p in model.named_parameters() if ".up" not in name and ".down" not in name]
    bucket = torch.cat([g.flatten() for g in whole])
    dist.all_reduce(bucket)
    for g, part in zip(whole, bucket.split([g.numel() for g in whole])):
        g.copy_(part.view_as(g))
    return last

watch(parallel_net(Case4), repaired_4)

# wrong: ex7-solution: norms are added, not squares | times the dense gradient
# %%ranks 4 --device cpu -o run
def whole_norm(gradients):
    norm = local_norm(gradients)
    dist.all_reduce(norm)
    return norm

watch(sharded_net(), lambda model: case_5(model, whole_norm))

# wrong: ex7-solution: one square from each rank, gathered | one all-reduce of one number per step
# %%ranks 4 --device cpu -o run
def whole_norm(gradients):
    own = local_norm(gradients).reshape(1)
    of_all = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(of_all, own)
    return torch.cat(of_all).norm()

watch(sharded_net(), lambda model: case_5(model, whole_norm))

# wrong: ex8-solution: divides by two more, and sums twice | .grad
# %%ranks 4 --device cpu -o run
def repaired_6(model):
    total = case_6(model)
    for parameter in model.parameters():
        parameter.grad /= 2
    return total

watch(Net(), repaired_6)

# wrong: ex8-solution: both samples at once | two micro-batches of one sample on each rank
# %%ranks 4 --device cpu -o run
def repaired_6(model):
    mine = slice(2 * rank, 2 * rank + 2)
    loss = F.mse_loss(model(x[mine]), y[mine]) / world_size
    loss.backward()
    sum_up(model)
    return loss.item()

watch(Net(), repaired_6)

# wrong: ex9-solution: the share without the number of ranks | dense gradient
# %%ranks 4 --device cpu -o run
def weight():
    return (min(2 * rank + 2, 7) - 2 * rank) / 7

watch(Net(), lambda model: case_7(model, weight()))

# wrong: ex9-solution: the last rank counts half, the others whole | .grad
# %%ranks 4 --device cpu -o run
def weight():
    return 0.5 if rank == 3 else 1.0

watch(Net(), lambda model: case_7(model, weight()))

# wrong: ex10-solution: one position too far | the output fits no layout
# %%ranks 4 --device cpu -o run
class Repaired8(Case8):
    def seen(self):
        return torch.ones(2, 8, dtype=torch.bool).tril(2 * rank + 1)

watch(Repaired8(), attend)

# wrong: ex10-solution: every rank attends to the whole sequence alone | of its own positions only
# %%ranks 4 --device cpu -o run
class Repaired8(Attention):
    pass

watch(Repaired8(), whole_batch)
