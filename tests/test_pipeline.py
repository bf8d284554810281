"""The pipeline engine on real ranks: loss, every gradient and the weights of the dense run, all schedules."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rankcell import models, schedules
from rankcell.parallel.pipeline import Pipeline, split_gpt, weight_jobs

pytestmark = pytest.mark.slow

VOCAB, WIDTH, LENGTH = 29, 16, 12
TOKENS = torch.arange(400) * 7919 % VOCAB


def gpt(n_layers=4, tied=True, kind=models.GPT):
    shape = dict(n_heads=2, n_layers=n_layers, context=LENGTH, tied=tied)
    return kind(VOCAB, WIDTH, **shape, dtype=torch.float64)


def a_group(size):
    """A group of `size` ranks that this rank is in; all four call it."""
    if size == 4:
        return None
    return [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]


def differences(name, size, m, n_layers, options=(), *, rows=11, tied=True, steps=3, kind=models.GPT):
    """Largest difference from the dense run: of the losses, the gradients of each step, the last weights."""
    dense, group = gpt(n_layers, tied, kind), a_group(size)
    reference = torch.optim.AdamW(dense.parameters(), lr=1e-2)
    plan = PLANS[name](size, m, *options)
    stages = split_gpt(gpt(n_layers, tied, kind), plan.n_stages)
    pipe = Pipeline(stages, plan, models.cross_entropy, between=(LENGTH, WIDTH), process_group=group)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    worst = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
    for step in range(steps):
        x, y = models.batch(TOKENS, step, size=rows, length=LENGTH)
        reference.zero_grad()
        expected = models.cross_entropy(dense(x), y)
        expected.backward()
        optimizer.zero_grad()
        loss = pipe.step(x, y)
        assert (loss is None) == (plan.n_stages - 1 not in pipe.stages)
        if loss is not None:
            worst["loss"] = max(worst["loss"], abs(loss.item() - expected.item()))
        named = dict(dense.named_parameters(remove_duplicate=False))
        seen = {n: p for s in pipe.stages.values() for n, p in s.named_parameters()}
        for key, parameter in seen.items():
            error = (parameter.grad - named[key].grad).abs().max().item()
            worst["gradient"] = max(worst["gradient"], error)
        reference.step()
        optimizer.step()
    whole = dense.state_dict()
    mine = pipe.state_dict()
    assert mine and mine.keys() <= whole.keys()
    worst["weight"] = max((value - whole[key]).abs().max().item() for key, value in mine.items())
    return worst, pipe.peak, list(mine)


ALL = [("naive", ()), ("GPipe", ()), ("1F1B", ()), ("interleaved", (2,)), ("zero bubble", ())]
ALL += [("ZB-V", ()), ("DualPipeV", ())]
PLANS = {**schedules.SCHEDULES, **schedules.V_SCHEDULES}


@pytest.mark.alike(4)
@pytest.mark.parametrize("m", [2, 5, 8])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("name", "options"), ALL, ids=[name for name, _ in ALL])
def test_loss_gradients_and_weights_are_those_of_the_dense_run(four, name, options, size, m):
    layers = 8 if options or name in schedules.V_SCHEDULES else 4
    run = four.run(differences, args=(name, size, m, layers, options))
    peaks = schedules.peak_in_flight(PLANS[name](size, m, *options))
    keys = set()
    for rank, (worst, peak, names) in enumerate(run.values):
        assert max(worst.values()) < 1e-9, worst
        assert peak == peaks[rank if size == 4 else rank // 2]
        keys |= set(names)
    assert keys == set(gpt(layers).state_dict())


@pytest.mark.parametrize(
    ("name", "m", "layers", "options"),
    [
        ("interleaved", 7, 6, (3,)),
        ("1F1B", 3, 5, ()),
        ("zero bubble", 1, 3, ()),
        ("ZB-V", 3, 5, ()),
        ("DualPipeV", 1, 5, ()),
    ],
)
def test_uneven_stages_and_a_head_of_its_own(four, name, m, layers, options):
    for worst, *_ in four.run(differences, args=(name, 2, m, layers, options), kwargs={"tied": False}).values:
        assert max(worst.values()) < 1e-9, worst


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("name", "options"), [("interleaved", (2,)), ("zero bubble", ())])
def test_a_llama_in_stages(four, name, options, tied):
    how = {"kind": models.Llama, "tied": tied}
    for worst, *_ in four.run(differences, args=(name, 2, 3, 4, options), kwargs=how).values:
        assert max(worst.values()) < 1e-9, worst


def test_stages_are_the_models_own_parts_under_their_names():
    model = gpt(n_layers=5)
    stages = split_gpt(model, 2)
    assert [type(stage) for stage in stages] == [models.GPT] * 2
    names = [set(stage.state_dict()) for stage in stages]
    assert names[0] | names[1] == set(model.state_dict()) and not names[0] & names[1]
    assert len(stages[0].blocks) == 3 and next(iter(stages[1].blocks)) is model.blocks[3]
    assert model.head.weight is model.token_embedding.weight  # the model itself is as it was
    tokens = TOKENS[:LENGTH][None]
    assert torch.equal(stages[1](stages[0](tokens)), model(tokens))
    stages[0].register_forward_hook(lambda *_: None)
    assert not stages[1]._forward_hooks and not model._forward_hooks


def one_rank(chunks):
    """A pipeline of one rank: the two copies of the tied weight live side by side."""
    groups = [dist.new_group([r]) for r in range(4)]
    dense, plan = gpt(), schedules.interleaved(1, 3, chunks)
    pipe = Pipeline(
        split_gpt(gpt(), chunks),
        schedules.schedule("by hand", [[a for j in range(3) for a in forth_and_back(j, chunks)]]),
        models.cross_entropy,
        between=(LENGTH, WIDTH),
        process_group=groups[dist.get_rank()],
    )
    assert plan.n_stages == 1 or plan.chunks == chunks
    x, y = models.batch(TOKENS, 0, size=3, length=LENGTH)
    models.cross_entropy(dense(x), y).backward()
    pipe.step(x, y)
    named = dict(dense.named_parameters(remove_duplicate=False))
    found = {n: p for s in pipe.stages.values() for n, p in s.named_parameters()}
    return max((p.grad - named[n].grad).abs().max().item() for n, p in found.items())


def forth_and_back(j, chunks):
    return [f"{s}F{j}" for s in range(chunks)] + [f"{s}B{j}" for s in reversed(range(chunks))]


@pytest.mark.parametrize("chunks", [1, 3])
def test_one_rank_is_a_pipeline_too(four, chunks):
    assert max(four.run(one_rank, args=(chunks,)).values) < 1e-9


def accumulate():
    """Two steps without an optimizer between them add their gradients, the tied one's too; with a hook."""
    dense, calls = gpt(), []
    pipe = Pipeline(
        split_gpt(gpt(), 4),
        schedules.zero_bubble(4, 4),
        models.cross_entropy,
        between=lambda stage, x: (*x.shape, WIDTH),
        on_gradients=lambda stage: calls.append((stage, all(p.grad is not None for p in pipe.parameters()))),
    )
    for step, length in enumerate((LENGTH, LENGTH - 4)):  # sequences of another length, too
        x, y = models.batch(TOKENS, step, size=5, length=length)
        models.cross_entropy(dense(x), y).backward()
        pipe.step(x, y)
    named = dict(dense.named_parameters(remove_duplicate=False))
    [stage] = pipe.stages.values()
    worst = max((p.grad - named[n].grad).abs().max().item() for n, p in stage.named_parameters())
    return worst, calls


