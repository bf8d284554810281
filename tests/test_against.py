"""`rankcell.trace` and `check.against`: sharded layouts, what is said, what a trace holds; see test_silent_bugs.py."""

import pytest
import torch
from torch import nn

import rankcell
from rankcell import RankError, check
from rankcell.compare.blame import first_wrong
from rankcell.compare.comparison import Row
from rankcell.compare.judge import NothingToCompare
from rankcell.compare.trace import Trace, TraceTooLarge
from rankcell.compare.wording import said

COMMON = """
import math
import torch
from torch import nn
from torch.nn import functional as F
from torch.distributed.device_mesh import init_device_mesh
import rankcell
from rankcell.models import GPT, MLP, Llama, generator
from rankcell.parallel import context, ddp, pipeline, transformer
from rankcell.schedules import interleaved

x, y = (torch.randint(0, 49, (8, 8), generator=generator(0, name)) for name in "xy")
gpt = lambda **options: GPT(49, 32, **({"context": 8} | options))
cross_entropy = lambda logits, y, **how: F.cross_entropy(logits.flatten(0, -2), y.flatten(), **how)
own = lambda: cross_entropy(model(x[rank::4]), y[rank::4]).backward()
adam = lambda: torch.optim.AdamW(model.parameters(), 1e-3)
whole = lambda: cross_entropy(model(x), y).backward()
"""
exec(COMMON, HERE := {})


def dense(make="gpt()", steps=2):
    """The trace of steps with AdamW in one process."""
    space = HERE.copy()
    exec(f"{COMMON}\nmodel = {make}\noptimizer = adam()", space)
    with rankcell.trace(space["model"]) as one:
        for _ in range(steps):
            space["optimizer"].zero_grad()
            space["whole"]()
            space["optimizer"].step()
    return one


STEPS = """
optimizer = adam()
with rankcell.trace(model):
    for _ in range(COUNT):
        optimizer.zero_grad()
        backward()
        optimizer.step()
"""


def compared(four, source, one=None, steps=1, **options):
    """The verdict on a cell that defines `model` and `backward`, or traces by itself."""
    traces = "rankcell.trace" in source
    run = four.run(COMMON + source + ("" if traces else STEPS.replace("COUNT", str(steps))))
    return check.against(run, one or dense(steps=steps), **options)


