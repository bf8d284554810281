"""The pipeline engine on real ranks: loss, every gradient and the weights of the dense run."""

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
PLANS = {
    "naive": schedules.naive,
    "GPipe": schedules.gpipe,
    "1F1B": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
}


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
    """Largest difference from the dense run over three steps of 11 rows, and the names that the pipeline holds."""
    group = None if size == 4 else [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    dense, plan = gpt(n_layers, tied, kind), PLANS[name](size, m, *options)
    pipe = pipeline(gpt(n_layers, tied, kind), plan, process_group=group)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (dense, pipe)]
    worst = 0.0
    for step in range(3):
        x, y = models.batch(TOKENS, step, size=11, length=LENGTH)
        for optimizer in optimizers:
            optimizer.zero_grad()
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
    return max(worst, *((v - whole[k]).abs().max().item() for k, v in mine.items())), list(mine)


@pytest.mark.parametrize(
    ("name", "size", "m", "layers", "options", "how"),
    [
        ("naive", 2, 5, 4, (), {}),
        ("GPipe", 4, 8, 4, (), {}),
        ("1F1B", 4, 5, 5, (), {"tied": False}),
        ("1F1B", 2, 2, 4, (), {"kind": models.Llama}),
        ("interleaved", 4, 8, 8, (2,), {}),
        ("interleaved", 2, 7, 6, (3,), {"tied": False}),
    ],
)
def test_loss_gradients_and_weights_equal_the_dense_run(four, name, size, m, layers, options, how):
    run = four.run(differences, args=(name, size, m, layers, options), kwargs=how)
    assert max(worst for worst, _ in run.values) < 1e-9
    assert {key for _, names in run.values for key in names} == set(gpt(layers, **how).state_dict())


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


def test_gradients_add_up_over_steps(four):
    def run():
        dense, pipe = gpt(), pipeline(gpt(), schedules.one_f_one_b(4, 4))
        for step in range(2):
            x, y = models.batch(TOKENS, step, size=5, length=LENGTH)
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


def unusual():
    """Largest difference from the dense run after three steps, where all that leads to the third stage is frozen."""
    layers, rank = (
        [nn.Linear(6, 6, dtype=torch.float64).requires_grad_(s > 1) for s in range(4)],
        dist.get_rank(),
    )
    for layer in layers:
        models.initialise(layer)
    dense = nn.Sequential(*layers)
    pipe = Pipeline(copy.deepcopy(layers), schedules.one_f_one_b(4, 5), F.mse_loss, between=(6,))
    optimizers = [torch.optim.SGD([*m.parameters(), torch.zeros(1)], lr=0.1) for m in (dense, pipe)]
    x, y = (t.double() for t in models.regression(13, 6, 6))
    for _ in range(3):
        F.mse_loss(dense(x), y).backward()
        pipe.step(x, y)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(pipe.stages[rank].parameters(), layers[rank].parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def test_frozen_stages_stay_and_the_others_train(four):
    assert max(four.run(unusual).values) < 1e-12