def test_gradients_add_up_over_steps_and_the_hook_is_called_when_they_are_complete(four):
    for rank, (worst, calls) in enumerate(four.run(accumulate).values):
        assert worst < 1e-9
        assert calls == [(rank, True)] * 2


class Scale(torch.autograd.Function):
    """x * w, with the weight's gradient put off where the engine asks for it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.jobs = weight_jobs()
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        if ctx.jobs is None:
            return grad * w, (grad * x).sum(0)
        ctx.jobs.append(lambda: torch.autograd.backward(w, (grad * x).sum(0)))
        return grad * w, None


class Layer(nn.Module):
    def __init__(self, seed, frozen=False):
        super().__init__()
        self.w = nn.Parameter(1 + 0.1 * torch.randn(6, generator=models.generator(seed), dtype=torch.float64))
        self.linear = models.initialise(nn.Linear(6, 6, dtype=torch.float64), seed=seed)
        self.linear.weight.requires_grad_(not frozen)

    def forward(self, x):
        return Scale.apply(torch.tanh(self.linear(x)), self.w)


def halves():
    """Which gradients exist after each action of a zero-bubble schedule, and the difference from dense."""
    layers = [Layer(s, frozen=s == 1) for s in range(4)]
    dense = nn.Sequential(*[Layer(s, frozen=s == 1) for s in range(4)])
    x, y = (t.double() for t in models.regression(9, 6, 6))
    F.mse_loss(dense(x), y).backward()
    plan, seen = schedules.zero_bubble(4, 3), []
    pipe = Pipeline(layers, plan, F.mse_loss, between=(6,), span=lambda name: Watch(name, seen, pipe))
    loss = pipe.step(x, y)
    rank = dist.get_rank()
    ours, theirs = pipe.stages[rank], dense[rank]
    worst = max(
        (p.grad - q.grad).abs().max().item()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
        if q.grad is not None
    )
    return worst, seen, (ours.linear.weight.grad is None) == (rank == 1), loss is not None


class Watch:
    def __init__(self, name, seen, pipe):
        self.name, self.seen, self.pipe = name, seen, pipe

    def __enter__(self):
        return self

    def __exit__(self, *error):
        done = [any(p.grad is not None for p in s.parameters()) for s in self.pipe.stages.values()]
        self.seen.append((self.name, *done))


def test_weights_get_their_gradients_in_w_and_not_in_i(four):
    for rank, (worst, seen, frozen, has_loss) in enumerate(four.run(halves).values):
        assert worst < 1e-12 and frozen and has_loss == (rank == 3)
        assert [name for name, _ in seen] == [str(a) for a in schedules.zero_bubble(4, 3).actions[rank]]
        first = next(i for i, (name, _) in enumerate(seen) if "W" in name)
        assert [done for _, done in seen] == [i >= first for i in range(len(seen))]


def messages():
    """What 1F1B sends: from the recorder."""
    pipe = Pipeline(
        split_gpt(gpt(tied=False), 4),
        schedules.one_f_one_b(4, 6),
        models.cross_entropy,
        between=(LENGTH, WIDTH),
    )
    pipe.step(*models.batch(TOKENS, 0, size=6, length=LENGTH))


def test_each_boundary_carries_each_micro_batch_once_each_way(four):
    run = four.run(messages)
    sends = [(e.rank, e.peer, e.nbytes) for e in run.events if e.op == "send"]
    each = LENGTH * WIDTH * 8
    expected = [(r, r + 1, each) for r in range(3)] + [(r + 1, r, each) for r in range(3)]
    assert sorted(sends) == sorted(expected * 6)
    assert sum(e.op == "recv" for e in run.events) == len(sends)


def mistakes():
    """The sentences of the errors that one rank can make by itself."""
    found = []
    plan, parts = schedules.gpipe(4, 4), split_gpt(gpt(), 4)
    x, y = models.batch(TOKENS, 0, size=3, length=LENGTH)

    def attempt(call):
        try:
            call()
        except ValueError as error:
            found.append(str(error))

    pipe = lambda stages, plan=plan: Pipeline(stages, plan, models.cross_entropy, between=(LENGTH, WIDTH))
    attempt(lambda: pipe(parts, schedules.gpipe(2, 4)))
    attempt(lambda: pipe(parts[:3]))
    attempt(lambda: pipe({7: parts[0]}))
    attempt(lambda: pipe(parts).step(x, y))
    attempt(lambda: split_gpt(gpt(), 5))
    return found


def test_messages_of_errors(four):
    said = four.run(mistakes).values[0]
    assert said[0] == (
        "The schedule is for 2 ranks, and the process group has 4. Make one of them fit the other."
    )
    assert said[1].startswith("The schedule has 4 stages, and 3 modules came.")
    assert said[2] == "Rank 0 runs the stages [0] and got [7]."
    assert said[3].startswith("3 inputs and 3 targets cannot be cut into 4 micro-batches.")
    assert said[4] == "4 blocks cannot be cut into 5 stages. Choose from 1 to 4."


def wrong_shape():
    pipe = Pipeline(split_gpt(gpt(), 4), schedules.gpipe(4, 1), models.cross_entropy, between=(LENGTH, 8))
    pipe.step(*models.batch(TOKENS, 0, size=2, length=LENGTH))


def test_a_stage_whose_output_has_another_shape_is_named(four):
    from rankcell import RankError

    with pytest.raises(RankError, match=r"0F0 computed torch.float64 \(2, 12, 16\), and stage 1 expects"):
        four.run(wrong_shape)


# Stages that are not a plain stack of layers


class Masked(nn.Linear):
    """A weight that is computed: pruned by a mask, and used a second time outside of F.linear."""

    def forward(self, x):
        weight = self.weight * (torch.arange(36).view(6, 6) % 3 > 0)
        return F.linear(x, weight, self.bias) + 0.1 * x @ weight


class LoRA(nn.Linear):
    """A frozen weight with a merged update of rank 2, used twice."""

    def __init__(self, seed):
        super().__init__(6, 6, dtype=torch.float64)
        models.initialise(self, seed=seed).requires_grad_(False)
        numbers = torch.randn(2, 2, 6, generator=models.generator(seed, "update"), dtype=torch.float64)
        self.a, self.b = (nn.Parameter(part.clone()) for part in 0.3 * numbers)

    def forward(self, x):
        weight = self.weight + self.b.T @ self.a
        return F.linear(torch.tanh(F.linear(x, weight)), weight, self.bias)


class Gated(nn.Linear):
    """A weight that depends on what arrives: its gradient is part of the gradient of the input."""

    def forward(self, x):
        return F.linear(x, self.weight * torch.sigmoid(x.mean(0)))


class Gram(nn.Linear):
    """What arrives, or comes out of another layer, in the place of a weight."""

    def forward(self, x):
        hidden = super().forward(x)
        return F.linear(F.linear(x, hidden), hidden.T)


class Vector(nn.Linear):
    """A layer on a vector without samples."""

    def forward(self, x):
        return torch.tanh(super().forward(x)) + super().forward(self.bias)


def plain(seed, kind=nn.Linear):
    return models.initialise(kind(6, 6, dtype=torch.float64), seed=seed)


class Recompute(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Cut(nn.Module):
    """The gradient ends here, and nothing can be trained."""

    def forward(self, x):
        return x.detach() * 2


def weight_norm(seed):
    return nn.utils.parametrizations.weight_norm(plain(seed))


def deep(seed, kind=nn.Linear):
    return nn.Sequential(plain(seed, kind), nn.Tanh(), plain(seed + 9, kind), nn.Tanh())


KINDS = {
    "weight_norm": lambda s: nn.Sequential(weight_norm(s), nn.Tanh()),
    "mask": lambda s: plain(s, Masked),
    "merged LoRA": LoRA,
    "weight of the input": lambda s: plain(s, Gated),
    "input as weight": lambda s: plain(s, Gram),
    "vector": lambda s: plain(s, Vector),
    "checkpoint": lambda s: Recompute(deep(s), False),
    "reentrant checkpoint": lambda s: Recompute(deep(s), True) if s else deep(s),  # tokens need no gradient
    "checkpoint of a mask": lambda s: Recompute(deep(s, Masked), False),
    "checkpoint of weight_norm": lambda s: nn.Sequential(Recompute(weight_norm(s), False), nn.Tanh()),
    "frozen first": lambda s: deep(s).requires_grad_(s > 0),
    "frozen first two": lambda s: deep(s).requires_grad_(s > 1),
    "first without parameters": lambda s: deep(s) if s else nn.Tanh(),
    "gradient ends at stage 2": lambda s: Cut() if s == 2 else deep(s),
}


def apart(ours, theirs):
    """The largest difference of two gradients, of which none or both may be missing."""
    if ours is None or theirs is None:  # a frozen weight has none; an unused one may have zeros
        return max(0.0 if g is None else g.abs().max().item() for g in (ours, theirs))
    return (ours - theirs).abs().max().item()


def unusual(kind, make):
    """Largest difference from the dense run, one micro-batch after the other, of three steps of AdamW:
    gradients, and weights at the end.
    """
    dense, plan = nn.Sequential(*[KINDS[kind](s) for s in range(4)]), make(4, 5)
    parts = [KINDS[kind](s) for s in range(4)]
    pipe = Pipeline(parts, plan, F.mse_loss, between=(6,), dtype=torch.float64)
    pairs = [(dense, dense[dist.get_rank()]), (pipe, pipe.stages[dist.get_rank()])]
    # where the gradient ends the dense model has none and the stages before get zeros, which would decay
    how = {"lr": 1e-2, "weight_decay": 0.0 if kind.startswith("gradient ends") else 0.01}
    optimizers = [torch.optim.AdamW([*m.parameters(), torch.zeros(1)], **how) for m, _ in pairs]
    x, y = (t.double() for t in models.regression(13, 6, 6))
    worst = 0.0
    for _ in range(3):
        for part, target in zip(x.tensor_split(5), y.tensor_split(5), strict=True):
            (F.mse_loss(dense(part), target) * len(part) / len(x)).backward()
        pipe.step(x, y)
        mine = zip(pairs[1][1].parameters(), pairs[0][1].parameters(), strict=True)
        worst = max([worst, *(apart(p.grad, q.grad) for p, q in mine)])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    mine = zip(pairs[1][1].parameters(), pairs[0][1].parameters(), strict=True)
    return max([worst, *(apart(p.detach(), q.detach()) for p, q in mine)])


@pytest.mark.parametrize("make", [schedules.one_f_one_b, schedules.zero_bubble])
@pytest.mark.parametrize("kind", KINDS)
def test_unusual_stages_get_the_gradients_of_the_dense_run(four, kind, make):
    assert max(four.run(unusual, args=(kind, make)).values) < 1e-12


def narrowing(make):
    """Largest difference of gradients from the dense run: each stage sends on one number less than it gets."""
    rank = dist.get_rank()
    dense = nn.Sequential(*[models.initialise(nn.Linear(n, n - 1), seed=n).double() for n in (6, 5, 4, 3)])
    between = lambda stage, inputs: (len(inputs), 6 - stage)
    pipe = Pipeline(copy.deepcopy([*dense]), make(4, 5), F.mse_loss, between=between, dtype=torch.float64)
    x, y = (t.double() for t in models.regression(10, 6, 2))
    F.mse_loss(dense(x), y).backward()
    pipe.step(x, y)
    mine = zip(pipe.stages[rank].parameters(), dense[rank].parameters(), strict=True)
    return max(apart(p.grad, q.grad) for p, q in mine)


@pytest.mark.parametrize("make", [schedules.one_f_one_b, schedules.zero_bubble])
def test_stages_that_pass_on_different_shapes(four, make):
    assert max(four.run(narrowing, args=(make,)).values) < 1e-12


class Two(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


def refused(kind):
    """What a rank says to a stage that gives a tuple, or to a step without gradients."""
    stages = [plain(s, Two if kind == "tuple" and s == 0 else nn.Linear) for s in range(4)]
    pipe = Pipeline(stages, schedules.gpipe(4, 2), F.mse_loss, between=(6,))
    x = torch.zeros(4, 6, dtype=torch.float64)
    if kind == "tuple" and dist.get_rank():  # the others would wait for the first
        return ""
    try:
        with torch.set_grad_enabled(kind == "tuple"):
            pipe.step(x, x)
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def test_two_outputs_and_a_step_without_gradients_are_refused(four):
    assert four.run(refused, args=("tuple",)).values[0] == (
        "TypeError: Stage 0 gave a tuple, and a stage gives one tensor. Let it return one, for example the "
        "values joined with torch.cat."
    )
    for said in four.run(refused, args=("no_grad",)).values:
        assert said == (
            "RuntimeError: `step` finds gradients, and they are switched off here. Leave torch.no_grad, or "
            "call `evaluate`."
        )


# Evaluation


def evaluation(name, m, options):
    """Differences of loss and outputs from the dense run, whether a step before and after is undisturbed, and
    what was kept.
    """
    plan = PLANS[name](4, m, *options)
    dense = models.GPT(VOCAB, WIDTH, n_heads=2, n_layers=8, context=LENGTH, dropout=0.5, dtype=torch.float64)
    pipe = Pipeline(
        split_gpt(copy.deepcopy(dense), plan.n_stages), plan, models.cross_entropy, between=(LENGTH, WIDTH)
    )
    stage = pipe.stages[max(pipe.stages)]
    calls = []
    stage.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    dense.eval()
    worst, rows = 0.0, []
    for size in (11, 3):  # 3: fewer than micro-batches
        x, y = models.batch(TOKENS, size, size=size, length=LENGTH)
        with torch.no_grad():
            logits = dense(x)
        loss, out = pipe.evaluate(x, y), pipe.evaluate(x)
        last = plan.n_stages - 1 in pipe.stages
        assert (loss is None) == (out is None) == (not last)
        if last:
            worst = max(worst, abs(loss - models.cross_entropy(logits, y)).item())
            worst = max(worst, (out - logits).abs().max().item())
            assert not loss.requires_grad and not out.requires_grad
        rows.append(len(calls))
    quiet = all(p.grad is None for p in pipe.parameters()) and not any(calls) and stage.training
    pipe.step(x.repeat(3, 1), y.repeat(3, 1))
    return worst, rows, quiet, all(p.grad is not None for p in pipe.parameters())


@pytest.mark.parametrize(("name", "options"), ALL, ids=[name for name, _ in ALL])
def test_evaluation_gives_loss_and_outputs_of_the_dense_model_and_no_gradients(four, name, options):
    for worst, calls, quiet, trains in four.run(evaluation, args=(name, 6, options)).values:
        assert worst < 1e-12 and quiet and trains
        assert calls == [2 * 6, 2 * 6 + 2 * 3]  # the forwards of one stage, with and without targets


def bad_evaluations():
    pipe = Pipeline([nn.Linear(2, 2) for _ in range(4)], schedules.gpipe(4, 2), F.mse_loss, between=(2,))
    forwards = schedules.forward_only(pipe.schedule)
    other = Pipeline([nn.Linear(2, 2) for _ in range(4)], forwards, F.mse_loss, between=(2,))
    x, found = torch.zeros(4, 2), []
    for call in (
        lambda: pipe.evaluate(x, x[1:]),
        lambda: pipe.evaluate(x[:0]),
        lambda: other.step(x, x),
    ):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return [*found, other.evaluate(x) is not None]


def test_evaluations_that_cannot_be(four):
    for rank, said in enumerate(four.run(bad_evaluations).values):
        assert said == [
            "4 inputs cannot be evaluated with 3 targets. Give at least one input, and one target for each "
            "or none at all.",
            "0 inputs cannot be evaluated with no targets. Give at least one input, and one target for each "
            "or none at all.",
            "This schedule has forwards only, and `step` trains. Call `evaluate`, or give the pipeline a "
            "schedule with backwards.",
            rank == 3,
        ]