RIGHT = {
    "interleaved": (
        "stages = pipeline.split_gpt(gpt(n_layers=8), 8)\n"
        "model = pipeline.Pipeline(stages, interleaved(4, 4, 2), cross_entropy, between=(8, 32))\n"
        "backward = lambda: model.step(x, y)",
        "gpt(n_layers=8)",
        None,
    ),
    "torch's own": (
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module\n"
        "model, axes = gpt(tied=False), init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
        "for block in model.blocks:\n"
        "    plan = {'mlp.up': ColwiseParallel(), 'mlp.down': RowwiseParallel()}\n"
        "    fully_shard(parallelize_module(block, axes['tp'], plan), mesh=axes['dp'])\n"
        "fully_shard(model, mesh=axes['dp'])\n"
        "backward = lambda: cross_entropy(model(x.chunk(2)[rank // 2]), y.chunk(2)[rank // 2]).backward()",
        "gpt(tied=False)",
        {"dp": 2, "tp": 2},
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_strategy_raises_no_alarm(four, name):
    source, make, mesh = RIGHT[name]
    verdict = compared(four, source, dense(make), 2, mesh=mesh)
    assert verdict.ok, repr(verdict)
    assert {row.kind for row in verdict.rows if row.status != "skipped"} >= {"output", "grad", "parameter"}
    assert {row.step for row in verdict.rows} == {0, 1, 2}
    assert {row.kind for row in verdict._shown()} == {row.kind for row in verdict.rows}


ADD = "\n    for p in model.parameters():\n        dist.all_reduce(p.grad)"


def test_what_steps_make_of_noise_is_no_alarm(four):
    """The bias of keys has a gradient of rounding alone, of which Adam makes whole steps."""
    late = STEPS.replace(
        "with rankcell",
        "for _ in range(5):\n    optimizer.zero_grad()\n    backward()\n    optimizer.step()\nwith rankcell",
    )
    late = late.replace("COUNT", "1").replace("(model)", "(model) as one")
    signs = late.replace("adam()", "torch.optim.Rprop(model.parameters(), 1e-3)").replace(
        "range(5)", "range(1)"
    )
    for steps in (late, signs):
        exec(f"{COMMON}\nmodel, backward = gpt(), whole\n{steps}", space := {})
        source = f"model = gpt()\ndef backward():\n    own(){ADD}\n        p.grad /= 4\n{steps}"
        assert compared(four, source, space["one"]).ok
    owners = """
model, optimizer = gpt(), None
optimizer = adam()
with rankcell.trace(model):
    own()
    for i, p in enumerate(model.parameters()):
        dist.reduce(p.grad, i % 4)
        p.grad = p.grad / 4 if rank == i % 4 else None
    optimizer.step()
    for i, p in enumerate(model.parameters()):
        dist.broadcast(p.detach(), i % 4)
"""
    assert compared(four, owners, dense(steps=1)).ok, (
        "only the owner has the gradient, and all have the update"
    )


# What the verdicts say

HELD = "if rank < 2:\n    adam = lambda: torch.optim.SGD(model.parameters(), 0.0)\n"
SAYS = (
    (
        "model, backward = gpt(), own",
        "grad (0, 1, 2, 3)",
        "each rank has that of its own part of the batch (over dp): its gradients are never averaged",
    ),
    (
        f"model = gpt()\ndef backward():\n    own(){ADD}",
        "grad (0, 1, 2, 3)",
        "4 times the dense gradient on ranks 0-3: a sum over dp where a mean is meant",
    ),
    (
        f"model, backward = gpt(), whole\n{HELD}",
        "parameter (0, 1)",
        "ranks 0, 1 hold older weights than ranks 2, 3: no update reached them",
    ),
    (
        "model, backward = gpt(seed=int(rank == 3)), own",
        "parameter (3,)",
        "rank 3: other weights than one process has, before anything is computed",
    ),
    (
        "model, backward = gpt(), own\nif rank == 1:\n    model.norm.weight.data[3] = math.nan",
        "parameter (1,)",
        "`norm.weight`: rank 1: other weights than one process has",
    ),
    (
        "model, backward = gpt(), whole\nadam = lambda: torch.optim.AdamW(model.parameters(), (1 + rank // 3) * 1e-3)",
        "parameter (3,)",
        "update is 2 times it: its optimizer has another `lr` on rank 3 than in one process: 0.002, and not 0.001",
    ),
    (
        "model = gpt()\ndef backward():\n    at = slice(*((0, 4), (2, 6), (4, 8), (4, 8))[rank])\n"
        f"    cross_entropy(model(x[at]), y[at]).backward(){ADD}\n        p.grad /= 4",
        "output (0, 1, 2, 3)",
        "16 of 64 rows are on 3 ranks, others on 1: they count more",
    ),
    (
        f"model = gpt()\ndef backward():\n    own(){ADD}\n        p.grad /= 2 if rank == 1 else 4",
        "grad (1,)",
        "2 times the dense gradient on rank 1: the gradients of ranks 0, 2, 3 are right: is the loss scale the same",
    ),
)


def test_a_wrong_cell_is_told_what_is_wrong(four):
    for source, where, says in SAYS:
        verdict = compared(four, source, mesh={"dp": 4})
        assert f"{verdict.first.kind} {verdict.first.ranks}" == where and says in verdict.text
        lines = repr(verdict).split("\n")
        assert lines[0].startswith("✗") and len(lines) <= 20 and any(line.startswith(" > ") for line in lines)
        html = verdict._repr_html_()
        assert html.count("<tr") <= 14 and "font-weight:600" in html


def test_a_bias_that_is_summed_or_left_out_is_named(four):
    source = """
from rankcell.parallel.tensor import reduce_from_group
model = transformer.tensor_parallel(gpt(n_heads=4))
down = model.blocks[0].mlp.down
nn.init.normal_(down.bias, generator=generator(0, "bias"))
down.forward = lambda h: reduce_from_group(F.linear(h, down.weight, ADDED))
backward = whole
"""
    one = dense(
        "gpt(n_heads=4)\nnn.init.normal_(model.blocks[0].mlp.down.bias, generator=generator(0, 'bias'))", 1
    )
    for added, says in (
        ("down.bias", "its bias is in it 4 times"),
        ("0 * down.bias", "its bias is not in it"),
    ):
        verdict = compared(four, source.replace("ADDED", added), one)
        assert verdict.first.title == "blocks.0.mlp.down" and says in verdict.text
    assert compared(four, source.replace("ADDED", "down.bias / 4"), one).first.kind == "grad"


NET = """
import torch.distributed.nn.functional as summed
data, targets = torch.randn(8, 4, generator=generator(1, "data")), torch.randn(8, 2, generator=generator(1, "targets"))
def mine(tensor):
    return tensor.chunk(4)[rank] if dist.is_initialized() else tensor
def average(model):
    for p in model.parameters() if dist.is_initialized() else ():
        p.grad = (lambda g: dist.all_reduce(g) or g / 4)(p.grad)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(4, 2), nn.Parameter(torch.tensor(1.5))
        nn.init.normal_(self.first.weight, generator=generator(2, "first"))
        nn.init.zeros_(self.first.bias)
        self.register_buffer("seen", torch.zeros(8, 2))
    def forward(self, x):
        return self.first(x) * self.scale + 0 * self.seen.sum()
model = Net()
"""
TRAIN = """
def step():
    optimizer.zero_grad()
    F.mse_loss(model(mine(data)), mine(targets)).backward()
    average(model)
    optimizer.step()
"""


def of_net(four, source, ours="", trace="step()", net=NET):
    """The verdict on `source`, in one process and on the ranks; `ours` runs on the ranks alone, before they trace."""
    dist = torch.distributed
    exec(f"{COMMON}{net}{source}\nwith rankcell.trace(model) as one:\n    {trace}", space := {"dist": dist})
    return check.against(
        four.run(f"{COMMON}{net}{source}\n{ours}\nwith rankcell.trace(model):\n    {trace}"), space["one"]
    )


def test_what_an_optimizer_goes_by_is_named(four):
    source = f"optimizer = torch.optim.AdamW(model.parameters(), 0.1)\n{TRAIN}\nstep()"
    assert of_net(four, source).ok
    for ours, says in (
        (
            "optimizer = torch.optim.AdamW(model.parameters(), 0.1)",
            "has no `step`, `exp_avg`, `exp_avg_sq` on ranks 0-3",
        ),
        ("optimizer.state[model.first.weight]['exp_avg'] *= -rank", "has another `exp_avg` on ranks 0-3"),
        (
            "optimizer.param_groups[0]['weight_decay'] = 0.5",
            "another `weight_decay` on ranks 0-3 than in one process: 0.5",
        ),
        (
            "optimizer.register_step_post_hook(lambda *_: model.first.weight.data.neg_())",
            "does the step need the whole",
        ),
    ):
        verdict = of_net(four, source, ours)
        assert verdict.first.kind == "parameter" and says in verdict.text, verdict


def test_a_buffer_is_named_before_and_after_it_does_harm(four):
    source = f"""
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def gathered(x):
    parts = [x] if not dist.is_initialized() else summed.all_gather(x)
    return torch.cat([*parts[FIRST:], *parts[:FIRST]])
{TRAIN}
def noted():
    step()
    model.seen.copy_(gathered(model.first(mine(data)).detach()))
"""
    right, turned = (
        source.replace("FIRST", "0"),
        source.replace("[FIRST:]", "[rank:]").replace("FIRST", "rank"),
    )
    assert of_net(four, right, trace="noted()").ok
    verdict = of_net(four, f"rank = globals().get('rank', 0)\n{turned}", trace="noted()")
    says = "`seen`: this buffer has the rows of one process in another order on ranks 1-3"
    assert verdict.first.kind == "buffer" and says in verdict.text
    verdict = of_net(four, right, "model.seen[1] += rank % 2", "model(mine(data + 1))")
    assert verdict.ok, "it is multiplied by 0"
    verdict = of_net(
        four,
        right,
        "model.seen[1] += rank % 2\nmodel.forward = lambda x: model.first(x) * model.scale + model.seen[1]",
    )
    assert "buffer `seen` has other numbers on ranks 1, 3" in verdict.text


def test_each_optimizer_has_its_own_gradients_and_may_step_on_copies(four):
    two = """
optimizers = [torch.optim.SGD(m, 0.1) for m in (model.first.parameters(), [model.scale])]
def step():
    for optimizer in optimizers:  # the second has a gradient that is not averaged when the first steps
        F.mse_loss(model(mine(data)), mine(targets)).backward()
        for group in optimizer.param_groups:
            average(nn.ParameterList(group["params"]))
        optimizer.step()
        model.zero_grad()
"""
    assert of_net(four, two).ok
    copies = """
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
clip = nn.utils.clip_grad_norm_
def step():
    optimizer.zero_grad()
    F.mse_loss(model(mine(data)), mine(targets)).backward()
    average(model)
    clip(model.parameters(), 0.01)
    optimizer.step()
"""
    ours = """
copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(copies, 0.1)
def clip(parameters, most):
    for p, copy in zip(parameters, copies):
        copy.grad = p.grad.clone()
    nn.utils.clip_grad_norm_(copies, most * OWN)
optimizer.register_step_post_hook(lambda *_: [p.data.copy_(c) for p, c in zip(model.parameters(), copies)])
"""
    assert of_net(four, copies, ours.replace("OWN", "1")).ok
    verdict = of_net(four, copies, ours.replace("OWN", "(1 + rank)"))
    layouts = {r.layout for r in verdict.rows if r.name == "first.weight"}
    assert any(layout.startswith("each rank another multiple of it: ") for layout in layouts)


def test_what_is_summed_inside_the_optimizer_or_is_one_number(four):
    source = TRAIN.replace("    average(model)\n", "")
    hidden = """
class Sums:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in self.parameters]))
        self.inner = torch.optim.SGD([self.flat], lr)
    def zero_grad(self):
        model.zero_grad()
    def step(self):
        self.flat.grad = torch.cat([p.grad.flatten() for p in self.parameters])
        if dist.is_initialized():
            dist.all_reduce(self.flat.grad)
            self.flat.grad /= MEAN
        self.inner.step()
        for p, new in zip(self.parameters, self.flat.split([p.numel() for p in self.parameters])):
            p.data.copy_(new.detach().view_as(p))
optimizer = Sums(model.parameters(), 0.1)
"""
    assert of_net(four, hidden.replace("MEAN", "4") + source).ok
    verdict = of_net(four, hidden.replace("MEAN", "1") + source)
    assert "the gradient is right, and the update is 4 times it" in verdict.text
    one = f"optimizer = torch.optim.SGD(model.parameters(), 0.1)\n{source}"
    for ours, says in (
        ("model.first.requires_grad_(False)", "its gradients are never averaged"),
        (
            "model.scale.register_hook(lambda g: dist.all_reduce(g) or g)",
            "4 times the dense gradient on ranks 0-3",
        ),
    ):
        verdict = of_net(four, f"model.first.requires_grad_(False)\n{one}", ours)
        assert verdict.first.name == "scale" and says in verdict.text


def test_a_mean_over_uneven_shares_is_no_mean_of_all(four):
    source = "model.forward = lambda x: (model.first(x).sum(1)).mean()\ndef mine(x):\n    return x"
    ours = "def mine(x):\n    return x.split([1, 3, 2, 2])[rank]"
    verdict = of_net(four, source, ours, "model(mine(data))")
    assert "each rank has a mean over its own samples, and not equally many" in verdict.text


def test_weights_loaded_in_part_are_told_by_row(four):
    model = """
whole = torch.randn(16, 8, generator=generator(0, "whole"))
torch.manual_seed(7 + globals().get("rank", 0) % 2)
model = nn.Linear(*SHAPE, bias=False)
with torch.no_grad():
    model.weight[PLACES] = whole[OF_ONE]
"""
    for shape, places, of_one, says in (
        ("(8, 4)", ":", "4 * rank:4 * rank + 4", ""),
        (
            "(8, 4)",
            ":2",
            "2 * rank:2 * rank + 2",
            "of the rows of one process rank 0 has 0, 1 where 0-3 belong, rank 1 has 2, 3 where 4-7 belong",
        ),
        (
            "(8, 16)",
            ":10",
            ":10",
            "of the rows of one process ranks 0-3 have 0-9 where 0-15 belong; the rest",
        ),
        (
            "(4, 16)",
            ":, :2",
            ":, 4 * (rank % 2):4 * (rank % 2) + 2",
            "of the columns of one process ranks 0, 2 have 0, 1 where 0-3 belong, ranks 1, 3 have 4, 5 where 4-7",
        ),
        ("(8, 16)", ":0", ":0", "before anything is computed"),
    ):
        exec(
            COMMON + model.replace("SHAPE", "(8, 16)").replace("PLACES", ":").replace("OF_ONE", ":"),
            space := {},
        )
        with rankcell.trace(space["model"]) as one:
            space["model"](torch.ones(1, 8))
        source = model.replace("SHAPE", shape).replace("PLACES", places).replace("OF_ONE", of_one)
        verdict = compared(four, f"{source}with rankcell.trace(model):\n    pass", one)
        assert verdict.ok is (not says) and says in verdict.text
        assert ("was it loaded?" in verdict.text) is ("belong" in says)


TOKENS = """
ids, targets = (torch.randint(0, n, (8, 16), generator=generator(3, str(n))) for n in (5, 49))
targets[torch.rand(8, 16, generator=generator(3, "counts")) < 0.6] = -100
model = nn.Sequential(nn.Embedding(5, 16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 49))
for p in model.parameters():
    nn.init.normal_(p, 0, 0.3, generator=generator(4, str(p.shape)))
def add(ids, targets, count):
    (cross_entropy(model(ids), targets, reduction="sum") / count).backward()
"""


@pytest.mark.parametrize("samples", ("slice(4 * dp + i, 4 * dp + i + 2)", "slice(2 * dp + i // 2, None, 4)"))
def test_masked_tokens_of_parts_of_microbatches_have_their_places(four, samples):
    """Their rows are zeros, which lie anywhere."""
    exec(f"{COMMON}{TOKENS}", space := {})
    with rankcell.trace(space["model"]) as one:
        space["add"](space["ids"], space["targets"], (space["targets"] != -100).sum())
    source = f"""{TOKENS}
dp, cp = divmod(rank, 2)
with rankcell.trace(model):
    for i in (0, 2):
        mine = ({samples}, slice(8 * cp, 8 * cp + 8))
        add(ids[mine], targets[mine], COUNT * (targets != -100).sum())
    for p in model.parameters():
        dist.all_reduce(p.grad)
"""
    right = compared(four, source.replace("COUNT", "1"), one, mesh={"dp": 2, "cp": 2})
    assert right.ok and {r.status for r in right.rows} == {"fits"}
    wrong = compared(four, source.replace("COUNT", "2"), one, mesh={"dp": 2, "cp": 2})
    assert "1/2 of the dense gradient on ranks 0-3" in wrong.text and "by the size of dp or cp" in wrong.text


def test_other_targets_are_told(four):
    """A cross-entropy's gradient shows them: it alone is below zero."""
    tokens = f"{TOKENS}\ntargets = (torch.arange(128) * 15 % 47).view(8, 16)\n"
    exec(f"{COMMON}{tokens}", space := {})
    with rankcell.trace(space["model"]) as one:
        space["add"](space["ids"], space["targets"], 128)
    part = "[:, 4 * rank:4 * rank + 4]"
    for given, says in (
        (f"targets{part}", ""),
        (f"targets.roll(-1, 1){part}", "that of the next position: are they shifted once more?"),
        (f"targets.roll(1, 1){part}", "that of the previous position: are they shifted at all?"),
        (
            f"torch.cat([targets{part}[:, :-1], targets{part}[:, :1]], 1)",
            "in 32 of 128 rows on ranks 0-3 the loss has not the target of one process, the last of each part",
        ),
        (f"targets{part}.roll(1, 0)", "rows on ranks 0-3 the loss has not the target of one process"),
        (
            "targets[:, 4 * (3 - rank):4 * (3 - rank) + 4]",
            "the loss has not the target of one process: rank 0 in call 1 has those of rank 3 in call 1",
        ),
    ):
        source = f"""{tokens}
with rankcell.trace(model):
    add(ids{part}, {given}, 128)
    for p in model.parameters():
        dist.all_reduce(p.grad)
"""
        verdict = compared(four, source, one)
        assert verdict.ok is (not says) and says in verdict.text


def test_columns_that_are_wrong_on_a_rank_are_named(four):
    source = f"optimizer = torch.optim.SGD(model.parameters(), 0.1)\n{TRAIN}"
    source = source.replace("mine(targets)", "mine(targets).tile(1, 4)")
    wide = NET.replace("nn.Linear(4, 2)", "nn.Linear(4, 8)").replace("torch.zeros(8, 2)", "torch.zeros(8, 8)")
    added = "lambda module, args, out: out + (torch.arange(8) < 3) * (1 + args[0][:, :1])"
    ours = f"if rank == 1: model.first.register_forward_hook({added})"
    verdict = of_net(four, source, ours, net=wide)
    assert verdict.first.ranks == (1,) and "Wrong only in columns 0-2 on rank 1" in verdict.text


def test_positions_that_are_wrong_behind_a_convolution_are_named(four):
    """Its bias is one for each channel, and its last dim are positions: of another number than there are channels."""
    net = """
images = torch.randn(2, 4, 16, generator=generator(1, "images"))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv1d(4, 8, 1), nn.Conv1d(8, 8, 1)
    def forward(self, x):
        return self.two(self.one(x).tanh())
torch.manual_seed(0)
model = Net()
step = lambda: model(images.chunk(4, 2)[rank] if dist.is_initialized() else images).square().sum().backward()
"""
    edge = "model.two.register_forward_hook(lambda m, a, out: out + a[0].mean() * (torch.arange(4) == 3))"
    verdict = of_net(four, "", f"if rank == 2: {edge}", net=net)
    assert verdict.first.title == "two" and "Wrong only in column 11 on rank 2" in verdict.text


def test_a_row_that_harms_no_gradient_is_not_blamed():
    rows = [Row("up", "grad_output", 0, "other numbers", "none", (2,))]
    rows += [Row(f"up.{name}", "grad", 0, "", "scaled", (0, 1), factor=0.5) for name in ("weight", "bias")]
    assert first_wrong(rows) == (rows[1], False)
    rows[2] = rows[2].found("none", "other numbers")
    assert first_wrong(rows) == (rows[0], False)


def test_of_many_strangers_three_are_named(four):
    source = (
        "net = gpt()\nmodel = nn.ModuleDict({'blocks': net.blocks, 'mine': gpt()})\nbackward = lambda: None"
    )
    with_many = source + "\nwith rankcell.trace(model):\n    model['blocks'][0](torch.ones(1, 2, 32))"
    (note,) = compared(four, with_many).notes
    assert note.startswith("mine.") and " more have no partner in the dense model: not compared." in note
    assert note.count("mine.") == 3


def test_a_later_step_is_named(four):
    source = """
model = gpt()
def backward():
    own()
    for p in model.parameters() if not optimizer.state else ():  # only in the first step
        dist.all_reduce(p.grad)
        p.grad /= 4
"""
    verdict = compared(four, source, steps=2)
    assert verdict.first.step == 1 and "in step 2): each rank has that of its own part" in verdict.text


def test_a_stage_is_not_blamed_for_what_it_sends_on(four):
    """What leaves a stage need not be any module's output: here it is behind a relu."""
    model = """
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
    def forward(self, h):
        return self.b(torch.relu(self.a(h)))
model, data, targets = Net(), torch.randn(8, 6), torch.arange(8) % 3
"""
    stages = """
if rank % 2 == 0:
    del model.b
    model.forward = lambda h: torch.relu(model.a(h))
else:
    del model.a
    model.forward = lambda h: model.b(h)
with rankcell.trace(model):
    if rank % 2 == 0:
        h = model(data)
        dist.send(h.detach(), rank + 1)
        dist.recv(grad := torch.empty_like(h), rank + 1)
        h.backward(grad)
    else:
        dist.recv(h := torch.empty(8, 8), rank - 1)
        (TIMES * F.cross_entropy(model(h.requires_grad_()), targets)).backward()
        dist.send(h.grad, rank - 1)
"""
    exec(f"{COMMON}{model}", space := {})
    with rankcell.trace(space["model"]) as one:
        torch.nn.functional.cross_entropy(space["model"](space["data"]), space["targets"]).backward()
    assert compared(four, model + stages.replace("TIMES", "1"), one).ok
    assert compared(four, model + stages.replace("TIMES", "2"), one).first.title == "b.bias.grad"


def test_ranks_that_part_under_dropout(four):
    """The dense model cannot be compared, but ranks with one another can."""
    source, one = (
        "torch.manual_seed(0)\nmodel, backward = gpt(dropout=0.1), whole\n",
        dense("gpt(dropout=0.1)", 1),
    )
    assert compared(four, source, one).ok
    verdict = compared(
        four, source + "adam = lambda: torch.optim.AdamW(model.parameters(), 1e-3 * (1 + rank // 2))", one
    )
    assert verdict.first.kind == "parameter" and verdict.first.ranks == (0, 2)
    assert "ranks 0 and 2 hold the same part of it, and after the step other numbers" in verdict.text


def test_in_16_bits_a_right_run_raises_no_alarm_and_a_wrong_one_is_named(four):
    """Limits are wide there: a row of an embedding is not taken for another, nor rounding for an update."""
    autocast = "def backward():\n    with torch.autocast('cpu', torch.bfloat16): logits = model(x{0})\n"
    autocast += "    cross_entropy(logits.float(), y{0}).backward()\n"
    exec(f"{COMMON}\nmodel = gpt()\n{autocast.format('')}\n", space := {})
    exec(STEPS.replace("COUNT", "2").replace("(model)", "(model) as one"), space)
    ranks = "model = ddp.DDP(gpt())\n" + autocast.format("[rank::4]")
    assert compared(four, ranks, space["one"], 2, names={"module": ""}).ok
    twice = STEPS.replace("adam()", "torch.optim.AdamW(model.parameters(), 2e-3)").replace("COUNT", "1")
    found = compared(four, ranks + twice, space["one"], names={"module": ""})
    assert "the gradient is right, and the update is 2 times it" in found.text
    other = ranks.replace("x[rank::4]", "x[rank::4] % 7")
    assert "look at what it is given" in compared(four, other, space["one"], names={"module": ""}).text


BETWEEN = """
class Sums(nn.Module):
    dim = 1
    def forward(self, h):
        return h.cumsum(self.dim)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.sums = nn.Linear(6, 8), Sums()
    def forward(self, h):
        return self.sums(self.between(self.up(h)))
    between = staticmethod(torch.relu)
torch.manual_seed(0)
model = Net()
whole = torch.randn(8, 4, 6)
h = whole.chunk(4)[rank] if torch.distributed.is_initialized() else whole
"""


def test_what_a_wrong_module_is_given_is_told(four):
    given = "What it is given"
    for ours, says in (
        ("", ""),
        (
            "model.between = lambda h: h.relu() ** 2",
            f"look at what becomes of `up` on the way to it. {given} is wrong already",
        ),
        (
            "model.between = lambda h: h.relu().flip(1)",
            f"{given} holds rows 0-7 of 32, in another order on rank 0",
        ),
        ("model.sums.forward = lambda h: h.cumsum(1) ** 2", f"look at the forward here. {given} is right"),
        (
            "h, up = whole, model.up.forward\nmodel.up.forward = lambda h: up(h).flip(1)",
            ": its rows stand in another order than in one process (3, 2, 1, 0, 7, 6,",
        ),
    ):
        verdict = of_net(four, "", ours, "model(h).square().mean()", net=BETWEEN)
        assert (says in verdict.text) and (verdict.ok or ours)


def test_rows_that_are_gathered_in_another_order_are_named(four):
    gathers = "h = whole[{}]\ndef between(h):\n    every = [torch.empty_like(h) for _ in range(4)]\n"
    gathers += "    dist.all_gather(every, h.relu())\n    return torch.cat(every)\nmodel.between = between"
    right = gathers.format("2 * rank : 2 * rank + 2")
    assert of_net(four, "Sums.dim = 0", right, "model(h).square().mean()", net=BETWEEN).ok
    verdict = of_net(four, "Sums.dim = 0", gathers.format("rank::4"), "model(h).square().mean()", net=BETWEEN)
    assert "(of `up` there are rows 0-3, 16-19 on rank 0, rows 4-7, 20-23 on rank 1," in verdict.text


def test_columns_of_a_gradient_that_are_never_summed_are_told(four):
    part = """
h = whole
class Part(torch.autograd.Function):
    forward = staticmethod(lambda ctx, h: h.clone())
    @staticmethod
    def backward(ctx, grad):
        return torch.cat([grad[..., :6], (rank + 1) / 10 * grad[..., 6:]], -1)
model.between = lambda h: Part.apply(h.relu())
"""
    verdict = of_net(four, "", part, "model(h).square().mean().backward()", net=BETWEEN)
    assert (
        "wrong only in columns 6, 7 on ranks 0-3, where they add up to it: is an all-reduce"
        in verdict.text.lower()
    )


def test_gradients_that_one_process_does_not_have_are_told(four):
    learns = "loss = lambda out: out.square().mean().backward()"
    verdict = of_net(four, "loss = torch.Tensor.sum", learns, "loss(model(h))", net=BETWEEN)
    assert "ranks 0-3 have gradients, and one process has none" in verdict.text


def test_a_clip_without_torchs_epsilon_is_right(four):
    """Torch divides by the norm and 1e-6."""
    source = (
        "optimizer = torch.optim.SGD(model.double().parameters(), 0.1)\nclip = nn.utils.clip_grad_norm_\n"
    )
    source += "data, targets = data.double(), targets.double()\n"
    source += TRAIN.replace("average(model)\n", "average(model)\n    clip([*model.parameters()], 0.01)\n")
    own = "norm = sum(p.grad.square().sum() for p in of).sqrt()\n    for p in of: p.grad *= {} / norm"
    clip = f"def clip(of, limit):\n    {own}"
    assert of_net(four, source, clip.format("limit")).ok
    assert "0.99 times the dense gradient" in of_net(four, source, clip.format("0.99 * limit")).text


def test_weights_that_were_never_written_are_told(four):
    source = f"optimizer = torch.optim.SGD(model.parameters(), 0.1)\n{TRAIN}"
    never = (
        "model.first.weight.data.add_(1)\noptimizer = torch.optim.SGD([model.scale, model.first.bias], 0.1)"
    )
    verdict = of_net(four, source, never)
    assert verdict.first.title == "first.weight" and "nor does the traced step change them" in verdict.text


def test_several_models_are_called_by_their_place():
    first, second = nn.Linear(4, 3), nn.Linear(3, 1)
    with Trace([first, second]) as trace:
        second(first(torch.ones(2, 4)))
    assert [e.name for e in trace.entries if e.kind == "output"] == ["model 0", "model 1"]
    assert {e.name for e in trace.entries if e.kind == "parameter"} == {"weight", "bias"}


def test_the_line_is_the_learners_and_names_may_differ(four):
    source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
    def forward(self, h):
        h = torch.relu(self.up(h))
        return self.down(h)
torch.manual_seed(0)
net = Net()
if rank == 2:
    net.down.forward = lambda h: 1.1 * F.linear(h, net.down.weight, net.down.bias)
model = nn.ModuleDict({"net": net})
with rankcell.trace(model) as one:
    net(torch.ones(4, 6)).sum().backward()
"""
    exec(COMMON + source.replace('nn.ModuleDict({"net": net})', "net"), space := {"rank": 0})
    verdict = compared(four, source, space["one"], names={"": "other", "net": ""})  # the longest counts
    assert verdict.first.name == "down" and verdict.first.ranks == (2,)
    assert (COMMON + source).split("\n")[verdict.first.line - 1].strip() == "return self.down(h)"
    assert f"`down` (line {verdict.first.line})" in verdict.text


def test_without_a_trace_it_says_where_one_is_made(four):
    one, traced = dense(steps=1), COMMON + "model = gpt(seed=1)\nwith rankcell.trace(model):\n    model(x)"
    run = four.run(traced)
    with pytest.raises(RankError) as failed:
        four.run(traced + "\n    assert rank != 1")
    for arguments, how, says in (
        ((four.run("1"), one), {}, "The ranks have traced nothing"),
        ((failed.value.run, one), {}, "The Run failed on rank 1. Repair that first"),
        ((run, []), {}, "no trace of one process"),
        ((run, one), {"mesh": {"dp": 2, "tp": 4}}, "has 8 places, and the Run has 4 ranks"),
        ((run, one), {"names": {"": "other"}}, "No tensor of the ranks has a name of the dense model"),
    ):
        with pytest.raises(NothingToCompare, match=says):
            check.against(*arguments, **how)


# What a trace holds


def test_tracing_changes_no_number_and_leaves_nothing_behind():
    def train(traced):
        model = HERE["gpt"](dropout=0.1)
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

        def step():
            model(HERE["x"]).square().mean().backward()
            optimizer.step()

        if traced:
            with pytest.raises(KeyError), Trace(model):
                step()
                raise KeyError
        else:
            step()
        return model

    model, other = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for module in other.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
    assert not any(p._post_accumulate_grad_hooks for p in other.parameters())
    assert not torch.nn.modules.module._global_forward_pre_hooks


class Net(nn.Module):
    """Two layers and a constant, two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2, bias=False)
        self.constant = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return self.last(self.first(x)) + self.constant, x[0]


def test_a_trace_lists_what_steps_compute_in_their_order():
    net, names = Net(), ("constant", "first.weight", "first.bias", "last.weight")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with rankcell.trace(net) as one:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(4, 3))[0].sum().backward()
            optimizer.step()
    expected = [("parameter", name, 0, 0, 0) for name in names]
    for k in (0, 1):  # a step, and a call of each module in it
        expected += [
            ("output", name, k, k, part) for name, part in (("first", 0), ("last", 0), ("", 0), ("", 1))
        ]
        expected += [("grad_output", name, k, k, 0) for name in ("", "last", "first")]  # x[0] needs none
        expected += [("grad", name, k, 0, 0) for name in ("last.weight", "first.bias", "first.weight")]
        expected += [("parameter", name, k + 1, 0, 0) for name in names]
    assert [(e.kind, e.name, e.step, e.call, e.part) for e in one.entries] == expected
    assert repr(one).startswith(
        "Trace of 3 modules: 12 parameters, 8 outputs, 6 grad_outputs, 6 grads; 0.0 MB"
    )
    before, after = (next(e for e in one.entries if e.name == "first.bias" and e.step == k) for k in (0, 1))
    gradient = next(e.value for e in one.entries if e.kind == "grad" and e.name == "first.bias")
    assert after.value == pytest.approx(
        before.value - 0.1 * gradient
    )  # copies: the last step changed no earlier one


