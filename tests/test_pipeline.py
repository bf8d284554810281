"""The pipeline engine on real ranks: loss, every gradient and the weights of the dense run, all schedules."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from rankcell import models, schedules
from rankcell.parallel.pipeline import Pipeline, split_gpt

pytestmark = pytest.mark.slow

VOCAB, WIDTH, LENGTH = 29, 16, 12
TOKENS = torch.arange(400) * 7919 % VOCAB
PLANS = {**schedules.SCHEDULES, "ZB-V": schedules.zb_v}


def gpt(n_layers=4, tied=True, kind=models.GPT, **options):
    shape = {"n_heads": 2, "n_layers": n_layers, "context": LENGTH, "tied": tied, "dtype": torch.float64}
    return kind(VOCAB, WIDTH, **shape, **options)


def pipeline(model, plan, **options):
    options = {"between": (LENGTH, WIDTH)} | options
    return Pipeline(split_gpt(model, plan.n_stages), plan, models.cross_entropy, **options)


def worst_gradient(pipe, dense):
    """The largest difference of the gradients of this rank's stages from those of the dense model."""
    named = dict(dense.named_parameters(remove_duplicate=False))
    seen = {n: p for s in pipe.stages.values() for n, p in s.named_parameters()}
    return max((p.grad - named[n].grad).abs().max().item() for n, p in seen.items())


def differences(name, size, m, n_layers, options=(), tied=True, kind=models.GPT):
    """Largest difference from the dense run over three steps of 11 rows; what the pipeline held, and its names."""
    group = None if size == 4 else [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    dense, plan = gpt(n_layers, tied, kind), PLANS[name](size, m, *options)
    pipe = pipeline(gpt(n_layers, tied, kind), plan, process_group=group)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (dense, pipe)]
    worst = 0.0
    for step in range(3):
        x, y = models.batch(TOKENS, step, size=11, length=LENGTH)
        dense.zero_grad()
        pipe.zero_grad()
        expected = models.cross_entropy(dense(x), y)
        expected.backward()
        loss = pipe.step(x, y)
        assert (loss is None) == (plan.n_stages - 1 not in pipe.stages)
        worst = max(
            worst, worst_gradient(pipe, dense), 0 if loss is None else abs(loss.item() - expected.item())
        )
        for optimizer in optimizers:
            optimizer.step()
    whole, mine = dense.state_dict(), pipe.state_dict()
    return max(worst, *((v - whole[k]).abs().max().item() for k, v in mine.items())), pipe.peak, list(mine)


@pytest.mark.parametrize(
    ("name", "size", "m", "layers", "options", "how"),
    [
        ("naive", 2, 5, 4, (), {}),
        ("GPipe", 4, 8, 4, (), {}),
        ("1F1B", 4, 5, 5, (), {"tied": False}),
        ("1F1B", 2, 2, 4, (), {"kind": models.Llama}),
        ("interleaved", 4, 8, 8, (2,), {}),
        ("interleaved", 2, 7, 6, (3,), {"tied": False}),
        ("zero bubble", 4, 5, 4, (), {}),
        ("zero bubble", 2, 1, 3, (), {"kind": models.Llama, "tied": False}),
        ("ZB-V", 4, 8, 8, (), {}),
        ("ZB-V", 2, 3, 5, (), {}),
    ],
)
def test_loss_gradients_and_weights_equal_the_dense_run(four, name, size, m, layers, options, how):
    run = four.run(differences, args=(name, size, m, layers, options), kwargs=how)
    peaks = schedules.peak_in_flight(PLANS[name](size, m, *options))
    for rank, (worst, peak, _) in enumerate(run.values):
        assert worst < 1e-9 and peak == peaks[rank if size == 4 else rank // 2]
    assert {key for value in run.values for key in value[2]} == set(gpt(layers, **how).state_dict())


def test_stages_keep_parameters_and_names():
    model = gpt(n_layers=5)
    stages = split_gpt(model, 2)
    names = [set(stage.state_dict()) for stage in stages]
    assert names[0] | names[1] == set(model.state_dict()) and not names[0] & names[1]
    assert len(stages[0].blocks) == 3 and next(iter(stages[1].blocks)) is model.blocks[3]
    assert model.head.weight is model.token_embedding.weight  # the model itself is as it was
    tokens = TOKENS[:LENGTH][None]
    assert torch.equal(stages[1](stages[0](tokens)), model(tokens))
    stages[0].register_forward_hook(lambda *_: None)
    assert not stages[1]._forward_hooks and not model._forward_hooks


def test_gradients_add_up_over_steps_of_other_lengths(four):
    def run():
        dense = gpt()
        between = lambda stage, x: (*x.shape, WIDTH)
        pipe = pipeline(gpt(), schedules.zero_bubble(4, 4), between=between)
        for step, length in enumerate((LENGTH, LENGTH - 4)):  # sequences of another length, too
            x, y = models.batch(TOKENS, step, size=5, length=length)
            models.cross_entropy(dense(x), y).backward()
            pipe.step(x, y)
        return worst_gradient(pipe, dense)

    assert max(four.run(run).values) < 1e-9


def test_each_boundary_carries_each_micro_batch_once(four):
    def run():
        pipe = pipeline(gpt(tied=False), schedules.one_f_one_b(4, 6))
        pipe.step(*models.batch(TOKENS, 0, size=6, length=LENGTH))

    run = four.run(run)
    sends = [(e.rank, e.peer, e.nbytes) for e in run.events if e.op == "send"]
    each = LENGTH * WIDTH * 8
    assert sorted(sends) == sorted([(a, b, each) for a in range(4) for b in (a - 1, a + 1) if 0 <= b < 4] * 6)
    assert sum(e.op == "recv" for e in run.events) == len(sends)


# The two halves of a backward


class Watch:
    """Notes at the end of an action whether its stage has gradients."""

    def __init__(self, name, seen, pipe):
        self.name, self.seen, self.pipe = name, seen, pipe

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.seen.append((self.name, any(p.grad is not None for p in self.pipe.parameters())))


def test_weight_gradients_come_in_w_only(four):
    def run():
        seen, plan = [], schedules.zero_bubble(4, 3)
        pipe = Pipeline([deep(s) for s in range(4)], plan, F.mse_loss, between=(6,),
                        span=lambda name: Watch(name, seen, pipe))  # fmt: skip
        pipe.step(*(t.double() for t in models.regression(9, 6, 6)))
        return seen

    for rank, seen in enumerate(four.run(run).values):
        assert [name for name, _ in seen] == [str(a) for a in schedules.zero_bubble(4, 3).actions[rank]]
        first = next(i for i, (name, _) in enumerate(seen) if "W" in name)
        assert [done for _, done in seen] == [i >= first for i in range(len(seen))]


class Masked(nn.Linear):
    """A weight that is computed: pruned by a mask."""

    def forward(self, x):
        return F.linear(x, self.weight * (torch.arange(36).view(6, 6) % 3 > 0), self.bias)


def plain(seed, kind=nn.Linear):
    made = kind(6, 6, dtype=torch.float64)
    with torch.no_grad():
        for name, p in (("weight", made.weight), ("bias", made.bias)):
            p.copy_(0.4 * torch.randn(p.shape, generator=models.generator(seed, name)))
    return made


def deep(seed, kind=nn.Linear):
    return nn.Sequential(plain(seed, kind), nn.Tanh(), plain(seed + 9, kind), nn.Tanh())


STAGES = {
    "computed weights": lambda s: deep(s, Masked),
    "frozen first two": lambda s: deep(s).requires_grad_(s > 1),
    "narrowing": lambda s: nn.Linear(6 - s, 5 - s, dtype=torch.float64),
}


def unusual(kind, make):
    """Largest difference from the dense run of gradients, and of weights after three steps."""
    torch.manual_seed(0)
    dense, rank = nn.Sequential(*[STAGES[kind](s) for s in range(4)]), dist.get_rank()
    between = (lambda stage, x: (len(x), 6 - stage)) if kind == "narrowing" else (6,)
    pipe = Pipeline(copy.deepcopy([*dense]), make(4, 5), F.mse_loss, between=between)
    pairs = [*zip(pipe.stages[rank].parameters(), dense[rank].parameters(), strict=True)]
    x, y = (t.double() for t in models.regression(13, 6, 2 if kind == "narrowing" else 6))
    optimizers, worst = (
        [torch.optim.SGD([*m.parameters(), torch.zeros(1)], lr=0.1) for m in (dense, pipe)],
        0.0,
    )
    for _ in range(3):
        F.mse_loss(dense(x), y).backward()
        pipe.step(x, y)
        for pair in pairs:  # of an unused one the gradient may be zeros or none
            p, q = (torch.zeros_like(t) if t.grad is None else t.grad for t in pair)
            worst = max(worst, (p - q).abs().max().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max([worst, *((p - q).abs().max().item() for p, q in pairs)])


@pytest.mark.parametrize("make", [schedules.one_f_one_b, schedules.zero_bubble])
def test_unusual_stages_equal_the_dense_run(four, make):
    for kind in STAGES:
        assert max(four.run(unusual, args=(kind, make)).values) < 1e-12, kind