def test_the_limit_of_a_trace_is_a_gib():
    for held in (2**30 - 1024, 2**30 - 1023):
        trace = Trace(nn.Linear(256, 1, bias=False))  # 1 KiB
        trace._nbytes = held
        if held == 2**30 - 1024:
            with trace:
                pass
            assert trace._nbytes == 2**30
        else:
            with pytest.raises(TraceTooLarge, match="1024 MiB"), trace:
                pass
    with pytest.raises(TypeError, match="needs a module"):
        rankcell.trace(3)


def test_a_gradient_that_the_loss_sends_back_wrong_asks_about_its_collectives():
    row = Row("", "grad_output", 0, "other numbers", "none", (0, 1))
    text = said(row, used_as_whole=False, past=[], holders=(), mesh={}, ranks={0, 1}).says
    assert (
        "look at the loss" in text
        and "summed again on the way back" in text
        and "send gradients back?" in text
    )


def test_gradients_that_were_lost_altogether_count_no_calls(four):
    """They are multiples of nothing: it is said without a warning of a division by zero."""
    rows = (
        "for n in range(2 * rank, 2 * rank + 2): cross_entropy(model(x[n : n + 1]), y[n : n + 1]).backward()"
    )
    zero = "for p in model.parameters(): p.grad.zero_()"
    verdict = compared(four, f"model = gpt()\ndef backward():\n    {rows}\n    {zero}")
    assert not verdict.ok and verdict.first.kind == "grad" and " counts " not in verdict.text
